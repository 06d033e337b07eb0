"""A fake engine server, for the virtual clock: deterministic tokens, slots, versions and memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_server import FakeServer
from pydantic import BaseModel

from asyncrl.base.http import CallLost
from asyncrl.base.message import ErrorBody
from asyncrl.messages import codec, engine_api
from asyncrl.messages.engine_api import EnginePart, TransferStats

END_TOKEN = 0
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Sampled tokens are the letters a..z, one id a character, and END_TOKEN."""


def fake_token(weights: str, seed: int, ids: Sequence[int], end_fraction: float) -> tuple[int, float]:
    """(token, logprob) that comes after `ids`: a pure function, a fresh draw for each seed and position."""
    key = f"{weights}|{seed}|{len(ids)}|{','.join(map(str, ids[-8:]))}"
    draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    is_end = (draw >> 32) / 2**32 < end_fraction
    return (END_TOKEN if is_end else FIRST_TOKEN + draw % NUM_TOKENS), -1.0 - (draw % 1024) / 1024


class FakeRun:
    """One request at the fake server: what it has drawn, and how much of it the client has.

    Life: queued -> granted a slot -> over; interrupted it holds the slot until it is resumed, or leaves.
    """

    def __init__(self, asked: codec.Asked, link: FakeLink) -> None:
        self.number, self.request, self.is_streamed = asked
        self.link = link
        self.is_granted = self.is_held = False
        self.then = ""
        """Its end, once it has one."""
        self.drawn: list[tuple[int, float, int]] = []
        """(token, logprob, version)."""
        self.num_sent = 0
        self.next_draw: asyncio.TimerHandle | None = None

    def row(self, then: str) -> codec.Sampled:
        """What was not sent yet; it counts as sent."""
        new, self.num_sent = self.drawn[self.num_sent :], len(self.drawn)
        versions = [version for _, _, version in new]
        firsts = [at for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
        spans = codec.spans_of([(at, versions[at]) for at in firsts], 0, len(new))
        ids = np.array([token for token, _, _ in new], np.int32)
        logprobs = np.array([logprob for _, logprob, _ in new], np.float32)
        return codec.Sampled(self.number, ids, logprobs, spans, then)


class FakeLink:
    """The server's end of a link, as the socket that the client gets."""

    def __init__(self, server: FakeEngineServer) -> None:
        self._server, self._process = server, server.has_ended
        self._out: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, frame: bytes) -> None:
        if self._process.is_set():
            raise self._lost()
        if not self._server.is_frozen:
            self._server.take(self, codec.read_frame(frame))

    async def receive(self) -> bytes:
        received: bytes = await self._server.unless_dead("/link", self._out.get)
        return received

    async def close(self) -> None:
        if not self._process.is_set():
            self._server.leave(self)

    def tell(self, frame: bytes) -> None:
        self._out.put_nowait(frame)

    def _lost(self) -> CallLost:
        return CallLost(self._server.name, "/link", "ServerDisconnectedError: it died")


class FakeParts:
    """The parts of a fake engine's memory, asleep or awake, 1000 bytes each.

    Life: awake -> sleep() -> asleep -> wake() -> awake, weights without content until take_push() has found
        a whole push.
    """

    def __init__(self, server: FakeServer) -> None:
        self._refused = server.refused
        self.asleep: set[EnginePart] = set()
        self.has_content = True
        self.pushed: list[engine_api.LoadChunkRequest] = []
        """The chunks of the push in hand."""

    @property
    def can_serve(self) -> bool:
        """Both parts are awake, and the weights are some version's."""
        return self.has_content and not self.asleep

    def sleep(self, request: engine_api.SleepRequest) -> TransferStats:
        freed = set(request.parts) - self.asleep
        self.asleep |= freed
        if "weights" in freed:
            self.has_content, self.pushed = False, []
        return TransferStats(num_bytes=len(freed) * 1000, seconds=0.0)

    def wake(self, request: engine_api.WakeRequest) -> TransferStats:
        taken = set(request.parts) & self.asleep
        self.asleep -= taken
        return TransferStats(num_bytes=len(taken) * 1000, seconds=0.0)

    def load(self, request: engine_api.LoadChunkRequest) -> None:
        """One more chunk of the push."""
        self.check_weights_awake("/load_chunk")
        if self.has_content:
            raise self._refused("/load_chunk", "the weights are being served")
        if request.index == 0:
            self.pushed = []
        if request.index != len(self.pushed) or any(one.version != request.version for one in self.pushed):
            raise self._refused("/load_chunk", f"chunk {request.index} does not come next")
        self.pushed.append(request)

    def take_push(self, version: int) -> None:
        """Serve the push in hand, if it is this version and whole."""
        pushed, self.pushed = self.pushed, []
        if pushed[0].version != version or not pushed[-1].is_last:
            raise self._refused("/commit", f"no whole push of {version} is here")
        self.has_content = True

    def check_weights_awake(self, path: str) -> None:
        if "weights" in self.asleep:
            raise self._refused(path, "the weights are asleep")


class FakeEngineServer(FakeServer):
    """An engine server with slots, latency and versions, reached as if over a link and HTTP.

    Life: a request queues -> holds one of `slots` -> draws a token every `decode_s` -> END_TOKEN, max_tokens
        or abort. A commit closes the gate, interrupts or keeps what runs, swaps for `swap_s`, opens the gate.
        It may sleep part by part; what comes meanwhile queues until it can serve again.
    Knobs: `refuse` (a reason answers 400), `corrupt_digest`, `chunk_tokens` (tokens of a streamed chunk),
        `parts` (its memory).
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
        weights: str = "w0",
    ) -> None:
        super().__init__(name)
        self.slots, self.decode_s, self.prepare_s, self.swap_s = slots, decode_s, prepare_s, swap_s
        self.end_fraction, self.max_length, self._first_weights = end_fraction, max_length, weights
        self.refuse: Callable[[engine_api.GenerateRequest], str] = lambda _: ""
        self.chunk_tokens, self.corrupt_digest = 1, False
        self.requests: list[engine_api.GenerateRequest] = []
        """Every request so far."""
        self.tokens_generated = 0
        self._start()

    def _start(self) -> None:
        self.policy_version, self.weights = 0, self._first_weights
        self.parts = FakeParts(self)
        self._runs: dict[tuple[FakeLink, int], FakeRun] = {}
        self._queue: deque[FakeRun] = deque()
        self._staged: tuple[int, str] | None = None
        self._ended = asyncio.Event()
        self._is_open = self._is_granting = True

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(run.is_granted for run in self._runs.values())

    def restart(self) -> None:
        super().restart()
        self._start()

    def health(self) -> engine_api.EngineHealth:
        return engine_api.EngineHealth(
            name=self.name,
            kind="fake",
            policy_version=self.policy_version,
            slots=self.slots,
            max_length=self.max_length,
            num_running=self.num_running,
            num_queued=len(self._queue),
            tokens_generated=self.tokens_generated,
            device="none",
            decode_s=self.tokens_generated * self.decode_s,
            asleep=sorted(self.parts.asleep),
        )

    async def _handle(self, path: str, body: Any) -> BaseModel:
        match path:
            case "/prepare":
                self.parts.check_weights_awake(path)
                await asyncio.sleep(self.prepare_s)
                self._staged = (body.version, self._digest(body))
                return engine_api.PrepareResponse(version=body.version, digest=self._digest(body))
            case "/commit":
                return await self._commit(body)
            case "/sleep":  # what runs is interrupted, what is queued stays
                self._interrupt()
                return self.parts.sleep(body)
            case "/wake":
                moved = self.parts.wake(body)
                self._grant()
                return moved
        assert path == "/load_chunk", path
        await asyncio.sleep(self.prepare_s)
        self.parts.load(body)
        return engine_api.LoadChunkResponse(version=body.version, index=body.index, digest=self._digest(body))

    def _digest(self, body: engine_api.PrepareRequest | engine_api.LoadChunkRequest) -> str:
        return "corrupt" if self.corrupt_digest else body.digest

    async def connect(self, path: str) -> Any:
        """A link to it."""
        await self.unless_dead(path, _at_once)
        return FakeLink(self)

    def take(self, link: FakeLink, frame: codec.Frame) -> None:
        """What comes over a link."""
        if frame.kind == "submit":
            for asked in codec.read_submit(frame):
                self._submit(FakeRun(asked, link))
        else:
            assert frame.kind in ("resume", "abort"), frame.kind
            found = [self._runs[link, number] for number in frame.numbers if (link, number) in self._runs]
            for run in found:
                if frame.kind == "abort":
                    self._end(run, "abort")
                elif run.is_held:
                    run.is_held = run.is_granted = False
                    self._queue.append(run)
            if frame.kind == "resume":
                self._queue.rotate(sum(run in self._queue for run in found))
        self._grant()

    def leave(self, link: FakeLink) -> None:
        """The client of this link has left."""
        for run in [one for one in self._runs.values() if one.link is link]:
            self._end(run, "abort")
        self._grant()

    def _submit(self, run: FakeRun) -> None:
        request = run.request
        self.requests.append(request)
        needed = len(request.prompt_ids) + request.max_tokens
        reason = self.refuse(request)
        if needed > self.max_length:
            reason = f"{needed} tokens do not fit max_length={self.max_length}"
        if reason:
            run.link.tell(codec.refused_frame(run.number, 400, ErrorBody(error=reason)))
            return
        self._runs[run.link, run.number] = run
        self._queue.append(run)

    def _end(self, run: FakeRun, then: str) -> None:
        """Tell what it has and how it ends; interrupted, it holds its slot."""
        if run.next_draw is not None:
            run.next_draw.cancel()
        if then == "interrupted":
            run.is_held = True
        else:
            del self._runs[run.link, run.number]
            if run in self._queue:
                self._queue.remove(run)
        run.link.tell(codec.sampled_frame([run.row(then)]))
        self._ended.set()

    def _interrupt(self) -> int:
        """Returns how many these are."""
        running = [run for run in self._runs.values() if run.is_granted and not run.is_held]
        for run in running:
            self._end(run, "interrupted")
        return len(running)

    def _draw_later(self, run: FakeRun) -> None:
        run.next_draw = asyncio.get_running_loop().call_later(self.decode_s, self._draw, run)

    def _draw(self, run: FakeRun) -> None:
        """Draw a token, unless the gate is closed; then it is drawn a step after it opens."""
        if not self._is_open or self._runs.get((run.link, run.number)) is not run:
            return
        request = run.request
        ids = [*request.prompt_ids, *(token for token, _, _ in run.drawn)]
        token, logprob = fake_token(self.weights, request.seed, ids, self.end_fraction)
        run.drawn.append((token, logprob, self.policy_version))
        self.tokens_generated += 1
        if token == END_TOKEN or len(run.drawn) == request.max_tokens:
            self._end(run, "stop" if token == END_TOKEN else "length")
            self._grant()
            return
        if run.is_streamed and len(run.drawn) - run.num_sent >= self.chunk_tokens:
            run.link.tell(codec.sampled_frame([run.row("more")]))
        self._draw_later(run)

    async def _commit(self, request: engine_api.CommitRequest) -> engine_api.CommitResponse:
        self.parts.check_weights_awake("/commit")
        wanted, num_interrupted, pause_s = (request.version, request.digest), 0, 0.0
        if self.parts.pushed:
            self.parts.take_push(request.version)
            self.policy_version, self.weights = wanted
            self._grant()
        if not self.parts.has_content or wanted != (self.policy_version, self.weights):
            if self._staged != wanted:
                raise self.refused("/commit", f"staged is {self._staged}, not {request.version}")
            num_interrupted, pause_s = await self._swap(request), self.swap_s
        return engine_api.CommitResponse(
            version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted
        )

    async def _swap(self, request: engine_api.CommitRequest) -> int:
        """Returns how many requests it interrupted."""
        process = self.has_ended
        if request.interrupt == "wait":
            self._is_granting = False
            while self.num_running:
                self._ended.clear()
                await self._ended.wait()
        num_running = sum(run.is_granted and not run.is_held for run in self._runs.values())
        self._is_open = self._is_granting = False
        if request.interrupt == "abort":
            self._interrupt()
        try:
            await asyncio.sleep(self.swap_s)
            self.policy_version, self.weights = request.version, request.digest
            self.parts.has_content = "weights" not in self.parts.asleep
        finally:
            if process is self.has_ended:
                self._is_open = self._is_granting = True
                for run in self._runs.values():
                    if run.is_granted and not run.is_held:
                        if run.next_draw is not None:
                            run.next_draw.cancel()
                        self._draw_later(run)
                self._grant()
        return num_running

    def _grant(self) -> None:
        while self._is_granting and self.parts.can_serve and self._queue and self.num_running < self.slots:
            run = self._queue.popleft()
            run.is_granted = True
            self._draw_later(run)


async def _at_once() -> None:
    """Nothing to wait for."""
