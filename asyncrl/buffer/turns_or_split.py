"""Compares, in virtual time, trainer and engines that take turns on all devices with devices split between
them: which makes more batches, and from which bound on.

It plays the staleness rule that runs use on a workload of four numbers, without a model or a machine. It
assumes: a slot decodes at the same speed however many are busy, training on k devices takes 1 / k of the
time, and lengths are lognormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.simulation import Simulation, SimulationResult, Workload
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config import RunConfig
from asyncrl.config.generation import OnOverdue

BOUNDS = (0, 1, 2, 4)
"""max_staleness of the rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on `num_devices`. Its unit of time is a rollout's mean, 1 s.

    `ratio`: device-seconds of generating a batch over those of training on it, with every slot busy. `sigma`:
    shape of the lognormal lengths (0 = all the same). `handover_s`: both handovers of a turn, the push
    included. `slots`: of a device that generates.
    """

    num_devices: int
    num_groups: int
    group_size: int
    slots: int
    ratio: float
    sigma: float
    handover_s: float
    on_overdue: OnOverdue = "wait"
    num_batches: int = 200

    def play(self, max_staleness: int = 0, num_trainer: int | None = None) -> SimulationResult:
        """`num_trainer` devices train and the others generate, at the same time as far as the bound allows.
        None: every device generates, then every device trains, and each turn pays its handovers.
        """
        num_training = self.num_devices if num_trainer is None else num_trainer
        num_generating = self.num_devices - (num_trainer or 0)
        rule = StalenessRule(
            num_groups=self.num_groups,
            num_batches=self.num_batches,
            max_staleness=max_staleness,
            on_overdue=self.on_overdue,
            look_ahead=max_staleness,
        )
        workload = Workload(
            num_slots=self.slots * num_generating,
            sigma=self.sigma,
            group_size=self.group_size,
            train_s=self.num_groups * self.group_size / self.slots / self.ratio / num_training,
            publish_s=self.handover_s if num_trainer is None else 0.0,
        )
        return Simulation(rule, workload).run()


@dataclass(frozen=True, slots=True)
class Split:
    """The fastest split at one bound. `gain`: its batches a second over those of turns. `break_even_s`: with
    handovers of this length turns are as fast; below 0 the split wins even against handovers that take no
    time.
    """

    max_staleness: int
    num_trainer: int
    outcome: SimulationResult
    gain: float
    break_even_s: float


def best_split(case: Case, max_staleness: int, turns: SimulationResult) -> Split:
    """The split with most batches a second."""
    outcomes = {num: case.play(max_staleness, num) for num in range(1, case.num_devices)}
    num_trainer = max(outcomes, key=lambda num: outcomes[num].batches_per_s)
    best = outcomes[num_trainer]
    break_even_s = 1 / best.batches_per_s - 1 / turns.batches_per_s + case.handover_s
    return Split(max_staleness, num_trainer, best, best.batches_per_s / turns.batches_per_s, break_even_s)


def break_even(case: Case, bounds: Sequence[int] = BOUNDS) -> tuple[SimulationResult, list[Split]]:
    """Turns, and the best split at each bound."""
    turns = case.play()
    return turns, [best_split(case, bound, turns) for bound in bounds]


def case_of(
    config: RunConfig, num_devices: int, ratio: float, sigma: float, handover_s: float, num_batches: int = 200
) -> Case:
    """With the groups, slots and on_overdue of the config."""
    rollout, on_overdue = config.rollout, config.buffer.on_overdue
    sizes = (num_devices, config.trainer.num_groups, rollout.group_size, rollout.slots)
    return Case(*sizes, ratio, sigma, handover_s, on_overdue, num_batches)


def case_text(case: Case) -> str:
    """One case as a table."""
    turns, splits = break_even(case)
    rollouts, slots = case.num_groups * case.group_size, case.slots * case.num_devices
    lines = [
        f"{case.num_devices} devices of {case.slots} slots, {case.num_groups} groups of {case.group_size} a "
        f"batch ({rollouts} rollouts for {slots} slots); seconds are mean rollouts",
        f"generation : training = {case.ratio:g}, lengths sigma {case.sigma:g}, on_overdue "
        f"{case.on_overdue}, {case.num_batches} batches",
        "",
        f"{'':<28} {'batches/s':>9} {'of turns':>8} {'trainer idle':>12} {'data age':>8}  even at",
        _line(f"in turns, handover {case.handover_s:g} s", turns, 1.0, ""),
    ]
    for split in splits:
        parts = f"{split.num_trainer}+{case.num_devices - split.num_trainer}"
        name = f"max_staleness {split.max_staleness}, split {parts}"
        even = f"{split.break_even_s:.2f} s" if split.break_even_s > 0 else "none: wins anyway"
        lines.append(_line(name, split.outcome, split.gain, even))
    return "\n".join(lines)


def _line(name: str, outcome: SimulationResult, gain: float, even: str) -> str:
    numbers = f"{outcome.batches_per_s:>9.3f} {gain:>8.2f} {outcome.idle_fraction:>12.0%}"
    return f"{name:<28} {numbers} {outcome.age_mean:>8.2f}  {even}".rstrip()
