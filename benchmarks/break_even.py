"""When does splitting the devices win over turns on all of them? Played in virtual time; nothing here was
measured on a device.

Eight devices, batches of 16 groups of 8. A case is: rollouts a slot (1: a batch is one wave, and its tail is
all that is left at the end; 8: freed slots are filled again), generation : training in device-seconds of a
batch, and sigma of the lognormal lengths (mean 1 s).

    python benchmarks/break_even.py [--seconds 60] [--handover 0.2] [--write]

A cell is the fastest split at that max_staleness: its batches a second over those of turns with --handover
seconds a turn, and the handover at which the two are even (-: the split wins even if handovers take no time).
`mask`: the same with buffer.on_overdue=mask.

Last line: `ratio: X` = one rollout a slot, 1 : 1, sigma 1: split at max_staleness 1 (wait) over turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from report import options, reported

from asyncrl.buffer.simulation import Simulation
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.buffer.workload import Lognormal, SimulatedMachine, SimulationResult
from asyncrl.config.generation import OnOverdue

BOUNDS = (0, 1, 2, 4)
"""max_staleness of the columns."""
NUM_DEVICES, NUM_GROUPS, GROUP_SIZE = 8, 16, 8
RATIOS, SIGMAS, WAVES = (1.0, 4.0), (0.0, 0.5, 1.0), (1, 8)


@dataclass(frozen=True, slots=True)
class DevicesCase:
    """Trainer and engines that take turns on all of `num_devices`, or have split them. Its unit of time is a
    rollout's mean, 1 s. A slot decodes at the same speed however many are busy, and training on k devices
    takes 1 / k of the time.

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
    on_overdue: OnOverdue
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
        machine = SimulatedMachine(
            slots=self.slots * num_generating,
            train_s=self.num_groups * self.group_size / self.slots / self.ratio / num_training,
            publish_s=self.handover_s if num_trainer is None else 0.0,
        )
        return Simulation(rule, Lognormal(self.sigma, group_size=self.group_size), machine).run()


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


def break_even(case: DevicesCase, bounds: Sequence[int] = BOUNDS) -> tuple[SimulationResult, list[Split]]:
    """Turns, and at each bound the split with most batches a second."""
    turns, splits = case.play(), []
    for max_staleness in bounds:
        played = ((num, case.play(max_staleness, num)) for num in range(1, case.num_devices))
        num_trainer, best = max(played, key=lambda one: one[1].batches_per_s)
        gain = best.batches_per_s / turns.batches_per_s
        break_even_s = 1 / best.batches_per_s - 1 / turns.batches_per_s + case.handover_s
        splits.append(Split(max_staleness, num_trainer, best, gain, break_even_s))
    return turns, splits


def case_of(waves: int, ratio: float, sigma: float, handover_s: float, num_batches: int) -> DevicesCase:
    """Eight devices with just so many slots that a batch is `waves` rollouts a slot."""
    slots = NUM_GROUPS * GROUP_SIZE // NUM_DEVICES // waves
    return DevicesCase(
        NUM_DEVICES, NUM_GROUPS, GROUP_SIZE, slots, ratio, sigma, handover_s, "wait", num_batches
    )


def cell(split: Split) -> str:
    """Gain, and the handover at which it is 1."""
    even = f"{split.break_even_s:.2f}" if split.break_even_s > 0 else "-"
    return f"{split.gain:5.2f} ({even:>4})"


def main() -> None:
    """Print the table."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument(
        "--handover",
        type=float,
        default=0.2,
        help="seconds of both handovers of a turn (default: %(default)s)",
    )
    arguments = parser.parse_args()
    with reported("break_even", is_kept=arguments.write):
        num_batches = max(20, int(2 * arguments.seconds))
        run_all(arguments.handover, num_batches)


def run_all(handover_s: float, num_batches: int) -> None:
    """All cases, `wait` and `mask`."""
    print(
        f"{NUM_DEVICES} devices, {num_batches} batches of {NUM_GROUPS} groups of {GROUP_SIZE}; turns pay "
        f"{handover_s:g} s; simulated"
    )
    titles = (*(f"wait, {bound}" for bound in BOUNDS), *(f"mask, {bound}" for bound in BOUNDS[1:]))
    print(f"{'a slot':>6} {'ratio':>5} {'sigma':>5} {'turns/s':>8}", *(f"{title:>12}" for title in titles))
    figure = 0.0
    for waves, ratio, sigma in product(WAVES, RATIOS, SIGMAS):
        case = case_of(waves, ratio, sigma, handover_s, num_batches)
        turns, splits = break_even(case)
        _, masked = break_even(replace(case, on_overdue="mask"), BOUNDS[1:])
        if (waves, ratio, sigma) == (1, 1.0, 1.0):
            figure = splits[1].gain
        print(
            f"{waves:>6} {ratio:>5g} {sigma:>5g} {turns.batches_per_s:>8.3f}",
            *(f"{cell(split):>12}" for split in [*splits, *masked]),
        )
    print(f"ratio: {figure:.2f}")


if __name__ == "__main__":
    main()
