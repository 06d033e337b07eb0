"""What all engine servers share: reading the spec, checks of requests, random numbers, and the HTTP side: its
endpoints over any engine that answers with futures, whole or as a stream. Without torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar

import anyio
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field, ValidationError

from asyncrl.http import Refused, child_arguments, fail, make_app
from asyncrl.messages.base import Message, Moved
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
    Span,
    WakeRequest,
)
from asyncrl_servers.weight_state import WeightState

Answer = TypeVar("Answer")
AnyFuture: TypeAlias = "Future[Answer] | asyncio.Future[Answer]"
Told: TypeAlias = "tuple[int, float, int]"
"""A sampled token: its id, its logprob, and its policy_version."""
MAX_QUEUED = 1_000_000
"""Requests that may wait for a slot; one more is refused with 503."""


class EngineSpec(Message):
    """The spec file of an engine server: one JSON object, unknown keys refused."""

    name: str
    """Name of this server in logs and errors, like engine-0."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""


Spec = TypeVar("Spec", bound=EngineSpec)


def read_spec(kind: type[Spec]) -> tuple[Spec, int]:
    """The spec of this server and the number of its socket. Ends the process if the spec is wrong."""
    text, fd = child_arguments()
    try:
        return kind.model_validate_json(text), fd
    except ValidationError as error:
        fail(f"the spec of this server is wrong: {error}", rule=f"its fields are those of {kind.__name__}")


def check_request(request: GenerateRequest, max_length: int, vocab_size: int) -> None:
    """Raise Refused (400) for a request that can never run."""
    name, num_prompt = f"request {request.request_id}", len(request.prompt_ids)
    total = num_prompt + request.max_tokens
    if total > max_length:
        what = f"{name} wants {num_prompt} + {request.max_tokens} = {total} tokens, a slot holds {max_length}"
        rule = "prompt and completion must fit into a slot"
        way_out = "shorten the prompt, or raise rollout.max_prompt_tokens or rollout.max_tokens."
        raise Refused(400, what, rule=rule, way_out=way_out)
    unknown = [token for token in request.prompt_ids if not 0 <= token < vocab_size]
    if unknown:
        rule = f"the model knows ids 0..{vocab_size - 1}"
        way_out = "encode the prompt with the model's own tokenizer."
        raise Refused(400, f"{name} has token id {unknown[0]}", rule=rule, way_out=way_out)
    if request.num_resumed > num_prompt:
        rule = "resumed ids are the last ones of the prompt"
        raise Refused(400, f"{name} has num_resumed={request.num_resumed} of {num_prompt} ids", rule=rule)


def check_queue(request_id: str, running: Collection[str], queued: Collection[str]) -> None:
    """Raise Refused for an id that is here already (409), or one more than may wait (503)."""
    if request_id in running or request_id in queued:
        rule = "request ids are unique among running and queued requests"
        raise Refused(409, f"request {request_id} is here already", rule=rule)
    if len(queued) >= MAX_QUEUED:
        way_out = "keep fewer rollouts in flight, or add engines."
        raise Refused(503, f"{MAX_QUEUED} requests are queued already", way_out=way_out)


def spans_of(marks: Sequence[tuple[int, int]], num_tokens: int) -> list[Span]:
    """Version spans that cover [0, num_tokens) once, in order. A mark is (first token, policy_version); empty
    spans are left out.
    """
    ends = [*(start for start, _ in marks[1:]), num_tokens]
    return [
        Span(start=start, end=end, version=version)
        for (start, version), end in zip(marks, ends, strict=False)  # no mark: aborted before it ran
        if start < end
    ]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, absolute position), float64 with 53 random bits; depends on
    nothing else, so that a resumed request draws what it would have drawn.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class TokenStream:
    """Tokens of one request between the engine that samples them and the answer that sends them.

    Life: made in the event loop of the connection, which alone calls it; other threads use hand_over.
    Waits: wait_changed sleeps until there are tokens to take, or an empty put() says that the answer is
        there.
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

    async def wait_changed(self) -> None:
        """Sleep until put() was called."""
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
    as 500. `stream` gets tokens as they come; the answer has all of them.
    """

    @property
    def weights(self) -> WeightState: ...
    def health(self) -> EngineHealth: ...
    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> AnyFuture[GenerateResponse]: ...
    def abort(self, request_ids: list[str] | None) -> AnyFuture[list[str]]: ...
    def commit(self, request: CommitRequest) -> AnyFuture[CommitResponse]: ...
    def sleep(self, request: SleepRequest) -> AnyFuture[Moved]: ...
    def wake(self, request: WakeRequest) -> AnyFuture[Moved]: ...


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
            answer.add_done_callback(lambda _: stream.put(()))

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
            return await _answered(answer)
        lines = _lines(stream, answer, lambda: engine.abort([body.request_id]))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.post("/abort")
    async def abort(body: AbortRequest) -> AbortResponse:
        return AbortResponse(aborted=await _answered(engine.abort(body.request_ids)))

    @app.post("/prepare")
    def prepare(body: PrepareRequest) -> PrepareResponse:
        return engine.weights.prepare(body)  # blocks a worker thread, not the event loop

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
        return engine.weights.load_chunk(body)

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
                last = answer.result().after(stream.num_taken) if error is None else _refusal_of(error).body
                lines.append(last.model_dump_json())
            if lines:
                yield "".join(f"{line}\n" for line in lines)
            if not is_last:
                await stream.wait_changed()
    finally:
        if not answer.done():
            abort()


async def _answered(future: AnyFuture[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    error = wrapped.exception()
    if error is not None:
        raise _refusal_of(error)
    return wrapped.result()


def _refusal_of(error: BaseException) -> Refused:
    """The answer for `error`: the error itself if it is a refusal, else a crash (500)."""
    if isinstance(error, Refused):
        return error
    return Refused(500, f"{type(error).__name__}: {error}", way_out="see this server's log.")
