"""Where engines meet for the weights of a version: who is waited for, who sends, and what one that fails does
to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

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


def meet(broadcasts: Broadcasts, receivers: Receivers, version: int, *names: str) -> list[Awaitable[None]]:
    for name in names:
        broadcasts.expect_nowait(name, version, 2)
    return [broadcasts.receive(name, version, receivers.of(name)) for name in names]


def test_the_trainer_sends_once_and_only_when_all_wait() -> None:
    async def story() -> None:
        sender, receivers = FakeSender(), Receivers()
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        one, two = meet(broadcasts, receivers, 1, "a", "b")
        first = asyncio.ensure_future(one)
        await all_blocked()
        assert not sender.asked
        await asyncio.gather(first, two)
        (request,) = sender.asked
        assert (request.version, request.seat.rank, request.seat.size, request.seat.timeout_s) == (
            1,
            0,
            5,
            5.0,
        )
        assert [receivers.seats[name][0].rank for name in ("a", "b")] == [1, 3]
        assert {seat.path for (seat,) in receivers.seats.values()} == {request.seat.path}

    run_virtual(story())


def test_a_group_is_kept_while_the_same_processes_take_part_and_formed_again_when_one_is_new() -> None:
    async def story() -> None:
        sender, receivers = FakeSender(), Receivers()
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        for version, names in enumerate(["ab", "ab", "a", "ab", "ab"]):
            await asyncio.gather(*meet(broadcasts, receivers, version, *names))
        assert [request.seat.is_new for request in sender.asked] == [True, False, True, True, False]
        broadcasts.leave_nowait("b")  # its process was started again
        await asyncio.gather(*meet(broadcasts, receivers, 9, *"ab"))
        assert sender.asked[-1].seat.is_new
        assert len({request.seat.path for request in sender.asked}) == 4
        broadcasts.sender_gone_nowait()
        await asyncio.gather(*meet(broadcasts, receivers, 10, *"ab"))
        assert sender.asked[-1].seat.is_new
        assert len({request.seat.path for request in sender.asked}) == 5

    run_virtual(story())


def test_an_engine_that_leaves_before_all_are_there_does_not_stop_the_others() -> None:
    async def story() -> None:
        sender, receivers = FakeSender(), Receivers()
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        one, two, never = meet(broadcasts, receivers, 1, *"abc")
        waiting = asyncio.gather(one, two)
        await all_blocked()
        broadcasts.leave_nowait("c")
        await waiting
        assert sender.asked[0].seat.size == 5
        with pytest.raises(EngineError, match="did not prepare"):
            await never

    run_virtual(story())


def test_one_that_is_cut_at_the_very_moment_in_which_all_are_there_is_no_longer_waited_for() -> None:
    async def story() -> None:
        sender, receivers = FakeSender(seconds=100.0), Receivers()
        receivers.seconds = {"a": 100.0, "b": 100.0}
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        one, two = meet(broadcasts, receivers, 1, *"ab")
        first = asyncio.ensure_future(one)
        await all_blocked()
        second = asyncio.ensure_future(two)
        await asyncio.sleep(0)  # b has begun the round, and a is not awake yet
        first.cancel()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert "a is gone" in str(outcomes[1]).replace(": ", " ")
        assert asyncio.get_running_loop().time() < 1.0

    run_virtual(story())


@pytest.mark.parametrize("who", ["a", "b", "trainer", "a is cut", "b is cut"])
def test_one_that_fails_before_all_is_sent_ends_it_for_all_and_the_next_group_is_new(who: str) -> None:
    async def story() -> None:
        sender, receivers = FakeSender(seconds=100.0), Receivers()
        receivers.seconds = {"a": 100.0, "b": 100.0}
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        if who == "trainer":
            sender.failure, sender.seconds = TrainerError("trainer", "a member is gone"), 2.0
        if who in receivers.seconds:
            receivers.failing[who], receivers.seconds[who] = EngineLost(who, "died"), 2.0
        tasks = [asyncio.ensure_future(part) for part in meet(broadcasts, receivers, 1, *"ab")]
        await all_blocked()
        if who.endswith("cut"):
            tasks["ab".index(who[0])].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert asyncio.get_running_loop().time() < 3.0, "nobody waits for a group that is broken"
        assert all(isinstance(outcome, EngineError | asyncio.CancelledError) for outcome in outcomes)
        if who == "trainer":
            assert all("a member is gone" in str(outcome) for outcome in outcomes)
        sender.failure, sender.seconds, receivers.failing, receivers.seconds = None, 1.0, {}, {}
        await asyncio.gather(*meet(broadcasts, receivers, 1, *"ab"))
        assert sender.asked[-1].seat.is_new
        assert sender.asked[-1].seat.path != sender.asked[0].seat.path

    run_virtual(story())


def test_an_engine_that_fails_after_all_was_sent_fails_alone() -> None:
    async def story() -> None:
        sender, receivers = FakeSender(seconds=1.0), Receivers()
        receivers.seconds = {"a": 5.0, "b": 2.0}
        receivers.failing["b"] = EngineError("b", "lacks a parameter")
        broadcasts = Broadcasts(sender, Path("/staging"), timeout_s=5.0)
        outcomes = await asyncio.gather(*meet(broadcasts, receivers, 1, *"ab"), return_exceptions=True)
        assert outcomes[0] is None
        assert "lacks a parameter" in str(outcomes[1])
        receivers.failing.clear()
        await asyncio.gather(*meet(broadcasts, receivers, 2, *"ab"))
        assert sender.asked[-1].seat.is_new

    run_virtual(story())


@pytest.mark.parametrize("is_one_kept", [True, False])
def test_no_export_takes_the_place_of_the_announced_one_while_an_engine_is_brought_up_with_it(
    is_one_kept: bool,
) -> None:
    async def story() -> None:
        trainer, engines = (
            FakeTrainer(),
            [FakeEngineServer(f"engine-{index}", prepare_s=2.0) for index in range(2)],
        )
        publisher = Publisher(
            trainer,
            [EngineServer(engine) for engine in engines],
            timeout_s=60.0,
            on_served=lambda _: None,
            is_one_kept=is_one_kept,
        )
        running = asyncio.ensure_future(publisher.run())
        trainer.step()
        await publisher.wait_announced(1)
        publisher.down_nowait("engine-1")
        engines[1].die()
        engines[1].restart()
        publisher._targets[1].renew_nowait()  # type: ignore[attr-defined]
        back = asyncio.ensure_future(publisher.bring_up("engine-1"))
        await asyncio.sleep(0.5)
        trainer.step()
        await publisher.wait_exported_or_busy(2)
        assert asyncio.get_running_loop().time() < 4.0, "the trainer is not held"
        await asyncio.sleep(0.5)
        assert trainer.exported == ([1] if is_one_kept else [1, 2])
        await back
        await publisher.wait_announced(2)
        assert trainer.exported == [1, 2]
        assert [engine.policy_version for engine in engines] == [2, 2]
        running.cancel()

    run_virtual(story())
