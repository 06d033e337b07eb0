"""What an engine server's answer must be. Pure: a segment and its request in, an EngineError or nothing out."""

from __future__ import annotations

import math
from typing import NoReturn

from asyncrl.errors import EngineError
from asyncrl.wire import GenerateChunk, GenerateRequest, GenerateResponse, Span

_WAY_OUT = "read that engine's log; an engine server that was changed must pass the contract test of tests/ first."
_LOGPROB_SLACK = 1e-3
"""A log softmax in float32 may come out above 0 by its rounding; by no more than this."""


class SegmentCheck:
    """Raises EngineError for what cannot be the answer of server `name` to `request`, streamed or not.

    Life:       begun when the request is sent -> chunk() for each GenerateChunk -> end() for the GenerateResponse.
    Invariant:  what has passed is a beginning of an answer that can be: at most max_tokens tokens with a logprob each,
                under versions in [oldest, newest] that never go back. The token that ends a completion passes with its
                finish_reason alone, so that whoever loses the server after a chunk can go on behind it.

    `oldest` is the version that the server had confirmed when the request was sent, `newest` the last one that it was
    offered by the time of the chunk or the end.
    """

    def __init__(self, name: str, request: GenerateRequest, *, oldest: int) -> None:
        self._name, self._request, self._oldest = name, request, oldest
        self._num_told, self._version = 0, oldest

    def chunk(self, chunk: GenerateChunk, *, newest: int) -> None:
        """Some tokens before the end."""
        span = Span(start=0, end=len(chunk.token_ids), version=chunk.version)
        self._pass(_wrong_values(chunk.token_ids, chunk.logprobs), [span], chunk.token_ids, newest)
        if self._num_told >= self._request.max_tokens:
            self._fail(
                f"chunks of {self._num_told} tokens where {self._request.max_tokens} were asked for",
                "the token that ends a completion comes with its finish_reason",
            )

    def end(self, answer: GenerateResponse, *, newest: int) -> None:
        """The tokens after the last chunk, or all of them, and how they ended."""
        fault = (
            _wrong_counts(self._request, answer, self._num_told)
            or _wrong_values(answer.token_ids, answer.logprobs)
            or _wrong_spans(answer.version_spans, len(answer.token_ids))
        )
        self._pass(fault, answer.version_spans, answer.token_ids, newest)

    def _pass(self, fault: tuple[str, str] | None, spans: list[Span], token_ids: list[int], newest: int) -> None:
        if fault:
            self._fail(*fault)
        for span in spans:
            if not self._oldest <= span.version <= newest:
                self._fail(
                    f"tokens [{span.start + self._num_told}, {span.end + self._num_told}) under version {span.version}",
                    f"it had confirmed version {self._oldest} before the request and was offered none above {newest}",
                )
            if span.version < self._version:
                self._fail(f"version {span.version} after version {self._version}", "a server's version never goes back")
            self._version = span.version
        self._num_told += len(token_ids)

    def _fail(self, answered: str, rule: str) -> NoReturn:
        what = f"answered request {self._request.request_id} with {answered}"
        raise EngineError(self._name, what, rule=rule, way_out=_WAY_OUT)


def check_segment(name: str, request: GenerateRequest, answer: GenerateResponse, *, oldest: int, newest: int) -> None:
    """Raise EngineError if `answer` cannot be the whole answer to `request`; `oldest` and `newest` as in SegmentCheck."""
    SegmentCheck(name, request, oldest=oldest).end(answer, newest=newest)


def _wrong_counts(request: GenerateRequest, answer: GenerateResponse, num_told: int) -> tuple[str, str] | None:
    num_tokens = num_told + len(answer.token_ids)
    if answer.request_id != request.request_id:
        return f"the answer to {answer.request_id}", "an answer carries the request_id of its request"
    if num_tokens > request.max_tokens:
        return f"{num_tokens} tokens where {request.max_tokens} were asked for", "max_tokens is a limit"
    if answer.finish_reason == "length" and num_tokens != request.max_tokens:
        return f"finish_reason length after {num_tokens} of {request.max_tokens} tokens", "length means that max_tokens are used up"
    if answer.finish_reason == "stop" and not answer.token_ids:
        return "finish_reason stop without a token", "the token that ends a completion is part of it"
    return None


def _wrong_values(token_ids: list[int], logprobs: list[float]) -> tuple[str, str] | None:
    if len(logprobs) != len(token_ids):
        return f"{len(logprobs)} logprobs for {len(token_ids)} tokens", "there is one logprob a token"
    for position, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if token < 0:
            return f"token id {token} at position {position}", "token ids are 0 or more"
        if not math.isfinite(logprob) or logprob > _LOGPROB_SLACK:
            return f"logprob {logprob} at position {position}", "a sampled token's logprob is finite and at most 0"
    return None


def _wrong_spans(spans: list[Span], num_tokens: int) -> tuple[str, str] | None:
    at, version = 0, 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            return f"spans {_show(spans)} over {num_tokens} tokens", "version spans cover every token once, in order"
        if span.version < version:
            return f"spans {_show(spans)}", "a server's version never goes back"
        at, version = span.end, span.version
    if at != num_tokens:
        return f"spans {_show(spans)} over {num_tokens} tokens", "version spans cover every token once, in order"
    return None


def _show(spans: list[Span]) -> str:
    return ", ".join(f"[{span.start}, {span.end}) v{span.version}" for span in spans[:6]) or "none"
