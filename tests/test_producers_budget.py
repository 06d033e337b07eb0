"""What one rollout that never ends costs a run: one rollout.timeout_s at most, whatever the staleness bound
and on_overdue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import pytest
from rollout_cases import make_producers, single_turn

from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig
from asyncrl.messages.records import Group, GroupId
from asyncrl.testing.fakes import FakeEngine
from asyncrl.testing.virtual_time import run_virtual

TIMEOUT_S = 600.0
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 6, 2, 4


def run_length_s(
    hung: str, *, max_staleness: int, on_overdue: Literal["wait", "mask", "drop"]
) -> tuple[float, list[int]]:
    """Seconds of a run in which the engine never answers requests whose name begins so, and the usable
    rollouts of its groups.
    """

    async def story() -> tuple[float, list[int]]:
        loop = asyncio.get_running_loop()
        engine = FakeEngine(
            latency_s=lambda request: 1e9 if hung and request.request_id.startswith(hung) else 5.0
        )
        tasks, sizes = list[asyncio.Task[None]](), list[int]()

        def handed_back(group_id: GroupId, group: Group | None, reason: str) -> None:
            producers.handed_back(group_id, group, reason)

        async with asyncio.TaskGroup() as group:

            def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
                tasks.append(group.create_task(coro, name=name))
                return tasks[-1]

            buffer = Buffer(
                BufferConfig(max_staleness=max_staleness, on_overdue=on_overdue),
                num_groups=NUM_GROUPS,
                num_batches=NUM_STEPS,
                on_handed_back=handed_back,
            )
            generator = single_turn(engine, max_tokens=8, max_prompt_tokens=8)
            producers = make_producers(
                buffer,
                spawn,
                generator,
                timeout_s=TIMEOUT_S,
                retries=2,
                group_size=GROUP_SIZE,
                capacity=64,
                max_failed_groups=16,
                max_hand_backs=8,
            )
            spawn(producers.run(), name="producers")
            for version in range(1, NUM_STEPS + 1):
                batch = await buffer.wait_batch()
                sizes += [len(group.trajectories) for group in batch.groups]
                await asyncio.sleep(5.0)
                engine.policy_version = version
                buffer.set_served_nowait(version)
            length_s = loop.time()
            for task in tasks:
                task.cancel()
        return length_s, sizes

    return run_virtual(story())


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("on_overdue", ["wait", "mask"])
@pytest.mark.parametrize("group_id", [2, NUM_GROUPS * NUM_STEPS - 1], ids=["amid", "in the last batch"])
def test_a_hung_rollout_costs_a_run_one_timeout_at_most_and_its_siblings_are_trained_on(
    max_staleness: int, on_overdue: Literal["wait", "mask"], group_id: int
) -> None:
    undisturbed_s, _ = run_length_s("", max_staleness=max_staleness, on_overdue=on_overdue)
    length_s, sizes = run_length_s(f"g{group_id}/r0/", max_staleness=max_staleness, on_overdue=on_overdue)
    assert length_s <= undisturbed_s + TIMEOUT_S
    is_too_late = (
        max_staleness > 0 and on_overdue == "mask" and group_id == 2
    )  # masked whole, so its prompt is sampled again
    assert sizes.count(GROUP_SIZE - 1) == (0 if is_too_late else 1)
    assert len(sizes) == NUM_GROUPS * NUM_STEPS
