"""transport=nccl: where engines meet for the weights of a version, who is waited for, who sends, and what one
that fails does to the others; and a commit through it, on a scripted vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm
from rollout_cases import virtual

from asyncrl.engines.vllm_broadcast import Broadcasts, step_timeout_s
from asyncrl.engines.vllm_process import VllmFacts
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.engines.vllm_weights import PushRules
from asyncrl.errors import EngineError, EngineLost, TrainerError
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, GroupSeat
from asyncrl.messages.calls import ExportResponse
from asyncrl.testing.virtual_time import all_blocked


class FakeSender:
    """A trainer that sends in a second, or fails."""

    def __init__(self) -> None:
        self.failure: TrainerError | None = None
        self.seconds = 1.0
        self.asked: list[BroadcastRequest] = []

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        self.asked.append(request)
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        return BroadcastResponse(version=request.version, digest="d", num_bytes=1)


class Receivers:
    """Engines that meet: what `take` of each one was given, and how it goes."""

    def __init__(self) -> None:
        self.sender = FakeSender()
        self.store = ""
        how: Any = {"timeout_s": 5.0, "store": lambda: self.store}
        self.broadcasts = Broadcasts(self.sender.broadcast, Path("/staging"), **how)
        self.seats: dict[str, list[GroupSeat]] = {}
        self.failing: dict[str, Exception] = {}
        self.seconds = {"a": 1.0, "b": 1.0}

    async def _take(self, name: str, seat: GroupSeat) -> None:
        self.seats.setdefault(name, []).append(seat)
        await asyncio.sleep(self.seconds[name])
        if name in self.failing:
            raise self.failing[name]

    def meet(self, version: int, names: str = "ab") -> list[Awaitable[None]]:
        for name in names:
            self.broadcasts.expect_nowait(name, version, 2)
        return [self.broadcasts.receive(name, version, partial(self._take, name)) for name in names]


@virtual
async def test_the_trainer_sends_once_and_only_when_all_that_have_not_left_wait() -> None:
    engines = Receivers()
    one, two, never = engines.meet(1, "abc")
    waiting = asyncio.gather(one, two)
    await all_blocked()
    assert not engines.sender.asked
    engines.broadcasts.leave_nowait("c")
    await waiting
    (request,) = engines.sender.asked
    seat = request.seat
    assert (request.version, seat.rank, seat.size, seat.timeout_s, seat.is_new) == (1, 0, 5, 5.0, True)
    assert [engines.seats[name][0].rank for name in "ab"] == [1, 3]
    assert {seat.path for (seat,) in engines.seats.values()} == {seat.path}
    with pytest.raises(EngineError, match="did not prepare"):
        await never


@virtual
async def test_a_group_is_kept_while_the_same_processes_take_part_and_formed_again_when_one_is_new() -> None:
    engines = Receivers()
    for version, names in enumerate(["ab", "ab", "a", "ab", "ab", "restart", "ab", "trainer", "ab"]):
        if names == "restart":
            engines.broadcasts.leave_nowait("b")  # its process was started again
        elif names == "trainer":
            engines.broadcasts.sender_gone_nowait()
            engines.store = "10.0.0.2:4000"  # on another node
        else:
            await asyncio.gather(*engines.meet(version, names))
    are_new = [request.seat.is_new for request in engines.sender.asked]
    assert are_new == [True, False, True, True, False, True, True]
    assert len({request.seat.path for request in engines.sender.asked}) == are_new.count(True)
    assert [request.seat.store for request in engines.sender.asked] == [""] * 6 + ["10.0.0.2:4000"]
    assert [seat.store for seat in engines.seats["b"]][-2:] == ["", "10.0.0.2:4000"]


@virtual
async def test_one_that_is_cut_at_the_very_moment_in_which_all_are_there_is_no_longer_waited_for() -> None:
    engines = Receivers()
    engines.sender.seconds, engines.seconds = 100.0, {"a": 100.0, "b": 100.0}
    one, two = engines.meet(1)
    first = asyncio.ensure_future(one)
    await all_blocked()
    second = asyncio.ensure_future(two)
    await asyncio.sleep(0)  # b has begun the round, and a is not awake yet
    first.cancel()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert "a: is gone" in str(outcomes[1])
    assert asyncio.get_running_loop().time() < 1.0


@pytest.mark.parametrize("who", ["a", "b", "trainer", "a is cut", "b is cut"])
@virtual
async def test_one_that_fails_before_all_is_sent_ends_it_for_all_and_the_next_group_is_new(who: str) -> None:
    engines = Receivers()
    sender = engines.sender
    sender.seconds, engines.seconds = 100.0, {"a": 100.0, "b": 100.0}
    if who == "trainer":
        sender.failure, sender.seconds = TrainerError("trainer", "a member is gone"), 2.0
    elif who in engines.seconds:
        engines.failing[who], engines.seconds[who] = EngineLost(who, "died"), 2.0
    tasks = [asyncio.ensure_future(part) for part in engines.meet(1)]
    await all_blocked()
    if who.endswith("cut"):
        tasks["ab".index(who[0])].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert asyncio.get_running_loop().time() < 3.0, "nobody waits for a group that is broken"
    assert all(isinstance(outcome, EngineError | asyncio.CancelledError) for outcome in outcomes)
    assert who != "trainer" or all("a member is gone" in str(outcome) for outcome in outcomes)
    sender.failure, sender.seconds, engines.failing, engines.seconds = None, 1.0, {}, {"a": 1.0, "b": 1.0}
    await asyncio.gather(*engines.meet(1))
    assert sender.asked[-1].seat.is_new
    assert sender.asked[-1].seat.path != sender.asked[0].seat.path


@virtual
async def test_an_engine_that_fails_after_all_was_sent_fails_alone() -> None:
    engines = Receivers()
    engines.seconds = {"a": 5.0, "b": 2.0}
    engines.failing["b"] = EngineError("b", "lacks a parameter")
    outcomes = await asyncio.gather(*engines.meet(1), return_exceptions=True)
    assert outcomes[0] is None
    assert "lacks a parameter" in str(outcomes[1])
    engines.failing.clear()
    await asyncio.gather(*engines.meet(2))
    assert engines.sender.asked[-1].seat.is_new


class ReceivingVllm(FakeVllm):
    """The fake, with vLLM's own weight-transfer routes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.infos: list[dict[str, Any]] = []

    async def _control(self, route: str, sent: dict[str, Any], query: dict[str, str]) -> Any:
        if route in ("/init_weight_transfer_engine", "/update_weights"):
            self.infos.append(sent)
        if route == "/finish_weight_update":
            assert self.pause is not None, "a load while something may run"
            self.weights = float(self.infos[-1]["update_info"]["version"])
        return await super()._control(route, sent, query)


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE += ["/update_weight_version", "/resume"]
JOIN = "/init_weight_transfer_engine"


@virtual
async def test_a_commit_goes_through_vllms_own_routes_in_their_order_and_joins_once() -> None:
    broadcasts, servers = Broadcasts(FakeSender().broadcast, Path("/staging"), timeout_s=5.0), []
    fakes = [ReceivingVllm("engine-0"), ReceivingVllm("engine-1")]
    for fake in fakes:
        facts = VllmFacts("/model", "float32", fake.slots, 1000, (), "cpu")
        servers.append(VllmServer(fake, facts=facts, rules=PushRules(1e-3)))
        servers[-1].meeting = broadcasts
        await servers[-1].ready(10.0)
        fake.calls.clear()
    for version in (1, 2):
        sent = {"version": version, "digest": f"d{version}", "num_tensors": 2, "num_bytes": 8}
        manifest = ExportResponse(path="", is_held=True, **sent)
        await asyncio.gather(*(server.prepare(manifest) for server in servers))
        await asyncio.gather(*(server.commit(version, f"d{version}", "abort") for server in servers))
    assert [server.policy_version for server in servers] == [2, 2]
    for fake in fakes:
        routes = [call.partition("?")[0] for call in fake.calls]
        ours = [route for route in routes if route in (*UPDATE, JOIN, "/pause")]
        assert ours == ["/pause", JOIN, *UPDATE, "/pause", *UPDATE]
        assert fake.infos[1]["update_info"] == sent | {"version": 1, "digest": "d1"}


def test_a_step_of_a_broadcast_may_take_longer_where_a_push_may() -> None:
    assert [step_timeout_s(timeout_s) for timeout_s in (30.0, 300.0, 600.0, 3600.0)] == [
        30.0,
        60.0,
        60.0,
        360.0,
    ]
