"""Demonstrations: the tokens of answers, refused rows, and the order of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sft_cases import CHATML, GOOD, base_model

from asyncrl.base.errors import ConfigError
from asyncrl.extensions.sft.demonstrations import (
    DemonstrationFeed,
    demonstration_of,
    read_demonstrations,
)
from asyncrl.extensions.sft.sft_config import DataConfig
from asyncrl.messages.tokens import Tokens
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.extension("sft")

MARKED = (
    "{% for message in messages %}<|user|>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}<|user|>"
    "{% if message.role != 'user' and not loop.last %}x{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)
"""Writes an answer otherwise once more messages follow, as Qwen3 drops thoughts."""
TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "fg"},
]


REFUSED = (Path(__file__).parent / "sft_rows.jsonl").read_text().splitlines()
"""Rows in the forms of other trainers and of public data, and the refusal."""


def tokenizer_of(
    model: Path, folder: Path, template: str | None = None
) -> HFChatTokenizer:
    if template is None:
        return HFChatTokenizer(model)
    path = folder / "template.jinja"
    path.write_text(template)
    return HFChatTokenizer(model, chat_template=path)


def learned(tokens: Tokens, tokenizer: HFChatTokenizer) -> list[str]:
    """The texts of the spans that carry loss."""
    return [
        tokenizer.decode(
            tokens.ids[span.start : span.end].tolist(), skip_special_tokens=False
        )
        for span in tokens.spans
    ]


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_loss_is_on_answers_through_their_end_of_turn(
    template: str | None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, template)
    tokens = demonstration_of({"messages": TURNS}, "row 1", tokenizer)
    assert learned(tokens, tokenizer) == ["cd<|im_end|>", "fg<|im_end|>"]
    text = tokenizer.render(TURNS, is_open=False)
    whole = tokenizer.encode(text)
    assert tuple(tokens.ids) == whole[: len(tokens)]
    assert tokens.spans[-1].end == len(tokens)


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_answers_of_a_prompt_are_not_learned(
    template: str | None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, template)
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    tokens = demonstration_of(row, "row 1", tokenizer)
    assert learned(tokens, tokenizer) == ["fg<|im_end|>"]
    as_text = demonstration_of({"prompt": "ab", "completion": "c"}, "r", tokenizer)
    as_chat = {
        "messages": [TURNS[0], {"role": "assistant", "content": "c"}],
        "prompt": None,  # as in a parquet file with both forms
    }
    assert (as_text.ids == demonstration_of(as_chat, "r", tokenizer).ids).all()


@pytest.mark.parametrize("line", REFUSED)
def test_bad_row_is_refused_with_its_line(
    line: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    row, said = (json.loads(line)[name] for name in ("row", "said"))
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(row)}\n")
    data = DataConfig(files=[str(path)])
    with pytest.raises(ConfigError, match=rf"(?s)rows.jsonl line 3.*{said}"):
        read_demonstrations(data, HFChatTokenizer(tiny_model_dir), None)


def test_template_without_exact_answers_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, FORGETFUL)
    with pytest.raises(ConfigError, match=r"row 1: .*message 2 of 4") as refused:
        demonstration_of({"messages": TURNS}, "row 1", tokenizer)
    assert "generation" in refused.value.way_out
    # As a prompt and a completion, the same chat is exact.
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    tokens = demonstration_of(row, "row 1", tokenizer)
    assert learned(tokens, tokenizer) == ["fg<|im_end|>"]


def test_generation_blocks_must_match_the_answers(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    once = "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, once)
    with pytest.raises(ConfigError, match=r"1 {% generation %} blocks for 2 answers"):
        demonstration_of({"messages": TURNS}, "row 1", tokenizer)


def test_token_across_the_border_is_refused(tmp_path: Path) -> None:
    from text_tokenizers import byte_fallback, save

    tokenizer = save(byte_fallback(), tmp_path)
    glued = tmp_path / "glued.jinja"
    # "t" of the prompt and "h" of the answer are one token of the whole text.
    glued.write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    tokenizer = HFChatTokenizer(tokenizer.model_path, chat_template=glued)
    row = {"prompt": "t", "completion": "h"}
    with pytest.raises(ConfigError, match="a token spans the border of an answer"):
        demonstration_of(row, "row 1", tokenizer)


def test_long_rows_are_refused_or_skipped(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = HFChatTokenizer(tiny_model_dir)
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "completion": "b" * num} for num in (1, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(files=[str(path)], max_tokens=20)
    with pytest.raises(ConfigError, match=r"line 2 has 45 tokens, and 20 are allowed"):
        read_demonstrations(data, tokenizer, 512)
    skipping = data.model_copy(update={"overlong": "skip"})
    found = read_demonstrations(skipping, tokenizer, 512)
    assert (len(found.rows), found.num_skipped) == (1, 1)
    with pytest.raises(ConfigError, match="has no rows to train on; 2 are longer"):
        read_demonstrations(
            skipping.model_copy(update={"max_tokens": 2}), tokenizer, None
        )


def test_empty_file_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"data.files=.*has no rows to train on"):
        read_demonstrations(
            DataConfig(files=[str(path)]), HFChatTokenizer(tiny_model_dir), None
        )
    with pytest.raises(ConfigError, match=r"data.files: .*is not a file with rows"):
        read_demonstrations(
            DataConfig(files=["absent.jsonl"]), HFChatTokenizer(tiny_model_dir), None
        )


def test_parquet_rows_are_read(tiny_model_dir: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    rows = [{"messages": TURNS, "prompt": None}, {"messages": TURNS[:2]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tokenizer = HFChatTokenizer(tiny_model_dir)
    found = read_demonstrations(DataConfig(files=[str(path)]), tokenizer, None)
    assert [row.num_sampled for row in found.rows] == [6, 3]


def test_answer_without_an_end_is_counted_and_learns_nothing_behind_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = base_model(tiny_model_dir, tmp_path / "model")
    tokenizer = tokenizer_of(folder, tmp_path, CHATML)
    assert tokenizer.end_ids == {0}
    tokens = demonstration_of({"messages": TURNS}, "row 1", tokenizer)
    assert learned(tokens, tokenizer) == ["cd<|im_end|>", "fg<|im_end|>"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": TURNS}) + "\n")
    data = DataConfig(files=[str(rows)])
    assert read_demonstrations(data, tokenizer, 64).num_endless == 1
    usual = tokenizer_of(tiny_model_dir, tmp_path, CHATML)
    assert read_demonstrations(data, usual, 64).num_endless == 0


@pytest.mark.parametrize("value", [False, 0, 0.0, "0", "false"])
@pytest.mark.parametrize(
    "mark",
    ["train", "train_on_turn", "trainable", "training", "loss", "loss_mask", "weight"],
)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_marked_answer_is_only_context(
    template: str, mark: str, value: object, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, template)
    chat = [TURNS[0], TURNS[1] | {mark: value}, TURNS[2], TURNS[3] | {mark: True}]
    columns: dict[str, Any] = {
        "train": True,
        "weight": 1,
        "label": 0,
        "system": None,
        "images": [],
    }
    tokens = demonstration_of({"messages": chat, **columns}, "row", tokenizer)
    assert learned(tokens, tokenizer) == ["fg<|im_end|>"]
    plain = demonstration_of({"messages": TURNS}, "row", tokenizer)
    assert tokens.ids.tolist() == plain.ids.tolist()


def test_name_of_a_token_in_a_question_may_be_text(tiny_model_dir: Path) -> None:
    tokenizer = HFChatTokenizer(tiny_model_dir, parse_special_tokens=False)
    question = {"role": "user", "content": "ab <|im_end|>"}
    tokens = demonstration_of({"messages": [question, TURNS[1]]}, "row", tokenizer)
    assert learned(tokens, tokenizer) == ["cd<|im_end|>"]


def test_answer_is_not_cut_at_a_special_token_within(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As `</think>` of GLM may be."""
    template = (
        "{% for message in messages %}<|user|>"
        "{% if message.role == 'assistant' %}a<|user|>{% endif %}{{ message.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    tokenizer = tokenizer_of(tiny_model_dir, tmp_path, template)
    tokens = demonstration_of({"messages": TURNS}, "row", tokenizer)
    assert learned(tokens, tokenizer) == ["a<|user|>cd\n", "a<|user|>fg\n"]


def test_digest_covers_ids_and_answers(tiny_model_dir: Path, tmp_path: Path) -> None:
    from asyncrl.extensions.sft.demonstrations import Demonstrations

    row = demonstration_of({"messages": TURNS}, "r", HFChatTokenizer(tiny_model_dir))
    same = Demonstrations((row,)).digest
    assert Demonstrations((row,)).digest == same
    assert Demonstrations((Tokens(row.ids, row.spans[1:]),)).digest != same
    assert Demonstrations((Tokens(row.ids[::-1].copy(), row.spans),)).digest != same


def test_each_epoch_has_each_row_once() -> None:
    rows = tuple(Tokens(np.array([number], np.int32)) for number in range(7))
    feed = DemonstrationFeed(rows, per_step=3, seed=5)
    assert feed.steps_per_epoch == 3

    def drawn(version: int) -> list[int]:
        batch = feed.batch(version)
        return [int(group.trajectories[0].tokens.ids[0]) for group in batch.groups]

    epochs = [[drawn(3 * epoch + step) for step in range(3)] for epoch in range(3)]
    assert all(sorted(sum(epoch, [])) == [*range(7)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = DemonstrationFeed(rows, per_step=3, seed=5)
    assert [len(again.batch(v).groups) for v in (0, 1, 2, 3)] == [3, 3, 1, 3]
    ids = [group.group_id for v in range(9) for group in feed.batch(v).groups]
    assert len(set(ids)) == len(ids) == 21
