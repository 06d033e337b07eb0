"""Thoughts are split from a streamed answer in pieces of any length."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_cases import (
    HI,
    ByteTokenizer,
    ScriptedEngine,
    in_loop,
    talking,
)

from asyncrl.agents.endpoint.tool_formats import find_tool_format

HERMES = find_tool_format("hermes", "")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "shown"),
    [
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("\n <think>a  b</think>  ", False, "a  b", ""),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm, and", True, "Hm, and", ""),
        (f"I could {CALL}</think>Yes.", True, f"I could {CALL}", "Yes."),
        ("<think>Hm </thi", False, "Hm </thi", ""),
        ("<thi", False, "", "<thi"),
        ("  Yes. <think>no</think>", False, "", "  Yes. <think>no</think>"),
        (
            "<think>a <think> b</think>c<think>d</think>",
            False,
            "a <think> b",
            "c<think>d</think>",
        ),
    ],
)
def test_leading_thought_is_split_from_the_text(
    text: str, is_open: bool, thought: str, shown: str
) -> None:
    read = HERMES.parse(text, is_thinking=is_open, splits_thought=True)
    assert (str(read.thought), str(read.content)) == (thought, shown)


class Opening(ByteTokenizer):
    """A model whose template opens the thought."""

    def render(self, messages: Any, *, is_open: bool = True, **options: Any) -> str:
        return (
            super().render(messages, is_open=is_open, **options) + "<think>\n" * is_open
        )


@in_loop
async def test_separate_thoughts_return_to_one_branch() -> None:
    text = "Hm.\n</think>\n\nYes."
    async with talking(
        engine=ScriptedEngine(lambda _: text, tokenizer=Opening()),
        thoughts_field="reasoning_content",
    ) as talk:
        messages: list[Any] = list(HI)
        for _ in range(2):
            message = (await talk.chat(messages)).choices[0].message
            told = {
                name: getattr(message, name)
                for name in ("reasoning_content", "content")
            }
            assert told == {"reasoning_content": "Hm.", "content": "Yes."}
            messages += [
                {"role": "assistant", **told},
                {"role": "user", "content": "Sure?"},
            ]
        assert talk.is_one_branch_of(*[text] * 2)


OPEN = f"<think>\nI could {CALL}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("thoughts", ["content", "reasoning_content"])
@in_loop
async def test_call_of_an_open_thought_returns_to_one_branch(thoughts: str) -> None:
    async with talking(OPEN, thoughts_field=thoughts) as talk:
        messages: list[Any] = list(HI)
        for _ in range(2):
            choice = (await talk.chat(messages, tools=TOOLS)).choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
            messages += [choice.message.model_dump(exclude_none=True), result]
        assert talk.is_one_branch_of(OPEN, OPEN)
