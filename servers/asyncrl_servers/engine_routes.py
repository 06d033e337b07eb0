"""Engine server routes, and the server end of the link (asyncrl/messages/codec.py)."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic

from aiohttp import WSMsgType, web
from pydantic import BaseModel

from asyncrl.base.http import Refused, add_route, make_app, secret_of, serve
from asyncrl.base.message import SECRET_ENV, Message
from asyncrl.messages import codec
from asyncrl.messages.engine_api import (
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
    TransferStats,
    WakeRequest,
)
from asyncrl_servers.served_engine import MAX_QUEUED, Answer, AnyFuture, Of, ServedEngine

FRAME_ROWS = 256


class GenerateBody(Message):
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    num_resumed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    grammar: str | None = None
    top_logprobs: int = 0


class ServedLink(Generic[Of]):
    """Server end of one link.

    Life: open -> closed by the client or with its process, which aborts open requests.
    Waits: the reader sleeps until a frame comes; sending never blocks.
    Invariant: frames leave whole, in sampling order.
    """

    def __init__(
        self, engine: ServedEngine[Of], link: web.WebSocketResponse, transport: asyncio.Transport
    ) -> None:
        self._engine, self._link, self._transport = engine, link, transport
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, Of] = {}
        self._sending = threading.Lock()
        self._socket: socket.socket = transport.get_extra_info("socket").dup()
        self._unsent: list[bytes] = []
        self._is_behind = False

    def sampled(self, rows: Sequence[codec.Sampled]) -> None:
        known = [row for row in rows if row.number in self._runs]
        for row in known:
            if row.then not in ("more", "interrupted"):
                self._runs.pop(row.number, None)  # serve() may have emptied it already
        for first in range(0, len(known), FRAME_ROWS):
            self._send(codec.sampled_frame(known[first : first + FRAME_ROWS]))

    def refused(self, number: int, refusal: Refused) -> None:
        if self._runs.pop(number, None) is not None:
            self._send(codec.refused_frame(number, refusal.status, refusal.body))

    async def serve(self) -> None:
        try:
            async for message in self._link:
                self._take(codec.read_frame(message.data))
        finally:
            self._engine.abort(list(self._runs.values()))
            self._runs.clear()
            with self._sending:
                self._socket.close()

    def _send(self, frame: bytes) -> None:
        message = _message(frame)
        with self._sending, suppress(RuntimeError):  # the loop is closed
            if not self._is_behind:
                num_sent = 0
                with suppress(OSError):
                    num_sent = self._socket.send(message)
                message = message[num_sent:]
                self._is_behind = bool(message)
            if message:
                self._unsent.append(message)
                self._loop.call_soon_threadsafe(self._catch_up)

    def _catch_up(self) -> None:
        with self._sending:
            # some Python versions' writelines() ignores a lost connection
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()
            self._is_behind = self._transport.get_write_buffer_size() > 0

    def _take(self, frame: codec.Frame) -> None:
        if frame.kind == "submit":
            self._submit(codec.read_submit(frame))
            return
        runs = [self._runs[number] for number in frame.numbers if number in self._runs]
        if frame.kind == "resume":
            self._engine.resume(runs)
        else:
            self._engine.abort(runs)

    def _submit(self, asked: Sequence[codec.Asked]) -> None:
        runs = list[Of]()
        num_free = MAX_QUEUED - self._engine.num_queued
        for one in asked:
            try:
                check_queue(num_free - len(runs))
                run = self._engine.run(one, self)
            except Refused as refusal:
                self._send(codec.refused_frame(one.number, refusal.status, refusal.body))
            else:
                self._runs[one.number] = run
                runs.append(run)
        self._engine.submit(runs)


def _message(data: bytes) -> bytes:
    """Return an unmasked, unfragmented binary WebSocket message (RFC 6455, section 5.2)."""
    size, kind = len(data), 0x80 | WSMsgType.BINARY
    if size < 126:
        return struct.pack("!BB", kind, size) + data
    if size < 2**16:
        return struct.pack("!BBH", kind, 126, size) + data
    return struct.pack("!BBQ", kind, 127, size) + data


class OneAnswer:
    """Listener of one POST /generate, across weight updates."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[codec.Sampled | Refused] = asyncio.Queue()

    async def answer(self, engine: ServedEngine[Of], request: GenerateRequest) -> GenerateResponse:
        """Abort if the client leaves. Raises Refused."""
        run = engine.run(codec.Asked(0, request, is_streamed=False), self)
        rows: list[codec.Sampled] = []
        engine.submit([run])
        try:
            while not rows or rows[-1].then == "interrupted":
                if rows:
                    engine.resume([run])
                row = await self._arrived.get()
                if isinstance(row, Refused):
                    raise row
                rows.append(row)
        finally:
            engine.abort([run])
        return codec.response(request.request_id, *rows)

    def sampled(self, rows: Sequence[codec.Sampled]) -> None:
        for row in rows:
            self._put(row)

    def refused(self, number: int, refusal: Refused) -> None:
        self._put(refusal)

    def _put(self, row: codec.Sampled | Refused) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, row)


def check_queue(num_free: int) -> None:
    """Raise Refused (503) if the queue is full."""
    if num_free <= 0:
        way_out = "keep fewer rollouts in flight, or add engines."
        raise Refused(503, f"{MAX_QUEUED} requests are queued already", way_out=way_out)


Act = Callable[..., Awaitable[BaseModel]]


def engine_routes(engine: ServedEngine[Of], secret: str, *more: Act) -> web.Application:
    """`more`: additional POST routes."""
    app = make_app(secret)

    async def link(request: web.Request) -> web.WebSocketResponse:
        # a pong could split a frame, so pings are errors
        opened = web.WebSocketResponse(max_msg_size=0, compress=False, autoping=False)
        await opened.prepare(request)
        if request.transport is not None:  # the client is still here
            await ServedLink(engine, opened, request.transport).serve()
        return opened

    async def health() -> EngineHealth:
        return engine.health()

    async def generate(body: GenerateBody) -> GenerateResponse:
        check_queue(MAX_QUEUED - engine.num_queued)
        return await OneAnswer().answer(engine, GenerateRequest(**dict(body)))

    async def prepare(body: PrepareRequest) -> PrepareResponse:
        return await asyncio.to_thread(engine.weights.prepare, body)

    async def load_chunk(body: LoadChunkRequest) -> LoadChunkResponse:
        return await asyncio.to_thread(engine.weights.load_chunk, body)

    async def commit(body: CommitRequest) -> CommitResponse:
        return await _answered(engine.commit(body))

    async def sleep(body: SleepRequest) -> TransferStats:
        return await _answered(engine.sleep(body))

    async def wake(body: WakeRequest) -> TransferStats:
        return await _answered(engine.wake(body))

    app.router.add_get("/link", link)
    add_route(app, "GET", "/health", health)
    acts: tuple[Act, ...] = (generate, prepare, load_chunk, commit, sleep, wake, *more)
    for act in acts:
        add_route(app, "POST", f"/{act.__name__}", act)
    return app


def serve_engine(engine: ServedEngine[Of], fd: int, *more: Act) -> None:
    serve(engine_routes(engine, secret_of(SECRET_ENV), *more), fd, cancels_handlers=True)


async def _answered(future: AnyFuture[Answer]) -> Answer:
    wrapped = asyncio.wrap_future(future)
    await asyncio.wait((wrapped,))
    return wrapped.result()
