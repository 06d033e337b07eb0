"""Rollouts as OpenTelemetry spans: a trace per rollout, with a span per call of the
policy and per call of a tool.

Names follow https://opentelemetry.io/docs/specs/semconv/gen-ai/; `asyncrl.*` are ours.
Ids follow from the run and the rollout, so that an export of the journal writes the
traces that a collector received.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from asyncrl import __version__
from asyncrl.base.errors import ConfigError, RolloutFailure, install_extra
from asyncrl.messages.records import GroupId, PolicyCall, Rollout, Trajectory
from asyncrl.observe.trackers import TrackedRun

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MAX_WAITING = 4096
"""Traces in the queue; a full queue drops its oldest."""
MAX_SENT = 256
"""Traces of one request to the collector."""
CLOSE_S = 5.0
"""Time for the last traces at the end of a run."""
KINDS = {"INTERNAL": 1, "CLIENT": 3}
"""Numbers of SpanKind in OTLP."""
ERROR = 2
"""Number of the status in OTLP."""

Value = str | bool | int | float | Sequence[str] | Sequence[int]


class TraceSpan(NamedTuple):
    """`parent_id` 0: the root. Times are in nanoseconds since the epoch."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    kind: Literal["INTERNAL", "CLIENT"]
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: str = ""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """`model`: the name of the policy in spans."""

    run_id: str
    name: str
    model: str

    @property
    def resource(self) -> dict[str, str]:
        return {
            "service.name": "asyncrl",
            "service.version": __version__,
            "service.instance.id": self.run_id,
            "asyncrl.run": self.name,
        }

    def spans(
        self,
        group_id: GroupId,
        prompt_id: str,
        sample_index: int,
        rollout: Rollout,
        failure: RolloutFailure | None = None,
    ) -> list[TraceSpan]:
        """Return the trace of a rollout, its root first. The root lasts from the first
        call to the end of the last one.
        """
        name = f"g{group_id}/r{sample_index}"
        trace_id = self._id(16, name)
        root_id = self._id(8, name)
        spans = list[TraceSpan]()
        for branch in rollout:
            for call in branch.calls:
                span_id = self._id(8, name, call.name)
                spans.append(self._call(trace_id, span_id, root_id, branch, call))
            for call, following in pairwise(branch.calls):
                for tool_id, tool in call.tools:
                    span_id = self._id(8, name, call.name, tool_id)
                    about = {
                        "gen_ai.operation.name": "execute_tool",
                        "gen_ai.tool.name": tool,
                        "gen_ai.tool.call.id": tool_id,
                    }
                    start_ns = _ns(call.ended_s)
                    # Parallel calls of a session may overlap.
                    end_ns = max(start_ns, _ns(following.begun_s))
                    spans.append(
                        TraceSpan(
                            trace_id,
                            span_id,
                            root_id,
                            f"execute_tool {tool}",
                            "INTERNAL",
                            start_ns,
                            end_ns,
                            about,
                        )
                    )
        now_ns = time.time_ns()
        root = TraceSpan(
            trace_id,
            root_id,
            0,
            f"invoke_agent {self.model}",
            "INTERNAL",
            min((span.start_ns for span in spans), default=now_ns),
            max((span.end_ns for span in spans), default=now_ns),
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": "asyncrl",
                "gen_ai.request.model": self.model,
                "gen_ai.conversation.id": name,
                "asyncrl.group_id": int(group_id),
                "asyncrl.sample_index": sample_index,
                "asyncrl.prompt_id": prompt_id,
                **_result(rollout, failure),
            },
            "" if failure is None else str(failure),
        )
        return [root, *spans]

    def _call(
        self,
        trace_id: int,
        span_id: int,
        root_id: int,
        branch: Trajectory,
        call: PolicyCall,
    ) -> TraceSpan:
        versions = np.unique(branch.tokens.versions[call.start : call.end])
        return TraceSpan(
            trace_id,
            span_id,
            root_id,
            f"chat {self.model}",
            "CLIENT",
            _ns(call.begun_s),
            _ns(call.ended_s),
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "asyncrl",
                "gen_ai.request.model": self.model,
                "gen_ai.response.id": call.name,
                "gen_ai.response.finish_reasons": [call.finish_reason],
                **({"gen_ai.agent.name": call.agent} if call.agent else {}),
                "gen_ai.usage.input_tokens": call.start,
                "gen_ai.usage.output_tokens": call.end - call.start,
                "asyncrl.branch": branch.branch,
                # Calls that are not trained have no version.
                "asyncrl.policy_versions": versions[versions >= 0].tolist(),
            },
        )

    def _id(self, num_bytes: int, *parts: str) -> int:
        text = "\x1f".join((self.run_id, *parts))
        digest = blake2b(text.encode(), digest_size=num_bytes).digest()
        return int.from_bytes(digest, "big")


def _result(rollout: Rollout, failure: RolloutFailure | None) -> dict[str, Value]:
    if failure is not None:
        return {"error.type": str(failure.kind)}
    return {
        "asyncrl.reward": float(rollout[0].reward),
        "asyncrl.is_truncated": any(branch.is_truncated for branch in rollout),
    }


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def otlp_json(run: TracedRun, spans: Sequence[TraceSpan]) -> dict[str, object]:
    """Return spans as TracesData in OTLP's JSON: a line of an OTLP file
    (https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/).
    """
    scope = {"name": "asyncrl", "version": __version__}
    of_scope = {"scope": scope, "spans": [_span_json(span) for span in spans]}
    resource = {"attributes": _attributes_json(run.resource)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [of_scope]}]}


def _span_json(span: TraceSpan) -> dict[str, object]:
    # Unlike the JSON of protobuf: ids are hexadecimal, and enums are numbers.
    written: dict[str, object] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes_json(span.attributes),
        "status": {"code": ERROR, "message": span.error} if span.error else {},
    }
    if span.parent_id:
        written["parentSpanId"] = f"{span.parent_id:016x}"
    return written


def _attributes_json(attributes: Mapping[str, Value]) -> list[dict[str, object]]:
    return [
        {"key": name, "value": _value_json(value)} for name, value in attributes.items()
    ]


def _value_json(value: Value) -> dict[str, object]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value_json(part) for part in value]}}


def check_sender() -> None:
    """Raise ConfigError if the exporter is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"observe.traces=otlp needs OpenTelemetry's exporter: {error}",
            way_out=f"{install_extra('otlp')}; or leave it out.",
        ) from error


class TraceSender:
    """A RolloutListener that sends traces to a collector, from one daemon thread.

    Life: made -> start() -> tell() -> wait_closed().
    Invariant: a trace is sent or counted as dropped, and none delays or ends the run.

    The exporter reads its address and headers from OTEL_EXPORTER_OTLP_*.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` may be called from the thread. Raises ConfigError."""
        check_sender()
        self._warn = warn
        self._traces = queue.Queue[list[TraceSpan] | None](MAX_WAITING)
        self._run: TracedRun | None = None
        self._thread: threading.Thread | None = None
        self._is_late = False
        self._num_told = 0
        self._num_sent = 0
        self._num_full = 0
        self._num_refused = 0
        self._num_left = 0

    def gauges(self) -> dict[str, float]:
        if self._thread is None:
            return {}
        num_dropped = self._num_full + self._num_refused + self._num_left
        return {"traces/sent": self._num_sent, "traces/dropped": num_dropped}

    def start(self, run: TrackedRun) -> None:
        self._run = TracedRun(run.run_id, run.name, run.model)
        self._thread = threading.Thread(
            target=self._work, args=(self._run,), name="traces", daemon=True
        )
        self._thread.start()

    def rollout(
        self,
        group_id: GroupId,
        prompt_id: str,
        sample_index: int,
        rollout: Rollout,
        failure: RolloutFailure | None,
    ) -> None:
        assert self._run is not None, "rollouts begin after start()"
        self.tell(self._run.spans(group_id, prompt_id, sample_index, rollout, failure))

    def tell(self, trace: list[TraceSpan] | None) -> None:
        """Queue a trace; None ends the thread."""
        # Only the event loop puts traces, so after this put() never blocks it.
        if self._traces.full():
            with contextlib.suppress(queue.Empty):
                self._traces.get_nowait()
                self._drops("the collector is slow")
                self._num_full += 1
        self._traces.put(trace)
        self._num_told += trace is not None

    async def wait_closed(self, limit_s: float = CLOSE_S) -> None:
        """Wait until the queue is sent, `limit_s` at most."""
        if self._thread is None:
            return
        self.tell(None)
        await asyncio.to_thread(self._thread.join, limit_s)
        if self._thread.is_alive():
            self._is_late = True  # ends after its current request
            num_ended = self._num_sent + self._num_full + self._num_refused
            self._num_left = self._num_told - num_ended
            self._warn(f"{self._num_left} traces are not sent: {limit_s:g} s are over")

    def _drops(self, why: str) -> None:
        if self._num_full + self._num_refused == 0:
            self._warn(
                f"traces are dropped, the run continues (traces/dropped counts them): {why}"
            )

    def _work(self, run: TracedRun) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import SpanExportResult

        as_sdk = _sdk_spans(run)
        exporter = OTLPSpanExporter()
        is_last = False
        while not (is_last or self._is_late):
            taken = [self._traces.get()]
            with contextlib.suppress(queue.Empty):
                while len(taken) < MAX_SENT:
                    taken.append(self._traces.get_nowait())
            traces = [trace for trace in taken if trace is not None]
            is_last = len(traces) < len(taken)
            spans = [as_sdk(span) for trace in traces for span in trace]
            why = "the exporter has failed; the log has its error"
            result = None
            try:
                # Retries by itself, for 10 s (OTEL_EXPORTER_OTLP_TIMEOUT).
                if spans:
                    result = exporter.export(spans)
            # The run must not end by code that only shows it.
            except Exception as error:
                why = f"{type(error).__name__}: {error!s:.300}"
            if result is SpanExportResult.SUCCESS:
                self._num_sent += len(traces)
            elif spans:
                self._drops(why)
                self._num_refused += len(traces)
        exporter.shutdown()  # type: ignore[no-untyped-call]


def _sdk_spans(run: TracedRun) -> Callable[[TraceSpan], ReadableSpan]:
    """Return a function that makes spans of OpenTelemetry's SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import (
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
    )

    resource = Resource(run.resource)
    scope = InstrumentationScope("asyncrl", __version__)

    def context(trace_id: int, span_id: int) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    def made(span: TraceSpan) -> ReadableSpan:
        parent = context(span.trace_id, span.parent_id) if span.parent_id else None
        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        return ReadableSpan(
            span.name,
            context=context(span.trace_id, span.span_id),
            parent=parent,
            resource=resource,
            attributes=span.attributes,
            kind=SpanKind[span.kind],
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return made
