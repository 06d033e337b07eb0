"""Commands in a sandbox: what they see of the disk, the network and the processes, what ends them, and what
is said where there is no sandbox. With real ones where bubblewrap or podman is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import in_loop
from harness_gateway import open_gateway, settled
from sandbox_cases import need_bubblewrap

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.command import CommandHarness
from asyncrl.agents.command_processes import find_group
from asyncrl.agents.sandbox import Bubblewrap, Podman, check_usage, find_sandbox
from asyncrl.agents.sandbox_door import MAX_CONNECTIONS, Door, ProcessReadings
from asyncrl.agents.worker import Worker
from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError, RolloutFailure

TASK = Task("p0", ({"role": "user", "content": "What is 6 * 7?"},), {}, 5, 1, 2, answer=42)
SESSION = Session("http://127.0.0.1:9/v1", "secret-key", "policy")


@pytest.fixture(params=["bubblewrap", "podman"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a sandbox that can be had. Podman needs an image that has python3 and sh:
    ASYNCRL_PODMAN_IMAGE names one.
    """
    kind, image = request.param, os.environ.get("ASYNCRL_PODMAN_IMAGE")
    if kind == "bubblewrap":
        need_bubblewrap()
    if kind == "podman" and (image is None or shutil.which("podman") is None):
        pytest.skip("no podman, or no ASYNCRL_PODMAN_IMAGE")
    return {"sandbox": kind} | ({"sandbox_image": image} if kind == "podman" else {})


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "the folders of commands are removed"


def python_in(kind: dict[str, Any]) -> str:
    return "python3" if "sandbox_image" in kind else sys.executable


async def ran(kind: dict[str, Any], *command: str, session: Session = SESSION, **settings: Any) -> Outcome:
    harness = CommandHarness(GeneratorConfig(command=list(command), **kind, **settings))
    try:
        return await harness.run(TASK, session)
    finally:
        assert find_group(harness.token) == [], "no process of a command is left"


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
said = {
    "answer": task["answer"], "folder": os.getcwd(), "home": os.environ["HOME"],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "outside": connected("OUTSIDE", 9), "localhost": connected("127.0.0.1", PORT),
    "secret": tried(lambda: open("SECRET").read()), "shadow": tried(lambda: open("/etc/shadow").read()),
    "system": tried(lambda: open("/usr/bin/x", "w")), "root": tried(lambda: open("/x", "w")),
    "devices": tried(lambda: open("/dev/x", "w")),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "note": tried(lambda: open("NOTE").read()),
}
open("x", "w").write("x"), open(os.environ["TMPDIR"] + "/x", "w").write("x")
print(json.dumps(said), file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.slow
@in_loop
async def test_a_command_sees_its_folders_and_the_system_and_nothing_else(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("SECRET-ANSWER-42")
    (tmp_path / "note").write_text("for all to read")
    async with open_gateway() as gateway:  # a server of this machine, and not the session's
        port = gateway.url.rpartition(":")[2]
        outside = "192.0.2.1"  # of no network: refused at once where there is none
        script = SEES.replace("OUTSIDE", outside).replace("PORT", port)
        script = script.replace("SECRET", str(tmp_path / "secret")).replace("NOTE", str(tmp_path / "note"))
        with pytest.raises(RolloutFailure, match="exited with code 3") as failure:
            await ran(kind, python_in(kind), "-c", script, sandbox_paths=[str(tmp_path / "note")])
    said, _ = json.JSONDecoder().raw_decode(str(failure.value).partition("standard error: ")[2])
    assert said.pop("processes") < 6
    if kind["sandbox"] == "podman":
        said["devices"] = "OSError"  # its /dev can be written to, and counts as memory
    assert said.pop("shadow") in ("FileNotFoundError", "PermissionError")
    assert said == {
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
        "note": "for all to read",
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
async def test_the_gateway_is_reached_through_the_door(kind: dict[str, Any]) -> None:
    harness = CommandHarness(
        GeneratorConfig(command=[python_in(kind), "-c", CALLS], outcomes="posted", **kind)
    )
    async with open_gateway(outcomes="posted") as gateway:
        caller = gateway.worker()
        working = asyncio.ensure_future(Worker(harness, caller, name="w", slots=2).run())
        outcome = await gateway.run(0)
        working.cancel()
        await asyncio.wait([working])
        await caller.aclose()
    assert outcome.reward == 0.5
    assert len(gateway.calls) == 3


GREEDY = "kept = []\nwhile True: kept.append(bytearray(b'x' * 2**20))"
MANY = """
import os, time
for _ in range(20):
    if not os.fork():
        kept = bytearray(b"x" * (20 * 2**20))
        time.sleep(100)
time.sleep(100)
"""


@pytest.mark.slow
@in_loop
async def test_a_command_that_takes_too_much_memory_fails_and_nothing_of_it_is_left(
    kind: dict[str, Any],
) -> None:
    with pytest.raises(RolloutFailure, match="MemoryError|code 137"):
        await ran(kind, python_in(kind), "-c", GREEDY, max_memory_mb=100)
    if kind["sandbox"] == "bubblewrap":  # in a container the kernel kills one of them, and the rest goes on
        with pytest.raises(RolloutFailure, match=r"uses \d+ MiB of memory; .*max_memory_mb is 100"):
            await ran(kind, python_in(kind), "-c", MANY, max_memory_mb=100)


@pytest.mark.slow
@in_loop
async def test_a_command_that_is_cancelled_ends_with_all_that_it_started(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    started = asyncio.Event()
    hides = "(setsid env -i sleep 1000 &) ; curl -s $OPENAI_BASE_URL/models >&2 ; sleep 1000"
    if kind["sandbox"] == "podman":
        hides = "sleep 1000"

    async def begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        started.set()
        writer.close()

    server = await asyncio.start_server(begun, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    running = asyncio.ensure_future(ran(kind, "/bin/sh", "-c", hides, session=Session(url, "key", "policy")))
    if kind["sandbox"] == "bubblewrap":
        await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.close()


def test_where_there_is_no_sandbox_nothing_is_run_and_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind, named in (
        ("bubblewrap", "no program bwrap"),
        ("auto", "no program bwrap.*podman needs an image"),
    ):
        with pytest.raises(ConfigError, match=named) as error:
            find_sandbox(GeneratorConfig(command=["/bin/sh"], sandbox=kind), ["/bin/sh"])  # type: ignore[arg-type]
        assert "apt-get install bubblewrap" in str(error.value)
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="bwrap .* ends with code 1: bwrap: setting up uid map"):
        find_sandbox(GeneratorConfig(command=["/bin/sh"], sandbox="auto"), ["/bin/sh"])


def test_settings_of_a_sandbox_need_one() -> None:
    for settings in ({"max_memory_mb": 100}, {"sandbox_paths": ["/data"]}, {"sandbox_image": "x"}):
        with pytest.raises(ValueError, match="generator.sandbox is none"):
            GeneratorConfig(command=["/bin/sh"], **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is for command"):
        GeneratorConfig(python="a:b", sandbox="auto")


def test_what_is_started_has_no_network_and_no_secret_in_its_arguments(tmp_path: Path) -> None:
    environment = {"OPENAI_API_KEY": "secret-key", "HOME": "/home/u", "TMPDIR": "/x", "PATH": "/bin"}
    given: Any = (["agent", "--fast"], environment, tmp_path, 7, "token.0.")
    command, inner = Bubblewrap(("/data",)).around(*given)
    assert command[:2] == ["bwrap", "--unshare-all"]
    assert " --ro-bind /data /data " in " ".join(command)
    assert not {"--share-net", str(Path.home()), "/var"} & set(command)
    assert inner == environment | {"HOME": "/rollout", "TMPDIR": "/tmp"}
    command, outer = Podman(("/data",), 2**20, "img").around(*given)
    wanted = {"--network=none", "--read-only", "--cap-drop=all", "--memory=1048576", "--memory-swap=1048576"}
    wanted |= {"--volume=/data:/data:ro", "--env=OPENAI_API_KEY", "--env=HOME=/rollout", "--pull=never"}
    assert wanted <= set(command)
    assert command[-2:] == ["agent", "--fast"]
    assert outer["OPENAI_API_KEY"] == "secret-key"
    assert outer["HOME"] == os.environ["HOME"], "podman keeps its images there"
    assert "secret-key" not in " ".join(command)


@in_loop
async def test_a_door_forwards_to_one_address_and_no_more_connections_than_it_may() -> None:
    served = list[str]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = (await reader.readline()).decode()
        served.append(text)
        writer.write(f"{text.strip()} was heard".encode())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    door = Door(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    assert door.inner_url == "http://127.0.0.1:8700/v1"
    listener = socket.create_server(("127.0.0.1", 0))  # as the first program in a sandbox does
    socket.send_fds(door.their_end, [b"1"], [listener.fileno()])
    port = listener.getsockname()[1]
    listener.close()
    assert await door.wait_open()
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    for index, (_, writer) in enumerate(clients[:-1]):
        writer.write(f"{index}\n".encode())
    assert [await reader.read() for reader, _ in clients[:2]] == [b"0 was heard", b"1 was heard"]
    await settled(lambda: len(served) == MAX_CONNECTIONS - 1)
    busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    assert await busy[-1][0].read() == b"", "one too many"
    waiting = asyncio.ensure_future(clients[-1][0].read())
    await door.aclose()
    assert await waiting == b"", "closed with the door"
    with pytest.raises(OSError, match=r"."):
        await asyncio.open_connection("127.0.0.1", port)
    for _, writer in (*clients, *busy):
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in (*clients, *busy)), return_exceptions=True)
    server.close()


@in_loop
async def test_a_door_is_not_waited_for_once_the_sandbox_has_ended() -> None:
    door = Door("http://127.0.0.1:1/v1")
    assert not await door.wait_open()
    await door.aclose()


def test_usage_is_of_a_process_and_all_that_descend_from_it() -> None:
    num_processes, num_bytes = ProcessReadings().of(os.getpid())
    assert num_processes >= 1
    assert num_bytes > 2**20
    check_usage(Bubblewrap((), 2 * num_bytes), num_processes, num_bytes)
    check_usage(Bubblewrap(()), num_processes, num_bytes)
    with pytest.raises(RolloutFailure, match="generator.max_memory_mb is 1"):
        check_usage(Bubblewrap((), 2**20), num_processes, num_bytes)
    with pytest.raises(RolloutFailure, match="1025 processes; 1024 is the limit"):
        check_usage(Bubblewrap(()), 1025, 0)
