"""The HTTP side of an engine server: its endpoints over any engine that answers with futures, whole or as a
stream. Knows no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from asyncrl.http import make_app
from asyncrl.messages.base import Moved
from asyncrl.messages.calls import (
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
from asyncrl_servers.checks import refusal_of

Answer = TypeVar("Answer")
AnyFuture: TypeAlias = "Future[Answer] | asyncio.Future[Answer]"
Told: TypeAlias = "tuple[int, float, int]"
"""A sampled token: its id, its logprob, and its policy_version."""


class TokenStream:
    """Tokens of one request between the engine that samples them and the answer that sends them.

    Life: made in the event loop of the connection, which alone calls it; other threads use hand_over.
    Waits: wait_changed sleeps until there are tokens to take, or close_nowait was called.
    Invariant: what was put is taken once, in order: at most the request's max_tokens. The token that ends the
        answer is never put.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.num_taken = 0
        self._told: list[Told] = []
        self._changed = asyncio.Event()

    def put(self, told: Iterable[Told]) -> None:
        """More tokens."""
        self._told.extend(told)
        self._changed.set()

    def close_nowait(self, _: object = None) -> None:
        """The response is there."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Sleep until put or close_nowait."""
        await self._changed.wait()
        self._changed.clear()

    def take_nowait(self) -> list[GenerateChunk]:
        """What was put since the last time, a chunk for each run of one version."""
        told, self._told = self._told, []
        self.num_taken += len(told)
        chunks = []
        for version, run in groupby(told, key=lambda token: token[2]):
            token_ids, logprobs, _ = zip(*run, strict=True)
            chunks.append(GenerateChunk(token_ids=list(token_ids), logprobs=list(logprobs), version=version))
        return chunks


def hand_over(told: list[tuple[TokenStream, Told]]) -> None:
    """Put tokens from another thread: one wake-up of the event loop for all streams together."""

    def put_all() -> None:
        for stream, token in told:
            stream.put((token,))

    with suppress(RuntimeError):  # the loop is closed: the server ends
        told[0][0].loop.call_soon_threadsafe(put_all)


class ServedEngine(Protocol):
    """What the endpoints need of an engine. A future carries Refused, or any other error, which is answered
    as 500.

    prepare and load_chunk block their thread. `stream` gets tokens as they come; the answer has all of them.
    """

    def health(self) -> EngineHealth: ...
    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> AnyFuture[GenerateResponse]: ...
    def abort(self, request_ids: list[str] | None) -> AnyFuture[list[str]]: ...
    def prepare(self, request: PrepareRequest) -> PrepareResponse: ...
    def commit(self, request: CommitRequest) -> AnyFuture[CommitResponse]: ...
    def sleep(self, request: SleepRequest) -> AnyFuture[Moved]: ...
    def wake(self, request: WakeRequest) -> AnyFuture[Moved]: ...
    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse: ...


def engine_app(engine: ServedEngine) -> FastAPI:
    """The endpoints of an engine server over `engine`."""
    app = make_app()

    @app.get("/health")
    async def health() -> EngineHealth:
        return engine.health()

    @app.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> GenerateResponse | Response:
        stream = TokenStream() if body.stream else None
        answer = asyncio.wrap_future(engine.submit(body, stream))
        if stream is not None:
            answer.add_done_callback(stream.close_nowait)

        async def abort_when_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            engine.abort([body.request_id])

        async with anyio.create_task_group() as group:
            group.start_soon(abort_when_gone)
            # Until the first token, so that a refusal has its own status.
            await (asyncio.wait((answer,)) if stream is None else stream.wait_changed())
            group.cancel_scope.cancel()
        if stream is None or (answer.done() and answer.exception() is not None):
            return _result(answer)
        lines = _lines(stream, answer, lambda: engine.abort([body.request_id]))
        return StreamingResponse(lines, media_type="application/x-ndjson")

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


async def _lines(
    stream: TokenStream, answer: asyncio.Future[GenerateResponse], abort: Callable[[], object]
) -> AsyncIterator[str]:
    """A line of JSON a chunk, and last the rest of the response, or an ErrorBody. Left before the end, it
    aborts.
    """
    try:
        is_last = False
        while not is_last:
            is_last = answer.done()
            lines = [chunk.model_dump_json() for chunk in stream.take_nowait()]
            if is_last:
                error = answer.exception()
                last = _rest(answer.result(), stream.num_taken) if error is None else refusal_of(error).body
                lines.append(last.model_dump_json())
            if lines:
                yield "".join(f"{line}\n" for line in lines)
            if not is_last:
                await stream.wait_changed()
    finally:
        if not answer.done():
            abort()


def _rest(answer: GenerateResponse, start: int) -> GenerateResponse:
    """The answer without its first `start` tokens."""
    spans = [
        span.model_copy(update={"start": max(0, span.start - start), "end": span.end - start})
        for span in answer.version_spans
        if span.end > start
    ]
    rest = {"token_ids": answer.token_ids[start:], "logprobs": answer.logprobs[start:]}
    return answer.model_copy(update={**rest, "version_spans": spans})


def _result(future: asyncio.Future[Answer]) -> Answer:
    error = future.exception()
    if error is not None:
        raise refusal_of(error)
    return future.result()


async def _answered(future: AnyFuture[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    return _result(wrapped)
