from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from asyncrl.testing.virtual_time import BusyLoopError, DeadlockError, all_blocked, run_virtual


class Door:
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def wait_open(self) -> None:
        await self.opened.wait()


def test_timers_fire_in_order_of_their_time_not_of_their_making() -> None:
    async def story() -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []

        async def wake_after(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((delay_s, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as tasks:
            for delay_s in (3.0, 0.5, 86400.0 * 3, 1.0, 0.0):
                tasks.create_task(wake_after(delay_s))
        return seen

    assert run_virtual(story(), start_s=10.0) == [
        (0.0, 10.0),
        (0.5, 10.5),
        (1.0, 11.0),
        (3.0, 13.0),
        (259200.0, 259210.0),
    ]


def test_the_clock_works_where_one_float_step_is_above_a_nanosecond() -> None:
    async def story() -> float:
        await asyncio.sleep(1e-7)
        await asyncio.sleep(0.25)
        return asyncio.get_running_loop().time()

    assert run_virtual(story(), start_s=1e12) == 1e12 + 0.25


def test_a_deadlock_names_each_task_and_the_function_it_waits_in() -> None:
    async def story() -> None:
        door = Door()
        await asyncio.sleep(42)
        async with asyncio.TaskGroup() as tasks:
            for number in (10, 2, 1):
                tasks.create_task(door.wait_open(), name=f"producer-{number}")

    with pytest.raises(
        DeadlockError, match=r"nothing can happen at t=42\.0 s: producer-1 waits in"
    ) as caught:
        run_virtual(story())
    doors = [(f"producer-{number}", "Door.wait_open") for number in (1, 2, 10)]
    assert (caught.value.now_s, caught.value.blocked) == (42.0, [*doors, ("main", "story")])


def test_all_blocked_returns_when_nobody_else_can_move_and_no_time_has_passed() -> None:
    async def story() -> None:
        steps: list[int] = []
        door = Door()

        async def walk() -> None:
            for step in range(50):
                steps.append(step)
                await asyncio.sleep(0)
            await door.wait_open()
            steps.append(50)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(walk())
            tasks.create_task(asyncio.sleep(9))
            await all_blocked()
            assert steps == list(range(50))
            assert asyncio.get_running_loop().time() == 0.0
            door.opened.set()
            await all_blocked()
            assert steps[-1] == 50
        assert asyncio.get_running_loop().time() == 9.0

    run_virtual(story())


def test_a_task_that_never_lets_the_clock_go_on_is_an_error() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110  the loop under test
            await asyncio.sleep(0)

    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(spin(), name="spinner")

    with pytest.raises(
        BusyLoopError,
        match=r"time stands still after 500 rounds of the loop at t=0\.0 s: spinner waits in .*spin",
    ):
        run_virtual(story(), max_rounds=500)


def test_left_over_tasks_are_cancelled_and_may_clean_up() -> None:
    cleaned: list[str] = []

    async def linger() -> None:
        try:
            await Door().wait_open()
        finally:
            await asyncio.sleep(5)
            cleaned.append("linger")

    async def story() -> str:
        story.task = asyncio.create_task(linger())  # type: ignore[attr-defined]
        await all_blocked()
        return "done"

    assert run_virtual(story()) == "done"
    assert cleaned == ["linger"]


def test_a_task_that_does_not_end_when_cancelled_is_told_beside_the_first_error() -> None:
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await Door().wait_open()

    async def story() -> None:
        story.task = asyncio.create_task(stubborn(), name="stubborn")  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first") as caught:
        run_virtual(story())
    assert "stubborn waits in Door.wait_open" in caught.value.__notes__[0]


def test_an_error_in_a_callback_is_raised_and_not_only_logged() -> None:
    async def story() -> None:
        asyncio.get_running_loop().call_later(1, {}.pop, "missing")
        await asyncio.sleep(2)

    with pytest.raises(KeyError, match="missing"):
        run_virtual(story())


def test_threads_and_other_loops_are_refused_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="in a thread"):
        run_virtual(asyncio.to_thread(time.monotonic))
    with pytest.raises(RuntimeError, match="run_virtual"):
        asyncio.run(all_blocked())
