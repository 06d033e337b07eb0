from __future__ import annotations

import asyncio

import pytest

from asyncrl.testing.virtual_time import DeadlockError, run_virtual


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

    said = r"time stands still after 200000 rounds of the loop at t=0\.0 s:(.|\n)*task spinner: .*spin"
    with pytest.raises(DeadlockError, match=said):
        run_virtual(story())
