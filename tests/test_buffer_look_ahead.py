"""look_ahead=auto: against every fixed look-ahead in simulation, and decision by decision."""

from __future__ import annotations

import pytest

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.simulation import Simulation, SimulationResult, Workload
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.messages.records import WaitReport

WORKLOADS = {
    "training takes as long as a rollout": {"num_slots": 10_000, "train_s": 1.0},
    "rollouts take twice as long, in as many slots as keep up": {"num_slots": 32, "train_s": 0.5},
}
GROUPS_OF_THREE = {"num_slots": 96, "train_s": 0.5, "group_size": 3, "publish_s": 0.1}
WORKLOADS["groups of three, much longer than a step"] = GROUPS_OF_THREE


def simulate(workload: Workload, max_staleness: int, look_ahead: int | None) -> SimulationResult:
    auto = LookAhead(max_staleness) if look_ahead is None else None
    rule = StalenessRule(
        num_groups=16,
        num_batches=400,
        max_staleness=max_staleness,
        on_overdue="wait",
        look_ahead=auto.current if auto is not None else look_ahead or 0,
    )
    return Simulation(rule, workload, auto=auto).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("max_staleness", [2, 4, 8])
def test_auto_comes_within_5_percent_of_the_best_fixed_look_ahead_and_is_no_more_than_1_older(
    name: str, sigma: float, max_staleness: int
) -> None:
    for seed in range(2):
        workload = Workload(sigma=sigma, seed=seed, **WORKLOADS[name])  # type: ignore[arg-type]
        fixed = [simulate(workload, max_staleness, look_ahead) for look_ahead in range(max_staleness + 1)]
        best = max(fixed, key=lambda outcome: outcome.batches_per_s)
        auto = simulate(workload, max_staleness, None)
        assert auto.batches_per_s >= 0.95 * best.batches_per_s, f"seed {seed}"
        assert auto.age_mean <= best.age_mean + 1, f"seed {seed}"


def feed(auto: LookAhead, count: int, *, interval_s: float = 1.0, spare: int = 0, **waited: float) -> None:
    for _ in range(count):
        auto.batch_taken(interval_s, WaitReport(**waited), spare)


@pytest.mark.parametrize("waited", [{"generation_s": 0.01}, {"stragglers_s": 0.8}])
def test_a_busy_trainer_or_one_that_waits_for_stragglers_starts_no_more(waited: dict[str, float]) -> None:
    auto = LookAhead(8)
    feed(auto, 500, **waited)  # type: ignore[arg-type]
    assert auto.current == 2


def test_a_trainer_that_lacks_groups_gets_as_many_more_as_pay_and_those_that_do_not_are_taken_back() -> None:
    auto = LookAhead(8)
    feed(auto, 7, interval_s=3.0, generation_s=2.0)
    assert auto.current == 8
    feed(auto, 400)
    assert auto.current == 8, "it made batches three times faster, so it stays"
    auto = LookAhead(8)
    feed(auto, 7, generation_s=0.5)
    assert auto.current == 5
    feed(auto, 40, generation_s=0.5)
    assert auto.current == 2, "the engines are the limit"


def test_it_follows_a_workload_that_gets_slower_and_faster_again() -> None:
    """By Little's law: a step takes 1 s; look_ahead + 1 batches are made at once, each in `rollout_s`."""
    auto = LookAhead(8)
    for count, rollout_s, expected in ((100, 3.0, 2), (100, 7.0, 6), (400, 3.0, 2)):
        for _ in range(count):
            interval_s = max(1.0, rollout_s / (auto.current + 1))
            spare = max(0, int(auto.current + 1 - rollout_s))
            feed(auto, 1, interval_s=interval_s, generation_s=interval_s - 1, spare=spare)
        assert auto.current == expected
