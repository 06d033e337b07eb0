"""Turns on all devices against devices split between the sides, played in virtual time: which one makes more
batches, and from where.

Knows the staleness rule that runs use, and a workload in four numbers; knows no model and no machine. What it
takes for granted: a slot decodes at the same speed however many are busy, training on k devices takes 1 / k
of the time, and lengths are lognormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.simulation import Simulation, SimulationResult, Workload
from asyncrl.buffer.staleness import OnOverdue, StalenessRule
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

BOUNDS = (0, 1, 2, 4)
"""max_staleness of the rows."""
MAX_RATIO, MAX_SIGMA, MAX_S = 1e6, 10.0, 1e6
"""Beyond them (a ratio: below 1 / MAX_RATIO, too) nothing is known of any machine, and times soon differ by
more than a float holds.
"""


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
    publish_s: float = 0.0
    on_overdue: OnOverdue = "wait"
    num_batches: int = 200

    @property
    def train_device_s(self) -> float:
        """Device-seconds of training on a batch."""
        return self.num_groups * self.group_size / self.slots / self.ratio


@dataclass(frozen=True, slots=True)
class Split:
    """The fastest split at one bound. `gain`: its batches a second over those of turns. `break_even_s`: turns
    are as fast as this once their handovers take so long; below 0 the split wins even against handovers that
    take no time.
    """

    max_staleness: int
    num_trainer: int
    outcome: SimulationResult
    gain: float
    break_even_s: float


def play(case: Case, *, max_staleness: int, slots: int, train_s: float, publish_s: float) -> SimulationResult:
    """A whole run; look_ahead is as large as the bound lets it be."""
    rule = StalenessRule(
        num_groups=case.num_groups,
        num_batches=case.num_batches,
        max_staleness=max_staleness,
        on_overdue=case.on_overdue,
        look_ahead=max_staleness,
    )
    workload = Workload(
        num_slots=slots, sigma=case.sigma, group_size=case.group_size, train_s=train_s, publish_s=publish_s
    )
    return Simulation(rule, workload).run()


def in_turns(case: Case) -> SimulationResult:
    """Every device generates, then every device trains; nothing overlaps, and each turn pays its
    handovers.
    """
    slots, train_s = case.slots * case.num_devices, case.train_device_s / case.num_devices
    return play(case, max_staleness=0, slots=slots, train_s=train_s, publish_s=case.handover_s)


def apart(case: Case, max_staleness: int, num_trainer: int) -> SimulationResult:
    """So many devices train, the others generate, at the same time as far as the bound lets them."""
    slots, train_s = case.slots * (case.num_devices - num_trainer), case.train_device_s / num_trainer
    return play(case, max_staleness=max_staleness, slots=slots, train_s=train_s, publish_s=case.publish_s)


def best_split(case: Case, max_staleness: int, turns: SimulationResult) -> Split:
    """The split with most batches a second."""
    outcomes = {num: apart(case, max_staleness, num) for num in range(1, case.num_devices)}
    num_trainer = max(outcomes, key=lambda num: outcomes[num].batches_per_s)
    best = outcomes[num_trainer]
    free_turn_s = 1 / turns.batches_per_s - case.handover_s
    return Split(
        max_staleness,
        num_trainer,
        best,
        best.batches_per_s / turns.batches_per_s,
        break_even_s=1 / best.batches_per_s - free_turn_s,
    )


def break_even(case: Case, bounds: Sequence[int] = BOUNDS) -> tuple[SimulationResult, list[Split]]:
    """Turns, and the best split at each bound."""
    turns = in_turns(case)
    return turns, [best_split(case, bound, turns) for bound in bounds]


def simulation_text(
    config: RunConfig,
    *,
    num_devices: int,
    ratio: float,
    sigma: float,
    handover_s: float,
    publish_s: float = 0.0,
    num_batches: int = 200,
) -> str:
    """What `asyncrl simulate` prints: turns against splits, with the groups, slots and on_overdue of the
    config.
    """
    is_sane = (
        1 / MAX_RATIO <= ratio <= MAX_RATIO
        and 0 <= sigma <= MAX_SIGMA
        and all(0 <= s <= MAX_S for s in (handover_s, publish_s))
    )
    if num_devices < 2 or not is_sane:  # nan is not sane either: it is in no range
        raise ConfigError(
            f"nothing can be simulated with {num_devices} devices, ratio {ratio}, sigma {sigma}, handover "
            f"{handover_s} s, "
            f"publish {publish_s} s",
            rule="two devices or more can be split; "
            f"a ratio is within {1 / MAX_RATIO:g}..{MAX_RATIO:g}, sigma 0..{MAX_SIGMA:g}, a time "
            f"0..{MAX_S:g}",
            way_out="correct the option.",
        )
    case = Case(
        num_devices=num_devices,
        num_groups=config.trainer.num_groups,
        group_size=config.rollout.group_size,
        slots=config.rollout.slots,
        ratio=ratio,
        sigma=sigma,
        handover_s=handover_s,
        publish_s=publish_s,
        on_overdue=config.buffer.on_overdue,
        num_batches=num_batches,
    )
    return case_text(case)


def case_text(case: Case) -> str:
    """One case as a table."""
    turns, splits = break_even(case)
    rollouts, slots = case.num_groups * case.group_size, case.slots * case.num_devices
    lines = [
        f"{case.num_devices} devices of {case.slots} slots, {case.num_groups} groups of {case.group_size} a "
        f"batch ({rollouts} rollouts for "
        f"{slots} slots); seconds are mean rollouts",
        f"generation : training = {case.ratio:g}, lengths sigma {case.sigma:g}, on_overdue "
        f"{case.on_overdue}, {case.num_batches} batches",
        "",
        f"{'':<28} {'batches/s':>9} {'of turns':>8} {'trainer idle':>12} {'data age':>8}  break-even "
        f"handover",
        _line(f"in turns, handover {case.handover_s:g} s", turns, 1.0, ""),
    ]
    for split in splits:
        parts = f"{split.num_trainer}+{case.num_devices - split.num_trainer}"
        name = f"max_staleness {split.max_staleness}, split {parts}"
        lines.append(_line(name, split.outcome, split.gain, break_even_text(split)))
    return "\n".join(lines)


def break_even_text(split: Split) -> str:
    """The handover at which turns and this split are even."""
    return f"{split.break_even_s:.2f} s" if split.break_even_s > 0 else "none: wins anyway"


def _line(name: str, outcome: SimulationResult, gain: float, even: str) -> str:
    speed, idle, age = (
        f"{outcome.batches_per_s:.3f}",
        f"{outcome.idle_fraction:.0%}",
        f"{outcome.age_mean:.2f}",
    )
    return f"{name:<28} {speed:>9} {gain:>8.2f} {idle:>12} {age:>8}  {even}".rstrip()
