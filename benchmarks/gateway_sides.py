"""The processes of benchmarks/gateway.py, and what the load needs to know of each: the engine by itself, our
gateway, LiteLLM's proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from gateway_litellm import MODEL
from gateway_load import Chat, Wire, request_bytes
from pydantic_core import from_json, to_json

from asyncrl.base.http import Caller
from asyncrl.launch.processes import ChildProcess, ProcessSpec, bind_socket
from asyncrl.messages.engine_api import EngineHealth

HERE = Path(__file__).parent
START_S = 120.0
PROXY_CORE, OTHER_CORE = 0, 1
"""Places in the list of cores that this process may use: the proxy has the one, everything else the other."""
TOKENS, STEP_S = 32, 0.001
"""Every answer has so many tokens, and takes TOKENS * STEP_S at the engine, however many are running."""


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    resident: int = psutil.Process(pid).memory_info().rss
    return resident


@contextlib.asynccontextmanager
async def engine(folder: Path, secret: str, core: int, vocab_size: int) -> AsyncIterator[ChildProcess]:
    """The backend of everybody."""
    spec = {
        "name": "engine-0",
        "slots": 4096,
        "max_length": 4096,
        "vocab_size": vocab_size,
        "decode_step_s": STEP_S,
        "per_row_s": 0.0,
        "mean_tokens": TOKENS,
        "sigma": 0.0,
        "core": core,
        "text": "lorem ipsum dolor sit amet " * 5,
    }
    env = {"PYTHONPATH": str(HERE)}
    child = ChildProcess(
        ProcessSpec("engine-0", "gateway_backend", json.dumps(spec), folder, secret, env=env)
    )
    await child.start()
    caller = Caller("engine-0", child.url, secret)
    try:
        await caller.get("/health", EngineHealth, timeout_s=START_S)
        yield child
    finally:
        await caller.aclose()
        await child.aclose()


class EngineAlone:
    """The engine without a proxy: the same load as ours, in the engine's own words."""

    host = "127.0.0.1"

    def __init__(self, engine: ChildProcess, secret: str) -> None:
        self.port, self.pid, self._secret, self._number = _port(engine.url), _pid(engine), secret, 0

    async def next_talk(self, _: Any | None, wire: Wire) -> _Requests:
        """Requests as long as a conversation's."""
        self._number += 1
        return _Requests(self._secret, self._number)

    async def finish(self) -> None:
        """Nothing is open."""


class _Requests:
    def __init__(self, secret: str, number: int) -> None:
        self._secret, self._number, self._turn = secret, number, 0

    def request(self) -> bytes:
        self._turn += 1
        prompt_ids = [1] * (60 + 90 * self._turn)  # as many as the chats have, about
        name = f"alone-{self._number}-{self._turn}"
        asked = {"request_id": name, "prompt_ids": prompt_ids, "max_tokens": 4 * TOKENS}
        return request_bytes("/generate", self._secret, to_json(asked))

    def take(self, answer: bytes) -> None:
        from_json(answer)


class Ours:
    """Our gateway: a session for each conversation, opened and ended over a route of the benchmark's own."""

    host = "127.0.0.1"

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port, self.num_ended = pid, port, 0
        self._wire, self._changed = Wire(self.host, port), asyncio.Event()
        self._keys: set[str] = set()
        self._number = 0

    async def next_talk(self, talk: Any | None, wire: Wire) -> Chat:
        """End its session, open another."""
        keys = await self._turn(wire, [] if talk is None else [talk.key], 1)
        self._number += 1
        return Chat(keys[0], "policy", self._number)

    async def open_and_end(self, num_sessions: int) -> None:
        """So many sessions that never make a call."""
        await self._turn(self._wire, await self._turn(self._wire, [], num_sessions), 0)

    async def wait_ended(self, num_sessions: int) -> None:
        """Return once so many have ended since the start."""
        while self.num_ended < num_sessions:
            self._changed.clear()
            await self._changed.wait()

    async def finish(self) -> None:
        """End all that is open."""
        await self._turn(self._wire, list(self._keys), 0)
        self._wire.close()

    async def stats(self) -> dict[str, Any]:
        """What the gateway has counted."""
        body, _ = await self._wire.post(request_bytes("/bench/stats", "none", b"{}"))
        stats: dict[str, Any] = from_json(body)
        return stats

    async def held(self) -> tuple[int, int]:
        """(resident bytes, Python objects), after a collection."""
        num_objects = (await self.stats())["objects"]
        return resident_bytes(self.pid), num_objects

    async def _turn(self, wire: Wire, ended: list[str], num_open: int) -> list[str]:
        body, _ = await wire.post(
            request_bytes("/bench/turn", "none", to_json({"end": ended, "open": num_open}))
        )
        keys: list[str] = from_json(body)
        self._keys.difference_update(ended)
        self._keys.update(keys)
        self.num_ended += len(ended)
        self._changed.set()
        return keys


class LiteLLM:
    """LiteLLM's proxy: no sessions."""

    host = "127.0.0.1"

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port, self._number = pid, port, 0

    async def next_talk(self, _: Any | None, wire: Wire) -> Chat:
        """The next conversation."""
        self._number += 1
        return Chat("none", MODEL, self._number)

    async def finish(self) -> None:
        """Nothing is open."""


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, secret: str, core: int, engine: ChildProcess, tokenizer: Path, profile: str
) -> AsyncIterator[Ours]:
    """Our gateway over the engine."""
    with bind_socket() as listener:
        port = listener.getsockname()[1]
    spec = {"core": core, "model": str(tokenizer), "engine": engine.url, "port": port, "profile": profile}
    env = {"PYTHONPATH": str(HERE)}
    child = ChildProcess(ProcessSpec("gateway", "gateway_ours", json.dumps(spec), folder, secret, env=env))
    await child.start()
    try:
        await wait_open(child, port)
        yield Ours(_pid(child), port)
    finally:
        died = None if child.returncode is None else child.death()
        await child.aclose()
        if died is not None:
            raise died


async def wait_open(child: ChildProcess, port: int) -> None:
    """Return once the port answers. Raises RoomError if the process has ended."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if child.returncode is not None or time.monotonic() > deadline_s:
                raise child.death() from None
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


def _port(url: str) -> int:
    return urlsplit(url).port or 0


def _pid(child: ChildProcess) -> int:
    assert child.pid is not None
    return child.pid
