"""`asyncrl watch`: the page of runs, live. Serves GET only; on an address other than loopback only with its
key.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from asyncrl.base.errors import AsyncrlError, ConfigError
from asyncrl.observe.page.render import make_page, page_of, render
from asyncrl.observe.page.shape import Page
from asyncrl.observe.run_dir import CONFIG_FILE

READ_SHARE = 0.2
"""Largest share of the time for reading files."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page of some runs, read again when their files have changed. A run without a config yet, or a
    deleted one, is not on it.
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self.run_dirs = run_dirs
        self.page: Page = page_of([], is_live=True)
        self._seen: Any = None
        self._next_s = 0.0
        self._reading = asyncio.Lock()

    async def newest(self) -> Page:
        """Return the page, read again if needed."""
        async with self._reading:
            began_s = time.monotonic()
            if began_s >= self._next_s:
                await asyncio.to_thread(self._read)
                now_s = time.monotonic()
                self._next_s = now_s + (now_s - began_s) / READ_SHARE
            return self.page

    def _read(self) -> None:
        there = [folder for folder in self.run_dirs if (folder / CONFIG_FILE).is_file()]
        try:
            stats = [(path, path.stat()) for folder in there for path in sorted(folder.glob("*.json*"))]
            seen = there, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
            if seen != self._seen:
                self.page = make_page(there, is_live=True)
                self._seen = seen
        except (AsyncrlError, OSError):  # a file that is replaced at this moment
            return


def make_watch_app(live: LivePage, key: str | None) -> web.Application:
    """Serve the page at /, its data at /page.json?since=TIME (204 if it is not newer). With a `key`, for
    callers with `?key=` or a bearer token; without one, for callers that name this machine as their host, so
    that no page of another site can read it.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if key is None:
            if not is_local(request.host):
                text = f"{request.host} is not this machine: use 127.0.0.1 or localhost\n"
                raise web.HTTPForbidden(text=text)
        else:
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            given = request.query.get("key") or bearer
            if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
                raise web.HTTPUnauthorized(text="wrong or missing key: use the address of the command\n")
        answer: web.StreamResponse = await handler(request)
        answer.headers.update(_HEADERS)
        return answer

    async def show(_: web.Request) -> web.Response:
        page = await live.newest()
        return web.Response(text=await asyncio.to_thread(render, page), content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        page = await live.newest()
        if request.query.get("since") == str(page["made_s"]):
            return web.Response(status=204)
        text = await asyncio.to_thread(json.dumps, page, allow_nan=False)
        return web.Response(text=text, content_type="application/json")

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", show, allow_head=False)
    app.router.add_get("/page.json", data, allow_head=False)
    return app


def is_local(host: str) -> bool:
    """Return whether HOST or HOST:PORT is a name or an address of the loopback interface."""
    try:
        name = urlsplit(f"//{host}" if host.count(":") < 2 or "[" in host else f"//[{host}]").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def watch(
    run_dirs: Sequence[Path], host: str, port: int, *, opens: bool, say: Callable[[str], None] = print
) -> int:
    """Serve the page until Ctrl-C or SIGTERM; return 0. Raises ConfigError if the port is not free."""
    asyncio.run(_serve(run_dirs, host, port, opens, say))
    return 0


async def _serve(
    run_dirs: Sequence[Path], host: str, port: int, opens: bool, say: Callable[[str], None]
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    key = None if is_local(host) else secrets.token_hex(24)
    runner = web.AppRunner(make_watch_app(LivePage(run_dirs), key), access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        url = f"http://{name}:{runner.addresses[0][1]}/{f'?key={key}' if key else ''}"
        for folder in run_dirs:
            if not (folder / CONFIG_FILE).is_file():
                say(f"{folder} is no run yet; the page waits for it")
        say(f"{url}  (Ctrl-C ends the page, not the run)")
        if key:
            say("Everyone with this address can read these runs; the connection is not encrypted.")
        if opens:
            await asyncio.to_thread(webbrowser.open, url)
        await ended.wait()
    except OSError as error:
        way_out = "leave out --port for a free one; --host is an address of this machine."
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror})", way_out=way_out) from error
    finally:
        await runner.cleanup()
