"""look_ahead=auto: against every fixed look-ahead in virtual time, and decision by decision."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
from buffer_simulation import Simulation
from buffer_workload import Lognormal, SimulatedMachine

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config.generation import OnOverdue

FREE = 10**6
MAX_STALENESS, NUM_BATCHES = 8, 100
WORKLOADS: dict[str, tuple[SimulatedMachine, dict[str, Any]]] = {
    "training is slower than a rollout": (SimulatedMachine(FREE, train_s=2.0), {}),
    "a rollout takes four steps": (SimulatedMachine(FREE, train_s=0.25), {}),
    "groups of eight, their slowest takes several steps": (
        SimulatedMachine(FREE, train_s=0.5),
        {"group_size": 8},
    ),
    "generation is the limit": (SimulatedMachine(24, train_s=0.25), {}),
    "rollouts wait for tools": (
        SimulatedMachine(128, train_s=0.3),
        {"tokens": 0.2, "tool_s": 0.4, "group_size": 4},
    ),
}


class DrawnOnce(Lognormal):
    """The same whatever looks ahead: a length is drawn once for all runs that are compared."""

    length = functools.lru_cache(2**16)(Lognormal.length)  # type: ignore[assignment]
    wait_s = functools.lru_cache(2**16)(Lognormal.wait_s)  # type: ignore[assignment]


def simulate(
    machine: SimulatedMachine, workload: Lognormal, on_overdue: OnOverdue, look_ahead: int | None
) -> Simulation:
    """Until it has taken so many batches, the end of a run apart, where stragglers are waited for."""
    auto = LookAhead(MAX_STALENESS) if look_ahead is None else None
    rule = StalenessRule(
        num_groups=8,
        num_batches=NUM_BATCHES + 2 * MAX_STALENESS,
        max_staleness=MAX_STALENESS,
        on_overdue=on_overdue,
        look_ahead=auto.current if auto is not None else look_ahead or 0,
    )
    simulation = Simulation(rule, workload, machine, auto=auto)
    simulation.run()
    return simulation


def seconds(played: Simulation) -> float:
    """Of batches 20 to 100."""
    return played.taken_s[NUM_BATCHES] - played.taken_s[20]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("sigma", [0.5, pytest.param(1.0, marks=[pytest.mark.slow, pytest.mark.long]), 1.5])
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


class Fed:
    """A look-ahead fed batch by batch, each of one group."""

    def __init__(self, max_staleness: int = 8) -> None:
        self.auto, self.now_s = LookAhead(max_staleness), 0.0
        self.feed(1, step_s=1.0, rollout_s=1.0)

    def feed(self, count: int, *, step_s: float, rollout_s: float, lack_s: float = 0.0) -> int:
        """`count` batches: the trainer takes step_s for each, then lacks groups for lack_s."""
        for _ in range(count):
            num_running = rollout_s / (step_s + lack_s)  # Little's law
            self.auto.note(self.now_s, num_running, lacks=False)  # type: ignore[arg-type]
            self.now_s += step_s
            self.auto.note(self.now_s, num_running, lacks=True)  # type: ignore[arg-type]
            self.now_s += lack_s
            self.auto.batch_taken(self.now_s, 1, 0)
        return self.auto.current


def test_look_ahead_rises_only_when_groups_lack() -> None:
    assert Fed().feed(500, step_s=1.0, rollout_s=2.0, lack_s=0.01) == 2
    assert Fed().feed(6, step_s=1.0, rollout_s=5.0, lack_s=1.0) == 6
    assert Fed(4).feed(6, step_s=1.0, rollout_s=5.0, lack_s=1.0) == 4, "max_staleness is the limit"


def test_useless_raise_is_taken_back() -> None:
    fed = Fed()
    assert fed.feed(6, step_s=1.0, rollout_s=4.0, lack_s=1.0) == 5
    tried = [fed.feed(1, step_s=1.0, rollout_s=4.0, lack_s=1.0) for _ in range(100)]
    assert tried.index(2) < 20, "engines that are slower the more they run"
    assert set(tried[20:]) == {2}


def test_it_follows_a_workload_that_gets_slower_and_faster_again() -> None:
    """A step takes 1 s; look_ahead batches run while one is gathered, each for `rollout_s`."""
    fed = Fed()
    for count, rollout_s, expected in ((100, 1.5, 2), (100, 5.0, 5), (400, 2.0, 3)):
        for _ in range(count):
            lack_s = max(0.0, rollout_s / fed.auto.current - 1.0)
            fed.feed(1, step_s=1.0, rollout_s=rollout_s, lack_s=lack_s)
        assert abs(fed.auto.current - expected) <= 1
