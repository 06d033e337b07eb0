"""Client state of one vLLM 0.32 process: HTTP routes, what it serves, and its required settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from asyncrl.base.errors import ConfigError, EngineError
from asyncrl.base.http import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.base.message import ErrorBody
from asyncrl.engines.engine import CallScope
from asyncrl.engines.link import OnChunk
from asyncrl.messages.engine_api import EnginePart, GenerateRequest

Finish = Literal["stop", "length", "abort"]
GENERATE = "/inference/v1/generate"
START_LABEL = "default"
GRAMMARS = "asyncrl_servers.vllm.monkeypatches"
EXTENSION = "asyncrl_servers.vllm.worker_extension.WeightLoader"
_WIRE_ID = "generate-tokens-{}"
"""vLLM's id for our request_id, required by /abort_requests, which accepts any id."""
_LOGPROBS, _KEEP_ALIVE = "processed_logprobs", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
_ROUTING = "enable_return_routed_experts"
_RULE = "a run needs a vLLM server that was started as docs/engines.md describes"
_MIN_KEEP_ALIVE_S = 60
"""Our connections idle up to 30 s (http.Caller)."""
_ASK_AGAIN_S = 0.1
"""Retry period: an abort that overtook its request has no effect."""
_HEALTH_LIMIT_S = 5.0
_COUNTS = {
    "num_running": ("num_requests_running",),
    "num_queued": ("num_requests_waiting",),
    "tokens_generated": ("generation_tokens_total",),
    "decode_s": ("request_prefill_time_seconds_sum", "inter_token_latency_seconds_sum"),
    "tokens_prompted": ("prompt_tokens_total",),
    "tokens_cached": ("prompt_tokens_cached_total",),
}


JsonBody = RootModel[dict[str, Any]]


class Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Text(Read):
    text: str = ""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        return cls(text=json_data if isinstance(json_data, str) else json_data.decode(errors="replace"))


class LabelSpan(Read):
    """Output tokens [start, end) of this weight label."""

    version: str
    start: int
    end: int


class TopLogprob(Read):
    """`rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(Read):
    """`top_logprobs`: the sampled token, then the likeliest."""

    logprob: float
    top_logprobs: list[TopLogprob] = []


class Logprobs(Read):
    content: list[TokenLogprob] | None = None


class Choice(Read):
    """An answer, or tokens of a stream. `weight_versions` comes with the finish_reason."""

    token_ids: list[int] | None = None
    finish_reason: Finish | None = None
    weight_versions: list[LabelSpan] | None = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    """With the finish_reason: .npy file in base64, uint8 or uint16 [T, layers, k], without the last token."""


class Usage(Read):
    """`prompt_tokens_details`: cached_tokens came from the prefix cache."""

    prompt_tokens_details: dict[str, Any] | None = None


class Generated(Read):
    """Answer of GENERATE, or a line of its stream."""

    choices: list[Choice] = Field(max_length=1)
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


class RpcResults(Read):
    """POST /collective_rpc: one answer per worker."""

    results: list[dict[str, Any]]


class CacheReset(Read):
    """POST /reset_prefix_cache."""

    success: bool


class LabelInfo(Read):
    """GET /weight_info."""

    weight_version: str


class ServerInfo(Read):
    """GET /server_info?config_format=json: all settings."""

    vllm_config: dict[str, Any]
    vllm_env: dict[str, Any] = {}


def vllm_request(
    token_ids: list[int], request_id: str, label: str, model: str | None, **sampling: Any
) -> dict[str, Any]:
    """Return the body of GENERATE. The salt contains the label, so cached prefixes never outlive their
    weights.
    """
    return {
        "token_ids": token_ids,
        "request_id": request_id,
        "cache_salt": f"v{label}",
        "model": model,
        "sampling_params": {"logprobs": 0, "ignore_eos": True, "detokenize": False} | sampling,
    }


@contextlib.contextmanager
def _vllm_errors() -> Iterator[None]:
    """Turn vLLM's error bodies into CallRefused: {"error": {"message": ..}}, {"error": "..."} or
    {"detail": ..}.
    """
    try:
        yield
    except CallGarbled as garbled:
        answer: Any = {}
        with contextlib.suppress(ValueError):
            answer = json.loads(garbled.text)
        error = answer.get("error") or answer.get("detail") if isinstance(answer, dict) else None
        error = error if isinstance(error, dict) else {"message": error}
        message = error.get("message")
        code = error.get("code")
        if garbled.status < 400 or (not message and garbled.status < 500):
            raise
        status = code if isinstance(code, int) and code >= 400 else garbled.status
        body = ErrorBody(error=str(message or garbled.why))
        raise CallRefused(garbled.server, garbled.path, status, body) from garbled


def _metric(text: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^vllm:{name}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
    )


@dataclass(eq=False)
class Segment:
    """Sent under a version and its label, after `num_loads` weight loads."""

    request: GenerateRequest
    wire_id: str
    on_chunk: OnChunk
    version: int = 0
    label: str = ""
    num_loads: int = 0
    is_sent: bool = False
    is_aborted: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class VllmProcess(CallScope):
    """vLLM process of a server.

    Life: `state` is serving -> paused (a commit holds new requests back) -> loading -> serving, once
        checked; or asleep. A process that fails while loading is cut.
    Waits: a segment sleeps in wait_open until it may be sent, and in wait_settled if a load began;
        change_nowait wakes both.
    Invariant: a segment is sent only under `label` while `version` serves. No token of a failed load is
        passed on.
    """

    def __init__(self, caller: Caller, version: int, mark: str = "") -> None:
        """`mark`: in every label; distinguishes runs that push to one server."""
        super().__init__(caller)
        self._mark = f"~{mark}" if mark else ""  # vLLM allows no @ in a salt
        self.version = self.offered_version = self._start_version = version
        self.state: Literal["serving", "paused", "loading", "asleep"] = "serving"
        self.asleep: set[EnginePart] = set()
        self.label = START_LABEL
        self.digest = ""
        self.model: str | None = None
        """Serving adapter; None: the base model."""
        self.adapter_folder: Path | None = None
        self.vocab_size: float = math.inf
        """Ids are 0..vocab_size - 1. Set when ready."""
        self.resumes_grammars = False
        """Set when ready."""
        self._num_loads = self._last_kept_kv = 0
        self._segments: dict[str, Segment] = {}
        self._changed = asyncio.Event()

    @property
    def sent(self) -> list[Segment]:
        return [one for one in self._segments.values() if one.is_sent and not one.answered.is_set()]

    @property
    def num_waiting(self) -> int:
        return sum(not segment.is_sent for segment in self._segments.values())

    def segments(self, request_ids: Sequence[str] | None) -> list[Segment]:
        segments = self._segments.values()
        return [one for one in segments if request_ids is None or one.request.request_id in request_ids]

    def label_of(self, version: int) -> str:
        return f"{version}{self._mark}"

    def version_of(self, label: str) -> int:
        """Return -1 for another run's label."""
        if label == START_LABEL:
            return self._start_version
        text = label.removesuffix(self._mark)
        return int(text) if text.isdecimal() and label.endswith(self._mark) else -1

    def change_nowait(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def begin_load_nowait(self, version: int, *, keeps_kv: bool = False) -> None:
        """Mark the weights as unknown until confirm_nowait."""
        self.state = "loading"
        self._num_loads += 1
        self.offered_version = max(self.offered_version, version)
        if keeps_kv:
            self._last_kept_kv = self._num_loads

    def confirm_nowait(self) -> None:
        self.state = "asleep" if "weights" in self.asleep else "serving"
        self.change_nowait()

    def is_certain(self, segment: Segment) -> bool:
        """Return whether no load began since the segment was sent."""
        return segment.num_loads == self._num_loads

    def is_stale(self, segment: Segment) -> bool:
        """Return whether the segment may have read a KV cache older than its weights."""
        return self._last_kept_kv > segment.num_loads

    async def wait_open(self, segment: Segment) -> None:
        """Wait until the segment may be sent, or is aborted."""
        while not segment.is_aborted and (self.state != "serving" or self.asleep):
            await self._changed.wait()
        segment.version = self.version
        segment.label = self.label
        segment.num_loads = self._num_loads
        segment.is_sent = not segment.is_aborted

    async def wait_settled(self, segment: Segment) -> None:
        while not self.is_certain(segment) and self.state == "loading":
            await self._changed.wait()

    @contextlib.contextmanager
    def holding(self, segment: Segment) -> Iterator[None]:
        """Keep the segment in flight; cancelling ends it in vLLM."""
        self._segments[segment.wire_id] = segment
        try:
            yield
        finally:
            del self._segments[segment.wire_id]
            segment.answered.set()

    async def end(self, segments: Sequence[Segment]) -> None:
        """Abort these segments and wait for vLLM's answers."""
        while wire_ids := [segment.wire_id for segment in segments if not segment.answered.is_set()]:
            await self.abort(wire_ids)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    for segment in segments:
                        await segment.answered.wait()

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        """Return EngineLost if the engine is dead: its server briefly answers 500 or above."""
        if isinstance(failure, CallRefused) and failure.status >= 500:
            try:
                await self.get("/health", Text, _HEALTH_LIMIT_S)
            except (CallLost, CallRefused) as dead:
                answer = f"answered {failure.status} to {failure.path} ({failure.body.error})"
                return self.lost(f"{answer} and is not well: {dead}")
        return await super().error_of(failure)

    # ---- calls: raise CallRefused with vLLM's error, or CallLost; `timeout_s` None: no limit

    async def get(self, path: str, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        with _vllm_errors():
            return await self.caller.get(path, answer, timeout_s=timeout_s)

    async def post(
        self, path: str, body: dict[str, Any] | None, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        sent = None if body is None else JsonBody(body)
        with _vllm_errors():
            return await self.caller.post(path, sent, answer, timeout_s=timeout_s)

    async def tell(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> None:
        await self.post(path, body, Text, timeout_s)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Generated, None]:
        """Yield parts of GENERATE. Closing it ends the request."""
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with _vllm_errors():
            async with contextlib.aclosing(self.caller.lines(GENERATE, JsonBody(streamed))) as lines:
                async for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        try:
                            part = Generated.model_validate_json(data)
                        except ValidationError:
                            why = f"no {Generated.__name__}: {data[:200].decode(errors='replace')}"
                            raise CallGarbled(self.name, GENERATE, why, status=500, text=data) from None
                        yield part

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.tell("/abort_requests", {"request_ids": [_WIRE_ID.format(name) for name in request_ids]})

    async def reset_cache(self) -> None:
        """Clear the KV cache; running requests compute theirs anew. Raises EngineError."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not (await self.post(path, None, CacheReset)).success:
            rule = "no token is sampled from new weights over an old KV cache"
            way_out = "set weight_sync.interrupt=abort."
            raise EngineError(self.name, f"could not clear its KV cache ({path})", rule=rule, way_out=way_out)

    async def rpc(self, method: str, argument: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Call our extension in each worker. Raises CallRefused."""
        args = [] if argument is None else [json.dumps(argument)]
        answer = await self.post("/collective_rpc", {"method": method, "args": args}, RpcResults)
        for result in answer.results:
            if "error" in result:
                body = ErrorBody.model_validate(result)
                raise CallRefused(self.name, f"/collective_rpc {method}", 409, body)
        return answer.results

    async def set_label(self, label: str) -> None:
        await self.tell("/update_weight_version", {"new_version": label})

    async def counts(self, *, timeout_s: float | None) -> dict[str, float]:
        """Return counts from its metrics; tokens_prompted includes tokens_cached."""
        text = (await self.get("/metrics", Text, timeout_s)).text
        return {ours: sum(_metric(text, theirs) for theirs in names) for ours, names in _COUNTS.items()}


@dataclass(frozen=True, slots=True)
class VllmRequirements:
    """Requirements of the run.

    `end_ids`: the only end tokens. `special_ids`: tokens without text, by name, for stop strings.
    `starts_fresh`: with the initial weights. `stays`: keeps its memory during sleep. `canary_limit` in
    nats.
    """

    model_path: str
    dtype: str
    slots: int
    max_length: int
    end_ids: tuple[int, ...]
    device: str
    special_ids: Mapping[str, int] = field(default_factory=dict)
    starts_fresh: bool = True
    stays: bool = False
    returns_routing: bool = False
    canary_limit: float = math.inf


def check_settings(name: str, info: ServerInfo, needed: VllmRequirements) -> None:
    """Raise ConfigError, with vLLM's flag, if a setting differs."""
    config = info.vllm_config
    model = config.get("model_config") or {}
    path = str(model.get("model"))
    dtype = str(model.get("dtype")).removeprefix("torch.")
    mode = model.get("logprobs_mode")
    length = model.get("max_model_len") or 0
    num_seqs = (config.get("scheduler_config") or {}).get("max_num_seqs") or 0
    routing = bool((config.get("aux_output_config") or {}).get(_ROUTING))
    keep_alive_s = info.vllm_env.get(_KEEP_ALIVE)
    is_path = os.path.realpath(path) == os.path.realpath(needed.model_path)
    is_kept_alive = keep_alive_s is None or keep_alive_s >= _MIN_KEEP_ALIVE_S
    for setting, value, is_right, flag in (
        ("logprobs_mode", mode, mode == _LOGPROBS, f"--logprobs-mode {_LOGPROBS}"),
        ("model", path, is_path, f"vllm serve {needed.model_path}"),
        ("dtype", dtype, dtype == needed.dtype, f"--dtype {needed.dtype}"),
        ("max_model_len", length, length >= needed.max_length, f"--max-model-len {needed.max_length}"),
        ("max_num_seqs", num_seqs, num_seqs >= needed.slots, f"--max-num-seqs {needed.slots}"),
        (_ROUTING, routing, routing or not needed.returns_routing, "--enable-return-routed-experts"),
        (_KEEP_ALIVE, keep_alive_s, is_kept_alive, f"{_KEEP_ALIVE}={_MIN_KEEP_ALIVE_S} or more set"),
    ):
        if not is_right:
            what = f"{name}: the vLLM server there has {setting}={value}"
            raise ConfigError(what, rule=_RULE, way_out=f"start it with {flag}.")


async def make_ready(process: VllmProcess, needed: VllmRequirements) -> None:
    """Wait until the server is up and configured. Raises ConfigError, CallRefused or CallLost."""
    there = f"{process.name}: the vLLM server there"
    with _refusal_means(
        f"{there} does not take the key", "put its key into the environment variable ASYNCRL_VLLM_KEY.", 401
    ):
        await _until_up(process)
    with _refusal_means(f"{there} has no /server_info", "start it with VLLM_SERVER_DEV_MODE=1.", 403, 404):
        info = await process.get("/server_info?config_format=json", ServerInfo)
    check_settings(process.name, info, needed)
    structured = info.vllm_config.get("structured_outputs_config") or {}
    process.resumes_grammars = structured.get("reasoning_parser_plugin") == GRAMMARS
    with _refusal_means(
        f"{there} lacks our worker extension", f"start it with --worker-extension-cls {EXTENSION}."
    ):
        workers = await process.rpc("asyncrl_facts")
    process.vocab_size = min(int(worker["vocab_size"]) for worker in workers)
    ours = process.label_of(process.version)
    label = (await process.get("/weight_info", LabelInfo)).weight_version
    if needed.starts_fresh and label not in (START_LABEL, ours):
        raise ConfigError(
            f"{there} has weights that another run pushed, under the label {label}",
            rule=f"it must start with the weights of {needed.model_path}",
            way_out="start that server again.",
        )
    await process.tell("/resume")  # an earlier run may have paused it and died
    await process.set_label(ours)
    process.label = ours
    with _refusal_means(f"{there} has no {GENERATE}", "start it with --enable-scale-out.", 403, 404):
        # vLLM compiles once for each: greedy, prompt logprobs, seeded sampling.
        greedy = {"max_tokens": 1, "temperature": 0.0}
        seeded = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1}
        for number, sampling in enumerate((greedy, greedy | {"prompt_logprobs": 0}, seeded)):
            body = vllm_request([1, 2, 3], f"warm-up-{number}", ours, None, **sampling)
            await process.tell(GENERATE, body)


@contextlib.contextmanager
def _refusal_means(what: str, way_out: str, *statuses: int) -> Iterator[None]:
    """Turn refusals with these statuses (none: any) into ConfigError."""
    try:
        yield
    except CallRefused as refusal:
        if statuses and refusal.status not in statuses:
            raise
        raise ConfigError(f"{what} ({refusal.body.error})", rule=_RULE, way_out=way_out) from refusal


async def _until_up(process: VllmProcess) -> None:
    """Wait for an answer; an external server may refuse connections at first."""
    while True:
        try:
            await process.get("/health", Text)
            return
        except CallGarbled:
            raise
        except CallLost:
            await asyncio.sleep(_ASK_AGAIN_S)
