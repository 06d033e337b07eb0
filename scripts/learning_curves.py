"""Run the shipped configs with three seeds each, and write
docs/results/learning.{csv,png,md}.

python scripts/learning_curves.py [RUNS_DIR] [--seeds 0 1 2] [--only CASE ...] [--out
docs/results]

Runs are CASE-seedS in RUNS_DIR, one after the other; finished runs are kept. Needs the
extras smollm2 and harness, and the model of examples/smollm2.py. Other cases keep their
rows of learning.csv.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

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
    "dapo_unfiltered": Case(
        "DAPO without dynamic sampling", "configs/dapo.yaml", ("buffer.filter=none",)
    ),
    "teacher": Case("only a teacher", "configs/distill.yaml", DISTILL),
    "both": Case(
        "teacher and reward",
        "configs/distill.yaml",
        (*DISTILL, "algorithm.reward_weight=1"),
    ),
    "reward": Case(
        "only a reward",
        "configs/distill.yaml",
        (
            *DISTILL,
            "teacher=none",
            "algorithm.distill_weight=0",
            "algorithm.reward_weight=1",
        ),
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


def run_all(
    cases: Sequence[str], seeds: Iterable[int], root: Path
) -> dict[tuple[str, int], Path]:
    """Run the unfinished cases; return the run directories. The teacher is the
    quickstart's model.
    """
    teacher = ROOT / "configs" / "quickstart.yaml"
    folders = {}
    for seed in seeds:
        for name in cases:
            case = CASES[name]
            path = ()
            if name in NEEDS_TEACHER:
                path = (
                    f"teacher.path={run_once(root / 'quickstart-seed0', teacher, 0) / 'final'}",
                )
            overrides = (*case.overrides, *path)
            folders[name, seed] = run_once(
                root / f"{name}-seed{seed}", ROOT / case.config, seed, *overrides
            )
    return folders


def run_once(folder: Path, config: Path, seed: int, *overrides: str) -> Path:
    done = folder / "summary.json"
    if (
        not done.exists()
        or json.loads(done.read_text(encoding="utf-8"))["state"] != "done"
    ):
        print(folder.name, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            "run",
            str(config),
            f"seed={seed}",
            *overrides,
        ]
        quiet = [
            "observe.console=none",
            "observe.trackers=[]",
            "--run-dir",
            str(folder),
        ]
        subprocess.run([*command, *quiet], check=True)
    return folder


def read_run(case: str, seed: int, folder: Path) -> pd.DataFrame:
    """Return a row per evaluation."""
    config = load_config(folder / "config.yaml")
    steps = pd.read_json(folder / "metrics.jsonl", lines=True)
    rows = []
    first = 0
    for line in (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        last = int(found["policy_version"])
        since = steps[first:last]
        row = {"case": case, "seed": seed, "step": last, "time_s": found["time_s"]}
        row["held_out"] = found["eval/reward_mean"]
        row |= since.filter(items=COLUMNS).mean().to_dict()
        if len(since):
            num_groups = (
                last * config.trainer.num_groups + since["rollout/filtered"].iloc[-1]
            )
            row["rollouts"] = num_groups * config.rollout.group_size
            row["tokens"] = since["tokens/generated"].iloc[-1]
        rows.append(row)
        first = last
    return pd.DataFrame(
        rows, columns=["case", "seed", "step", "time_s", "held_out", *COLUMNS]
    )


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Draw held-out rewards and the search agent's behavior: means over seeds, bands
    from minimum to maximum.
    """
    from matplotlib.figure import Figure

    known = set(rows["case"])
    panels = {
        (title, "held-out reward"): [
            (name, "held_out", CASES[name].label) for name in names if name in known
        ]
        for title, names in PANELS.items()
        if known & set(names)
    }
    if "search" in known:
        lines = [("search", name, label) for name, label in SEARCH_LINES.items()]
        panels["What the search agent does", "of a rollout, in training"] = lines
    num_rows = -(-len(panels) // 3)
    num_columns = min(len(panels), 3)
    figure = Figure(
        figsize=(4.2 * num_columns, 3.2 * num_rows), dpi=130, layout="constrained"
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    for panel, ((title, what), lines) in zip(axes, panels.items(), strict=False):
        for (color, dash), (case, metric, label) in zip(STYLES, lines, strict=False):
            by_seed = (
                rows[rows["case"] == case]
                .pivot(index="step", columns="seed", values=metric)
                .dropna()
            )
            panel.plot(
                by_seed.index,
                by_seed.mean(axis=1),
                color=color,
                linestyle=dash,
                label=label,
            )
            least, most = by_seed.min(axis=1), by_seed.max(axis=1)
            panel.fill_between(
                by_seed.index, least, most, color=color, alpha=0.15, linewidth=0
            )
        panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
        panel.set(xlabel="step", ylabel=what, ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        if len(lines) > 1:
            panel.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def table(rows: pd.DataFrame) -> str:
    """Return a Markdown table with a line per case."""
    lines = [
        "| run | config | steps | held-out reward before | after, by seed | mean ± sd | rollouts | "
        "tokens sampled | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, of_case in rows.groupby("case", sort=False):
        case = CASES[name]
        ends = of_case.groupby("seed").last()
        after = ends["held_out"]
        cells = [
            case.label,
            f"`{' '.join((case.config, *case.overrides))}`",
            f"{ends['step'].max():.0f}",
            f"{of_case.groupby('seed')['held_out'].first().mean():.3f}",
            ", ".join(f"{value:.3f}" for value in after),
            f"{after.mean():.3f}" + (f" ± {after.std():.3f}" if len(after) > 1 else ""),
            *(
                f"{ends[column].mean():,.0f}"
                for column in ("rollouts", "tokens", "time_s")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(rows: pd.DataFrame) -> str:
    """Return the text of learning.md."""
    seeds = sorted(set(rows["seed"]))
    return f"""# What the shipped configs learn

    python scripts/learning_curves.py --seeds {" ".join(map(str, seeds))}

![held-out rewards](learning.png)

{table(rows)}

held-out reward: reward of prompts that are not trained on (the config's `eval`), before the first step and
after the last. rollouts: trained rollouts, and rollouts of replaced groups. s: seconds from the first prompt
to the last evaluation, mean of the seeds. Lines are means over seeds; bands reach from minimum to maximum.
Every evaluation: [learning.csv](learning.csv).
"""


def main() -> None:
    """Run the cases, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs_dir", type=Path, nargs="?", default=ROOT / "runs" / "learning"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    folders = run_all(options.only, options.seeds, options.runs_dir)
    path = options.out / "learning.csv"
    known = pd.read_csv(path) if path.exists() else pd.DataFrame({"case": []})
    tables = [read_run(case, seed, folder) for (case, seed), folder in folders.items()]
    rows = pd.concat([known[~known["case"].isin(options.only)], *tables])
    rows = rows.sort_values(
        "case", key=lambda names: names.map([*CASES].index), kind="stable"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    rows.to_csv(path, index=False, float_format="%.5g")
    draw(rows, options.out / "learning.png")
    (options.out / "learning.md").write_text(report(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
