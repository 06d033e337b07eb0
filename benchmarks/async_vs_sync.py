"""Compare asynchronous with synchronous training on rollouts that wait for slow tools
(simulated by sleeps).

Each row is a separate `asyncrl run`: embedded engine, tiny model, real optimizer steps,
look_ahead auto. The first 20 steps are dropped. A step takes at least the largest of
three bounds, all measured in the same run:

    generate    decode seconds of the engine per batch
    train       perf/train_s
    little      mean time of a group (its slowest rollout, or until it is requeued) / (look_ahead + 1): by
                Little's law, as at most (look_ahead + 1) * num_groups groups are in flight

`of bound` is the largest bound over the step. The rest is lost to the batch that waits
for its last groups, the batch in training, and requeued groups (`again`: their share).

    python benchmarks/async_vs_sync.py [--seconds 240]

Last line: `ratio: X` = the smallest `of bound` of the rows with mask.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from common import ASYNCRL, child_environ, options, read_steps, reported

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
observe: {{console: none, trackers: []}}
"""  # noqa: E501

ROWS = [
    (0, "wait", 3.5),
    (4, "wait", 0.9),
    (4, "drop", 0.5),
    (4, "mask", 0.5),
    (8, "mask", 0.4),
    (16, "mask", 0.4),
]
NUM_FIRST = 20


@dataclass(frozen=True)
class Row:
    """Figures of one run, without its first steps."""

    name: str
    step_s: float
    train_s: float
    generate_s: float
    group_s: float
    idle: float
    age: float
    oldest: float
    masked: float
    again: float
    look_ahead: float

    @property
    def little_s(self) -> float:
        return self.group_s / (self.look_ahead + 1)

    @property
    def of_bound(self) -> float:
        """1.00: as fast as can be."""
        return max(self.train_s, self.generate_s, self.little_s) / self.step_s

    def line(self) -> str:
        seconds = (
            self.step_s,
            self.generate_s,
            self.train_s,
            self.little_s,
            self.of_bound,
        )
        shares = (f"{self.masked:.2%}", f"{self.again:.1%}", f"{self.look_ahead:.1f}")
        cells = [
            *(f"{value:.3f}" for value in seconds),
            f"{self.idle:.0%}",
            f"{self.age:.2f}",
        ]
        return f"{self.name:<17} " + " ".join(
            f"{cell:>8}" for cell in [*cells, f"{self.oldest:.0f}", *shares]
        )


def run_row(max_staleness: int, on_overdue: str, num_steps: int, folder: Path) -> Row:
    config = folder / "tools.yaml"
    config.write_text(CONFIG)
    run_dir = folder / f"{max_staleness}-{on_overdue}"
    settings = [
        f"buffer.max_staleness={max_staleness}",
        f"buffer.on_overdue={on_overdue}",
    ]
    settings += [f"trainer.num_steps={num_steps}", "--run-dir", str(run_dir)]
    subprocess.run(
        [*ASYNCRL, str(config), *settings], check=True, env=child_environ(), timeout=900
    )
    steps = read_steps(run_dir)
    num_first = NUM_FIRST if max_staleness else num_steps // 5
    first, kept = steps[num_first - 1], steps[num_first:]
    wall_s = kept[-1]["time_s"] - first["time_s"]
    mean = lambda key: fmean(step.get(key, 0.0) for step in kept)  # noqa: E731
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        group_s, again = journal.execute(
            "SELECT avg(ended_s - admitted_s), avg(state = 'requeued') FROM groups"
            " WHERE ended_s IS NOT NULL AND start_version >= ?",
            (num_first,),
        ).fetchone()
    return Row(
        name=f"{max_staleness}, {on_overdue}",
        step_s=wall_s / len(kept),
        train_s=mean("perf/train_s"),
        generate_s=(kept[-1]["engine/decode_s"] - first["engine/decode_s"]) / len(kept),
        group_s=group_s,
        idle=sum(step["perf/wait_s"] for step in kept) / wall_s,
        age=mean("sample/staleness_mean"),
        oldest=max(step.get("sample/staleness_max", 0.0) for step in kept),
        masked=mean("sample/masked_fraction"),
        again=again,
        look_ahead=mean("buffer/look_ahead"),
    )


def main() -> None:
    """Run all rows and print the table."""
    arguments = options(__doc__, seconds=240.0).parse_args()
    with reported("async_vs_sync", is_kept=arguments.write):
        run_all(arguments.seconds)


def run_all(seconds: float) -> None:
    """Run the rows one after the other, each for its share of `seconds`, and print the
    table.
    """
    print(
        f"{NUM_GROUPS} groups of {GROUP_SIZE}; tools of 0.2 s (median, lognormal sigma 1); seconds"
    )
    columns = (
        "step generate train little of_bound idle age max masked again ahead".split()
    )
    print(f"{'max_staleness':<17}", *(f"{column:>8}" for column in columns))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for max_staleness, on_overdue, about_s in ROWS:
            least = 3 * NUM_FIRST if max_staleness else 10
            num_steps = max(least, int(seconds / len(ROWS) / about_s))
            rows.append(run_row(max_staleness, on_overdue, num_steps, Path(folder)))
            print(rows[-1].line(), flush=True)
    print(
        "idle: share of wall time in which the trainer waited; age: mean staleness; ahead: mean look_ahead"
    )
    sync, *_ = rows
    for row in rows[1:]:
        print(
            f"{row.name}: {sync.step_s / row.step_s:.2f} times the steps of max_staleness 0"
        )
    print(
        f"ratio: {min(row.of_bound for row in rows if row.name.endswith('mask')):.2f}"
    )


if __name__ == "__main__":
    main()
