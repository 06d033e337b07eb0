"""Whole runs in virtual time keep the bound, and look_ahead=auto is near the best one."""

from __future__ import annotations

import functools
import random
from itertools import pairwise
from typing import Any

import pytest
from buffer_simulation import Lognormal, Simulation

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config.rollout_buffer import OnOverdue


def random_case(seed: int, on_overdue: OnOverdue) -> Simulation:
    draw = random.Random(seed)
    max_staleness = draw.randint(0, 5)
    rule = StalenessRule(
        num_groups=draw.randint(1, 8),
        num_batches=draw.randint(5, 30),
        max_staleness=max_staleness,
        on_overdue=on_overdue,
        look_ahead=draw.randint(0, max_staleness),
    )
    workload = Lognormal(sigma=draw.choice([0.0, 0.5, 1.0, 1.5]), group_size=draw.randint(1, 4), seed=seed)
    return Simulation(
        rule,
        workload,
        slots=draw.choice([2, 8, 24, 1000]),
        train_s=draw.choice([0.1, 0.5, 2.0]),
        publish_s=draw.choice([0.0, 0.1, 1.5]),
    )


@pytest.mark.parametrize("on_overdue", ["wait", "mask", "drop"])
def test_200_runs_lose_nothing_and_never_stand_still(on_overdue: OnOverdue) -> None:
    num_requeued = num_masked = 0
    for seed in range(200):
        simulation = random_case(seed, on_overdue)
        rule = simulation.rule
        outcome = simulation.run()  # RuntimeError if nothing can happen any more
        num_requeued += outcome.num_requeued
        num_masked += outcome.masked_fraction > 0
        where = f"seed {seed}: {rule.num_groups} groups, {rule.max_staleness=}, {rule.look_ahead=}"
        taken = [group_id for _, groups in simulation.batches for group_id, _ in groups]
        assert [version for version, _ in simulation.batches] == list(range(rule.num_batches)), where
        assert len(taken) == len(set(taken)) == rule.num_batches * rule.num_groups, where
        assert (rule.num_running, rule.num_ready, rule.admitted) == (0, 0, len(taken)), where
        ages = [version - oldest for version, groups in simulation.batches for _, oldest in groups]
        assert on_overdue == "mask" or max(ages) <= rule.max_staleness, where
        if rule.max_staleness == 0:
            assert taken == sorted(taken), f"{where}: earliest deadline first is first in, first out"
    assert (num_requeued > 20) == (on_overdue == "drop")
    assert (num_masked > 20) == (on_overdue == "mask")


FREE = 10**6
MAX_STALENESS, NUM_BATCHES = 8, 100
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "training is slower than a rollout": ({"slots": FREE, "train_s": 2.0}, {}),
    "a rollout takes four steps": ({"slots": FREE, "train_s": 0.25}, {}),
    "groups of eight, their slowest takes several steps": (
        {"slots": FREE, "train_s": 0.5},
        {"group_size": 8},
    ),
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
    machine: dict[str, Any], workload: Lognormal, on_overdue: OnOverdue, look_ahead: int | None
) -> Simulation:
    """Run for NUM_BATCHES batches, without the end of the run, which waits for stragglers."""
    auto = LookAhead(MAX_STALENESS) if look_ahead is None else None
    rule = StalenessRule(
        num_groups=8,
        num_batches=NUM_BATCHES + 2 * MAX_STALENESS,
        max_staleness=MAX_STALENESS,
        on_overdue=on_overdue,
        look_ahead=auto.current if auto is not None else look_ahead or 0,
    )
    simulation = Simulation(rule, workload, **machine, auto=auto)
    simulation.run()
    return simulation


def seconds(played: Simulation) -> float:
    """Of batches 20 to 100."""
    return played.taken_s[NUM_BATCHES] - played.taken_s[20]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_auto_is_near_the_best_look_ahead_after_20_steps(name: str, sigma: float) -> None:
    machine, values = WORKLOADS[name]
    cases = [DrawnOnce(sigma=sigma, tool_sigma=sigma, seed=seed, **values) for seed in range(3)]
    fixed_s = [
        sum(seconds(simulate(machine, workload, "mask", look_ahead)) for workload in cases[:2])
        for look_ahead in range(MAX_STALENESS + 1)
    ]
    least = next(d for d, taken_s in enumerate(fixed_s) if taken_s <= min(fixed_s) / 0.95)
    for workload in cases:
        tried = simulate(machine, workload, "mask", None).look_aheads[:NUM_BATCHES]
        assert abs(tried[20] - least) <= 1, f"seed {workload.seed}: {tried}, {least} is best"
        assert abs(tried[-1] - least) <= 1, f"seed {workload.seed}: {tried}, {least} is best"
        changes = sum(before != after for before, after in pairwise(tried[20:]))
        assert changes <= 3, f"seed {workload.seed}: {tried} goes to and fro"
