"""How fast a run would be under settings around its own, and how old its data: played in virtual time, with
the rule and the look-ahead of runs; and which setting is chosen, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.simulation import Simulation
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.buffer.workload import Lognormal, SimulatedMachine, SimulationResult
from asyncrl.config import RunConfig
from asyncrl.config.generation import OnOverdue
from asyncrl.observe.forecast.run_timing import RecordedRollouts, RunTiming

BOUNDS = (0, 1, 2, 4, 8)
MANY_BATCHES, FEW_BATCHES, MAX_ROLLOUTS = 200, 30, 12_800
"""Batches of a simulated run: the fewer, the larger they are."""
NUM_SEEDS = 2
"""Simulated runs of the present setting, and of those among which is chosen, whose means are given: what
look_ahead=auto finds differs from run to run."""
CLOSE = 0.03
"""A setting that is slower by no more than this share counts as fast as the fastest."""
MAYBE_CLOSE = 0.12
"""The same after one run of it."""
SAME_AGE, SAME_FRACTION = 0.05, 0.05
"""Mean ages that differ by less, in versions or as a share, count as one."""


@dataclass(frozen=True, slots=True)
class ForecastSetting:
    """One line of the table. `num_trainer`: devices of the trainer; None: both sides take turns on all."""

    max_staleness: int
    on_overdue: OnOverdue
    look_ahead: Literal["auto"] | int
    num_engines: int
    num_trainer: int | None

    @property
    def parts(self) -> str:
        """`1+2`: a trainer of one device, and two engines."""
        return (
            f"turns {self.num_engines}"
            if self.num_trainer is None
            else f"{self.num_trainer}+{self.num_engines}"
        )

    def differs(self, other: ForecastSetting) -> str:
        """The settings of the buffer that are not those of the other, as they are written."""
        names = ("max_staleness", "on_overdue", "look_ahead")
        mine, others = asdict(self), asdict(other)
        return " ".join(f"buffer.{name}={mine[name]}" for name in names if mine[name] != others[name])


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated: `config`, with a machine and a workload that were measured, or assumed.

    `num_devices`: of both sides; None where they share cores, so that none can change sides. `sources`: where
    the numbers come from, in words. `measured`: of the run, where there was one.
    """

    config: RunConfig
    machine: SimulatedMachine
    workload: Lognormal | RecordedRollouts
    handover_s: float
    num_devices: int | None
    in_turns: bool
    sources: tuple[str, ...]
    measured: RunTiming | None = None

    @property
    def present(self) -> ForecastSetting:
        """That of the config."""
        buffer, ranks = self.config.buffer, None if self.in_turns else self.config.trainer.world_size
        num_engines = self.config.rollout.max_engines
        return ForecastSetting(buffer.max_staleness, buffer.on_overdue, buffer.look_ahead, num_engines, ranks)

    @property
    def num_batches(self) -> int:
        """Of a simulated run."""
        size = self.config.trainer.num_groups * self.config.rollout.group_size
        return max(FEW_BATCHES, min(MANY_BATCHES, MAX_ROLLOUTS // size))

    def play(self, setting: ForecastSetting, *, seed: int = 0) -> SimulationResult:
        """One simulated run."""
        bound, ahead = setting.max_staleness, setting.look_ahead
        num_last = bound + 1
        auto = LookAhead(bound) if ahead == "auto" else None
        rule = StalenessRule(
            num_groups=self.config.trainer.num_groups,
            num_batches=self.num_batches + num_last,
            max_staleness=bound,
            on_overdue=setting.on_overdue,
            look_ahead=LookAhead(bound).current if ahead == "auto" else ahead,
        )
        return Simulation(
            rule,
            replace(self.workload, seed=seed),
            self.machine_of(setting),
            auto=auto,
            max_hand_backs=self.config.rollout.max_hand_backs,
            num_first=self.num_batches // 5,
            num_last=num_last,
        ).run()

    def machine_of(self, setting: ForecastSetting) -> SimulatedMachine:
        """Training on k devices takes 1 / k of the time; in turns neither side slows the other down."""
        machine = replace(self.machine, num_engines=setting.num_engines)
        own = ranks = self.config.trainer.world_size
        if setting.num_trainer is not None:
            ranks = setting.num_trainer
        else:
            ranks = self.num_devices or own
            machine = replace(
                machine, train_drag=0.0, decode_drag=0.0, publish_s=self.handover_s, pause_s=0.0
            )
        share = own / ranks
        return replace(machine, train_s=machine.train_s * share, train_token_s=machine.train_token_s * share)

    def settings(self) -> Iterator[ForecastSetting]:
        """Around the present one: bounds and on_overdue, look-aheads, engines, the split of the devices."""
        present, bound = self.present, self.config.buffer.max_staleness
        if not self.in_turns:
            for on_overdue in dict.fromkeys((present.on_overdue, *("mask", "wait", "drop"))):
                for other in sorted({*BOUNDS, bound}):
                    if other or on_overdue == present.on_overdue:  # nothing is late at 0
                        values: dict[str, Any] = {"max_staleness": other, "on_overdue": on_overdue}
                        yield replace(present, look_ahead="auto", **values)
            for ahead in sorted({0, min(1, bound), bound // 2, bound}):
                yield replace(present, look_ahead=ahead)
            for num in (present.num_engines - 1, present.num_engines + 1):
                if num:
                    yield replace(present, num_engines=num)
        turns = replace(present, max_staleness=0, look_ahead="auto", num_trainer=None)
        num_devices, size = self.num_devices, self.config.rollout.tensor_parallel
        if num_devices is None:
            yield turns
            return
        for ranks in range(1, num_devices - size + 1):
            yield replace(present, num_engines=(num_devices - ranks) // size, num_trainer=ranks)
        yield replace(turns, num_engines=max(1, num_devices // size))


Row = tuple[ForecastSetting, SimulationResult]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What came of each setting, the present one first."""

    case: Case
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, case: Case) -> Forecast:
        """Play them all."""
        settings = dict.fromkeys((case.present, *case.settings()))
        first = cls(case, tuple((setting, case.play(setting)) for setting in settings))
        fast = max(speed_of(result) for _, result in first.candidates) * (1 - MAYBE_CLOSE)

        def again(setting: ForecastSetting, once: SimulationResult) -> SimulationResult:
            if setting != case.present and (
                speed_of(once) < fast or (setting, once) not in first.same_machine
            ):
                return once
            return _mean([once, *(case.play(setting, seed=seed) for seed in range(1, NUM_SEEDS))])

        return cls(case, tuple((setting, again(setting, once)) for setting, once in first.rows))

    @property
    def present(self) -> Row:
        """The run's own."""
        return self.rows[0]

    @property
    def same_machine(self) -> list[Row]:
        """Those that need nothing more: bound, on_overdue and look-ahead alone differ."""
        parts = self.present[0].parts
        return [row for row in self.rows if row[0].parts == parts]

    @property
    def candidates(self) -> list[Row]:
        """Those among which is chosen: `drop`, which leans towards short answers, only where it is chosen
        already.
        """
        present = self.present[0].on_overdue
        return [row for row in self.same_machine if row[0].on_overdue in (present, "mask", "wait")]

    @property
    def choice(self) -> Row:
        """The least mean age within CLOSE of the best speed; of equal ones the one that changes least."""
        best = max(speed_of(result) for _, result in self.candidates)
        close = [row for row in self.candidates if speed_of(row[1]) >= best * (1 - CLOSE)]
        least = min(result.age_mean for _, result in close)
        same = max(least + SAME_AGE, least * (1 + SAME_FRACTION))
        present = self.present[0]

        def change(row: Row) -> tuple[int, bool, float]:
            return len(row[0].differs(present).split()), row[0].look_ahead != "auto", row[1].age_mean

        return min((row for row in close if row[1].age_mean <= same), key=change)

    def why(self) -> list[str]:
        """The choice in sentences, and what other engines or another split would give."""
        (present, now), (chosen, then) = self.present, self.choice
        changes = chosen.differs(present)
        first = (
            f"Set {changes}: {result_words(then)}" if changes else f"Keep the setting: {result_words(now)}"
        )
        if changes:
            first += f"; the present one: {result_words(now)}"
        told = [f"{first}."]
        name, fastest = max(self.candidates, key=lambda row: speed_of(row[1]))
        if changes:
            told.append(f"Reason: {_gain(then, now, fastest)}.")
        if name == chosen:
            told.append(
                f"On this machine nothing is faster, and nothing within {CLOSE:.0%} has younger data."
            )
        else:
            more, age = speed_of(fastest) / speed_of(then) - 1, fastest.age_mean
            words = f"the fastest, {name.differs(chosen)}, makes {more:.1%} more, with data of age {age:.2f}"
            told.append(f"Nothing within {CLOSE:.0%} of the best speed has younger data: {words}.")
        others = [row for row in self.rows if row not in self.same_machine]
        setting, best = max(others, key=lambda row: speed_of(row[1]), default=(present, now))
        if (more := speed_of(best) / speed_of(then) - 1) > CLOSE:
            what = (
                f"turns with {setting.num_engines} engines" if setting.num_trainer is None else setting.parts
            )
            told.append(f"More than that, {more:.0%}, takes other devices: {what} (trainer + engines).")
        return told


def _gain(then: SimulationResult, now: SimulationResult, fastest: SimulationResult) -> str:
    """Why one result is chosen over the present one, for people."""
    faster = then.batches_per_s / now.batches_per_s - 1
    speed = f"it is {abs(faster):.1%} {'faster' if faster > 0 else 'slower'}"
    if abs(faster) <= CLOSE:
        speed = f"it is as fast (within {CLOSE:.0%})"
    shares = [_masked(result) or "none" for result in (now, then)]
    masked = f"{shares[0]} of the present run's tokens are masked, {shares[1]} would be"
    masked = masked if shares[0] != shares[1] else ""
    if speed_of(then) > speed_of(now) * (1 + CLOSE):
        told = [speed, masked] if faster > CLOSE else [masked, speed]
    elif then.age_mean < now.age_mean:
        age = f"its data is {then.age_mean:.2f} versions old on average, not {now.age_mean:.2f}"
        told = [age, speed, masked]
    else:
        behind = 1 - speed_of(now) / speed_of(fastest)
        told = [f"the present one is {behind:.1%} slower than the fastest", masked]
    return "; ".join(filter(None, told))


def speed_of(result: SimulationResult) -> float:
    """Steps a second, less the share of tokens that are masked: they teach nothing."""
    return result.batches_per_s * (1 - result.masked_fraction)


def result_words(result: SimulationResult) -> str:
    """`3.45 steps/s, mean age 2.10, 0.3% masked`."""
    masked = f", {share} masked" if (share := _masked(result)) else ""
    return f"{rate_text(result.batches_per_s)} steps/s, mean age {result.age_mean:.2f}{masked}"


def _masked(result: SimulationResult) -> str:
    return f"{result.masked_fraction:.1%}" if result.masked_fraction > 0.0005 else ""


def rate_text(value: float) -> str:
    """Three digits: 0.588, 5.90, 12.4."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 0.01))))}f}"


def _mean(results: Sequence[SimulationResult]) -> SimulationResult:
    rows = [asdict(result) for result in results]
    means: dict[str, Any] = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return SimulationResult(**means | {"age_max": max(row["age_max"] for row in rows)})
