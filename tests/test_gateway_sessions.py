"""Keys, ends and repeats: who may call until when, and which calls are one."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from gateway_cases import (
    RULES,
    ByteTokenizer,
    ScriptedEngine,
    World,
    gateway_world,
    in_loop,
    in_virtual_time,
    is_deserted,
    seed_of,
    until,
)

from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.refusals import ApiError
from asyncrl.agents.endpoint.sessions import GatewaySession, SessionLimits, Sessions
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.config import GatewayConfig
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Completion, Outcome, SamplingRequest, VersionSpan
from asyncrl.testing.virtual_time import all_blocked

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def open_session(sessions: Sessions, number: int = 0) -> GatewaySession:
    route: Any = SimpleNamespace(tokenizer=ByteTokenizer(), counts=GatewayStats())
    return sessions.open_nowait(
        f"g{number}/r0", prompt_id="p", sample_index=0, attempt=0, route_key="", route=route
    )


def status_of(sessions: Sessions, key: str) -> int:
    try:
        sessions.find(key)
    except ApiError as error:
        return error.status
    return 200


def test_a_key_opens_its_session_until_it_ends_and_its_reason_is_told_until_it_is_forgotten() -> None:
    sessions = Sessions(SessionLimits(), max_expired=3)
    opened = [open_session(sessions, number) for number in range(5)]
    assert len({session.key for session in opened}) == 5
    assert all(len(session.key) >= 32 for session in opened)
    for session in opened[:4]:
        session.end_nowait("done")
    assert [status_of(sessions, session.key) for session in opened] == [401, 410, 410, 410, 200]
    assert sessions.num_open == 1
    sessions.end_all_nowait("the run has ended")
    assert opened[4].ended == "the run has ended"
    assert open_session(sessions).ended == "the run has ended"


@in_loop
async def test_a_session_that_has_ended_keeps_nothing_but_its_reason() -> None:
    async with gateway_world() as world:
        session = world.open()
        status, _ = await world.post({"messages": HI}, headers={"Authorization": f"Bearer {session.key}"})
        assert status == 200
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
            return replace(
                completion, version_spans=tuple(replace(span, engine=3) for span in completion.version_spans)
            )

    async with gateway_world(OnEngineThree()) as world:
        for text in ("Hi", "Go on"):
            status, _ = await world.ask(text)
            assert status == 200
        other = world.open("g0/r1")
        await world.post({"messages": HI}, headers={"Authorization": f"Bearer {other.key}"})
        first, second, others_first = world.engine.requests
        assert (first.after, others_first.after) == (None, None)
        assert (second.after.version, second.after.engine) == (5, 3), "the end of the answer before"


@in_virtual_time
async def test_the_end_of_a_session_leaves_what_waits_in_it_and_nothing_else() -> None:
    sessions = Sessions(SessionLimits())
    one, other = open_session(sessions, 1), open_session(sessions, 2)
    statuses: list[int] = []

    async def wait_in(session: GatewaySession) -> None:
        try:
            async with session.in_hand():
                await asyncio.sleep(1000)
            statuses.append(200)
        except ApiError as error:
            statuses.append(error.status)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait_in(one))
        tasks.create_task(wait_in(one))
        tasks.create_task(wait_in(other))
        await all_blocked()
        one.end_nowait("done")
        await all_blocked()
        assert statuses == [410, 410]
    assert statuses == [410, 410, 200]
    with pytest.raises(ApiError, match="done"):
        async with one.in_hand():
            pass


async def cut_call(world: World, body: bytes, **headers: str) -> None:
    """A call whose client goes away before its answer."""
    num_requests = len(world.engine.requests)
    asking = asyncio.ensure_future(world.post(body, headers=headers))
    await until(lambda: len(world.engine.requests) > num_requests)
    asking.cancel()
    await until(lambda: is_deserted(world))


@in_loop
async def test_a_call_that_no_client_got_is_answered_to_the_next_equal_one_and_else_is_not_recorded() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(lambda request: f"seed {request.seed % 1000}", gate=gate)
    async with gateway_world(engine) as world:
        body = json.dumps({"messages": HI}).encode()
        await cut_call(world, body)
        await cut_call(world, json.dumps({"messages": HI, "max_tokens": 5}).encode())
        gate.set()
        await until(lambda: not world.gateway.stats().in_flight)
        with pytest.raises(RolloutFailure):
            world.session.rollout(0, Outcome(), 1.0)
        status, answer = await world.post(body)
        assert (status, answer["id"]) == (200, "chatcmpl-0")
        assert len(engine.requests) == 2
        (trajectory,) = world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.num_sampled == answer["usage"]["completion_tokens"]
        _, another = await world.post(body)
        assert another["id"] == "chatcmpl-2", "its answer was got: the next one like it is a call of its own"
        _, again = await world.post(body, headers={"x-stainless-retry-count": "1"})
        assert again["id"] == "chatcmpl-2", "unless its client says that it asks again"


@in_loop
async def test_a_call_in_flight_is_joined_by_its_retry_and_by_no_other_call() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        body = json.dumps({"messages": HI}).encode()
        await cut_call(world, body)
        retry, twin = asyncio.ensure_future(world.post(body)), asyncio.ensure_future(world.post(body))
        await until(lambda: len(world.engine.requests) == 2)
        gate.set()
        names = [answer["id"] for _, answer in await asyncio.gather(retry, twin)]
        assert sorted(names) == ["chatcmpl-0", "chatcmpl-1"]


@in_loop
async def test_a_call_that_was_refused_for_the_moment_is_sampled_when_tried_again() -> None:
    gate, body = asyncio.Event(), json.dumps({"messages": HI}).encode()
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=1) as world:
        twin = asyncio.ensure_future(world.post(body))
        await world.engine.started.wait()
        assert (await world.post(body))[0] == 429
        gate.set()
        assert (await twin)[1]["id"] == "chatcmpl-0"
        retry = {"x-stainless-retry-count": "1"}
        answers = [await world.post(body, headers=retry) for _ in range(2)]
        assert [answer["id"] for _, answer in answers] == ["chatcmpl-1", "chatcmpl-1"]
        assert len(world.engine.requests) == 2


class ToldEngine(ScriptedEngine):
    """Answers when it is told to, in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.told: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    async def generate(self, request: SamplingRequest, **kwargs: Any) -> Completion:
        self.started.set()
        return await self.told


@in_loop
async def test_an_answer_that_comes_as_the_session_ends_is_no_part_of_the_rollout() -> None:
    engine = ToldEngine()
    async with gateway_world(engine) as world:
        asking = asyncio.ensure_future(world.ask())
        await engine.started.wait()
        engine.told.set_result(Completion((72, 105), (-0.5, -0.5), (VersionSpan(0, 2, 1),), "stop", 0))
        world.session.end_nowait("its harness has finished")
        assert (await asking)[0] == 410
        assert world.session.capture.num_completions == 0


@in_loop
async def test_an_idempotency_key_names_one_call_and_one_body() -> None:
    async with gateway_world() as world:
        body, key = json.dumps({"messages": HI}).encode(), {"Idempotency-Key": "k1"}
        answers = [
            await world.post(body, headers=headers) for headers in (key, key, {"Idempotency-Key": "k2"})
        ]
        assert [answer["id"] for _, answer in answers] == ["chatcmpl-0", "chatcmpl-0", "chatcmpl-1"]
        _, answer = await world.post({"messages": HI, "max_tokens": 5}, headers=key)
        assert answer["id"] == "chatcmpl-2", "with another body it is another call"
        assert len(world.engine.requests) == 3


@in_loop
async def test_the_port_is_taken_before_the_start_and_a_taken_one_is_a_config_error() -> None:
    def make_gateway(**config: Any) -> Gateway:
        engine = ScriptedEngine()
        none = find_tool_format("none", "")
        return Gateway(
            engine, engine.tokenizer, none, RULES, GatewayConfig(**config), seed_of=seed_of, on_broken=print
        )

    async with gateway_world() as world:
        port = int(world.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"gateway\.port={port}"):
            make_gateway(port=port).bind()
        with pytest.raises(ConfigError, match=r"gateway\.host=192\.0\.2\.1"):
            make_gateway(host="192.0.2.1").bind()
        unstarted = make_gateway()
        assert unstarted.bind() == unstarted.bind()
        await unstarted.aclose()
        public = make_gateway(public_url="http://here:8700/")
        assert public.bind() == "http://here:8700"
        await public.aclose()


@in_loop
async def test_closing_answers_what_is_in_hand_and_ends_every_session() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        asking = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        await world.gateway.aclose()
        status, answer = await asking
        assert (status, answer["error"]["message"]) == (410, "This session has ended: the run has ended")
        await world.gateway.aclose()


@in_loop
async def test_routes_of_others_are_answered_on_the_same_port_with_the_same_limits() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async with gateway_world(extra_routes=[web.post("/work/echo", echo)], max_body_bytes=2000) as world:
        async with world.http.post(world.url + "/work/echo", data=b"hello") as response:
            assert await response.read() == b"hello"
        async with world.http.post(world.url + "/work/echo", data=b"x" * 3000) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (
                413,
                "request_too_large",
            )
