"""Checks of engine answers: segments, empty segments, and experts of tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrl.base.errors import EngineError
from asyncrl.messages.engine_api import NO_EXPERT, GenerateChunk, GenerateRequest, GenerateResponse

MAX_EMPTY_SEGMENTS = 32
if TYPE_CHECKING:
    from asyncrl.engines.engine import EngineClient

_UNKNOWN = NO_EXPERT.to_bytes(2, "little")
_LOGPROB_SLACK = 1e-3
"""Maximum float32 rounding of a logprob above 0."""


class SegmentCheck:
    """Raises EngineError for invalid answers of server `name` to `request`.

    Life: begun when the request is sent -> chunk() for each GenerateChunk -> end() for the rest.
    Invariant: passed tokens number at most max_tokens, have a logprob each, and versions from `oldest` to
        `newest` that never decrease. A completion's last token passes only with its finish_reason, so that a
        request can continue after a lost server.

    `oldest`: version confirmed when the request was sent; `newest`: version offered last.
    """

    def __init__(self, name: str, request: GenerateRequest, *, oldest: int) -> None:
        self._name, self._request = name, request
        self._num_told, self._version = 0, oldest

    def chunk(self, chunk: GenerateChunk | GenerateResponse, *, newest: int) -> None:
        self._pass(chunk, newest)
        if self._num_told == self._request.max_tokens:
            raise self._wrong(f"chunks of {self._num_told} tokens and no end", "max_tokens is a limit")

    def end(self, answer: GenerateResponse, *, newest: int) -> None:
        if answer.request_id != self._request.request_id:
            raise self._wrong(f"the answer to {answer.request_id}", "an answer carries its request_id")
        self._pass(answer, newest)
        is_short = answer.finish_reason == "length" and self._num_told != self._request.max_tokens
        if is_short or (answer.finish_reason == "stop" and not answer.token_ids):
            what = f"finish_reason {answer.finish_reason} after {self._num_told} tokens"
            raise self._wrong(what, "length means that max_tokens are used up, stop comes with its token")

    def _pass(self, part: GenerateChunk | GenerateResponse, newest: int) -> None:
        token_ids, logprobs, spans = part.token_ids, part.logprobs, part.version_spans
        self._num_told += len(token_ids)
        if self._num_told > self._request.max_tokens:
            raise self._wrong(f"{self._num_told} tokens", "max_tokens is a limit")
        if len(logprobs) != len(token_ids):
            what = f"{len(logprobs)} logprobs for {len(token_ids)} tokens"
            raise self._wrong(what, "there is one logprob a token")
        if token_ids and not (
            min(token_ids) >= 0 and all(map(math.isfinite, logprobs)) and max(logprobs) <= _LOGPROB_SLACK
        ):
            wrong = next(
                (token, logprob)
                for token, logprob in zip(token_ids, logprobs, strict=True)
                if token < 0 or not math.isfinite(logprob) or logprob > _LOGPROB_SLACK
            )
            what = "token id {} with logprob {}".format(*wrong)
            raise self._wrong(what, "ids are 0 or more, a sampled logprob is finite and at most 0")
        self._pass_top(part)
        at, oldest = 0, self._version
        for span in spans:
            if span.start != at or span.end <= at or not self._version <= span.version <= newest:
                break
            at, self._version = span.end, span.version
        if at != len(token_ids):
            shown = ", ".join(f"[{span.start}, {span.end}) v{span.version}" for span in spans[:6]) or "none"
            what = f"version spans {shown} over {len(token_ids)} tokens"
            rule = "spans cover every token once, under versions that never go back"
            raise self._wrong(what, f"{rule}, from {oldest} (confirmed before) to {newest} (offered last)")

    def _pass_top(self, part: GenerateChunk | GenerateResponse) -> None:
        most, top = self._request.top_logprobs, part.top_logprobs
        if len(top) != (len(part.token_ids) if most else 0) or any(len(one) > most for one in top):
            what = f"top_logprobs of sizes {[len(one) for one in top[:6]]} for {len(part.token_ids)} tokens"
            raise self._wrong(what, f"top_logprobs={most} was asked for: at most that many a token")
        pairs = [pair for one in top for pair in one]
        if pairs and not all(
            token >= 0 and math.isfinite(value) and value <= _LOGPROB_SLACK for token, value in pairs
        ):
            what = "top_logprobs with an id below 0, or a logprob that is not finite or above 0"
            raise self._wrong(what, "ids are 0 or more, logprobs finite and at most 0")

    def _wrong(self, answered: str, rule: str) -> EngineError:
        request = self._request
        what = f"answered request {request.request_id} of {request.max_tokens} tokens with {answered}"
        return EngineError(self._name, what, rule=rule, way_out=f"read {self._name}'s log.")


class EmptySegments:
    """Counts consecutive segments without a token and without a publish."""

    def __init__(self, server: EngineClient, request_id: str) -> None:
        self._server, self._request_id = server, request_id
        self._num_empty, self._commits_seen = 0, server.num_commits

    def count(self, num_tokens: int) -> None:
        """Count a segment. Raises EngineError at MAX_EMPTY_SEGMENTS."""
        server = self._server
        if num_tokens or server.num_commits != self._commits_seen:
            self._num_empty, self._commits_seen = 0, server.num_commits
            return
        self._num_empty += 1
        if self._num_empty >= MAX_EMPTY_SEGMENTS:
            what = f"aborted request {self._request_id} {self._num_empty} times in a row without a token"
            rule = f"only a publish may interrupt a request {MAX_EMPTY_SEGMENTS} times before its next token"
            way_out = f"read {server.name}'s log; nobody else may abort its requests."
            raise EngineError(server.name, what, rule=rule, way_out=way_out)


class RoutedTokens:
    """Experts that read a logical request's tokens: `known`, uint16 (little endian), a fixed number for each
    token but the last, from the prompt on. Pure.

    A part of an answer contains the tokens read since the previous part; a segment's first part its whole
    prompt. Earlier tokens are read again, maybe under other weights: known experts stay, unknown ones are
    NO_EXPERT.
    """

    def __init__(self, num_prompt: int) -> None:
        self.known = b""
        self._num_prompt, self._width = num_prompt, 0

    def add(self, routing: bytes, num_before: int, num_after: int) -> None:
        if not routing:
            return
        end = self._num_prompt + num_after - 1
        self._width = width = self._width or len(routing) // end
        first = len(self.known) // width
        assert len(routing) >= (end - first) * width, f"{len(routing)} bytes for tokens {first} to {end}"
        new = bytearray(routing[len(routing) - (end - first) * width :])
        lost = self._num_prompt + num_before - 1 - max(first, self._num_prompt - 1)
        if lost > 0:
            start = (max(first, self._num_prompt - 1) - first) * width
            new[start : start + lost * width] = _UNKNOWN * (lost * width // len(_UNKNOWN))
        self.known += bytes(new)
