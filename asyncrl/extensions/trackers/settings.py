"""Settings of traces."""

from __future__ import annotations

from typing import Literal

from asyncrl.base.extensions import AddedField

TRACES = AddedField[Literal["otlp"] | None](
    "traces",
    Literal["otlp"] | None,
    "otlp: send each rollout of training as a trace to the OpenTelemetry collector of "
    "OTEL_EXPORTER_OTLP_ENDPOINT (docs/traces.md; none = off).",
    None,
)
FIELDS = (TRACES,)
