"""`asyncrl stop` and `asyncrl delete`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.base.errors import ComponentError, ConfigError
from asyncrl.base.files import run_lock
from asyncrl.base.progress import told_if_long
from asyncrl.observe.run_dir import (
    ID_FILE,
    LOCK_FILE,
    is_locked,
    judge_state,
    read_status,
    size_of,
)

POLL_S = 0.5


def stop_run(
    run_dir: Path, tell: Callable[[str], None] = print, *, timeout_s: float = 600.0
) -> None:
    """Send SIGTERM to the controller of a run, and wait until it has saved and ended.
    Raises ConfigError if no process of this machine writes into the directory, and
    ComponentError if it has not ended after `timeout_s`.
    """
    status = _status_of(run_dir)
    pid = _controller(run_dir / LOCK_FILE)
    if pid is None:
        raise ConfigError(
            f"no process of this machine runs {run_dir}: it is {_described(status, run_dir)}",
            rule="a live run is stopped on the host of its controller",
            way_out=f"`asyncrl status {run_dir}` shows its state and host; a live run is stopped there.",
        )
    os.kill(pid, signal.SIGTERM)
    tell(f"asked process {pid} to finish its step and save; Ctrl-C ends only this wait")
    end_s = time.monotonic() + timeout_s
    with told_if_long(f"waiting for process {pid}"):
        while is_locked(run_dir / LOCK_FILE):
            if time.monotonic() >= end_s:
                raise ComponentError(
                    f"process {pid}",
                    f"has not ended {timeout_s:g} s after SIGTERM",
                    way_out="repeat the command: a second SIGTERM ends it without a checkpoint. If it "
                    f"stays, `kill -9 {pid}`. A resume loses nothing either way.",
                )
            time.sleep(POLL_S)
    tell(f"{run_dir} is {_described(_status_of(run_dir), run_dir)}")


def _described(status: Mapping[str, object], run_dir: Path) -> str:
    return "; ".join(filter(None, judge_state(status, run_dir)))


def _controller(lock: Path) -> int | None:
    """Return the process of this machine that holds the lock."""
    # The kernel names the holder. A number in a file may be of another host or
    # container, or of a later process.
    with contextlib.suppress(FileNotFoundError):
        place = f":{lock.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            kind, pid, file = line.split()[-5:-2]
            if kind == "WRITE" and file.endswith(place):
                return int(pid)
    return None


def delete_run(
    run_dir: Path,
    confirm: Callable[[str], bool] = lambda question: True,
    tell: Callable[[str], None] = print,
) -> None:
    """Delete a run directory if `confirm` accepts the question. Raises ConfigError if the
    run may live, or if the folder is not a run directory.
    """
    folder = run_dir.resolve()
    status = _status_of(folder)
    state, _ = judge_state(status, folder)
    # The lock of another host may not be seen here. Then only the status shows the
    # run, and its state is unknown.
    may_live = status.get("state") in ("starting", "running") and state != "crashed"
    if may_live or is_locked(folder / LOCK_FILE):
        raise ConfigError(
            f"{folder} is {_described(status, folder)}",
            rule="a live run is not deleted",
            way_out=f"stop it first: `asyncrl stop {run_dir}`.",
        )
    shown = f"{folder} ({state}, {size_of(folder) / 1e6:,.1f} MB)"
    with run_lock(folder / LOCK_FILE):  # no run starts there now
        if confirm(f"Delete {shown}?"):
            shutil.rmtree(folder)
            tell(f"deleted {shown}")


def _status_of(run_dir: Path) -> dict[str, object]:
    """Raise ConfigError if no run has made the folder: its id is in no other."""
    if not (run_dir / ID_FILE).is_file():
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no {ID_FILE}",
            way_out="name a RUN_DIR that `asyncrl runs` lists.",
        )
    return read_status(run_dir, [])
