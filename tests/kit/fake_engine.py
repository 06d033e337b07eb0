"""The fake engine server: the simulated engine on the virtual clock, with scripted
faults.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from asyncrl_simulated.simulated_engine import (
    SimulatedEngine,
    SimulatedRun,
    SimulatedSpec,
    SimulatedWeights,
)
from fake_server import FakeServer
from pydantic import BaseModel

from asyncrl.base.http import CallLost, CallRefused, Refused
from asyncrl.messages import codec, engine_api
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import BEHAVIOUR, Tokens
from asyncrl_servers.engine_routes import ServedLink

END_TOKEN = 0
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Sampled tokens are the letters a..z, one id a character, and END_TOKEN."""


def fake_token(weights: str, seed: int, position: int) -> tuple[int, float]:
    """(token, logprob): a pure function, a fresh draw for each set of weights, seed and
    position.
    """
    digest = hashlib.blake2b(
        f"{weights}|{seed}|{position}".encode(), digest_size=8
    ).digest()
    draw = int.from_bytes(digest, "big")
    return FIRST_TOKEN + draw % NUM_TOKENS, -1.0 - (draw % 1024) / 1024


class FakeSpec(SimulatedSpec):
    end_fraction: float = 0.0

    def completion_length(self, seed: int) -> int:
        if not self.end_fraction:
            return 2**40
        return int(np.random.default_rng(seed).geometric(self.end_fraction))


class FakeWeights(SimulatedWeights):
    """`digests`: of each version that served."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self._digest = first
        self.digests = {0: first}

    def settle(self, version: int, digest: str) -> None:
        super().settle(version, digest)
        self.digests[version] = digest


class LetterEngine(SimulatedEngine):
    """Draws letters by its weights; `chunk_tokens`: tokens of a streamed chunk."""

    def __init__(self, server: FakeEngineServer) -> None:
        super().__init__(server.spec)
        self.weights: FakeWeights = FakeWeights(server.first_weights)
        self._server = server

    def run(self, asked: codec.Asked, listener: Any) -> SimulatedRun:
        self._server.requests.append(asked.request)
        if reason := self._server.refuse(asked.request):
            raise Refused(400, reason)
        return super().run(asked, listener)

    def stop(self) -> None:
        """The process has ended."""
        for timer in self._running.values():
            timer.cancel()
        for place in (self._running, self._streamed, self.queued):
            place.clear()

    def _report(self, run: SimulatedRun, end: int, then: str) -> None:
        start = run.num_told
        if then == "more" and end - start < self._server.chunk_tokens:
            return
        spans = codec.spans_between(run.marks, start, end)
        first = len(run.request.prompt_ids) + start
        drawn = [
            fake_token(self.weights.digests[span.version], run.request.seed, first + at)
            for span in spans
            for at in range(span.start, span.end)
        ]
        ids = np.array([token for token, _ in drawn], np.int32)
        if then == "stop":
            ids[-1] = END_TOKEN
        logprobs = np.array([logprob for _, logprob in drawn], np.float32)
        self._num_tokens += end - start
        run.num_told = end
        self.report(
            run,
            codec.Sampled(run.number, Tokens(ids, spans, {BEHAVIOUR: logprobs}), then),
        )


class FakeLink(ServedLink):
    """The server's end of a link, as the socket that the client gets."""

    def __init__(self, server: FakeEngineServer) -> None:
        self._server, self._process = server, server.has_ended
        self._engine = server.engine
        self._runs = {}
        self._out: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, data: bytes) -> None:
        if self._process.is_set():
            raise CallLost(
                self._server.name, "/link", "ServerDisconnectedError: it died"
            )
        if self._server.answers_links:
            self._server.frames.append(frame := codec.read_frame(data))
            if self._server.scripted:
                self._send(self._server.scripted)
            else:
                self._take(frame)

    async def receive(self) -> bytes:
        received: bytes = await self._server.unless_dead("/link", self._out.get)
        return received

    async def close(self) -> None:
        if not self._process.is_set():
            self._engine.abort(list(self._runs.values()))
        self._runs.clear()

    def _send(self, frame: bytes) -> None:
        self._out.put_nowait(frame)


class FakeEngineServer(FakeServer):
    """An engine server that is reached as if over a link and HTTP.

    Knobs: `refuse` (a reason answers 400), `corrupt_digest`, `chunk_tokens`,
        `prepare_s` and `swap_s` (seconds of these calls), `scripted` (a frame that
        answers every frame).
    """

    def __init__(
        self,
        name: str = "engine-0",
        *,
        slots: int = 4,
        decode_s: float = 0.01,
        prepare_s: float = 0.0,
        swap_s: float = 0.0,
        end_fraction: float = 0.0,
        max_length: int = 4096,
        kv_tokens: int | None = None,
        weights: str = "w0",
    ) -> None:
        super().__init__(name)
        self.slots = slots
        self.prepare_s = prepare_s
        self.swap_s = swap_s
        self.first_weights = weights
        sizes: dict[str, Any] = {
            "slots": slots,
            "max_length": max_length,
            "vocab_size": 2**31,
            "kv_tokens": kv_tokens,
        }
        self.spec = FakeSpec(
            name=name, **sizes, decode_step_s=decode_s, end_fraction=end_fraction
        )
        self.refuse: Callable[[SamplingRequest], str] = lambda _: ""
        self.chunk_tokens, self.corrupt_digest, self.scripted = 1, False, b""
        self.requests: list[SamplingRequest] = []
        """Every request so far."""
        self.frames: list[codec.Frame] = []
        """Every frame so far."""
        self.engine = LetterEngine(self)

    @property
    def answers_links(self) -> bool:
        return not self.is_frozen

    @property
    def policy_version(self) -> int:
        return self.engine.weights.version

    @property
    def weights(self) -> str:
        return self.engine.weights.digest

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self.health().num_running

    @property
    def tokens_generated(self) -> int:
        return self.health().tokens_generated

    def die(self) -> None:
        super().die()
        self.engine.stop()

    def restart(self) -> None:
        super().restart()
        self.engine = LetterEngine(self)

    def health(self) -> engine_api.EngineHealth:
        return self.engine.health()

    async def _handle(self, path: str, body: Any) -> BaseModel:
        engine = self.engine
        try:
            match path:
                case "/prepare" | "/load_chunk":
                    await asyncio.sleep(self.prepare_s)
                    act = (
                        engine.weights.prepare
                        if path == "/prepare"
                        else engine.weights.load_chunk
                    )
                    answer = act(body)
                    return (
                        answer.model_copy(update={"digest": "corrupt"})
                        if self.corrupt_digest
                        else answer
                    )
                case "/commit":
                    is_swap = (body.version, body.digest) != (
                        self.policy_version,
                        self.weights,
                    )
                    is_swap &= engine.weights.has_content
                    committed = await asyncio.wrap_future(engine.commit(body))
                    if not is_swap:
                        return committed
                    await asyncio.sleep(self.swap_s)
                    return committed.model_copy(update={"pause_s": self.swap_s})
                case "/sleep":
                    return await asyncio.wrap_future(engine.sleep())
            assert path == "/wake", path
            return await asyncio.wrap_future(engine.wake(body))
        except Refused as refused:
            raise CallRefused(
                self.name, path, refused.status, refused.body
            ) from refused

    async def connect(self, path: str) -> Any:
        """A link to it."""
        await self.unless_dead(path, lambda: asyncio.sleep(0))
        return FakeLink(self)
