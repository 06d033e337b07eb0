"""State and HTTP calls of one vLLM process (0.32 or 0.33), and its required settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import Field, ValidationError

from asyncrl.base.errors import ConfigError, EngineError, ErrorBody
from asyncrl.base.http import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.base.waits import Signal, at_most
from asyncrl.engines.openai_scope import (
    ASK_AGAIN_S,
    Json,
    OpenAIScope,
    Read,
    openai_errors,
)
from asyncrl.messages.engine_api import EnginePart
from asyncrl.messages.sampling import Decode

if TYPE_CHECKING:
    from asyncrl.extensions.vllm.vllm_sampling import Segment
    from asyncrl.extensions.vllm.vllm_server import Load

Finish = Literal["stop", "length", "abort"]
GENERATE = "/inference/v1/generate"
GRAMMARS = "asyncrl_servers.vllm.monkeypatches"
_PLUGIN = "reasoning_parser_plugin"
_RPC = "/collective_rpc"
_WIRE_ID = "generate-tokens-{}"
"""vLLM's id for our request_id, required by /abort_requests, which accepts any id."""
_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
LOADS_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_ROUTING = "enable_return_routed_experts"
_SUPPORTS = "return_sampling_mask"
_WAY_OUT = "start it as docs/engines.md describes, with its key in ASYNCRL_VLLM_KEY."
_MIN_KEEP_ALIVE_S = 60
"""Our connections idle up to 30 s (http.Caller)."""
START_FACTOR = 3
"""Multiple of supervision.start_timeout_s: vLLM first compiles kernels."""
_COUNTS = {
    "num_running": ("num_requests_running",),
    "num_queued": ("num_requests_waiting",),
    "tokens_generated": ("generation_tokens_total",),
    "num_preempted": ("num_preemptions_total",),
    "kv_fraction": ("kv_cache_usage_perc",),
    "decode_s": ("request_prefill_time_seconds_sum", "inter_token_latency_seconds_sum"),
}


class WorkerAnswer(TypedDict, total=False):
    """Answer of our extension; a call fills what it returns. `folder`: with adapters."""

    vocab_size: int
    state: str
    digest: str
    folder: str


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
    sampling_mask: list[list[int]] | None = None
    """The support of each token, ascending; empty for a request without a cut."""
    routed_experts: str | None = None
    """With the finish_reason: .npy file in base64, uint8 or uint16 [T, layers, k],
    without the last token.
    """


class Generated(Read):
    """Answer of GENERATE, or a line of its stream."""

    choices: list[Choice] = Field(max_length=1)
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


def vllm_request(
    token_ids: list[int],
    request_id: str,
    label: str,
    model: str | None,
    **sampling: object,
) -> dict[str, object]:
    """Return the body of GENERATE. The salt contains the label, so cached prefixes
    never outlive their weights.
    """
    return {
        "token_ids": token_ids,
        "request_id": request_id,
        "cache_salt": f"v{label}",
        "model": model,
        # Only the run's end ids may end a request (stop_token_ids); vLLM would add the
        # ids in the model's files. Only stop strings need text, which costs time.
        # logprobs 0: only the sampled token's.
        "sampling_params": {"logprobs": 0, "ignore_eos": True, "detokenize": False}
        | sampling,
    }


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """An adapter of a process; "" is the run's own, or all weights. The process has its
    version. `scale`: None for weights. `folder`: peft files on the server of what
    serves; "" for the base model. `is_open`: no commit holds new requests back.
    `staged` waits for a commit.
    """

    scale: float | None = None
    digest: str = ""
    folder: str = ""
    is_open: bool = True
    staged: Load | None = None


ProcessState = Enum("ProcessState", "SERVING LOADING ASLEEP")


class VllmProcess(OpenAIScope):
    """vLLM process of a server.

    Life: `state` is SERVING -> LOADING -> SERVING, once checked; or ASLEEP. A process
        that fails while loading is cut. A push of another adapter than the run's own
        does not change it.
    Waits: a segment sleeps in wait_open until it may be sent, and in wait_settled if a
        load began; `changed` wakes both.
    Invariant: a segment is sent only under the label of its adapter's version, while
        that serves. No token of a failed load is passed on.
    """

    def __init__(self, caller: Caller, version: int, mark: str) -> None:
        super().__init__(caller, version)
        self._mark = mark
        self.adapters = {"": ServedAdapter()}
        self.lora = {"max_loras": 1, "max_lora_rank": 0}
        """The server's limits. Set when ready."""
        self.state = ProcessState.SERVING
        self.asleep: set[EnginePart] = set()
        # False from the start of a sleep to its end: after a failed or cancelled one, the
        # next sleep asks vLLM again.
        self.is_sleep_sure = True
        self.vocab_size: float = math.inf
        """Ids are 0..vocab_size - 1. Set when ready."""
        self.num_workers = 1
        self.kv_tokens = 0
        """Set when ready."""
        self.num_uncounted = 0
        """Preemptions by vLLM's count that no full KV cache caused in this run."""
        self._num_preempted = 0
        self.segments: dict[str, Segment] = {}
        """In flight, by wire id."""
        self.changed = Signal()

    @property
    def sent(self) -> list[Segment]:
        return [
            one
            for one in self.segments.values()
            if one.is_sent and not one.answered.is_set()
        ]

    @property
    def has_adapters(self) -> bool:
        """Pushes are of adapters. Known when ready."""
        return self.adapters[""].scale is not None

    def sent_to(self, adapter: str) -> list[Segment]:
        return [one for one in self.sent if one.request.adapter == adapter]

    def label_of(self, version: int) -> str:
        return f"{version}~{self._mark}"  # vLLM allows no @ in a salt

    def version_of(self, label: str) -> int:
        """Return -1 for another run's label."""
        version, _, mark = label.partition("~")
        return int(version) if version.isdecimal() and mark == self._mark else -1

    def begin_load_nowait(self, adapter: str) -> None:
        """Mark an adapter's weights as unknown. The run's own adapter holds up all
        requests until confirm_nowait.
        """
        if adapter:
            self.versions.pop(adapter, None)
            return
        self.state = ProcessState.LOADING
        for segment in self.sent_to(""):
            # From here its tokens may come from other weights, or from half a set. They
            # wait in wait_settled until the canary has agreed, or are lost with the
            # process.
            segment.is_certain = False

    def confirm_nowait(self) -> None:
        self.state = ProcessState.SERVING
        self.changed.notify()

    async def wait_open(self, segment: Segment) -> None:
        """Wait until the segment may be sent, or is aborted, or has no adapter."""
        adapters, name = self.adapters, segment.request.adapter
        await self.changed.wait_for(
            lambda: (
                segment.is_aborted
                or name not in adapters
                or (
                    self.state is ProcessState.SERVING
                    and not self.asleep
                    and adapters[name].is_open
                )
            )
        )
        # In the same step as the check: a commit that begins now finds this segment
        # among the sent ones.
        segment.is_sent = not segment.is_aborted

    async def wait_settled(self, segment: Segment) -> None:
        await self.changed.wait_for(
            lambda: segment.is_certain or self.state is not ProcessState.LOADING
        )

    async def end(self, segments: Sequence[Segment]) -> None:
        """Abort these segments and wait for vLLM's answers."""
        while wire_ids := [
            segment.wire_id for segment in segments if not segment.answered.is_set()
        ]:
            # vLLM accepts an abort of an id that it does not know yet, and does
            # nothing. So it is repeated until the request's own answer arrives.
            await self.abort(wire_ids)
            async with at_most(ASK_AGAIN_S):
                for segment in segments:
                    await segment.answered.wait()

    async def tell(
        self,
        path: str,
        body: dict[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        # Routes like /resume answer nothing.
        content = None if body is None else Json(body)
        with openai_errors():
            await self.caller.read("POST", path, content, timeout_s)

    async def stream(self, body: dict[str, object]) -> AsyncGenerator[Generated, None]:
        """Yield parts of GENERATE. Closing it ends the request."""
        with openai_errors():
            sent = Json(body | {"stream": True})
            async with contextlib.aclosing(self.caller.lines(GENERATE, sent)) as lines:
                async for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        try:
                            part = Generated.model_validate_json(data)
                        except ValidationError:
                            why = f"no {Generated.__name__}: {data[:200].decode(errors='replace')}"
                            raise CallGarbled(
                                self.name, GENERATE, why, status=500, text=data
                            ) from None
                        yield part

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.tell(
            "/abort_requests",
            {"request_ids": [_WIRE_ID.format(name) for name in request_ids]},
        )

    async def reset_cache(self) -> None:
        """Clear the KV cache; running requests recompute theirs. Raises EngineError."""
        # vLLM counts them as preempted, with their next tokens. Paused, it still says how
        # many ran, including requests that have ended since.
        counts = await self.counts(timeout_s=None)
        self.num_uncounted += min(int(counts["num_running"]), len(self.sent))
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not (await self.post(path, None, Json)).root.get("success"):
            rule = "no token is sampled from new weights over an old KV cache"
            way_out = "set weight_sync.interrupt=abort."
            raise EngineError(
                self.name,
                f"could not clear its KV cache ({path})",
                rule=rule,
                way_out=way_out,
            )

    async def rpc(self, method: str, **argument: object) -> list[WorkerAnswer]:
        """Call our extension in each worker. Raises CallRefused."""
        body: dict[str, object] = {
            "method": f"asyncrl_{method}",
            "args": [json.dumps(argument)],
        }
        results: list[WorkerAnswer] = (await self.post(_RPC, body, Json)).root[
            "results"
        ]
        # One worker that failed is enough: each holds a part of the model.
        for result in results:
            if "error" in result:
                raise CallRefused(
                    self.name, f"{_RPC} {method}", 409, ErrorBody.model_validate(result)
                )
        return results

    def missing(self, adapter: str) -> ErrorBody:
        what = f"adapter {adapter!r} has no weights here; open are {[*self.adapters]}"
        way_out = "open the adapter, and push its weights."
        return ErrorBody(error=what, way_out=way_out)

    async def tell_adapters(self) -> list[WorkerAnswer]:
        """Tell the workers which adapters are open."""
        scales = {name: one.scale for name, one in self.adapters.items()}
        return await self.rpc("facts", scales=scales if self.has_adapters else {})

    async def load_adapter(self, adapter: str, folder: str) -> None:
        """Load a version in the place of the one before."""
        request = {
            # The name stays the same over all versions, so requests need no new one.
            "lora_name": lora_name(adapter),
            # A folder per version, by which vLLM's prefix cache knows them apart.
            "lora_path": folder,
            "load_inplace": True,
        }
        await self.tell("/v1/load_lora_adapter", request)
        await self.rpc("check_adapter", adapter=adapter)

    async def set_label(self, label: str) -> None:
        await self.tell("/update_weight_version", {"new_version": label})

    async def served_label(self, timeout_s: float | None = None) -> str:
        return str(
            (await self.get("/weight_info", Json, timeout_s)).root["weight_version"]
        )

    def num_preempted(self, counts: Mapping[str, float]) -> int:
        """Return the preemptions for a full KV cache since this process was ready."""
        found = int(counts["num_preempted"]) - self.num_uncounted
        # Those of a cleared cache are subtracted before vLLM counts them.
        self._num_preempted = max(self._num_preempted, found)
        return self._num_preempted

    async def counts(self, *, timeout_s: float | None) -> dict[str, float]:
        """Return counts from its metrics."""
        text = (await self.read("/metrics", timeout_s)).decode(errors="replace")
        values = dict.fromkeys(
            (name for names in _COUNTS.values() for name in names), 0.0
        )
        for name, value in re.findall(
            r"^vllm:(\w+)(?:\{.*?\})? (\S+)$", text, re.MULTILINE
        ):
            if name == "kv_cache_usage_perc":
                values[name] = max(values[name], float(value))
            elif name in values:
                # Summed, since a metric may have a line per engine core.
                values[name] += float(value)
        return {
            ours: sum(values[theirs] for theirs in names)
            for ours, names in _COUNTS.items()
        }


def lora_name(adapter: str) -> str:
    return f"policy-adapter:{adapter}"


@dataclass(frozen=True, slots=True)
class VllmRequirements:
    """Requirements of the run.

    `end_ids`: the only end tokens. `special_ids`: tokens without text, by name, for
    stop strings. `stays`: keeps its memory during sleep. `adapter_rank`: the largest;
    0: no adapters. `max_adapters`: besides the run's own. `canary_limit` in nats; None:
    from the canary's noise. `decode`: for stop strings across two segments. `mark`: in
    all labels; tokens of other runs raise EngineError.
    """

    model_path: str
    dtype: str
    slots: int
    max_length: int
    end_ids: tuple[int, ...]
    special_ids: Mapping[str, int] = field(default_factory=dict)
    stays: bool = False
    adapter_rank: int = 0
    adapter_scale: float | None = None
    max_adapters: int = 0
    returns_routing: bool = False
    returns_supports: bool = False
    canary_limit: float | None = None
    decode: Decode | None = None
    mark: str = ""


def has_length_dependent_rope(folder: Path) -> bool:
    """Return whether vLLM chooses the model's rotary frequencies by max_model_len
    (LongRoPE).
    """
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return re.search(r'"(rope_)?type":\s*"(longrope|su)"', text) is not None


def check_settings(name: str, info: dict[str, Any], needed: VllmRequirements) -> None:
    """Raise ConfigError if settings differ."""
    config = info["vllm_config"]
    model = config["model_config"]
    lora = config.get("lora_config") or {}
    # These change tokens or logprobs: the run would train on wrong numbers without any
    # error. vLLM's default logprobs_mode is before temperature and top_p.
    equal: dict[str, tuple[object, object]] = {
        "model": (
            os.path.realpath(model["model"]),
            os.path.realpath(needed.model_path),
        ),
        "dtype": (str(model["dtype"]).removeprefix("torch."), needed.dtype),
        "logprobs_mode": (model["logprobs_mode"], "processed_logprobs"),
        _PLUGIN: (config["structured_outputs_config"][_PLUGIN], GRAMMARS),
    }
    # These make requests fail or wait, late in a run.
    at_least = {
        "max_model_len": (model["max_model_len"], needed.max_length),
        "max_num_seqs": (config["scheduler_config"]["max_num_seqs"], needed.slots),
        "max_lora_rank": (lora.get("max_lora_rank", 0), needed.adapter_rank),
        _ROUTING: (
            bool(config.get("aux_output_config", {}).get(_ROUTING)),
            needed.returns_routing,
        ),
        _SUPPORTS: (bool(model.get(_SUPPORTS)), needed.returns_supports),
        _KEEP_ALIVE: (
            info.get("vllm_env", {}).get(_KEEP_ALIVE) or _MIN_KEEP_ALIVE_S,
            _MIN_KEEP_ALIVE_S,
        ),
    }
    if needed.adapter_rank:
        # Else a push finds no route, and adapters wait for each other.
        at_least["max_loras"] = (lora.get("max_loras", 0), 1 + needed.max_adapters)
        may_load = info.get("vllm_env", {}).get(LOADS_ADAPTERS)
        equal[LOADS_ADAPTERS] = (bool(may_load), True)
    if has_length_dependent_rope(Path(needed.model_path)):
        # The trainer uses the frequencies of rollout's lengths, and the server those of
        # its own.
        equal["max_model_len"] = at_least.pop("max_model_len")
    wrong = [
        f"{key}={has} instead of {want}"
        for key, (has, want) in equal.items()
        if has != want
    ]
    wrong += [
        f"{key}={has} instead of {want} or more"
        for key, (has, want) in at_least.items()
        if has < want
    ]
    if wrong:
        what = f"{name}: the vLLM server there has {' and '.join(wrong)}"
        raise ConfigError(what, way_out=_WAY_OUT)


async def make_ready(process: VllmProcess, needed: VllmRequirements) -> None:
    """Wait until the server is up and configured. Raises ConfigError, CallRefused or
    CallLost.
    """
    try:
        await _until_up(process)
        settings = await process.get("/server_info?config_format=json", Json)
        check_settings(process.name, settings.root, needed)
        cache = settings.root["vllm_config"]["cache_config"]
        process.kv_tokens = cache["kv_cache_size_tokens"] or 0
        process.adapters[""].scale = needed.adapter_scale
        if process.has_adapters:
            process.lora = settings.root["vllm_config"]["lora_config"]
        workers = await process.tell_adapters()
        label = process.label_of(process.version)
        process.num_workers = len(workers)
        process.vocab_size = min(worker["vocab_size"] for worker in workers)
        await process.tell("/resume")  # an earlier run may have paused it and died
        counts = await process.counts(timeout_s=None)
        process.num_uncounted = int(counts["num_preempted"])
        await process.set_label(label)
        # vLLM compiles at the first seeded sampling, and at the first prompt logprobs.
        # Without top_p: on CUDA it would compile a large kernel that few runs use.
        sampling = {
            "max_tokens": 2,
            "temperature": 0.7,
            "seed": 1,
            "prompt_logprobs": 0,
        }
        await process.tell(
            GENERATE,
            vllm_request([1, 2, 3], "warm-up", label, None, **sampling),
        )
    except CallRefused as refusal:
        # A wrong key, or routes that only VLLM_SERVER_DEV_MODE opens: a server that was
        # started without our settings.
        if refusal.status not in (401, 403, 404):
            raise
        what = f"{process.name}: the vLLM server there refuses {refusal.path} ({refusal.body.error})"
        raise ConfigError(what, way_out=_WAY_OUT) from refusal


async def _until_up(process: VllmProcess) -> None:
    """Wait for an answer; an external server may refuse connections at first."""
    while True:
        with contextlib.suppress(CallLost):
            # Without a limit: while our server loads its model, the connection waits in
            # the backlog of its socket. The caller limits the whole start.
            await process.read("/health")
            return
        await asyncio.sleep(ASK_AGAIN_S)
