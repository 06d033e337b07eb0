"""`asyncrl stop` and `asyncrl delete` on directories of made runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.job.run_control import delete_run, stop_run

CONTROLLER = """
import fcntl, json, os, signal, socket, sys
from pathlib import Path

folder = Path(sys.argv[1])
lock = open(folder / "run.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)

def write(**status):
    body = status | {"pid": os.getpid(), "host": socket.gethostname(), "updated_s": 0}
    (folder / "status.new").write_text(json.dumps(body))
    (folder / "status.new").replace(folder / "status.json")

signal.signal(signal.SIGTERM, lambda *_: None)
write(state="running", activity="training")
print("ready", flush=True)
signal.pause()
write(state="running", activity="writing a checkpoint")
sys.stdin.readline()
write(state="interrupted", why="interrupted by SIGTERM")
"""


def made(folder: Path, **status: object) -> Path:
    for name in ("config.yaml", "run.id", "run.lock"):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
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


def test_stop_waits_until_the_run_has_saved(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run")
    told = list[str]()
    with controlled(run_dir) as process:

        def tell(line: str) -> None:
            told.append(line)
            if "checkpoint" in line:  # it saves, and only then it ends
                assert process.stdin is not None
                process.stdin.write("saved\n")
                process.stdin.flush()

        stop_run(run_dir, tell)
    assert str(process.pid) in told[0]
    assert "  writing a checkpoint" in told
    assert told[-2] == f"{run_dir} is interrupted: interrupted by SIGTERM"
    assert told[-1].startswith("resume with: asyncrl run ")


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_stop_signals_no_process_that_only_a_file_names(
    tmp_path: Path, host: str
) -> None:
    status = {"state": "running", "pid": os.getpid(), "host": host, "updated_s": 0}
    with pytest.raises(ConfigError, match="no process of this machine runs") as refused:
        stop_run(made(tmp_path / "run", **status))
    assert "on that host" in str(refused.value)


def test_delete_asks_and_removes_only_the_run(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, state="done", step=3) for name in ("a", "b")]
    (tmp_path / "link").symlink_to(runs[0])
    question = f"Delete {runs[0]} (done, step 3, 0.0 MB)?"
    delete_run(runs[0], lambda asked: asked != question)
    assert runs[0].exists()
    delete_run(tmp_path / "link", lambda asked: asked == question)
    assert [path.exists() for path in runs] == [False, True]


@pytest.mark.parametrize("case", ["live", "other host", "no id", "no config", "absent"])
def test_delete_refuses_live_runs_and_other_folders(tmp_path: Path, case: str) -> None:
    folder = made(tmp_path / "run", state="running", host="another", updated_s=0)
    lacks = {"no id": "run.id", "no config": "config.yaml"}
    if case in lacks:
        (folder / lacks[case]).unlink()
        (folder / "status.json").unlink()
    given = tmp_path / "none" if case == "absent" else folder
    with controlled(folder) if case == "live" else nullcontext():
        with pytest.raises(
            ConfigError, match=r"is not a run directory|is (running|unknown)"
        ):
            delete_run(given)
    assert folder.exists()
