"""What the record of staleness shows: tables and a picture from
results/staleness_record.jsonl, which benchmarks/staleness_record.py fills.

    python benchmarks/staleness_analysis.py [--plot docs/results/staleness.png]

`steps`: optimizer steps until the mean reward of ten batches is 0.8. A batch of age d
shows the policy of d steps ago, so d is subtracted. A run that does not get there counts
with all its steps, and its median has a `>`.

`of age 0`: ratio of the steps to those of the run with the same seed and rate at age 0,
which saw the same prompts in the same order (checked). Geometric mean over the seeds,
and its 95 % interval (Student's t of the logarithms). `p`: exact sign-flip test of no
difference; five seeds cannot bring it below 0.06. `seeds`: number of seeds that would
show a difference of 10 % at this scatter, with a power of 0.8.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import plain_options
from staleness_record import TABLE

Row = dict[str, Any]
WINDOW = 10
LEVEL = 0.8
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided 95 % quantile of Student's t by the number of seeds."""
POWER_Z = 1.96 + 0.84
"""Quantiles of 5 % two-sided and of a power of 0.8."""
SHIPPED = {"smollm2": "3e-5", "agent": "2e-3"}
"""Learning rates of the other configs."""


def running_mean(row: Row) -> list[float]:
    """Return the mean reward of ten batches, from the tenth on."""
    rewards = row["reward/mean"]
    ends = range(WINDOW, len(rewards) + 1)
    return [statistics.fmean(rewards[end - WINDOW : end]) for end in ends]


def step_reached(row: Row) -> int:
    """Return the first step, from 1, whose last ten batches have the level, or the last."""
    means = enumerate(running_mean(row), WINDOW)
    return next((step for step, mean in means if mean >= LEVEL), row["steps"])


def steps_to_level(row: Row) -> float:
    step = step_reached(row)
    return step - row["age"][step - 1] * (step < row["steps"])


def seconds_to_level(row: Row) -> float:
    return float(row["time_s"][step_reached(row) - 1])


def compared(logs: Sequence[float]) -> str:
    """Return the columns `of age 0`, its interval, `p` and `seeds` of paired logarithms."""
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    half = T_95[len(logs)] * deviation / math.sqrt(len(logs))
    low, high = math.exp(mean - half), math.exp(mean + half)
    signs = itertools.product((1, -1), repeat=len(logs))
    sums = [abs(sum(map(float.__mul__, logs, map(float, one)))) for one in signs]
    p = sum(one >= abs(sum(logs)) - 1e-12 for one in sums) / len(sums)
    seeds = max(2, math.ceil((POWER_Z * deviation / math.log(1.1)) ** 2))
    return f"{math.exp(mean):>9.2f}{f'{low:.2f} to {high:.2f}':>14}{p:>6.2f}{seeds:>6}"


@dataclass(frozen=True, order=True)
class Arm:
    """What the runs of an arm share. `config`: the same prompts for the same seed."""

    part: str
    loss: str
    rate: str
    bound: int
    look_ahead: str
    overdue: str


def arm_of(row: Row) -> Arm:
    settings = row["settings"]
    return Arm(
        row["part"],
        f"{settings['algorithm.loss']} {settings.get('algorithm.correction', '')}",
        settings.get("trainer.learning_rate", SHIPPED.get(row["part"], "2e-3")),
        int(settings["buffer.max_staleness"]),
        settings.get("buffer.look_ahead", "auto"),
        settings.get("buffer.on_overdue", "mask"),
    )


def zeros_of(rows: Sequence[Row]) -> dict[object, Row]:
    """Return the runs at age 0. Raises ValueError if a pair saw other prompts."""
    zeros = {base_of(row): row for row in rows if arm_of(row).look_ahead == "0"}
    for row in rows:
        zero = zeros.get(base_of(row), row)
        if row["steps"] == zero["steps"] and row["prompts"] != zero["prompts"]:
            raise ValueError(f"{row['part']}, seed {row['seed']}: the prompts differ")
    return zeros


def base_of(row: Row) -> object:
    """Return the key of the run at age 0 with the same config, rate and seed."""
    return SHIPPED.get(row["part"]), arm_of(row).rate, row["seed"]


def print_part(rows: Sequence[Row], zeros: dict[object, Row]) -> None:
    print(
        f"\n{rows[0]['part']:<50}{'runs':>5}{'age':>6}{'final':>7}{'steps':>7}{'s':>5}"
        f"{'of age 0':>9}{'95 %':>14}{'p':>6}{'seeds':>6}"
    )
    for arm, group in itertools.groupby(sorted(rows, key=arm_of), arm_of):
        every = list(group)
        words = f"{arm.loss} rate={arm.rate} bound={arm.bound} look_ahead={arm.look_ahead} {arm.overdue}"
        steps = [steps_to_level(row) for row in every]
        sign = ">" if statistics.median(steps) >= every[0]["steps"] else ""
        age = statistics.fmean(statistics.fmean(row["age"]) for row in every)
        final = statistics.fmean(running_mean(row)[-1] for row in every)
        seconds = statistics.median(map(seconds_to_level, every))
        line = f"{words:<50}{len(every):>5}{age:>6.2f}{final:>7.3f}"
        line += f"{f'{sign}{statistics.median(steps):.0f}':>7}{seconds:>5.0f}"
        pairs = [(row, zeros.get(base_of(row), row)) for row in every]
        logs = [
            math.log(steps_to_level(row) / steps_to_level(zero))
            for row, zero in pairs
            if zero is not row
        ]
        print(line + (compared(logs) if len(logs) > 1 else ""))


PANELS = (
    ("ppo_clip ", "1e-3"),
    ("ppo_clip ", "2e-3"),
    ("ppo_clip ", "3e-3"),
    ("age_clip ", "2e-3"),
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Reward against the policy's steps, the mean over the seeds, by loss and rate."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(16, 4), sharey=True)
    quickstart = [row for row in rows if row["part"] in ("age", "losses")]
    for axis, (loss, rate) in zip(axes, PANELS, strict=True):
        curves = defaultdict[int, list[list[float]]](list)
        for row in quickstart:
            arm = arm_of(row)
            if arm.rate == rate and (arm.loss == loss or arm.bound == 0):
                curves[arm.bound].append(running_mean(row)[arm.bound :])
        for age, every in sorted(curves.items()):
            means = [statistics.fmean(column) for column in zip(*every, strict=True)]
            axis.plot(range(WINDOW, WINDOW + len(means)), means, label=f"age {age}")
        axis.set(
            title=f"{loss.strip()}, learning rate {rate}", xlabel="steps of the policy"
        )
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("reward, mean of ten steps and of the seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--plot", type=Path, help="write the picture here")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    zeros = zeros_of(rows)
    for part in dict.fromkeys(row["part"] for row in rows):
        print_part([row for row in rows if row["part"] == part], zeros)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
