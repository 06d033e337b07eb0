"""The client half of every internal server: one HTTP call with the run's secret. Knows no room and no message but ErrorBody."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from asyncrl.wire import ErrorBody

Answer = TypeVar("Answer", bound=BaseModel)


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
        try:
            if response.status >= 400:
                raise CallRefused(self.name, path, response.status, ErrorBody.model_validate_json(text))
            return answer.model_validate_json(text)
        except ValidationError as error:
            shown = text[:200].decode(errors="replace")
            raise CallLost(self.name, path, f"status {response.status} with a body that is no {answer.__name__}: {shown}") from error

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
