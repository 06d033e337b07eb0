"""Keys, ends and repeats: who may call until when, and which calls are one."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from gateway_cases import HI, ScriptedEngine, World, gateway_world, in_loop, is_deserted, make_gateway, until

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.branches import ChatNode
from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
from asyncrl.agents.endpoint.forms.responses_written import StoredResponse
from asyncrl.agents.endpoint.prefix_match import PromptMatch
from asyncrl.agents.endpoint.sessions import BEGUN_SHARE, GatewaySession
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import (
    Completion,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    SamplingRequest,
    VersionSpan,
    Work,
)
from asyncrl.rollouts.generators import HarnessGenerator
from asyncrl.rollouts.rollout import RolloutAttempt


@in_loop
async def test_a_key_opens_its_session_until_it_ends_and_its_reason_is_told_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.sessions.MAX_EXPIRED", 3)
    async with gateway_world() as world:
        opened = [world.open(f"g{number}/r0") for number in range(5)]
        assert len({session.key for session in opened}) == 5
        for session in opened[:4]:
            session.end_nowait("done")
        assert [(await world.ask_other(each))[0] for each in opened] == [401, 410, 410, 410, 200]
    assert opened[4].ended == world.open("late").ended, "all end with the gateway"


def num_held(world: World) -> int:
    room = world.session.room
    return room.most - room._free._value


def num_objects_of_sessions() -> int:
    kinds = (GatewaySession, GatewayCall, Answer, ChatNode, PromptMatch, StoredResponse, SamplingRequest)
    # isinstance() would read attributes of the objects, some of which warn
    return sum(issubclass(type(each), kinds) for each in gc.get_objects())


@in_loop
async def test_sessions_that_have_ended_leave_no_object_behind() -> None:
    async with gateway_world() as world:
        world.session.end_nowait("done")
        gc.collect()
        num_before = num_objects_of_sessions()
        chat = {"messages": HI, "response_format": {"type": "json_object"}}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("chat/completions", chat),
            ("chat/completions", {**chat, "stream": True, "n": 2}),
            ("completions", {"prompt": "Hi", "logprobs": 2}),
            ("responses", {"input": "Hi"}),
            ("responses", {"input": "More", "previous_response_id": "resp-3", "stream": True}),
            ("messages", {"messages": HI, "thread": {"type": "create"}}),
            ("messages", {"messages": HI, "thread": {"type": "continue", "previous_message_id": "msg-5"}}),
        ]
        for number in range(3):
            session = world.open(f"g{number}/r0")
            for path, body in calls:
                async with world.http.post(f"{world.url}/s/{session.key}/v1/{path}", json=body) as response:
                    await response.read()
                    assert response.status == 200, (path, body)
            session.end_nowait("done")
            assert session.rollout(0, Outcome(), 1.0), "its owner may still ask"
        del session
        world.engine.requests.clear()
        await until(lambda: world.gateway.stats().in_flight == 0)
        gc.collect()
        assert num_objects_of_sessions() == num_before


@in_loop
async def test_a_call_says_which_engine_has_the_conversation_so_far_in_its_cache() -> None:
    async with gateway_world() as world:
        for ask in (world.ask, world.ask, world.ask_other):
            assert (await ask())[0] == 200
        first, second, others_first = world.engine.requests
        assert first.after is others_first.after is None
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
async def test_a_call_in_flight_is_joined_by_its_retry_and_so_is_one_that_waits_its_turn() -> None:
    gate, body = asyncio.Event(), {"messages": HI}
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=1) as world:
        await cut_call(world, body)
        waiting = asyncio.ensure_future(world.post(body | {"max_tokens": 5}))
        await until(lambda: world.session.room.num_waiting == 1)
        waiting.cancel()
        await until(lambda: is_deserted(world))
        retries = [asyncio.ensure_future(world.post(each)) for each in (body, body | {"max_tokens": 5})]
        await until(lambda: len(open_clients(world)) == 2)
        gate.set()
        names = [answer["id"] for _, answer in await asyncio.gather(*retries)]
        assert names == ["chatcmpl-0", "chatcmpl-1"]
        assert len(world.engine.requests) == 2


@in_loop
async def test_a_client_that_asks_again_and_again_waits_once() -> None:
    gate, body = asyncio.Event(), {"messages": HI}
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=1) as world:
        await cut_call(world, body)
        free = BEGUN_SHARE - 1
        for _ in range(2 * BEGUN_SHARE):
            retry = asyncio.ensure_future(world.post(body, headers=RETRY))
            await until(lambda: len(open_clients(world)) == 1)
            retry.cancel()
            await until(lambda: is_deserted(world))
            await until(lambda: world.session.begun._value == free)
        last = asyncio.ensure_future(world.post(body, headers=RETRY))
        await until(lambda: len(open_clients(world)) == 1)
        gate.set()
        status, answer = await last
        assert (status, answer["id"], len(world.engine.requests)) == (200, "chatcmpl-0", 1)
        assert world.session.begun._value == BEGUN_SHARE


def open_clients(world: World) -> list[Any]:
    """Clients that are there, of calls in hand."""
    calls = [call for same in world.session.calls.values() for call in same]
    return [call for call in calls if not call.is_abandoned]


@pytest.mark.parametrize("is_streamed", [False, True])
@in_loop
async def test_a_call_that_is_left_is_given_up_after_a_moment_and_asked_again_later_is_the_same_call(
    monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.calls.gateway_call.GRACE_S", 0.0)
    gate, body = asyncio.Event(), {"messages": HI, "stream": is_streamed}
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=1) as world:
        await cut_call(world, body)
        await until(lambda: not world.gateway.stats().in_flight)
        assert world.engine.cancelled == ["g0/r0/a0/c0"]
        assert (num_held(world), world.session.calls, open_clients(world)) == (0, {}, [])
        gate.set()
        async with world.http.post(
            world.url + "/v1/chat/completions", json=body, headers=world.headers
        ) as response:
            assert (response.status, b"chatcmpl-1" in await response.read()) == (200, True)
        first, second = world.engine.requests
        assert first.request_id != second.request_id
        assert first.seed == second.seed, "an abandoned call does not count"
        assert world.session.capture.num_completions == 1, "what was sampled of it is no part of the rollout"
        assert sum(world.gateway.stats().refused.values()) == 0
        assert world.gateway.stats().edited == 0, "the second one begins the session"


@in_loop
async def test_calls_like_one_that_was_given_up_have_seeds_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.calls.gateway_call.GRACE_S", 0.0)
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        await cut_call(world, {"messages": HI})
        await until(lambda: not world.gateway.stats().in_flight)
        gate.set()
        for _ in range(3):
            assert (await world.post({"messages": HI}))[0] == 200
        given_up, *answered = (each.seed for each in world.engine.requests)
        assert len(set(answered)) == 3
        assert answered[0] == given_up


@in_loop
async def test_one_that_waits_is_given_up_where_it_waits_and_those_behind_it_move_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.calls.gateway_call.GRACE_S", 0.0)
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=2) as world:
        first = asyncio.ensure_future(world.ask("first"))
        await world.engine.started.wait()
        wide = asyncio.ensure_future(world.ask("wide", n=2))
        await until(lambda: world.session.room.num_waiting == 1)
        narrow = asyncio.ensure_future(world.ask("narrow"))
        await until(lambda: world.session.room.num_waiting == 2)
        assert len(world.engine.requests) == 1, "the wide one was first"
        wide.cancel()
        await until(lambda: len(world.engine.requests) == 2)
        gate.set()
        assert [(await each)[0] for each in (first, narrow)] == [200, 200]
        assert num_held(world) == 0


@in_loop
async def test_calls_that_wait_end_with_their_session() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event()), max_concurrent_calls=1) as world:
        asking = [asyncio.ensure_future(world.ask(f"call {number}")) for number in range(9)]
        await until(lambda: world.session.room.num_waiting == 3)  # the others wait unread
        world.session.end_nowait("done")
        assert [(await each)[0] for each in asking] == [410] * 9
        assert (world.session.room.num_waiting, num_held(world)) == (0, 0)


@pytest.mark.parametrize("shapes", [({"max_tokens": 5}, {"max_tokens": 50}), ({"stop": "a"}, {"stop": "b"})])
@in_loop
async def test_seeds_do_not_depend_on_the_order_of_arrival(shapes: tuple[dict[str, Any], ...]) -> None:
    found = []
    for order in (shapes, shapes[::-1]):
        async with gateway_world() as world:
            for shape in (*order, {}):
                assert (await world.ask("same", **shape))[0] == 200
            found.append({(each.max_tokens, each.stop): each.seed for each in world.engine.requests})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 3


@in_loop
async def test_an_idempotency_key_names_one_call_and_one_body() -> None:
    async with gateway_world() as world:
        found = []
        for key, more in (("k1", {}), ("k1", {}), ("k2", {}), ("k1", {"max_tokens": 5})):
            _, answer = await world.post({"messages": HI, **more}, headers={"Idempotency-Key": key})
            found.append(answer["id"])
        assert found == ["chatcmpl-0", "chatcmpl-0", "chatcmpl-1", "chatcmpl-2"]


@in_loop
async def test_the_port_is_taken_before_the_start_and_a_taken_one_is_a_config_error() -> None:
    async with gateway_world() as world:
        port = int(world.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"gateway\.port={port}"):
            make_gateway(ScriptedEngine(), [], port=port).bind()
        unstarted, public = [
            make_gateway(ScriptedEngine(), [], public_url=url) for url in (None, "http://here:8700/")
        ]
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


class TalkingWorker:
    """A queue whose worker talks on until a call is refused, and fails of that; and a task of reward 0.25."""

    def scores(self, prompt: Any) -> bool:
        return True

    def __init__(self, world: World, *, is_stubborn: bool) -> None:
        self._world, self._is_stubborn = world, is_stubborn

    async def run(self, work: Work, *, started: Any) -> Outcome:
        started()
        messages, headers = [*HI], {"Authorization": f"Bearer {work.key}"}
        while True:
            status, answer = await self._world.post({"messages": messages}, headers=headers)
            if status == 200:
                messages += [answer["choices"][0]["message"], *HI]
            elif not self._is_stubborn:
                raise RolloutFailure("exit code 1")

    def shows_special(self, prompt: Any) -> bool:
        return True

    async def score(self, prompt: Prompt, completion: str) -> float:
        assert completion == "Hello there."
        return 0.25


@pytest.mark.parametrize("is_stubborn", [False, True])
@pytest.mark.parametrize("limit", [{"max_prompt_tokens": 80}, {"max_calls": 2}, {"max_rollout_tokens": 80}])
@in_loop
async def test_a_harness_that_fails_of_a_limit_or_calls_on_leaves_a_rollout_that_the_task_scores(
    limit: dict[str, int], is_stubborn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limit = {"max_calls": 3} | limit
    async with gateway_world(**limit) as world:
        worker: Any = TalkingWorker(world, is_stubborn=is_stubborn)

        async def attempt(on_overflow: Any) -> Rollout:
            about = RolloutAttempt(f"g0/{on_overflow}", GroupId(0), Prompt("p0", tuple(HI)), 0)
            generator = HarnessGenerator(world.gateway, worker, worker, on_overflow=on_overflow)
            score = await generator.sample(about)
            return await score()

        rollout: Rollout = await attempt("truncate")
        assert [(branch.reward, branch.is_truncated) for branch in rollout] == [(0.25, True)]
        assert rollout[0].num_sampled >= 2 * 13
        assert ("and called on" if is_stubborn else "exit code 1") in caplog.text
        with pytest.raises(RolloutFailure, match=r"limit|exit code 1"):
            await attempt("fail")


@pytest.mark.parametrize(
    ("shows_special", "content"), [(True, "He<|start|>llo"), (False, "Hello")], ids=["visible", "stripped"]
)
@in_loop
async def test_an_agent_gets_the_special_tokens_that_the_task_shows(
    shows_special: bool, content: str
) -> None:
    async with gateway_world(ScriptedEngine(lambda _: "He<|start|>llo")) as world:
        about: Any = {"prompt_id": "p0", "sample_index": 0, "attempt": 0, "route_key": "r"}
        session = world.gateway.open_nowait("g1/r0", shows_special=shows_special, **about)
        status, answer = await world.ask_other(session)
        message = answer["choices"][0]["message"]
        assert (status, message["content"]) == (200, content)
        assert session.last_text() == content
        headers = {"Authorization": f"Bearer {session.key}"}
        await world.post({"messages": [*HI, message, *HI]}, headers=headers)
        stats = world.gateway.stats()
        assert (stats.extended, stats.realigned) == ((1, 0) if shows_special else (0, 1))
        (branch,) = session.rollout(0, Outcome(), 1.0)
        assert branch.num_sampled == 2 * len("Hello") + 4, "every token is trained on, shown or not"
