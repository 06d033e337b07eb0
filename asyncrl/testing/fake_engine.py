"""A fake engine server, for the virtual clock: deterministic tokens, slots, versions and memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from pydantic import BaseModel

from asyncrl.http import Answer, Part
from asyncrl.messages import calls
from asyncrl.messages.base import EnginePart, Moved
from asyncrl.testing.fake_server import FakeServer

END_TOKEN = 0
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Sampled tokens are the letters a..z, one id a character, and END_TOKEN."""

Reason = Literal["abort", "stop", "length"]


def fake_token(weights: str, seed: int, ids: Sequence[int], end_fraction: float) -> tuple[int, float]:
    """(token, logprob) that comes after `ids`: a pure function, a fresh draw for each seed and position."""
    key = f"{weights}|{seed}|{len(ids)}|{','.join(map(str, ids[-8:]))}"
    draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    is_end = (draw >> 32) / 2**32 < end_fraction
    return (END_TOKEN if is_end else FIRST_TOKEN + draw % NUM_TOKENS), -1.0 - (draw % 1024) / 1024


class FakeRun:
    """One request at the fake server: what it has drawn, and how much of it the client has in chunks."""

    def __init__(self, request: calls.GenerateRequest) -> None:
        self.request = request
        self.is_granted = self.is_aborted = False
        self.changed = asyncio.Event()
        self.drawn: list[tuple[int, float, int]] = []
        """(token, logprob, version)."""
        self.num_sent = 0
        self.ended: Reason | None = None

    def abort(self) -> None:
        self.is_aborted = True
        self.changed.set()

    async def wait(self) -> None:
        """Sleep until the server wakes this request."""
        self.changed.clear()
        await self.changed.wait()

    def chunks(self) -> list[calls.GenerateChunk]:
        """What was not sent yet, a chunk a version; it counts as sent."""
        new, self.num_sent = self.drawn[self.num_sent :], len(self.drawn)
        found = []
        for version, drawn in groupby(new, key=itemgetter(2)):
            token_ids, logprobs, _ = map(list, zip(*drawn, strict=True))
            found.append(calls.GenerateChunk(token_ids=token_ids, logprobs=logprobs, version=version))
        return found

    def answer(self) -> dict[str, Any]:
        """The fields of its GenerateResponse, with what was not sent yet."""
        token_ids, logprobs, spans = list[int](), list[float](), list[calls.Span]()
        for chunk in self.chunks():
            start, end = len(token_ids), len(token_ids) + len(chunk.token_ids)
            spans.append(calls.Span(start=start, end=end, version=chunk.version))
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
        fields = {"token_ids": token_ids, "logprobs": logprobs, "version_spans": spans}
        return {**fields, "request_id": self.request.request_id, "finish_reason": self.ended}


class FakeParts:
    """The parts of a fake engine's memory, asleep or awake, 1000 bytes each.

    Life: awake -> sleep() -> asleep -> wake() -> awake, weights without content until restored, or until
        take_push() has found a whole push.
    """

    def __init__(self, server: FakeServer) -> None:
        self._refused = server.refused
        self.asleep: set[EnginePart] = set()
        self.has_content, self.can_restore = True, True
        self.pushed: list[calls.LoadChunkRequest] = []
        """The chunks of the push in hand."""

    @property
    def can_serve(self) -> bool:
        """Both parts are awake, and the weights are some version's."""
        return self.has_content and not self.asleep

    def sleep(self, request: calls.SleepRequest) -> Moved:
        freed = set(request.parts) - self.asleep
        self.asleep |= freed
        if "weights" in freed:
            self.has_content, self.pushed = False, []
        return Moved(num_bytes=len(freed) * 1000, seconds=0.0)

    def wake(self, request: calls.WakeRequest) -> Moved:
        if "weights" in request.parts and request.restore and not self.has_content:
            if not self.can_restore:
                raise self._refused("/wake", "what served came in chunks, and lies in no file")
            self.has_content = True
        taken = set(request.parts) & self.asleep
        self.asleep -= taken
        return Moved(num_bytes=len(taken) * 1000, seconds=0.0)

    def load(self, request: calls.LoadChunkRequest) -> None:
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
        self.has_content, self.can_restore = True, len(pushed) == 1

    def check_weights_awake(self, path: str) -> None:
        if "weights" in self.asleep:
            raise self._refused(path, "the weights are asleep")


class FakeEngineServer(FakeServer):
    """An engine server with slots, latency and versions, reached as if over HTTP.

    Life: a request queues -> holds one of `slots` -> draws a token every `decode_s` -> END_TOKEN, max_tokens
        or abort. A commit closes the gate, ends or keeps what runs, swaps for `swap_s`, opens the gate. It
        may sleep part by part; what comes meanwhile queues until it can serve again.
    Knobs: `refuse` (a reason answers 400), `corrupt_digest`, `mangle` (changes an answer), `chunk_tokens`
        (tokens of a streamed chunk), `parts` (its memory).
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
        self.refuse: Callable[[calls.GenerateRequest], str] = lambda _: ""
        self.mangle: Callable[[calls.GenerateResponse], calls.GenerateResponse] = lambda answer: answer
        self.chunk_tokens, self.corrupt_digest = 1, False
        self.requests: list[calls.GenerateRequest] = []
        """Every /generate so far."""
        self.tokens_generated = 0
        self._start()

    def _start(self) -> None:
        self.policy_version, self.weights = 0, self._first_weights
        self.parts = FakeParts(self)
        self._runs: dict[str, FakeRun] = {}
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

    def health(self) -> calls.EngineHealth:
        return calls.EngineHealth(
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
            case "/generate":
                async with contextlib.aclosing(self._steps(body)) as steps:
                    runs = [run async for run in steps]
                return self._answer_of(runs[-1])
            case "/abort":
                return self._abort(body.request_ids)
            case "/prepare":
                self.parts.check_weights_awake(path)
                await asyncio.sleep(self.prepare_s)
                self._staged = (body.version, self._digest(body))
                return calls.PrepareResponse(version=body.version, digest=self._digest(body))
            case "/commit":
                return await self._commit(body)
            case "/sleep":  # what runs is aborted, what is queued stays
                self._abort([name for name, run in self._runs.items() if run.is_granted])
                return self.parts.sleep(body)
            case "/wake":
                moved = self.parts.wake(body)
                self._grant()
                return moved
        assert path == "/load_chunk", path
        await asyncio.sleep(self.prepare_s)
        self.parts.load(body)
        return calls.LoadChunkResponse(version=body.version, index=body.index, digest=self._digest(body))

    def _digest(self, body: calls.PrepareRequest | calls.LoadChunkRequest) -> str:
        return "corrupt" if self.corrupt_digest else body.digest

    def _answer_of(self, run: FakeRun) -> calls.GenerateResponse:
        return self.mangle(calls.GenerateResponse.model_validate(run.answer()))

    async def stream(
        self, path: str, body: BaseModel, part: type[Part], last: type[Answer]
    ) -> AsyncGenerator[Part | Answer, None]:
        """POST /generate with `stream`."""
        assert isinstance(body, calls.GenerateRequest)
        async with contextlib.aclosing(self._steps(body)) as steps:
            while (run := await self.unless_dead(path, steps.__anext__)).ended is None:
                if len(run.drawn) - run.num_sent >= self.chunk_tokens:
                    for chunk in run.chunks():
                        yield part.model_validate(chunk.model_dump())
            yield last.model_validate(self._answer_of(run).model_dump())

    async def _steps(self, request: calls.GenerateRequest) -> AsyncGenerator[FakeRun, None]:
        """The run after each token, and at its end."""
        self.requests.append(request)
        name, needed = request.request_id, len(request.prompt_ids) + request.max_tokens
        reason = self.refuse(request)
        if needed > self.max_length:
            reason = f"{needed} tokens do not fit max_length={self.max_length}"
        if name in self._runs:
            reason = f"request_id {name} is running already"
        if reason:
            raise self.refused("/generate", reason, 400)
        runs, queue = self._runs, self._queue  # of this process
        run = runs[name] = FakeRun(request)
        queue.append(run)
        self._grant()
        try:
            while run.ended is None:
                run.ended = await self._step(run)
                yield run
        finally:  # cancelled too: a broken connection frees the slot
            del runs[name]
            if run in queue:
                queue.remove(run)
            self._ended.set()
            self._grant()

    async def _step(self, run: FakeRun) -> Reason | None:
        """Draw a token; returns the reason if this is the end."""
        request = run.request
        while True:
            while not (run.is_aborted or (run.is_granted and self._is_open)):
                await run.wait()
            try:
                async with asyncio.timeout(self.decode_s):
                    while not run.is_aborted:
                        await run.wait()
                return "abort"
            except TimeoutError:
                if self._is_open:
                    break
        ids = [*request.prompt_ids, *(token for token, _, _ in run.drawn)]
        token, logprob = fake_token(self.weights, request.seed, ids, self.end_fraction)
        run.drawn.append((token, logprob, self.policy_version))
        self.tokens_generated += 1
        if token == END_TOKEN:
            return "stop"
        return "length" if len(run.drawn) == request.max_tokens else None

    def _abort(self, request_ids: Sequence[str] | None) -> calls.AbortResponse:
        wanted = list(self._runs) if request_ids is None else request_ids
        aborted = [name for name in wanted if name in self._runs]
        for name in aborted:
            self._runs[name].abort()
        return calls.AbortResponse(aborted=aborted)

    async def _commit(self, request: calls.CommitRequest) -> calls.CommitResponse:
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
        return calls.CommitResponse(
            version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted
        )

    async def _swap(self, request: calls.CommitRequest) -> int:
        """Returns how many requests it interrupted."""
        process = self.has_ended
        if request.interrupt == "wait":
            self._is_granting = False
            while self.num_running:
                self._ended.clear()
                await self._ended.wait()
        running = [run for run in self._runs.values() if run.is_granted]
        self._is_open = self._is_granting = False
        if request.interrupt == "abort":
            for run in running:
                run.abort()
        try:
            await asyncio.sleep(self.swap_s)
            self.policy_version, self.weights = request.version, request.digest
            self.parts.has_content = self.parts.can_restore = True
        finally:
            if process is self.has_ended:
                self._is_open = self._is_granting = True
            for run in running:
                run.changed.set()
            self._grant()
        return len(running)

    def _grant(self) -> None:
        while self._is_granting and self.parts.can_serve and self._queue and self.num_running < self.slots:
            run = self._queue.popleft()
            run.is_granted = True
            run.changed.set()
