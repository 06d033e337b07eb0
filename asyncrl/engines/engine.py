"""What an engine server's answer must be. Pure: a segment and its request in, an EngineError or nothing
out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.messages.base import EnginePart, Interrupt, Moved
from asyncrl.messages.engine_calls import (
    CommitResponse,
    EngineHealth,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    Span,
)
from asyncrl.messages.trainer_calls import ExportChunkResponse, ExportResponse

# What rooms are given for one engine server, whatever program it is. Knows no route.


class EngineClient(Protocol):
    """One engine server, for the pool, the publisher, the supervisor and a handover. EngineServer and
    VllmServer are it.

    What cannot be answered raises EngineError, EngineLost if nobody is there; a request that the server
    cannot serve RequestRefused.
    """

    name: str
    num_commits: int
    """Swaps begun plus swaps ended plus sleeps: whoever saw it change knows why it was interrupted."""

    @property
    def policy_version(self) -> int:
        """The version that the server has confirmed last."""
        ...

    def cut_nowait(self) -> None:
        """Give the process up: every call that waits for it, and every one to come, raises EngineLost.
        Idempotent.
        """
        ...

    def renew_nowait(self) -> None:
        """Another process has taken its place, with the weights of the start: calls pass again."""
        ...

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: Callable[[GenerateChunk], None] | None = None
    ) -> GenerateResponse:
        """One segment of a request; with `on_chunk`, what is left of it after the chunks that it was told."""
        ...

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests (None = all) with what they have; returns those that were here."""
        ...

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How the server does."""
        ...

    async def prepare(self, manifest: ExportResponse) -> str:
        """Have the weights loaded beside the serving ones; returns the digest of what was loaded."""
        ...

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
        """Have the prepared weights swapped in; returns what the server says of the swap."""
        ...

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """Have what runs aborted and these parts freed. Idempotent."""
        ...

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        """Have memory taken for these parts again; `restore`: with the weights that served before.
        Idempotent.
        """
        ...

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        """Have one chunk of a push loaded into its woken weights; returns the digest of what was loaded."""
        ...


# A call to an engine server that failed, as an error of ours. Knows no message and no server.


def engine_error(caller: Caller, failure: CallLost | CallRefused, *, is_told: bool = False) -> EngineError:
    """EngineLost for no answer at all, EngineError for one that says no or nonsense. `is_told` as in
    EngineLost.
    """
    where = f"({caller.url})"
    if isinstance(failure, CallGarbled):
        return EngineError(
            caller.name,
            f"{where} answered {failure.path} with what is no answer: {failure.why}",
            way_out=f"read {caller.name}'s log; if the program there is ours, please report it.",
        )
    if isinstance(failure, CallLost):
        return EngineLost(
            caller.name,
            f"{where} gave no answer to {failure.path}: {failure.why}",
            rule="a run needs its engine servers",
            way_out=f"read {caller.name}'s log for why it died or hangs, then start the run again.",
            is_told=is_told,
        )
    return EngineError(
        caller.name,
        f"{where} answered {failure.status} to {failure.path}: {failure.body.error}",
        rule=failure.body.rule,
        way_out=failure.body.way_out or f"read {caller.name}'s log.",
    )


def given_up(name: str, path: str) -> EngineLost:
    """Of a call that cut_nowait ended."""
    return EngineLost(name, f"was given up before it answered {path}", is_told=True)


# Ends the calls that wait for a server which was given up. Knows no message and no server.


Answer = TypeVar("Answer")


class CallCut(Exception):  # noqa: N818  nothing failed: somebody decided
    """The server was given up before it answered."""


class Lifeline:
    """What all calls to one process hang on.

    Life:       whole -> cut, for good: the next process gets a line of its own, so that a call knows whose it
    was. Waits:      hold sleeps in its call. cut_nowait ends all of them at once, those to come too: a frozen
    process
                keeps its connections, and nothing else would end them.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._limits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<Lifeline {'cut' if self.is_cut else 'whole'}, {len(self._limits)} calls>"

    async def hold(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `call` returns or raises; CallCut once the line is cut."""
        if self.is_cut:
            raise CallCut
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await call()
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallCut from None

    def cut_nowait(self) -> None:
        """End all calls; idempotent."""
        self.is_cut = True
        limits, self._limits = self._limits, set()
        if limits:
            now_s = asyncio.get_running_loop().time()
            for limit in limits:
                limit.reschedule(now_s)


_WAY_OUT = (
    "read that engine's log; an engine server that was changed must pass the contract test of tests/ first."
)
_LOGPROB_SLACK = 1e-3
"""A log softmax in float32 may come out above 0 by its rounding; by no more than this."""


class SegmentCheck:
    """Raises EngineError for what cannot be the answer of server `name` to `request`, streamed or not.

    Life:       begun when the request is sent -> chunk() for each GenerateChunk -> end() for the
    GenerateResponse. Invariant:  what has passed is a beginning of an answer that can be: at most max_tokens
    tokens with a logprob each,
                under versions in [oldest, newest] that never go back. The token that ends a completion passes
                with its finish_reason alone, so that whoever loses the server after a chunk can go on behind
                it.

    `oldest` is the version that the server had confirmed when the request was sent, `newest` the last one
    that it was offered by the time of the chunk or the end.
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

    def _pass(
        self, fault: tuple[str, str] | None, spans: list[Span], token_ids: list[int], newest: int
    ) -> None:
        if fault:
            self._fail(*fault)
        for span in spans:
            if not self._oldest <= span.version <= newest:
                self._fail(
                    f"tokens [{span.start + self._num_told}, {span.end + self._num_told}) under version "
                    f"{span.version}",
                    f"it had confirmed version {self._oldest} before the request and was offered none above "
                    f"{newest}",
                )
            if span.version < self._version:
                self._fail(
                    f"version {span.version} after version {self._version}",
                    "a server's version never goes back",
                )
            self._version = span.version
        self._num_told += len(token_ids)

    def _fail(self, answered: str, rule: str) -> NoReturn:
        what = f"answered request {self._request.request_id} with {answered}"
        raise EngineError(self._name, what, rule=rule, way_out=_WAY_OUT)


def _wrong_counts(
    request: GenerateRequest, answer: GenerateResponse, num_told: int
) -> tuple[str, str] | None:
    num_tokens = num_told + len(answer.token_ids)
    if answer.request_id != request.request_id:
        return f"the answer to {answer.request_id}", "an answer carries the request_id of its request"
    if num_tokens > request.max_tokens:
        return f"{num_tokens} tokens where {request.max_tokens} were asked for", "max_tokens is a limit"
    if answer.finish_reason == "length" and num_tokens != request.max_tokens:
        return (
            f"finish_reason length after {num_tokens} of {request.max_tokens} tokens",
            "length means that max_tokens are used up",
        )
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
            return (
                f"logprob {logprob} at position {position}",
                "a sampled token's logprob is finite and at most 0",
            )
    return None


def _wrong_spans(spans: list[Span], num_tokens: int) -> tuple[str, str] | None:
    at, version = 0, 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            return (
                f"spans {_show(spans)} over {num_tokens} tokens",
                "version spans cover every token once, in order",
            )
        if span.version < version:
            return f"spans {_show(spans)}", "a server's version never goes back"
        at, version = span.end, span.version
    if at != num_tokens:
        return (
            f"spans {_show(spans)} over {num_tokens} tokens",
            "version spans cover every token once, in order",
        )
    return None


def _show(spans: list[Span]) -> str:
    return ", ".join(f"[{span.start}, {span.end}) v{span.version}" for span in spans[:6]) or "none"
