"""What all clients of engine servers share (their methods, calls that end with their process, the check of a
segment), and the client of a server of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from pydantic import BaseModel

from asyncrl.errors import EngineError, EngineLost, RequestRefused
from asyncrl.http import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.messages.base import EnginePart, Interrupt, Moved
from asyncrl.messages.calls import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    ExportChunkResponse,
    ExportResponse,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    LoadChunkResponse,
    PrepareRequest,
    PrepareResponse,
    SleepRequest,
    WakeRequest,
)

OnChunk = Callable[[GenerateChunk], None]
_LOGPROB_SLACK = 1e-3
"""A log softmax in float32 may come out above 0 by its rounding; by no more than this."""
_NEEDED = "a run needs its engine servers"


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
        self._why_cut, self._rule = "was given up", _NEEDED
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """A block that raises EngineLost once the process is given up, and EngineError for a failed call."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                if self.is_cut:
                    raise self.lost(self._why_cut, rule=self._rule)
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.lost(self._why_cut, rule=self._rule) from None
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
            self._end_calls()

    def lost(self, what: str, *, rule: str = _NEEDED) -> EngineLost:
        """The error of a process that cannot be counted on any more."""
        way_out = f"read {self.name}'s log for why, then start the run again."
        return EngineLost(self.name, what, rule=rule, way_out=way_out, is_told=self.is_given_up)

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        """A call that failed, as an error of ours."""
        where, rule, way_out = f"({self.caller.url})", "", f"read {self.name}'s log."
        if isinstance(failure, CallRefused):
            what = f"answered {failure.status} to {failure.path}: {failure.body.error}"
            rule, way_out = failure.body.rule, failure.body.way_out or way_out
        elif isinstance(failure, CallGarbled):
            what = f"answered {failure.path} with what is no answer: {failure.why}"
        else:
            return self.lost(f"{where} gave no answer to {failure.path}: {failure.why}")
        return EngineError(self.name, f"{where} {what}", rule=rule, way_out=way_out)

    def _end_calls(self) -> None:
        self.is_cut = True
        while self._limits:
            self._limits.pop().reschedule(asyncio.get_running_loop().time())


def refused(name: str, request: GenerateRequest, refusal: CallRefused) -> RequestRefused:
    """The server `name` is well, and does not serve this one request."""
    said, sizes = refusal.body, f"{len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}"
    what = f"{name} answered {refusal.status} to request {request.request_id} ({sizes}): {said.error}"
    way_out = said.way_out or f"ask for what the model can do; read {name}'s log."
    return RequestRefused(what, rule=said.rule, way_out=way_out)


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
        self._pass(chunk, newest)
        if self._num_told == self._request.max_tokens:
            raise self._wrong(f"chunks of {self._num_told} tokens and no end", "max_tokens is a limit")

    def end(self, answer: GenerateResponse, *, newest: int) -> None:
        """The tokens after the last chunk, or all of them, and how they ended."""
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
        what = f"answered request {request.request_id} of {request.max_tokens} tokens with {answered}"
        return EngineError(self._name, what, rule=rule, way_out=f"read {self._name}'s log.")


class EngineServer:
    """An EngineClient of an embedded or simulated engine: its messages as calls, its failures as ours.

    Life: made with the version that its process starts under -> given up by cut_nowait() -> renew_nowait(): a
        new process stands behind the same name. Lives as long as its `caller`, which the maker closes.
    Waits: calls sleep until the server answers, is gone or is given up. Their limit is the caller's:
        rollout.timeout_s, weight_sync.timeout_s, and the run's heartbeat under both.
    Invariant: no segment passes with a token older than the version that the server had confirmed when the
        segment was sent: SegmentCheck guarantees it, chunk by chunk.
    """

    def __init__(self, caller: Caller, *, policy_version: int = 0) -> None:
        self._caller, self.name = caller, caller.name
        self.policy_version = self._offered_version = self._start_version = policy_version
        self.num_commits = 0
        self._line = Lifeline(caller)

    def cut_nowait(self) -> None:
        self._line.cut_nowait()

    def renew_nowait(self) -> None:
        self._line.cut_nowait()
        self._line = Lifeline(self._caller)
        self.policy_version = self._offered_version = self._start_version

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        check = SegmentCheck(self.name, request, oldest=self.policy_version)
        async with self._line.calls():
            try:
                if on_chunk is None:
                    answer = await self._caller.post("/generate", request, GenerateResponse, timeout_s=None)
                else:
                    answer = await self._stream(request, check, on_chunk)
            except CallRefused as refusal:
                if refusal.status not in (400, 422):
                    raise
                raise refused(self.name, request, refusal) from refusal
        check.end(answer, newest=self._offered_version)
        return answer

    async def _stream(
        self, request: GenerateRequest, check: SegmentCheck, on_chunk: OnChunk
    ) -> GenerateResponse:
        streamed = request.model_copy(update={"stream": True})
        stream = self._caller.stream("/generate", streamed, GenerateChunk, GenerateResponse)
        async with contextlib.aclosing(stream) as lines:
            async for line in lines:
                if isinstance(line, GenerateResponse):
                    answer = line
                else:
                    check.chunk(line, newest=self._offered_version)
                    on_chunk(line)
        return answer  # Caller.stream ends with it, or raises

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        request = AbortRequest(request_ids=request_ids)
        return (await self._post("/abort", request, AbortResponse, timeout_s)).aborted

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        async with self._line.calls():
            return await self._caller.get("/health", EngineHealth, timeout_s=timeout_s)

    async def prepare(self, manifest: ExportResponse) -> str:
        request = PrepareRequest.model_validate(manifest, from_attributes=True)
        return (await self._post("/prepare", request, PrepareResponse)).digest

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
        self._offered_version = max(self._offered_version, version)
        self.num_commits += 1
        try:
            request = CommitRequest(version=version, digest=digest, interrupt=interrupt)
            answer = await self._post("/commit", request, CommitResponse)
        finally:
            self.num_commits += 1
        self.policy_version = version
        return answer

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        self.num_commits += 1
        return await self._post("/sleep", SleepRequest(parts=list(parts)), Moved)

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        return await self._post("/wake", WakeRequest(parts=list(parts), restore=restore), Moved)

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        request = LoadChunkRequest.model_validate(chunk, from_attributes=True)
        return (await self._post("/load_chunk", request, LoadChunkResponse)).digest

    async def _post(
        self, path: str, body: BaseModel, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        async with self._line.calls():
            return await self._caller.post(path, body, answer, timeout_s=timeout_s)
