"""Where engines meet for the weights of a version: who is waited for, who sends, and what one that fails does
to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import EngineError, EngineLost, TrainerError
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, GroupSeat
from asyncrl.sync.broadcast import Broadcasts
from asyncrl.sync.publisher import Publisher
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import all_blocked, run_virtual


class FakeSender:
    """A trainer that sends in a second, or fails."""

    def __init__(self, failure: TrainerError | None = None, seconds: float = 1.0) -> None:
        self.failure, self.seconds = failure, seconds
        self.asked: list[BroadcastRequest] = []

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        self.asked.append(request)
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        return BroadcastResponse(version=request.version, digest="d", num_bytes=1)


class Receivers:
    """What `take` of each engine was given, and how it goes."""

    def __init__(self) -> None:
        self.seats: dict[str, list[GroupSeat]] = {}
        self.failing: dict[str, Exception] = {}
        self.seconds: dict[str, float] = {}

    def of(self, name: str) -> Callable[[GroupSeat], Awaitable[None]]:
        async def take(seat: GroupSeat) -> None:
            self.seats.setdefault(name, []).append(seat)
            await asyncio.sleep(self.seconds.get(name, 1.0))
            if name in self.failing:
                raise self.failing[name]

        return take


def meet(broadcasts: Broadcasts, receivers: Receivers, version: int, names: str) -> list[Awaitable[None]]:
    for name in names:
        broadcasts.expect_nowait(name, version, 2)
    return [broadcasts.receive(name, version, receivers.of(name)) for name in names]


def play(story: Callable[[FakeSender, Receivers, Broadcasts], Coroutine[Any, Any, None]]) -> None:
    async def begin() -> None:
        sender = FakeSender()
        await story(sender, Receivers(), Broadcasts(sender, Path("/staging"), timeout_s=5.0))

    run_virtual(begin())


def test_the_trainer_sends_once_and_only_when_all_that_have_not_left_wait() -> None:
    async def story(sender: FakeSender, receivers: Receivers, broadcasts: Broadcasts) -> None:
        one, two, never = meet(broadcasts, receivers, 1, "abc")
        waiting = asyncio.gather(one, two)
        await all_blocked()
        assert not sender.asked
        broadcasts.leave_nowait("c")
        await waiting
        (request,) = sender.asked
        seat = request.seat
        assert (request.version, seat.rank, seat.size, seat.timeout_s, seat.is_new) == (1, 0, 5, 5.0, True)
        assert [receivers.seats[name][0].rank for name in "ab"] == [1, 3]
        assert {seat.path for (seat,) in receivers.seats.values()} == {seat.path}
        with pytest.raises(EngineError, match="did not prepare"):
            await never

    play(story)


def test_a_group_is_kept_while_the_same_processes_take_part_and_formed_again_when_one_is_new() -> None:
    async def story(sender: FakeSender, receivers: Receivers, broadcasts: Broadcasts) -> None:
        for version, names in enumerate(["ab", "ab", "a", "ab", "ab", "restart", "ab", "trainer", "ab"]):
            if names == "restart":
                broadcasts.leave_nowait("b")  # its process was started again
            elif names == "trainer":
                broadcasts.sender_gone_nowait()
            else:
                await asyncio.gather(*meet(broadcasts, receivers, version, names))
        are_new = [request.seat.is_new for request in sender.asked]
        assert are_new == [True, False, True, True, False, True, True]
        assert len({request.seat.path for request in sender.asked}) == are_new.count(True)

    play(story)


def test_one_that_is_cut_at_the_very_moment_in_which_all_are_there_is_no_longer_waited_for() -> None:
    async def story(sender: FakeSender, receivers: Receivers, broadcasts: Broadcasts) -> None:
        sender.seconds, receivers.seconds = 100.0, {"a": 100.0, "b": 100.0}
        one, two = meet(broadcasts, receivers, 1, "ab")
        first = asyncio.ensure_future(one)
        await all_blocked()
        second = asyncio.ensure_future(two)
        await asyncio.sleep(0)  # b has begun the round, and a is not awake yet
        first.cancel()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert "a: is gone" in str(outcomes[1])
        assert asyncio.get_running_loop().time() < 1.0

    play(story)


@pytest.mark.parametrize("who", ["a", "b", "trainer", "a is cut", "b is cut"])
def test_one_that_fails_before_all_is_sent_ends_it_for_all_and_the_next_group_is_new(who: str) -> None:
    async def story(sender: FakeSender, receivers: Receivers, broadcasts: Broadcasts) -> None:
        sender.seconds, receivers.seconds = 100.0, {"a": 100.0, "b": 100.0}
        if who == "trainer":
            sender.failure, sender.seconds = TrainerError("trainer", "a member is gone"), 2.0
        if who in receivers.seconds:
            receivers.failing[who], receivers.seconds[who] = EngineLost(who, "died"), 2.0
        tasks = [asyncio.ensure_future(part) for part in meet(broadcasts, receivers, 1, "ab")]
        await all_blocked()
        if who.endswith("cut"):
            tasks["ab".index(who[0])].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert asyncio.get_running_loop().time() < 3.0, "nobody waits for a group that is broken"
        assert all(isinstance(outcome, EngineError | asyncio.CancelledError) for outcome in outcomes)
        assert who != "trainer" or all("a member is gone" in str(outcome) for outcome in outcomes)
        sender.failure, sender.seconds, receivers.failing, receivers.seconds = None, 1.0, {}, {}
        await asyncio.gather(*meet(broadcasts, receivers, 1, "ab"))
        assert sender.asked[-1].seat.is_new
        assert sender.asked[-1].seat.path != sender.asked[0].seat.path

    play(story)


def test_an_engine_that_fails_after_all_was_sent_fails_alone() -> None:
    async def story(sender: FakeSender, receivers: Receivers, broadcasts: Broadcasts) -> None:
        receivers.seconds = {"a": 5.0, "b": 2.0}
        receivers.failing["b"] = EngineError("b", "lacks a parameter")
        outcomes = await asyncio.gather(*meet(broadcasts, receivers, 1, "ab"), return_exceptions=True)
        assert outcomes[0] is None
        assert "lacks a parameter" in str(outcomes[1])
        receivers.failing.clear()
        await asyncio.gather(*meet(broadcasts, receivers, 2, "ab"))
        assert sender.asked[-1].seat.is_new

    play(story)


@pytest.mark.parametrize("is_one_kept", [True, False])
def test_no_export_takes_the_place_of_the_announced_one_while_an_engine_is_brought_up_with_it(
    is_one_kept: bool,
) -> None:
    async def story() -> None:
        trainer = FakeTrainer()
        fakes = [FakeEngineServer(f"engine-{index}", prepare_s=2.0) for index in range(2)]
        engines = [EngineServer(fake) for fake in fakes]
        publisher = Publisher(
            trainer, engines, timeout_s=60.0, on_served=lambda _: None, is_one_kept=is_one_kept
        )
        running = asyncio.ensure_future(publisher.run())
        trainer.step()
        await publisher.wait_announced(1)
        publisher.down_nowait("engine-1")
        fakes[1].die()
        fakes[1].restart()
        engines[1].renew_nowait()
        back = asyncio.ensure_future(publisher.bring_up("engine-1"))
        await asyncio.sleep(0.5)
        trainer.step()
        await publisher.wait_exported_or_busy(2)
        assert asyncio.get_running_loop().time() < 4.0, "the trainer is not held"
        await asyncio.sleep(0.5)
        assert trainer.exported == ([1] if is_one_kept else [1, 2])
        await back
        await publisher.wait_announced(2)
        assert (trainer.exported, [fake.policy_version for fake in fakes]) == ([1, 2], [2, 2])
        running.cancel()

    run_virtual(story())
