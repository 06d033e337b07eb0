"""Anthropic's client against /v1/messages: tools, thoughts, streams, threads."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from gateway_cases import HI, ByteTokenizer, ScriptedEngine, in_loop, talking

ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def use(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_coding_agent_loop_is_one_branch_trained_once(streamed: bool) -> None:
    """Calls like Claude Code's: a changing system part, many tools, thoughts, several results in a message,
    and tokens counted first.
    """
    both = f"{use('read', {'path': 'a'})}\n{use('read', {'path': 'ü'})}"
    answers = [
        f"<think>\nTwo files.\n</think>\n\nI look at both.\n{both}",
        f"<think>\nNow add.\n</think>\n\n{use('add', {'a': 1, 'b': [2, 'x']})}",
        "<think>\nDone.\n</think>\n\nIt is three.",
    ]
    tools = [{**ADD, "name": f"tool_{number}"} for number in range(20)]
    tools += [{**ADD, "name": "read", **CACHED}, ADD]
    async with talking(*answers) as talk:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2?", **CACHED}]}]
        found = []
        for number in range(3):
            system: Any = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}]
            system += [{"type": "text", "text": "You are an agent.", **CACHED}]
            shape: Any = {
                "system": system,
                "tools": tools,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            counted = await talk.claude.messages.count_tokens(model="m", messages=messages, **shape)
            answer = await talk.message(messages, streamed=streamed, metadata={"user_id": "u"}, **shape)
            assert answer.usage.input_tokens == counted.input_tokens
            found.append([block.type for block in answer.content])
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": each.id, "content": [{"type": "text", "text": "3"}]}
                for each in uses
            ]
            if uses:
                assert answer.stop_reason == "tool_use"
                results[-1] |= {"is_error": True, "content": "no such file", **CACHED}
                messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        assert found == [
            ["thinking", "text", "tool_use", "tool_use"],
            ["thinking", "tool_use"],
            ["thinking", "text"],
        ]
        assert answer.content[1].text == "It is three."
        assert (answer.content[0].thinking, answer.stop_reason) == ("Done.", "end_turn")
        assert len({each["tool_use_id"] for each in messages[2]["content"][:-1]}) == 2
        _, last, _ = talk.prompts()
        assert "<|start|>tool\n3<|end|><|start|>tool\nError: no such file<|end|><|start|>user\ngo on" in last
        assert "billing" not in last
        assert talk.is_one_branch_of(*answers)
        assert talk.world.gateway.stats().calls == 3, "what is counted is no call"


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_stop_reason_names_the_stop_sequence(streamed: bool) -> None:
    async with talking("one two three") as talk:
        answer = await talk.message(streamed=streamed, stop_sequences=["five", " three"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        assert answer.content[0].text == "one two"
        answer = await talk.message(streamed=streamed, max_tokens=5)
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        answer = await talk.message([{"role": "user", "content": "Hi "}], streamed=streamed)
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.id == "msg-2"


@in_loop
async def test_beta_client_parameters_are_ignored() -> None:
    async with talking("Yes.") as talk:
        edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        shape: Any = {"model": "m", "messages": HI, "betas": ["interleaved-thinking-2025-05-14"]}
        answer = await talk.claude.beta.messages.create(max_tokens=9, context_management=edits, **shape)
        counted = await talk.claude.beta.messages.count_tokens(**shape)
        assert counted.input_tokens == answer.usage.input_tokens


@in_loop
async def test_forced_call_is_a_counted_tool_use() -> None:
    async with talking(' {"a": 1}}\n</tool_call>') as talk:
        choice: Any = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}
        counted = await talk.claude.messages.count_tokens(model="m", messages=HI, **choice)
        answer = await talk.message(**choice)
        assert [(block.type, block.input) for block in answer.content] == [("tool_use", {"a": 1})]
        assert answer.usage.input_tokens == counted.input_tokens


class Switching(ByteTokenizer):
    """Its template reads enable_thinking."""

    template = "{% if enable_thinking is false %}"

    def render(self, messages: Any, *, settings: Any = None, **more: Any) -> str:
        is_off = (settings or {}).get("enable_thinking") is False
        return super().render(messages, **more) + ("<think>\n\n</think>\n\n" if is_off else "")


@in_loop
async def test_thinking_and_parallel_calls_can_be_turned_off() -> None:
    engine = ScriptedEngine(lambda _: "Yes.", tokenizer=Switching())
    async with talking(engine=engine) as talk:
        assert (await talk.message(thinking={"type": "disabled"})).content[0].text == "Yes."
        await talk.chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        await talk.chat()
        assert [prompt.endswith("</think>\n\n") for prompt in talk.prompts()] == [True, True, False]
    async with talking(use("add", {"a": 1}) + use("add", {"a": 2})) as talk:
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await talk.message(tools=[ADD], tool_choice=choice)
        assert [block.input for block in answer.content] == [{"a": 1}]
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_thread_continues_from_a_kept_message(streamed: bool) -> None:
    says = [f"<think>\nA sum.\n</think>\n\n{use('add', {'a': 1})}", "Three."]
    async with talking(*says) as talk:
        made = {"extra_body": {"thread": {"type": "create"}}, "system": "Be brief.", "tools": [ADD]}
        first = await talk.message(streamed=streamed, **made)
        result = [{"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3"}]
        more: dict[str, Any] = {"messages": [{"role": "user", "content": result}], "streamed": streamed}
        thread = {"type": "continue", "previous_message_id": first.id}
        second = await talk.message(**more, extra_body={"thread": thread})
        assert second.content[-1].text == "Three."
        assert talk.prompts()[1].startswith(talk.prompts()[0] + says[0])
        assert talk.is_one_branch_of(*says)
        with pytest.raises(anthropic.BadRequestError, match="keeps its system and tools"):
            await talk.message(**more, system="Be long.", extra_body={"thread": thread})
        with pytest.raises(anthropic.NotFoundError, match="not kept") as missing:
            await talk.message(extra_body={"thread": thread | {"previous_message_id": "msg-7"}})
        body: Any = missing.value.body
        assert body["error"]["details"] == {"error_code": "thread_not_found"}, "the SDK starts a new one"
