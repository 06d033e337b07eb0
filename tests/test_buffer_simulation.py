"""look_ahead=auto is near the best one."""

from __future__ import annotations

import asyncio
import functools
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
from buffer_groups import make_group
from buffer_simulation import Lognormal, Simulation
from costly_cases import every_third_is_quick, slow

from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config import BufferConfig
from asyncrl.messages.records import Ticket
from asyncrl.rollouts.rollout import Slots
from asyncrl.testing.virtual_time import run_virtual

FREE = 10**6
MAX_STALENESS, NUM_BATCHES = 8, 100
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "training is slower than a rollout": ({"slots": FREE, "train_s": 2.0}, {}),
    "a rollout takes four steps": ({"slots": FREE, "train_s": 0.25}, {}),
    "generation is the limit": ({"slots": 24, "train_s": 0.25}, {}),
    "rollouts wait for tools": (
        {"slots": 128, "train_s": 0.3},
        {"tokens": 0.2, "tool_s": 0.4, "group_size": 4},
    ),
}
"""(arguments of the simulation, arguments of the workload)."""


class DrawnOnce(Lognormal):
    """Draw each length once for all runs."""

    length = functools.lru_cache(2**16)(Lognormal.length)  # type: ignore[assignment]
    wait_s = functools.lru_cache(2**16)(Lognormal.wait_s)  # type: ignore[assignment]


def simulate(
    machine: dict[str, Any], workload: Lognormal, look_ahead: int | None
) -> Simulation:
    """Run for NUM_BATCHES batches, without the end of the run, which waits for
    stragglers.
    """
    auto = LookAhead(MAX_STALENESS) if look_ahead is None else None
    rule = StalenessRule(
        num_groups=8,
        num_batches=NUM_BATCHES + 2 * MAX_STALENESS,
        max_staleness=MAX_STALENESS,
        on_overdue="mask",
        look_ahead=auto.current if auto is not None else look_ahead or 0,
    )
    simulation = Simulation(rule, workload, **machine, auto=auto)
    simulation.run()
    return simulation


@pytest.mark.parametrize("name", every_third_is_quick(zip(WORKLOADS, strict=True)))
@pytest.mark.parametrize("sigma", [slow(0.5), 1.5])
def test_auto_is_near_the_best_look_ahead_after_20_steps(
    name: str, sigma: float
) -> None:
    machine, values = WORKLOADS[name]
    cases = [
        DrawnOnce(sigma=sigma, tool_sigma=sigma, seed=seed, **values)
        for seed in range(3)
    ]
    fixed_s = [0.0] * (MAX_STALENESS + 1)
    for look_ahead, workload in product(range(MAX_STALENESS + 1), cases[:2]):
        taken_s = simulate(machine, workload, look_ahead).taken_s
        fixed_s[look_ahead] += taken_s[NUM_BATCHES] - taken_s[20]
    least = next(
        d for d, taken_s in enumerate(fixed_s) if taken_s <= min(fixed_s) / 0.95
    )
    for workload in cases:
        tried = simulate(machine, workload, None).look_aheads[:NUM_BATCHES]
        assert abs(tried[20] - least) <= 1, (
            f"seed {workload.seed}: {tried}, {least} is best"
        )
        assert abs(tried[-1] - least) <= 1, (
            f"seed {workload.seed}: {tried}, {least} is best"
        )
        changes = sum(before != after for before, after in pairwise(tried[20:]))
        assert changes <= 3, f"seed {workload.seed}: {tried} goes to and fro"


NUM_GROUPS, GROUP_S = 8, 1.0


async def look_aheads(
    train_s: float, slots: int, tool_s: float, noise: float, *, slows: bool
) -> list[int]:
    """Return the look-ahead of each step of a real buffer whose next batch is formed
    while a step runs, as the train loop does.

    Each group takes a second, of which a tool takes `tool_s` without a slot. `slows`:
    the producers see no limit, and more than `slots` groups slow each other down.
    """
    config = BufferConfig(max_staleness=MAX_STALENESS, look_ahead="auto")
    buffer = Buffer(config, num_groups=NUM_GROUPS, num_batches=2 * NUM_BATCHES)
    limited, engine = Slots(FREE if slows else slots), asyncio.Semaphore(slots)
    random = Random(0)

    async def sample(ticket: Ticket) -> None:
        name = f"g{ticket.group_id}"
        limited.ask_nowait(name, (ticket.group_id,))
        await limited.wait(name)
        async with engine:
            await asyncio.sleep((GROUP_S - tool_s) * random.lognormvariate(0, noise))
        limited.give_back_nowait(name)
        await asyncio.sleep(tool_s)
        buffer.finish_nowait(make_group(ticket.group_id, [ticket.start_version]))

    async def produce(group: asyncio.TaskGroup) -> None:
        while True:
            await limited.wait_spare()
            if buffer.rule.num_open:
                group.create_task(sample(buffer.admit_nowait()), name="sample")
                # The rollouts ask for slots before the next group is admitted.
                await asyncio.sleep(0)
            else:
                await buffer.wait_open()

    found = list[int]()
    async with asyncio.TaskGroup() as group:
        producing = group.create_task(produce(group), name="produce")
        forming = group.create_task(buffer.wait_batch(), name="next batch")
        for version in range(NUM_BATCHES):
            await forming
            buffer.begin_step_nowait(version)
            forming = group.create_task(buffer.wait_batch(), name="next batch")
            await asyncio.sleep(train_s)
            if not forming.done():
                buffer.idle_nowait()
            buffer.set_served_nowait(version + 1)
            found.append(buffer.rule.look_ahead)
        producing.cancel()
    return found


@pytest.mark.parametrize(
    ("train_s", "slots", "tool_s", "noise", "slows", "first", "last"),
    [
        # The trainer is the bound.
        (2.0, 64, 0.0, 0.0, False, {2}, 2),
        (1.1, NUM_GROUPS, 0.0, 0.0, False, {2}, 2),
        (0.5, 64, 0.0, 0.0, False, {2}, 2),
        # The slots are. The groups of the first look-ahead take 1 to 3 times as many.
        (0.5, NUM_GROUPS, 0.0, 0.0, False, {2}, 2),
        (0.25, 2 * NUM_GROUPS, 0.0, 0.3, False, {2}, 2),
        (0.25, 3 * NUM_GROUPS, 0.0, 0.0, False, {2}, 2),
        # The engines are: a raise is tried, gains nothing, and is undone.
        (0.5, NUM_GROUPS, 0.0, 0.0, True, {2, 3, 4, 5, 6, 7, 8}, 2),
        # A group takes four steps, and 0.9 batches are to be ready.
        (0.25, 64, 0.0, 0.0, False, {2, 3, 4, 5, 6}, 5),
        # The same, and it needs a slot for a fifth of the time.
        (0.25, NUM_GROUPS, 0.8, 0.0, False, {2, 3, 4, 5, 6}, 5),
    ],
)
def test_auto_climbs_only_for_a_gain_while_batches_form_ahead(
    train_s: float,
    slots: int,
    tool_s: float,
    noise: float,
    *,
    slows: bool,
    first: set[int],
    last: int,
) -> None:
    tried = run_virtual(look_aheads(train_s, slots, tool_s, noise, slows=slows))
    assert {*tried[:50]} <= first, tried
    assert {*tried[50:]} == {last}, tried
