"""Cost of `asyncrl run configs/quickstart.yaml` until its first step, with the fork
server and without.

CPU seconds are the sum over the run's processes, which other load changes little. The
sides alternate; the table has medians. The goal is 8 CPU seconds and 6 s on two cores;
the last line is the larger of the two shares of it, with the fork server.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import CONFIGS, options, reported

CONFIG = CONFIGS / "quickstart.yaml"
WITHOUT = """
import contextlib
from asyncrl.launch import fork_server
fork_server.serving = contextlib.nullcontext
from asyncrl.cli import main
main()
"""
SIDES = {"fork server": ["-m", "asyncrl.cli"], "without": ["-c", WITHOUT]}
TIMEOUT_S = 120.0
GOALS = (8.0, 6.0)


def start_once(python_arguments: list[str]) -> tuple[float, float]:
    """CPU and wall seconds from the start of the command to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [
            sys.executable,
            *python_arguments,
            "run",
            str(CONFIG),
            "--run-dir",
            str(metrics.parent),
        ]
        since_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                wall_s = time.monotonic() - since_s
                if process.poll() is not None or wall_s > TIMEOUT_S:
                    process.kill()
                    raise SystemExit(
                        f"no first step within {wall_s:.0f} s (exit code {process.returncode})"
                    )
                time.sleep(0.01)
            measured = cpu_s(psutil.Process(process.pid)), time.monotonic() - since_s
            process.terminate()
    return measured


def cpu_s(root: psutil.Process) -> float:
    return sum(
        sum(process.cpu_times()[:4])
        for process in (root, *root.children(recursive=True))
    )


def main() -> None:
    """Print the table."""
    parser = options(__doc__, seconds=60)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    until_s = time.monotonic() + arguments.seconds
    with reported("startup", is_kept=arguments.write):
        while len(found["without"]) < 2 or time.monotonic() < until_s:
            for name, python_arguments in SIDES.items():
                found[name].append(start_once(python_arguments))
        print(
            f"{'':12} {'CPU s':>6} {'wall s':>7}  ({len(found['without'])} starts each)"
        )
        medians = {
            name: [statistics.median(side) for side in zip(*found[name], strict=True)]
            for name in SIDES
        }
        for name, (cpu, wall) in medians.items():
            print(f"{name:12} {cpu:6.1f} {wall:7.1f}")
        shares = [
            value / goal
            for value, goal in zip(medians["fork server"], GOALS, strict=True)
        ]
        print(f"goal: {GOALS[0]:.0f} CPU s, {GOALS[1]:.0f} s")
        print(f"ratio: {max(shares):.2f}")


if __name__ == "__main__":
    main()
