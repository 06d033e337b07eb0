"""Rollouts as OpenTelemetry spans: a trace per rollout, with a span per call of the
policy and per call of a tool.

Names follow https://opentelemetry.io/docs/specs/semconv/gen-ai/; `asyncrl.*` are ours.
Ids follow from the run and the rollout, so that an export of the journal writes the
traces that a collector received.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from asyncrl import __version__
from asyncrl.base.errors import RolloutFailure, needing
from asyncrl.messages.records import GroupId, PolicyCall, Rollout, Trajectory
from asyncrl.observe.trackers import TrackedRun

with needing("otlp", "a trace of OpenTelemetry"):
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import (
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
    )

MAX_WAITING = 4096
"""Traces in the queue; a full queue drops its oldest."""
MAX_SENT = 256
"""Traces of one request to the collector."""
CLOSE_S = 5.0
"""Time for the last traces at the end of a run."""

Value = str | bool | int | float | Sequence[str] | Sequence[int]


class TracedRun:
    """`model`: the name of the policy in spans."""

    def __init__(self, run_id: str, name: str, model: str) -> None:
        self.run_id = run_id
        self.name = name
        self.model = model
        self._scope = InstrumentationScope("asyncrl", __version__)
        self._resource = Resource(
            {
                "service.name": "asyncrl",
                "service.version": __version__,
                "service.instance.id": run_id,
                "asyncrl.run": name,
            }
        )

    def spans(
        self,
        group_id: GroupId,
        prompt_id: str,
        sample_index: int,
        rollout: Rollout,
        failure: RolloutFailure | None = None,
    ) -> list[ReadableSpan]:
        """Return the trace of a rollout, its root first. The root lasts from the first
        call to the end of the last one.
        """
        name = f"g{group_id}/r{sample_index}"
        spans = list[ReadableSpan]()
        for branch in rollout:
            for call in branch.calls:
                times = _ns(call.begun_s), _ns(call.ended_s)
                about = self._about_call(branch, call)
                of_call = name, call.name
                spans.append(self._span("chat", self.model, of_call, times, about))
            for call, following in pairwise(branch.calls):
                for tool_id, tool in call.tools:
                    start_ns = _ns(call.ended_s)
                    # Parallel calls of a session may overlap.
                    times = start_ns, max(start_ns, _ns(following.begun_s))
                    of_tool = {
                        "gen_ai.tool.name": tool,
                        "gen_ai.tool.call.id": tool_id,
                    }
                    path = name, call.name, tool_id
                    spans.append(self._span("execute_tool", tool, path, times, of_tool))
        now_ns = time.time_ns()
        times = (
            min((span.start_time or 0 for span in spans), default=now_ns),
            max((span.end_time or 0 for span in spans), default=now_ns),
        )
        of_rollout = {
            "gen_ai.provider.name": "asyncrl",
            "gen_ai.request.model": self.model,
            "gen_ai.conversation.id": name,
            "asyncrl.group_id": int(group_id),
            "asyncrl.sample_index": sample_index,
            "asyncrl.prompt_id": prompt_id,
            **_result(rollout, failure),
        }
        error = "" if failure is None else str(failure)
        root = self._span("invoke_agent", self.model, (name,), times, of_rollout, error)
        return [root, *spans]

    def _about_call(self, branch: Trajectory, call: PolicyCall) -> dict[str, Value]:
        versions = np.unique(branch.tokens.versions[call.start : call.end])
        return {
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
        }

    def _span(
        self,
        operation: str,
        subject: str,
        path: tuple[str, ...],
        times: tuple[int, int],
        about: Mapping[str, Value],
        error: str = "",
    ) -> ReadableSpan:
        """Return a span. `path`: the rollout, and what is traced in it. `times`: in
        nanoseconds since the epoch.
        """
        is_root = len(path) == 1
        return ReadableSpan(
            f"{operation} {subject}",
            context=self._context(path),
            parent=None if is_root else self._context(path[:1]),
            resource=self._resource,
            attributes={"gen_ai.operation.name": operation, **about},
            kind=SpanKind.CLIENT if operation == "chat" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=self._scope,
        )

    def _context(self, path: tuple[str, ...]) -> SpanContext:
        return SpanContext(
            self._id(16, path[:1]),
            self._id(8, path),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )

    def _id(self, num_bytes: int, path: tuple[str, ...]) -> int:
        text = "\x1f".join((self.run_id, *path))
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


def otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Return spans as TracesData in OTLP's JSON: a line of an OTLP file
    (https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/).
    """
    # Unlike the JSON of protobuf: ids are hexadecimal, and enums are numbers.
    written: dict[str, Any] = MessageToDict(
        encode_spans(spans), use_integers_for_enums=True
    )
    for of_resource in written["resourceSpans"]:
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:
                for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                    span[name] = base64.b64decode(span[name]).hex()
    return written


class TraceSender:
    """A RolloutListener that sends traces to a collector, from one daemon thread.

    Life: made -> start() -> tell() -> wait_closed().
    Invariant: a trace is sent or counted as dropped, and none delays or ends the run.

    The exporter reads its address and headers from OTEL_EXPORTER_OTLP_*.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` may be called from the thread."""
        self._warn = warn
        self._traces = queue.Queue[list[ReadableSpan] | None](MAX_WAITING)
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
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
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

    def tell(self, trace: list[ReadableSpan] | None) -> None:
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

    def _work(self) -> None:
        exporter = OTLPSpanExporter()
        is_last = False
        while not (is_last or self._is_late):
            taken = [self._traces.get()]
            with contextlib.suppress(queue.Empty):
                while len(taken) < MAX_SENT:
                    taken.append(self._traces.get_nowait())
            traces = [trace for trace in taken if trace is not None]
            is_last = len(traces) < len(taken)
            spans = [span for trace in traces for span in trace]
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
