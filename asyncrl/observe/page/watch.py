"""`asyncrl watch`: the live page of runs. Addresses other than loopback require a key."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from asyncrl.agents.endpoint.listener import AppServer
from asyncrl.base.errors import AsyncrlError
from asyncrl.observe.page.render import make_page, render
from asyncrl.observe.page.view import view_run
from asyncrl.observe.run_dir import CONFIG_FILE
from asyncrl.observe.web import IDLE_S, MAX_CONNECTIONS, bind, is_local, make_app

READ_SHARE = 0.2
"""Maximum share of time for reading files."""


class LivePage:
    """The page of runs; runs without a config are omitted."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self.page = make_page([], is_live=True)
        self._run_dirs = run_dirs
        self._seen: Any = None
        self._next_s = 0.0
        self._reading = asyncio.Lock()

    async def newest(self) -> dict[str, Any]:
        """Read the page again if files changed."""
        async with self._reading:
            began_s = time.monotonic()
            if began_s >= self._next_s:
                await asyncio.to_thread(self._read)
                now_s = time.monotonic()
                self._next_s = now_s + (now_s - began_s) / READ_SHARE
            return self.page

    def _read(self) -> None:
        runs = [folder for folder in self._run_dirs if (folder / CONFIG_FILE).is_file()]
        try:
            stats = [(path, path.stat()) for folder in runs for path in sorted(folder.glob("*.json*"))]
            seen = runs, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
            if seen != self._seen:
                self.page = make_page(list(map(view_run, runs)), is_live=True)
                self._seen = seen
        except (AsyncrlError, OSError):  # a file that is being replaced
            return


def make_watch_app(live: LivePage, key: str | None) -> FastAPI:
    """Serve the page at /, and its data at /page.json?since=MADE_S (204 if unchanged)."""

    async def show(_: Request) -> Response:
        page = await live.newest()
        return HTMLResponse(await asyncio.to_thread(render, page))

    async def data(request: Request) -> Response:
        page = await live.newest()
        if request.query_params.get("since") == str(page["made_s"]):
            return Response(status_code=204)
        text = await asyncio.to_thread(json.dumps, page, allow_nan=False)
        return Response(text, media_type="application/json")

    return make_app({"/": show, "/page.json": data}, key)


def watch(
    run_dirs: Sequence[Path], host: str, port: int, *, opens: bool, say: Callable[[str], None] = print
) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0. Raises ConfigError if the port is not free."""
    asyncio.run(_serve(run_dirs, host, port, opens, say))
    return 0


async def _serve(
    run_dirs: Sequence[Path], host: str, port: int, opens: bool, say: Callable[[str], None]
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    key = None if is_local(host) else secrets.token_hex(24)
    listening, url = bind(host, port, f"--host {host} --port {port}")
    app = make_watch_app(LivePage(run_dirs), key)
    server = AppServer(app, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)
    url += f"/?key={key}" if key else "/"
    try:
        await server.listen(listening)
        for folder in run_dirs:
            if not (folder / CONFIG_FILE).is_file():
                say(f"{folder} is not a run yet; the page waits for it")
        say(f"{url}  (Ctrl-C ends the page, not the run)")
        if key:
            say("Anyone with this address can read these runs; the connection is not encrypted.")
        if opens:
            await asyncio.to_thread(webbrowser.open, url)
        await ended.wait()
    finally:
        await server.aclose()
