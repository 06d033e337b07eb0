"""One segment of a request in vLLM's terms, and its answer in ours. Pure: knows messages and labels; knows no
call and no wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_routes import Generate, Generated, LabelSpan, Sampling
from asyncrl.errors import EngineError, RequestRefused
from asyncrl.messages.engine_calls import GenerateRequest, GenerateResponse, Span

Finish = Literal["stop", "length", "abort"]
_FINISHES = ("stop", "length", "abort")
_NO_LOGPROB = -9999.0
"""What vLLM writes for a logprob that is NaN or below this."""
_MIN_TEMPERATURE = 0.01
"""vLLM takes this for anything between 0 and it."""


@dataclass(eq=False)
class Segment:
    """One segment from its arrival to its answer.

    Life: made -> at the gate -> sent, under a version and its label -> answered. `answered` is set however
    the call ended. `num_loads`: how often weights had been loaded into the process when it was sent.
    """

    request: GenerateRequest
    wire_id: str
    is_streamed: bool
    version: int = 0
    label: str = ""
    num_loads: int = 0
    is_sent: bool = False
    is_aborted: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Sampled:
    """What vLLM has answered so far. `labels` come with the end and cover all tokens, told ones too."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    labels: list[LabelSpan] | None = None
    num_cached: int = 0

    def add(self, part: Generated) -> None:
        """A whole answer, or a part of a stream."""
        for choice in part.choices:
            content = [] if choice.logprobs is None else choice.logprobs.content or []
            self.token_ids += choice.token_ids or []
            self.logprobs += [math.nan if one.logprob <= _NO_LOGPROB else one.logprob for one in content]
            self.finish = choice.finish_reason or self.finish
            self.labels = choice.weight_versions or self.labels
        if part.usage is not None:
            self.num_cached = part.usage.num_cached

    def cut(self, num_tokens: int, finish: Finish) -> None:
        """Forget what lies behind the first `num_tokens`."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish = finish


def generate_body(segment: Segment, facts: VllmFacts, *, model: str | None) -> Generate:
    """What vLLM is asked. Its random stream restarts with each request, so the seed says where the segment
    begins.

    The salt is the version's: a prefix cache never outlives its weights, whether or not somebody clears it.
    """
    request = segment.request
    special = [facts.special_ids[text] for text in request.stop if text in facts.special_ids]
    return Generate(
        token_ids=request.prompt_ids,
        request_id=segment.wire_id,
        cache_salt=salt_of(segment.label),
        model=model,
        sampling_params=Sampling(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=segment_seed(request.seed, len(request.prompt_ids)),
            stop=[text for text in request.stop if text],
            stop_token_ids=[*facts.end_ids, *special],
            detokenize=bool(request.stop),
        ),
    )


def salt_of(label: str) -> str:
    """Of the prefix cache that the weights of this label fill."""
    return f"v{label}"


def segment_seed(seed: int, num_prompt: int) -> int:
    """63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{num_prompt}".encode()).digest()[:8], "big") >> 1


def check_request(name: str, request: GenerateRequest, facts: VllmFacts, vocab_size: int | None) -> None:
    """Raise RequestRefused for what vLLM would do otherwise than asked: it cuts what is too long, and warms
    what is too cold.

    An id far outside of the vocabulary ends its engine, and with it all requests.
    """
    num_prompt = len(request.prompt_ids)
    if num_prompt + request.max_tokens > facts.max_length:
        raise RequestRefused(
            f"{name} refused request {request.request_id}: {num_prompt} prompt tokens + {request.max_tokens} "
            f"new ones = "
            f"{num_prompt + request.max_tokens}, a slot holds {facts.max_length}",
            rule="prompt and completion must fit into a slot",
            way_out="shorten the prompt, lower max_tokens, or raise rollout.max_prompt_tokens or "
            "rollout.max_tokens.",
        )
    wrong = next(
        (
            token
            for token in request.prompt_ids
            if token < 0 or (vocab_size is not None and token >= vocab_size)
        ),
        None,
    )
    if wrong is not None:
        raise RequestRefused(
            f"{name} refused request {request.request_id}: it has token id {wrong}",
            rule=f"the model knows ids 0..{'' if vocab_size is None else vocab_size - 1}",
            way_out="encode the prompt with the model's own tokenizer.",
        )
    if request.num_resumed > num_prompt:
        raise RequestRefused(
            f"{name} refused request {request.request_id}: it has num_resumed={request.num_resumed} of "
            f"{num_prompt} prompt ids",
            rule="resumed ids are the last ones of the prompt",
            way_out="count only the ids that an earlier segment sampled.",
        )
    if 0.0 < request.temperature < _MIN_TEMPERATURE:
        raise RequestRefused(
            f"{name} refused request {request.request_id}: temperature {request.temperature}",
            rule=f"vLLM samples at {_MIN_TEMPERATURE} where less is asked for",
            way_out=f"set rollout.temperature to 0 (greedy), or to {_MIN_TEMPERATURE} or more.",
        )


def response_of(
    name: str,
    segment: Segment,
    sampled: Sampled,
    *,
    num_told: int,
    version_of: Callable[[str], int | None],
    is_stale: bool,
) -> GenerateResponse:
    """The tokens after the first `num_told`, up to the first one whose label has no version that can be
    trusted (version_of: None).

    `is_stale`: the prompt may have been read from a cache of older weights, if it began under newer ones:
    then nothing of it counts. Raises EngineError for an answer that cannot be.
    """
    if sampled.finish not in _FINISHES:
        raise _nonsense(
            name,
            segment,
            f"finish_reason {sampled.finish}",
            f"an answer ends with one of {', '.join(_FINISHES)}",
        )
    if sampled.token_ids and sampled.labels is None:
        raise _nonsense(
            name,
            segment,
            f"{len(sampled.token_ids)} tokens without weight_versions",
            "vLLM 0.32 says which weights sampled them",
        )
    spans = _spans(sampled, version_of)
    if any(span.version < 0 for span in spans):
        raise EngineError(
            name,
            f"answered request {segment.request.request_id} with tokens under labels that this run never "
            f"set: {_shown(sampled.labels)}",
            rule="one run alone pushes weights into a server",
            way_out="give each run servers of its own (rollout.urls).",
        )
    if is_stale and sampled.num_cached and spans and spans[0].version != segment.version:
        spans = []
    num_good = spans[-1].end if spans else 0
    if num_good < len(sampled.token_ids):
        sampled.cut(num_good, "abort")
    told = [span for span in spans if span.start < num_told]
    if num_told > num_good or any(span.version != segment.version for span in told):
        raise _nonsense(
            name,
            segment,
            f"labels {_shown(sampled.labels)} after {num_told} tokens under version "
            f"{segment.version} had come",
            "the label of the weights changes in a commit alone",
        )
    return GenerateResponse(
        request_id=segment.request.request_id,
        token_ids=sampled.token_ids[num_told:],
        logprobs=sampled.logprobs[num_told:],
        version_spans=[
            Span(start=max(0, span.start - num_told), end=span.end - num_told, version=span.version)
            for span in spans
            if span.end > num_told
        ],
        finish_reason=cast(Finish, sampled.finish),
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


def _nonsense(name: str, segment: Segment, what: str, rule: str) -> EngineError:
    return EngineError(
        name,
        f"answered request {segment.request.request_id} with {what}",
        rule=rule,
        way_out=f"read {name}'s log, and use vLLM 0.32.",
    )


def _shown(labels: list[LabelSpan] | None) -> str:
    return ", ".join(f"[{span.start}, {span.end}) {span.version}" for span in labels or [])
