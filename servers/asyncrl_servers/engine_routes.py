"""Engine server routes, and the server end of the link (asyncrl/messages/codec.py).
Imports no torch.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import WSMsgType, web
from pydantic import BaseModel, Field

from asyncrl.base.errors import Message
from asyncrl.base.http import (
    SECRET_ENV,
    Refused,
    add_route,
    child_arguments,
    make_app,
    secret_of,
    serve,
)
from asyncrl.messages import codec
from asyncrl.messages import engine_api as api
from asyncrl.messages.codec import Asked, Sampled
from asyncrl_servers.weight_state import WeightState

FRAME_ROWS = 256
Act = Callable[..., Awaitable[BaseModel]]


class EngineSpec(Message):
    name: str
    slots: int = Field(ge=1)
    max_length: int = Field(ge=2)
    """Prompt and completion together."""
    adapters: api.AdapterSpec | None = None
    """Pushes bring adapters, and no other weights."""


Spec = TypeVar("Spec", bound=EngineSpec)


def read_spec(kind: type[Spec]) -> tuple[Spec, int]:
    """Return the spec and the socket number."""
    text, fd = child_arguments()
    return kind.model_validate_json(text), fd


class Listener(Protocol):
    def on_sampled(self, rows: Sequence[Sampled]) -> None: ...
    def on_refused(self, number: int, refusal: Refused) -> None: ...


class Run:
    """A request in an engine."""

    def __init__(self, asked: Asked, listener: Listener) -> None:
        self.number, self.request, self.is_streamed = asked
        self.listener = listener
        self.num_told = 0
        self.marks: list[tuple[int, int]] = []
        """(position of the first token, policy_version)."""


AnyRun = TypeVar("AnyRun", bound=Run)


class RunQueue(Generic[AnyRun]):
    """Queued and interrupted runs of an engine, and results until hand_over."""

    def __init__(self) -> None:
        self.queued: OrderedDict[AnyRun, None] = OrderedDict()
        self.interrupted: dict[AnyRun, None] = {}
        self._results: dict[Listener, list[Sampled]] = {}

    def submit(self, runs: Iterable[AnyRun]) -> None:
        self.queued.update(dict.fromkeys(runs))

    def put_first(self, runs: Sequence[AnyRun]) -> None:
        # Reversed, because each run is put in front of the last.
        for run in reversed(runs):
            self.queued[run] = None
            self.queued.move_to_end(run, last=False)

    def resume(self, runs: Sequence[AnyRun]) -> None:
        """Put interrupted runs before the queue."""
        found = [run for run in runs if run in self.interrupted]
        for run in found:
            del self.interrupted[run]
        self.put_first(found)

    def report(self, run: AnyRun, sampled: Sampled) -> None:
        self._results.setdefault(run.listener, []).append(sampled)

    def hand_over(self) -> None:
        results, self._results = self._results, {}
        for listener, sampled in results.items():
            listener.on_sampled(sampled)


class ServedEngine(Protocol[AnyRun]):
    """Engine interface of the routes.

    Futures may raise Refused; other errors become 500. `run` raises Refused (400),
    `weights_of` Refused (404).
    `abort` ends runs with their tokens so far.
    """

    def weights_of(self, adapter: str) -> WeightState: ...
    def health(self) -> api.EngineHealth: ...
    def run(self, asked: Asked, listener: Listener) -> AnyRun: ...
    def submit(self, runs: Sequence[AnyRun]) -> None: ...
    def resume(self, runs: Sequence[AnyRun]) -> None: ...
    def abort(self, runs: Sequence[AnyRun]) -> None: ...
    def commit(self, request: api.CommitRequest) -> Future[api.CommitResponse]: ...
    def sleep(self) -> Future[api.TransferStats]: ...
    def wake(self, request: api.WakeRequest) -> Future[api.TransferStats]: ...


def no_adapter(name: str, known: Iterable[str], status: int) -> Refused:
    what = f"adapter {name!r} has no weights here; open are {sorted(known)}"
    return Refused(status, what, way_out="open the adapter, and push its weights.")


def check_request(
    asked: Asked, max_length: int, vocab_size: int
) -> npt.NDArray[np.int64]:
    """Return the prompt ids, int64 [P]. Raises Refused (400)."""
    if fault := codec.request_fault(asked.request, max_length, vocab_size):
        what = f"request {asked.request.request_id}: {fault.error}"
        raise Refused(400, what, rule=fault.rule, way_out=fault.way_out)
    return np.asarray(asked.request.prompt_ids, np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 finalizer (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2660193.2660195).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return float64 in [0, 1) with 53 random bits, by (seed, absolute position) for
    resumed requests.
    """
    # SplitMix64 gives the number at any position directly. So a resumed request draws
    # as if it had never stopped, on any server.
    counter = (
        _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    )
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ServedLink(Generic[AnyRun]):
    """Server end of one link.

    Life: open -> closed by the client or with its process, which aborts open requests.
    Waits: the reader sleeps until a frame comes; sending never blocks.
    Invariant: frames leave whole, in sampling order.
    """

    def __init__(
        self,
        engine: ServedEngine[AnyRun],
        link: web.WebSocketResponse,
        transport: asyncio.Transport,
    ) -> None:
        self._engine = engine
        self._link = link
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, AnyRun] = {}
        self._sending = threading.Lock()
        # A duplicate stays valid until serve() ends. If the transport closed the only
        # one, the engine's thread could write into a new connection with the same
        # number.
        self._socket: socket.socket = transport.get_extra_info("socket").dup()
        self._unsent: list[bytes] = []
        self._is_behind = False

    def on_sampled(self, rows: Sequence[Sampled]) -> None:
        known = [row for row in rows if row.number in self._runs]
        for row in known:
            if row.then not in ("more", "interrupted"):
                self._runs.pop(row.number, None)  # serve() may have emptied it already
        for first in range(0, len(known), FRAME_ROWS):
            self._send(codec.sampled_frame(known[first : first + FRAME_ROWS]))

    def on_refused(self, number: int, refusal: Refused) -> None:
        if self._runs.pop(number, None) is not None:
            self._send(codec.refused_frame(number, refusal.status, refusal.body))

    async def serve(self) -> None:
        try:
            async for message in self._link:
                self._take(codec.read_frame(message.data))
        finally:
            self._engine.abort(list(self._runs.values()))
            # The engine still reports the aborted runs. on_sampled() drops tokens of runs
            # that it does not know.
            self._runs.clear()
            with self._sending:
                self._socket.close()

    def _send(self, frame: bytes) -> None:
        message = _message(frame)
        with self._sending, suppress(RuntimeError):  # the loop is closed
            # Usually the engine's thread writes to the socket itself: waking the event
            # loop for each decode step cost both threads more than the frame. Once the
            # kernel's buffer is full, the transport sends the rest, and this thread
            # must not overtake it.
            if not self._is_behind:
                num_sent = 0
                # The buffer is full, or the connection is gone, which the transport
                # finds out.
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
            # If the transport has sent everything, frames may go directly again.
            # Otherwise the next frame comes here too, and looks again.
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

    def _submit(self, asked: Sequence[Asked]) -> None:
        runs = list[AnyRun]()
        for one in asked:
            try:
                run = self._engine.run(one, self)
            except Refused as refusal:
                self._send(
                    codec.refused_frame(one.number, refusal.status, refusal.body)
                )
            else:
                # Before submit: the first tokens may come from the engine's thread at
                # once.
                self._runs[one.number] = run
                runs.append(run)
        self._engine.submit(runs)


def _message(data: bytes) -> bytes:
    """Return an unmasked, unfragmented binary WebSocket message (RFC 6455, section
    5.2).
    """
    size, kind = len(data), 0x80 | WSMsgType.BINARY
    if size < 126:
        return struct.pack("!BB", kind, size) + data
    if size < 2**16:
        return struct.pack("!BBH", kind, 126, size) + data
    return struct.pack("!BBQ", kind, 127, size) + data


def engine_routes(
    engine: ServedEngine[AnyRun], secret: str, *more: Act
) -> web.Application:
    """`more`: additional POST routes."""
    app = make_app(secret)

    async def link(request: web.Request) -> web.WebSocketResponse:
        # a pong could split a frame, so pings are errors
        # aiohttp's limit is 4 MB, and one frame may hold 256 prompts.
        opened = web.WebSocketResponse(max_msg_size=0, compress=False, autoping=False)
        await opened.prepare(request)
        if request.transport is not None:  # the client is still here
            await ServedLink(engine, opened, request.transport).serve()
        return opened

    async def health() -> api.EngineHealth:
        return engine.health()

    async def prepare(body: api.PrepareRequest) -> api.Loaded:
        weights = engine.weights_of(body.adapter)
        return await asyncio.to_thread(weights.prepare, body)

    async def load_chunk(body: api.LoadChunkRequest) -> api.Loaded:
        weights = engine.weights_of(body.adapter)
        return await asyncio.to_thread(weights.load_chunk, body)

    async def commit(body: api.CommitRequest) -> api.CommitResponse:
        return await asyncio.wrap_future(engine.commit(body))

    async def sleep() -> api.TransferStats:
        return await asyncio.wrap_future(engine.sleep())

    async def wake(body: api.WakeRequest) -> api.TransferStats:
        return await asyncio.wrap_future(engine.wake(body))

    app.router.add_get("/link", link)
    add_route(app, "GET", "/health", health)
    acts: tuple[Act, ...] = (prepare, load_chunk, commit, sleep, wake, *more)
    for act in acts:
        add_route(app, "POST", f"/{act.__name__}", act)
    return app


def serve_engine(engine: ServedEngine[AnyRun], fd: int, *more: Act) -> None:
    serve(engine_routes(engine, secret_of(SECRET_ENV), *more), fd)
