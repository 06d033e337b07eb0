"""HTTP servers that only read: `asyncrl watch`, and the status port with /metrics for
Prometheus.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client.core as prometheus
from fastapi import FastAPI
from prometheus_client.openmetrics import exposition
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from asyncrl import __version__
from asyncrl.agents.endpoint.gateway import AppServer
from asyncrl.base.errors import AsyncrlError, ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config.eval_config import PARTS_OF_EVALS
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.observe.metrics import Gauge, gauge_of
from asyncrl.observe.report_page import Page, make_page, render
from asyncrl.observe.run_dir import STATUS_FILE

MAX_CONNECTIONS = 64
IDLE_S = 75.0
"""Idle limit of connections."""
READ_SHARE = 0.2
"""Maximum share of time that `asyncrl watch` reads files."""
KEY_FILE = "status.key"
KEY_ENV = "ASYNCRL_STATUS_KEY"
"""The user's own key, written to no file."""
STATES = ("starting", "running", "done", "failed", "interrupted")
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
"""The address has the key."""


class WebServer:
    """Serves GET requests that have `key` as bearer token or in ?key=. Raises
    ConfigError if the port is taken (0: any).
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Callable[[Request], Awaitable[Response]]],
        *,
        key: str,
        setting: str,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {setting}: {error}",
                way_out="give an address of this machine and a free port; port 0 takes any.",
            ) from error
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._key = key
        app = FastAPI(openapi_url=None)
        app.middleware("http")(self._guard)
        for path, endpoint in routes.items():
            app.add_route(path, endpoint, methods=["GET"])
        self._listener = AppServer(app, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)

    async def start(self) -> None:
        await self._listener.listen(self._socket)

    async def aclose(self) -> None:
        await self._listener.aclose()
        self._socket.close()

    async def _guard(
        self, request: Request, answer: RequestResponseEndpoint
    ) -> Response:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.query_params.get("key") or bearer).encode(errors="replace")
        # In constant time: == is faster the earlier a guess of the key is wrong.
        if not hmac.compare_digest(given, self._key.encode()):
            return PlainTextResponse("Wrong or missing key.\n", 401)
        response = await answer(request)
        response.headers.update(_HEADERS)
        return response


# ---- asyncrl watch


class LivePage:
    """The page of runs at /, and its data at /page.json?since=MADE_S (204 if
    unchanged).
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self.page = make_page(run_dirs, is_live=True)
        self._run_dirs = run_dirs
        self._seen: list[tuple[Path, int, int]] | None = None
        self._next_s = 0.0
        self._reading = asyncio.Lock()

    async def show(self, _: Request) -> Response:
        page = await self._newest()
        return HTMLResponse(await asyncio.to_thread(render, page))

    async def data(self, request: Request) -> Response:
        page = await self._newest()
        if request.query_params.get("since") == str(page["made_s"]):
            return Response(status_code=204)
        text = await asyncio.to_thread(json.dumps, page, allow_nan=False)
        return Response(text, media_type="application/json")

    async def _newest(self) -> Page:
        """Read the page again if files changed."""
        # Several browsers share one reading.
        async with self._reading:
            began_s = time.monotonic()
            if began_s >= self._next_s:
                await asyncio.to_thread(self._read)
                now_s = time.monotonic()
                # The longer a run, the longer it is read. A page that polls must not
                # take a core from the training.
                self._next_s = now_s + (now_s - began_s) / READ_SHARE
            return self.page

    def _read(self) -> None:
        try:
            paths = (
                path
                for folder in self._run_dirs
                for path in sorted(folder.glob("*.json*"))
            )
            # Sizes and times, not contents: most polls find nothing new.
            seen = [
                (path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths
            ]
            if seen != self._seen:
                self.page = make_page(self._run_dirs, is_live=True)
                self._seen = seen
        except (AsyncrlError, OSError):  # a file that is being replaced
            return


async def watch(
    run_dirs: Sequence[Path], host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    key = secrets.token_hex(24)
    live = LivePage(run_dirs)
    routes = {"/": live.show, "/page.json": live.data}
    server = WebServer(
        host, port, routes, key=key, setting=f"--host {host} --port {port}"
    )
    url = f"{server.url}/?key={key}"
    try:
        await server.start()
        say(f"{url}  (Ctrl-C ends the page, not the run)")
        await ended.wait()
    finally:
        await server.aclose()


# ---- the status port


def status_server(
    run_dir: Path, observe: ObserveConfig, numbers: Callable[[], Mapping[str, object]]
) -> WebServer:
    """Serve /metrics and /status of a run to bearers of its key."""
    path = run_dir / STATUS_FILE
    info = {"run_dir": run_dir.resolve().name, "version": __version__}

    async def metrics(_: Request) -> Response:
        text = openmetrics(
            numbers(), state=json.loads(path.read_bytes())["state"], info=info
        )
        return Response(text, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    async def status(_: Request) -> Response:
        return Response(path.read_bytes(), media_type="application/json")

    host = observe.status_host
    port = observe.status_port or 0
    setting = f"observe.status_host={host}, observe.status_port={port}"
    routes = {"/metrics": metrics, "/status": status}
    return WebServer(
        host, port, routes, key=_status_key(run_dir / KEY_FILE), setting=setting
    )


def _status_key(path: Path) -> str:
    """Return the user's key, or the key of the file, kept over resumes."""
    if given := os.environ.get(KEY_ENV):
        return given
    key = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    # An empty key would let in requests without one.
    if not key:
        key = secrets.token_hex(24)
        # In a file, so that Prometheus's config stays valid after a resume.
        write_whole(path, key, is_private=True)
    return key


def openmetrics(
    numbers: Mapping[str, object], *, state: str, info: Mapping[str, str]
) -> bytes:
    states = {word: word == state for word in STATES}
    families: dict[str, Any] = {
        "info": prometheus.InfoMetricFamily(
            "asyncrl_run", "Name of the run.", dict(info)
        ),
        "state": prometheus.StateSetMetricFamily(
            "asyncrl_state", "State of the run.", states
        ),
    }
    for name, value in numbers.items():
        if (
            not isinstance(value, Real)
            or not math.isfinite(value)
            or (found := family_of(name)) is None
        ):
            continue
        family, label, gauge = found
        if family not in families:
            kind = (
                prometheus.CounterMetricFamily
                if gauge.kind == "total"
                else prometheus.GaugeMetricFamily
            )
            meaning = (
                f"{gauge.meaning} Unit: {gauge.unit}." if gauge.unit else gauge.meaning
            )
            families[family] = kind(family, meaning, labels=["name"] if label else [])
        families[family].add_metric([label] if label else [], float(value))
    registry = SimpleNamespace(collect=families.values)
    return bytes(exposition.generate_latest(registry))  # type: ignore[no-untyped-call]


def family_of(name: str) -> tuple[str, str, Gauge] | None:
    """Return family, label `name` ('' for none) and declaration; None if undeclared.

    perf/step_s is asyncrl_perf_step_seconds; reward/mean/sums is
    asyncrl_reward_mean_by_name{name="sums"}; eval/held/task/turns is
    asyncrl_eval_task_by_name{name="held/turns"}.
    """
    if (gauge := gauge_of(name)) is None:
        return None
    first, *rest = name.split("/")
    labels = list[str]()
    if first == "eval" and len(rest) > 1 and rest[0] not in PARTS_OF_EVALS:
        labels.append(rest.pop(0))
    if first == "task":
        labels = rest
        rest = []
    elif len(rest) > 1:
        labels += rest[1:]
        rest = [rest[0], "by_name"]
    label = "/".join(labels)
    family = re.sub("[^a-z0-9_]", "_", "_".join(["asyncrl", first, *rest]).lower())
    return re.sub("(?<!_per)_s(?=_by_name$|$)", "_seconds", family), label, gauge
