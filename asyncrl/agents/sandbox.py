"""Run a command in bubblewrap: read-only system files, private folders, no network except the gateway.

The first program inside passes a listening socket to the worker, which forwards connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.base.errors import ConfigError
from asyncrl.config import GeneratorConfig

HOME = "/rollout"
PORT = 8700
TRIAL = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
is_file = os.path.isfile  # Path.is_file raises for a long script
ETC = (
    "alternatives ca-certificates group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf "
    "passwd pki ssl"
).split()
"""Readable files of /etc. The rest may contain secrets."""

_FIRST = """
import os, resource, socket, sys
channel, port, max_bytes, *command = sys.argv[1:]
listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
with socket.socket(fileno=int(channel)) as out:
    socket.send_fds(out, [b"1"], [listener.fileno()])
listener.close()
if int(max_bytes):
    resource.setrlimit(resource.RLIMIT_DATA, (int(max_bytes),) * 2)
os.execvp(command[0], command)
"""


@dataclass(frozen=True)
class Sandbox:
    """`max_bytes` limits memory per process (0: no limit)."""

    paths: tuple[str, ...]
    max_bytes: int

    def around(self, command: Sequence[str], folder: Path, channel: int) -> list[str]:
        """`folder` contains `work`, `tmp` and `shm`; file descriptor `channel` gets the socket."""
        binds = {HOME: folder / "work", "/tmp": folder / "tmp", "/dev/shm": folder / "shm"}
        shown = {path: path for path in (sys.base_prefix, sys.prefix, *self.paths)}
        first = [os.path.realpath(sys.executable), "-I", "-S", "-c", _FIRST]
        numbers = [str(channel), str(PORT), str(self.max_bytes)]
        return ["bwrap", *bubblewrap_options(binds, shown, HOME), "--", *first, *numbers, *command]


def bubblewrap_options(binds: Mapping[str, Path], shown: Mapping[str, str], folder: str) -> list[str]:
    """Return bwrap options.

    `binds` (writable) and `shown` (readable) are keyed by path in the sandbox.
    """
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in SYSTEM:
        if Path(path).is_symlink():
            options += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            options += ["--ro-bind", path, path]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for place, source in binds.items():
        options += ["--bind", str(source), place]
    seen = list(SYSTEM)
    for place, path in shown.items():
        if not any(Path(place).is_relative_to(each) for each in seen):
            options += ["--ro-bind", path, place]
            seen.append(place)
    # root and /dev are in memory
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]


def find_sandbox(config: GeneratorConfig, command: Sequence[str]) -> Sandbox | None:
    """Raises ConfigError if bubblewrap fails here."""
    if config.sandbox == "none":
        return None
    try:
        subprocess.run(TRIAL, capture_output=True, timeout=60.0, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip()
        raise ConfigError(
            f"generator.sandbox=bubblewrap: {error} {why[:300]}",
            rule="commands need the sandbox of the config",
            way_out="install bubblewrap (apt-get install bubblewrap), or set generator.sandbox=none.",
        ) from error
    paths = [str(Path(path).absolute()) for path in config.sandbox_paths]
    paths += [part for part in command if part.startswith("/") and is_file(part)]
    return Sandbox(tuple(dict.fromkeys(paths)), (config.max_memory_mb or 0) * 2**20)


class Forwarder:
    """Forward connections from the sandbox to the gateway."""

    def __init__(self, base_url: str) -> None:
        self._gateway = urlsplit(base_url)
        self.inner_url = f"http://127.0.0.1:{PORT}{self._gateway.path}"
        self._ours, self.their_end = socket.socketpair()
        self._ours.setblocking(False)
        self._server: asyncio.Server | None = None
        self._forwarding: set[asyncio.Task[Any]] = set()

    async def wait_open(self) -> None:
        """Serve the sandbox's socket; return early if the sandbox ended."""
        self.their_end.close()
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._ours, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._ours)
        _, fds, _, _ = socket.recv_fds(self._ours, 1, 1)
        if fds:
            self._server = await asyncio.start_server(self._forward, sock=socket.socket(fileno=fds[0]))

    async def aclose(self) -> None:
        self.their_end.close()
        self._ours.close()
        if self._server is not None:
            self._server.close()
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forwarding.add(task)
        ends = [writer]
        is_tls = self._gateway.scheme == "https"
        port = self._gateway.port or (443 if is_tls else 80)
        try:
            answers, far = await asyncio.open_connection(self._gateway.hostname, port, ssl=is_tls or None)
            ends.append(far)
            await asyncio.gather(_pump(reader, far), _pump(answers, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone
        finally:
            self._forwarding.discard(task)
            for end in ends:
                end.transport.abort() if end.transport.get_write_buffer_size() else end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(2**16):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()
