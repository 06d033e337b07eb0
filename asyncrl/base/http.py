"""Internal calls with the run's secret: the caller, and a child process that serves an
app.

A child is started as `python -m MODULE --spec FILE --fd N`, with a JSON spec and the
parent's listening socket. Standard input is a pipe whose first line has the secrets, or
else SECRET_ENV; when it ends, the child exits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import hmac
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar, get_type_hints

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

from asyncrl.base.errors import ErrorBody, fatal_line, first_fault
from asyncrl.base.host import leave_process
from asyncrl.base.signals import END, STACKS, call_at, ignore_stops
from asyncrl.base.waits import within

log = logging.getLogger("asyncrl.base.http")
SECRET_ENV = "ASYNCRL_SECRET"
WORKER_KEY_ENV = "ASYNCRL_WORKER_KEY"
"""Environment variable with the worker key, since command lines are public."""
SECRETS = re.compile(r"ASYNCRL_(SECRET|\w+_KEY)|RAY_AUTH_TOKEN")
"""Environment variables that children get through standard input: /proc shows
environments.
"""
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

    def __init__(
        self, server: str, path: str, why: str, *, status: int = 200, text: bytes = b""
    ) -> None:
        self.status, self.text = status, text
        super().__init__(server, path, why)


@contextlib.contextmanager
def _lost(server: str, path: str) -> Iterator[None]:
    """Raise CallLost for a broken connection."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise CallLost(server, path, f"{type(error).__name__}: {error}") from error


class FrameSocket:
    """WebSocket of byte frames. Raises CallLost if broken."""

    def __init__(
        self, server: str, path: str, socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        self._server, self._path, self._socket = server, path, socket

    async def send(self, frame: bytes) -> None:
        with _lost(self._server, self._path):
            await self._socket.send_bytes(frame)

    async def receive(self) -> bytes:
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            # A close has its reason in `extra`; an error is in `data`.
            detail = message.extra or message.data or ""
            raise CallLost(
                self._server,
                self._path,
                f"the connection ended ({message.type.name.lower()}: {detail})",
            )
        data: bytes = message.data
        return data

    async def close(self) -> None:
        await self._socket.close()


class Caller:
    """Calls one server at `url`. Connections stay open until aclose()."""

    def __init__(self, name: str, url: str, secret: str) -> None:
        self.name = name
        self.url = url
        self.secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, path: str, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        """GET. Raises CallRefused or CallLost. `timeout_s` None: until the server
        answers or is gone.
        """
        return await self._call("GET", path, None, answer, timeout_s)

    async def post(
        self, path: str, body: Body, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        """POST a message as JSON, or bytes. Raises CallRefused or CallLost."""
        return await self._call("POST", path, body, answer, timeout_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: Body,
        answer: type[Answer],
        timeout_s: float | None,
    ) -> Answer:
        text = await self.read(method, path, body, timeout_s)
        with contextlib.suppress(ValidationError):
            return answer.model_validate_json(text)
        raise self._refusal(path, 200, text, answer)

    async def read(
        self, method: str, path: str, body: Body, timeout_s: float | None
    ) -> bytes:
        """Return the body of an answer, such as plain text. Raises CallRefused or
        CallLost.
        """
        # The limit is outside of _lost(): asyncio.timeout raises a TimeoutError, which
        # is an OSError, and _lost() would report it as a broken connection.
        async with within(
            timeout_s,
            lambda: CallLost(self.name, path, f"no answer within {timeout_s} s"),
        ):
            with _lost(self.name, path):
                async with await self._begin(method, path, body) as response:
                    text = await response.read()
        if response.status >= 400:
            raise self._refusal(path, response.status, text)
        return text

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        """POST a message and yield lines of the answer as they arrive. Raises
        CallRefused, CallLost. To stop early, close the generator.
        """
        with _lost(self.name, path):
            async with await self._begin("POST", path, body) as response:
                if response.status >= 400:
                    text = await response.read()
                    raise self._refusal(path, response.status, text)
                rest = b""
                while read := await response.content.readany():
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        yield line

    async def connect(self, path: str) -> FrameSocket:
        """Open a WebSocket. Raises CallLost."""
        with _lost(self.name, path):
            # 0: no limit. Otherwise aiohttp closes the link at a frame above 4 MiB.
            socket = await self._open().ws_connect(self.url + path, max_msg_size=0)
        return FrameSocket(self.name, path, socket)

    async def _begin(
        self, method: str, path: str, body: Body
    ) -> aiohttp.ClientResponse:
        data = body.model_dump_json().encode() if isinstance(body, BaseModel) else body
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        headers = {"content-type": f"application/{kind}"}
        return await self._open().request(
            method, self.url + path, data=data, headers=headers
        )

    def _refusal(
        self, path: str, status: int, text: bytes, answer: type[BaseModel] = ErrorBody
    ) -> CallRefused | CallGarbled:
        if status >= 400:
            with contextlib.suppress(ValidationError):
                return CallRefused(
                    self.name, path, status, ErrorBody.model_validate_json(text)
                )
        shown = text[:200].decode(errors="replace")
        return CallGarbled(
            self.name,
            path,
            f"status {status} with a body that is not {answer.__name__}: {shown}",
            status=status,
            text=text,
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.secret}"},
                # Limits are the callers', by within(): aiohttp's default would end each
                # call after five minutes, for example a long optimizer step. limit=0:
                # by default only 100 requests run at once, and the others would wait
                # here, invisible to the engines.
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                trust_env=False,
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class Refused(Exception):  # noqa: N818  an answer, not a crash of the server
    """Answers a request with `status` and an ErrorBody."""

    def __init__(
        self, status: int, error: str, *, rule: str = "", way_out: str = ""
    ) -> None:
        self.status = status
        self.body = ErrorBody(error=error, rule=rule, way_out=way_out)
        super().__init__(error)


def child_arguments() -> tuple[str, int]:
    """Return (spec text, number of the inherited socket)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--fd", required=True, type=int)
    arguments = parser.parse_args()
    return Path(arguments.spec).read_text(encoding="utf-8"), arguments.fd


def secret_of(name: str) -> str:
    """Return a secret from the parent or the environment. Ends this child without one."""
    secret = _secrets_from_parent().get(name) or os.environ.get(name)
    return secret or fail(
        f"its parent has not passed {name}", way_out="start it through asyncrl."
    )


@functools.lru_cache(maxsize=1)
def _secrets_from_parent() -> dict[str, str]:
    # Started by hand: standard input may be a terminal.
    if SECRET_ENV in os.environ:
        return {}
    # Unbuffered, and only to the end of the line: the pipe stays open, and its
    # end-of-file belongs to the thread of die_with_parent().
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    secrets: dict[str, str] = json.loads(line or b"{}")  # the parent is gone already
    return secrets


def fail(error: str, *, rule: str = "", way_out: str = "") -> NoReturn:
    """End this child with an error for the parent."""
    print(
        fatal_line(ErrorBody(error=error, rule=rule, way_out=way_out)),
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(1)


def die_with_parent(
    on_orphaned: Callable[[], None] = lambda: None,
    shield: Callable[[], None] = ignore_stops,
) -> None:
    """Exit when standard input ends, or by END; dump stacks on STACKS. Call it before
    any slow import. `shield` keeps signals to all processes from ending this one.
    """
    faulthandler.register(STACKS, all_threads=True)
    shield()
    # Before the thread starts, which would swallow the line. The result is cached.
    _secrets_from_parent()

    def watch() -> None:
        # A thread that does not block it dumps the stacks of all threads.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS])
        while os.read(0, 4096):
            pass
        try:
            on_orphaned()
        finally:
            # SystemExit would end only this thread. This also works while the main
            # thread is in a CUDA call or a collective that never returns.
            leave_process(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def words_of(error: Exception) -> ErrorBody:
    return ErrorBody(
        error=f"{type(error).__name__}: {error}", way_out="see this server's log."
    )


def make_app(
    secret: str, *, words: Callable[[Exception], ErrorBody] = words_of
) -> web.Application:
    """Return an app protected by the secret, with ErrorBody for every error; `words`
    describes unexpected ones.
    """
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode(errors="replace")
        # In constant time: the duration of == shows how many first characters are
        # right.
        if not hmac.compare_digest(given, expected):
            fault = ErrorBody(
                error="wrong or missing bearer token", rule="it is the run's own server"
            )
            return json_answer(fault, 401)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except Refused as refusal:
            return json_answer(refusal.body, refusal.status)
        except web.HTTPException as error:
            fault = ErrorBody(error=f"{request.method} {request.path}: {error.reason}")
            return json_answer(fault, error.status)
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return json_answer(words(error), 500)

    # aiohttp refuses bodies above 1 MiB by default. A batch is larger, and callers have
    # the secret.
    return web.Application(middlewares=[guard], client_max_size=2**40)


def add_route(
    app: web.Application,
    method: str,
    path: str,
    act: Callable[..., Awaitable[BaseModel]],
) -> None:
    """Answer with the result of `act` as JSON. Its first parameter, if any, is the
    body.
    """
    kinds = [kind for name, kind in get_type_hints(act).items() if name != "return"]

    async def handle(request: web.Request) -> web.Response:
        if not kinds:
            return json_answer(await act())
        text = await request.read()
        return json_answer(
            await act(text if kinds[0] is bytes else read_message(kinds[0], text))
        )

    app.router.add_route(method, path, handle)


def read_message(kind: type[Answer], text: bytes) -> Answer:
    """Parse a message. Raises Refused (422) with the first wrong field."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Refused(
            422, f"body: {first_fault(error)}", rule="see asyncrl/messages"
        ) from error


def json_answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(
        text=body.model_dump_json(), status=status, content_type="application/json"
    )


def serve(app: web.Application, fd: int, *, ends_at_once: bool = False) -> None:
    """Serve on the inherited socket until END. `ends_at_once`: without cleanup."""
    # each connection is an open file
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    loop = asyncio.new_event_loop()
    if not ends_at_once:
        call_at(END, _end_serving, loop)
    web.run_app(
        app,
        # A socket object detects its family. If the server took the descriptor for a
        # Unix socket, Nagle's algorithm would stay on, and each answer would wait 40 ms
        # for a delayed acknowledgement (docs/decisions/0003).
        sock=socket.socket(fileno=fd),
        handle_signals=False,
        shutdown_timeout=1.0,
        # Longer than the caller's 30 s, so that the caller closes idle connections. If
        # the server did, a request could meet the closing connection and be lost.
        keepalive_timeout=75.0,
        access_log=None,
        print=None,
        loop=loop,
    )


def _end_serving() -> NoReturn:
    raise web.GracefulExit
