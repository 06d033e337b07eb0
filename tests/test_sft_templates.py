"""Demonstrations under all templates of the oracle: transformers alone says which
tokens are learned.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
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
from asyncrl.messages.tokens import Tokens
from asyncrl.rollouts.demonstrations import demonstration_of
from asyncrl.rollouts.tokenizer import HFChatTokenizer

TEMPLATES = installed() | collected(Path(__file__).parent / "chat_templates")
ASK, SAY = user("Ask 98"), answer("It is 97.")
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


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("base", REFUSED)
def test_answer_is_learned_whole_with_one_end(
    base: str, name: str, tmp_path: Path
) -> None:
    kind = Kind(base, "", has_bos=True, has_several_ends=False)
    oracle = Oracle(TEMPLATES[name], kind, tmp_path)
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
            if named is None:
                if part := re.search("leaves out '(.*)' of message", error.what):
                    text = oracle.text(chat, tools, is_open=False).rpartition("98")[2]
                    assert part[1] not in text
                continue
            settings = {named[1]: named[2] == "true"}
            changed = HFChatTokenizer(tmp_path, chat_template_kwargs=settings)
            tokens = demonstration_of(row, title, changed)
        check_learned(oracle, chat, tools, tokens, settings)
        last = tokens.ids[tokens.spans[-1].start :].tolist()
        assert ((name, title) in ENDLESS) == set(last).isdisjoint(oracle.end_ids)


@pytest.mark.parametrize(
    ("name", "fields", "same"),
    [
        ("trl.qwen3", {"reasoning": "hm97"}, {"reasoning_content": "hm97"}),
        ("trl.qwen3", {"thinking": "hm97"}, {"reasoning_content": "hm97"}),
        ("trl.gptoss", {"reasoning": "hm97"}, {"thinking": "hm97"}),
        (
            "trl.qwen2_5",
            called(["97"]) | {"content": None, "function_call": None, "id": "7"},
            called(["97"]),
        ),
    ],
)
def test_forms_of_a_message_are_learned_alike(
    name: str, fields: dict[str, Any], same: dict[str, Any], tmp_path: Path
) -> None:
    kind = Kind("never", "", has_bos=True, has_several_ends=False)
    oracle = Oracle(TEMPLATES[name], kind, tmp_path)
    product = HFChatTokenizer(tmp_path)
    tools = TOOLS if "tool_calls" in fields else None
    ids = []
    for said, given in ((SAY | fields, json.dumps(tools)), (SAY | same, tools)):
        row = {"prompt": [ASK], "completion": [said], "tools": given}
        ids.append(demonstration_of(row, "row", product).ids.tolist())
    assert ids[0] == ids[1]
    text = oracle.text([ASK, SAY | same], tools, is_open=False)
    assert ids[0] == oracle.ids(text)[: len(ids[0])]


def test_shorter_generation_prompt_is_a_way_out(tmp_path: Path) -> None:
    """Of a prompt whose end joins the answer, or which opens a thought."""
    for name, ending in (("llama3", "\n\n"), ("deepseek_r1_distill", "<think>\\n")):
        template = TEMPLATES[f"trl.{name}"]
        head, found, tail = template.rpartition(ending)
        assert found
        kind = Kind("bytes", "", has_bos=True, has_several_ends=False)
        oracle = Oracle(head + tail, kind, tmp_path / name)
        row = {"messages": CHATS["plain"]}
        tokens = demonstration_of(row, "row", HFChatTokenizer(tmp_path / name))
        check_learned(oracle, CHATS["plain"], None, tokens, {})
