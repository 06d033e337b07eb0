"""Run a command in bubblewrap: read-only system files, private folders, no network
except the gateway.

The first program inside passes a listening socket to the worker, which forwards
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from asyncrl.config import GeneratorConfig

HOME = "/rollout"
PORT = 8700
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
is_file = os.path.isfile  # Path.is_file raises for a long script
ETC = (
    "alternatives ca-certificates group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf "
    "passwd pki ssl"
).split()
"""Readable files of /etc. The rest may contain secrets."""

# The sandbox has no network, only its own loopback. A listening socket keeps working
# outside: passed to the worker, it lets programs inside reach the gateway at 127.0.0.1.
# The memory limit follows, since it is for the command.
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


def _around(
    paths: Sequence[str],
    max_bytes: int,
    command: Sequence[str],
    folder: Path,
    channel: int,
) -> list[str]:
    binds = {
        HOME: folder / "work",
        "/tmp": folder / "tmp",
        "/dev/shm": folder / "shm",
    }
    shown = {path: path for path in (sys.base_prefix, sys.prefix, *paths)}
    # Isolated: modules in the command's folder must not replace the imports of this
    # program.
    first = [os.path.realpath(sys.executable), "-I", "-S", "-c", _FIRST]
    numbers = [str(channel), str(PORT), str(max_bytes)]
    return [
        "bwrap",
        *bubblewrap_options(binds, shown, HOME),
        "--",
        *first,
        *numbers,
        *command,
    ]


def bubblewrap_options(
    binds: Mapping[str, Path], shown: Mapping[str, str], folder: str
) -> list[str]:
    """Return bwrap options.

    `binds` (writable) and `shown` (readable) are keyed by path in the sandbox.
    """
    options = [
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
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
        # The mount of a parent shows it already.
        if not any(Path(place).is_relative_to(each) for each in seen):
            options += ["--ro-bind", path, place]
            seen.append(place)
    # The root and /dev are in memory, which a command must not fill.
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]


def make_sandbox(
    config: GeneratorConfig, command: Sequence[str]
) -> Callable[[Sequence[str], Path, int], list[str]] | None:
    """Return a function that puts a sandbox around a command, given its folder with
    `work`, `tmp` and `shm`, and the file descriptor that gets the socket. None: no
    sandbox.
    """
    if config.sandbox == "none":
        return None
    paths = [str(Path(path).absolute()) for path in config.sandbox_paths]
    paths += [part for part in command if part.startswith("/") and is_file(part)]
    max_bytes = (config.max_memory_mb or 0) * 2**20  # per process; 0: no limit
    return partial(_around, paths, max_bytes)


@contextlib.asynccontextmanager
async def forwarded(base_url: str) -> AsyncIterator[tuple[str, int]]:
    """Yield the gateway's address in the sandbox, and the file descriptor for
    `channel`; forward connections until the end.
    """
    gateway = urlsplit(base_url)
    ours, theirs = socket.socketpair()
    forwarding = asyncio.create_task(_forward_all(ours, gateway))
    try:
        yield f"http://127.0.0.1:{PORT}{gateway.path}", theirs.fileno()
    finally:
        theirs.close()
        forwarding.cancel()
        await asyncio.wait({forwarding})


async def _forward_all(channel: socket.socket, gateway: SplitResult) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    with channel:
        loop.add_reader(channel, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(channel)
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)  # none if the sandbox ended
    for fd in fds:
        with socket.socket(fileno=fd) as listener:
            listener.setblocking(False)
            async with asyncio.TaskGroup() as tasks:
                while True:
                    client, _ = await loop.sock_accept(listener)
                    tasks.create_task(_forward(client, gateway))


async def _forward(client: socket.socket, gateway: SplitResult) -> None:
    is_tls = gateway.scheme == "https"
    port = gateway.port or (443 if is_tls else 80)
    # Either end may close early: a program that exits, or the gateway.
    with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
        reader, writer = await asyncio.open_connection(sock=client)
        ends.callback(writer.close)
        answers, far = await asyncio.open_connection(
            gateway.hostname, port, ssl=is_tls or None
        )
        ends.callback(far.close)
        await asyncio.gather(_pump(reader, far), _pump(answers, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(2**16):
        writer.write(chunk)
        await writer.drain()
    # Half-closed: a client that has sent everything still waits for its answer.
    # asyncio's TLS has no such state.
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()
