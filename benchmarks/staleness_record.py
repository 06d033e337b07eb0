"""Runs for the record of staleness against quality: learning curves of one task at
different ages of the tokens.

    python benchmarks/staleness_record.py [--parts age losses auto smollm2 agent]
        [--seconds 3600] [--list]

    age      the quickstart's model with `ppo_clip`: age (look-ahead = bound) 0, 1, 2, 4,
             8, 16 and 32, three learning rates, five seeds
    losses   the same model at one rate: `age_clip` at ages of 2 to 32, and four other
             losses at age 8, five seeds
    auto     the quickstart as shipped, with `look_ahead: auto` and bounds of 1, 2, 4 and 8,
             groups that are late masked or awaited, five seeds
    smollm2  SmolLM2-135M, ages 0, 2 and 8, four corrections, five seeds
    agent    configs/agent.yaml, ages 0, 4 and 16, with `ppo_clip` and `age_clip`, three
             seeds

Each run is an `asyncrl run` at a constant learning rate, one at a time; the seeds of
one arm are apart, so that a break leaves all arms with as many seeds. Where an age is
asked for, the trainer sleeps in each step, so that the engine is always ahead and the
tokens have that age: its seconds mean nothing. The table
results/staleness_record.jsonl has one line for each run, and a new start continues with
the first run that the table lacks. Ages come from trained.jsonl by `ages_of`, which
shares no code with asyncrl: the age of a token is the version that it trained minus the
version that sampled it.

A run with a failure, a restart, or another age than its arm asks for does not count: it
is printed, and runs again at the next start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ASYNCRL, HERE, RESULTS, child_environ, plain_options, read_steps

TABLE = RESULTS / "staleness_record.jsonl"
SEEDS = (0, 1, 2, 3, 4)
SAME = (
    "trainer.schedule=constant",
    "checkpoint.every=none",
    "eval=none",
    "observe.console=none",
)
FAULTS = (
    "rollout/failed",
    "rollout/failed_groups",
    "rollout/given_up",
    "rollout/dropped",
    "trainer/restarts",
    "engine/restarts",
    "trainer/skipped_steps",
)
"""Counts of a run's last line that must be 0."""
CURVES = {"reward/mean": 4, "time_s": 1}
"""Metrics that are kept for each step, with their digits."""
MEANS = {
    "sample/length_mean": 2,
    "sample/truncated_fraction": 3,
    "policy/clip_fraction": 4,
    "policy/ess": 3,
    "policy/kl_behaviour": 5,
    "policy/entropy": 3,
    "policy/grad_norm": 3,
}
"""Metrics whose means over MEAN_STEPS steps are kept, with their digits."""
MEAN_STEPS = 10
SLEEP_US = {"age": "60", "losses": "60", "smollm2": "500", "agent": "60"}
"""Microseconds that the trainer sleeps for each token."""
AGE_TOLERANCE = 0.15
"""Share of the age that is asked for by which the mean age may differ."""


@dataclass(frozen=True)
class Arm:
    """One cell of the record. `age`: the mean age that is asked for, if any."""

    part: str
    config: str
    settings: Mapping[str, str]
    steps: int
    age: int | None = None

    @property
    def environ(self) -> dict[str, str]:
        environ = child_environ()
        if self.age:
            environ |= {
                "ASYNCRL_SLEEP_US": SLEEP_US[self.part],
                "ASYNCRL_COMPUTES": "1",
            }
        return environ

    @property
    def command(self) -> list[str]:
        settings = [f"{key}={value}" for key, value in self.settings.items()]
        steps = f"trainer.num_steps={self.steps}"
        slow = ["launcher=sleeping"] if self.age else []
        return [*ASYNCRL, self.config, *SAME, steps, *slow, *settings]


def at_age(age: int) -> dict[str, str]:
    return {"buffer.max_staleness": str(age), "buffer.look_ahead": str(age)}


def arms(part: str) -> Iterator[Arm]:
    if part == "age":
        ages = (0, 1, 2, 4, 8, 16, 32)
        for rate, age in itertools.product(("1e-3", "2e-3", "3e-3"), ages):
            settings = {
                **at_age(age),
                "algorithm.loss": "ppo_clip",
                "trainer.learning_rate": rate,
            }
            yield Arm(part, "configs/quickstart.yaml", settings, 300, age)
    if part == "losses":
        losses: list[tuple[str, int]] = [("age_clip", age) for age in (2, 4, 8, 16, 32)]
        losses += [(loss, 8) for loss in ("cispo", "decoupled_ppo", "m2po", "vespo")]
        for loss, age in losses:
            settings = {**at_age(age), "algorithm.loss": loss}
            yield Arm(part, "configs/quickstart.yaml", settings, 300, age)
    if part == "auto":
        for bound, overdue in itertools.product((1, 2, 4, 8), ("mask", "wait")):
            settings = {
                "buffer.max_staleness": str(bound),
                "buffer.on_overdue": overdue,
                "algorithm.loss": "age_clip",
            }
            yield Arm(part, "configs/quickstart.yaml", settings, 300)
    if part == "smollm2":
        corrections = (
            {"algorithm.loss": "ppo_clip", "algorithm.correction": "none"},
            {"algorithm.loss": "tis"},
            {"algorithm.loss": "decoupled_ppo"},
            {"algorithm.loss": "m2po"},
        )
        for correction, age in itertools.product(corrections, (0, 2, 8)):
            settings = {**at_age(age), **correction}
            yield Arm(part, "configs/smollm2.yaml", settings, 120, age)
    if part == "agent":
        for loss, age in (
            ("ppo_clip", 0),
            ("ppo_clip", 4),
            ("ppo_clip", 16),
            ("age_clip", 4),
            ("age_clip", 16),
        ):
            settings = {**at_age(age), "algorithm.loss": loss}
            yield Arm(part, "configs/agent.yaml", settings, 150, age)


def seeds(part: str) -> Sequence[int]:
    return SEEDS[:3] if part == "agent" else SEEDS


# ---- what a run did


@dataclass(frozen=True)
class Ages:
    """`of_step`: mean age of the trained tokens of each step; `counts`: trained tokens of
    each age; `prompts`: digest of the prompts in the order of their groups.
    """

    of_step: list[float]
    counts: dict[int, int]
    prompts: str


def ages_of(trained: Path, num_groups: int) -> Ages:
    """Read trained.jsonl. A span is [first token, end, version that sampled it]."""
    of_step = list[float]()
    counts = Counter[int]()
    prompt_of = dict[int, str]()
    for line in trained.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        in_step = Counter[int]()
        for trajectory in step["trajectories"]:
            prompt_of[trajectory["group_id"]] = trajectory["prompt_id"]
            if trajectory["num_loss_tokens"] == 0:
                continue
            for first, end, version in trajectory["spans"]:
                if version >= step["min_version"]:
                    in_step[step["version"] - version] += end - first
        total = sum(age * tokens for age, tokens in in_step.items())
        of_step.append(total / max(in_step.total(), 1))
        counts += in_step
    order = [prompt_of.get(group, "") for group in range(num_groups)]
    digest = hashlib.sha256("\n".join(order).encode()).hexdigest()[:16]
    return Ages(of_step, dict(sorted(counts.items())), digest)


def why_disturbed(arm: Arm, last: Mapping[str, float], ages: Ages) -> str:
    """Return why a run does not count, or ''."""
    faults = [f"{key} {last[key]:.0f}" for key in FAULTS if last.get(key)]
    if len(ages.of_step) != arm.steps:
        faults.append(f"{len(ages.of_step)} of {arm.steps} steps")
    bound = int(arm.settings["buffer.max_staleness"])
    if ages.counts and max(ages.counts) > bound:
        faults.append(f"a token of age {max(ages.counts)} above the bound {bound}")
    if arm.age is not None:
        # The first steps train what version 0 sampled, at ages that grow to the arm's.
        settled = ages.of_step[2 * arm.age :]
        mean = sum(settled) / max(len(settled), 1)
        if abs(mean - arm.age) > AGE_TOLERANCE * arm.age:
            faults.append(f"a mean age of {mean:.2f} instead of {arm.age}")
    return ", ".join(faults)


def row_of(arm: Arm, seed: int, run_dir: Path) -> tuple[dict[str, Any], str]:
    """Return a run's line for the table, and why it does not count, or ''."""
    lines = read_steps(run_dir)
    # So many groups every run of this arm has started.
    ages = ages_of(run_dir / "trained.jsonl", 4 * arm.steps)
    row = {
        "part": arm.part,
        "settings": dict(arm.settings),
        "seed": seed,
        "steps": arm.steps,
        "ages": ages.counts,
        "prompts": ages.prompts,
        "age": [round(age, 2) for age in ages.of_step],
    }
    for name, digits in CURVES.items():
        row[name] = [round(line.get(name, 0.0), digits) for line in lines]
    for name, digits in MEANS.items():
        values = [line.get(name, 0.0) for line in lines]
        starts = range(0, len(values), MEAN_STEPS)
        parts = [values[start : start + MEAN_STEPS] for start in starts]
        row[name] = [round(statistics.fmean(part), digits) for part in parts]
    return row, why_disturbed(arm, lines[-1] if lines else {}, ages)


def key_of(part: str, settings: Mapping[str, str], seed: int) -> str:
    return json.dumps([part, dict(sorted(settings.items())), seed])


def missing(parts: Sequence[str], table: Path) -> list[tuple[Arm, int]]:
    """Return the runs that the table lacks: all arms with the first seed, then with the
    second, and so on.
    """
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    rows = map(json.loads, text.splitlines())
    done = {key_of(row["part"], row["settings"], row["seed"]) for row in rows}
    return [
        (arm, seed)
        for part in parts
        for seed in seeds(part)
        for arm in arms(part)
        if key_of(part, arm.settings, seed) not in done
    ]


def run(arm: Arm, seed: int) -> tuple[dict[str, Any], str]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [*arm.command, f"seed={seed}", "--run-dir", str(run_dir)]
        done = subprocess.run(
            command,
            cwd=HERE.parent,
            env=arm.environ,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            return {}, f"exit code {done.returncode}: {done.stderr[-500:]}"
        found = row_of(arm, seed, run_dir)
        shutil.rmtree(run_dir)
        return found


def main() -> None:
    parser = plain_options(__doc__)
    parts = ("age", "losses", "auto", "smollm2", "agent")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:3])
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="begin no run after (%(default)s)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the missing runs, and run none"
    )
    arguments = parser.parse_args()
    left = missing(arguments.parts, TABLE)
    if arguments.list:
        for arm, seed in left:
            print(" ".join(arm.command[len(ASYNCRL) :]), f"seed={seed}")
        print(f"{len(left)} runs are missing")
        return
    started_s = time.monotonic()
    for number, (arm, seed) in enumerate(left):
        used_s = time.monotonic() - started_s
        if used_s > arguments.seconds:
            break
        row, disturbed = run(arm, seed)
        if not disturbed:
            with TABLE.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        each_s = (time.monotonic() - started_s) / (number + 1)
        left_min = each_s * (len(left) - number - 1) / 60
        final = row["reward/mean"][-10:] if row else [0.0]
        print(
            f"{arm.part} {dict(arm.settings)} seed {seed}: reward "
            f"{sum(final) / len(final):.3f}, {disturbed or 'kept'}; {left_min:.0f} min left",
            flush=True,
        )
    sys.exit(0 if not missing(arguments.parts, TABLE) else 1)


if __name__ == "__main__":
    main()
