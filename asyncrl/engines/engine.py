"""What all clients of engine servers share: their methods, calls that end with their process, and the check
of a segment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.messages.base import EnginePart, Interrupt, Moved
from asyncrl.messages.calls import (
    CommitResponse,
    EngineHealth,
    ExportChunkResponse,
    ExportResponse,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    Span,
)

OnChunk = Callable[[GenerateChunk], None]
_LOGPROB_SLACK = 1e-3
"""A log softmax in float32 may come out above 0 by its rounding; by no more than this."""


class EngineClient(Protocol):
    """One engine server: EngineServer (ours) or VllmServer.

    A call raises EngineError, EngineLost if the process is gone or was given up; a request that the server
    cannot serve raises RequestRefused. `num_commits` counts swaps begun, swaps ended and sleeps: a caller
    whose request was interrupted sees from it whether that was why. `policy_version` is what the server has
    confirmed last.

    cut_nowait gives the process up: calls that wait for it, and all to come, raise EngineLost. renew_nowait:
    another process has taken its place, with the weights of the start. Both are idempotent. generate_segment
    samples until the end, the budget or an interruption; with `on_chunk`, which gets tokens as they come, the
    answer has only the tokens after those. abort ends these requests (None: all) with what they have, and
    returns those that were there. prepare loads weights beside the serving ones, and load_chunk a chunk into
    woken weights: both return the digest of what was loaded. commit swaps to it. sleep aborts what runs and
    frees these parts, wake takes memory for them again (`restore`: with the weights that served before); both
    are idempotent, and requests that come meanwhile wait until all parts are awake.
    """

    name: str
    num_commits: int

    @property
    def policy_version(self) -> int: ...
    def cut_nowait(self) -> None: ...
    def renew_nowait(self) -> None: ...
    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: OnChunk | None = None
    ) -> GenerateResponse: ...
    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]: ...
    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth: ...
    async def prepare(self, manifest: ExportResponse) -> str: ...
    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse: ...
    async def sleep(self, parts: Sequence[EnginePart]) -> Moved: ...
    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved: ...
    async def load_chunk(self, chunk: ExportChunkResponse) -> str: ...


class Lifeline:
    """Ends all calls to one process when it is lost; the next process of the same name gets a new Lifeline.

    Life: whole -> cut, for good: given up by the supervisor (cut_nowait), or found broken (break_nowait).
    Waits: calls() sleeps in its block. A cut ends all of them at once: a frozen process keeps its
        connections, and nothing else would end them.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller, self.name = caller, caller.name
        self.is_cut = self.is_given_up = False
        self._why_cut, self._rule, self._way_out = "was given up", "", ""
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """A block that raises EngineLost once the process is given up, and EngineError for a failed call."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                if self.is_cut:
                    raise self._lost()
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._lost() from None
        except (CallLost, CallRefused) as failure:
            raise await self.error_of(failure) from failure

    def cut_nowait(self) -> None:
        """Give the process up. Idempotent."""
        self.is_given_up = True
        self._end_calls()

    def break_nowait(self, what: str, *, rule: str) -> None:
        """Mark the process as broken; its supervisor learns of it from the calls. Idempotent."""
        if not self.is_cut:
            self._why_cut, self._rule = what, rule
            self._way_out = "read its log for why, then start it again."
            self._end_calls()

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        """A call that failed, as an error of ours."""
        where, read_log = f"({self.caller.url})", f"read {self.name}'s log"
        if isinstance(failure, CallGarbled):
            what = f"{where} answered {failure.path} with what is no answer: {failure.why}"
            return EngineError(self.name, what, way_out=f"{read_log}.")
        if isinstance(failure, CallLost):
            return EngineLost(
                self.name,
                f"{where} gave no answer to {failure.path}: {failure.why}",
                rule="a run needs its engine servers",
                way_out=f"{read_log} for why it died or hangs, then start the run again.",
                is_told=self.is_given_up,
            )
        said = failure.body
        what = f"{where} answered {failure.status} to {failure.path}: {said.error}"
        return EngineError(self.name, what, rule=said.rule, way_out=said.way_out or f"{read_log}.")

    def _end_calls(self) -> None:
        self.is_cut = True
        while self._limits:
            self._limits.pop().reschedule(asyncio.get_running_loop().time())

    def _lost(self) -> EngineLost:
        return EngineLost(
            self.name, self._why_cut, rule=self._rule, way_out=self._way_out, is_told=self.is_given_up
        )


class SegmentCheck:
    """Raises EngineError for what cannot be the answer of server `name` to `request`, streamed or not.

    Life: begun when the request is sent -> chunk() for each GenerateChunk -> end() for the rest.
    Invariant: what has passed has a logprob for each of at most max_tokens tokens, under versions from
        `oldest` to `newest` that never go back. The token that ends a completion passes with its
        finish_reason alone, so that a request whose server is lost after a chunk can go on behind it.

    `oldest` is what the server had confirmed when the request was sent, `newest` what it was offered last by
    the time of the chunk or the end.
    """

    def __init__(self, name: str, request: GenerateRequest, *, oldest: int) -> None:
        self._name, self._request = name, request
        self._num_told, self._version = 0, oldest

    def chunk(self, chunk: GenerateChunk, *, newest: int) -> None:
        """Some tokens before the end."""
        span = Span(start=0, end=len(chunk.token_ids), version=chunk.version)
        self._pass(chunk.token_ids, chunk.logprobs, [span], newest)
        if self._num_told == self._request.max_tokens:
            raise self._wrong(f"chunks of {self._num_told} tokens and no end", "max_tokens is a limit")

    def end(self, answer: GenerateResponse, *, newest: int) -> None:
        """The tokens after the last chunk, or all of them, and how they ended."""
        if answer.request_id != self._request.request_id:
            raise self._wrong(f"the answer to {answer.request_id}", "an answer carries its request_id")
        self._pass(answer.token_ids, answer.logprobs, answer.version_spans, newest)
        is_short = answer.finish_reason == "length" and self._num_told != self._request.max_tokens
        if is_short or (answer.finish_reason == "stop" and not answer.token_ids):
            what = f"finish_reason {answer.finish_reason} after {self._num_told} tokens"
            raise self._wrong(what, "length means that max_tokens are used up, stop comes with its token")

    def _pass(self, token_ids: list[int], logprobs: list[float], spans: Sequence[Span], newest: int) -> None:
        self._num_told += len(token_ids)
        if self._num_told > self._request.max_tokens:
            raise self._wrong(f"{self._num_told} tokens", "max_tokens is a limit")
        if len(logprobs) != len(token_ids):
            what = f"{len(logprobs)} logprobs for {len(token_ids)} tokens"
            raise self._wrong(what, "there is one logprob a token")
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if token < 0 or not math.isfinite(logprob) or logprob > _LOGPROB_SLACK:
                what = f"token id {token} with logprob {logprob}"
                raise self._wrong(what, "ids are 0 or more, a sampled logprob is finite and at most 0")
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

    def _wrong(self, answered: str, rule: str) -> EngineError:
        request = self._request
        return EngineError(
            self._name,
            f"answered request {request.request_id} of {request.max_tokens} tokens with {answered}",
            rule=rule,
            way_out="read that engine's log; a changed server must pass the contract test of tests/ first.",
        )
