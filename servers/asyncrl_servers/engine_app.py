"""The HTTP side of an engine server: its endpoints over any engine that answers with futures. Knows no
torch.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol, TypeAlias, TypeVar

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import Response

from asyncrl.http import make_app
from asyncrl.messages.base import Moved
from asyncrl.messages.engine_calls import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    LoadChunkResponse,
    PrepareRequest,
    PrepareResponse,
    SleepRequest,
    WakeRequest,
)
from asyncrl_servers.checks import refusal_of
from asyncrl_servers.streaming import StreamedAnswer, TokenStream

Answer = TypeVar("Answer")
AnyFuture: TypeAlias = "Future[Answer] | asyncio.Future[Answer]"


class Engine(Protocol):
    """What the endpoints ask for. A future carries Refused, or any other error, which is answered as 500."""

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        ...

    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> AnyFuture[GenerateResponse]:
        """Queue a request. Raises Refused if it can never run. Tokens that `stream` was told are left out of
        the answer.
        """
        ...

    def abort(self, request_ids: list[str] | None) -> AnyFuture[list[str]]:
        """End these requests (None: all) with what they have; names those that were here."""
        ...

    def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Stage weights; blocks its thread. Raises Refused."""
        ...

    def commit(self, request: CommitRequest) -> AnyFuture[CommitResponse]:
        """Swap to the staged weights, or serve those that came in chunks."""
        ...

    def sleep(self, request: SleepRequest) -> AnyFuture[Moved]:
        """Abort what runs and free these parts. What is queued waits for their wake."""
        ...

    def wake(self, request: WakeRequest) -> AnyFuture[Moved]:
        """Take memory for these parts again."""
        ...

    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        """Load a chunk into weights without content; blocks its thread. Raises Refused."""
        ...


def engine_app(engine: Engine) -> FastAPI:
    """The endpoints of an engine server over `engine`."""
    app = make_app()

    @app.get("/health")
    async def health() -> EngineHealth:
        return engine.health()

    @app.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> GenerateResponse | Response:
        if body.stream:
            stream = TokenStream()
            return StreamedAnswer(
                stream,
                asyncio.wrap_future(engine.submit(body, stream)),
                lambda: engine.abort([body.request_id]),
            )
        future = engine.submit(body)

        async def abort_when_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            engine.abort([body.request_id])

        async with anyio.create_task_group() as group:
            group.start_soon(abort_when_gone)
            answer = await asyncio.wait((asyncio.wrap_future(future),))
            group.cancel_scope.cancel()
        return _result(answer[0].pop())

    @app.post("/abort")
    async def abort(body: AbortRequest) -> AbortResponse:
        return AbortResponse(aborted=await _answered(engine.abort(body.request_ids)))

    @app.post("/prepare")
    def prepare(body: PrepareRequest) -> PrepareResponse:
        return engine.prepare(body)  # blocks a worker thread, not the event loop

    @app.post("/commit")
    async def commit(body: CommitRequest) -> CommitResponse:
        return await _answered(engine.commit(body))

    @app.post("/sleep")
    async def sleep(body: SleepRequest) -> Moved:
        return await _answered(engine.sleep(body))

    @app.post("/wake")
    async def wake(body: WakeRequest) -> Moved:
        return await _answered(engine.wake(body))

    @app.post("/load_chunk")
    def load_chunk(body: LoadChunkRequest) -> LoadChunkResponse:
        return engine.load_chunk(body)

    return app


def _result(future: asyncio.Future[Answer]) -> Answer:
    error = future.exception()
    if error is not None:
        raise refusal_of(error)
    return future.result()


async def _answered(future: AnyFuture[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    return _result(wrapped)
