"""What the record of staleness shows: tables and one picture from
results/staleness_record.jsonl (benchmarks/staleness_record.py).

    python benchmarks/staleness_analysis.py [--plot docs/results/staleness.png]

The reward of step i is the reward of the policy of step i minus the age, so curves of
reward against steps are moved by the mean age of each step: `steps to 0.8` counts the
optimizer steps of the policy whose mean of ten steps reaches 0.8. A run that does not
reach a level has at least as many steps as it has trained, and says `>`.

Differences are paired by seed, because the runs of a seed see the same prompts in the
same order (checked). `of age 0`: geometric mean over the seeds of the ratio to the run
of age 0 with the same seed, rate and loss, with its 95 % interval (Student's t of the
logarithms); `>` if a run did not reach the level. `p`: exact sign-flip test of no
difference, which 5 seeds cannot bring below 0.06. `seeds for 10 %`: seeds that show a
difference of 10 % with a power of 0.8 at this scatter.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import plain_options
from end_to_end_runs import running_mean
from staleness_record import TABLE

WINDOW = 10
LEVELS = (0.5, 0.8)
T_95 = {
    1: 12.71,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
}
"""Two-sided 95 % quantile of Student's t by degrees of freedom."""
POWER_Z = 1.96 + 0.84
"""Quantiles of 5 % two-sided and of a power of 0.8."""


@dataclass(frozen=True)
class Run:
    part: str
    settings: Mapping[str, str]
    seed: int
    prompts: str
    age: Sequence[float]
    reward: Sequence[float]
    time_s: Sequence[float]

    @property
    def rate(self) -> float:
        return float(self.settings.get("trainer.learning_rate", "nan"))

    @property
    def mean_age(self) -> float:
        return statistics.fmean(self.age)

    @property
    def final(self) -> float:
        return statistics.fmean(self.reward[-WINDOW:])

    def steps_to(self, level: float) -> float:
        """Optimizer steps of the first policy at `level`; infinite if none is."""
        means = running_mean(list(self.reward), window=WINDOW)
        for step, mean in enumerate(means):
            if step >= WINDOW and mean >= level:
                # The middle of the window, less the age at which it was sampled.
                return max(step - WINDOW / 2 - self.age[step], 1.0)
        return math.inf

    def seconds_to(self, level: float) -> float:
        means = running_mean(list(self.reward), window=WINDOW)
        reached = [
            time_s
            for time_s, mean in zip(self.time_s, means, strict=True)
            if mean >= level
        ]
        return reached[0] if reached else math.inf


def read_runs(table: Path) -> list[Run]:
    rows = map(json.loads, table.read_text(encoding="utf-8").splitlines())
    return [
        Run(
            row["part"],
            row["settings"],
            row["seed"],
            row["prompts"],
            row["age"],
            row["reward/mean"],
            row["time_s"],
        )
        for row in rows
    ]


def by_arm(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Return the runs of each arm by seed."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        arms[json.dumps(dict(run.settings))][run.seed] = run
    return arms


def check_prompts(runs: Sequence[Run]) -> None:
    """Raise ValueError if runs of a part and a seed saw other prompts."""
    seen: dict[tuple[str, int], str] = {}
    for run in runs:
        first = seen.setdefault((run.part, run.seed), run.prompts)
        if first != run.prompts:
            raise ValueError(f"{run.part}, seed {run.seed}: the prompts differ")


@dataclass(frozen=True)
class Ratio:
    """Ratios to age 0 over the seeds."""

    mean: float
    low: float
    high: float
    p: float
    seeds_needed: int
    num_seeds: int


def compare(logs: Sequence[float]) -> Ratio:
    """Summarize logarithms of paired ratios."""
    count = len(logs)
    mean = statistics.fmean(logs)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf, 1.0, 0, count)
    deviation = statistics.stdev(logs)
    half = T_95[min(count - 1, 9)] * deviation / math.sqrt(count)
    seeds_needed = math.ceil((POWER_Z * deviation / math.log(1.1)) ** 2)
    bounds = math.exp(mean - half), math.exp(mean + half)
    return Ratio(
        math.exp(mean), *bounds, sign_flip_p(logs), max(seeds_needed, 2), count
    )


def sign_flip_p(values: Sequence[float]) -> float:
    """Return the share of all choices of signs whose sum is at least as far from 0."""
    observed = abs(sum(values))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(total >= observed - 1e-12 for total in sums) / len(sums)


def base_of(run: Run) -> dict[str, str]:
    """Return the settings of the same arm at age 0."""
    zero = {"buffer.max_staleness": "0", "buffer.look_ahead": "0"}
    return {**run.settings, **zero}


def print_part(part: str, runs: Sequence[Run]) -> None:
    arms = by_arm(runs)
    print(f"\n{part}: {len(runs)} runs, {len(arms)} arms")
    head = "".join(f"{f'steps to {level}':>14}" for level in LEVELS)
    print(
        f"{'arm':<58}{'seeds':>6}{'age':>7}{'final':>7}{head}{'s to 0.8':>10}"
        f"{'of age 0':>10}{'95 %':>14}{'p':>7}{'seeds for 10 %':>16}"
    )
    for of_seed in arms.values():
        every = list(of_seed.values())
        words = " ".join(
            f"{key.rpartition('.')[2]}={value}"
            for key, value in every[0].settings.items()
        )
        line = f"{words:<58}{len(every):>6}"
        line += f"{statistics.fmean(run.mean_age for run in every):>7.2f}"
        line += f"{statistics.median(run.final for run in every):>7.3f}"
        for level in LEVELS:
            line += f"{words_of([run.steps_to(level) for run in every], every):>14}"
        line += f"{words_of([run.seconds_to(LEVELS[-1]) for run in every], None):>10}"
        zero = arms.get(json.dumps(base_of(every[0])), {})
        logs = paired_logs(of_seed, zero)
        if logs and zero is not of_seed:
            ratio = compare(logs)
            ends = [run.steps_to(LEVELS[-1]) for run in every]
            sign = "" if all(map(math.isfinite, ends)) else ">"
            line += f"{f'{sign}{ratio.mean:.2f}':>10}{f'{ratio.low:.2f} to {ratio.high:.2f}':>14}"
            line += f"{ratio.p:>7.2f}{ratio.seeds_needed:>16}"
        print(line)


def words_of(values: Sequence[float], runs: Sequence[Run] | None) -> str:
    """Return the median, or `>N` if the median run does not reach the level."""
    median = statistics.median_low(values)
    if math.isfinite(median):
        return f"{median:.0f}"
    return "-" if runs is None else f">{len(runs[0].reward)}"


def paired_logs(of_seed: Mapping[int, Run], zero: Mapping[int, Run]) -> list[float]:
    """Logarithms of the ratio of steps to the last level; a run that never reaches it
    counts with all its steps.
    """
    logs = list[float]()
    for seed, run in of_seed.items():
        if seed in zero:
            ours, base = (
                min(one.steps_to(LEVELS[-1]), len(one.reward))
                for one in (run, zero[seed])
            )
            logs.append(math.log(ours / base))
    return logs


def print_prediction(runs: Sequence[Run]) -> None:
    """Rank correlation of the price (steps to 0.5 over age 0's) with age, and with the
    product of age and rate.
    """
    arms = by_arm(runs)
    prices, ages, products = [], [], []
    for of_seed in arms.values():
        for seed, run in of_seed.items():
            zero = arms.get(json.dumps(base_of(run)), {}).get(seed)
            if zero is None or run.mean_age == 0:
                continue
            ours, base = (
                min(one.steps_to(LEVELS[0]), len(one.reward)) for one in (run, zero)
            )
            prices.append(ours / base)
            ages.append(run.mean_age)
            products.append(run.mean_age * run.rate)
    if len(prices) > 2:
        print("\nrank correlation of the price (steps to 0.5, of age 0) with")
        for name, values in (("age", ages), ("age times rate", products)):
            print(
                f"    {name:<16}{statistics.correlation(ranks(prices), ranks(values)):.2f}"
            )


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Reward against the policy's steps for each rate: the mean over the seeds."""
    from matplotlib import pyplot as plt

    rates = sorted({run.rate for run in runs})
    _, axes = plt.subplots(1, len(rates), figsize=(5 * len(rates), 4), sharey=True)
    for axis, rate in zip([axes] if len(rates) == 1 else axes, rates, strict=True):
        chosen = [run for run in runs if run.rate == rate]
        for age in sorted({int(run.settings["buffer.look_ahead"]) for run in chosen}):
            every = [
                run for run in chosen if run.settings["buffer.look_ahead"] == str(age)
            ]
            columns = zip(*(run.reward for run in every), strict=True)
            means = running_mean(
                [statistics.fmean(column) for column in columns], window=WINDOW
            )
            steps = [step - age for step in range(len(means))]
            axis.plot(steps[age:], means[age:], label=f"age {age}")
        axis.set(
            title=f"learning rate {rate:g}", xlabel="optimizer steps of the policy"
        )
        axis.grid(visible=True, alpha=0.3)
    plt.gca().legend()
    plt.gcf().axes[0].set_ylabel("reward, mean of ten steps and of the seeds")
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--plot", type=Path, help="write the picture of part age here")
    arguments = parser.parse_args()
    runs = read_runs(arguments.table)
    check_prompts(runs)
    for part in dict.fromkeys(run.part for run in runs):
        chosen = [run for run in runs if run.part == part]
        print_part(part, chosen)
        if part == "age":
            print_prediction(chosen)
            if arguments.plot:
                plot(chosen, arguments.plot)


if __name__ == "__main__":
    main()
