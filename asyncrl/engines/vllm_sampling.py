"""Sample one segment with vLLM."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import EngineError, EngineLost, RequestRefused
from asyncrl.base.http import CallLost, CallRefused
from asyncrl.base.message import ErrorBody
from asyncrl.engines.engine import refused
from asyncrl.engines.link import SegmentCheck
from asyncrl.engines.vllm_process import (
    GENERATE,
    GRAMMARS,
    Finish,
    Generated,
    LabelSpan,
    Segment,
    TopLogprob,
    VllmProcess,
    VllmRequirements,
    vllm_request,
)
from asyncrl.messages.codec import request_fault
from asyncrl.messages.engine_api import GenerateRequest, GenerateResponse
from asyncrl.messages.records import TopLogprobs, VersionSpan
from asyncrl.messages.stop_watch import Decode, StopWatch

_NO_LOGPROB = -9999.0
_MIN_TEMPERATURE = 0.01


def check_request(process: VllmProcess, request: GenerateRequest, requirements: VllmRequirements) -> None:
    """Raise RequestRefused for a request that vLLM would change, or that would end its engine (invalid
    ids).
    """
    fault = request_fault(request, requirements.max_length, process.vocab_size)
    if request.grammar is not None and not process.resumes_grammars:
        config = json.dumps({"backend": "guidance", "reasoning_parser_plugin": GRAMMARS})
        fault = fault or ErrorBody(
            error="it has a grammar",
            rule="our plugin continues an interrupted grammar",
            way_out=f"start that server with --structured-outputs-config '{config}'.",
        )
    if 0.0 < request.temperature < _MIN_TEMPERATURE:
        fault = fault or ErrorBody(
            error=f"temperature {request.temperature}",
            rule=f"vLLM samples at {_MIN_TEMPERATURE} instead of less",
            way_out=f"set rollout.temperature to 0 (greedy), or to {_MIN_TEMPERATURE} or more.",
        )
    if fault:
        what = f"{process.name} refused request {request.request_id}: {fault.error}"
        raise RequestRefused(what, why=fault.error, rule=fault.rule, way_out=fault.way_out)


def ids_of(request: GenerateRequest) -> list[int]:
    found: list[int] = np.asarray(request.prompt_ids).tolist()
    return found


async def sample(
    process: VllmProcess, segment: Segment, requirements: VllmRequirements, decode: Decode | None
) -> GenerateResponse:
    """`decode`: for stop strings across two segments. Raises RequestRefused, EngineLost or EngineError."""
    request = segment.request
    async with process.calls():
        with process.holding(segment):
            await process.wait_open(segment)
            sampled = SampledSegment(process, segment, returns_routing=requirements.returns_routing)
            if not segment.is_aborted:
                body = generate_body(segment, requirements, process.model)
                watch = joint_watch(request, decode)
                try:
                    if segment.on_chunk is None and watch is None:
                        sampled.add(await process.post(GENERATE, body, Generated))
                    else:
                        await sampled.stream(body, watch)
                except CallRefused as refusal:
                    error = await process.error_of(refusal)
                    if isinstance(error, EngineLost) or refusal.status in (401, 403, 404):
                        raise error from refusal
                    raise refused(process.name, request, refusal) from refusal
                segment.answered.set()
                await process.wait_settled(segment)
            return sampled.response()


def generate_body(segment: Segment, requirements: VllmRequirements, model: str | None) -> dict[str, Any]:
    """Return the body. vLLM restarts its random stream per request, so the seed (63 bits) depends on the
    segment's position.
    """
    request = segment.request
    place = f"{request.seed}|{len(request.prompt_ids)}".encode()
    special = [requirements.special_ids[text] for text in request.stop if text in requirements.special_ids]
    sampling: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": int.from_bytes(hashlib.sha256(place).digest()[:8], "big") >> 1,
        "stop": [text for text in request.stop if text],
        "stop_token_ids": [*requirements.end_ids, *special],
        "detokenize": bool(request.stop),
        "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
    }
    if request.grammar is not None:
        sampling["structured_outputs"] = {"grammar": request.grammar}
        sampling["extra_args"] = {"num_resumed": request.num_resumed}
    return vllm_request(ids_of(request), segment.wire_id, segment.label, model, **sampling)


def _likeliest(top: Sequence[TopLogprob], num: int) -> TopLogprobs:
    """Return the likeliest tokens, without impossible ones."""
    found = sorted(
        (one for one in top if one.rank is not None and one.rank <= num), key=lambda one: one.rank or 0
    )
    return [(one.token_id, one.logprob) for one in found[:num] if one.logprob > _NO_LOGPROB]


class SampledSegment:
    """vLLM's answer to a segment.

    Life: made -> add() the whole answer, or stream() -> response().
    Invariant: on_chunk has got `num_told` tokens. `labels` come with the end and cover all tokens.
    """

    def __init__(self, process: VllmProcess, segment: Segment, *, returns_routing: bool = False) -> None:
        self._process = process
        self._segment = segment
        self._returns_routing = returns_routing
        self._check = SegmentCheck(process.name, segment.request, oldest=process.version)
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._finish: Finish | None = "abort" if segment.is_aborted else None
        self._labels: list[LabelSpan] | None = None
        self._routed: str | None = None
        self._num_cached = self._num_told = 0

    def add(self, part: Generated) -> None:
        for choice in part.choices:
            content = [] if choice.logprobs is None else choice.logprobs.content or []
            self._token_ids += choice.token_ids or []
            self._logprobs += [math.nan if one.logprob <= _NO_LOGPROB else one.logprob for one in content]
            if num_top := self._segment.request.top_logprobs:
                self._top += [_likeliest(one.top_logprobs, num_top) for one in content]
            self._finish = choice.finish_reason or self._finish
            self._labels = choice.weight_versions or self._labels
            self._routed = choice.routed_experts or self._routed
        if part.usage is not None:
            self._num_cached = (part.usage.prompt_tokens_details or {}).get("cached_tokens") or 0

    async def stream(self, body: dict[str, Any], watch: StopWatch | None) -> None:
        """Stream to the end, which has the weight labels."""
        process, segment = self._process, self._segment
        num_wanted: int | None = None
        async with contextlib.aclosing(process.stream(body)) as parts:
            async for part in parts:
                num_before = len(self._token_ids)
                self.add(part)
                if watch is not None and num_wanted is None:
                    # Past its window no stop string reaches back.
                    for at in range(num_before, min(len(self._token_ids), watch.window)):
                        if watch.is_complete(self._token_ids[at]):
                            num_wanted = at + 1
                            break
                    if num_wanted is not None and self._finish is None:
                        await process.abort([segment.wire_id])
                if self._finish is None and num_wanted is None and process.is_certain(segment):
                    self._tell()
        if self._finish is None:
            raise CallLost(process.name, GENERATE, "the answer broke off before its end")
        if num_wanted is not None:
            self._cut(num_wanted, "stop")

    def _tell(self) -> None:
        num_tokens = len(self._token_ids)
        if self._segment.on_chunk is not None and num_tokens > self._num_told:
            chunk = self._part([VersionSpan(self._num_told, num_tokens, self._segment.version)], None)
            self._check.accept(chunk, newest=self._process.offered_version)
            self._segment.on_chunk(chunk)
            self._num_told = num_tokens

    def _part(self, spans: list[VersionSpan], finish: Finish | None) -> GenerateResponse:
        """Return the tokens that on_chunk did not get."""
        told = self._num_told
        return GenerateResponse(
            request_id=self._segment.request.request_id,
            token_ids=self._token_ids[told:],
            logprobs=self._logprobs[told:],
            version_spans=[
                VersionSpan(max(0, span.start - told), span.end - told, span.version)
                for span in spans
                if span.end > told
            ],
            finish_reason=finish,
            top_logprobs=self._top[told:],
            routing=self._routing() if finish else b"",
        )

    def _cut(self, num_tokens: int, finish: Finish) -> None:
        del self._token_ids[num_tokens:], self._logprobs[num_tokens:], self._top[num_tokens:]
        self._finish = finish

    def response(self) -> GenerateResponse:
        """Return the unreported tokens, or none if the prompt was read under older weights. Raises
        EngineError.
        """
        process, segment, num_told = self._process, self._segment, self._num_told
        spans = self._spans()
        are_known = all(span.version >= 0 for span in spans)
        if process.is_stale(segment) and self._num_cached and spans and spans[0].version != segment.version:
            spans = []
        num_good = spans[-1].end if spans else 0
        is_told_right = num_told <= num_good and all(
            span.start >= num_told or span.version == segment.version for span in spans
        )
        has_labels = self._labels is not None or not self._token_ids
        if self._finish is None or not (are_known and has_labels and is_told_right):
            labels = [(label.start, label.end, label.version) for label in self._labels or []]
            raise EngineError(
                process.name,
                f"answered request {segment.request.request_id} with finish_reason {self._finish}, "
                f"{len(self._token_ids)} tokens and labels {labels}, after {num_told} tokens of version "
                f"{segment.version}",
                rule="vLLM 0.32 reports an answer's end and the label of each token; one run sets the labels",
                way_out=f"read {process.name}'s log, use vLLM 0.32, and give each run its own servers.",
            )
        if num_good < len(self._token_ids):
            self._cut(num_good, "abort")
        answer = self._part(spans, self._finish)
        self._check.accept(answer, newest=process.offered_version)
        return answer

    def _routing(self) -> bytes:
        """Raises EngineError if enabled experts are missing."""
        num_tokens = len(self._token_ids)
        if not self._returns_routing or not num_tokens:
            return b""
        request = self._segment.request
        num_read = len(request.prompt_ids) + num_tokens - 1
        experts = np.empty(0, np.uint16) if self._routed is None else decode_experts(self._routed)
        if len(experts) < num_read:
            raise EngineError(
                self._process.name,
                f"returned experts of {len(experts)} of {num_read} tokens of request {request.request_id}",
                rule="algorithm.router_replay=true trains with the experts that vLLM 0.32 took",
                way_out="start it with --enable-return-routed-experts, or set algorithm.router_replay=false.",
            )
        return experts[:num_read].tobytes()

    def _spans(self) -> list[VersionSpan]:
        spans: list[VersionSpan] = []
        for label in self._labels or []:
            end = min(label.end, len(self._token_ids))  # labels also cover tokens cut after a stop string
            if label.start < end:
                spans.append(VersionSpan(label.start, end, self._process.version_of(label.version)))
        return spans


def decode_experts(encoded: str) -> npt.NDArray[np.uint16]:
    """Decode routed_experts to [T, E] for layers with a router; vLLM writes zeros for the others."""
    experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    is_routed = [len(set(row)) == len(row) for row in experts[0].tolist()]
    found: npt.NDArray[np.uint16] = experts[:, is_routed].reshape(len(experts), -1).astype("<u2")
    return found


def joint_watch(request: GenerateRequest, decode: Decode | None) -> StopWatch | None:
    """Watch for stop strings across segments; vLLM searches only new text."""
    if decode is None or not request.num_resumed or not any(request.stop):
        return None
    return StopWatch(request.stop, decode, ids_of(request)[-request.num_resumed :])
