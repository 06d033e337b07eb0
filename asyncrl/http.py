"""The client's half of an internal call: a Caller calls one server with the run's secret (serving.py)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from asyncrl.errors import ConnectionShortage
from asyncrl.messages.base import ErrorBody
from asyncrl.waits import TimeLimit

log = logging.getLogger("asyncrl.http")

OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of this machine, which say nothing of the server that was to be called."""
SHORT_S, RETRY_S = 60.0, 0.5
"""For how long, and how often, a call retries to open a connection after such an error."""
Body = BaseModel | bytes | None
Answer = TypeVar("Answer", bound=BaseModel)
Begun = TypeVar("Begun")


class CallRefused(Exception):  # noqa: N818  the server is well, it says no
    """The server answered with an error status: `status` and its ErrorBody as `body`."""

    def __init__(self, server: str, path: str, status: int, body: ErrorBody) -> None:
        self.server, self.path, self.status, self.body = server, path, status, body
        super().__init__(f"{server} answered {status} to {path}: {body.error}")


class CallLost(Exception):  # noqa: N818  nothing, or nonsense, came back
    """No usable answer: refused or broken connection, the time limit, or a body that is not the message."""

    def __init__(self, server: str, path: str, why: str) -> None:
        self.server, self.path, self.why = server, path, why
        super().__init__(f"{server} gave no answer to {path}: {why}")


class CallGarbled(CallLost):
    """The server answered with a body that is not the message: it is broken, or has messages of its own, for
    which `status` and `text` are kept.
    """

    def __init__(self, server: str, path: str, why: str, *, status: int = 200, text: bytes = b"") -> None:
        self.status, self.text = status, text
        super().__init__(server, path, why)


def out_of(what: str, number: int) -> ConnectionShortage:
    """The error for what failed, with the resource that ran out. It opens no descriptor to find the
    limits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rule, way_out = {
        errno.EMFILE: (
            f"this process has all its {soft} descriptors open (RLIMIT_NOFILE; {hard} is the hard limit)",
            "raise the limit of open files, or lower rollout.slots or gateway.max_connections",
        ),
        errno.ENFILE: (
            "the machine has fs.file-max files open",
            "raise it, or end the process that holds them",
        ),
        errno.EADDRNOTAVAIL: (
            "no port of net.ipv4.ip_local_port_range is left for this address, or no host has it",
            "widen that range, lower rollout.slots, or correct the address",
        ),
    }.get(number, ("the kernel has no memory for it", "free memory on this machine"))
    what, way_out = f"{what}: {os.strerror(number)}", f"{way_out}, and go on with this run."
    return ConnectionShortage("controller", what, rule=rule, way_out=way_out)


class FrameSocket:
    """Frames of bytes to and from a server. Each use of a broken one raises CallLost."""

    def __init__(self, server: str, path: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server, self._path, self._socket = server, path, socket

    async def send(self, frame: bytes) -> None:
        """Returns when the frame is on its way."""
        try:
            await self._socket.send_bytes(frame)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error

    async def receive(self) -> bytes:
        """The next frame."""
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise self._lost(f"the connection ended ({message.type.name.lower()}: {message.extra or ''})")
        data: bytes = message.data
        return data

    async def close(self) -> None:
        """Idempotent."""
        await self._socket.close()

    def _lost(self, why: str) -> CallLost:
        return CallLost(self._server, self._path, why)


class Caller:
    """Calls one server at `url` (http://127.0.0.1:PORT). Opens connections on first use, until aclose().

    `short_s`: for how long it tries to open a connection after an error of OURS. It must be less than the
    limits of its callers, which would blame the server.
    """

    def __init__(self, name: str, url: str, secret: str, *, short_s: float = SHORT_S) -> None:
        self.name, self.url, self._secret, self.short_s = name, url, secret, short_s
        self._session: aiohttp.ClientSession | None = None
        self._warned_s: float | None = None

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET; raises CallRefused, CallLost or ConnectionShortage. `timeout_s` None waits until the server
        answers or is gone.
        """
        return await self._call("GET", path, None, answer, timeout_s)

    async def post(self, path: str, body: Body, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """POST a message (JSON) or bytes (octet-stream); raises CallRefused or CallLost."""
        return await self._call("POST", path, body, answer, timeout_s)

    async def _call(
        self, method: str, path: str, body: Body, answer: type[Answer], timeout_s: float | None
    ) -> Answer:
        short_of: set[int] = set()
        try:
            async with TimeLimit(timeout_s):
                async with await self._begin(method, path, body, short_of) as response:
                    text = await response.read()
        except TimeoutError:
            if short_of:
                raise self._shortage(short_of.pop()) from None
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status < 400:
            with contextlib.suppress(ValidationError):
                return answer.model_validate_json(text)
        raise self._refusal(path, response.status, text, answer)

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        """POST a message; yields the whole lines of the answer as they come. Raises CallRefused for an error
        status, CallLost if the answer breaks off. Close it (contextlib.aclosing) to leave before the end:
        that breaks the connection.
        """
        try:
            async with await self._begin("POST", path, body, set()) as response:
                if response.status >= 400:
                    raise self._refusal(path, response.status, await response.read(), ErrorBody)
                rest = b""
                while read := await response.content.readany():
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        yield line
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error

    async def _begin(self, method: str, path: str, body: Body, short_of: set[int]) -> aiohttp.ClientResponse:
        """The answer's head."""
        data = body.model_dump_json().encode() if isinstance(body, BaseModel) else body
        headers = {"content-type": f"application/{'octet-stream' if isinstance(body, bytes) else 'json'}"}
        request = functools.partial(self._open().request, method, self.url + path, data=data, headers=headers)
        return await self._connected(request, short_of)

    async def connect(self, path: str) -> FrameSocket:
        """A WebSocket to `path`. Raises CallLost or ConnectionShortage."""
        begin = functools.partial(self._open().ws_connect, self.url + path, max_msg_size=0)
        try:
            return FrameSocket(self.name, path, await self._connected(begin, set()))
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error

    async def _connected(self, begin: Callable[[], Awaitable[Begun]], short_of: set[int]) -> Begun:
        """What `begin` gives. Descriptors and ports come back when other calls end, so it tries for short_s,
        with what is lacking in `short_of`; then raises ConnectionShortage.
        """
        clock, since_s = asyncio.get_running_loop().time, 0.0
        while True:
            try:
                begun = await begin()
            except aiohttp.ClientConnectorError as error:  # so nothing was sent
                if error.errno not in OURS:
                    raise
                since_s = since_s or clock()
                if clock() - since_s >= self.short_s:
                    raise self._shortage(error.errno) from error
                self._warn_of_shortage(error.errno)
                short_of.add(error.errno)
            else:
                short_of.clear()
                return begun
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))

    def _shortage(self, number: int) -> ConnectionShortage:
        return out_of(f"cannot open a connection to {self.name}, which may be well", number)

    def _warn_of_shortage(self, number: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._warned_s is None or now_s - self._warned_s > self.short_s:
            self._warned_s = now_s
            log.warning("%s It is tried again for %g s.", self._shortage(number), self.short_s)

    def _lost(self, path: str, error: aiohttp.ClientError | OSError) -> CallLost | ConnectionShortage:
        if isinstance(error, OSError) and error.errno in OURS:
            return self._shortage(error.errno)
        return CallLost(self.name, path, f"{type(error).__name__}: {error}")

    def _refusal(
        self, path: str, status: int, text: bytes, answer: type[BaseModel]
    ) -> CallRefused | CallGarbled:
        if status >= 400:
            with contextlib.suppress(ValidationError):
                return CallRefused(self.name, path, status, ErrorBody.model_validate_json(text))
        shown = text[:200].decode(errors="replace")
        why = f"status {status} with a body that is no {answer.__name__}: {shown}"
        return CallGarbled(self.name, path, why, status=status, text=text)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._secret}"},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                trust_env=False,
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None
