"""The load of benchmarks/gateway.py: conversations that go on, over bare sockets. Knows HTTP and chats; knows
no proxy by name.

A client library would cost more than the gateway that it measures, so a connection here writes whole requests
and looks for the length of the answer. A call's time runs from the write of its request to the last byte of
its answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import from_json, to_json

TURNS = 4
"""Calls of a conversation; each sends all that came before."""
SYSTEM = (
    "You are a careful assistant. You answer in a few words, you use the notes that you are given, and "
    "you say so when you do not know."
)
_WORDS = "the cat sat on a warm roof while rain fell over green hills and seven boats went home slowly under grey light".split()  # noqa: E501


class CallFailed(Exception):  # noqa: N818  the benchmark ends
    """An answer that is no answer."""


class Wire:
    """One call at a time over one connection, which is opened anew when it was closed, or when a call was
    given up in its middle.

    Life: made -> post() as often as wanted, never two at once -> close().
    Waits: post sleeps until the answer is whole; the caller limits it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._connection: _Connection | None = None

    async def post(self, request: bytes) -> tuple[bytes, float]:
        """The body of the answer, and the seconds it took. Raises CallFailed for anything but 200."""
        connection = self._connection
        if connection is None or connection.transport.is_closing():
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
            self._connection = connection
        try:
            status, body, seconds = await connection.ask(request)
        except BaseException:
            self.close()
            raise
        if status != 200:
            raise CallFailed(f"status {status}: {body[:500].decode(errors='replace')}")
        return body, seconds

    def close(self) -> None:
        """Close the connection, with whatever is under way on it."""
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None


class _Connection(asyncio.Protocol):
    """Life: open -> ask() by ask() -> closed. An answer that nobody asked for closes it, too."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer: asyncio.Future[tuple[int, bytes, float]] | None = None
        self._read, self._started_s = bytearray(), 0.0

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes, float]]:
        """(status, body, seconds) of the answer, once it is whole."""
        self._answer = asyncio.get_running_loop().create_future()
        self._started_s = time.perf_counter()
        body_start = request.index(b"\r\n\r\n") + 4
        self.transport.write(request[:body_start])  # by itself, as httpx does it, and so openai's client
        self.transport.write(request[body_start:])
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._read += data
        head_end = self._read.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._read[:head_end]).lower()
        at = head.find(b"\r\ncontent-length:")
        if at < 0:
            self._fail(f"an answer without its length: {head[:300]!r}")
            return
        end = head_end + 4 + int(head[at + 17 :].partition(b"\r\n")[0])
        if len(self._read) < end:
            return
        if self._answer is None or self._answer.done() or len(self._read) > end:
            self._fail("more than was asked for")
            return
        self._answer.set_result(
            (int(head[9:12]), bytes(self._read[head_end + 4 :]), time.perf_counter() - self._started_s)
        )
        self._read.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._fail(f"the connection was closed before the answer: {exc}")

    def _fail(self, why: str) -> None:
        self.transport.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallFailed(why))


def request_bytes(path: str, key: str, body: bytes) -> bytes:
    """One POST, whole."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\nContent-Type: "
        f"application/json\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Talk(Protocol):
    """One conversation at a server."""

    def request(self) -> bytes:
        """The next call."""
        ...

    def take(self, answer: bytes) -> None:
        """Its answer."""
        ...


class Target(Protocol):
    """A server under load."""

    host: str
    port: int

    async def next_talk(self, talk: Any | None, wire: Wire) -> Talk:
        """A new conversation in the place of one that is over; it may ask for it over the same connection."""
        ...


class Chat:
    """A conversation of TURNS calls whose messages grow; the same texts for the same number."""

    def __init__(self, key: str, model: str, number: int) -> None:
        self.key, self._model = key, model
        self._draw = random.Random(number)
        self._messages = [{"role": "system", "content": SYSTEM}]

    def request(self) -> bytes:
        """The next call."""
        text = " ".join(self._draw.choices(_WORDS, k=32))
        self._messages.append(
            {"role": "user", "content": f"Note {len(self._messages)}: {text}. What do you make of it?"}
        )
        return request_bytes(
            "/v1/chat/completions", self.key, to_json({"model": self._model, "messages": self._messages})
        )

    def take(self, answer: bytes) -> None:
        """Keep the assistant's message, as a harness does."""
        message = from_json(answer)["choices"][0]["message"]
        self._messages.append({"role": "assistant", "content": message["content"]})


@dataclass
class Measured:
    """Calls that ended within the window. Latencies in seconds."""

    seconds: float
    cpu_s: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Calls a second by the clock on the wall."""
        return len(self.latencies) / self.seconds

    @property
    def core_rate(self) -> float:
        """Calls for each second of processor time."""
        return len(self.latencies) / self.cpu_s if self.cpu_s else float("nan")

    def percentile(self, percent: float) -> float:
        """Nearest rank."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Load:
    """`sessions` conversations at a target at once, each over its own connection, replaced when they are
    over.

    Life: run() once: warm-up -> window -> every session ends after the call that it is in, so that nothing is
        left open.
    """

    def __init__(self, target: Target, sessions: int, *, think_s: float = 0.0, turns: int = TURNS) -> None:
        """`think_s`: mean of the exponential time between an answer and the next call of its session (0: at
        once). `turns`: calls of a conversation.
        """
        self._target, self._sessions, self._think_s, self._turns = target, sessions, think_s, turns
        self._latencies: list[float] | None = None
        self._is_over = False

    async def run(
        self, warm_up: Awaitable[object], window: Awaitable[object], cpu_s: Callable[[], float]
    ) -> Measured:
        """Load until `warm_up` returns, then measure until `window` does; `cpu_s` tells the processor seconds
        of the target so far.
        """
        async with asyncio.TaskGroup() as group:
            for number in range(self._sessions):
                group.create_task(self._talk_on(Wire(self._target.host, self._target.port), number))
            await warm_up
            measured, before_s, started_s = Measured(0.0), cpu_s(), time.perf_counter()
            self._latencies = measured.latencies
            await window
            self._latencies = None
            measured.seconds, measured.cpu_s = time.perf_counter() - started_s, cpu_s() - before_s
            self._is_over = True
        return measured

    async def _talk_on(self, wire: Wire, number: int) -> None:
        draw = random.Random(number)
        talk = None
        num_turns = draw.randint(
            1, self._turns
        )  # of the first conversation, so that they do not all end at once
        await asyncio.sleep(draw.random() * self._think_s)
        try:
            while not self._is_over:
                talk = await self._target.next_talk(talk, wire)
                for _ in range(num_turns):
                    answer, seconds = await wire.post(talk.request())
                    if self._latencies is not None:
                        self._latencies.append(seconds)
                    talk.take(answer)
                    if self._is_over:
                        break
                    if self._think_s:
                        await asyncio.sleep(draw.expovariate(1 / self._think_s))
                num_turns = self._turns
        finally:
            wire.close()
