"""Runs the quickstart task with different objectives, on fresh and on old data, and writes
docs/results/objectives.{csv,png,md}.

python scripts/objective_curves.py [RUNS_DIR] [--num-steps 160] [--seeds 0 1 2] [--out docs/results] [--only
VARIANT ...]

One run after the other, as VARIANT-max_staleness_N-seedS in RUNS_DIR. A run that is there and done is not run
again, one that was interrupted is; one that failed while training is kept, told and left out; one that cannot
start ends this script. --draw only reads and draws.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from objective_figure import draw
from objective_report import Pair, Run, Runs, Setting, comparisons, read_run, settings_table, write_csv
from run_series import PlannedRun, run_all, say, state_of

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
BOUNDS = (0, 8)
NUM_GROUPS = 8  # trainer.num_groups of the quickstart

DAPO = (
    "algorithm.loss=dapo",
    "algorithm.clip_high=0.28",
    "buffer.filter=equal_rewards",
    "algorithm.overlong_tokens=8",
)
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "naive": (
        "no correction",
        ("algorithm.loss=ppo_clip", "algorithm.ratio=proximal", "algorithm.correction=none"),
    ),
    "grpo": ("GRPO", ("algorithm.loss=ppo_clip",)),
    "grpo_tis": ("GRPO + TIS", ("algorithm.loss=tis",)),
    "dapo": ("DAPO", DAPO),
    "dapo_tis": ("DAPO + TIS", (*DAPO, "algorithm.ratio=proximal", "algorithm.correction=tis")),
    "grpo_tis_2": ("GRPO + TIS, 2 steps", ("algorithm.loss=tis", "trainer.mini_batches=2")),
    "decoupled_ppo_2": ("decoupled PPO, 2 steps", ("algorithm.loss=decoupled_ppo", "trainer.mini_batches=2")),
}
"""Name -> what it is called, and its settings beside configs/quickstart.yaml."""
LABELS = {name: label for name, (label, _) in VARIANTS.items()}
FILTERED = frozenset({"dapo", "dapo_tis"})

COLUMNS = {
    "a correction for old data": ("grpo_tis", "naive", "grpo"),
    "DAPO (of groups it kept)": ("dapo_tis", "dapo", "grpo"),
    "two optimizer steps a batch": ("decoupled_ppo_2", "grpo_tis_2"),
}

QUESTIONS = (
    ("naive", "grpo", "does clipping the ratio to the behaviour policy help"),
    ("naive", "grpo_tis", "do truncated importance weights help"),
    ("grpo", "grpo_tis", "which of the two"),
    ("grpo", "dapo", "do higher clip, filter and length penalty help"),
    ("dapo", "dapo_tis", "does TIS help DAPO"),
    ("grpo_tis_2", "decoupled_ppo_2", "does clipping to the proximal policy help where it can act"),
)


@dataclass(frozen=True)
class Planned(PlannedRun):
    """A run of one setting."""

    setting: Setting


def a_run(setting: Setting, seed: int, num_steps: int) -> Planned:
    """Settings beside the quickstart's. look_ahead is max_staleness, or the data would be no older than the
    engines need.
    """
    bound = setting.max_staleness
    held_out = "{python: 'asyncrl.tasks.letters:Letters', size: 256, reward_pool: inline}"
    overrides = (
        f"trainer.num_steps={num_steps}",
        f"buffer.max_staleness={bound}",
        f"buffer.look_ahead={bound}",
        *VARIANTS[setting.variant][1],
        f"eval={{task: {held_out}, every: {num_steps}, at_start: false, num_prompts: 256, temperature: "
        f"1.0, slots: 64}}",
    )
    return Planned(f"{setting.variant}-max_staleness_{bound}", CONFIG, seed, overrides, setting)


def plan(variants: list[str], seeds: list[int], num_steps: int) -> list[Planned]:
    """Seed after seed, so that what is there early is complete for the first of them."""
    return [
        a_run(Setting(variant, bound), seed, num_steps)
        for seed in seeds
        for bound in reversed(BOUNDS)
        for variant in variants
    ]


def pairs() -> list[Pair]:
    """The questions at each bound, then what age costs each objective."""
    asked = [
        Pair(Setting(a, bound), Setting(b, bound), question)
        for bound in BOUNDS
        for a, b, question in QUESTIONS
    ]
    return [
        *asked,
        *(
            Pair(Setting(name, BOUNDS[0]), Setting(name, BOUNDS[-1]), "what old data costs")
            for name in VARIANTS
        ),
    ]


def read_all(planned: list[Planned], root: Path) -> tuple[Runs, list[str]]:
    """The runs that are done, by setting in the order of VARIANTS, and the names of those that failed."""
    found: dict[Setting, dict[int, Run]] = {}
    failed = [run.name for run in planned if state_of(root / run.name) == "failed"]
    for bound in BOUNDS:
        for run in sorted(planned, key=lambda run: list(VARIANTS).index(run.setting.variant)):
            if run.setting.max_staleness == bound and state_of(root / run.name) == "done":
                found.setdefault(run.setting, {})[run.seed] = read_run(root / run.name, NUM_GROUPS)
    if not found:
        raise SystemExit(f"{root} holds no run that is done.\n  Way out: run this script without --draw.")
    return found, failed


def report(runs: Runs, failed: list[str], num_steps: int) -> str:
    """objectives.md."""
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    settings = "\n".join(f"- {label}: `{' '.join(settings)}`" for label, settings in VARIANTS.values())
    told = f"\nFailed and left out: {', '.join(failed)}.\n" if failed else ""
    return f"""# Objectives, on fresh and on old data

    python scripts/objective_curves.py --num-steps {num_steps} --seeds {" ".join(map(str, seeds))}

![objectives](objectives.png)

`configs/quickstart.yaml` with {num_steps} batches of 8 groups of 8, seeds {", ".join(map(str, seeds))}. Its learning rate
(1.5e-3, falling to 0 over the run) was chosen once for GRPO at max_staleness 4 and tuned for none of these. `buffer.look_ahead` is
`max_staleness`, so that at 8 the data is old by intent. Lines are means over seeds, bands reach from the lowest to the highest seed.

{settings}

With one optimizer step a batch the proximal policy is the current one. So decoupled PPO has the very gradient of GRPO + TIS (a test holds
it to that) and is shown with two steps, where they part. At max_staleness 0 no correction, GRPO and GRPO + TIS have the same gradient
but for rounding, DAPO and DAPO + TIS too: what differs between those is chance. "no correction" has no weight at all: PPO around the
proximal policy, as if the data were fresh. GRPO is here `algorithm.loss=ppo_clip` with its mean over tokens.

{settings_table(runs, LABELS)}
{told}
age: staleness of a trajectory, mean. held-out reward: of the last weights on 256 prompts of another draw, temperature 1, mean ± standard
deviation over seeds. training reward: reward/mean over the last tenth of the batches; with DAPO's filter that is the reward of the groups
that were kept, those already solved left out, so it stands beside DAPO's alone. ess: effective sample size of the weights current /
behaviour before each update, 1 = on-policy. clipped: loss tokens that the clip leaves without gradient; the loss of GRPO + TIS has no clip.
filtered: groups replaced, of all that finished (DAPO samples that much more for as many batches). s: seconds from the first batch to
the last, mean of the runs.

## Which differences are larger than the seeds' spread

{comparisons(runs, pairs(), LABELS, FILTERED)}

needs: the 95 % interval of the difference (Student's t, pooled over the seeds of both). {len(seeds)} seeds see large differences alone.
Figures of every batch: [objectives.csv](objectives.csv).
"""


def main(arguments: list[str] | None = None) -> int:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description="Compare objectives on the quickstart task.")
    parser.add_argument("runs_dir", type=Path, nargs="?", default=ROOT / "runs" / "objectives")
    parser.add_argument("--num-steps", type=int, default=160, help="batches of each run (default 160)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    options = parser.parse_args(arguments)
    planned = plan(options.only, options.seeds, options.num_steps)
    if not options.draw:
        run_all(planned, options.runs_dir)
    runs, failed = read_all(planned, options.runs_dir)
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(runs, options.out / "objectives.csv")
    draw(runs, options.out / "objectives.png", columns=COLUMNS, labels=LABELS, bounds=BOUNDS)
    (options.out / "objectives.md").write_text(report(runs, failed, options.num_steps), encoding="utf-8")
    say(f"wrote objectives.csv, objectives.png and objectives.md to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
