"""The client half of every internal server: one HTTP call with the run's secret. Knows no room and no message but ErrorBody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from asyncrl.wire import ErrorBody

Answer = TypeVar("Answer", bound=BaseModel)
Part = TypeVar("Part", bound=BaseModel)


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
    """The server answered, with a body that is not the message: it lives, and is broken; or it has messages of its own.

    `status` and `text` of the answer, for whoever knows those.
    """

    def __init__(self, server: str, path: str, why: str, *, status: int = 200, text: bytes = b"") -> None:
        self.status, self.text = status, text
        super().__init__(server, path, why)


class Caller:
    """Calls one server at `url` (http://127.0.0.1:PORT). Life: open until aclose(); opens its connections on first use."""

    def __init__(self, name: str, url: str, secret: str) -> None:
        self.name, self.url, self._secret = name, url, secret
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<Caller {self.name} {self.url}>"

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET; raises CallRefused or CallLost. `timeout_s` None waits until the server answers or is gone."""
        return await self._call("GET", path, None, answer, timeout_s)

    async def post(self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """POST a message (JSON) or bytes (octet-stream); raises CallRefused or CallLost."""
        return await self._call("POST", path, body, answer, timeout_s)

    async def _call(self, method: str, path: str, body: BaseModel | bytes | None, answer: type[Answer], timeout_s: float | None) -> Answer:
        data = body.model_dump_json().encode() if isinstance(body, BaseModel) else body
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().request(method, self.url + path, data=data, headers={"content-type": kind}) as response:
                    text = await response.read()
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(self.name, path, f"{type(error).__name__}: {error}") from error
        if response.status >= 400:
            raise self._refusal(path, response.status, text, answer)
        try:
            return answer.model_validate_json(text)
        except ValidationError as error:
            raise self._garbled(path, response.status, text, answer) from error

    async def stream(self, path: str, body: BaseModel, part: type[Part], last: type[Answer]) -> AsyncGenerator[Part | Answer, None]:
        """POST a message; yields the lines of the answer as they come: any number of `part`, then one `last`, and then ends.

        Raises CallRefused for an error status and for a last line ErrorBody (status 500), CallLost if the answer breaks off before
        its last line, CallGarbled for a line that is none of these. Close it (contextlib.aclosing) to leave before the end: that
        breaks the connection.
        """
        async with contextlib.aclosing(self.lines(path, body)) as lines:
            async for line in lines:
                message = self._line(path, line, part, last)
                yield message
                if isinstance(message, last):
                    with contextlib.suppress(CallLost):
                        await anext(lines, None)  # to the end of the body: the connection can be used again
                    return
        raise CallLost(self.name, path, "the answer broke off before its last line")

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        """POST a message; yields the whole lines of the answer as they come. Raises and is closed like stream()."""
        data, headers = body.model_dump_json().encode(), {"content-type": "application/json"}
        try:
            async with self._open().request("POST", self.url + path, data=data, headers=headers) as response:
                if response.status >= 400:
                    raise self._refusal(path, response.status, await response.read(), ErrorBody)
                rest = b""
                while read := await response.content.readany():
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        yield line
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(self.name, path, f"{type(error).__name__}: {error}") from error

    def _line(self, path: str, line: bytes, part: type[Part], last: type[Answer]) -> Part | Answer:
        for message in (part, last):
            with contextlib.suppress(ValidationError):
                return message.model_validate_json(line)
        raise self._refusal(path, 500, line, last)

    def _refusal(self, path: str, status: int, text: bytes, answer: type[BaseModel]) -> CallRefused | CallGarbled:
        try:
            return CallRefused(self.name, path, status, ErrorBody.model_validate_json(text))
        except ValidationError:
            return self._garbled(path, status, text, answer)

    def _garbled(self, path: str, status: int, text: bytes, answer: type[BaseModel]) -> CallGarbled:
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
