"""Runs what the shipped configs say that they learn, three seeds each, and writes
docs/results/learning.{csv,png,md}.

python scripts/learning_curves.py [RUNS_DIR] [--seeds 0 1 2] [--only CASE ...] [--out docs/results]

One run after the other, as CASE-seedS in RUNS_DIR; those that are there and done are not made again. Wants
the extras smollm2 and harness, and the model of examples/smollm2.py. Cases left out by --only keep their rows
of learning.csv. --draw only reads and draws.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from run_series import PlannedRun, read_steps, run_all, say, state_of

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
    "teacher": Case("teacher alone", "configs/distill.yaml", DISTILL),
    "both": Case("teacher and reward", "configs/distill.yaml", (*DISTILL, "algorithm.reward_weight=1")),
    "reward": Case(
        "reward alone",
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
"""Okabe and Ito's colours, another dash each."""
COLUMNS = ("sample/staleness_mean", *SEARCH_LINES, "rollouts", "tokens")

Row = Mapping[str, float]
"""One evaluation: step, time_s, held_out, and the means of COLUMNS over the steps since the last one."""
Curves = Mapping[str, Mapping[int, Sequence[Row]]]
"""By case, by seed."""


def plan(cases: Iterable[str], seeds: Iterable[int], root: Path) -> list[PlannedRun]:
    """Seed after seed. A teacher is the quickstart's model, made first."""
    teacher = PlannedRun("quickstart", ROOT / "configs" / "quickstart.yaml", 0, ())
    cases = list(cases)
    planned = [teacher] if set(cases) & set(NEEDS_TEACHER) else []
    for seed in seeds:
        for name in cases:
            path = (f"teacher.path={root / teacher.name / 'final'}",) if name in NEEDS_TEACHER else ()
            case = CASES[name]
            planned.append(PlannedRun(name, ROOT / case.config, seed, (*case.overrides, *path)))
    return planned


def read_run(folder: Path) -> list[Row]:
    """A row for each evaluation."""
    config = load_config(folder / "config.yaml")
    steps, rows, first = read_steps(folder), list[Row](), 0
    for found in read_steps(folder, "eval.jsonl"):
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


def read_all(planned: Sequence[PlannedRun], root: Path) -> Curves:
    """The runs that are done."""
    found: dict[str, dict[int, Sequence[Row]]] = {}
    for run in planned:
        if run.variant in CASES and state_of(root / run.name) == "done":
            found.setdefault(run.variant, {})[run.seed] = read_run(root / run.name)
    if not found:
        raise SystemExit(f"{root} holds no run that is done.\n  Way out: run this script without --draw.")
    return found


def read_csv(path: Path) -> Curves:
    """What write_csv wrote; empty if there is no such file."""
    found: dict[str, dict[int, list[Row]]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                case, seed = line.pop("case"), int(line.pop("seed"))
                row = {name: float(value) for name, value in line.items() if value}
                found.setdefault(case, {}).setdefault(seed, []).append(row)
    return found


def write_csv(curves: Curves, path: Path) -> None:
    """A row an evaluation."""
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
    """Held-out reward a panel, and what the search agent does: means over seeds, bands from lowest to
    highest.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {title: [name for name in names if name in curves] for title, names in PANELS.items()}
    shown = {title: names for title, names in shown.items() if names}
    has_search = "search" in curves
    number = len(shown) + has_search
    figure = Figure(figsize=(4.2 * min(number, 3), 3.2 * -(-number // 3)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(-(-number // 3), min(number, 3), squeeze=False).flatten()
    for panel, (title, names) in zip(panels, shown.items(), strict=False):
        for style, name in zip(STYLES, names, strict=False):
            draw_line(panel, curves[name], "held_out", CASES[name].label, style)
        dress(panel, title, "held-out reward", has_legend=len(names) > 1)
    if has_search:
        for style, (name, label) in zip(STYLES, SEARCH_LINES.items(), strict=True):
            draw_line(panels[len(shown)], curves["search"], name, label, style)
        dress(panels[len(shown)], "What the search agent does", "of a rollout, in training", has_legend=True)
    for panel in panels[number:]:
        panel.set_axis_off()
    figure.savefig(path)


def draw_line(
    panel: Any, by_seed: Mapping[int, Sequence[Row]], name: str, label: str, style: tuple[str, Any]
) -> None:
    """One metric over the steps that all seeds evaluated."""
    every = [{row["step"]: row[name] for row in rows if name in row} for rows in by_seed.values()]
    steps = sorted(set.intersection(*(set(values) for values in every)))
    values = [[one[step] for one in every] for step in steps]
    colour, dash = style
    panel.plot(steps, [fmean(found) for found in values], color=colour, linestyle=dash, label=label)
    lowest, highest = [min(found) for found in values], [max(found) for found in values]
    panel.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def dress(panel: Any, title: str, what: str, *, has_legend: bool) -> None:
    """Axes and words."""
    panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
    panel.set_xlabel("step")
    panel.set_ylabel(what)
    panel.set_ylim(0, 1.02)
    panel.grid(alpha=0.3)
    if has_legend:
        panel.legend(fontsize=8, frameon=False)


def table(curves: Curves) -> str:
    """Markdown: a line a case."""
    lines = [
        "| run | config | steps | held-out reward before | after, by seed | mean ± sd | rollouts | "
        "tokens sampled | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, by_seed in curves.items():
        case, every = CASES[name], list(by_seed.values())
        ends = [rows[-1] for rows in every]
        cells = [
            case.label,
            f"`{' '.join((case.config, *case.overrides))}`",
            f"{ends[0]['step']:.0f}",
            f"{fmean(rows[0]['held_out'] for rows in every):.3f}",
            ", ".join(f"{end['held_out']:.3f}" for end in ends),
            spread_text([end["held_out"] for end in ends]),
            f"{fmean(end['rollouts'] for end in ends):,.0f}",
            f"{fmean(end['tokens'] for end in ends):,.0f}",
            f"{fmean(end['time_s'] for end in ends):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread_text(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; of one seed its value."""
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def report(curves: Curves) -> str:
    """learning.md."""
    seeds = sorted({seed for by_seed in curves.values() for seed in by_seed})
    return f"""# What the shipped configs learn

    python scripts/learning_curves.py --seeds {" ".join(map(str, seeds))}

![held-out rewards](learning.png)

{table(curves)}

held-out reward: of prompts that are not trained on, as the config's `eval` says, before the first step and
after the last. rollouts: all that were trained on, and those of replaced groups. s: from the first prompt to
the last evaluation, mean of the seeds. Lines are means over seeds, bands reach from the lowest to the
highest. Figures of every evaluation: [learning.csv](learning.csv).
"""


def main(arguments: list[str] | None = None) -> int:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description="What the shipped configs learn, seed by seed.")
    parser.add_argument("runs_dir", type=Path, nargs="?", default=ROOT / "runs" / "learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    options = parser.parse_args(arguments)
    planned = plan(options.only, options.seeds, options.runs_dir)
    if not options.draw:
        run_all(planned, options.runs_dir)
    known = {**read_csv(options.out / "learning.csv"), **read_all(planned, options.runs_dir)}
    curves = {name: known[name] for name in CASES if name in known}
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(curves, options.out / "learning.csv")
    draw(curves, options.out / "learning.png")
    (options.out / "learning.md").write_text(report(curves), encoding="utf-8")
    say(f"wrote learning.csv, learning.png and learning.md to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
