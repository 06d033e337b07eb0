"""The official openai client, unmodified, against a gateway: sync, async, streams, tools, choices, retries,
errors.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_cases import HI, ScriptedEngine, World, gateway_world, in_loop, is_deserted, until

from asyncrl.errors import EngineError, RequestRefused, RolloutFailure
from asyncrl.messages.records import Outcome

ADD = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'


def client_of(world: World, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        **{"base_url": world.url + "/v1", "api_key": world.session.key, "max_retries": 0, **more}
    )


@in_loop
async def test_a_conversation_is_one_branch_whose_every_answer_is_trained_once() -> None:
    async with gateway_world() as world, client_of(world) as client:
        messages = list(HI)
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        (trajectory,) = world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.loss_mask.sum() == 39
        assert {span.version for span in trajectory.version_spans} == {4, 5}
        assert world.gateway.stats().extended == 2
        assert world.session.last_text() == "Hello there."


@in_loop
async def test_a_stream_is_the_same_text_across_a_publish_and_a_stop_string_over_the_joints() -> None:
    text = "Grüße 🙂🙂 an alle <stop> nie gezeigt"
    async with gateway_world(ScriptedEngine(lambda _: text)) as world, client_of(world) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stop=["<stop>"], stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == "Grüße 🙂🙂 an alle "
        assert sum(map(bool, pieces)) > 5, "it came in pieces"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len("Grüße 🙂🙂 an alle <stop>".encode()) + 1
        (trajectory,) = world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.num_interruptions == 1


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_tool_call_comes_back_parsed_and_its_result_goes_on_from_the_recorded_ids(
    streamed: bool,
) -> None:
    answers = iter([CALL, "It is three."])
    async with (
        gateway_world(ScriptedEngine(lambda _: next(answers))) as world,
        client_of(world) as client,
    ):
        if streamed:
            async with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls
        call = choice.message.tool_calls[0]
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "ü"]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        last = await client.chat.completions.create(
            model="m", messages=[*HI, choice.message, result], tools=TOOLS
        )
        assert last.choices[0].message.content == "It is three."
        stats = world.gateway.stats()
        assert (stats.extended + stats.realigned, stats.forked) == (1, 0)
        assert len(world.session.rollout(0, Outcome(), 1.0)) == 1


@in_loop
async def test_a_forced_tool_is_begun_for_the_model_and_none_leaves_the_tools_out() -> None:
    rest = ' {"a": 1}}\n</tool_call>'
    async with gateway_world(ScriptedEngine(lambda _: rest)) as world, client_of(world) as client:
        named: Any = {"type": "function", "function": {"name": "add"}}
        answer = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS, tool_choice=named)
        assert answer.choices[0].message.tool_calls
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        answer = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == rest
        sent = [world.engine.tokenizer.decode(request.prompt_ids) for request in world.engine.requests]
        assert sent[0].endswith('"arguments":')
        assert "add" in sent[0]
        assert "add" not in sent[1]
    async with gateway_world(tool_format="none") as world, client_of(world) as client:
        with pytest.raises(openai.BadRequestError, match="tool_format"):
            await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_n_choices_are_sampled_with_seeds_of_their_own_and_are_branches(streamed: bool) -> None:
    engine = ScriptedEngine(lambda request: f"answer {request.seed % 1000}")
    async with gateway_world(engine) as world, client_of(world) as client:
        texts = ["", "", ""]
        if streamed:
            async for chunk in await client.chat.completions.create(model="m", messages=HI, n=3, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            answer = await client.chat.completions.create(model="m", messages=HI, n=3)
            texts = [choice.message.content or "" for choice in answer.choices]
        assert texts == [f"answer {request.seed % 1000}" for request in engine.requests]
        names = [request.request_id for request in engine.requests]
        assert names == ["g0/r0/a0/c0", "g0/r0/a0/c0/1", "g0/r0/a0/c0/2"]
        rewards = {"chatcmpl-0": 1.0, "chatcmpl-0/1": 0.0, "chatcmpl-0/2": 0.5}
        branches = world.session.rollout(0, Outcome(turn_rewards=rewards), 0.5)
        decode = engine.tokenizer.decode
        got = {decode(each.token_ids[each.loss_mask].tolist()): each.credits[0].reward for each in branches}
        assert got == dict(zip(texts, [1.0, 0.0, 0.5], strict=True))


def test_seeds_are_of_what_is_asked_and_not_of_when() -> None:
    async def seeds(order: list[tuple[str, dict[str, Any]]]) -> dict[str, list[int]]:
        async with gateway_world() as world, client_of(world) as client:
            for text, more in order:
                messages: list[Any] = [{"role": "user", "content": text}]
                await client.chat.completions.create(model="m", messages=messages, **more)
            found: dict[str, list[int]] = {}
            for (text, more), request in zip(order, world.engine.requests, strict=True):
                found.setdefault(f"{text} {more}", []).append(request.seed)
            return found

    calls: list[tuple[str, dict[str, Any]]] = [("a", {}), ("b", {}), ("a", {})] + [("a", {"seed": 5})] * 2
    first = asyncio.run(seeds(calls))
    assert first == asyncio.run(seeds(calls[::-1])), (
        "the two equal calls without a seed come in order either way"
    )
    assert len(set(first["a {}"])) == 2
    assert len(set(first["a {'seed': 5}"])) == 1


@in_loop
async def test_completions_take_text_or_ids_and_go_on_from_what_they_recorded() -> None:
    async with gateway_world() as world, client_of(world) as client:
        answer = await client.completions.create(model="m", prompt="Once", logprobs=0)
        assert answer.choices[0].text == "Hello there."
        ids = [*world.engine.tokenizer.encode("OnceHello there."), 257, 65]
        await client.completions.create(model="m", prompt=ids)
        assert world.engine.requests[1].prompt_ids == tuple(ids)
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there."
        assert world.gateway.stats().extended == 1


@in_loop
async def test_a_stream_that_its_client_leaves_is_answered_whole_when_it_is_asked_for_again() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world, client_of(world) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: is_deserted(world))
        with pytest.raises(RolloutFailure):
            world.session.rollout(0, Outcome(), 1.0)
        again = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HI, stream=True))
        gate.set()
        assert (
            "".join([chunk.choices[0].delta.content or "" async for chunk in await again]) == "Hello there."
        )
        assert len(world.engine.requests) == 1
        assert world.session.rollout(0, Outcome(), 1.0)[0].num_sampled == 13
        await client.chat.completions.create(model="m", messages=HI)
        assert len(world.engine.requests) == 2, "a call that was answered is not a retry"


@in_loop
async def test_errors_are_the_clients_own_exceptions() -> None:
    async with gateway_world() as world, client_of(world) as client:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as bad:
            await client.chat.completions.create(model="m", messages=HI, logit_bias={"5": 1})
        assert (bad.value.param, bad.value.type) == ("logit_bias", "invalid_request_error")
        async with client_of(world, api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError, match="session key"):
                await stranger.models.list()
        with pytest.raises(openai.NotFoundError, match="Invalid URL"):
            await client.embeddings.create(model="m", input="x")
        world.engine.error = RequestRefused("engine-0 refused it", rule="it is too long")
        with pytest.raises(openai.BadRequestError, match="engine-0 refused it"):
            await client.chat.completions.create(model="m", messages=HI)
        world.engine.error = EngineError("engine-0", "answered nonsense")
        with pytest.raises(openai.InternalServerError, match="The run is ending"):
            await client.chat.completions.create(model="m", messages=HI)
        assert [error.room for error in world.broken] == ["engine-0"]
        world.session.end_nowait("rollout.timeout_s=600 is over")
        with pytest.raises(openai.APIStatusError, match="timeout_s=600") as gone:
            await client.chat.completions.create(model="m", messages=HI)
        assert gone.value.status_code == 410


@in_loop
async def test_a_session_that_ends_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world, client_of(world) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        seen = [await anext(aiter(stream))]
        world.session.end_nowait("the harness is done")

        async def read_on() -> None:
            seen.extend([chunk async for chunk in stream])

        with pytest.raises(openai.APIError, match="the harness is done"):
            await read_on()
        assert world.engine.cancelled == ["g0/r0/a0/c0"]
