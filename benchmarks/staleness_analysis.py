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
RATE, LOOK_AHEAD = "trainer.learning_rate", "buffer.look_ahead"


def running_mean(row: Row) -> list[float]:
    """Return the mean reward of ten batches, from the tenth on."""
    rewards = row["reward/mean"]
    ends = range(WINDOW, len(rewards) + 1)
    return [statistics.fmean(rewards[end - WINDOW : end]) for end in ends]


def step_reached(row: Row) -> int | None:
    """Return the first step, from 1, whose last ten batches have the level."""
    means = enumerate(running_mean(row), WINDOW)
    return next((step for step, mean in means if mean >= LEVEL), None)


def steps_to_level(row: Row) -> float:
    step = step_reached(row)
    if step is None:
        return float(row["steps"])
    return step - row["age"][step - 1]


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


def print_part(rows: Sequence[Row], zeros: dict[tuple[str, int], Row]) -> None:
    arms = defaultdict[str, list[Row]](list)
    for row in rows:
        words = [
            f"{key.split('.')[-1]}={row['settings'][key]}" for key in row["settings"]
        ]
        arms[" ".join(words)].append(row)
    print(
        f"\n{rows[0]['part']:<66}{'runs':>5}{'age':>6}{'final':>7}{'steps':>7}{'s':>5}"
        f"{'of age 0':>9}{'95 %':>14}{'p':>6}{'seeds':>6}"
    )
    for words, every in sorted(arms.items(), key=lambda arm: order_of(arm[1][0])):
        reached = [step_reached(row) for row in every]
        seconds = [
            row["time_s"][-1 if step is None else step - 1]
            for row, step in zip(every, reached, strict=True)
        ]
        sign = ">" if sum(step is None for step in reached) * 2 > len(reached) else ""
        steps = sign + f"{statistics.median(map(steps_to_level, every)):.0f}"
        age = statistics.fmean(statistics.fmean(row["age"]) for row in every)
        final = statistics.fmean(running_mean(row)[-1] for row in every)
        line = f"{words:<66}{len(every):>5}{age:>6.2f}{final:>7.3f}{steps:>7}"
        line += f"{statistics.median(seconds):>5.0f}"
        pairs = [(row, zeros.get(base_of(row))) for row in every]
        logs = [
            math.log(steps_to_level(row) / steps_to_level(zero))
            for row, zero in pairs
            if zero is not None and zero is not row
        ]
        print(line + (compared(logs) if len(logs) > 1 else ""))


def order_of(row: Row) -> list[object]:
    """Return the key of an arm's place in the table."""
    settings = row["settings"]
    others = [value for key, value in settings.items() if "buffer" not in key]
    return [others, int(settings["buffer.max_staleness"]), str(settings)]


def base_of(row: Row) -> tuple[str, int]:
    """Return the key of the run at age 0 with the same model, rate and seed."""
    small = "smollm2" if row["part"] in ("smollm2", "agent") else ""
    rate = row["settings"].get(RATE, "2e-3")
    return f"{row['part'] if small else ''} {rate}", row["seed"]


def zeros_of(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Return the runs at age 0. Raises ValueError if a pair saw other prompts."""
    zeros = {
        base_of(row): row for row in rows if row["settings"].get(LOOK_AHEAD) == "0"
    }
    for row in rows:
        zero = zeros.get(base_of(row))
        if zero and row["steps"] == zero["steps"] and row["prompts"] != zero["prompts"]:
            raise ValueError(f"{row['part']}, seed {row['seed']}: the prompts differ")
    return zeros


def plot(rows: Sequence[Row], path: Path) -> None:
    """Reward against the policy's steps, the mean over the seeds: `ppo_clip` at three
    rates, and `age_clip`.
    """
    from matplotlib import pyplot as plt

    panels = {
        f"ppo_clip, learning rate {rate}": (None, rate)
        for rate in ("1e-3", "2e-3", "3e-3")
    }
    panels["age_clip, learning rate 2e-3"] = ("age_clip", "2e-3")
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 4), sharey=True)
    for axis, (title, (loss, rate)) in zip(axes, panels.items(), strict=True):
        of_age = defaultdict[int, list[Row]](list)
        for row in rows:
            settings = row["settings"]
            is_zero = settings.get(LOOK_AHEAD) == "0"
            has_loss = is_zero or settings.get("algorithm.loss") == loss
            if (
                row["part"] in ("age", "losses")
                and has_loss
                and settings.get(RATE, "2e-3") == rate
            ):
                of_age[int(settings[LOOK_AHEAD])].append(row)
        for age, every in sorted(of_age.items()):
            means = zip(*map(running_mean, every), strict=True)
            curve = [statistics.fmean(one) for one in means][age:]
            axis.plot(range(WINDOW, WINDOW + len(curve)), curve, label=f"age {age}")
        axis.set(title=title, xlabel="optimizer steps of the policy")
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
