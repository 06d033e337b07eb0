"""How long `asyncrl status` and `asyncrl inspect` take on a run of 100,000 steps, and how much memory, beside
reading its lines.

    python benchmarks/long_run.py [--steps 100000] [--groups 2] [--size 4] [--write]

The run directory is made up in a temporary folder: metrics.jsonl with the metrics that a run has,
trained.jsonl, and a journal whose groups were compacted. Each command is a process of its own, as a user
starts it. The rows:

    status, inspect     the two commands
    json.loads          a process that does nothing but parse each line of the same files with the standard
    library lines               one that does nothing but read them line by line

inspect parses and checks each span of each trajectory, so its time grows with them, not with the steps alone;
memory does not, but for 8 bytes a group. --seconds is not used: each command is started once.

Last line: `ratio: X` = CPU seconds of status and inspect over those of the two json.loads passes over what
they read.
"""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import options, reported

from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal import schema
from asyncrl.observe.metrics import GAUGES

MAX_STALENESS = 4
NUM_METRICS = 55
COMMAND = "from asyncrl.cli import app\napp(sys.argv[1:])"
PARSE = "import json\nfor path in sys.argv[1:]:\n    for line in open(path, 'rb'):\n        json.loads(line)"
READ = "for path in sys.argv[1:]:\n    for line in open(path, 'rb'):\n        len(line)"
INSERT_GROUP = (
    "INSERT INTO groups (group_id, prompt_id, start_version, admitted_s, ended_s, num_rollouts, num_sampled, "
    "oldest_version, reward_sum, state, num_requeued) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'taken', 0)"
)
PEAK = (
    "import atexit, sys\natexit.register(lambda: "
    "sys.stderr.write(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]))\n"
)
"""Not the rusage of the child: that counts what this process has in memory, too."""


@dataclass(frozen=True)
class Cost:
    """Of one process."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def make_run(folder: Path, num_steps: int, num_groups: int, size: int) -> None:
    """A run of `num_steps` batches of `num_groups` groups of `size` rollouts, interrupted."""
    config = {
        "model": {"path": "m"},
        "task": {"python": "a:B"},
        "buffer": {"max_staleness": MAX_STALENESS},
        "rollout": {"group_size": size},
        "trainer": {"num_steps": num_steps + 1, "num_groups": num_groups},
    }
    (folder / "config.yaml").write_text(run_config_yaml(RunConfig.model_validate(config)), encoding="utf-8")
    status = {
        "state": "interrupted",
        "step": num_steps,
        "num_steps": num_steps + 1,
        "why": "made up",
        "updated_s": time.time(),
    }
    (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    _write_lines(folder / "metrics.jsonl", _metrics_lines(num_steps))
    _write_lines(folder / "trained.jsonl", _record_lines(num_steps, num_groups, size))
    _write_journal(folder / "journal.sqlite", num_steps, num_groups, size)


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def _metrics_lines(num_steps: int) -> Iterator[str]:
    others = [name for name in GAUGES if "*" not in name and name not in ("step", "time_s", "reward/mean")]
    names = [*others, *(f"policy/some_metric_{index}" for index in range(NUM_METRICS - len(others)))]
    rest = json.dumps({name: 0.123456789 + index for index, name in enumerate(names)})[1:]
    for step in range(1, num_steps + 1):
        yield f'{{"step": {step}, "time_s": {step * 1.5}, "reward/mean": {step / num_steps:.9f}, {rest}\n'


def _record_lines(num_steps: int, num_groups: int, size: int) -> Iterator[str]:
    """Each trajectory was sampled under two versions."""
    for step in range(num_steps):
        oldest = max(0, step - MAX_STALENESS)
        entries = ", ".join(
            f'{{"group_id": {group}, "prompt_id": "{group // 20_000}/{group % 20_000}", "sample_index": '
            f'{index}, "branch": 0, '
            f'"reward": 0.123456789, "num_tokens": 320, "num_loss_tokens": 256, "tokens_sha": '
            f'"0123456789abcdef", '
            f'"spans": [[64, 192, {oldest}], [192, 320, {step}]]}}'
            for group in range(step * num_groups, (step + 1) * num_groups)
            for index in range(size)
        )
        num_tokens = num_groups * size * 256
        yield f'{{"version": {step}, "min_version": {oldest}, "loss": 0.1, "num_loss_tokens": {num_tokens}, "trajectories": [{entries}]}}\n'  # noqa: E501


def _write_journal(path: Path, num_steps: int, num_groups: int, size: int) -> None:
    schema.create(path, "a run")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    groups = ((step, step * num_groups + index) for step in range(num_steps) for index in range(num_groups))
    for step, group in groups:
        row = (
            group,
            f"{group // 20_000}/{group % 20_000}",
            step,
            1.0,
            2.0,
            size,
            256 * size,
            step,
            0.123456789,
        )
        connection.execute(INSERT_GROUP, row)
        connection.execute("INSERT INTO batch_groups VALUES (?, ?, ?)", (step, group % num_groups, group))
    connection.executemany(
        "INSERT INTO batches VALUES (?, ?, 0, ?, 1.0, 2.0, 0.1)",
        ((step, max(0, step - MAX_STALENESS), num_groups) for step in range(num_steps)),
    )
    connection.executemany(
        "INSERT INTO publishes VALUES (?, ?, 2.0)", ((step + 1, "0" * 64) for step in range(num_steps))
    )
    connection.execute("COMMIT")
    connection.close()


def cost_of(code: str, *arguments: str | Path) -> Cost:
    """Run Python code in a process of its own. Raises RuntimeError if it fails."""
    command = [sys.executable, "-c", PEAK + code, *map(str, arguments)]
    started_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wall_s, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall_s, cpu_s, int(done.stderr.split()[-1]) / 1024)


def show(folder: Path, num_steps: int) -> None:
    """The table and the last line."""
    metrics, record, journal = (
        folder / name for name in ("metrics.jsonl", "trained.jsonl", "journal.sqlite")
    )
    print(
        f"{num_steps} steps: "
        + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.0f} MB" for path in (metrics, record, journal))
    )
    status, inspect = (cost_of(COMMAND, command, folder) for command in ("status", "inspect"))
    parse_one, parse_both = cost_of(PARSE, metrics), cost_of(PARSE, metrics, record)
    rows = {
        "status": status,
        "json.loads of metrics.jsonl": parse_one,
        "lines of metrics.jsonl": cost_of(READ, metrics),
        "inspect": inspect,
        "json.loads of both files": parse_both,
        "lines of both files": cost_of(READ, metrics, record),
    }
    print(f"{'':30}{'wall s':>8}{'CPU s':>8}{'peak MB':>9}")
    for name, cost in rows.items():
        print(f"{name:30}{cost.wall_s:8.2f}{cost.cpu_s:8.2f}{cost.peak_mb:9.0f}")
    print(f"ratio: {(status.cpu_s + inspect.cpu_s) / (parse_one.cpu_s + parse_both.cpu_s):.2f}")


def main() -> None:
    """Parse, make up a run, measure, print."""
    parser = options(__doc__, seconds=0.0)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="groups of a batch (default: %(default)s)")
    parser.add_argument("--size", type=int, default=4, help="rollouts of a group (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-long-run-") as name:
        make_run(Path(name), arguments.steps, arguments.groups, arguments.size)
        with reported("long_run", is_kept=arguments.write):
            print(f"batches of {arguments.groups} groups of {arguments.size} rollouts")
            show(Path(name), arguments.steps)


if __name__ == "__main__":
    main()
