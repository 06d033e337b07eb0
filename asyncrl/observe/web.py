"""Read-only HTTP servers: the status port and `asyncrl watch`."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from asyncrl.base.errors import ConfigError

MAX_CONNECTIONS = 64
IDLE_S = 75.0
"""Idle limit of connections."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def bind(host: str, port: int, setting: str) -> tuple[socket.socket, str]:
    """Take a port (0: any). Raises ConfigError."""
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        way_out = "give an address of this machine and a free port; port 0 takes any."
        raise ConfigError(f"cannot listen on {setting}: {error}", way_out=way_out) from error
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return listening, f"http://{name}:{listening.getsockname()[1]}"


def make_app(routes: Mapping[str, Callable[[Request], Awaitable[Response]]], key: str | None) -> FastAPI:
    """Serve GET requests that have `key` as bearer token or in ?key=.

    Without a key, only requests with a loopback host are served, so that no page of another site can read
    the answers.
    """
    app = FastAPI(openapi_url=None)

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        if key is None and not is_local(request.headers.get("host", "")):
            return PlainTextResponse("Use 127.0.0.1 or localhost as the host.\n", 403)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.query_params.get("key") or bearer).encode(errors="replace")
        if key is not None and not hmac.compare_digest(given, key.encode()):
            return PlainTextResponse("Wrong or missing key.\n", 401)
        response = await answer(request)
        response.headers.update(_HEADERS)
        return response

    app.middleware("http")(guard)
    for path, endpoint in routes.items():
        app.add_route(path, endpoint, methods=["GET"])
    return app


def is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}" if host.count(":") < 2 or "[" in host else f"//[{host}]").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
