"""Reads the runs of objective_curves.py and says in a table and in words how objectives differ. Starts
nothing, draws nothing.

A difference counts if it is larger than its own 95 % interval over the seeds (Student's t, pooled spread):
with three seeds a side that is 2.27 standard deviations of a seed.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, at 1, 2, ... degrees of freedom; beyond, the last one, which is on the safe
side.
"""


@dataclass(frozen=True)
class Run:
    """One finished run: one entry a step; None where the run has no such metric."""

    rewards: Sequence[float]
    ess: Sequence[float]
    clip_fraction: Sequence[float]
    staleness: Sequence[float]
    times_s: Sequence[float]
    held_out: float | None
    """Reward of the last weights on prompts that were not trained on."""
    filtered_share: float
    """Groups that buffer.filter replaced, of all that finished, 0..1."""

    @property
    def final_reward(self) -> float:
        """reward/mean over the last tenth of the steps."""
        return fmean(self.rewards[-max(1, len(self.rewards) // 10) :])


@dataclass(frozen=True)
class Setting:
    """One objective at one bound: a line of the table, a line in the picture."""

    variant: str
    max_staleness: int


Runs = Mapping[Setting, Mapping[int, Run]]
"""By setting, by seed."""


@dataclass(frozen=True)
class Pair:
    """Two settings that are compared, and the question that this answers."""

    first: Setting
    second: Setting
    question: str


@dataclass(frozen=True)
class Difference:
    """Mean of the second less mean of the first; `needed`: how large it must be to count, None with fewer
    than 2 seeds a side.
    """

    value: float
    needed: float | None

    @property
    def counts(self) -> bool:
        """It is larger than the seeds' spread explains."""
        return self.needed is not None and abs(self.value) > self.needed


def read_run(folder: Path, num_groups: int) -> Run:
    """A finished run's numbers. Raises SystemExit with the way out if it has no steps."""
    path = folder / "metrics.jsonl"
    steps = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )
    if not steps:
        raise SystemExit(f"{path} holds no steps.\n  Way out: remove {folder} and start again.")
    filtered = steps[-1].get("rollout/filtered", 0.0)
    evaluation = json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("evaluation") or {}

    def every(name: str) -> list[float]:
        return [step[name] for step in steps if name in step]

    return Run(
        rewards=every("reward/mean"),
        ess=every("policy/ess"),
        clip_fraction=every("policy/clip_fraction"),
        staleness=every("sample/staleness_mean"),
        times_s=every("time_s"),
        held_out=evaluation.get("eval/reward_mean"),
        filtered_share=filtered / (filtered + num_groups * len(steps)),
    )


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Of two settings, from one number a seed."""
    value, freedom = fmean(second) - fmean(first), len(first) + len(second) - 2
    if min(len(first), len(second)) < 2:
        return Difference(value, None)
    pooled = math.sqrt(
        sum((number - fmean(side)) ** 2 for side in (first, second) for number in side) / freedom
    )
    error = pooled * math.sqrt(1 / len(first) + 1 / len(second))
    return Difference(value, _T95[min(freedom, len(_T95)) - 1] * error)


def held_out(by_seed: Mapping[int, Run]) -> list[float]:
    """Of every seed that has it."""
    return [run.held_out for run in by_seed.values() if run.held_out is not None]


def final_rewards(by_seed: Mapping[int, Run]) -> list[float]:
    """Of every seed."""
    return [run.final_reward for run in by_seed.values()]


def settings_table(runs: Runs, labels: Mapping[str, str]) -> str:
    """Markdown: a line a setting."""
    lines = [
        "| objective | max_staleness | age | held-out reward | training reward by seed | mean ± sd | ess | "
        "clipped | filtered | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting, by_seed in runs.items():
        every = list(by_seed.values())
        cells = [
            labels[setting.variant],
            str(setting.max_staleness),
            _mean((run.staleness for run in every), "{:.1f}"),
            spread_text(held_out(by_seed)),
            ", ".join(f"{run.final_reward:.3f}" for run in every),
            spread_text(final_rewards(by_seed)),
            _mean((run.ess for run in every), "{:.3f}"),
            _mean((run.clip_fraction for run in every), "{:.1%}"),
            f"{fmean(run.filtered_share for run in every):.0%}",
            f"{fmean(run.times_s[-1] for run in every):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparisons(
    runs: Runs, pairs: Iterable[Pair], labels: Mapping[str, str], filtered: frozenset[str]
) -> str:
    """Markdown: a line a pair of settings that both were run, then in words which differences count.

    `filtered`: variants whose training reward is that of the groups that the filter left, and says nothing
    beside another's.
    """
    lines = [
        "| second against first | question | held-out reward | training reward |",
        "| --- | --- | --- | --- |",
    ]
    larger: list[str] = []
    num_judged = 0
    for pair in pairs:
        first, second = runs.get(pair.first), runs.get(pair.second)
        if not first or not second:
            continue
        names = f"{_name(pair.second, labels)} against {_name(pair.first, labels)}"
        cells = [names, pair.question]
        if held_out(first) and held_out(second):
            found = difference(held_out(first), held_out(second))
            num_judged += found.needed is not None
            cells.append(difference_text(found))
            if found.counts:
                direction = "higher" if found.value > 0 else "lower"
                larger.append(
                    f"- {names}: {direction} by {abs(found.value):.3f} ({found.needed:.3f} needed)."
                )
        else:
            cells.append("-")
        is_comparable = (pair.first.variant in filtered) == (pair.second.variant in filtered)
        cells.append(
            difference_text(difference(final_rewards(first), final_rewards(second)))
            if is_comparable
            else "not comparable"
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_in_words(larger, num_judged)])


def _in_words(larger: list[str], num_judged: int) -> list[str]:
    if num_judged == 0:
        return [
            "Nothing can be said of differences: that takes two seeds a side or more, with a held-out reward."
        ]
    by_chance = f"of {num_judged} comparisons {num_judged / 20:.1f} are expected to by chance alone"
    if not larger:
        return [
            f"**None of the {num_judged} differences in held-out reward is larger than the spread of the "
            f"seeds explains.** On this task, "
            f"with this budget, these objectives cannot be told apart ({by_chance})."
        ]
    rest = num_judged - len(larger)
    return [
        f"Larger than the spread of the seeds explains, in held-out reward ({by_chance}):",
        "",
        *larger,
        "",
        f"The other {rest} are not: there the two cannot be told apart." if rest else "All of them are.",
    ]


def write_csv(runs: Runs, path: Path) -> None:
    """A row a setting and step, as far as all its seeds got: reward over seeds, means of the rest."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "variant",
                "max_staleness",
                "num_seeds",
                "step",
                "reward_mean",
                "reward_min",
                "reward_max",
                "ess",
                "staleness",
            ]
        )
        for setting, by_seed in runs.items():
            every = list(by_seed.values())
            for step in range(min(len(run.rewards) for run in every)):
                rewards = [run.rewards[step] for run in every]
                values = (
                    fmean(rewards),
                    min(rewards),
                    max(rewards),
                    _at(step, (r.ess for r in every)),
                    _at(step, (r.staleness for r in every)),
                )
                shown = ["" if value is None else f"{value:.4g}" for value in values]
                writer.writerow([setting.variant, setting.max_staleness, len(every), step, *shown])


def spread_text(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; of one seed its value."""
    if not values:
        return "-"
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def difference_text(found: Difference) -> str:
    """`+0.021 (needs 0.035)`, in bold if it counts."""
    if found.needed is None:
        return f"{found.value:+.3f} (one seed)"
    text = f"{found.value:+.3f} (needs {found.needed:.3f})"
    return f"**{text}**" if found.counts else text


def _name(setting: Setting, labels: Mapping[str, str]) -> str:
    return f"{labels[setting.variant]} at {setting.max_staleness}"


def _mean(series: Iterable[Sequence[float]], form: str) -> str:
    values = [value for entries in series for value in entries]
    return form.format(fmean(values)) if values else "-"


def _at(step: int, series: Iterable[Sequence[float]]) -> float | None:
    values = [entries[step] for entries in series if step < len(entries)]
    return fmean(values) if values else None
