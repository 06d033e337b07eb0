"""The HTTP side of an engine server: its routes over any engine, and the server's end of the link on which a
controller's requests come (asyncrl/messages/frames.py).
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ValidationError

from asyncrl.http import Refused, secret_of
from asyncrl.messages import frames
from asyncrl.messages.base import SECRET_ENV, ErrorBody, Message
from asyncrl.messages.calls import (
    CommitRequest,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    PrepareRequest,
    SleepRequest,
    WakeRequest,
)
from asyncrl_servers.engine_app import MAX_QUEUED, Answer, AnyFuture, Of, ServedEngine

FRAME_ROWS = 256
"""Most rows in a frame: its reader does other things between two of them."""
Body = TypeVar("Body", bound=BaseModel)


class GenerateBody(Message):
    """POST /generate: a GenerateRequest as JSON."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    num_resumed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: list[str] = []
    seed: int = 0

    def request(self) -> GenerateRequest:
        """As the engine takes it."""
        return GenerateRequest(**{**dict(self), "stop": tuple(self.stop)})


class ServedLink(Generic[Of]):
    """The server's end of one link.

    Life: opened -> frames come and go -> closed by the client or with its process: what is open is aborted.
    Waits: the reader sleeps until a frame comes, the writer until there is one to send.
    Invariant: frames leave in the order in which their tokens were sampled.
    """

    def __init__(self, engine: ServedEngine[Of], link: web.WebSocketResponse) -> None:
        self._engine, self._link = engine, link
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, Of] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    def sampled(self, rows: Sequence[frames.Sampled]) -> None:
        """Send these; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the server ends
            self._loop.call_soon_threadsafe(self._send, rows)

    async def serve(self) -> None:
        """Until the client leaves. Raises ValueError for what is no frame."""
        writer = asyncio.ensure_future(self._write())
        try:
            async for message in self._link:
                if message.type is not WSMsgType.BINARY:
                    raise ValueError(f"a {message.type.name} message came, where frames are bytes")
                self._take(frames.read_frame(message.data))
        finally:
            writer.cancel()
            self._engine.abort(list(self._runs.values()))
            self._runs.clear()

    async def _write(self) -> None:
        with suppress(ConnectionError):  # the reader sees it too
            while True:
                await self._link.send_bytes(await self._outbox.get())

    def _send(self, rows: Sequence[frames.Sampled]) -> None:
        known = [row for row in rows if row.number in self._runs]
        for row in known:
            if row.then not in ("more", "interrupted"):
                del self._runs[row.number]
        for first in range(0, len(known), FRAME_ROWS):
            self._outbox.put_nowait(frames.sampled_frame(known[first : first + FRAME_ROWS]))

    def _take(self, frame: frames.Frame) -> None:
        if frame.kind == "submit":
            self._submit(frames.read_submit(frame))
            return
        acts = {"resume": self._engine.resume, "abort": self._engine.abort}
        if frame.kind not in acts or "numbers" not in frame.arrays:
            raise ValueError(f"a frame of kind {frame.kind} came, with {sorted(frame.arrays)}")
        acts[frame.kind]([self._runs[number] for number in frame.numbers if number in self._runs])

    def _submit(self, asked: Sequence[frames.Asked]) -> None:
        runs, num_free = list[Of](), MAX_QUEUED - self._engine.num_queued
        for one in asked:
            try:
                if one.number in self._runs:
                    raise ValueError(f"request number {one.number} is here already")
                check_queue(num_free - len(runs))
                run = self._engine.run(one, self)
            except Refused as refusal:
                self._outbox.put_nowait(frames.refused_frame(one.number, refusal.status, refusal.body))
            else:
                self._runs[one.number] = run
                runs.append(run)
        self._engine.submit(runs)


class OneAnswer:
    """The listener of one POST /generate. Weight updates do not end it: the request goes on under the new
    weights.
    """

    def __init__(self, engine: ServedEngine[Of], request: GenerateRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[GenerateResponse] = self._loop.create_future()
        self._engine: ServedEngine[Any] = engine
        self._run: Any = engine.run(frames.Asked(0, request, is_streamed=False), self)
        self._rows: list[frames.Sampled] = []

    async def answer(self) -> GenerateResponse:
        """Once it is whole. A client that leaves aborts it."""
        self._engine.submit([self._run])
        try:
            return await self._done
        finally:
            self._engine.abort([self._run])

    def sampled(self, rows: Sequence[frames.Sampled]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, rows)

    def _take(self, rows: Sequence[frames.Sampled]) -> None:
        self._rows += rows
        if rows[-1].then == "interrupted":
            self._engine.resume([self._run])
        elif not self._done.done():
            self._done.set_result(self._joined())

    def _joined(self) -> GenerateResponse:
        ids, logprobs, spans = list[int](), list[float](), list[tuple[int, int, int]]()
        for row in self._rows:
            spans += [(start + len(ids), end + len(ids), version) for start, end, version in row.spans]
            ids += row.token_ids.tolist()
            logprobs += row.logprobs.tolist()
        return GenerateResponse(
            request_id=self._run.request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            version_spans=frames.spans_from(spans),
            finish_reason=self._rows[-1].then,
        )


def check_queue(num_free: int) -> None:
    """Raise Refused (503) where no more requests may wait."""
    if num_free <= 0:
        way_out = "keep fewer rollouts in flight, or add engines."
        raise Refused(503, f"{MAX_QUEUED} requests are queued already", way_out=way_out)


def engine_routes(engine: ServedEngine[Of], secret: str) -> web.Application:
    """The routes of an engine server over `engine`, for bearers of the secret alone."""
    app = web.Application(middlewares=[_guard(secret)], client_max_size=2**30)

    async def link(request: web.Request) -> web.WebSocketResponse:
        opened = web.WebSocketResponse(max_msg_size=0, compress=False)
        await opened.prepare(request)
        try:
            await ServedLink(engine, opened).serve()
        except ValueError as error:
            await opened.close(code=1002, message=str(error)[:120].encode())
        return opened

    async def health(_: web.Request) -> web.Response:
        return _json(engine.health())

    async def generate(request: web.Request) -> web.Response:
        check_queue(MAX_QUEUED - engine.num_queued)
        return _json(await OneAnswer(engine, (await _read(request, GenerateBody)).request()).answer())

    def post(body: type[Body], act: Callable[[Body], Awaitable[BaseModel]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            return _json(await act(await _read(request, body)))

        return handle

    app.add_routes(
        [
            web.get("/link", link),
            web.get("/health", health),
            web.post("/generate", generate),
            # These two block a worker thread, not the event loop.
            web.post("/prepare", post(PrepareRequest, _in_thread(lambda body: engine.weights.prepare(body)))),
            web.post(
                "/load_chunk",
                post(LoadChunkRequest, _in_thread(lambda body: engine.weights.load_chunk(body))),
            ),
            web.post("/commit", post(CommitRequest, lambda body: _answered(engine.commit(body)))),
            web.post("/sleep", post(SleepRequest, lambda body: _answered(engine.sleep(body)))),
            web.post("/wake", post(WakeRequest, lambda body: _answered(engine.wake(body)))),
        ]
    )
    return app


def serve_engine(engine: ServedEngine[Of], fd: int) -> None:
    """Serve on the inherited socket until SIGTERM. Returns after a clean shutdown."""
    web.run_app(
        engine_routes(engine, secret_of(SECRET_ENV)),
        sock=socket.socket(fileno=fd),
        shutdown_timeout=1.0,
        access_log=None,
        print=None,
        handler_cancellation=True,
    )


def _in_thread(act: Callable[[Body], Answer]) -> Callable[[Body], Awaitable[Answer]]:
    return lambda body: asyncio.to_thread(act, body)


def _guard(secret: str) -> Any:
    """Every error as an ErrorBody; requests without the run's secret are answered with 401."""
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
            body = ErrorBody(error="wrong or missing bearer token", rule="it is the run's own server")
            return _json(body, 401)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except Refused as refusal:
            return _json(refusal.body, refusal.status)
        except web.HTTPException as error:
            return _json(ErrorBody(error=f"{request.method} {request.path}: {error.reason}"), error.status)

    return guard


async def _read(request: web.Request, body: type[Body]) -> Body:
    try:
        return body.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, ('body', *first['loc'])))}: {first['msg']}"
        raise Refused(422, what, rule="see asyncrl/messages") from error


def _json(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


async def _answered(future: AnyFuture[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    error = wrapped.exception()
    if error is not None and not isinstance(error, Refused):
        what = f"{type(error).__name__}: {error}"
        raise Refused(500, what, way_out="see this server's log.") from error
    if error is not None:
        raise error
    return wrapped.result()
