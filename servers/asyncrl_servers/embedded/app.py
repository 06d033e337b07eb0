"""The HTTP side of the embedded engine. Knows messages and the engine's futures; knows no torch."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

import anyio
from fastapi import FastAPI, Request

from asyncrl.serving import Refused, make_app
from asyncrl.wire import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    PrepareRequest,
    PrepareResponse,
)
from asyncrl_servers.embedded.engine import Engine

Answer = TypeVar("Answer")


def engine_app(engine: Engine, name: str, device: str) -> FastAPI:
    """The five endpoints of an engine server over `engine`."""
    app = make_app()

    @app.get("/health")
    async def health() -> EngineHealth:
        stats = engine.stats()
        return EngineHealth(
            name=name,
            kind="embedded",
            policy_version=engine.weights.version,
            slots=engine.slots,
            max_length=engine.max_length,
            num_running=stats.num_running,
            num_queued=stats.num_queued,
            tokens_generated=stats.tokens_generated,
            device=device,
            decode_s=stats.decode_s,
        )

    @app.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> GenerateResponse:
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
        return AbortResponse(aborted=await asyncio.wrap_future(engine.abort(body.request_ids)))

    @app.post("/prepare")
    def prepare(body: PrepareRequest) -> PrepareResponse:
        return engine.prepare(body)  # blocks a worker thread, not the event loop

    @app.post("/commit")
    async def commit(body: CommitRequest) -> CommitResponse:
        return await _answered(engine.commit(body))

    return app


def _result(future: asyncio.Future[Answer]) -> Answer:
    error = future.exception()
    if error is None or isinstance(error, Refused):
        return future.result()
    raise Refused(500, f"{type(error).__name__}: {error}", way_out="see this server's log.")


async def _answered(future: Future[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    return _result(wrapped)
