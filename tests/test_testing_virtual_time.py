from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from asyncrl.testing.virtual_time import BusyLoopError, DeadlockError, run_virtual


@pytest.mark.parametrize("start_s", [10.0, 1e12], ids=["", "one float step is above a nanosecond"])
def test_timers_fire_in_order_of_their_time(start_s: float) -> None:
    seen: list[tuple[float, float]] = []

    async def wake_after(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((delay_s, asyncio.get_running_loop().time() - start_s))

    async def story() -> None:
        await asyncio.sleep(1e-7 if start_s > 1e9 else 0)
        await asyncio.gather(*(wake_after(delay_s) for delay_s in (3.0, 0.5, 86400.0 * 3, 1.0, 0.0)))

    run_virtual(story(), start_s=start_s)
    assert seen == [(delay_s, delay_s) for delay_s in (0.0, 0.5, 1.0, 3.0, 259200.0)]


def test_deadlock_names_each_task_and_its_waiting_function() -> None:
    async def story() -> None:
        opened = asyncio.Event()
        await asyncio.sleep(42)
        async with asyncio.TaskGroup() as tasks:
            for number in (10, 2, 1):
                tasks.create_task(opened.wait(), name=f"producer-{number}")

    said = r"nothing can happen at t=42\.0 s:(.|\n)*task producer-1, producer-10, producer-2: Event.wait "
    with pytest.raises(DeadlockError, match=said):
        run_virtual(story())


def test_task_that_never_lets_the_clock_advance_is_an_error() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110  the loop under test
            await asyncio.sleep(0)

    async def story() -> None:
        await asyncio.create_task(spin(), name="spinner")

    said = r"time stands still after 500 rounds of the loop at t=0\.0 s:(.|\n)*task spinner: .*spin"
    with pytest.raises(BusyLoopError, match=said):
        run_virtual(story(), max_rounds=500)


def test_remaining_tasks_are_cancelled_and_may_clean_up() -> None:
    cleaned, left_over = list[str](), list[asyncio.Task[None]]()

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            cleaned.append("linger")

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def story(*, fails: bool) -> None:
        left_over.append(asyncio.create_task(stubborn() if fails else linger(), name="left over"))
        await asyncio.sleep(1)
        if fails:
            raise KeyError("first")

    run_virtual(story(fails=False))
    assert cleaned == ["linger"]
    with pytest.raises(KeyError, match="first") as caught:
        run_virtual(story(fails=True))
    assert re.search("task left over: .*Event.wait", caught.value.__notes__[0])


def test_error_in_a_callback_is_raised() -> None:
    async def story() -> None:
        asyncio.get_running_loop().call_later(1, {}.pop, "missing")
        await asyncio.sleep(2)

    with pytest.raises(KeyError, match="missing"):
        run_virtual(story())
