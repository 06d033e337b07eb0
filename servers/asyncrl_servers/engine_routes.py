"""The HTTP side of an engine server: its routes over any engine, and the server's end of the link on which a
controller's requests come (asyncrl/messages/frames.py).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic

from aiohttp import WSMsgType, web

from asyncrl.messages import frames
from asyncrl.messages.base import SECRET_ENV, Message, Moved
from asyncrl.messages.calls import (
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
from asyncrl.serving import Refused, add_route, make_app, secret_of, serve
from asyncrl_servers.served_engine import MAX_QUEUED, Answer, AnyFuture, Of, ServedEngine

FRAME_ROWS = 256
"""Most rows in a frame: its reader does other things between two of them."""


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
    Waits: the reader sleeps until a frame comes. Frames that go are not waited for: they are written when the
        event loop is woken, once for all that was told until then.
    Invariant: frames leave in the order in which their tokens were sampled.
    """

    def __init__(
        self, engine: ServedEngine[Of], link: web.WebSocketResponse, transport: asyncio.Transport
    ) -> None:
        self._engine, self._link, self._transport = engine, link, transport
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, Of] = {}
        self._told: deque[frames.Sampled] = deque()
        self._is_woken = False

    def sampled(self, rows: Sequence[frames.Sampled]) -> None:
        """Send these; from any one thread at a time."""
        self._told.extend(rows)
        if not self._is_woken:  # _send clears it before it looks
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed: the server ends
                self._loop.call_soon_threadsafe(self._send)

    async def serve(self) -> None:
        """Until the client leaves. Raises ValueError for what is no frame."""
        try:
            async for message in self._link:
                if message.type is not WSMsgType.BINARY:
                    raise ValueError(f"a {message.type.name} message came, where frames are bytes")
                self._take(frames.read_frame(message.data))
        finally:
            self._engine.abort(list(self._runs.values()))
            self._runs.clear()

    def _send(self) -> None:
        """What was told."""
        self._is_woken = False
        known = list[frames.Sampled]()
        while self._told:
            row = self._told.popleft()
            if row.number in self._runs:
                known.append(row)
                if row.then not in ("more", "interrupted"):
                    del self._runs[row.number]
        for first in range(0, len(known), FRAME_ROWS):
            self._write(frames.sampled_frame(known[first : first + FRAME_ROWS]))

    def _write(self, frame: bytes) -> None:
        """As a message of the WebSocket (RFC 6455, section 5.2), which a server sends as it is. Without
        aiohttp's writer, which takes a task and a turn of the loop.
        """
        size, kind = len(frame), 0x80 | WSMsgType.BINARY
        if size < 126:
            head = struct.pack("!BB", kind, size)
        elif size < 2**16:
            head = struct.pack("!BBH", kind, 126, size)
        else:
            head = struct.pack("!BBQ", kind, 127, size)
        if not self._transport.is_closing():  # the reader sees it
            self._transport.write(head + frame)

    def _take(self, frame: frames.Frame) -> None:
        if frame.kind == "submit":
            self._submit(frames.read_submit(frame))
            return
        acts = {"resume": self._engine.resume, "abort": self._engine.abort}
        if frame.kind not in acts:
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
                self._write(frames.refused_frame(one.number, refusal.status, refusal.body))
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
            self._done.set_result(frames.joined(self._run.request.request_id, self._rows))


def check_queue(num_free: int) -> None:
    """Raise Refused (503) where no more requests may wait."""
    if num_free <= 0:
        way_out = "keep fewer rollouts in flight, or add engines."
        raise Refused(503, f"{MAX_QUEUED} requests are queued already", way_out=way_out)


def engine_routes(engine: ServedEngine[Of], secret: str) -> web.Application:
    """The routes of an engine server over `engine`, for bearers of the secret alone."""
    app = make_app(secret)

    async def link(request: web.Request) -> web.WebSocketResponse:
        opened = web.WebSocketResponse(max_msg_size=0, compress=False)
        await opened.prepare(request)
        try:
            assert request.transport is not None, "it is open"
            await ServedLink(engine, opened, request.transport).serve()
        except ValueError as error:
            await opened.close(code=1002, message=str(error)[:120].encode())
        return opened

    async def health() -> EngineHealth:
        return engine.health()

    async def generate(body: GenerateBody) -> GenerateResponse:
        check_queue(MAX_QUEUED - engine.num_queued)
        return await OneAnswer(engine, body.request()).answer()

    # The first two block a worker thread, not the event loop.
    async def prepare(body: PrepareRequest) -> PrepareResponse:
        return await asyncio.to_thread(engine.weights.prepare, body)

    async def load_chunk(body: LoadChunkRequest) -> LoadChunkResponse:
        return await asyncio.to_thread(engine.weights.load_chunk, body)

    async def commit(body: CommitRequest) -> CommitResponse:
        return await _answered(engine.commit(body))

    async def sleep(body: SleepRequest) -> Moved:
        return await _answered(engine.sleep(body))

    async def wake(body: WakeRequest) -> Moved:
        return await _answered(engine.wake(body))

    app.router.add_get("/link", link)
    add_route(app, "GET", "/health", health)
    for act in (generate, prepare, load_chunk, commit, sleep, wake):
        add_route(app, "POST", f"/{act.__name__}", act)
    return app


def serve_engine(engine: ServedEngine[Of], fd: int) -> None:
    """Serve on the inherited socket until SIGTERM. Returns after a clean shutdown."""
    serve(engine_routes(engine, secret_of(SECRET_ENV)), fd, cancels_handlers=True)


async def _answered(future: AnyFuture[Answer]) -> Answer:
    """A caller that leaves does not end what the engine does."""
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    return wrapped.result()
