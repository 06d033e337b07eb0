"""The text of an answer while its tokens come in: however they are cut, the same text, and none that changes
later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizers import END, PYTHON, START, byte_fallback, byte_level, metaspace, save
from tiny_model import TINY_CHARACTERS
from tokenizers import Tokenizer

from asyncrl.agents.endpoint.answer_text import AnswerText
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model.scratch import make_character_tokenizer

MARKER = "<tool_call>"
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}
KINDS = [*MAKERS, "characters"]
_saved: dict[str, HFChatTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, make in MAKERS.items():
        _saved[name] = save(make(), tmp_path_factory.mktemp("tokenizer") / name, markers=(MARKER,))
    folder = tmp_path_factory.mktemp("tokenizer") / "characters"
    make_character_tokenizer(TINY_CHARACTERS).save_pretrained(folder)
    _saved["characters"] = HFChatTokenizer(folder)


def pieces(answer: AnswerText, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """What comes out when `ids` go in by lengths `cuts`, and the rest at once."""
    out, at = [], 0
    for length in cuts:
        out.append(answer.feed(ids[at : at + length]))
        at += length
    return [*out, answer.feed(ids[at:]), answer.finish()]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Read a character at a time: the first end of `text` so far that is a stop string goes, the longest of
    those that are.
    """
    for end in range(len(text) + 1):
        if found := [entry for entry in stop if entry and text[:end].endswith(entry)]:
            return text[: end - max(map(len, found))]
    return text


def whole_text(tokenizer: HFChatTokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode([token for token in ids if token not in tokenizer.end_ids])


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and some that the vocabulary does not have; often the single bytes of characters, whole or
    broken off.
    """
    tokenizer = _saved[name]
    top = max(tokenizer.text_ids) + 5
    texts = st.sampled_from(
        [
            "\U0001f600",
            "\U000110ff",
            "\u20ac",
            "the",
            " fox",
            "\n",
            " ",
            "  ",
            MARKER,
            END,
            START,
            PYTHON,
            "\ufffd",
            "e",
            "ab",
        ]
    )
    encoded = st.builds(
        lambda text, cut: list(tokenizer.encode(text))[: cut or None], texts, st.integers(0, 3)
    )
    return st.lists(encoded | st.lists(st.integers(0, top), max_size=3), max_size=25).map(
        lambda parts: sum(parts, [])
    )


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=st.lists(st.integers(0, 6), max_size=60))
def test_in_any_cuts_the_pieces_are_the_whole_text_up_to_the_first_stop_string(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = _saved[name]
    ids = data.draw(ids_of(name))
    whole = whole_text(tokenizer, ids)
    inside = st.builds(
        lambda at, length: whole[at : at + length], st.integers(0, len(whole)), st.integers(1, 5)
    )
    stop = (
        data.draw(st.lists(inside | st.sampled_from(["zz", "fox ", "\ufffd", "e"]), max_size=3))
        if data.draw(st.booleans())
        else []
    )
    answer = AnswerText(tokenizer, stop)
    expected = cut_at_stop(whole, stop)
    out = pieces(answer, ids, cuts)
    assert "".join(out) == expected
    assert answer.is_stopped == (expected != whole or any(entry and entry in whole for entry in stop))
    so_far = ""
    for piece in out:
        so_far += piece
        assert expected.startswith(so_far), "what was handed out stays"


@pytest.mark.parametrize("name", KINDS)
def test_plain_text_comes_out_with_its_token(name: str) -> None:
    tokenizer = _saved[name]
    answer = AnswerText(tokenizer)
    shown = ""
    ids = tokenizer.encode("the quick fox waits. 12")
    for index, token in enumerate(ids, 1):
        shown += answer.feed([token])
        assert shown == tokenizer.decode(ids[:index]), "nothing is held back without need"


@pytest.mark.parametrize("name", MAKERS)
def test_special_and_end_tokens_are_never_shown_but_those_that_are_asked_for(name: str) -> None:
    tokenizer = _saved[name]
    ids = [
        *tokenizer.encode(f"the{START}fox{PYTHON}"),
        *tokenizer.encode(f"{MARKER}12"),
        *tokenizer.encode(END),
    ]
    hidden = "".join(pieces(AnswerText(tokenizer), ids, [1] * len(ids)))
    assert MARKER in hidden, "added to the vocabulary, and no special token"
    assert not any(special in hidden for special in (START, PYTHON, END))
    shown = "".join(pieces(AnswerText(tokenizer, keep_special=[PYTHON, END]), ids, [1] * len(ids)))
    assert PYTHON in shown
    assert START not in shown
    cut = AnswerText(tokenizer, ["fox" + PYTHON], keep_special=[PYTHON])
    assert PYTHON not in "".join(pieces(cut, ids, [1] * len(ids)))
    assert cut.is_stopped


def test_a_token_of_plain_text_that_ends_turns_is_not_shown_either(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fox = save(byte_level(), folder).encode(" fox")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(fox)}))
    tokenizer = HFChatTokenizer(folder)
    ids = tokenizer.encode("the fox")
    assert set(fox) <= tokenizer.text_ids & tokenizer.end_ids
    assert "".join(pieces(AnswerText(tokenizer), ids, [])) == "the"


def test_a_name_that_is_no_special_token_keeps_nothing_else() -> None:
    tokenizer = _saved["characters"]
    ids = [*tokenizer.encode("a<|user|>b"), *tokenizer.encode("<unk>")]
    assert "".join(pieces(AnswerText(tokenizer, keep_special=["<|python_tag|>"]), ids, [])) == "ab"


@pytest.mark.parametrize("name", KINDS)
def test_the_work_for_a_token_does_not_grow_with_the_answer(name: str) -> None:
    class Counting:
        """Counts the tokens that are decoded."""

        def __init__(self, inner: HFChatTokenizer) -> None:
            self.inner, self.num_decoded = inner, 0
            self.end_ids, self.text_ids, self.byte_ids = inner.end_ids, inner.text_ids, inner.byte_ids

        def encode(self, text: str) -> tuple[int, ...]:
            return self.inner.encode(text)

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.num_decoded += len(token_ids)
            return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = _saved[name]
    bad = (
        tokenizer.encode("\U0001f47e")[-1:] * 400
    )  # the last byte of a character, again and again: never whole
    for ids in (tokenizer.encode("the quick fox \u20ac " * 100), bad):
        counting = Counting(tokenizer)
        "".join(pieces(AnswerText(counting, ["zz"]), ids, [1] * len(ids)))
        assert counting.num_decoded <= len(ids) * 10
