"""What frameworks send beside OpenAI's own keys, and what is made of it: ignored, carried, or translated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_cases import HI, RULES, ScriptedEngine, gateway_world, in_loop

from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.endpoint.requests import MAX_LOGGED, ChatRequest, RequestReader
from asyncrl.messages.records import Outcome


def read(messages: list[Any], **more: Any) -> ChatRequest:
    return RequestReader(RULES).chat(json.dumps({"messages": messages, **more}).encode())


LITELLM = {"provider_specific_fields": {"refusal": None}, "annotations": [], "audio": None, "refusal": None}
LITELLM |= {"function_call": None, "thinking_blocks": [{"type": "thinking", "thinking": "hm"}], "id": "msg_1"}
PART = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
MINE = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        ({**MINE, **LITELLM}, MINE),
        ({"role": "user", "content": [PART], "cache_control": {}}, {"role": "user", "content": "Hi"}),
        ({**MINE, "reasoning": "hm"}, {**MINE, "reasoning_content": "hm"}),
        ({**MINE, "reasoning_content": "hm", "reasoning": "no"}, {**MINE, "reasoning_content": "hm"}),
        (
            {**MINE, "reasoning_details": [{"text": "a"}, {"data": 1}, {"text": "b"}]},
            {**MINE, "reasoning_content": "ab"},
        ),
        ({**MINE, "reasoning": {"effort": 1}, "reasoning_content": ""}, MINE),
    ],
)
def test_a_template_gets_the_keys_that_it_may_read_and_no_others(sent: Any, read_as: Any) -> None:
    assert read([sent]).messages == [read_as]


def test_ignored_keys_are_logged_once_by_name_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestReader(RULES)
    for number in range(2 * MAX_LOGGED):
        message = {**HI[0], "cache_control": 1, f"made up {number}": 1}
        reader.chat(json.dumps({"messages": [message]}).encode())
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "`cache_control`" in line]) == 1
    assert len(told) == MAX_LOGGED


@in_loop
async def test_an_answer_that_litellm_sends_back_is_gone_on_from() -> None:
    async with gateway_world() as world:
        _, answer = await world.ask()
        message = answer["choices"][0]["message"] | LITELLM
        assert (await world.post({"messages": [*HI, message, *HI]}))[0] == 200
        assert len(world.session.rollout(0, Outcome(), 0.0)) == 1


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("tool_format", ["hermes", "toolcall"])
@in_loop
async def test_one_call_ends_the_turn_where_the_format_shows_its_end_and_else_the_first_one_is_given(
    tool_format: str,
) -> None:
    has_end = tool_format == "hermes"
    written = CALL if has_end else CALL.replace("tool_call>", "TOOLCALL>")
    two = written % 1 + "\n" + written % 2
    async with gateway_world(ScriptedEngine(lambda _: two), tool_format=tool_format) as world:
        asked: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        _, answer = await world.post({"messages": HI, **asked})
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        (call,) = message["tool_calls"]
        assert (json.loads(call["function"]["arguments"]), reason) == ({"x": 1}, "tool_calls")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
        assert (await world.post({"messages": [*HI, message, result], **asked}))[0] == 200
        (branch,) = world.session.rollout(0, Outcome(), 0.0)
        sampled = written % 1 if has_end else two + "<|end|>"
        text = world.engine.tokenizer.decode(branch.token_ids.tolist(), skip_special_tokens=False)
        assert text.partition("assistant\n")[2].startswith(sampled + "<|end|>" * has_end)
        assert "7" in text, "the tool's result is there"
        _, both = await world.post({"messages": HI, "tools": TOOLS, "parallel_tool_calls": True})
        assert len(both["choices"][0]["message"]["tool_calls"]) == 2


@in_loop
async def test_settings_of_the_template_are_passed_on_and_an_effort_where_the_template_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[Any] = []
    draft = Capture.match

    def drafting(*args: Any, settings: Any = None, **more: Any) -> Any:
        got.append(settings)
        return draft(*args, **more)

    monkeypatch.setattr(Capture, "match", drafting)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for reads_effort, effort in ((True, {"reasoning_effort": "low"}), (False, {})):
        async with gateway_world(reads_effort=reads_effort) as world:
            for asked in ({}, off, {"reasoning_effort": "low", "verbosity": "high", **off}):
                assert (await world.ask(**asked))[0] == 200
        assert got == [None, off["chat_template_kwargs"], effort | off["chat_template_kwargs"]]
        got.clear()
