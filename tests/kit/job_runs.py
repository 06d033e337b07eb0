"""Starts real `asyncrl run` processes on a tiny model and reads their files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked_processes
import held_task
import psutil
import yaml
from tiny_model import SHAPE

from asyncrl.base.files import shared_memory_root

KIT = Path(__file__).parent
ROOT = KIT.parents[1]
RUN = [sys.executable, "-m", "asyncrl.cli", "run"]

CONFIG: dict[str, Any] = {
    "seed": 7,
    "model": {
        "dtype": "float32",
        "scratch": {
            "characters": "abcdefgh0123456789 ",
            "architecture": SHAPE | {"max_position_embeddings": 128},
        },
    },
    "task": {"python": "asyncrl.tasks.toy:Letters", "size": 200},
    "rollout": {
        "group_size": 4,
        "slots": 16,
        "max_tokens": 24,
        "max_prompt_tokens": 16,
        "threads": 1,
    },
    "buffer": {"max_staleness": 0},
    "trainer": {"num_groups": 4, "num_steps": 12, "learning_rate": 0.003, "threads": 1},
    "observe": {"console": "plain", "trackers": []},
}


def write_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """CONFIG with some keys of some sections replaced, as a file."""
    return _write(CONFIG, folder, sections)


def variant(config: Path, folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A config with some keys of some sections replaced, as a file in that folder."""
    return _write(yaml.safe_load(config.read_text()), folder, sections)


def _write(
    config: Mapping[str, Any], folder: Path, sections: Mapping[str, Mapping[str, Any]]
) -> Path:
    merged = {
        **config,
        **{
            name: {**config.get(name, {}), **values}
            for name, values in sections.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config-for-test.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path


def environment(**more: str) -> dict[str, str]:
    """The environment of a run: the test modules can be imported, one thread."""
    return (
        os.environ
        | {"PYTHONPATH": f"{KIT}:{ROOT}:{ROOT}/servers", "OMP_NUM_THREADS": "1"}
        | more
    )


def popen(
    *arguments: str | Path, command: list[str] = RUN, run_dir: Path | None = None
) -> subprocess.Popen[str]:
    """`asyncrl run` with its output in pipes. held_task can hold the run of that
    directory.
    """
    pipe = subprocess.PIPE
    held = {held_task.RUN_DIR: str(run_dir)} if run_dir else {}
    place = ["--run-dir", run_dir] if run_dir else []
    return forked_processes.popen(
        [*command, *map(str, [*arguments, *place])],
        environment(**held),
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def ended(
    process: subprocess.Popen[str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Return its output once it has ended."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


Ended = subprocess.CompletedProcess[str]


def run(config: Path, run_dir: Path, *overrides: str, timeout_s: float = 240) -> Ended:
    """Run to the end."""
    return ended(popen(config, *overrides, run_dir=run_dir), timeout_s)


def start(config: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start, and return at once."""
    return roomy(popen(config, *overrides, run_dir=run_dir))


def roomy(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Enlarge the pipes: output is read only at the end, and 64 KiB do not hold a
    minute's lines.
    """
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
    return process


def wait_for_steps(
    run_dir: Path,
    num_steps: int,
    process: subprocess.Popen[str],
    timeout_s: float = 240,
) -> None:
    """Return once `num_steps` steps are recorded; fails if the run ends before."""
    wait_until(
        lambda: len(read_lines(run_dir / "metrics.jsonl")) >= num_steps,
        process,
        timeout_s,
    )


def wait_for_more_steps(
    run_dir: Path, more: int, process: subprocess.Popen[str], timeout_s: float = 240
) -> None:
    wait_for_steps(
        run_dir, len(read_lines(run_dir / "metrics.jsonl")) + more, process, timeout_s
    )


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 240
) -> None:
    """Return once it is so; fails if the run ends before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        has_ended = process.poll() is not None and not condition()
        assert not has_ended, (
            f"the run ended with {process.returncode}: {process.communicate()}"
        )
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def events(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """(what, detail) of each event in the journal."""
    with contextlib.closing(
        sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True)
    ) as db:
        rows = db.execute("select what, detail from events order by id")
        return [(what, json.loads(detail)) for what, detail in rows]


def engine_events(run_dir: Path) -> list[tuple[str, str]]:
    """(what, name) of each event of an engine."""
    return [
        (what, detail["name"])
        for what, detail in events(run_dir)
        if what.startswith("engine")
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def children_of(process: subprocess.Popen[str], name: str = "") -> list[psutil.Process]:
    """The servers of a run whose command line holds `name`."""
    commands = dict[psutil.Process, str]()
    direct = psutil.Process(process.pid).children()
    forked = [
        grandchild
        for child in direct
        if is_fork_server(child)
        for grandchild in child.children()
    ]
    for child in direct + forked:
        with contextlib.suppress(psutil.NoSuchProcess):  # has ended, also as a zombie
            commands[child] = " ".join(child.cmdline())
    return [
        child
        for child, command in commands.items()
        if name in command and STDLIB not in command
    ]


STDLIB = "from multiprocessing"
"""In the command line of the fork server and of its resource tracker."""


def is_fork_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{STDLIB}.forkserver" in " ".join(process.cmdline())
    return False


def staging_of(pid: int) -> list[Path]:
    """Return the files of a run's controller in shared memory."""
    return list(shared_memory_root().glob(f"asyncrl-{pid}-*"))
