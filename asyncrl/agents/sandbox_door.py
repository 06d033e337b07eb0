"""The one address that a command in a sandbox can reach, and what watches its memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

DOOR_PORT = 8700
"""Where the gateway is found in a sandbox."""
MAX_CONNECTIONS = 64
"""Of one command at once; one more is closed."""
_CHUNK_BYTES = 2**16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FRESH_S = 0.5


class Door:
    """Forwards what connects to a listening socket, which comes from inside a sandbox, to one address.

    Life: made, with `their_end` for the sandbox -> wait_open() -> connections come and go -> aclose().
    Waits: wait_open until the socket came or the sandbox has ended; aclose until its connections are closed.
    Invariant: connects to the gateway alone; MAX_CONNECTIONS at most.
    """

    def __init__(self, base_url: str) -> None:
        """`base_url`: of the gateway; its scheme, host and port count."""
        parts = urlsplit(base_url)
        is_tls = parts.scheme == "https"
        self._to: dict[str, Any] = {"host": parts.hostname, "port": parts.port or (443 if is_tls else 80)}
        self._to |= {"ssl": True} if is_tls else {}
        self.inner_url = f"http://127.0.0.1:{DOOR_PORT}{parts.path}"
        """The same address, for a program in the sandbox."""
        self._ours, self.their_end = socket.socketpair()
        self._ours.setblocking(False)
        self._server: asyncio.Server | None = None
        self._forwarding: set[asyncio.Task[Any]] = set()

    async def wait_open(self) -> bool:
        """Take the sandbox's socket; False if the sandbox ended without one. `their_end` is closed."""
        self.their_end.close()
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._ours, lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._ours)
        _, fds, _, _ = socket.recv_fds(self._ours, 1, 1)
        if not fds:
            return False
        self._server = await asyncio.start_server(self._forward, sock=socket.socket(fileno=fds[0]))
        return True

    async def aclose(self) -> None:
        """Close it and its connections."""
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
        is_full, ends = len(self._forwarding) >= MAX_CONNECTIONS, [writer]
        self._forwarding.add(task)
        try:
            if not is_full:
                answers, far = await asyncio.open_connection(**self._to)
                ends.append(far)
                await asyncio.gather(_pump(reader, far), _pump(answers, writer))
        except (OSError, asyncio.CancelledError):
            pass  # either end is gone, and so is the other; or the rollout has ended
        finally:
            self._forwarding.discard(task)
            for end in ends:
                end.transport.abort() if end.transport.get_write_buffer_size() else end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()


class ProcessReadings:
    """How many processes descend from one, and their memory; read for all commands of a worker at once.

    Invariant: what it says is _FRESH_S old at most.
    """

    def __init__(self) -> None:
        self._read_s = float("-inf")
        self._children: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}

    def of(self, root: int) -> tuple[int, int]:
        """(processes, resident bytes) of this one and all that descend from it; what they share counts in
        each.
        """
        if time.monotonic() - self._read_s > _FRESH_S:
            self._read()
        family = [root]
        for pid in family:
            family += self._children.get(pid, [])
        return len(family), sum(self._bytes.get(pid, 0) for pid in family)

    def _read(self) -> None:
        self._children, self._bytes, self._read_s = {}, {}, time.monotonic()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError):  # it is gone
                    fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                    self._children.setdefault(int(fields[1]), []).append(int(entry.name))
                    self._bytes[int(entry.name)] = int(fields[21]) * _PAGE_BYTES
