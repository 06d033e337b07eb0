"""The official openai client, unmodified, against a gateway: streams, tools, choices, retries, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from gateway_cases import HI, ScriptedEngine, World, gateway_world, in_loop, is_deserted, until

from asyncrl.base.errors import EngineError, RequestRefused
from asyncrl.messages.records import Outcome

ADD = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'


@dataclass
class Talk:
    world: World
    client: openai.AsyncOpenAI

    async def ask(self, messages: Any = HI, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="m", messages=messages, **more)

    async def told(self, **more: Any) -> list[str]:
        """The text of each choice of a stream."""
        texts = [""] * more.get("n", 1)
        async for chunk in await self.ask(stream=True, **more):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts


@asynccontextmanager
async def talking(engine: Any = None, **config: Any) -> AsyncIterator[Talk]:
    async with gateway_world(engine, **config) as world:
        key = world.session.key
        async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key, max_retries=0) as client:
            yield Talk(world, client)


@in_loop
async def test_a_conversation_is_one_branch_whose_every_answer_is_trained_once() -> None:
    async with talking() as talk:
        messages = list(HI)
        for _ in range(3):
            answer = await talk.ask(messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        (trajectory,) = talk.world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.loss_mask.sum() == 39
        assert {span.version for span in trajectory.version_spans} == {4, 5}
        assert talk.world.gateway.stats().extended == 2


@in_loop
async def test_a_stream_is_the_same_text_across_a_publish_and_a_stop_string_over_the_joints() -> None:
    async with talking(ScriptedEngine(lambda _: "Grüße 🙂🙂 an alle <stop> nie gezeigt")) as talk:
        usage = {"include_usage": True}
        stream = await talk.ask(stream=True, stop=["<stop>"], stream_options=usage)
        chunks = [chunk async for chunk in stream]
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == "Grüße 🙂🙂 an alle "
        assert sum(map(bool, pieces)) > 5, "it came in pieces"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len("Grüße 🙂🙂 an alle <stop>".encode()) + 1
        assert talk.world.session.rollout(0, Outcome(), 1.0)[0].num_interruptions == 1


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_tool_call_is_parsed_and_its_result_goes_on_from_the_recorded_ids(streamed: bool) -> None:
    answers = iter([CALL, "It is three."])
    async with talking(ScriptedEngine(lambda _: next(answers))) as talk:
        if streamed:
            async with talk.client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await talk.ask(tools=TOOLS)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Let me see.")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2, "ü"]})
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        last = await talk.ask([*HI, message, result], tools=TOOLS)
        assert last.choices[0].message.content == "It is three."
        assert len(talk.world.session.rollout(0, Outcome(), 1.0)) == 1


@in_loop
async def test_a_forced_tool_is_begun_for_the_model_and_none_leaves_the_tools_out() -> None:
    rest, named = ' {"a": 1}}\n</tool_call>', {"type": "function", "function": {"name": "add"}}
    async with talking(ScriptedEngine(lambda _: rest)) as talk:
        answer = await talk.ask(tools=TOOLS, tool_choice=named)
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        answer = await talk.ask(tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == rest
        engine = talk.world.engine
        forced, without = [engine.tokenizer.decode(each.prompt_ids.tolist()) for each in engine.requests]
        assert forced.endswith('"arguments":')
        assert "add" not in without
    async with talking(tool_format="none") as talk:
        with pytest.raises(openai.BadRequestError, match="tool_format"):
            await talk.ask(tools=TOOLS)


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_n_choices_are_sampled_with_seeds_of_their_own_and_are_branches(streamed: bool) -> None:
    engine = ScriptedEngine(lambda request: f"answer {request.seed % 1000}")
    async with talking(engine) as talk:
        if streamed:
            texts = await talk.told(n=3)
        else:
            texts = [choice.message.content for choice in (await talk.ask(n=3)).choices]
        assert texts == [f"answer {request.seed % 1000}" for request in engine.requests]
        assert engine.requests[2].request_id == "g0/r0/a0/c0/2"
        rewards = {"chatcmpl-0": 1.0, "chatcmpl-0/1": 0.0, "chatcmpl-0/2": 0.5}
        branches = talk.world.session.rollout(0, Outcome(turn_rewards=rewards), 0.5)
        decode = engine.tokenizer.decode
        got = {decode(each.token_ids[each.loss_mask].tolist()): each.credits[0].reward for each in branches}
        assert got == dict(zip(texts, [1.0, 0.0, 0.5], strict=True))


@in_loop
async def test_seeds_are_of_what_is_asked_and_not_of_when() -> None:
    a, b, seeded = {"text": "a"}, {"text": "b"}, {"text": "a", "seed": 5}
    calls: list[dict[str, Any]] = [a, b, a, seeded, seeded]
    found = []
    for order in (calls, calls[::-1]):
        async with gateway_world() as world:
            for call in order:
                assert (await world.ask(**call))[0] == 200
            seeds = zip(map(str, order), [request.seed for request in world.engine.requests], strict=True)
            found.append(sorted(seeds, key=lambda each: each[0]))
    assert found[0] == found[1], "equal calls without a seed come in order either way"
    assert len(set(found[0])) == 4, "those with one are the same call"


@in_loop
async def test_completions_take_text_or_ids_and_go_on_from_what_they_recorded() -> None:
    async with talking() as talk:
        completions, engine = talk.client.completions, talk.world.engine
        answer = await completions.create(model="m", prompt="Once", logprobs=0)
        assert answer.choices[0].text == "Hello there."
        ids = [*engine.tokenizer.encode("OnceHello there."), 257, 65]
        await completions.create(model="m", prompt=ids)
        assert list(engine.requests[1].prompt_ids) == ids
        stream = await completions.create(model="m", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there."
        assert talk.world.gateway.stats().extended == 1


@in_loop
async def test_a_stream_that_its_client_leaves_is_answered_whole_when_it_is_asked_for_again() -> None:
    gate = asyncio.Event()
    async with talking(ScriptedEngine(gate=gate)) as talk:
        stream = await talk.ask(stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: is_deserted(talk.world))
        again = asyncio.ensure_future(talk.told())
        gate.set()
        assert await again == ["Hello there."]
        assert len(talk.world.engine.requests) == 1
        assert talk.world.session.rollout(0, Outcome(), 1.0)[0].num_sampled == 13


@in_loop
async def test_errors_are_the_clients_own_exceptions() -> None:
    async with talking() as talk:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as bad:
            await talk.ask(logit_bias={"5": 1})
        assert (bad.value.param, bad.value.type) == ("logit_bias", "invalid_request_error")
        with pytest.raises(openai.AuthenticationError, match="session key"):
            await talk.client.with_options(api_key="wrong").models.list()
        for error, raised, said in (
            (RequestRefused("engine-0 refused it", why="too long"), openai.BadRequestError, "call: too long"),
            (EngineError("engine-0", "answered nonsense"), openai.InternalServerError, "The run is ending"),
        ):
            talk.world.engine.error = error
            with pytest.raises(raised, match=said):
                await talk.ask()
        assert [error.room for error in talk.world.broken] == ["engine-0"]


@in_loop
async def test_a_session_that_ends_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async with talking(ScriptedEngine(gate=asyncio.Event())) as talk:
        stream = await talk.ask(stream=True)
        await anext(aiter(stream))
        talk.world.session.end_nowait("the harness is done")
        with pytest.raises(openai.APIError, match="the harness is done"):
            _ = [chunk async for chunk in stream]
        assert talk.world.engine.cancelled == ["g0/r0/a0/c0"]
