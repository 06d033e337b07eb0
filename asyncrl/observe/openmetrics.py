"""Serves /metrics (OpenMetrics, for Prometheus) and /status of a run, to bearers of RUN_DIR/status.key."""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from asyncrl import __version__
from asyncrl.agents.endpoint.listener import AppServer
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.base.message import ErrorBody
from asyncrl.config import ObserveConfig
from asyncrl.observe.metrics import GAUGES, Gauge, gauge_of
from asyncrl.observe.run_dir import STATUS_FILE

KEY_FILE = "status.key"
KEY_ENV = "ASYNCRL_STATUS_KEY"
"""Variable with a key of the user's own, which then is in no file of the run."""
MAX_CONNECTIONS = 64
IDLE_S = 75.0
"""A connection that is silent for this time is closed."""
STATES = ("starting", "running", "done", "failed", "interrupted")
UNITS: Mapping[str, tuple[str, str]] = {
    "s": ("seconds", r"(_s|_seconds|/seconds)$"),
    "bytes": ("bytes", r"_bytes$"),
    "0..1": ("ratio", r"_fraction$"),
}
"""Unit of a gauge -> unit of Prometheus, and the ending that it replaces."""


def family_of(name: str) -> tuple[str, dict[str, str], Gauge] | None:
    """Return family, labels and declaration of a metric: asyncrl_perf_step_seconds of perf/step_s. The rest
    of a name declared as NAME/* is a label. Return None if the name is undeclared.
    """
    labels = dict[str, str]()
    if (of_several := re.fullmatch("eval/([^/]+)/(.+)", name)) and f"eval/{of_several[2]}" in GAUGES:
        labels = {"evaluation": of_several[1]}
        name = f"eval/{of_several[2]}"
    if (gauge := gauge_of(name)) is None:
        return None
    stem, ending = name, ""
    pattern = next((key for key, found in GAUGES.items() if found is gauge), name)
    if pattern.endswith("/*"):
        stem = pattern.removesuffix("/*")
        labels = {"engine" if stem.startswith("engine") else "name": name.removeprefix(f"{stem}/")}
        ending = "_by_task" if stem in GAUGES or stem == "sample/groups" else ""
    elif pattern.endswith("*") and name.count("/") > 1:  # policy/logprob_gap_mean/engine-0
        stem, _, engine = name.rpartition("/")
        labels = {"engine": engine}
    stem = re.sub("_per_s$", "_per_second", stem)
    if gauge.unit in UNITS:
        unit, of_name = UNITS[gauge.unit]
        stem = re.sub(of_name, "", stem)
        ending += f"_{unit}"
    return "asyncrl_" + re.sub("[^a-z0-9_]", "_", stem.lower()) + ending, labels, gauge


def openmetrics(numbers: Mapping[str, Any], *, state: str, info: Mapping[str, str]) -> bytes:
    """Return the declared finite numbers, the state of the run and its name in OpenMetrics form."""
    from prometheus_client import CollectorRegistry, core
    from prometheus_client.openmetrics.exposition import generate_latest

    families: dict[str, Any] = {
        "info": core.InfoMetricFamily("asyncrl_run", "Name of the run.", dict(info)),
        "state": core.StateSetMetricFamily(
            "asyncrl_state", "State of the run.", {word: word == state for word in STATES}
        ),
    }
    for name, value in numbers.items():
        if not isinstance(value, Real) or not math.isfinite(value) or (found := family_of(name)) is None:
            continue
        family, labels, gauge = found
        if family not in families:
            kind = core.CounterMetricFamily if gauge.kind == "total" else core.GaugeMetricFamily
            unit = UNITS[gauge.unit][0] if gauge.unit in UNITS else ""
            meaning = gauge.meaning if unit or not gauge.unit else f"{gauge.unit}, {gauge.meaning}"
            families[family] = kind(family, meaning, labels=[*labels], unit=unit)
        families[family].add_metric([*labels.values()], float(value))

    class Collector:
        def collect(self) -> Iterable[Any]:
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]


class StatusServer:
    """Life: made -> bind() takes the port -> start() -> aclose(). `numbers` returns those of the moment."""

    def __init__(
        self, run_dir: Path, observe: ObserveConfig, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.key_path = run_dir / KEY_FILE
        self._run_dir, self._numbers = run_dir, numbers
        self._host, self._port = observe.status_host, observe.status_port or 0
        self._info = {"run_dir": run_dir.resolve().name, "version": __version__}
        self._socket: socket.socket | None = None
        self._listener: AppServer | None = None

    def bind(self) -> str:
        """Take the port and return the address. Raises ConfigError if it is not free."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            where = f"observe.status_host={self._host}, observe.status_port={self._port}"
            way_out = "give an address of this machine and a free port; observe.status_port=0 takes any."
            raise ConfigError(f"{where} cannot be listened on: {error}", way_out=way_out) from error
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Answer from now on."""
        assert self._socket is not None, "bind() comes first"
        app, expected = FastAPI(openapi_url=None), f"Bearer {self._key()}".encode()

        async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
            given = request.headers.get("authorization", "").encode(errors="replace")
            if hmac.compare_digest(given, expected):
                return await answer(request)
            body = ErrorBody(error="wrong or missing bearer token", rule=f"the key is in {KEY_FILE}")
            return Response(body.model_dump_json(), 401, media_type="application/json")

        app.middleware("http")(guard)
        app.add_api_route("/metrics", self._metrics)
        app.add_api_route("/status", self._status)
        self._listener = AppServer(app, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)
        await self._listener.listen(self._socket)

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        if self._listener is not None:
            await self._listener.aclose()
        if self._socket is not None:
            self._socket.close()

    def _key(self) -> str:
        """Return the user's key, or that of the file, which stays over resumes."""
        if given := os.environ.get(KEY_ENV):
            return given
        if not self.key_path.exists():
            write_whole(self.key_path, secrets.token_hex(24), is_private=True)
        return self.key_path.read_text(encoding="utf-8").strip()

    def _read(self) -> str:
        return (self._run_dir / STATUS_FILE).read_text(encoding="utf-8")

    async def _metrics(self) -> Response:
        from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

        text = openmetrics(self._numbers(), state=json.loads(self._read())["state"], info=self._info)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _status(self) -> Response:
        return Response(self._read(), media_type="application/json")
