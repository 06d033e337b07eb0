"""Run the shipped configs with three seeds each, and write docs/results/learning.{csv,png,md}.

python scripts/learning_curves.py [RUNS_DIR] [--seeds 0 1 2] [--only CASE ...] [--out docs/results] [--draw]

Runs are CASE-seedS in RUNS_DIR, one after the other; finished runs are kept. Needs the extras smollm2 and
harness, and the model of examples/smollm2.py. Other cases keep their rows of learning.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from asyncrl.config import load_config

ROOT = Path(__file__).resolve().parent.parent
DISTILL = ("trainer.num_steps=240", "eval.every=20")


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    label: str
    config: str
    overrides: tuple[str, ...] = ()


CASES = {
    "smollm2": Case("SmolLM2-135M, answers of one word", "configs/smollm2.yaml"),
    "dapo": Case("DAPO", "configs/dapo.yaml"),
    "dapo_unfiltered": Case("DAPO without dynamic sampling", "configs/dapo.yaml", ("buffer.filter=none",)),
    "teacher": Case("only a teacher", "configs/distill.yaml", DISTILL),
    "both": Case("teacher and reward", "configs/distill.yaml", (*DISTILL, "algorithm.reward_weight=1")),
    "reward": Case(
        "only a reward",
        "configs/distill.yaml",
        (*DISTILL, "teacher=none", "algorithm.distill_weight=0", "algorithm.reward_weight=1"),
    ),
    "search": Case("search agent", "examples/search/learn.yaml"),
}
NEEDS_TEACHER = ("teacher", "both")
PANELS = {
    "A pretrained model": ("smollm2",),
    "Dynamic sampling": ("dapo", "dapo_unfiltered"),
    "On-policy distillation": ("teacher", "both", "reward"),
    "A search agent": ("search",),
}
SEARCH_LINES = {
    "task/found": "found the passage",
    "task/right": "answered right",
    "task/searches": "searches",
    "sample/interrupted_fraction": "interrupted by new weights",
}
STYLES: Sequence[tuple[str, Any]] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 2))),
    ("#000000", (0, (1, 1.5))),
    ("#009E73", (0, (4, 1, 1, 1))),
)
"""Okabe and Ito's colors, each with its own dash."""
COLUMNS = ("sample/staleness_mean", *SEARCH_LINES, "rollouts", "tokens")

Row = Mapping[str, float]
Curves = Mapping[str, Mapping[int, Sequence[Row]]]
"""Rows by case and seed."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of `variant` with overrides of its config."""

    variant: str
    config: Path
    seed: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the run directory."""
        return f"{self.variant}-seed{self.seed}"

    @property
    def settings(self) -> list[str]:
        """Return all overrides."""
        return [f"seed={self.seed}", *self.overrides, "observe.console=none", "observe.trackers=[]"]


def plan(cases: Iterable[str], seeds: Iterable[int], root: Path) -> list[PlannedRun]:
    """List the runs by seed. The teacher is the quickstart's model, trained first."""
    teacher = PlannedRun("quickstart", ROOT / "configs" / "quickstart.yaml", 0)
    cases = list(cases)
    planned = [teacher] if set(cases) & set(NEEDS_TEACHER) else []
    for seed in seeds:
        for name in cases:
            path = (f"teacher.path={root / teacher.name / 'final'}",) if name in NEEDS_TEACHER else ()
            case = CASES[name]
            planned.append(PlannedRun(name, ROOT / case.config, seed, (*case.overrides, *path)))
    return planned


def run_all(planned: Sequence[PlannedRun], root: Path) -> None:
    for number, run in enumerate(planned, start=1):
        folder = root / run.name
        if not is_done(folder):
            print(f"[{number}/{len(planned)}] {run.name}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "asyncrl.cli", "run", str(run.config), *run.settings]
            subprocess.run([*command, "--run-dir", str(folder)], check=True)


def is_done(folder: Path) -> bool:
    """Return whether the run in `folder` ended well."""
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["state"] == "done"


def read_lines(path: Path) -> list[dict[str, float]]:
    """Read a JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_run(folder: Path) -> list[Row]:
    """Return a row per evaluation."""
    config = load_config(folder / "config.yaml")
    steps = read_lines(folder / "metrics.jsonl")
    rows: list[Row] = []
    first = 0
    for found in read_lines(folder / "eval.jsonl"):
        last = int(found["policy_version"])
        since = steps[first:last]
        row = {"step": last, "time_s": found["time_s"], "held_out": found["eval/reward_mean"]}
        for name in COLUMNS:
            if values := [step[name] for step in since if name in step]:
                row[name] = fmean(values)
        if since:
            num_groups = last * config.trainer.num_groups + since[-1]["rollout/filtered"]
            row["rollouts"] = num_groups * config.rollout.group_size
            row["tokens"] = since[-1]["tokens/generated"]
        rows.append(row)
        first = last
    return rows


def read_csv(path: Path) -> dict[str, dict[int, list[Row]]]:
    """Read the rows of write_csv; {} without a file."""
    found: dict[str, dict[int, list[Row]]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                case = line.pop("case")
                seed = int(line.pop("seed"))
                row = {name: float(value) for name, value in line.items() if value}
                found.setdefault(case, {}).setdefault(seed, []).append(row)
    return found


def write_csv(curves: Curves, path: Path) -> None:
    """Write a line per evaluation."""
    names = ("step", "time_s", "held_out", *COLUMNS)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "seed", *names])
        for case, by_seed in curves.items():
            for seed, rows in by_seed.items():
                for row in rows:
                    shown = [f"{row[name]:.5g}" if name in row else "" for name in names]
                    writer.writerow([case, seed, *shown])


def draw(curves: Curves, path: Path) -> None:
    """Draw held-out rewards and the search agent's behavior: means over seeds, bands from minimum to
    maximum.
    """
    from matplotlib.figure import Figure

    held_out = [
        (title, "held-out reward", [(curves[name], "held_out", CASES[name].label) for name in names])
        for title, all_names in PANELS.items()
        if (names := [name for name in all_names if name in curves])
    ]
    if "search" in curves:
        lines = [(curves["search"], name, label) for name, label in SEARCH_LINES.items()]
        held_out.append(("What the search agent does", "of a rollout, in training", lines))
    num_rows = -(-len(held_out) // 3)
    num_columns = min(len(held_out), 3)
    figure = Figure(figsize=(4.2 * num_columns, 3.2 * num_rows), dpi=130, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for panel in panels[len(held_out) :]:
        panel.set_axis_off()
    for panel, (title, what, lines) in zip(panels, held_out, strict=False):
        for style, line in zip(STYLES, lines, strict=False):
            draw_line(panel, *line, style)
        panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
        panel.set(xlabel="step", ylabel=what, ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        if len(lines) > 1:
            panel.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def draw_line(
    panel: Any, by_seed: Mapping[int, Sequence[Row]], name: str, label: str, style: tuple[str, Any]
) -> None:
    """Draw a metric over the steps that all seeds evaluated."""
    every = [{row["step"]: row[name] for row in rows if name in row} for rows in by_seed.values()]
    steps = sorted(set.intersection(*(set(values) for values in every)))
    values = [[one[step] for one in every] for step in steps]
    color, dash = style
    panel.plot(steps, [*map(fmean, values)], color=color, linestyle=dash, label=label)
    panel.fill_between(steps, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15, linewidth=0)


def table(curves: Curves) -> str:
    """Return a Markdown table with a line per case."""
    lines = [
        "| run | config | steps | held-out reward before | after, by seed | mean ± sd | rollouts | "
        "tokens sampled | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, by_seed in curves.items():
        case = CASES[name]
        ends = [rows[-1] for rows in by_seed.values()]
        after = [end["held_out"] for end in ends]
        cells = [
            case.label,
            f"`{' '.join((case.config, *case.overrides))}`",
            f"{ends[0]['step']:.0f}",
            f"{fmean(rows[0]['held_out'] for rows in by_seed.values()):.3f}",
            ", ".join(f"{value:.3f}" for value in after),
            f"{fmean(after):.3f}" + (f" ± {stdev(after):.3f}" if len(after) > 1 else ""),
            f"{fmean(end['rollouts'] for end in ends):,.0f}",
            f"{fmean(end['tokens'] for end in ends):,.0f}",
            f"{fmean(end['time_s'] for end in ends):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(curves: Curves) -> str:
    """Return the text of learning.md."""
    seeds = sorted({seed for by_seed in curves.values() for seed in by_seed})
    return f"""# What the shipped configs learn

    python scripts/learning_curves.py --seeds {" ".join(map(str, seeds))}

![held-out rewards](learning.png)

{table(curves)}

held-out reward: reward of prompts that are not trained on (the config's `eval`), before the first step and
after the last. rollouts: trained rollouts, and rollouts of replaced groups. s: seconds from the first prompt
to the last evaluation, mean of the seeds. Lines are means over seeds; bands reach from minimum to maximum.
Every evaluation: [learning.csv](learning.csv).
"""


def main() -> None:
    """Run the cases, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs_dir", type=Path, nargs="?", default=ROOT / "runs" / "learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--draw", action="store_true", help="only read and draw")
    options = parser.parse_args()
    planned = plan(options.only, options.seeds, options.runs_dir)
    if not options.draw:
        run_all(planned, options.runs_dir)
    known = read_csv(options.out / "learning.csv")
    for name in options.only:
        known.pop(name, None)
    for run in planned:
        if run.variant in CASES and is_done(options.runs_dir / run.name):
            known.setdefault(run.variant, {})[run.seed] = read_run(options.runs_dir / run.name)
    curves = {name: known[name] for name in CASES if name in known}
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(curves, options.out / "learning.csv")
    draw(curves, options.out / "learning.png")
    (options.out / "learning.md").write_text(report(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
