"""Traces of rollouts: the export for other trainers and viewers, and the collector."""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_cases import last_turn, text_of, tool_call
from framework_venv import framework
from gateway_cases import ScriptedEngine, gateway_world
from job_runs import CONFIG, environment, read_lines, write_config
from job_runs import RUN as COMMAND
from typer.testing import CliRunner

# the exporter is imported by asyncrl's module, too
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="extra otlp")
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import ReadableSpan

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.cli import app
from asyncrl.extensions.trackers.trace_export import (
    SPANS_FILE,
    TRAINING_FILE,
    export_traces,
)
from asyncrl.extensions.trackers.traces import (
    MAX_WAITING,
    TracedRun,
    TraceSender,
    otlp_json,
)
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    Ticket,
)

pytestmark = [pytest.mark.extras, pytest.mark.extension("trackers")]
PROMPT = Prompt("0/0", ({"role": "user", "content": "add"},))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
RUN = TracedRun("0123", "run", "policy")


class Collector(ThreadingHTTPServer):
    """An OTLP collector: it decodes what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.server.headers = dict(self.headers)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def call_the_tool(prompt: str) -> str:
    role, text = last_turn(prompt)
    return f"It is {text}" if role == "tool" else tool_call("add", first=1)


async def sampled_rollout() -> Rollout:
    """A call with a tool, its continuation, and a branch with another history."""
    engine = ScriptedEngine(lambda request: call_the_tool(text_of(request)))
    async with gateway_world(engine, on_sampling_override="honour") as world:
        messages: list[Any] = [*PROMPT.messages]
        adder = {"X-Session-ID": "adder"}
        asked = {"messages": messages, "tools": [TOOL]}
        _, first = await world.post(asked, headers=adder)
        said = first["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": said["tool_calls"][0]["id"],
            "content": "3",
        }
        turns = [*messages, said, result]
        await world.post({"messages": turns, "tools": [TOOL]}, headers=adder)
        # Another temperature: it is not trained.
        await world.ask("summary", temperature=0.25)
        return world.session.rollout(
            1,
            Outcome(
                turn_rewards={"chatcmpl-0": 0.5, "chatcmpl-1": 1.0, "chatcmpl-2": 0.0}
            ),
            0.75,
        )


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return asyncio.run(sampled_rollout())


@pytest.fixture
def run_dir(rollout: Rollout, tmp_path: Path) -> Path:
    """Group 0 is taken, and tokens of version 4 are too old for its batch; group 1 is
    ready, group 2 has failed.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    async def write() -> None:
        (folder / "run.id").write_text("0123")
        journal = Journal(folder / "journal.sqlite", run_id="0123")
        for number in range(3):
            journal.add_admission_nowait(
                Ticket(GroupId(number), 0), replace(PROMPT, prompt_id=f"0/{number}")
            )
            journal.add_rollout_nowait(GroupId(number), rollout)
            state = "failed" if number == 2 else "ready"
            journal.end_group_nowait(GroupId(number), state, "")
        taken = Group(GroupId(0), PROMPT, rollout)
        await journal.add_batch(Batch(0, (taken,), min_version=5, mask_older=True))
        await journal.aclose()

    asyncio.run(write())
    return folder


def exported(run_dir: Path, out: Path) -> tuple[list[Any], list[Any]]:
    arguments = ["export", str(run_dir), str(out), "--traces"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.output == f"2 rollouts: {out}\n"
    return read_lines(out / TRAINING_FILE), read_lines(out / SPANS_FILE)


def test_training_traces_have_the_tokens_of_each_call_and_its_loss(
    run_dir: Path, rollout: Rollout, tmp_path: Path
) -> None:
    lines, _ = exported(run_dir, tmp_path / "out")
    (branch,) = rollout
    ids = branch.token_ids.tolist()
    assert [(line["prompt_id"], line["reward"]) for line in lines] == [
        ("0/0", 0.75),
        ("0/1", 0.75),
    ]
    old, whole = (line["trace"]["turns"] for line in lines)
    assert [turn["node_id"] for turn in whole] == [
        "g1/r1/chatcmpl-0",
        "g1/r1/chatcmpl-1",
    ]
    assert [turn["metadata"]["reward"] for turn in whole] == [0.5, 1.0]
    reasons = [turn["metadata"]["finish_reason"] for turn in whole]
    assert reasons == ["tool_calls", "stop"]
    assert {turn["metadata"]["agent"] for turn in whole} == {"adder"}
    for turn, masked in zip(whole, old, strict=True):
        start = len(turn["prompt_token_ids"])
        sampled = turn["completion_token_ids"]
        end = start + len(sampled)
        assert turn["prompt_token_ids"] + sampled == ids[:end]
        assert branch.loss_mask[start:end].all()
        assert not branch.loss_mask[start - 1]
        logprobs = branch.tokens.behaviour_logprobs[start:end].tolist()
        assert turn["per_token_logps"] == logprobs
        assert turn["loss_mask"] == [0] * start + [1] * len(sampled)
        # Half of each answer is of version 4.
        assert masked["loss_mask"] == [0] * start + [
            int(version >= 5) for version in turn["metadata"]["policy_versions"]
        ]
        assert 0 < sum(masked["loss_mask"]) < len(sampled)
    assert branch.num_sampled == sum(sum(turn["loss_mask"]) for turn in whole)


def test_openenv_reads_training_traces(run_dir: Path, tmp_path: Path) -> None:
    exported(run_dir, tmp_path / "out")
    program = """
import json, sys
from openenv.core.harness.training import TrainingTrace
for line in open(sys.argv[1]):
    given = json.loads(line)["trace"]
    trace = TrainingTrace.model_validate_json(json.dumps(given))
    assert trace.model_dump() == given
    print(len(trace.turns))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "out" / TRAINING_FILE)]
    read = subprocess.run(
        command,
        env=environment(PYTHONPATH=str(framework("openenv"))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.stdout.split() == ["2", "2"], read.stderr


def as_protobuf(line: dict[str, Any]) -> TracesData:
    """Read OTLP's JSON: in protobuf's own, ids are base64."""
    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        number = bytes.fromhex(span[name])
                        span[name] = base64.b64encode(number).decode()
    return json_format.ParseDict(line, TracesData())


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [getattr(one, one.WhichOneof("value")) for one in value.values]
        found[attribute.key] = value
    return found


def test_spans_are_a_trace_of_calls_and_tools(
    run_dir: Path, rollout: Rollout, tmp_path: Path
) -> None:
    _, lines = exported(run_dir, tmp_path / "out")
    traces = [as_protobuf(line) for line in lines]
    (resource,) = traces[1].resource_spans
    assert plain(resource.resource.attributes)["service.instance.id"] == "0123"
    root, first, second, tool = resource.scope_spans[0].spans
    trace_ids = {span.trace_id for span in (root, first, second, tool)}
    assert len(trace_ids) == 1
    assert traces[0].resource_spans[0].scope_spans[0].spans[0].trace_id not in trace_ids
    assert [span.parent_span_id for span in (root, first, second, tool)] == [
        b"",
        *[root.span_id] * 3,
    ]
    assert [span.name for span in (root, first, second, tool)] == [
        "invoke_agent policy",
        "chat policy",
        "chat policy",
        "execute_tool add",
    ]
    about = plain(root.attributes)
    assert about["gen_ai.conversation.id"] == "g1/r1"
    assert about["asyncrl.reward"] == 0.75
    calls = rollout[0].calls
    about = plain(second.attributes)
    assert about["gen_ai.response.id"] == "chatcmpl-1"
    assert about["gen_ai.agent.name"] == "adder"
    assert about["gen_ai.response.finish_reasons"] == ["stop"]
    assert about["gen_ai.usage.input_tokens"] == calls[1].start
    assert about["gen_ai.usage.output_tokens"] == calls[1].end - calls[1].start
    assert about["asyncrl.policy_versions"] == [4, 5]
    about = plain(tool.attributes)
    assert about["gen_ai.tool.name"] == "add"
    assert about["gen_ai.tool.call.id"] == calls[0].tools[0][0]
    # The tool runs between the answer that calls it and the next request.
    assert first.end_time_unix_nano <= tool.start_time_unix_nano
    assert tool.end_time_unix_nano == max(
        second.start_time_unix_nano, tool.start_time_unix_nano
    )
    assert root.start_time_unix_nano == first.start_time_unix_nano
    assert root.end_time_unix_nano == second.end_time_unix_nano


def test_names_are_those_of_the_semantic_conventions(rollout: Rollout) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.semconv.attributes import error_attributes

    known = set[str]()
    for module in (gen_ai_attributes, error_attributes):
        known |= {value for value in vars(module).values() if isinstance(value, str)}
    failure = RolloutFailure("it broke", kind=FailureKind.AGENT_CRASH)
    spans = RUN.spans(GroupId(0), "0/0", 1, rollout, failure)
    spans += RUN.spans(GroupId(0), "0/0", 1, rollout)
    given = [dict(span.attributes or {}) for span in spans]
    operations = {str(one["gen_ai.operation.name"]) for one in given}
    kinds = gen_ai_attributes.GenAiOperationNameValues
    assert operations <= {kind.value for kind in kinds}
    names = {name for one in given for name in one}
    assert {name for name in names if not name.startswith("asyncrl.")} <= known


def sent(sender: TraceSender, spans: list[list[ReadableSpan]]) -> None:
    sender.start(RUN)
    for trace in spans:
        sender.tell(trace)
    asyncio.run(sender.wait_closed(60.0))


def test_collector_gets_what_the_export_writes(
    collector: Collector, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rl")
    warnings = list[str]()
    sender = TraceSender(warnings.append)
    assert sender.gauges() == {}
    failure = RolloutFailure("it broke", kind=FailureKind.AGENT_CRASH)
    good = RUN.spans(GroupId(0), "0/0", 1, rollout)
    bad = RUN.spans(GroupId(0), "0/0", 2, (), failure)
    sent(sender, [good, bad])
    assert sender.gauges() == {"traces/sent": 2, "traces/dropped": 0}
    assert warnings == []
    assert collector.headers["x-team"] == "rl"
    written = as_protobuf(otlp_json([*good, *bad]))
    expected = written.resource_spans[0].scope_spans[0].spans
    for got, span in zip(collector.spans, expected, strict=True):
        assert got == span
    assert collector.spans[-1].status.message == "it broke."
    assert plain(collector.spans[-1].attributes)["error.type"] == "agent_crash"


def test_collector_that_is_down_costs_only_traces(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    warnings = list[str]()
    sender = TraceSender(warnings.append)
    sent(sender, [RUN.spans(GroupId(0), "0/0", 1, rollout)] * 3)
    assert sender.gauges() == {"traces/sent": 0, "traces/dropped": 3}
    assert len(warnings) == 1
    assert warnings[0].startswith("traces are dropped, the run continues")


def test_collector_that_hangs_blocks_nothing(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = RUN.spans(GroupId(0), "0/0", 1, rollout)
    num = MAX_WAITING + 300
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        warnings = list[str]()
        sender = TraceSender(warnings.append)
        sender.start(RUN)
        for _ in range(num):
            sender.tell(trace)
        # At most one request's traces are out of the queue.
        assert sender.gauges()["traces/dropped"] >= 300 - 256
        asyncio.run(sender.wait_closed(0.1))
    assert sender._thread is not None
    sender._thread.join()  # without the other requests
    assert len(warnings) == 2
    assert warnings[1].endswith("traces are not sent: 0.1 s are over")


def test_export_of_traces_is_refused_without_tokens(
    run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["export", str(run_dir), str(out), "--traces", "--adapter"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    with pytest.raises(ConfigError, match="is not empty, or is in"):
        export_traces(run_dir, run_dir / "out")
    (run_dir / "journal.sqlite").unlink()
    Journal(run_dir / "journal.sqlite", run_id="0123")
    with pytest.raises(ConfigError, match="has the tokens of no finished group"):
        export_traces(run_dir, out)
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_streams_its_rollouts_and_exports_the_same_traces(
    collector: Collector, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        trainer={"num_steps": 2},
        observe={"traces": "otlp"},
        journal={"keep": "all"},
    )
    # Not forked, which would have the environment of the tests.
    ended = subprocess.run(
        [*COMMAND, config, "--run-dir", tmp_path / "run"],
        env=environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    metrics = read_lines(tmp_path / "run/metrics.jsonl")
    assert metrics[-1]["traces/dropped"] == 0
    export_traces(tmp_path / "run", tmp_path / "out")
    lines = read_lines(tmp_path / "out" / SPANS_FILE)
    assert len(lines) >= 2 * 4 * 4
    got = {span.span_id: span for span in collector.spans}
    for line in lines:
        for span in as_protobuf(line).resource_spans[0].scope_spans[0].spans:
            assert got[span.span_id] == span
