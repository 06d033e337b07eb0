"""Client side of internal calls with the run's secret (serving.py)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncGenerator
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from asyncrl.base.message import ErrorBody

OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""This machine is out of file descriptors."""
Body = BaseModel | bytes | None
Answer = TypeVar("Answer", bound=BaseModel)


class CallRefused(Exception):  # noqa: N818  an answer
    """An error status: `status` and its ErrorBody as `body`."""

    def __init__(self, server: str, path: str, status: int, body: ErrorBody) -> None:
        self.server, self.path, self.status, self.body = server, path, status, body
        super().__init__(f"{server} answered {status} to {path}: {body.error}")


class CallLost(Exception):  # noqa: N818  a state of the call
    """No usable answer: refused or broken connection, timeout, or an invalid body."""

    def __init__(self, server: str, path: str, why: str) -> None:
        self.server, self.path, self.why = server, path, why
        super().__init__(f"{server} gave no answer to {path}: {why}")


class CallGarbled(CallLost):
    """The server answered with an invalid body."""

    def __init__(self, server: str, path: str, why: str, *, status: int = 200, text: bytes = b"") -> None:
        self.status, self.text = status, text
        super().__init__(server, path, why)


class FrameSocket:
    """WebSocket of byte frames. Raises CallLost if broken."""

    def __init__(self, server: str, path: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server, self._path, self._socket = server, path, socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send_bytes(frame)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error

    async def receive(self) -> bytes:
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise self._lost(f"the connection ended ({message.type.name.lower()}: {message.extra or ''})")
        data: bytes = message.data
        return data

    async def close(self) -> None:
        await self._socket.close()

    def _lost(self, why: str) -> CallLost:
        return CallLost(self._server, self._path, why)


class Caller:
    """Calls one server at `url`. Connections stay open until aclose()."""

    def __init__(self, name: str, url: str, secret: str) -> None:
        self.name = name
        self.url = url
        self.secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET. Raises CallRefused or CallLost. `timeout_s` None: until the server answers or is gone."""
        return await self._call("GET", path, None, answer, timeout_s)

    async def post(self, path: str, body: Body, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """POST a message as JSON, or bytes. Raises CallRefused or CallLost."""
        return await self._call("POST", path, body, answer, timeout_s)

    async def _call(
        self, method: str, path: str, body: Body, answer: type[Answer], timeout_s: float | None
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s), await self._begin(method, path, body) as response:
                text = await response.read()
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status < 400:
            with contextlib.suppress(ValidationError):
                return answer.model_validate_json(text)
        raise self._refusal(path, response.status, text, answer)

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        """POST a message and yield lines of the answer as they arrive. Raises CallRefused, CallLost. To
        stop early, close the generator.
        """
        try:
            async with await self._begin("POST", path, body) as response:
                if response.status >= 400:
                    raise self._refusal(path, response.status, await response.read(), ErrorBody)
                rest = b""
                while read := await response.content.readany():
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        yield line
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error

    async def connect(self, path: str) -> FrameSocket:
        """Open a WebSocket. Raises CallLost."""
        try:
            return FrameSocket(
                self.name, path, await self._open().ws_connect(self.url + path, max_msg_size=0)
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error

    async def _begin(self, method: str, path: str, body: Body) -> aiohttp.ClientResponse:
        data = body.model_dump_json().encode() if isinstance(body, BaseModel) else body
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        headers = {"content-type": f"application/{kind}"}
        return await self._open().request(method, self.url + path, data=data, headers=headers)

    def _lost(self, path: str, error: aiohttp.ClientError | OSError) -> CallLost | OSError:
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
            return OSError(error.errno, error.strerror)
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
                headers={"Authorization": f"Bearer {self.secret}"},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                trust_env=False,
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
