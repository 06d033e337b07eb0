"""Waits that say their purpose, and timeouts with their own errors."""

import asyncio

import pytest
from rollout_cases import virtual

from asyncrl.base.waits import open_waits, waiting, within


@virtual
async def test_limit_raises_its_own_error_and_passes_others() -> None:
    with pytest.raises(KeyError, match="late"):
        async with within(5.0, lambda: KeyError("late")):
            await asyncio.sleep(6.0)
    with pytest.raises(TimeoutError, match="inner"):
        async with within(5.0, lambda: KeyError("late")):
            raise TimeoutError("inner")
    assert asyncio.get_running_loop().time() == 5.0


@virtual
async def test_innermost_wait_of_a_task_is_listed() -> None:
    async def outer() -> None:
        now = asyncio.get_running_loop().time
        with waiting("the handover", on="both"):
            await asyncio.sleep(5.0)
            with waiting(
                lambda: f"memory at {now():.0f} s", on="engine-0", who="lease"
            ):
                await asyncio.sleep(100.0)

    task = asyncio.create_task(outer(), name="train loop")
    seen = (
        [("train loop", "the handover", "both", 0.0)],
        [("lease", "memory at 8 s", "engine-0", 5.0)],
    )
    for seconds, expected in zip((1.0, 7.0), seen, strict=True):
        await asyncio.sleep(seconds)
        assert [
            (wait.who, str(wait), wait.on, wait.since_s) for wait, _ in open_waits()
        ] == expected
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert open_waits() == []


@virtual
async def test_alike_waits_are_listed_once_with_the_oldest() -> None:
    async def wait(on: str) -> None:
        with (
            waiting(lambda: "never", on=on)
            if on == "alone"
            else waiting("completions", on=on)
        ):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(wait("alone"), name="alone")]
    for num in (2, 3):
        await asyncio.sleep(1.0)
        tasks += [
            asyncio.create_task(wait("engine-0"), name=f"rollout r{index}")
            for index in range(num)
        ]
        await asyncio.sleep(0)
        assert [
            (one.who, one.on, one.since_s, alike) for one, alike in open_waits()
        ] == [
            ("alone", "alone", 0.0, 1),
            ("rollouts", "engine-0", 1.0, len(tasks) - 1),
        ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert open_waits() == []
