"""/metrics (OpenMetrics, for Prometheus) and /status of a run."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from asyncrl import __version__
from asyncrl.agents.endpoint.listener import AppServer
from asyncrl.base.files import write_whole
from asyncrl.config import ObserveConfig
from asyncrl.observe.metrics import GAUGES, Gauge, gauge_of
from asyncrl.observe.run_dir import STATUS_FILE
from asyncrl.observe.web import IDLE_S, MAX_CONNECTIONS, bind, make_app

KEY_FILE = "status.key"
KEY_ENV = "ASYNCRL_STATUS_KEY"
"""The user's own key, written to no file."""
STATES = ("starting", "running", "done", "failed", "interrupted")


def family_of(name: str) -> tuple[str, str, Gauge] | None:
    """Return family, label `name` ('' for none) and declaration; None if undeclared.

    perf/step_s is asyncrl_perf_step_seconds; reward/mean/sums is
    asyncrl_reward_mean_by_name{name="sums"}.
    """
    stem = name
    label = ending = ""
    if (several := re.fullmatch("eval/([^/]+)/(.+)", name)) and f"eval/{several[2]}" in GAUGES:
        stem = f"eval/{several[2]}"
        label = several[1]
    elif name.startswith("task/"):
        stem, _, label = name.partition("/")
    elif name.count("/") > 1:
        first, second, label = name.split("/", 2)
        stem = f"{first}/{second}"
        ending = "_by_name" if gauge_of(stem) is not None else ""
    gauge = gauge_of(stem) or gauge_of(name)
    if gauge is None:
        return None
    family = re.sub("(?<!_per)_s$", "_seconds", re.sub("[^a-z0-9_]", "_", stem.lower()))
    return f"asyncrl_{family}{ending}", label, gauge


def openmetrics(numbers: Mapping[str, Any], *, state: str, info: Mapping[str, str]) -> bytes:
    from prometheus_client import core
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
        family, label, gauge = found
        if family not in families:
            kind = core.CounterMetricFamily if gauge.kind == "total" else core.GaugeMetricFamily
            meaning = f"{gauge.unit}, {gauge.meaning}" if gauge.unit else gauge.meaning
            families[family] = kind(family, meaning, labels=["name"] if label else [])
        families[family].add_metric([label] if label else [], float(value))

    class Collector:
        def collect(self) -> Iterable[Any]:
            return families.values()

    return bytes(generate_latest(Collector()))  # type: ignore[no-untyped-call]


class StatusServer:
    """Serves /metrics and /status to bearers of its key. Raises ConfigError if the port is taken."""

    def __init__(
        self, run_dir: Path, observe: ObserveConfig, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.key_path = run_dir / KEY_FILE
        self._status_path = run_dir / STATUS_FILE
        self._numbers = numbers
        self._info = {"run_dir": run_dir.resolve().name, "version": __version__}
        host = observe.status_host
        port = observe.status_port or 0
        setting = f"observe.status_host={host}, observe.status_port={port}"
        self._socket, self.url = bind(host, port, setting)
        app = make_app({"/metrics": self._metrics, "/status": self._status}, self._key())
        self._listener = AppServer(app, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)

    async def start(self) -> None:
        await self._listener.listen(self._socket)

    async def aclose(self) -> None:
        await self._listener.aclose()
        self._socket.close()

    def _key(self) -> str:
        """Return the user's key, or the key of the file, kept over resumes."""
        if given := os.environ.get(KEY_ENV):
            return given
        if not self.key_path.exists():
            write_whole(self.key_path, secrets.token_hex(24), is_private=True)
        return self.key_path.read_text(encoding="utf-8").strip()

    async def _metrics(self, _: Request) -> Response:
        from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

        state = json.loads(self._status_path.read_text(encoding="utf-8"))["state"]
        text = openmetrics(self._numbers(), state=state, info=self._info)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _status(self, _: Request) -> Response:
        return Response(self._status_path.read_text(encoding="utf-8"), media_type="application/json")
