"""The client of one engine server: its messages as calls, its failures as ours. Knows no other server, no
routing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from asyncrl.engines.engine import CallCut, Lifeline, SegmentCheck, engine_error, given_up
from asyncrl.errors import EngineError, RequestRefused
from asyncrl.http import Answer, Caller, CallLost, CallRefused
from asyncrl.messages.base import EnginePart, Interrupt, Moved
from asyncrl.messages.engine_calls import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
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
from asyncrl.messages.trainer_calls import ExportChunkResponse, ExportResponse

_BAD_REQUEST = (400, 422)


AboutVersion = TypeVar("AboutVersion", PrepareResponse, CommitResponse, LoadChunkResponse)
Asked = TypeVar("Asked", PrepareRequest, LoadChunkRequest)


class EngineServer:
    """One engine server, for the pool (segments), for weight sync and for a handover.

    Life:       made with the version that its process starts under -> given up by cut_nowait() ->
    renew_nowait(): a new
                process stands behind the same name. Lives as long as its `caller`, which the maker closes.
    Waits:      generate_segment, prepare and commit sleep until the server answers, is gone or is given up.
    Their limit
                is the caller's: rollout.timeout_s, weight_sync.timeout_s, and the run's heartbeat under both.
    Invariant:  no segment passes whose tokens carry a version older than the one that the server had
    confirmed
                when the segment was sent: SegmentCheck guarantees it, chunk by chunk. No call outlives the
                process it was made to.
    """

    def __init__(self, caller: Caller, *, policy_version: int = 0) -> None:
        self._caller = caller
        self.name = caller.name
        self.policy_version = policy_version
        """The version that the server has confirmed last."""
        self.num_commits = 0
        """Swaps begun plus swaps ended plus sleeps: whoever saw it change knows why it was interrupted."""
        self._offered_version = self._start_version = policy_version
        self._line = Lifeline()

    def __repr__(self) -> str:
        return f"<EngineServer {self.name} {self._caller.url} v{self.policy_version}>"

    def cut_nowait(self) -> None:
        """Give the process up: every call that waits for it, and every one to come, raises EngineLost.
        Idempotent.
        """
        self._line.cut_nowait()

    def renew_nowait(self) -> None:
        """Another process has taken its place, with the weights of the start: calls pass again."""
        self._line.cut_nowait()
        self._line = Lifeline()
        self.policy_version = self._offered_version = self._start_version

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: Callable[[GenerateChunk], None] | None = None
    ) -> GenerateResponse:
        """Sample until the end, the budget or an interruption. With `on_chunk`, which is told of tokens as
        they come, the answer has the tokens after those that it was told.

        Raises RequestRefused (data: this request is too long, say), EngineLost if the server is gone, or
        EngineError if it answers something that cannot be.
        """
        check = SegmentCheck(self.name, request, oldest=self.policy_version)
        try:
            if on_chunk is None:
                answer = await self._post("/generate", request, GenerateResponse)
            else:
                answer = await self._stream(request, check, on_chunk)
        except CallRefused as refusal:
            if refusal.status in _BAD_REQUEST:
                raise RequestRefused(
                    f"{self.name} refused request {request.request_id} "
                    f"({len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}): "
                    f"{refusal.body.error}",
                    rule=refusal.body.rule,
                    way_out=refusal.body.way_out,
                ) from refusal
            raise engine_error(self._caller, refusal) from refusal
        check.end(answer, newest=self._offered_version)
        return answer

    async def _stream(
        self, request: GenerateRequest, check: SegmentCheck, on_chunk: Callable[[GenerateChunk], None]
    ) -> GenerateResponse:
        streamed = request.model_copy(update={"stream": True})

        async def read() -> GenerateResponse:
            answer: GenerateResponse | None = None
            async with contextlib.aclosing(
                self._caller.stream("/generate", streamed, GenerateChunk, GenerateResponse)
            ) as lines:
                async for line in lines:
                    if isinstance(line, GenerateResponse):
                        answer = line
                    else:
                        check.chunk(line, newest=self._offered_version)
                        on_chunk(line)
            assert answer is not None, "Caller.stream ends with its last line, or raises"
            return answer

        return await self._hold("/generate", read)

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests (None = all) with what they have; returns those that were here. Raises
        EngineError.
        """
        answer = await self._post_or_error(
            "/abort", AbortRequest(request_ids=request_ids), AbortResponse, timeout_s
        )
        return answer.aborted

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How the server does. Raises EngineError if it gives no answer."""
        try:
            return await self._caller.get("/health", EngineHealth, timeout_s=timeout_s)
        except (CallLost, CallRefused) as failure:
            raise engine_error(self._caller, failure) from failure

    async def prepare(self, manifest: ExportResponse) -> str:
        """Have the weights loaded beside the serving ones; returns the digest of what was loaded. Raises
        EngineError.
        """
        request = _request(PrepareRequest, manifest)
        return (await self._post_version("/prepare", request, PrepareResponse)).digest

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
        """Have the prepared weights swapped in; returns what the server says of the swap. Raises
        EngineError.
        """
        self._offered_version = max(self._offered_version, version)
        self.num_commits += 1
        try:
            request = CommitRequest(version=version, digest=digest, interrupt=interrupt)
            answer = await self._post_version("/commit", request, CommitResponse)
        finally:
            self.num_commits += 1
        self.policy_version = version
        return answer

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """Have what runs aborted and these parts freed. Idempotent. Raises EngineError.

        Requests that come meanwhile wait there until all parts are awake again.
        """
        self.num_commits += 1
        return await self._post_or_error("/sleep", SleepRequest(parts=list(parts)), Moved)

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        """Have memory taken for these parts again; `restore`: with the weights that served before.
        Idempotent. Raises EngineError.
        """
        return await self._post_or_error("/wake", WakeRequest(parts=list(parts), restore=restore), Moved)

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        """Have one chunk of a push loaded into its woken weights; returns the digest of what was loaded.
        Raises EngineError.
        """
        request = _request(LoadChunkRequest, chunk)
        return (await self._post_version("/load_chunk", request, LoadChunkResponse)).digest

    async def _post(
        self, path: str, body: BaseModel, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        return await self._hold(path, lambda: self._caller.post(path, body, answer, timeout_s=timeout_s))

    async def _hold(self, path: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        line = self._line
        try:
            return await line.hold(call)
        except CallCut:
            raise given_up(self.name, path) from None
        except CallLost as lost:
            raise engine_error(self._caller, lost, is_told=line.is_cut) from lost

    async def _post_or_error(
        self, path: str, body: BaseModel, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        try:
            return await self._post(path, body, answer, timeout_s)
        except CallRefused as refusal:
            raise engine_error(self._caller, refusal) from refusal

    async def _post_version(
        self,
        path: str,
        body: PrepareRequest | CommitRequest | LoadChunkRequest,
        answer_type: type[AboutVersion],
    ) -> AboutVersion:
        """What is asked about a version is answered about that version. Raises EngineError."""
        answer = await self._post_or_error(path, body, answer_type)
        if answer.version != body.version:
            raise self._wrong_version(path, body.version, answer.version)
        return answer

    def _wrong_version(self, path: str, asked: int, answered: int) -> EngineError:
        return EngineError(
            self.name,
            f"answered {path} of policy_version {asked} with policy_version {answered}",
            rule="an answer carries the version that was asked for",
            way_out=f"make sure that only this run talks to {self._caller.url}.",
        )


def _request(shape: type[Asked], told: ExportResponse | ExportChunkResponse) -> Asked:
    """What an engine is to load, of all that the trainer says of its export."""
    return shape(**{name: getattr(told, name) for name in shape.model_fields})
