"""Child processes and what they leave behind, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import ConfigError, RoomError
from asyncrl.placement.process import ChildProcess, bind_socket, group_members
from asyncrl.placement.staging import clear_stale_staging, new_staging_dir, shared_memory_root

WARDED = """
import os, select, signal, time
from pathlib import Path
leader, folder = os.getpid(), Path(__file__).parent
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leader_ends = os.pidfd_open(leader)
    (folder / "started").write_text("")
    select.select([leader_ends], [], [])
    time.sleep(0.5)
    (folder / "cleaned").write_text("")
    os._exit(0)
while True:
    time.sleep(60)
"""
CHILD = """
from asyncrl.serving import child_arguments, die_with_parent, fail, make_app, serve
die_with_parent()
spec, fd = child_arguments()
if spec == "refuse":
    fail("no such model", rule="a model must be there", way_out="give one.")
if spec == "crash":
    raise RuntimeError("something nobody thought of")
app = make_app()
app.get("/health")(lambda: {"ok": True})
serve(app, fd)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_for_test.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "child_for_test"


def make_child(module: str, tmp_path: Path, spec: str = "{}", port: int | None = None) -> ChildProcess:
    return ChildProcess("child-0", module, spec, run_dir=tmp_path / "run", secret="s3cret", port=port)


def wait_for_file(path: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_child_that_refuses_to_start_is_quoted_with_its_way_out(module: str, tmp_path: Path) -> None:
    async def story() -> None:
        child = make_child(module, tmp_path, "refuse")
        await child.start()
        with pytest.raises(RoomError, match="child-0: no such model; a model must be there") as caught:
            await child.watch()
        assert caught.value.way_out == "give one."
        await child.aclose()

    asyncio.run(story())


def test_a_child_that_crashes_is_reported_with_the_end_of_its_log(module: str, tmp_path: Path) -> None:
    async def story() -> None:
        child = make_child(module, tmp_path, "crash")
        await child.start()
        with pytest.raises(RoomError, match="something nobody thought of"):
            await child.watch()
        await child.aclose()

    asyncio.run(story())


def test_a_killed_child_is_named_with_the_signal(module: str, tmp_path: Path) -> None:
    async def story() -> None:
        child = make_child(module, tmp_path)
        await child.start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(RoomError, match="was killed by SIGKILL"):
            await child.watch()
        child.note_death()
        assert child.died is not None
        await child.aclose()

    asyncio.run(story())


def test_a_successor_answers_on_a_port_of_its_own_and_is_not_blamed_for_what_the_one_before_wrote(module: str, tmp_path: Path) -> None:
    async def story() -> None:
        first = make_child(module, tmp_path, "refuse")
        await first.start()
        with pytest.raises(RoomError, match="no such model"):
            await first.watch()
        await first.aclose()
        second = first.renewed()
        assert (second.pid, second.returncode, second.name) == (None, None, "child-0")
        second._spec = "crash"
        await second.start()
        assert second.url != first.url
        with pytest.raises(RoomError, match="something nobody thought of") as caught:
            await second.watch()
        assert "no such model" not in str(caught.value)
        assert "no such model" in second.log_path.read_text()
        assert "no such model" in str(first.death())
        await second.aclose()

    asyncio.run(story())


def test_closing_ends_the_process_and_can_be_repeated(module: str, tmp_path: Path) -> None:
    async def story() -> None:
        child = make_child(module, tmp_path)
        await child.start()
        await child.aclose()
        assert child.returncode is not None
        await child.aclose()

    asyncio.run(story())


def test_a_child_exits_when_its_parent_is_killed(module: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from asyncrl.placement.process import ChildProcess
        async def main():
            child = ChildProcess("child-0", "{module}", "{{}}", run_dir=Path({str(tmp_path)!r}), secret="s")
            await child.start()
            print(child.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
        """)
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pid)


def test_a_port_in_use_is_named_with_its_owner_and_the_way_out() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} for engine-0 cannot be used") as caught:
            bind_socket("engine-0", port)
        assert "any free one" in caught.value.way_out


def test_staging_of_a_killed_run_is_cleared_and_that_of_a_living_one_is_not() -> None:
    mine = new_staging_dir()
    dead = shared_memory_root() / "asyncrl-999999999-12345-deadbeef"
    other = shared_memory_root() / "asyncrl-notes-of-somebody-else"
    try:
        for folder in (mine, dead, other):
            folder.mkdir()
        assert dead in clear_stale_staging()
        assert mine.is_dir()
        assert other.is_dir()
        assert not dead.exists()
    finally:
        for folder in (mine, dead, other):
            if folder.exists():
                folder.rmdir()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_warden_has_time_to_clear_up_after_its_leader_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    (tmp_path / "warded_for_test.py").write_text(textwrap.dedent(WARDED))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def story() -> None:
        child = ChildProcess("child-0", "warded_for_test", "{}", run_dir=tmp_path / "run", secret="s3cret", has_warden=True)
        await child.start()
        assert child.pid is not None
        await asyncio.to_thread(wait_for_file, tmp_path / "started")
        if is_frozen:
            os.killpg(child.pid, signal.SIGSTOP)
        child.kill_nowait()
        await child.aclose()
        assert (tmp_path / "cleaned").exists()
        assert group_members(child.pid) == []
        assert child.renewed()._has_warden

    asyncio.run(story())
