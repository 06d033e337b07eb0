"""The server half of every child process: one app on an inherited socket. Knows no room and no message but ErrorBody.

A child is started as `python -m MODULE --spec FILE --fd N`: FILE is its own JSON spec, N a socket that the parent
has bound and listens on already (so no port is ever raced for). Standard input is a pipe that the parent holds open: its first
line has the secrets (whoever runs as the same user can read the environment of a process, as a command of a harness does); its end
means that the parent is gone, however it went, and the child exits. A child without such a line has SECRET_ENV in its environment.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import hmac
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from asyncrl.wire import SECRET_ENV, ErrorBody, fatal_line


class Refused(Exception):  # noqa: N818  an answer, not a crash of the server
    """Answer this one request with `status` and an ErrorBody."""

    def __init__(self, status: int, error: str, *, rule: str = "", way_out: str = "") -> None:
        self.status, self.body = status, ErrorBody(error=error, rule=rule, way_out=way_out)
        super().__init__(error)


def child_arguments() -> tuple[str, int]:
    """(text of the spec file, number of the inherited socket) of a child process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--fd", required=True, type=int)
    arguments = parser.parse_args()
    return Path(arguments.spec).read_text(encoding="utf-8"), arguments.fd


def secret_of(name: str) -> str:
    """The secret of this name that the parent gave; else what the environment says. Ends this child if there is none."""
    secret = _told_secrets().get(name) or os.environ.get(name)
    if not secret:
        fail(f"no {name} is given", rule="a child has its secrets from its parent", way_out="start it through asyncrl.")
    return secret


@functools.lru_cache(maxsize=1)
def _told_secrets() -> dict[str, str]:
    """First line of standard input, as ChildProcess writes it."""
    if SECRET_ENV in os.environ:
        return {}
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    secrets: dict[str, str] = json.loads(line) if line.endswith(b"\n") else {}  # else the parent is gone already
    return secrets


def fail(error: str, *, rule: str = "", way_out: str = "") -> NoReturn:
    """End this child with an error that the parent can show: what failed, the rule, the way out."""
    print(fatal_line(ErrorBody(error=error, rule=rule, way_out=way_out)), file=sys.stderr, flush=True)
    raise SystemExit(1)


def die_with_parent(on_orphaned: Callable[[], None] = lambda: None) -> None:
    """Exit as soon as standard input ends. Call it first thing, before anything slow is loaded.

    From here on SIGUSR1 has the stacks of all threads written to standard error, which is this child's log: the watchdog's question.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    _told_secrets()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        try:
            on_orphaned()
        finally:
            os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def make_app() -> FastAPI:
    """An app without docs pages, whose every error is an ErrorBody."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse(error.body.model_dump(), status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        body = ErrorBody(error=f"{'.'.join(map(str, first['loc']))}: {first['msg']}", rule="see asyncrl/wire for the message")
        return JSONResponse(body.model_dump(), status_code=422)

    return app


class _BearerOnly:
    """Lets a request through only with the run's secret."""

    def __init__(self, app: Any, secret: str) -> None:
        self.app, self.expected = app, f"Bearer {secret}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                body = ErrorBody(error="wrong or missing bearer token", rule="internal servers answer to the run that started them alone")
                await JSONResponse(body.model_dump(), status_code=401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def serve(app: FastAPI, fd: int) -> None:
    """Serve on the inherited socket until SIGTERM. Returns after a clean shutdown."""
    config = uvicorn.Config(
        _BearerOnly(app, secret_of(SECRET_ENV)),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    # uvicorn's own `fd` option takes the socket for a Unix one: asyncio then leaves Nagle's algorithm on, and every answer
    # waits some 40 ms for a delayed acknowledgement. A socket object that knows its family has no such wait.
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])
