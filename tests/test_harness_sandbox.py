"""Commands in bubblewrap: files, network, memory and cancellation."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import in_loop
from harness_gateway import open_gateway, processes_of
from sandbox_cases import need_bubblewrap

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.command import CommandHarness
from asyncrl.agents.sandbox import find_sandbox
from asyncrl.agents.worker import Worker
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.config import GeneratorConfig

TASK = Task("p0", ({"role": "user", "content": "What is 6 * 7?"},), {}, 5, 1, 2, answer=42)
SESSION = Session("http://127.0.0.1:9/v1", "secret-key", "policy")


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "the folders of commands are removed"


async def run(*command: str, session: Session = SESSION, **settings: Any) -> Outcome:
    need_bubblewrap()
    harness = CommandHarness(GeneratorConfig(command=list(command), sandbox="bubblewrap", **settings))
    try:
        return await harness.run(TASK, session)
    finally:
        assert processes_of(harness.token) == []


SEES = """
import json, os, socket, sys
def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__
def connected(*address):
    return tried(lambda: socket.create_connection(address, timeout=5).close())
task = json.load(sys.stdin)
seen = {
    "answer": task["answer"], "folder": os.getcwd(), "home": os.environ["HOME"],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "outside": connected("192.0.2.1", 9), "localhost": connected("127.0.0.1", PORT),
    "secret": tried(lambda: open("SECRET").read()),
    "system": tried(lambda: open("/usr/bin/x", "w")), "root": tried(lambda: open("/x", "w")),
    "devices": tried(lambda: open("/dev/x", "w")),
    "few processes": len([name for name in os.listdir("/proc") if name.isdigit()]) < 6,
    "note": tried(lambda: open("NOTE").read()),
}
open("x", "w").write("x"), open(os.environ["TMPDIR"] + "/x", "w").write("x")
print(json.dumps(seen), file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.slow
@in_loop
async def test_a_command_sees_only_its_folders_and_the_system(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("SECRET-ANSWER-42")
    (tmp_path / "note").write_text("readable")
    async with open_gateway() as gateway:  # a server of this machine that is not the session's
        script = SEES.replace("PORT", gateway.url.rpartition(":")[2])
        script = script.replace("SECRET", str(tmp_path / "secret")).replace("NOTE", str(tmp_path / "note"))
        with pytest.raises(RolloutFailure, match="exited with code 3") as failure:
            await run(sys.executable, "-c", script, sandbox_paths=[str(tmp_path / "note")])
    seen, _ = json.JSONDecoder().raw_decode(str(failure.value).partition("standard error: ")[2])
    assert seen == {
        "answer": 42,
        "folder": "/rollout",
        "home": "/rollout",
        "interfaces": ["lo"],
        "outside": "OSError",
        "localhost": "ConnectionRefusedError",
        "secret": "FileNotFoundError",
        "system": "OSError",
        "root": "OSError",
        "devices": "OSError",
        "few processes": True,
        "note": "readable",
    }


CALLS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(url, key, body):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
        return json.load(answer)
asked = {"model": "policy", "messages": task["messages"]}
for _ in range(3):
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], asked)
assert said["choices"][0]["message"]["content"] == "answer 3", said
post(task["outcome_url"], task["outcome_key"], {"reward": 0.5})
"""


@pytest.mark.slow
@in_loop
async def test_a_command_reaches_the_gateway() -> None:
    need_bubblewrap()
    command = [sys.executable, "-c", CALLS]
    harness = CommandHarness(GeneratorConfig(command=command, outcomes="posted", sandbox="bubblewrap"))
    async with open_gateway(outcomes="posted") as gateway:
        caller = gateway.worker()
        working = asyncio.ensure_future(Worker(harness, caller, name="w", slots=2).run())
        outcome = await gateway.run(0)
        working.cancel()
        await asyncio.wait([working])
        await caller.aclose()
    assert outcome.reward == 0.5
    assert len(gateway.calls) == 3


@pytest.mark.slow
@in_loop
async def test_a_process_cannot_exceed_its_memory_limit() -> None:
    greedy = "kept = []\nwhile True: kept.append(bytearray(b'x' * 2**20))"
    with pytest.raises(RolloutFailure, match="MemoryError"):
        await run(sys.executable, "-c", greedy, max_memory_mb=100)


@pytest.mark.slow
@in_loop
async def test_a_cancelled_command_ends_with_its_children() -> None:
    need_bubblewrap()
    started = asyncio.Event()

    async def begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        started.set()
        writer.close()

    server = await asyncio.start_server(begun, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    hides = "(setsid env -i sleep 1000 &) ; curl -s $OPENAI_BASE_URL/models >&2 ; sleep 1000"
    running = asyncio.ensure_future(run("/bin/sh", "-c", hides, session=Session(url, "key", "policy")))
    await asyncio.wait([running, asyncio.ensure_future(started.wait())], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.close()


def test_nothing_runs_without_a_working_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = GeneratorConfig(command=["/bin/sh"], sandbox="bubblewrap")
    with pytest.raises(ConfigError, match="no program bwrap") as error:
        find_sandbox(config, ["/bin/sh"])
    assert "apt-get install bubblewrap" in str(error.value)
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="bwrap .* failed with code 1: bwrap: setting up uid map"):
        find_sandbox(config, ["/bin/sh"])
