"""Keys, ends and repeats: who may call until when, and which calls are one."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_cases import (
    HI,
    RULES,
    ByteTokenizer,
    ScriptedEngine,
    World,
    gateway_world,
    in_loop,
    is_deserted,
    seed_of,
    until,
)

from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.openai_form import ApiError
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.config import GatewayConfig
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Completion, Outcome, SamplingRequest, VersionSpan

ROUTE: Any = SimpleNamespace(tokenizer=ByteTokenizer(), counts=GatewayStats())


def open_session(sessions: Sessions, number: int = 0) -> GatewaySession:
    names = {"prompt_id": "p", "sample_index": 0, "attempt": 0, "route_key": ""}
    return GatewaySession(sessions, ROUTE, f"g{number}/r0", **names)  # type: ignore[arg-type]


def status_of(sessions: Sessions, key: str) -> int:
    try:
        sessions.find(key)
    except ApiError as error:
        return error.status
    return 200


def test_a_key_opens_its_session_until_it_ends_and_its_reason_is_told_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.sessions.MAX_EXPIRED", 3)
    sessions = Sessions(GatewayConfig())
    opened = [open_session(sessions, number) for number in range(5)]
    assert len({session.key for session in opened}) == 5
    for session in opened[:4]:
        session.end_nowait("done")
    assert [status_of(sessions, session.key) for session in opened] == [401, 410, 410, 410, 200]
    sessions.end_all_nowait("the run has ended")
    assert opened[4].ended == open_session(sessions).ended == "the run has ended"


@in_loop
async def test_a_session_that_has_ended_keeps_nothing_but_its_reason() -> None:
    async with gateway_world() as world:
        session = world.open()
        headers = {"Authorization": f"Bearer {session.key}"}
        assert (await world.post({"messages": HI}, headers=headers))[0] == 200
        session.end_nowait("done")
        assert session.rollout(0, Outcome(), 1.0)[0].num_sampled == 13, "its owner may still ask"
        watched = weakref.ref(session), weakref.ref(session.capture)
        del session
        await until(lambda: world.gateway.stats().in_flight == 0)
        gc.collect()
        assert [ref() for ref in watched] == [None, None]


@in_loop
async def test_a_call_says_which_engine_has_the_conversation_so_far_in_its_cache() -> None:
    class OnEngineThree(ScriptedEngine):
        async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
            completion = await super().generate(request, **more)
            spans = tuple(replace(span, engine=3) for span in completion.version_spans)
            return replace(completion, version_spans=spans)

    async with gateway_world(OnEngineThree()) as world:
        for text in ("Hi", "Go on"):
            assert (await world.ask(text))[0] == 200
        await world.ask_other()
        first, second, others_first = world.engine.requests
        assert (first.after, others_first.after) == (None, None)
        assert (second.after.version, second.after.engine) == (5, 3), "the end of the answer before"


@in_loop
async def test_a_call_after_the_end_and_one_in_hand_at_the_end_get_410_with_the_first_reason() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        in_hand = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        world.session.end_nowait("rollout.timeout_s=5 is over")
        world.session.end_nowait("something else")
        for status, answer in (await in_hand, await world.ask()):
            assert (status, answer["error"]["code"]) == (410, "session_ended")
            assert "rollout.timeout_s=5" in answer["error"]["message"]
        assert world.engine.cancelled == ["g0/r0/a0/c0"]
        assert world.session.capture.num_completions == world.gateway.stats().in_flight == 0
        await world.gateway.aclose()
        await world.gateway.aclose()


async def cut_call(world: World, body: dict[str, Any]) -> None:
    """A call whose client goes away before its answer."""
    num_requests = len(world.engine.requests)
    asking = asyncio.ensure_future(world.post(body))
    await until(lambda: len(world.engine.requests) > num_requests)
    asking.cancel()
    await until(lambda: is_deserted(world))


RETRY = {"x-stainless-retry-count": "1"}


@in_loop
async def test_a_call_that_no_client_got_is_answered_to_the_next_equal_one_and_else_is_not_recorded() -> None:
    gate, body = asyncio.Event(), {"messages": HI}
    engine = ScriptedEngine(lambda request: f"seed {request.seed % 1000}", gate=gate)
    async with gateway_world(engine) as world:
        await cut_call(world, body)
        await cut_call(world, body | {"max_tokens": 5})
        gate.set()
        await until(lambda: not world.gateway.stats().in_flight)
        with pytest.raises(RolloutFailure):
            world.session.rollout(0, Outcome(), 1.0)
        status, answer = await world.post(body)
        assert (status, answer["id"], len(engine.requests)) == (200, "chatcmpl-0", 2)
        (trajectory,) = world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.num_sampled == answer["usage"]["completion_tokens"]
        _, another = await world.post(body)
        assert another["id"] == "chatcmpl-2", "its answer was got: the next one like it is a call of its own"
        _, again = await world.post(body, headers=RETRY)
        assert again["id"] == "chatcmpl-2", "unless its client says that it asks again"


@in_loop
async def test_a_call_in_flight_is_joined_by_its_retry_and_by_no_other_call() -> None:
    gate, body = asyncio.Event(), {"messages": HI}
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        await cut_call(world, body)
        both = [asyncio.ensure_future(world.post(body)) for _ in range(2)]
        await until(lambda: len(world.engine.requests) == 2)
        gate.set()
        names = [answer["id"] for _, answer in await asyncio.gather(*both)]
        assert sorted(names) == ["chatcmpl-0", "chatcmpl-1"]


@in_loop
async def test_a_call_that_was_refused_for_the_moment_is_sampled_when_tried_again() -> None:
    gate, body = asyncio.Event(), {"messages": HI}
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=1) as world:
        twin = asyncio.ensure_future(world.post(body))
        await world.engine.started.wait()
        assert (await world.post(body))[0] == 429
        gate.set()
        assert (await twin)[1]["id"] == "chatcmpl-0"
        answers = [await world.post(body, headers=RETRY) for _ in range(2)]
        assert [answer["id"] for _, answer in answers] == ["chatcmpl-1", "chatcmpl-1"]


@in_loop
async def test_an_idempotency_key_names_one_call_and_one_body() -> None:
    async with gateway_world() as world:
        keys = [{"Idempotency-Key": name} for name in ("k1", "k1", "k2")]
        answers = [await world.post({"messages": HI}, headers=key) for key in keys]
        assert [answer["id"] for _, answer in answers] == ["chatcmpl-0", "chatcmpl-0", "chatcmpl-1"]
        _, answer = await world.post({"messages": HI, "max_tokens": 5}, headers=keys[0])
        assert answer["id"] == "chatcmpl-2", "with another body it is another call"


@in_loop
async def test_the_port_is_taken_before_the_start_and_a_taken_one_is_a_config_error() -> None:
    def make_gateway(**config: Any) -> Gateway:
        engine, none = ScriptedEngine(), find_tool_format("none", "")
        settings = GatewayConfig(**config)
        return Gateway(engine, engine.tokenizer, none, RULES, settings, seed_of=seed_of, on_broken=print)

    async with gateway_world() as world:
        port = int(world.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"gateway\.port={port}"):
            make_gateway(port=port).bind()
        unstarted, public = make_gateway(), make_gateway(public_url="http://here:8700/")
        assert unstarted.bind() == unstarted.bind()
        assert public.bind() == "http://here:8700"
        await unstarted.aclose()
        await public.aclose()


@in_loop
async def test_an_answer_that_comes_as_the_session_ends_is_no_part_of_the_rollout() -> None:
    told: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    class Told(ScriptedEngine):
        async def generate(self, request: SamplingRequest, **_: Any) -> Completion:
            self.started.set()
            return await told

    async with gateway_world(Told()) as world:
        asking = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        told.set_result(Completion((72, 105), (-0.5, -0.5), (VersionSpan(0, 2, 1),), "stop", 0))
        world.session.end_nowait("its harness has finished")
        assert (await asking)[0] == 410
        assert world.session.capture.num_completions == 0
