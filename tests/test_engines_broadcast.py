"""transport=nccl: how engines meet, who fails, and commits over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from rollout_cases import virtual

from asyncrl.base.errors import EngineError, EngineLost, TrainerError
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import GroupMember
from asyncrl.messages.trainer_api import BroadcastRequest, BroadcastResponse, ExportResponse
from asyncrl.sync.push import Push
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
        self.broadcasts = BroadcastGroup(self.sender.broadcast, Path("/staging"), **how)
        self.ranks: dict[str, list[GroupMember]] = {}
        self.failing: dict[str, Exception] = {}
        self.seconds = {"a": 1.0, "b": 1.0}

    async def _take(self, name: str, member: GroupMember) -> None:
        self.ranks.setdefault(name, []).append(member)
        await asyncio.sleep(self.seconds[name])
        if name in self.failing:
            raise self.failing[name]

    def meet(self, version: int, names: str = "ab") -> list[Awaitable[None]]:
        for name in names:
            self.broadcasts.expect_nowait(name, version, 2)
        return [self.broadcasts.receive(name, version, partial(self._take, name)) for name in names]


@virtual
async def test_trainer_sends_once_after_all_engines_wait() -> None:
    engines = Receivers()
    one, two, never = engines.meet(1, "abc")
    waiting = asyncio.gather(one, two)
    await all_blocked()
    assert not engines.sender.asked
    engines.broadcasts.leave_nowait("c")
    await waiting
    (request,) = engines.sender.asked
    member = request.member
    assert (request.version, member.rank, member.size, member.timeout_s, member.is_new) == (
        1,
        0,
        5,
        5.0,
        True,
    )
    assert [engines.ranks[name][0].rank for name in "ab"] == [1, 3]
    assert {member.path for (member,) in engines.ranks.values()} == {member.path}
    with pytest.raises(EngineError, match="did not prepare"):
        await never


@virtual
async def test_group_is_formed_again_for_a_new_process() -> None:
    engines = Receivers()
    for version, names in enumerate(["ab", "ab", "a", "ab", "ab", "restart", "ab", "trainer", "ab"]):
        if names == "restart":
            engines.broadcasts.leave_nowait("b")  # its process was started again
        elif names == "trainer":
            engines.broadcasts.sender_gone_nowait()
            engines.store = "10.0.0.2:4000"  # on another node
        else:
            await asyncio.gather(*engines.meet(version, names))
    are_new = [request.member.is_new for request in engines.sender.asked]
    assert are_new == [True, False, True, True, False, True, True]
    assert len({request.member.path for request in engines.sender.asked}) == are_new.count(True)
    assert [request.member.store for request in engines.sender.asked] == [""] * 6 + ["10.0.0.2:4000"]
    assert [member.store for member in engines.ranks["b"]][-2:] == ["", "10.0.0.2:4000"]


@pytest.mark.parametrize("who", ["a", "b", "trainer", "a is cut", "b is cut"])
@virtual
async def test_early_failure_ends_the_group_for_all(who: str) -> None:
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
    assert sender.asked[-1].member.is_new
    assert sender.asked[-1].member.path != sender.asked[0].member.path


class SentEngine(FakeEngineServer):
    """A fake engine that receives weights and refuses a number of pushes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, prepare_s=1.0, swap_s=0.1)
        self.num_refused = 0

    async def _handle(self, path: str, body: Any) -> Any:
        if path == "/prepare":
            assert body.member is not None
            assert body.path == ""
            if self.num_refused:
                self.num_refused -= 1
                await asyncio.sleep(0.5)
                raise self.refused(path, "it is not what was announced")
        return await super()._handle(path, body)


class SentEngines:
    """Two of them with their clients, and a push of each version."""

    def __init__(self) -> None:
        broadcasts = BroadcastGroup(FakeSender().broadcast, Path("/staging"), timeout_s=5.0)
        self.fakes = [SentEngine("engine-0"), SentEngine("engine-1")]
        self.clients = [EngineServer(fake, broadcast_group=broadcasts) for fake in self.fakes]
        self.lost: list[str] = []

    def _on_lost(self, error: EngineLost) -> None:
        self.lost.append(error.room)
        self.clients[int(error.room[-1])].disconnect_nowait()

    async def push(self, version: int) -> None:
        sent: Any = {"version": version, "digest": f"d{version}", "num_tensors": 2, "num_bytes": 8}
        live = [client for client in self.clients if client.name not in self.lost]
        push = Push(version, live, timeout_s=100.0, on_lost=self._on_lost)
        await push.whole(ExportResponse(path="", is_held=True, **sent))

    @property
    def versions(self) -> list[int]:
        return [fake.policy_version for fake in self.fakes]


@virtual
async def test_engine_with_wrong_weights_twice_is_lost() -> None:
    engines = SentEngines()
    engines.fakes[0].num_refused = 1
    await engines.push(1)
    assert (engines.versions, engines.lost) == ([1, 1], [])
    engines.fakes[0].num_refused = 2
    await engines.push(2)
    assert (engines.versions, engines.lost) == ([1, 2], ["engine-0"])
    with pytest.raises(EngineLost, match="it is not what was announced"):
        await engines.clients[0].health()
