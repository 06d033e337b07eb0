"""Server side of internal calls: a child process serves an app on an inherited socket (http.Caller).

A child is started as `python -m MODULE --spec FILE --fd N`, with a JSON spec and the parent's listening
socket. Standard input is a pipe whose first line has the secrets, or else SECRET_ENV; when it ends, the
child exits.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import hmac
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from aiohttp import web
from pydantic import BaseModel, ValidationError

from asyncrl.base.message import SECRET_ENV, ErrorBody, fatal_line

log = logging.getLogger("asyncrl.base.serving")
Body = TypeVar("Body", bound=BaseModel)


class Refused(Exception):  # noqa: N818  an answer, not a crash of the server
    """Answers a request with `status` and an ErrorBody."""

    def __init__(self, status: int, error: str, *, rule: str = "", way_out: str = "") -> None:
        self.status, self.body = status, ErrorBody(error=error, rule=rule, way_out=way_out)
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
    return secret or fail(f"its parent has not passed {name}", way_out="start it through asyncrl.")


@functools.lru_cache(maxsize=1)
def _secrets_from_parent() -> dict[str, str]:
    if SECRET_ENV in os.environ:
        return {}
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    secrets: dict[str, str] = json.loads(line or b"{}")  # the parent is gone already
    return secrets


def fail(error: str, *, rule: str = "", way_out: str = "") -> NoReturn:
    """End this child with an error for the parent."""
    print(fatal_line(ErrorBody(error=error, rule=rule, way_out=way_out)), file=sys.stderr, flush=True)
    raise SystemExit(1)


def die_with_parent(on_orphaned: Callable[[], None] = lambda: None) -> None:
    """Exit when standard input ends; dump stacks on SIGUSR1. Call it before any slow import."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _secrets_from_parent()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        try:
            on_orphaned()
        finally:
            os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def words_of(error: Exception) -> ErrorBody:
    return ErrorBody(error=f"{type(error).__name__}: {error}", way_out="see this server's log.")


def make_app(secret: str, *, words: Callable[[Exception], ErrorBody] = words_of) -> web.Application:
    """Return an app protected by the secret, with ErrorBody for every error; `words` describes unexpected
    ones.
    """
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
            body = ErrorBody(error="wrong or missing bearer token", rule="it is the run's own server")
            return json_answer(body, 401)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except Refused as refusal:
            return json_answer(refusal.body, refusal.status)
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            return json_answer(ErrorBody(error=what), error.status)
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return json_answer(words(error), 500)

    return web.Application(middlewares=[guard], client_max_size=2**40)


def add_route(app: web.Application, method: str, path: str, act: Callable[..., Awaitable[BaseModel]]) -> None:
    """Answer with the result of `act` as JSON. Its first parameter, if any, is the body."""
    kinds = [kind for name, kind in get_type_hints(act).items() if name != "return"]

    async def handle(request: web.Request) -> web.Response:
        if not kinds:
            return json_answer(await act())
        text = await request.read()
        return json_answer(await act(text if kinds[0] is bytes else read_message(kinds[0], text)))

    app.router.add_route(method, path, handle)


def read_message(kind: type[Body], text: bytes) -> Body:
    """Parse a message. Raises Refused (422) with the first wrong field."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, ('body', *first['loc'])))}: {first['msg']}"
        raise Refused(422, what, rule="see asyncrl/messages") from error


def json_answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def serve(
    app: web.Application, fd: int, *, handles_signals: bool = True, cancels_handlers: bool = False
) -> None:
    """Serve on the inherited socket, until SIGTERM with `handles_signals`."""
    web.run_app(
        app,
        sock=socket.socket(fileno=fd),
        handle_signals=handles_signals,
        handler_cancellation=cancels_handlers,
        shutdown_timeout=1.0,
        keepalive_timeout=75.0,
        access_log=None,
        print=None,
        loop=asyncio.new_event_loop(),
    )
