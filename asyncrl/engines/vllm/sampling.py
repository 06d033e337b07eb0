"""One segment sampled by a vLLM process: the request in vLLM's terms, and the answer in ours."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engines.engine import OnChunk, SegmentCheck
from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_process import Segment, VllmProcess
from asyncrl.engines.vllm.vllm_routes import GENERATE, Finish, Generated, LabelSpan, vllm_request
from asyncrl.errors import EngineError, EngineLost, RequestRefused
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.calls import GenerateChunk, GenerateRequest, GenerateResponse, Span

Decode = Callable[[Sequence[int]], str]
_NO_LOGPROB = -9999.0
"""What vLLM writes for a logprob that is NaN or below this."""
_MIN_TEMPERATURE = 0.01
"""vLLM takes this for anything between 0 and it."""
_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special
ones).
"""


def check_request(name: str, request: GenerateRequest, facts: VllmFacts, vocab_size: int | None) -> None:
    """Raise RequestRefused for a request that vLLM would change: it cuts one that is too long, and raises a
    temperature that is too low. An id far outside of the vocabulary would end its engine.
    """
    num_prompt, num_ids = len(request.prompt_ids), math.inf if vocab_size is None else vocab_size
    num_tokens = num_prompt + request.max_tokens
    wrong = next((token for token in request.prompt_ids if not 0 <= token < num_ids), None)
    if num_tokens > facts.max_length:
        what = f"{num_prompt} prompt tokens + {request.max_tokens} new ones = {num_tokens}, a slot holds "
        what, rule = f"{what}{facts.max_length}", "prompt and completion must fit into a slot"
        way_out = "shorten the prompt, lower max_tokens, or raise rollout.max_prompt_tokens or .max_tokens."
    elif wrong is not None:
        what, rule = f"it has token id {wrong}", f"the model knows ids 0..{num_ids - 1}"
        way_out = "encode the prompt with the model's own tokenizer."
    elif request.num_resumed > num_prompt:
        what = f"it has num_resumed={request.num_resumed} of {num_prompt} prompt ids"
        rule = "resumed ids are the last ones of the prompt"
        way_out = "count only the ids that an earlier segment sampled."
    elif 0.0 < request.temperature < _MIN_TEMPERATURE:
        what = f"temperature {request.temperature}"
        rule = f"vLLM samples at {_MIN_TEMPERATURE} where less is asked for"
        way_out = f"set rollout.temperature to 0 (greedy), or to {_MIN_TEMPERATURE} or more."
    else:
        return
    raise RequestRefused(f"{name} refused request {request.request_id}: {what}", rule=rule, way_out=way_out)


async def sample(
    process: VllmProcess, segment: Segment, facts: VllmFacts, decode: Decode | None, on_chunk: OnChunk | None
) -> GenerateResponse:
    """The segment's answer; `decode` for stop strings over the joint with the segment before. Raises
    RequestRefused, EngineLost or EngineError.
    """
    request = segment.request
    async with process.calls():
        with process.holding(segment):
            await process.wait_open(segment)
            if segment.is_aborted:
                return GenerateResponse(
                    request_id=request.request_id,
                    token_ids=[],
                    logprobs=[],
                    version_spans=[],
                    finish_reason="abort",
                )
            check = SegmentCheck(process.name, request, oldest=process.version)
            body, watch = generate_body(segment, facts, model=process.model), joint_watch(request, decode)
            try:
                if on_chunk is None and watch is None:
                    sampled = Sampled()
                    sampled.add(await process.post(GENERATE, body, Generated))
                else:
                    sampled = await _stream(process, segment, body, check, on_chunk, watch)
            except CallRefused as refusal:
                raise await _refused(process, request, refusal) from refusal
            segment.answered.set()
            await process.wait_settled(segment)
            answer = response_of(process, segment, sampled)
            check.end(answer, newest=process.offered_version)
            return answer


def generate_body(segment: Segment, facts: VllmFacts, *, model: str | None) -> dict[str, Any]:
    """What vLLM is asked. Its random stream restarts with each request, so the seed says where the segment
    begins.
    """
    request = segment.request
    special = [facts.special_ids[text] for text in request.stop if text in facts.special_ids]
    return vllm_request(
        request.prompt_ids,
        segment.wire_id,
        segment.label,
        model,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=segment_seed(request.seed, len(request.prompt_ids)),
        stop=[text for text in request.stop if text],
        stop_token_ids=[*facts.end_ids, *special],
        detokenize=bool(request.stop),
    )


def segment_seed(seed: int, num_prompt: int) -> int:
    """63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{num_prompt}".encode()).digest()[:8], "big") >> 1


@dataclass
class Sampled:
    """The answer of vLLM so far; on_chunk has got `num_told` of its tokens. `labels` come with the end and
    cover all tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    labels: list[LabelSpan] | None = None
    num_cached: int = 0
    num_told: int = 0

    def add(self, part: Generated) -> None:
        """A whole answer, or a part of a stream."""
        for choice in part.choices:
            content = [] if choice.logprobs is None else choice.logprobs.content or []
            self.token_ids += choice.token_ids or []
            self.logprobs += [math.nan if one.logprob <= _NO_LOGPROB else one.logprob for one in content]
            self.finish = choice.finish_reason or self.finish
            self.labels = choice.weight_versions or self.labels
        if part.usage is not None:
            self.num_cached = (part.usage.prompt_tokens_details or {}).get("cached_tokens") or 0

    def cut(self, num_tokens: int, finish: Finish) -> None:
        """Forget what lies behind the first `num_tokens`."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish = finish


async def _stream(
    process: VllmProcess,
    segment: Segment,
    body: dict[str, Any],
    check: SegmentCheck,
    on_chunk: OnChunk | None,
    watch: JointWatch | None,
) -> Sampled:
    """Read to the end even when a stop string was found: the end says which weights the tokens were of."""
    sampled, num_wanted = Sampled(), None
    async with contextlib.aclosing(process.stream(body)) as parts:
        async for part in parts:
            num_before = len(sampled.token_ids)
            sampled.add(part)
            if watch is not None and num_wanted is None:
                taken = watch.take(sampled.token_ids[num_before:])
                num_wanted = None if taken is None else num_before + taken
                if num_wanted is not None and sampled.finish is None:
                    await process.abort([segment.wire_id])
            is_running = sampled.finish is None and num_wanted is None
            if on_chunk is not None and is_running and process.is_certain(segment):
                new_ids = sampled.token_ids[sampled.num_told :]
                if new_ids:
                    logprobs = sampled.logprobs[sampled.num_told :]
                    chunk = GenerateChunk(token_ids=new_ids, logprobs=logprobs, version=segment.version)
                    check.chunk(chunk, newest=process.offered_version)
                    on_chunk(chunk)
                    sampled.num_told = len(sampled.token_ids)
    if sampled.finish is None:
        raise CallLost(process.name, GENERATE, "the answer broke off before its end")
    if num_wanted is not None:
        sampled.cut(num_wanted, "stop")
    return sampled


async def _refused(process: VllmProcess, request: GenerateRequest, refusal: CallRefused) -> Exception:
    """An error status concerns this one request, unless the engine is dead, or the key is refused."""
    error = await process.error_of(refusal)
    if isinstance(error, EngineLost) or refusal.status in (401, 403, 404):
        return error
    return RequestRefused(
        f"{process.name} answered {refusal.status} to request {request.request_id} "
        f"({len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}): {refusal.body.error}",
        rule="vLLM says whether it can serve a request",
        way_out=f"ask for what the model can do; read {process.name}'s log.",
    )


def response_of(process: VllmProcess, segment: Segment, sampled: Sampled) -> GenerateResponse:
    """The tokens that were not told yet, up to the first one whose label has no version that can be trusted.

    Nothing counts if the prompt may have been read from a cache of older weights, and began under newer ones.
    Raises EngineError for an answer that cannot be.
    """
    num_told, version = sampled.num_told, segment.version
    answered = f"answered request {segment.request.request_id} with"
    shown = ", ".join(f"[{span.start}, {span.end}) {span.version}" for span in sampled.labels or [])
    spans = _spans(sampled, process.version_of)
    if any(span.version < 0 for span in spans):
        raise EngineError(
            process.name,
            f"{answered} labels that this run never set: {shown}",
            rule="one run alone pushes weights into a server",
            way_out="give each run servers of its own (rollout.urls).",
        )
    if process.is_stale(segment) and sampled.num_cached and spans and spans[0].version != version:
        spans = []
    num_good = spans[-1].end if spans else 0
    is_told_wrong = num_told > num_good or any(
        one.start < num_told and one.version != version for one in spans
    )
    if sampled.finish is None or (sampled.token_ids and sampled.labels is None) or is_told_wrong:
        raise EngineError(
            process.name,
            f"{answered} finish_reason {sampled.finish}, {len(sampled.token_ids)} tokens and labels "
            f"{shown or 'none'}, after {num_told} tokens under version {version}",
            rule="vLLM 0.32 says how an answer ended and which weights sampled it",
            way_out=f"read {process.name}'s log, and use vLLM 0.32.",
        )
    if num_good < len(sampled.token_ids):
        sampled.cut(num_good, "abort")
    return GenerateResponse(
        request_id=segment.request.request_id,
        token_ids=sampled.token_ids[num_told:],
        logprobs=sampled.logprobs[num_told:],
        version_spans=[
            Span(start=max(0, span.start - num_told), end=span.end - num_told, version=span.version)
            for span in spans
            if span.end > num_told
        ],
        finish_reason=sampled.finish,
    )


def _spans(sampled: Sampled, version_of: Callable[[str], int | None]) -> list[Span]:
    spans: list[Span] = []
    num_tokens = len(sampled.token_ids)
    for label in sampled.labels or []:
        version = version_of(label.version)
        if version is None:
            break
        end = min(label.end, num_tokens)  # what was cut behind a stop string is labelled too
        if spans and spans[-1].version == version and spans[-1].end == label.start:
            spans[-1] = Span(start=spans[-1].start, end=end, version=version)
        elif label.start < end:
            spans.append(Span(start=label.start, end=end, version=version))
    return spans


class JointWatch:
    """Tells which of the first new tokens completes a stop string that began before them: vLLM looks at new
    text alone.

    Life: made with the resumed ids -> take() for the new ones, in order.
    """

    def __init__(self, stop: Sequence[str], decode: Decode, resumed_ids: Sequence[int]) -> None:
        self._stop, self._decode = [text for text in stop if text], decode
        self._window = max(len(text.encode()) for text in self._stop) + _SLACK
        self._tail = list(resumed_ids[-self._window :])
        self._num_taken = 0

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Number of these that are left when the one that completes a stop string is the last; None if none
        does. Behind the window no stop string reaches back over the joint.
        """
        for index, token_id in enumerate(token_ids[: self._window - self._num_taken]):
            self._tail.append(token_id)
            self._num_taken += 1
            text = self._decode(self._tail)
            if any(stop in text for stop in self._stop):
                return index + 1
        return None


def joint_watch(request: GenerateRequest, decode: Decode | None) -> JointWatch | None:
    """A watch, where the segment has a joint that a stop string can lie over, and its text can be read."""
    if decode is None or not request.num_resumed or not any(request.stop):
        return None
    return JointWatch(request.stop, decode, request.prompt_ids[-request.num_resumed :])
