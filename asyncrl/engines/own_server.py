"""The client of one engine server of ours: its messages as calls, its failures as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pydantic import BaseModel

from asyncrl.engines.engine import Lifeline, OnChunk, SegmentCheck
from asyncrl.errors import RequestRefused
from asyncrl.http import Answer, Caller, CallRefused
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


class EngineServer:
    """An EngineClient of an embedded or simulated engine.

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
                raise RequestRefused(
                    f"{self.name} refused request {request.request_id} ({len(request.prompt_ids)} prompt "
                    f"tokens, max_tokens={request.max_tokens}): {refusal.body.error}",
                    rule=refusal.body.rule,
                    way_out=refusal.body.way_out,
                ) from refusal
        check.end(answer, newest=self._offered_version)
        return answer

    async def _stream(
        self, request: GenerateRequest, check: SegmentCheck, on_chunk: OnChunk
    ) -> GenerateResponse:
        streamed, answer = request.model_copy(update={"stream": True}), None
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
