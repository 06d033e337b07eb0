"""`asyncrl stop` and `asyncrl delete`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import run_lock
from asyncrl.base.progress import told_if_long
from asyncrl.job.lifecycle import run_again
from asyncrl.observe.run_dir import (
    CONFIG_FILE,
    ID_FILE,
    LOCK_FILE,
    is_locked,
    judge_state,
    read_status,
    size_of,
)

POLL_S = 0.5
LIVE = ("starting", "running")


def stop_run(run_dir: Path, tell: Callable[[str], None] = print) -> None:
    """Send SIGTERM to the controller of a run, and wait until it has saved and ended.
    Raises ConfigError if no process of this machine writes into the directory.
    """
    _check_run_dir(run_dir)
    pid = _controller(run_dir)
    os.kill(pid, signal.SIGTERM)
    tell(f"asked process {pid} to finish its step and save; Ctrl-C ends only this wait")
    activity = ""
    with told_if_long(f"waiting for process {pid}", tell):
        while is_locked(run_dir / LOCK_FILE):
            time.sleep(POLL_S)
            now = str(read_status(run_dir, []).get("activity", ""))
            if now not in ("", activity):
                tell(f"  {now}")
                activity = now
    state, why = judge_state(read_status(run_dir, []), run_dir)
    tell(f"{run_dir} is {state}: {why}" if why else f"{run_dir} is {state}")
    if state != "done":
        tell(f"resume with: {run_again(run_dir)}")


def _controller(run_dir: Path) -> int:
    """Return the process that holds the lock. Raises ConfigError."""
    lock = run_dir / LOCK_FILE
    # The kernel names the holder. A number in a file may be of another host or
    # container, or of a later process.
    with contextlib.suppress(FileNotFoundError):
        place = f":{lock.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            kind, pid, file = line.split()[-5:-2]
            if kind == "WRITE" and file.endswith(place):
                return int(pid)
    state, why = judge_state(read_status(run_dir, []), run_dir)
    raise ConfigError(
        f"no process of this machine runs {run_dir}: it is {state}{why and f', {why}'}",
        rule="a run is stopped on the host of its controller",
        way_out=f"run `asyncrl stop {run_dir}` on that host, or read `asyncrl status {run_dir}`.",
    )


def delete_run(
    run_dir: Path,
    confirm: Callable[[str], bool] = lambda question: True,
    tell: Callable[[str], None] = print,
) -> None:
    """Delete a run directory if `confirm` accepts the question. Raises ConfigError if the
    run lives, or if the folder is not a run directory.
    """
    _check_run_dir(run_dir)
    folder = run_dir.resolve()
    status = read_status(folder, [])
    state, why = judge_state(status, folder)
    # The state of a run on another host is unknown, and its status is not of an end.
    if is_locked(folder / LOCK_FILE) or (
        state != "crashed" and status.get("state") in LIVE
    ):
        raise ConfigError(
            f"{folder} is {state}, {why}",
            rule="a live run is not deleted",
            way_out=f"stop it first: asyncrl stop {run_dir}.",
        )
    shown = f"{folder} ({state}, step {status.get('step', 0)}, {size_of(folder) / 1e6:,.1f} MB)"
    with run_lock(folder / LOCK_FILE):  # no run starts there meanwhile
        if confirm(f"Delete {shown}?"):
            shutil.rmtree(folder)
            tell(f"deleted {shown}")


def _check_run_dir(folder: Path) -> None:
    """Raise ConfigError unless a run has made the folder: its id is in no other."""
    for name in (CONFIG_FILE, ID_FILE):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} is not a run directory: it has no {name}",
                way_out="name a RUN_DIR that `asyncrl runs` lists.",
            )
