"""Time limits that forgive what the event loop itself missed, and waits that say what they are for."""

import asyncio
import socket
import time

import pytest

from asyncrl.testing.virtual_time import run_virtual, stand_still
from asyncrl.waits import Alarm, LoopClock, TimeLimit, open_waits, task_stacks, waiting


async def until_over(timeout_s: float | None) -> float:
    """The loop's time at which a limit that began now is over."""
    limit = TimeLimit(timeout_s)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.Event().wait()
    assert limit.expired()
    return asyncio.get_running_loop().time()


async def stand_still_at(at_s: float, seconds: float) -> None:
    await asyncio.sleep(at_s)
    stand_still(seconds)


def test_a_limit_is_over_to_the_second_while_the_loop_runs() -> None:
    assert run_virtual(until_over(600.0)) == 600.0


def test_a_limit_does_not_count_the_time_in_which_the_loop_stood_still() -> None:
    async def story() -> float:
        over, _ = await asyncio.gather(until_over(600.0), stand_still_at(100.25, 3000.0))
        return over

    assert 3599.0 <= run_virtual(story()) <= 3600.0, "to one tick"


def test_a_limit_that_was_over_while_the_loop_stood_still_leaves_time_to_read_what_came_meanwhile() -> None:
    async def story() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(10.0, answer.set_result, "I am well")
        asyncio.get_running_loop().call_later(0.5, stand_still, 1e6)
        async with TimeLimit(1.0):
            return await answer

    async def late_by_itself() -> float:
        over, _ = await asyncio.gather(until_over(1.0), stand_still_at(0.5, 0.7))
        return over

    assert run_virtual(story()) == "I am well"
    assert 1.2 < run_virtual(late_by_itself()) <= 2.2, "and then it ends"


def test_a_limit_ends_on_a_loop_that_is_always_late() -> None:
    async def stall() -> None:
        while True:
            await asyncio.sleep(0)
            stand_still(5.0)

    async def story() -> float:
        stalling = asyncio.ensure_future(stall())
        over = await until_over(10.0)
        stalling.cancel()
        return over

    assert run_virtual(story()) < 300.0, "twice its ten seconds, at a second in each two rounds"


def test_a_limit_can_be_held_and_begun_again_and_ended_at_once() -> None:
    async def ended_at_once() -> None:
        async with TimeLimit(5.0) as limit:
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)

    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with TimeLimit(5.0) as limit:
            limit.reschedule(None)
            assert limit.when() is None
            await asyncio.sleep(100.0)
            limit.reschedule(now() + 5.0)
            assert limit.when() == 105.0
            await asyncio.sleep(4.0)
        with pytest.raises(TimeoutError):
            await ended_at_once()
        assert now() == 104.0

    run_virtual(story())


def test_an_error_and_a_cancellation_pass_a_limit_as_they_are() -> None:
    async def story() -> None:
        with pytest.raises(KeyError):
            async with TimeLimit(5.0):
                raise KeyError
        with pytest.raises(TimeoutError):
            async with TimeLimit(5.0) as limit:
                raise TimeoutError
        assert not limit.expired()
        waiting = asyncio.ensure_future(until_over(5.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_virtual(story())


def test_nothing_is_left_in_the_loop_once_the_limits_are_gone() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with TimeLimit(5.0), TimeLimit(None), TimeLimit(7.0):
            await asyncio.sleep(3.0)
        Alarm(5.0, lambda: None).cancel()
        assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
        assert LoopClock.of(loop).time() == loop.time()

    run_virtual(story())


@pytest.mark.asyncio
async def test_an_answer_that_came_while_the_loop_was_blocked_is_read_before_its_limit_is_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        async def answer() -> bytes:
            async with TimeLimit(0.05):
                return await asyncio.get_running_loop().sock_recv(ours, 5)

        asking = asyncio.ensure_future(answer())
        await asyncio.sleep(0)
        theirs.send(b"alive")
        time.sleep(0.2)  # noqa: ASYNC251  this is the fault
        assert await asking == b"alive"


def test_a_wait_is_open_as_long_as_its_block_and_the_innermost_of_a_task_is_told() -> None:
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def outer() -> None:
        with waiting("the turn", on="both"):
            await asyncio.sleep(5.0)
            with waiting(lambda: f"memory at {now():.0f} s", on="engine-0", who="turns"):
                await asyncio.sleep(100.0)

    async def story() -> list[list[tuple[str, str, str, float]]]:
        task, seen = asyncio.create_task(outer(), name="train loop"), []
        for seconds in (1.0, 7.0):
            await asyncio.sleep(seconds)
            seen.append([(wait.who, str(wait), wait.on, wait.since_s) for wait in open_waits()])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert open_waits() == []
        return seen

    assert run_virtual(story()) == [
        [("train loop", "the turn", "both", 0.0)],
        [("turns", "memory at 8 s", "engine-0", 5.0)],
    ]


def test_tasks_in_the_same_place_are_one_line_of_the_stacks() -> None:
    async def story() -> str:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for index in range(9):
                tasks.create_task(event.wait(), name=f"rollout g0/r{index}")
            await asyncio.sleep(1)
            text = task_stacks()
            event.set()
        return text

    (line,) = [line for line in run_virtual(story()).splitlines() if "rollout" in line]
    assert line.startswith(
        "task rollout g0/r0, rollout g0/r1, rollout g0/r2, rollout g0/r3 and 5 more: Event.wait"
    )
