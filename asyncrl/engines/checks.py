"""What an engine server's answer must be. Pure: a segment and its request in, an EngineError or nothing out."""

from __future__ import annotations

import math

from asyncrl.errors import EngineError
from asyncrl.wire import GenerateRequest, GenerateResponse, Span

_WAY_OUT = "read that engine's log; an engine server that was changed must pass the contract test of tests/ first."
_LOGPROB_SLACK = 1e-3
"""A log softmax in float32 may come out above 0 by its rounding; by no more than this."""


def check_segment(name: str, request: GenerateRequest, answer: GenerateResponse, *, oldest: int, newest: int) -> None:
    """Raise EngineError if `answer` cannot be the answer to `request`.

    `oldest` is the version that server `name` had confirmed when the request was sent, `newest` the last one
    that it was offered: no token may carry a version outside [oldest, newest].
    """
    fault = _wrong_counts(request, answer) or _wrong_values(answer) or _wrong_spans(answer.version_spans, len(answer.token_ids))
    if fault:
        raise _error(name, request, *fault)
    for span in answer.version_spans:
        if not oldest <= span.version <= newest:
            raise _error(
                name,
                request,
                f"tokens [{span.start}, {span.end}) under version {span.version}",
                f"it had confirmed version {oldest} before the request and was offered none above {newest}",
            )


def _wrong_counts(request: GenerateRequest, answer: GenerateResponse) -> tuple[str, str] | None:
    num_tokens = len(answer.token_ids)
    if answer.request_id != request.request_id:
        return f"the answer to {answer.request_id}", "an answer carries the request_id of its request"
    if len(answer.logprobs) != num_tokens:
        return f"{len(answer.logprobs)} logprobs for {num_tokens} tokens", "there is one logprob a token"
    if num_tokens > request.max_tokens:
        return f"{num_tokens} tokens where {request.max_tokens} were asked for", "max_tokens is a limit"
    if answer.finish_reason == "length" and num_tokens != request.max_tokens:
        return f"finish_reason length after {num_tokens} of {request.max_tokens} tokens", "length means that max_tokens are used up"
    if answer.finish_reason == "stop" and not num_tokens:
        return "finish_reason stop without a token", "the token that ends a completion is part of it"
    return None


def _wrong_values(answer: GenerateResponse) -> tuple[str, str] | None:
    for position, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
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


def _error(name: str, request: GenerateRequest, answered: str, rule: str) -> EngineError:
    return EngineError(name, f"answered request {request.request_id} with {answered}", rule=rule, way_out=_WAY_OUT)
