"""Demonstrations under all templates of the oracle: transformers says which
tokens are learned.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from costly_cases import every_third_is_quick
from template_oracle import (
    TOOLS,
    Chat,
    Kind,
    Oracle,
    anchor,
    answer,
    called,
    collected,
    installed,
    result,
    user,
)

from asyncrl.base.errors import ConfigError
from asyncrl.extensions.sft.demonstrations import demonstration_of
from asyncrl.messages.tokens import Tokens
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.extension("sft")

TEMPLATES = installed() | collected(Path(__file__).parent / "chat_templates")
KIND = Kind("never", "", has_bos=True, has_several_ends=False)
ASK, SAY = user("Ask 98"), answer("It is 97.")
ADD = {"name": "add", "arguments": {"a": "x97", "unit": None}}
CHATS = {
    "plain": [ASK, SAY],
    "system": [{"role": "system", "content": "Rule 5"}, ASK, SAY],
    "two answers": [ASK, SAY, user("Ask 99"), answer("It is 96.")],
    "thought": [ASK, answer("It is 97.", "hm97")],
    "inline": [ASK, answer("<think>\nhm97\n</think>\n\nIt is 97.")],
    "call": [ASK, called(["97"])],
    "result": [ASK, called(["97"]), result("97"), answer("It is 95.")],
}
SETTING = re.compile(r"chat_template_kwargs: \{(\w+): (\w+)\}")
REFUSED = {
    "never": re.compile(r"trl\.deepseek(v3|_r1_distill)"),
    "bytes": re.compile(
        r"trl\.(deepseek(v3|_r1_distill)|llama3\w*|qwen3_[568](_\w*think)?)"
    ),
}
"""By base of the tokenizer: the generation prompt opens a thought for good, or ends with
two line ends, which are one token of `bytes` only if no text follows.
"""
ENDLESS = {("no_end", title) for title in CHATS} | {
    ("trl.diffusion_gemma_training", "call")
}


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_learned(
    oracle: Oracle, chat: Chat, tools: Any, tokens: Tokens, settings: dict[str, bool]
) -> None:
    """Compare with the mask of transformers, or with the prompts of the answers."""
    ids = tokens.ids.tolist()
    if "endgeneration" in oracle.template:
        mask = oracle.assistant_mask(chat, tools)
        assert tokens.is_sampled.tolist() == [*map(bool, mask[: len(ids)])]
        assert not any(mask[len(ids) :])
        return
    places = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
    for place, span in zip(places, tokens.spans, strict=True):
        prompt = oracle.ids(oracle.text(chat[:place], tools, **settings))
        assert ids[: span.start] == prompt
        said = ids[span.start : span.end]
        last = anchor(chat[place])
        text, _, closing = oracle.fast.decode(said).rpartition(last)
        whole = squeezed(oracle.fast.decode(ids[: span.end]))
        for part in (chat[place]["content"], chat[place].get("reasoning_content", "")):
            assert squeezed(part) in whole
        assert closing in (oracle.last, oracle.closing, oracle.call) or not oracle.last
        assert not oracle.last or [token in oracle.end_ids for token in said[-1:]]
        assert sum(token in oracle.end_ids for token in said) == bool(oracle.last)


@pytest.mark.parametrize(
    ("base", "name"), every_third_is_quick(itertools.product(REFUSED, TEMPLATES))
)
def test_answer_is_learned_whole_with_one_end(
    base: str, name: str, tmp_path: Path
) -> None:
    oracle = Oracle(TEMPLATES[name], KIND._replace(base=base), tmp_path)
    product = HFChatTokenizer(tmp_path)
    for title, chat in CHATS.items():
        tools = TOOLS if any("tool_calls" in message for message in chat) else None
        row = {"messages": chat, "tools": tools}
        settings: dict[str, bool] = {}
        try:
            tokens = demonstration_of(row, title, product)
        except ConfigError as error:
            named = SETTING.search(error.way_out)
            assert title != "plain" or named or REFUSED[base].fullmatch(name)
            part = re.search("leaves out '(.*)' of message", error.what)
            if part is not None:
                text = oracle.text(chat, tools, is_open=False)
                assert part[1] not in text.rpartition("98")[2]
            if named is None:
                continue
            settings = {named[1]: named[2] == "true"}
            changed = HFChatTokenizer(tmp_path, chat_template_kwargs=settings)
            tokens = demonstration_of(row, title, changed)
        check_learned(oracle, chat, tools, tokens, settings)
        last = tokens.ids[tokens.spans[-1].start :].tolist()
        assert ((name, title) in ENDLESS) == set(last).isdisjoint(oracle.end_ids)


CALL = called(["97"])
FORMS = {
    "trl.qwen3": (
        SAY | {"reasoning_content": "hm97"},
        SAY | {"reasoning": "hm97"},
        SAY | {"thinking": "hm97", "train": 1, "annotations": [], "refusal": None},
    ),
    "trl.qwen2_5": (
        CALL,
        CALL | {"content": None, "function_call": None, "id": "7"},
        CALL | {"tool_calls": [CALL["tool_calls"][0] | {"function": ADD}]},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_an_answer_are_learned_alike(name: str, tmp_path: Path) -> None:
    oracle = Oracle(TEMPLATES[name], KIND, tmp_path)
    product = HFChatTokenizer(tmp_path)
    first, *_ = FORMS[name]
    expected = oracle.ids(oracle.text([ASK, first], TOOLS, is_open=False))
    for form in FORMS[name]:
        for tools in (TOOLS, json.dumps(TOOLS)):
            row = {"prompt": [ASK], "completion": [form], "tools": tools}
            ids = demonstration_of(row, "row", product).ids.tolist()
            # The template writes a line end behind the answer.
            assert ids == expected[:-1]


def test_shorter_generation_prompt_is_a_way_out(tmp_path: Path) -> None:
    """Of a prompt whose end joins the answer, or which opens a thought."""
    for name, ending in (("llama3", "\n\n"), ("deepseek_r1_distill", "<think>\\n")):
        template = TEMPLATES[f"trl.{name}"]
        head, found, tail = template.rpartition(ending)
        assert found
        oracle = Oracle(head + tail, KIND._replace(base="bytes"), tmp_path / name)
        row = {"messages": CHATS["plain"]}
        tokens = demonstration_of(row, "row", HFChatTokenizer(tmp_path / name))
        check_learned(oracle, CHATS["plain"], None, tokens, {})
