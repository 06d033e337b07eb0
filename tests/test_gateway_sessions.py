"""Sessions: keys, ends, limits, seeds, retries."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import socket
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_cases import (
    HI,
    ScriptedEngine,
    World,
    gateway_world,
    in_loop,
    make_gateway,
    num_calls,
    until,
)
from token_cases import completion_of

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.calls import GatewayCall
from asyncrl.agents.endpoint.chat_node import ChatNode
from asyncrl.agents.endpoint.prefix_match import PromptMatch
from asyncrl.agents.endpoint.requests import ApiError
from asyncrl.agents.endpoint.session import GatewaySession
from asyncrl.agents.endpoint.sessions import (
    MAX_REMEMBERED,
    NUM_RETRIED,
    OPEN_SHARE,
    Retries,
    Written,
)
from asyncrl.agents.harness import Session
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.journal.schema import decode_trajectory, encode_trajectory
from asyncrl.messages.records import Completion, Outcome, SessionRules, VersionSpan
from asyncrl.messages.sampling import SamplingRequest

SESSIONS = "asyncrl.agents.endpoint.sessions"
streams = pytest.mark.parametrize("is_streamed", [False, True])


@in_loop
async def test_key_opens_its_session_until_its_end() -> None:
    async with gateway_world() as world:
        ended, opened = [world.open(f"g{number}/r0") for number in range(2)]
        ended.end_nowait("done")
        assert [(await world.ask_other(each))[0] for each in (ended, opened)] == [
            401,
            200,
        ]
    assert opened.ended == "the run has ended"


def objects_of_sessions() -> Counter[str]:
    """Count the objects that were made after the last gc.freeze()."""
    kinds = (
        GatewaySession,
        GatewayCall,
        Answer,
        ChatNode,
        PromptMatch,
        SamplingRequest,
    )
    # isinstance() would read attributes of the objects, and some warn
    found = [type(each) for each in gc.get_objects()]
    return Counter(kind.__name__ for kind in found if issubclass(kind, kinds))


@pytest.mark.slow
@in_loop
async def test_ended_sessions_leave_no_objects() -> None:
    async with gateway_world() as world:
        world.session.end_nowait("done")
        # Objects of earlier tests may still go while this one counts.
        gc.freeze()
        chat = {"messages": HI, "response_format": {"type": "json_object"}}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("chat/completions", {**chat, "stream": True}),
            ("completions", {"prompt": "Hi"}),
            ("responses", {"input": "Hi"}),
            (
                "responses",
                {"input": "More", "previous_response_id": "resp-2", "stream": True},
            ),
            ("messages", {"messages": HI, "thread": {"type": "create"}}),
        ]
        for number in range(2):
            session = world.open(f"g{number}/r0")
            for path, body in calls:
                async with world.http.post(
                    f"{world.url}/s/{session.key}/v1/{path}", json=body
                ) as response:
                    await response.read()
                    assert response.status == 200, (path, body)
            session.end_nowait("done")
            assert session.rollout(0, Outcome(), 1.0), "its owner may still ask"
        del session
        world.engine.requests.clear()
        for _ in range(1000):
            gc.collect()
            if not objects_of_sessions():
                break
            await asyncio.sleep(0.01)
        assert not objects_of_sessions()


@in_loop
async def test_call_names_the_engine_with_its_cache() -> None:
    async with gateway_world() as world:
        for ask in (world.ask, world.ask, world.ask_other):
            assert (await ask())[0] == 200
        first, second, others_first = world.engine.requests
        assert first.after is others_first.after is None
        assert (second.after.version, second.after.engine) == (5, 3), (
            "the end of the answer before"
        )


@in_loop
async def test_calls_in_flight_get_the_first_reason_of_the_end() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        in_hand = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        world.session.end_nowait("rollout.timeout_s=5 is over")
        world.session.end_nowait("something else")
        status, answer = await in_hand
        assert (status, answer["error"]["code"]) == (410, "session_ended")
        assert "rollout.timeout_s=5" in answer["error"]["message"]
        assert world.engine.cancelled == ["g0/r0/a0/c0"]
        assert world.session.num_completions == 0


@in_loop
async def test_session_may_end_while_a_client_leaves() -> None:
    async with gateway_world() as world:
        client = SimpleNamespace(on_lost=lambda: None, written=None)

        async def call() -> None:
            async with world.session.in_hand(client):
                await asyncio.Event().wait()

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        client.on_lost()
        await asyncio.sleep(0)  # its block is cancelled, and has not ended yet
        client.on_lost()
        world.session.end_nowait("done")
        with pytest.raises(ApiError, match="This session has ended: done"):
            await calling


@streams
@in_loop
async def test_call_without_client_is_cancelled_and_keeps_its_seed(
    is_streamed: bool,
) -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        asking = asyncio.ensure_future(
            world.post({"messages": HI, "stream": is_streamed})
        )
        await world.engine.started.wait()
        asking.cancel()
        await until(lambda: world.engine.cancelled == ["g0/r0/a0/c0"])
        gate.set()
        for _ in range(3):
            assert (await world.ask())[0] == 200
        cut, *answered = [each.seed for each in world.engine.requests]
        assert cut == answered[0]
        assert len(set(answered)) == 3
        assert world.session.num_completions == 3
        assert num_calls(world, "refused") == 0
        assert num_calls(world, "edited") == 2, "the second call starts the session"


def retry(number: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(number)}


async def sent(world: World, number: int, **body: Any) -> bytes:
    """Return the whole answer to a call; `number` of its retry."""
    headers = world.headers | retry(number)
    url = f"{world.url}/v1/chat/completions"
    async with world.http.post(
        url, headers=headers, json={"messages": HI, **body}
    ) as response:
        assert response.status == 200
        return await response.read()


@streams
@in_loop
async def test_retry_of_an_only_call_gets_its_answer(is_streamed: bool) -> None:
    async with gateway_world() as world:
        ask = partial(sent, world, stream=is_streamed)
        first, again, *others = [await ask(number) for number in (0, 1, 0, 1)]
        others.append(await ask(1, max_tokens=5))
        assert again == first, "nobody else can have asked for it"
        assert len({first, *others}) == 4, (
            "of two equal answers, each may belong to another call"
        )
        assert world.session.num_completions == 4


@streams
@pytest.mark.parametrize("is_seen", [False, True])
@in_loop
async def test_retry_never_gets_the_answer_of_an_equal_call(
    is_streamed: bool, is_seen: bool
) -> None:
    """Best of three with one timeout, which the gateway may see only after the retry."""
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        ask = partial(sent, world, stream=is_streamed)
        calls = [asyncio.ensure_future(ask(0)) for _ in range(3)]
        await until(lambda: len(world.engine.requests) == 3)
        calls[1].cancel()
        if is_seen:
            await until(lambda: len(world.engine.cancelled) == 1)
            gate.set()
            await asyncio.gather(calls[0], calls[2])
        retried = asyncio.ensure_future(ask(1))
        gate.set()
        answers = await asyncio.gather(calls[0], calls[2], retried)
        assert len({*answers}) == 3
        if is_seen:
            assert world.engine.requests[3].seed == world.engine.requests[1].seed
        assert await ask(2) not in answers, "a second retry is a fourth call"
        assert (
            sum(each.num_sampled for each in world.session.rollout(0, Outcome(), 1.0))
            == 4 * 13
        )


@streams
@in_loop
async def test_answer_that_its_client_did_not_read_is_given_again(
    is_streamed: bool,
) -> None:
    body = json.dumps({"messages": HI, "stream": is_streamed}).encode()
    async with gateway_world() as world:
        host, port = world.url.removeprefix("http://").split(":")
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"Authorization: {world.headers['Authorization']}",
        ]
        head = "\r\n".join(
            [*lines, f"Content-Length: {len(body)}", "Host: x", "", ""]
        ).encode()
        for num_answers, is_read in ((1, True), (2, False)):
            with socket.create_connection((host, int(port))) as client:
                client.settimeout(60)
                client.sendall(head + body)
                end = b"0\r\n\r\n" if is_streamed else b"}}"
                while is_read and not (
                    await asyncio.to_thread(client.recv, 2**16)
                ).endswith(end):
                    pass
                await until(
                    lambda number=num_answers: world.session.num_completions == number
                )
            await until(lambda: not world.gateway.listener.connections)
        lost, new = [
            await world.http.post(
                f"{world.url}/v1/chat/completions",
                data=body,
                headers=world.headers | retry(number),
            )
            for number in (1, 2)
        ]
        assert [b'"chatcmpl-1"' in await each.read() for each in (lost, new)] == [
            True,
            False,
        ]
        assert lost.content_type == (
            "text/event-stream" if is_streamed else "application/json"
        )
        assert world.session.num_completions == 3


def test_session_remembers_few_and_short_answers() -> None:
    retries = Retries()
    short, long = (
        Written(b"x" * size, is_stream=False, is_lost=True)
        for size in (MAX_REMEMBERED, MAX_REMEMBERED + 1)
    )
    retries.keep_nowait(b"short", short)
    retries.keep_nowait(b"long", long)
    assert retries.begin(b"short", is_retry=True) == short
    assert retries.begin(b"long", is_retry=True) is None
    short.is_lost = True
    for _ in range(NUM_RETRIED):
        retries.keep_nowait(b"newer", Written(b"", is_stream=False))
    assert retries.begin(b"short", is_retry=True) is None, (
        "newer answers have replaced it"
    )


class CountingEngine(ScriptedEngine):
    """Counts the answers sampled at once."""

    num_now = num_most = 0

    async def generate(self, request: Any, **more: Any) -> Any:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await super().generate(request, **more)
        finally:
            self.num_now -= 1


@in_loop
async def test_flooding_harness_waits_until_its_calls_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{SESSIONS}.MAX_CONCURRENT_CALLS", 4)
    gate = asyncio.Event()
    engine = CountingEngine(gate=gate)
    async with gateway_world(engine, max_calls=6) as world:
        flood = [
            asyncio.ensure_future(world.ask(f"call {number}")) for number in range(40)
        ]
        await until(lambda: num_calls(world, "refused") == 34)
        gate.set()
        statuses = [status for status, _ in await asyncio.gather(*flood)]
        assert (statuses.count(200), statuses.count(429), engine.num_most) == (6, 34, 4)
        assert (await world.ask_other())[0] == 200


@in_loop
async def test_waiting_calls_end_with_their_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{SESSIONS}.MAX_CONCURRENT_CALLS", 1)
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        asking = [
            asyncio.ensure_future(world.ask(f"call {number}")) for number in range(9)
        ]
        # the others wait unread
        await until(lambda: world.session.num_calls == OPEN_SHARE)
        world.session.end_nowait("done")
        assert [(await each)[0] for each in asking] == [410] * 9


A, B, SEEDED = {"text": "a"}, {"text": "b"}, {"text": "a", "seed": 5}


@in_loop
async def test_seeds_do_not_depend_on_the_order_of_arrival() -> None:
    calls: list[dict[str, Any]] = [A, B, A, SEEDED, SEEDED]
    seeds = []
    for order in (calls, calls[::-1]):
        async with gateway_world() as world:
            for call in order:
                assert (await world.ask(**call))[0] == 200
            pairs = zip(
                map(str, order),
                [request.seed for request in world.engine.requests],
                strict=True,
            )
            seeds.append(sorted(pairs))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4, "equal calls with a seed are the same"


@in_loop
async def test_port_is_bound_before_start_or_refused() -> None:
    async with gateway_world() as world:
        port = int(world.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"gateway\.port={port}"):
            make_gateway(ScriptedEngine(), [], port=port).bind()
        unstarted, public = [
            make_gateway(ScriptedEngine(), [], public_url=url)
            for url in (None, "http://here:8700/")
        ]
        assert unstarted.bind() == unstarted.bind()
        assert public.bind() == "http://here:8700"
        await unstarted.aclose()
        await public.aclose()


@in_loop
async def test_answer_after_the_end_is_not_recorded() -> None:
    told: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    class Told(ScriptedEngine):
        async def generate(self, request: SamplingRequest, **_: Any) -> Completion:
            self.started.set()
            return await told

    async with gateway_world(Told()) as world:
        asking = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        told.set_result(
            completion_of((72, 105), spans=[VersionSpan(0, 2, 1)], finish="stop")
        )
        world.session.end_nowait("its harness has finished")
        assert (await asking)[0] == 410
        assert world.session.num_completions == 0


@in_loop
async def test_flood_of_refused_calls_fails_the_rollout() -> None:
    async with gateway_world(max_calls=2) as world:
        refused = [await world.post(b"no JSON") for _ in range(21)]
        assert {status for status, _ in refused} == {400}
        assert (await world.ask())[0] == 401
        with pytest.raises(
            RolloutFailure, match=r"21 of its calls.*10 times gateway.max_calls=2"
        ):
            world.session.rollout(0, Outcome(), 0.0)


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("max_prompt_tokens", 60, 400),
        ("max_calls", 2, 429),
        ("max_rollout_tokens", 60, 429),
    ],
)
@in_loop
async def test_rollout_at_a_limit_is_truncated(
    name: str, limit: int, expected: int
) -> None:
    async with gateway_world(**{name: limit}) as world:
        messages = [*HI]
        for _ in range(9):
            status, answer = await world.post({"messages": messages})
            if status != 200:
                break
            assert world.session.overflow is None
            messages += [answer["choices"][0]["message"], *HI]
        assert (status, answer["error"]["message"]) == (
            expected,
            world.session.overflow,
        )
        (branch,) = world.session.rollout(0, Outcome(), 0.0)
        assert branch.is_truncated
        if status == 400:  # a shortened conversation may continue
            assert (await world.ask("Ho"))[0] == 200
            assert not any(
                branch.is_truncated
                for branch in world.session.rollout(0, Outcome(), 0.0)
            )


@pytest.mark.parametrize(
    ("shows_special", "content"),
    [(True, "He<|start|>llo"), (False, "Hello")],
    ids=["visible", "stripped"],
)
@in_loop
async def test_agent_gets_the_special_tokens_of_its_task(
    shows_special: bool, content: str
) -> None:
    async with gateway_world(ScriptedEngine(lambda _: "He<|start|>llo")) as world:
        about: Any = {
            "prompt_id": "p0",
            "sample_index": 0,
            "attempt": 0,
            "route_key": "r",
        }
        session = world.gateway.open_nowait(
            "g1/r0", rules=SessionRules(shows_special=shows_special), **about
        )
        status, answer = await world.ask_other(session)
        message = answer["choices"][0]["message"]
        assert (status, message["content"]) == (200, content)
        headers = {"Authorization": f"Bearer {session.key}"}
        await world.post({"messages": [*HI, message, *HI]}, headers=headers)
        assert num_calls(world, "extended" if shows_special else "realigned") == 1
        (branch,) = session.rollout(0, Outcome(), 1.0)
        assert branch.num_sampled == 2 * len("Hello") + 4, (
            "every token is trained on, shown or not"
        )


@in_loop
async def test_name_of_a_completion_is_no_agent() -> None:
    """A client sets X-Session-ID: it could move the rewards of answers otherwise."""
    async with gateway_world() as world:
        for text, agent in (("one", "chatcmpl-1"), ("two", "chatcmpl-1")):
            status, _ = await world.post(
                {"messages": [{"role": "user", "content": text}]},
                headers={"X-Session-ID": agent},
            )
            assert status == 200
        rewards = {"chatcmpl-0": 0.0, "chatcmpl-1": 1.0}
        rollout = world.session.rollout(0, Outcome(turn_rewards=rewards), 0.5)
        found = [credit.reward for branch in rollout for credit in branch.credits]
        assert sorted(found) == [0.0, 1.0]


@in_loop
async def test_rewards_of_agents_are_not_added_over_turns() -> None:
    async with gateway_world() as world:
        for agent in ("white", "black"):
            await world.post({"messages": HI}, headers={"X-Session-ID": agent})
        outcome = Outcome(turn_rewards={"white": 1.0, "black": -1.0})
        world.session.rollout(0, outcome, 0.0)
        with pytest.raises(
            RolloutFailure, match="its rewards are of agents: black, white"
        ):
            world.session.rollout(0, outcome, 0.0, by_turn=True)


AGENTS = {
    "": "plan",
    "searcher": "search",
    "searcher/reader": "read",
    "writer": "write",
}
"""Agent -> text of its call."""


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"main": 1.0}, [1.0, 1.0, 1.0, 1.0]),
        ({"main": 1.0, "searcher": 0.5}, [1.0, 0.5, 0.5, 1.0]),
        ({"main": 1.0, "searcher/reader": 0.2}, [1.0, 1.0, 0.2, 1.0]),
        ({"chatcmpl-0": 0.0, "searcher": 0.5, "writer": 2.0}, [0.0, 0.5, 0.5, 2.0]),
        ({"searcher": 0.5, "writer": 2.0}, "every completion"),
        ({"main": 1.0, "sercher": 0.5}, "made no call; its agents are"),
    ],
)
@in_loop
async def test_sub_agents_share_or_split_the_reward(
    rewards: dict[str, float], expected: list[float] | str
) -> None:
    """An agent without its own reward earns the reward of the agent above it."""
    async with gateway_world() as world:
        for agent, text in AGENTS.items():
            headers = {"X-Session-ID": agent} if agent else {}
            messages = [{"role": "user", "content": text}]
            assert (await world.post({"messages": messages}, headers=headers))[0] == 200
        outcome = Outcome(turn_rewards=rewards)
        if isinstance(expected, str):
            with pytest.raises(RolloutFailure) as caught:
                world.session.rollout(0, outcome, 0.5)
            assert expected in str(caught.value)
            return
        rollout = world.session.rollout(0, outcome, 0.5)
        branches = [
            decode_trajectory(encode_trajectory(0, one), 0, 0, one.branch)
            for one in rollout
        ]
        found = {branch.calls[0].agent: branch.credits[0].reward for branch in branches}
        assert found == dict(zip(AGENTS, expected, strict=True))
        assert {branch.credits[0].state for branch in branches} == {""}
        named = replace(outcome, roles={"searcher": "reader"})
        states = {
            branch.calls[0].agent: branch.credits[0].state
            for branch in world.session.rollout(0, named, 0.5)
        }
        others = {agent: agent or "main" for agent in AGENTS}
        assert states == others | {"searcher": "reader"}


@in_loop
async def test_equal_calls_of_two_agents_are_no_retries() -> None:
    """Their clients may retry: each gets its own answer."""
    async with gateway_world() as world:
        names = []
        for agent in ("white", "black", "black"):
            headers = {"X-Session-ID": agent, "X-Stainless-Retry-Count": "1"}
            _, answer = await world.post({"messages": HI}, headers=headers)
            names.append(answer["id"])
        assert names[0] != names[1] == names[2]


@in_loop
async def test_long_name_of_an_agent_is_refused() -> None:
    async with gateway_world() as world:
        headers = {"X-Session-ID": "a" * 257}
        status, answer = await world.post({"messages": HI}, headers=headers)
        assert status == 400
        assert "at most 256" in answer["error"]["message"]


@in_loop
async def test_child_of_a_session_calls_as_its_agent() -> None:
    async with gateway_world() as world:
        session = Session(f"{world.url}/v1", world.session.key, "policy")
        reader = session.child("searcher").child("reader")
        async with session.client, reader.client:
            for number, each in enumerate((session, reader)):
                await each.client.chat.completions.create(
                    model=each.model,
                    messages=[{"role": "user", "content": f"{number}"}],
                )
        rollout = world.session.rollout(0, Outcome(), 0.5)
        agents = {call.agent for branch in rollout for call in branch.calls}
        assert agents == {"", "searcher/reader"}
        assert {branch.reward for branch in rollout} == {0.5}
    for role in ("", "a/b", "Müller", "a\nb", "a "):
        with pytest.raises(ConfigError, match="a role is printable ASCII"):
            session.child(role)


@in_loop
async def test_equal_prompts_of_sub_agents_have_different_seeds() -> None:
    """The order of their arrival differs between runs. Names that the harness did not
    choose may differ, too: their seeds follow the order.
    """
    seeds = []
    made_up = []
    for order in (("white", "black"), ("black", "white")):
        async with gateway_world() as world:
            session = Session(f"{world.url}/v1", world.session.key, "policy")
            found = {}
            for role in order:
                headers = session.child(role).child("reader").headers
                await world.post({"messages": HI}, headers=headers)
                found[role] = world.engine.requests[-1].seed
            seeds.append(found)
            for _ in order:
                headers = {"X-Session-ID": secrets.token_hex(16)}
                await world.post({"messages": HI}, headers=headers)
            made_up.append([each.seed for each in world.engine.requests[-2:]])
    assert seeds[0] == seeds[1]
    assert seeds[0]["white"] != seeds[0]["black"]
    assert made_up[0] == made_up[1]


@in_loop
async def test_agent_that_only_delegates_may_have_the_reward() -> None:
    async with gateway_world() as world:
        await world.post({"messages": HI}, headers={"X-Session-ID": "searcher/reader"})
        outcome = Outcome(turn_rewards={"main": 1.0, "searcher": 0.5})
        (branch,) = world.session.rollout(0, outcome, 0.0)
        assert branch.credits[0].reward == 0.5


@in_loop
async def test_message_that_changes_between_calls_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway_world() as world:
        for number in range(3):
            clock = {"role": "system", "content": f"It is 12:0{number}."}
            history = [{"role": "assistant", "content": "Hello there."}, *HI] * number
            assert (await world.post({"messages": [clock, *HI, *history]}))[0] == 200
        other = [{"role": "system", "content": "You plan."}, {**HI[0], "content": "x"}]
        assert (await world.post({"messages": other}))[0] == 200
    (record,) = [each for each in caplog.records if "differs" in each.message]
    assert "messages[0] (system) differs from the call before" in record.message
    assert "It is 12:01." in record.message


@in_loop
async def test_agent_without_a_call_is_told_of_caches() -> None:
    async with gateway_world() as world:
        for end in (
            world.session.last_completion,
            lambda: world.session.rollout(0, Outcome(1.0), 1.0),
        ):
            with pytest.raises(RolloutFailure, match="completion") as failure:
                end()
            assert failure.value.kind == FailureKind.NO_CALL
            assert "litellm.cache" in str(failure.value)
