"""The official openai client against chats and completions: streams, tools, choices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from gateway_cases import HI, ScriptedEngine, gateway_world, in_loop, talking
from gateway_conformance import CHECKS, check_server, table

from asyncrl.messages.records import Completion, Outcome, SamplingRequest

ADD = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'


@in_loop
async def test_stream_is_whole_across_a_push_and_stops() -> None:
    async with talking("Grüße 🙂🙂 an alle <stop> nie gezeigt") as talk:
        usage = {"include_usage": True}
        stream = await talk.chat(stream=True, stop=["<stop>"], stream_options=usage)
        chunks = [chunk async for chunk in stream]
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == "Grüße 🙂🙂 an alle "
        assert sum(map(bool, pieces)) > 5, "it came in pieces"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len("Grüße 🙂🙂 an alle <stop>".encode()) + 1
        assert talk.world.session.rollout(0, Outcome(), 1.0)[0].num_interruptions == 1


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_tool_result_continues_the_recorded_ids(streamed: bool) -> None:
    async with talking(CALL, "It is three.") as talk:
        if streamed:
            async with talk.gpt.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await talk.chat(tools=TOOLS)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Let me see.")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2, "ü"]})
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        last = await talk.chat([*HI, message, result], tools=TOOLS)
        assert last.choices[0].message.content == "It is three."
        assert len(talk.world.session.rollout(0, Outcome(), 1.0)) == 1


@in_loop
async def test_tool_choice_forces_or_hides_tools() -> None:
    rest, named = ' {"a": 1}}\n</tool_call>', {"type": "function", "function": {"name": "add"}}
    async with talking(rest) as talk:
        answer = await talk.chat(tools=TOOLS, tool_choice=named)
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        answer = await talk.chat(tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == rest
        engine = talk.world.engine
        forced, without = [engine.tokenizer.decode(each.prompt_ids.tolist()) for each in engine.requests]
        assert forced.endswith('"arguments":')
        assert "add" not in without
    async with talking(tool_format="none") as talk:
        with pytest.raises(openai.BadRequestError, match="tool_format"):
            await talk.chat(tools=TOOLS)


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_choices_have_own_seeds_and_branches(streamed: bool) -> None:
    engine = ScriptedEngine(lambda request: f"answer {request.seed % 1000}")
    async with talking(engine=engine) as talk:
        if streamed:
            texts = [""] * 3
            async for chunk in await talk.chat(stream=True, n=3):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [choice.message.content for choice in (await talk.chat(n=3)).choices]
        assert texts == [f"answer {request.seed % 1000}" for request in engine.requests]
        assert engine.requests[2].request_id == "g0/r0/a0/c0/2"
        rewards = {"chatcmpl-0": 1.0, "chatcmpl-0/1": 0.0, "chatcmpl-0/2": 0.5}
        branches = talk.world.session.rollout(0, Outcome(turn_rewards=rewards), 0.5)
        decode = engine.tokenizer.decode
        got = {decode(each.token_ids[each.loss_mask].tolist()): each.credits[0].reward for each in branches}
        assert got == dict(zip(texts, [1.0, 0.0, 0.5], strict=True))


@in_loop
async def test_completions_continue_recorded_ids() -> None:
    async with talking() as talk:
        completions, engine = talk.gpt.completions, talk.world.engine
        answer = await completions.create(model="m", prompt="Once", logprobs=0)
        assert answer.choices[0].text == "Hello there."
        ids = [*engine.tokenizer.encode("OnceHello there."), 257, 65]
        await completions.create(model="m", prompt=ids)
        assert list(engine.requests[1].prompt_ids) == ids
        stream = await completions.create(model="m", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there."
        assert talk.world.gateway.stats().extended == 1


@pytest.mark.parametrize("tool_format", ["hermes", "toolcall"])
@in_loop
async def test_one_call_at_a_time_gives_the_first_call(tool_format: str) -> None:
    has_end = tool_format == "hermes"  # the other one has no mark after each call
    mark = "tool_call" if has_end else "TOOLCALL"
    calls = [f'<{mark}>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</{mark}>' for a in (1, 2)]
    two = "\n".join(calls)
    async with talking(two, tool_format=tool_format) as talk:
        answer = await talk.chat(tools=TOOLS, parallel_tool_calls=False)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        await talk.chat([*HI, message, result], tools=TOOLS, parallel_tool_calls=False)
        (branch,) = talk.world.session.rollout(0, Outcome(), 0.0)
        decode = talk.world.engine.tokenizer.decode
        text = decode(branch.token_ids.tolist(), skip_special_tokens=False).partition("assistant\n")[2]
        assert text.startswith(calls[0] if has_end else two + "<|end|>")
        both = await talk.chat(tools=TOOLS, parallel_tool_calls=True)
        assert len(both.choices[0].message.tool_calls) == 2


class Obedient(ScriptedEngine):
    """Calls the forced tool, writes JSON for a grammar, and returns the likeliest tokens."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: SamplingRequest) -> str:
        if self.tokenizer.decode(list(request.prompt_ids)).endswith('{"name": "'):
            return 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        return '{"city": "Rome"}' if request.grammar else "Hello there."

    async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
        completion = await super().generate(request, **more)
        tops = tuple((token, -1.0 - token) for token in range(request.top_logprobs))
        return replace(completion, top_logprobs=(tops,) * len(completion.token_ids) if tops else ())


@in_loop
async def test_gateway_passes_every_check() -> None:
    async with gateway_world(Obedient()) as world:
        results = await check_server(world.url + "/v1", world.session.key)
        assert [name for name, how, _ in results if how == "ok"] == list(CHECKS), table(results)
        assert world.session.num_calls < 40
