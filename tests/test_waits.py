"""Time limits that forgive what the event loop itself missed, and waits that say what they are for."""

import asyncio
import contextlib
import gc
import socket
import sys
import time
from collections.abc import Callable

import pytest
import uvloop
from rollout_cases import virtual

from asyncrl.observe.watchdog import waits_now
from asyncrl.testing.virtual_time import stand_still
from asyncrl.waits import Alarm, LoopClock, TimeLimit, loop_turn, open_waits, task_stacks, waiting


async def until_over(timeout_s: float | None) -> float:
    """The loop's time at which a limit that began now is over."""
    limit = TimeLimit(timeout_s)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.Event().wait()
    assert limit.expired()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("limit_s", "at_s", "still_s", "earliest_s", "latest_s"),
    [(600.0, 9.0, 0.0, 600.0, 600.0), (600.0, 100.25, 3000.0, 3599.0, 3600.0), (1.0, 0.5, 0.7, 1.2, 2.2)],
)
@virtual
async def test_a_limit_does_not_count_the_time_in_which_the_loop_stood_still(
    limit_s: float, at_s: float, still_s: float, earliest_s: float, latest_s: float
) -> None:
    asyncio.get_running_loop().call_later(at_s, stand_still, still_s)
    assert earliest_s <= await until_over(limit_s) <= latest_s, "to one tick, and then it ends"


@virtual
async def test_a_limit_that_was_over_while_the_loop_stood_still_leaves_time_to_read_what_came() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(10.0, answer.set_result, "I am well")
    asyncio.get_running_loop().call_later(0.5, stand_still, 1e6)
    async with TimeLimit(1.0):
        assert await answer == "I am well"


@virtual
async def test_a_limit_ends_on_a_loop_that_is_always_late() -> None:
    async def stall() -> None:
        while True:
            await asyncio.sleep(0)
            stand_still(5.0)

    stalling = asyncio.ensure_future(stall())
    assert await until_over(10.0) < 300.0, "twice its ten seconds, at a second in each two rounds"
    stalling.cancel()


@virtual
async def test_a_limit_can_be_held_and_begun_again_and_ended_at_once() -> None:
    now = asyncio.get_running_loop().time
    async with TimeLimit(5.0) as limit:
        limit.restart(None)
        assert limit.left_s is None
        await asyncio.sleep(100.0)
        limit.restart(5.0)
        assert limit.left_s == 5.0
        await asyncio.sleep(4.0)
    limit = TimeLimit(5.0)
    asyncio.get_running_loop().call_soon(limit.restart, 0.0)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.sleep(1.0)
    assert now() == 104.0


@virtual
async def test_an_error_and_a_cancellation_pass_a_limit_as_they_are() -> None:
    for error in (KeyError, TimeoutError):
        with pytest.raises(error):
            async with TimeLimit(5.0) as limit:
                raise error
        assert not limit.expired()
    over = asyncio.ensure_future(until_over(5.0))
    await asyncio.sleep(1.0)
    over.cancel()
    with pytest.raises(asyncio.CancelledError):
        await over


@virtual
async def test_nothing_is_left_in_the_loop_once_the_limits_are_gone() -> None:
    loop = asyncio.get_running_loop()
    async with TimeLimit(5.0), TimeLimit(None), TimeLimit(7.0):
        await asyncio.sleep(3.0)
    Alarm(5.0, lambda: None).cancel()
    assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
    assert LoopClock.of(loop).time() == loop.time()


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


@virtual
async def test_a_wait_is_open_as_long_as_its_block_and_the_innermost_of_a_task_is_told() -> None:
    async def outer() -> None:
        now = asyncio.get_running_loop().time
        with waiting("the turn", on="both"):
            await asyncio.sleep(5.0)
            with waiting(lambda: f"memory at {now():.0f} s", on="engine-0", who="turns"):
                await asyncio.sleep(100.0)

    task = asyncio.create_task(outer(), name="train loop")
    seen = [("train loop", "the turn", "both", 0.0)], [("turns", "memory at 8 s", "engine-0", 5.0)]
    for seconds, expected in zip((1.0, 7.0), seen, strict=True):
        await asyncio.sleep(seconds)
        assert [(wait.who, str(wait), wait.on, wait.since_s) for wait, _ in open_waits()] == expected
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert open_waits() == []


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, C's too, that this work makes."""
    num_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    gc.disable()  # Hypothesis hangs a function of its own onto collections
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


@virtual
async def test_what_a_loop_waits_for_is_told_with_as_many_calls_however_many_tasks_wait() -> None:
    async def wait(on: str) -> None:
        with waiting(lambda: "never", on=on) if on == "alone" else waiting("completions", on=on):
            await asyncio.Event().wait()

    tasks, num_calls = [asyncio.create_task(wait("alone"), name="alone")], []
    for num in (100, 3_000):
        await asyncio.sleep(1.0)
        tasks += [asyncio.create_task(wait("engine-0"), name=f"rollout r{index}") for index in range(num)]
        await asyncio.sleep(0)
        assert [(one.who, one.on, one.since_s, alike) for one, alike in open_waits()] == [
            ("alone", "alone", 0.0, 1),
            ("rollouts", "engine-0", 1.0, len(tasks) - 1),
        ]
        num_calls.append(calls_of(waits_now))
    assert num_calls[0] == num_calls[1]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert open_waits() == []


@virtual
async def test_a_wait_that_ends_before_the_one_inside_it_leaves_that_one_open() -> None:
    waits = [waiting(name, on="x") for name in ("outer", "middle", "inner")]
    for wait in waits:
        wait.__enter__()
    for closed, told in zip((1, 2, 0), ("inner", "outer", None), strict=True):
        waits[closed].__exit__(None, None, None)
        assert [str(wait) for wait, _ in open_waits()] == ([] if told is None else [told])


@virtual
async def test_no_two_blocks_of_much_work_share_a_turn_of_the_loop() -> None:
    turns, num_turns = list[int](), 0

    async def count() -> None:
        nonlocal num_turns
        while len(turns) < 12:
            num_turns += 1
            await asyncio.sleep(0)

    async def work() -> None:
        for _ in range(4):
            async with loop_turn():
                turns.append(num_turns)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(count())
        for _ in range(3):
            tasks.create_task(work())
    assert len(turns) == len(set(turns)) == 12


@virtual
async def test_tasks_in_the_same_place_are_one_line_of_the_stacks() -> None:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for index in range(9):
            tasks.create_task(event.wait(), name=f"rollout g0/r{index}")
        await asyncio.sleep(1)
        (line,) = [line for line in task_stacks().splitlines() if "rollout" in line]
        event.set()
    names = ", ".join(f"rollout g0/r{index}" for index in range(4))
    assert line.startswith(f"task {names} and 5 more: Event.wait")


def test_a_limit_ends_a_wait_on_the_loop_that_ray_runs_actors_in() -> None:
    async def story() -> bool:
        limit = TimeLimit(0.01)
        with contextlib.suppress(TimeoutError):
            async with limit:
                await asyncio.Event().wait()
        return limit.expired()

    assert uvloop.run(asyncio.wait_for(story(), 60))
