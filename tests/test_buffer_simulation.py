"""Whole runs in virtual time keep the bound."""

from __future__ import annotations

import random

import pytest
from buffer_simulation import Lognormal, Simulation

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
