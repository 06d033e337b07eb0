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

from asyncrl.base.errors import (
    ComponentError,
    EngineError,
    EngineLost,
    TrainerError,
    TrainerLost,
    WeightsLost,
)
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import GroupMember
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportResponse,
)
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
        return [
            self.broadcasts.receive(name, version, partial(self._take, name))
            for name in names
        ]


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
    assert (member.rank, member.size, member.timeout_s, member.is_new) == (
        0,
        5,
        5.0,
        True,
    )
    assert [engines.ranks[name][0].rank for name in "ab"] == [1, 3]
    assert {engines.ranks[name][0].path for name in "ab"} == {member.path}
    with pytest.raises(EngineError, match="did not prepare"):
        await never


@virtual
async def test_group_is_formed_again_for_a_new_process() -> None:
    engines = Receivers()
    for version, names in enumerate(
        ["ab", "ab", "a", "ab", "restart", "ab", "trainer", "ab"]
    ):
        if names == "restart":
            engines.broadcasts.leave_nowait("b")  # its process was started again
        elif names == "trainer":
            engines.broadcasts.sender_gone_nowait()
            engines.store = "10.0.0.2:4000"  # on another node
        else:
            await asyncio.gather(*engines.meet(version, names))
    members = [request.member for request in engines.sender.asked]
    assert [member.is_new for member in members] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert len({member.path for member in members}) == 5
    assert [member.store for member in members] == [""] * 5 + ["10.0.0.2:4000"]


@pytest.mark.parametrize("who", ["a", "b", "trainer", "a is cut", "b is cut"])
@virtual
async def test_early_failure_ends_the_group_for_all(who: str) -> None:
    engines = Receivers()
    sender = engines.sender
    sender.seconds, engines.seconds = 100.0, {"a": 100.0, "b": 100.0}
    if who == "trainer":
        sender.failure, sender.seconds = TrainerLost("trainer", "a member is gone"), 2.0
    elif who in engines.seconds:
        engines.failing[who], engines.seconds[who] = EngineLost(who, "died"), 2.0
    tasks = [asyncio.ensure_future(part) for part in engines.meet(1)]
    await all_blocked()
    if who.endswith("cut"):
        tasks["ab".index(who[0])].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert asyncio.get_running_loop().time() < 3.0, (
        "nobody waits for a group that is broken"
    )
    assert all(
        isinstance(outcome, ComponentError | asyncio.CancelledError)
        for outcome in outcomes
    )
    assert who != "trainer" or all(
        isinstance(outcome, WeightsLost) for outcome in outcomes
    )
    sender.failure = None
    sender.seconds = 1.0
    engines.failing = {}
    engines.seconds = {"a": 1.0, "b": 1.0}
    await asyncio.gather(*engines.meet(1))
    assert sender.asked[-1].member.is_new
    assert sender.asked[-1].member.path != sender.asked[0].member.path


class SentEngine(FakeEngineServer):
    """A fake engine that receives weights and refuses a number of pushes."""

    num_refused = 0

    async def _handle(self, path: str, body: Any) -> Any:
        if path == "/prepare" and self.num_refused:
            self.num_refused -= 1
            await asyncio.sleep(0.5)
            raise self.refused(path, "it is not what was announced")
        return await super()._handle(path, body)


@virtual
async def test_engine_with_wrong_weights_twice_is_lost() -> None:
    group = BroadcastGroup(FakeSender().broadcast, Path("/staging"), timeout_s=5.0)
    fakes = [SentEngine(name, prepare_s=1.0) for name in ("engine-0", "engine-1")]
    engines = [EngineServer(fake, broadcast_group=group) for fake in fakes]
    lost: list[str] = []

    def on_lost(error: EngineLost) -> None:
        lost.append(error.component)
        engines[int(error.component[-1])].disconnect_nowait()

    for version in (1, 2):
        fakes[0].num_refused = version
        sent: Any = {
            "version": version,
            "digest": f"d{version}",
            "num_tensors": 2,
            "num_bytes": 8,
        }
        push = Push(version, engines, timeout_s=100.0, on_lost=on_lost)
        await push.whole(ExportResponse(path="", is_held=True, **sent))
        assert ([fake.policy_version for fake in fakes], lost) == (
            [1, version],
            ["engine-0"][: version - 1],
        )
    with pytest.raises(EngineLost, match="it is not what was announced"):
        await engines[0].health()
