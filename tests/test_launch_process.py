"""Child processes end with their parent and leave no files."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import forked_processes
import psutil
import pytest
from job_runs import is_fork_server

from asyncrl.base import files as staging
from asyncrl.base.errors import ErrorBody, fatal_line
from asyncrl.base.http import SECRET_ENV
from asyncrl.launch import fork_server
from asyncrl.launch.fork_server import PRELOADED, ForkServer
from asyncrl.launch.processes import (
    LOG_END_BYTES,
    ChildProcess,
    Process,
    ProcessSpec,
    group_members,
    start_process,
)

CONFIGS = Path(__file__).parents[1] / "configs"
GUARDED = """
import os, select, signal
from pathlib import Path
leader, folder = os.getpid(), Path(__file__).parent
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leader_ends = os.pidfd_open(leader)
    (folder / "started").write_text("")
    select.select([leader_ends], [], [])
    (folder / "cleaned").write_text("")
    os._exit(0)
signal.pause()
"""
PROBE = """
import json, os, random, sys, time
from pathlib import Path
def open_files():
    names = os.listdir("/proc/self/fd")
    return sorted(int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}"))
def main():
    end = sys.argv[1] if len(sys.argv) > 1 else ""
    if end == "sleep":
        time.sleep(600)
    if end:
        raise SystemExit(int(end) if end.isdigit() else end)
    print(json.dumps({
        "environ": dict(os.environ), "random": random.random(),
        "session": os.getsid(0), "threads": len(os.listdir("/proc/self/task")),
        "inherited": [fd for fd in open_files() if os.get_inheritable(fd)], "files": len(open_files()),
        "command": Path("/proc/self/cmdline").read_bytes().decode().strip(chr(0)).split(chr(0)),
        "block": Path("/proc/self/environ").read_text(),
    }))
if __name__ == "__main__":
    main()
"""


MODULE = "child_for_test"


def add_module(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a module where children find it."""
    (folder / f"{MODULE}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@contextlib.contextmanager
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """Run a fork server that has imported the module."""
    with contextlib.closing(ForkServer(modules=[MODULE])) as server:
        monkeypatch.setattr(fork_server, "current", server)
        yield server


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A fork server whose child prints its state, or ends as its argument says."""
    monkeypatch.setenv("ASYNCRL_WORKER_KEY", "s3cret")
    add_module(tmp_path, monkeypatch, PROBE)
    with forking(monkeypatch) as server:
        yield server


async def probed(
    output: Path, *arguments: str, env: dict[str, str] | None = None
) -> int:
    """Start a probe, and return its exit code."""
    with output.open("w+b") as file:
        files = [file.fileno()] * 3
        process = await start_process(MODULE, arguments, files=files, env=env)
    await process.wait()
    return process.returncode


@pytest.mark.slow
def test_forked_child_equals_one_that_python_m_starts(
    probe: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATER", "than the server")
    for number in range(2):
        assert (
            asyncio.run(probed(tmp_path / f"forked-{number}", env={"MORE": "of it"}))
            == 0
        )
    one, other = (
        json.loads((tmp_path / f"forked-{number}").read_text()) for number in range(2)
    )
    for end, code, says in (("3", 3, ""), ("no luck", 1, "no luck\n")):
        assert asyncio.run(probed(tmp_path / "log", end)) == code
        assert (tmp_path / "log").read_text() == says
    monkeypatch.setattr(fork_server, "current", None)
    assert asyncio.run(probed(tmp_path / "started", env={"MORE": "of it"})) == 0
    started = json.loads((tmp_path / "started").read_text())
    for key in ("environ", "threads", "inherited", "command"):
        assert one[key] == started[key], key
    assert one["files"] == other["files"] == started["files"] + 3, (
        "those of multiprocessing"
    )
    assert one["environ"]["LATER"] == "than the server"
    for key in ("session", "random"):
        assert one[key] != other[key], key
    assert "s3cret" not in str(one)


@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_fork_server_ends_its_children_and_others_start_plainly(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with (tmp_path / "sleeping").open("w+b") as file:
            child = await start_process(MODULE, ["sleep"], files=[file.fileno()] * 3)
        server = psutil.Process(child.pid).parent()
        server.send_signal(number)
        await asyncio.to_thread(
            os.waitid, os.P_PID, server.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT
        )
        monkeypatch.setattr(fork_server, "TIMEOUT_S", 0.0)
        assert await probed(tmp_path / "log", "5") == 5
        await child.wait()
        assert child.returncode == -signal.SIGKILL

    asyncio.run(story())


@pytest.mark.usefixtures("probe")
def test_cancelled_start_does_not_wait_for_a_hung_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with (tmp_path / "sleeping").open("w+b") as file:
            child = await start_process(MODULE, ["sleep"], files=[file.fileno()] * 3)
        server = psutil.Process(child.pid).parent()
        server.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(
            os.waitid, os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT
        )
        monkeypatch.setattr(fork_server, "TIMEOUT_S", 3600.0)
        monkeypatch.setattr(fork_server, "CANCELLED_S", 0.0)
        starting = asyncio.ensure_future(probed(tmp_path / "log", "5"))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await child.wait()
        assert child.returncode == -signal.SIGKILL

    asyncio.run(story())


@pytest.mark.slow
def test_a_start_imports_neither_torch_twice_nor_what_it_does_not_use() -> None:
    controller = f"""
import sys
import asyncrl.job.loop
from asyncrl.config import load_config
from asyncrl.job.check.config_check import validate
validate(load_config({str(CONFIGS / "quickstart.yaml")!r}))
unused = {{"torch", "transformers.models", "peft", "fastapi"}} & {{*sys.modules}}
assert not unused, unused
"""
    children = f"""
import importlib, sys
for name in {PRELOADED!r}:
    importlib.import_module(name)
unused = {{"peft", "tensorboard", "matplotlib", "datasets"}} & {{*sys.modules}}
assert not unused, unused
"""
    for script in (controller, children):
        subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.xdist_group("forks")
def test_preloaded_modules_start_no_thread_and_open_no_device() -> None:
    assert all(importlib.util.find_spec(name) for name in PRELOADED)
    assert {*PRELOADED} <= {*forked_processes.MODULES}
    with Path(os.devnull).open("r+b") as nowhere:
        files = [nowhere.fileno()] * 3
        arguments = (
            "asyncrl_servers.embedded.__main__",
            ["--help"],
            dict(os.environ),
            files,
        )
        child = ForkServerProcess(target=fork_server.run, args=arguments)
        forked_processes.warm_parent().start(child, files)
    (process,) = filter(is_fork_server, psutil.Process().children())
    assert process.num_threads() == 1
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        # those of the fork are being closed
        with contextlib.suppress(FileNotFoundError):
            assert str(link.readlink()) != "/dev/nvidia-uvm"


def test_group_member_has_time_to_clean_up_after_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_module(tmp_path, monkeypatch, GUARDED)
    os.mkfifo(tmp_path / "started")

    async def story() -> None:
        child = ChildProcess(
            ProcessSpec("child-0", MODULE, "{}", tmp_path / "run", "s3cret")
        )
        await child.start()
        await asyncio.to_thread((tmp_path / "started").read_text)
        os.killpg(child.pid, signal.SIGSTOP)
        child.kill_nowait()
        await child.aclose()
        assert (tmp_path / "cleaned").exists()
        assert group_members(child.pid) == []

    asyncio.run(story())


# ---- folders of weights

HOLD_STAGING = """
import os, subprocess, sys
from pathlib import Path
from asyncrl.base.files import new_staging_dir
folder = new_staging_dir(Path(sys.argv[1]))
(folder / "v7.safetensors").write_bytes(b"weights")
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(folder, child.pid, flush=True)
input()
"""


def test_staging_of_a_killed_run_is_cleared(tmp_path: Path) -> None:
    """A pid means nothing in another container, a start time nothing once the clock was
    set: a lock does.
    """
    mine, other = staging.new_staging_dir(tmp_path), tmp_path / "asyncrl-without-a-lock"
    foreign = tmp_path / "asyncrl-another_host-1-abcdef01"
    for folder in (other, foreign):
        folder.mkdir()
    (foreign / "lock").touch()
    command = [sys.executable, "-c", HOLD_STAGING, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        held, child = owner.stdout.readline().split()
        assert staging.clear_stale_staging(tmp_path) == []
        assert (Path(held) / "v7.safetensors").exists()
        owner.kill()
        owner.wait()
        assert staging.clear_stale_staging(tmp_path) == [Path(held)], (
            "although a child of it lives"
        )
        os.kill(int(child), signal.SIGKILL)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, foreign])
    staging.remove_staging_dir(mine)
    staging.new_staging_dir(tmp_path)
    staging.clear_own_staging()
    assert sorted(tmp_path.iterdir()) == sorted([other, foreign])


def test_death_reads_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    process = Process("engine-0", tmp_path / "engine-0.log")
    early, late = (
        fatal_line(ErrorBody(error=f"{when} words")) for when in ("first", "last")
    )
    filler = "x" * LOG_END_BYTES
    (tmp_path / "engine-0.log").write_text(f"{early}\n{filler}\nthe end\n")
    assert not process.is_refused()
    assert "the end" in process.death().fault
    (tmp_path / "engine-0.log").write_text(f"{filler}\n{late}\n")
    assert process.is_refused()
    assert process.death().fault == "last words"


def test_a_script_keeps_its_handler_of_sigterm() -> None:
    def own(*_: object) -> None: ...

    earlier = signal.signal(signal.SIGTERM, own)
    try:
        with fork_server.serving():
            assert signal.getsignal(signal.SIGTERM) is not own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_late_signals_of_a_server_reach_an_open_descriptor() -> None:
    """Another thread may still be in the C handler of a signal when the loop has closed.
    Its write must neither fail nor reach another file.
    """
    script = """
import os, signal, socket, sys, threading
from aiohttp import web
from asyncrl.base.http import END, die_with_parent, serve

die_with_parent()
app = web.Application()

async def end(_):
    os.kill(os.getpid(), END)

app.on_startup.append(end)
serve(app, socket.create_server(("127.0.0.1", 0)).detach())
wakeup = signal.set_wakeup_fd(-1)
os.write(wakeup, bytes([signal.SIGTERM]))
print("ended")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,  # its end would end the server
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, SECRET_ENV: "secret"},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "ended\n"
