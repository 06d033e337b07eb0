"""`asyncrl stop` and `asyncrl delete` on directories of made runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event

import pytest

from asyncrl.base.errors import ComponentError, ConfigError
from asyncrl.job.run_control import delete_run, stop_run

CONTROLLER = """
import fcntl, json, os, signal, socket, sys
from pathlib import Path

folder = Path(sys.argv[1])
lock = open(folder / "run.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
signal.pause()
print("saving", flush=True)
sys.stdin.readline()
status = {"state": "interrupted", "why": "interrupted by SIGTERM"}
(folder / "status.json").write_text(json.dumps(status))
"""


def made(folder: Path, **status: object) -> Path:
    folder.mkdir()
    (folder / "run.id").touch()
    (folder / "status.json").write_text(json.dumps(status))
    return folder


@contextmanager
def controlled(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CONTROLLER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_stop_waits_until_the_run_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = Event()
    monkeypatch.setattr(time, "sleep", lambda _: polled.set())
    run_dir = made(tmp_path / "run", state="running", updated_s=0)
    told = list[str]()
    with ThreadPoolExecutor(1) as pool, controlled(run_dir) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stopping = pool.submit(stop_run, run_dir, told.append)
        assert process.stdout.readline() == "saving\n"
        assert polled.wait(60), "it looks again while the run saves"
        process.stdin.write("saved\n")
        process.stdin.flush()
        stopping.result(timeout=60)
    assert f"process {process.pid} " in told[0]
    assert told[1] == f"{run_dir} is interrupted; interrupted by SIGTERM"


def test_stop_ends_its_wait_for_a_process_that_does_not_end(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run", state="running", updated_s=0)
    with controlled(run_dir) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ComponentError, match="has not ended 0.1 s after") as raised:
            stop_run(run_dir, lambda _: None, timeout_s=0.1)
    assert raised.value.component == f"process {process.pid}"
    assert f"`kill -9 {process.pid}`" in raised.value.way_out


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_stop_signals_no_process_that_only_a_file_names(
    tmp_path: Path, host: str
) -> None:
    status = {"state": "running", "pid": os.getpid(), "host": host, "updated_s": 0}
    with pytest.raises(ConfigError, match="no process of this machine runs"):
        stop_run(made(tmp_path / "run", **status))


def test_stop_of_an_ended_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is done; a live run"):
        stop_run(made(tmp_path / "run", state="done"))


def test_delete_asks_and_removes_only_the_run(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, state="done") for name in ("a", "b")]
    (tmp_path / "link").symlink_to(runs[0])
    question = f"Delete {runs[0]} (done, 0.0 MB)?"
    delete_run(runs[0], lambda asked: asked != question)
    assert runs[0].exists()
    delete_run(tmp_path / "link", lambda asked: asked == question)
    assert [path.exists() for path in runs] == [False, True]


@pytest.mark.parametrize(
    "case", ["live", "of another host", "without its id", "absent"]
)
def test_delete_refuses_live_runs_and_other_folders(tmp_path: Path, case: str) -> None:
    folder = made(tmp_path / "run", state="running", host="another", updated_s=0)
    if case == "without its id":
        (folder / "run.id").unlink()
    given = tmp_path / "none" if case == "absent" else folder
    words = (
        "a live run" if case in ("live", "of another host") else "not a run directory"
    )
    with controlled(folder) if case == "live" else nullcontext():
        with pytest.raises(ConfigError, match=words):
            delete_run(given)
    assert (folder / "status.json").exists()
