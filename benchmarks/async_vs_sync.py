"""Asynchronous against synchronous on rollouts that wait for tools with a long tail (sleeps stand for the
tools).

Every row is a real `asyncrl run` of its own: embedded engine, tiny model, real optimizer steps. The bound of
a step is max(generation, training), both measured in that run: generation = decode seconds of the engine a
batch, training = perf/train_s. `of bound` says how close the steps came to it (1.00 = neither side ever
waited).

    python benchmarks/async_vs_sync.py [--seconds 150]

Last line: `ratio: X` = steps a second at max_staleness 4 (defaults: wait, look_ahead auto) over max_staleness
0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from report import options, reported

HERE = Path(__file__).parent
NUM_GROUPS, GROUP_SIZE = 8, 8

CONFIG = f"""
model:
  dtype: float32
  scratch:
    characters: "abcdefghijklmnopqrstuvwxyz0123456789 "
    architecture: {{model_type: qwen3, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4,
                   num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 256, tie_word_embeddings: true}}
task: {{python: "tool_task:ToolTask", reward_pool: inline, reward_timeout_s: 120, size: 100000}}
rollout: {{group_size: {GROUP_SIZE}, slots: 128, max_tokens: 48, max_prompt_tokens: 16, threads: 1}}
trainer: {{num_groups: {NUM_GROUPS}, learning_rate: 1.0e-4, threads: 1}}
observe: {{console: none, tensorboard: false}}
"""  # noqa: E501

ROWS = [
    ("max_staleness 0", ["buffer.max_staleness=0"]),
    ("4, wait, auto", ["buffer.max_staleness=4"]),
    ("4, wait, d=1", ["buffer.max_staleness=4", "buffer.look_ahead=1"]),
    ("4, wait, d=2", ["buffer.max_staleness=4", "buffer.look_ahead=2"]),
    ("4, wait, d=4", ["buffer.max_staleness=4", "buffer.look_ahead=4"]),
    ("4, mask, auto", ["buffer.max_staleness=4", "buffer.on_overdue=mask"]),
    ("4, drop, auto", ["buffer.max_staleness=4", "buffer.on_overdue=drop"]),
]


@dataclass(frozen=True)
class Row:
    """Figures of one run, without its first steps."""

    name: str
    step_s: float
    train_s: float
    generate_s: float
    idle: float
    age: float
    oldest: float
    masked: float
    dropped: float
    look_ahead: float

    @property
    def bound_s(self) -> float:
        """No step can be shorter than its slower side."""
        return max(self.train_s, self.generate_s)

    def line(self) -> str:
        """One line of the table."""
        return (
            f"{self.name:<17} {self.step_s:8.3f} {self.generate_s:8.3f} {self.train_s:8.3f} "
            f"{self.bound_s / self.step_s:8.2f} "
            f"{self.idle:6.0%} {self.age:6.2f} {self.oldest:5.0f} {self.masked:7.2%} {self.dropped:8.0f} "
            f"{self.look_ahead:6.1f}"
        )


def run_row(name: str, overrides: list[str], num_steps: int, folder: Path) -> Row:
    """One run of `num_steps` steps."""
    config = folder / "tools.yaml"
    config.write_text(CONFIG)
    run_dir = folder / name.replace(" ", "_").replace(",", "")
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        str(config),
        f"trainer.num_steps={num_steps}",
        *overrides,
        "--run-dir",
        str(run_dir),
    ]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(HERE)}, timeout=900)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, kept = steps[len(steps) // 5 - 1], steps[len(steps) // 5 :]
    wall_s = kept[-1]["time_s"] - first["time_s"]
    mean = lambda key: fmean(step.get(key, 0.0) for step in kept)  # noqa: E731
    return Row(
        name=name,
        step_s=wall_s / len(kept),
        train_s=mean("perf/train_s"),
        generate_s=(kept[-1]["engine/decode_s"] - first["engine/decode_s"]) / len(kept),
        idle=sum(step["perf/wait_s"] for step in kept) / wall_s,
        age=mean("sample/staleness_mean"),
        oldest=max(step.get("sample/staleness_max", 0.0) for step in kept),
        masked=mean("sample/masked_fraction"),
        dropped=kept[-1]["rollout/dropped"],
        look_ahead=mean("buffer/look_ahead"),
    )


def main() -> None:
    """Run all rows and print the table."""
    arguments = options(__doc__, seconds=150.0).parse_args()
    with reported("async_vs_sync", is_kept=arguments.write):
        run_all(arguments.seconds)


def run_all(seconds: float) -> None:
    """Run the rows one after the other, each for its share of `seconds`, and print the table."""
    print(
        f"{NUM_GROUPS} groups of {GROUP_SIZE}; a tool takes 0.2 s in the median, lognormal sigma 1; times in "
        f"seconds a step"
    )
    columns = (
        ("step", 8),
        ("generate", 8),
        ("train", 8),
        ("of bound", 8),
        ("idle", 6),
        ("age", 6),
        ("max", 5),
        ("masked", 7),
    )
    print(
        f"{'max_staleness':<17}",
        *(f"{title:>{width}}" for title, width in (*columns, ("dropped", 8), ("ahead", 6))),
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in ROWS:
            is_sync = name == "max_staleness 0"
            num_steps = max(10, int(seconds / len(ROWS) / (3.0 if is_sync else 0.7)))
            rows.append(run_row(name, overrides, num_steps, Path(folder)))
            print(rows[-1].line(), flush=True)
    print(
        "idle: share of wall time in which the trainer waited; age: mean staleness of what was trained on; "
        "ahead: mean look_ahead"
    )
    print(f"ratio: {rows[0].step_s / rows[1].step_s:.2f}")


if __name__ == "__main__":
    main()
