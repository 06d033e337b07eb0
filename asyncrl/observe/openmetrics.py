"""/metrics in OpenMetrics form, for Prometheus, and /status: a small read-only server of a run.

Form: github.com/prometheus/OpenMetrics, version 1.0.0. Both paths are for bearers of the key in
RUN_DIR/status.key: what a run says of itself is as private as its directory.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from asyncrl import __version__
from asyncrl.agents.endpoint.calls.connections import AppServer
from asyncrl.config import ObserveConfig
from asyncrl.errors import ConfigError
from asyncrl.files import write_whole
from asyncrl.messages.base import ErrorBody
from asyncrl.observe.metrics import GAUGES, Gauge, gauge_of
from asyncrl.observe.recorder import STATUS_FILE

KEY_FILE = "status.key"
KEY_ENV = "ASYNCRL_STATUS_KEY"
"""A key of the user's own, the same for all runs, say; it then stands in no file of the run."""
MAX_CONNECTIONS, IDLE_S = 16, 75.0
"""One more takes the place of the one that is idle longest; an idle one is closed after so many seconds."""
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
STATES = ("starting", "running", "done", "failed", "interrupted")
SUFFIXES: Mapping[str, tuple[str, str]] = {
    "s": ("seconds", r"(_s|_seconds|/seconds)$"),
    "bytes": ("bytes", r"_bytes$"),
    "0..1": ("ratio", r"_fraction$"),
}
"""By a gauge's unit: the base unit that ends the name, in place of what matches."""


def family_of(name: str) -> tuple[str, dict[str, str], Gauge] | None:
    """(family, labels, declaration) of a metric: asyncrl_perf_step_seconds of perf/step_s. What is declared
    as NAME/* has the rest as a label, in a family of its own where NAME is of all tasks together. None for a
    name that is not declared.
    """
    if (of_several := re.fullmatch("eval/([^/]+)/(.+)", name)) and f"eval/{of_several[2]}" in GAUGES:
        alone = family_of(f"eval/{of_several[2]}")
        return alone and (alone[0], {"evaluation": of_several[1]}, alone[2])
    if (gauge := gauge_of(name)) is None:
        return None
    pattern = next((key for key, found in GAUGES.items() if found is gauge), name)
    stem, labels, by_task = name, dict[str, str](), ""
    if pattern.endswith("/*"):
        stem = pattern.removesuffix("/*")
        labels = {"engine" if stem.startswith("engine") else "name": name.removeprefix(f"{stem}/")}
        by_task = "_by_task" if stem in GAUGES or stem == "sample/groups" else ""
    elif pattern.endswith("*") and name.count("/") > 1:  # policy/logprob_gap_mean/engine-0
        stem, _, engine = name.rpartition("/")
        labels = {"engine": engine}
    stem, unit = re.sub("_per_s$", "_per_second", stem), ""
    if gauge.unit in SUFFIXES:
        unit, ending = SUFFIXES[gauge.unit]
        stem, unit = re.sub(ending, "", stem), f"_{unit}"
    stem += by_task + unit
    return "asyncrl_" + re.sub("[^a-z0-9_]", "_", stem.lower()), labels, gauge


def openmetrics(numbers: Mapping[str, Any], *, state: str, info: Mapping[str, str]) -> str:
    """The text of all numbers that are declared and finite, with the state of the run and what names it."""
    families: dict[str, tuple[Gauge, list[str]]] = {}
    for name, value in numbers.items():
        found = family_of(name) if isinstance(value, Real) and math.isfinite(value) else None
        if found is not None:
            family, labels, gauge = found
            sample = f"{family}{'_total' * (gauge.kind == 'total')}{_labels(labels)} {+value}"
            families.setdefault(family, (gauge, []))[1].append(sample)
    lines = [
        "# TYPE asyncrl_run info",
        "# HELP asyncrl_run What names the run.",
        f"asyncrl_run_info{_labels(info)} 1",
        "# TYPE asyncrl_state stateset",
        "# HELP asyncrl_state What the run does, in one word.",
        *(f"asyncrl_state{_labels({'asyncrl_state': word})} {int(word == state)}" for word in STATES),
    ]
    for family, (gauge, samples) in families.items():
        lines += [*_head(family, gauge), *samples]
    return "\n".join([*lines, "# EOF", ""])


def _head(family: str, gauge: Gauge) -> Iterator[str]:
    yield f"# TYPE {family} {'counter' if gauge.kind == 'total' else 'gauge'}"
    if gauge.unit in SUFFIXES:
        yield f"# UNIT {family} {SUFFIXES[gauge.unit][0]}"
    unit = "" if gauge.unit in SUFFIXES or not gauge.unit else f"{gauge.unit}, "
    yield f"# HELP {family} {_escaped(unit + gauge.meaning)}"


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class StatusServer:
    """Answers GET /metrics and GET /status, from the memory and the status.json of the run.

    Life: made -> bind() takes the port -> start() -> aclose().
    """

    def __init__(
        self, run_dir: Path, observe: ObserveConfig, numbers: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`numbers`: those of the run at this moment, by their names in GAUGES."""
        self.key_path = run_dir / KEY_FILE
        self._run_dir, self._numbers = run_dir, numbers
        self._host, self._port = observe.status_host, observe.status_port or 0
        self._info = {"run_dir": run_dir.resolve().name, "version": __version__}
        self._socket: socket.socket | None = None
        self._listener: AppServer | None = None

    def bind(self) -> str:
        """Take the port; returns the address. Raises ConfigError if it cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            what = (
                f"observe.status_host={self._host} and observe.status_port={self._port} cannot be listened on"
            )
            way_out = "give an address of this machine and a free port; observe.status_port=0 takes any."
            raise ConfigError(f"{what}: {error}", way_out=way_out) from error
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
        self._listener = AppServer(app, most=MAX_CONNECTIONS, idle_s=IDLE_S)
        await self._listener.listen(self._socket)

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        if self._listener is not None:
            await self._listener.aclose()
        if self._socket is not None:
            self._socket.close()

    def _key(self) -> str:
        """The user's, else that in the file: it stays over resumes, for Prometheus has it in its config."""
        if given := os.environ.get(KEY_ENV):
            return given
        if not self.key_path.exists():
            write_whole(self.key_path, secrets.token_urlsafe(24), is_private=True)
        return self.key_path.read_text(encoding="utf-8").strip()

    def _read(self) -> str:
        return (self._run_dir / STATUS_FILE).read_text(encoding="utf-8")

    async def _metrics(self) -> Response:
        text = openmetrics(self._numbers(), state=json.loads(self._read())["state"], info=self._info)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _status(self) -> Response:
        return Response(self._read(), media_type="application/json")
