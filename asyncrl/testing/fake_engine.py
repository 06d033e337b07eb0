"""A fake engine server, for the virtual clock: it stands at the far end of the HTTP calls, under the real
client code.

Its tokens depend on weights, seed, position and the ids before alone, like a deterministic engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from asyncrl.http import Answer, Caller, CallLost, CallRefused, Part
from asyncrl.messages.base import EnginePart, ErrorBody, Moved
from asyncrl.messages.engine_calls import (
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
from asyncrl.waits import TimeLimit

__all__ = ["END_TOKEN", "FakeEngineServer"]


class FakeEngineServer(Caller):
    """An engine server with slots, latency and versions, reached as if over HTTP.

    Life:       a request queues -> holds one of `slots` -> draws a token every `decode_s` -> END_TOKEN,
    max_tokens or
                abort. A commit closes the gate, ends or keeps what runs, swaps for `swap_s`, opens the gate.
                It may sleep part by part; what comes meanwhile queues until it can serve again.
    Knobs:      `refuse` (a reason answers 400), `corrupt_digest`, `mangle` (changes an answer),
    `mangle_chunk`, `chunk_tokens`
                (a streamed chunk has so many), `parts` (its memory), die(), freeze(), restart().
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
        super().__init__(name, f"fake://{name}", "secret")
        self.slots, self.decode_s, self.prepare_s, self.swap_s = slots, decode_s, prepare_s, swap_s
        self.end_fraction, self.max_length, self.weights = end_fraction, max_length, weights
        self.policy_version = 0
        self.refuse: Callable[[GenerateRequest], str] = lambda _: ""
        self.mangle: Callable[[GenerateResponse], GenerateResponse] = lambda answer: answer
        self.mangle_chunk: Callable[[GenerateChunk], GenerateChunk] = lambda chunk: chunk
        self.chunk_tokens = 1
        self.corrupt_digest = False
        self.parts = FakeParts(name)
        self.requests: list[GenerateRequest] = []
        """Every /generate so far."""
        self.peak_running = 0
        self.tokens_generated = 0
        self._runs: dict[str, FakeRun] = {}
        self._queue: deque[FakeRun] = deque()
        self._staged: tuple[int, str] | None = None
        self._ended = asyncio.Event()
        self._is_open, self._is_granting, self.is_frozen = True, True, False
        self.has_ended = asyncio.Event()
        """Of the process: each one has its own."""
        self._first_weights = weights

    def __repr__(self) -> str:
        return (
            f"<FakeEngineServer {self.name} {self.num_running}/{self.slots} running, v{self.policy_version}>"
        )

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(run.is_granted for run in self._runs.values())

    def die(self) -> None:
        """Break every connection, those to come too."""
        self.has_ended.set()
        for run in self._runs.values():
            run.is_aborted = True
            run.changed.set()

    def freeze(self) -> None:
        """Answer nothing any more, and keep every connection; die() ends that."""
        self.is_frozen = True

    def restart(self) -> None:
        """Another process in its place, with the weights of the start."""
        self.die()
        self.has_ended, self.is_frozen = asyncio.Event(), False
        self.policy_version, self.weights, self._staged = 0, self._first_weights, None
        self._runs, self._queue, self.parts = {}, deque(), FakeParts(self.name)
        self._is_open, self._is_granting = True, True

    async def aclose(self) -> None:
        """Nothing is held."""

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET /health."""
        try:
            async with TimeLimit(timeout_s):
                await self._alive(self.has_ended, path)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        values = EngineHealth(
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
        return answer.model_validate(values.model_dump())

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        """POST of every route; within `timeout_s`, as the real one."""
        process = self.has_ended
        calls: Mapping[str, Callable[[Any], Any]] = {
            "/generate": self._generate,
            "/abort": self._abort,
            "/prepare": self._prepare,
            "/commit": self._commit,
            "/sleep": self._sleep,
            "/wake": self._wake,
            "/load_chunk": self._load_chunk,
        }
        try:
            async with TimeLimit(timeout_s):
                await self._alive(process, path)
                result: BaseModel = await calls[path](body)
                await self._alive(process, path)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        return answer.model_validate(result.model_dump())

    async def stream(
        self, path: str, body: BaseModel, part: type[Part], last: type[Answer]
    ) -> AsyncGenerator[Part | Answer, None]:
        """POST /generate with `stream`."""
        assert isinstance(body, GenerateRequest)
        process = self.has_ended
        await self._alive(process, path)
        async with contextlib.aclosing(self._steps(body)) as steps:
            async for run, answer in steps:
                await self._alive(process, path)
                if answer is not None:
                    yield last.model_validate(answer.model_dump())
                elif len(run.token_ids) - run.num_told >= self.chunk_tokens:
                    for chunk in run.chunks():
                        yield part.model_validate(self.mangle_chunk(chunk).model_dump())

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        async with contextlib.aclosing(self._steps(request)) as steps:
            async for _, answer in steps:
                if answer is not None:
                    return answer
        raise AssertionError("the last step has an answer")

    async def _steps(
        self, request: GenerateRequest
    ) -> AsyncGenerator[tuple[FakeRun, GenerateResponse | None], None]:
        """The run after each token, and with the last step its answer."""
        self.requests.append(request)
        needed = len(request.prompt_ids) + request.max_tokens
        reason = self.refuse(request)
        if needed > self.max_length:
            reason = f"{needed} tokens do not fit max_length={self.max_length}"
        runs, queue = self._runs, self._queue
        if request.request_id in runs:
            reason = f"request_id {request.request_id} is running already"
        if reason:
            raise CallRefused(self.name, "/generate", 400, ErrorBody(error=reason))
        run = FakeRun(request)
        runs[request.request_id] = run
        queue.append(run)
        self._grant()
        try:
            while (ended := await self._step(run)) is None:
                yield run, None
            yield run, self.mangle(run.answer(ended))
        finally:  # cancelled too: a broken connection frees the slot
            del runs[request.request_id]
            if run in queue:
                queue.remove(run)
            self._ended.set()
            self._grant()

    async def _step(self, run: FakeRun) -> str | None:
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
                if not self._is_open:
                    continue
            token, logprob = fake_token(
                self.weights, request.seed, [*request.prompt_ids, *run.token_ids], self.end_fraction
            )
            run.add(token, logprob, self.policy_version)
            self.tokens_generated += 1
            if token == END_TOKEN:
                return "stop"
            return "length" if len(run.token_ids) == request.max_tokens else None

    async def _abort(self, request: AbortRequest) -> AbortResponse:
        wanted = list(self._runs) if request.request_ids is None else request.request_ids
        aborted = [name for name in wanted if name in self._runs]
        for name in aborted:
            self._runs[name].is_aborted = True
            self._runs[name].changed.set()
        return AbortResponse(aborted=aborted)

    async def _sleep(self, request: SleepRequest) -> Moved:
        """Abort what runs, and free; what is queued stays."""
        await self._abort(
            AbortRequest(
                request_ids=[run.request.request_id for run in self._runs.values() if run.is_granted]
            )
        )
        return self.parts.sleep(request)

    async def _wake(self, request: WakeRequest) -> Moved:
        moved = self.parts.wake(request)
        self._grant()
        return moved

    async def _load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        await asyncio.sleep(self.prepare_s)
        self.parts.load(request)
        digest = "corrupt" if self.corrupt_digest else request.digest
        return LoadChunkResponse(version=request.version, index=request.index, digest=digest)

    async def _prepare(self, request: PrepareRequest) -> PrepareResponse:
        self.parts.check_weights_awake("/prepare")
        process = self.has_ended
        await asyncio.sleep(self.prepare_s)
        await self._alive(process, "/prepare")
        digest = "corrupt" if self.corrupt_digest else request.digest
        self._staged = (request.version, digest)
        return PrepareResponse(version=request.version, digest=digest)

    async def _commit(self, request: CommitRequest) -> CommitResponse:
        self.parts.check_weights_awake("/commit")
        if self.parts.pushed:
            self.parts.take_push(request.version)
            self.policy_version, self.weights = request.version, request.digest
            self._grant()
        if self.parts.has_content and (request.version, request.digest) == (
            self.policy_version,
            self.weights,
        ):
            return CommitResponse(
                version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=0
            )
        if self._staged != (request.version, request.digest):
            raise CallRefused(
                self.name, "/commit", 409, ErrorBody(error=f"staged is {self._staged}, not {request.version}")
            )
        if request.interrupt == "wait":
            self._is_granting = False
            while self.num_running:
                self._ended.clear()
                await self._ended.wait()
        running, process = [run for run in self._runs.values() if run.is_granted], self.has_ended
        self._is_open = self._is_granting = False
        if request.interrupt == "abort":
            await self._abort(AbortRequest(request_ids=[run.request.request_id for run in running]))
        try:
            await asyncio.sleep(self.swap_s)
            await self._alive(process, "/commit")
            self.policy_version, self.weights = request.version, request.digest
            self.parts.has_content = self.parts.can_restore = True
        finally:
            if process is self.has_ended:
                self._is_open = self._is_granting = True
            for run in running:
                run.changed.set()
            self._grant()
        return CommitResponse(
            version=request.version, digest=request.digest, pause_s=self.swap_s, num_interrupted=len(running)
        )

    def _grant(self) -> None:
        while self._is_granting and self.parts.can_serve and self._queue and self.num_running < self.slots:
            run = self._queue.popleft()
            run.is_granted = True
            run.changed.set()
        self.peak_running = max(self.peak_running, self.num_running)

    async def _alive(self, process: asyncio.Event, path: str) -> None:
        """Raise CallLost if that process has ended; a frozen one says nothing until then."""
        if self.is_frozen and process is self.has_ended:
            await process.wait()
        if process.is_set():
            raise CallLost(self.name, path, "ServerDisconnectedError: it died")


# One request at a fake engine server, and the tokens that it draws. Knows no server and no wait but its own.


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
    """One request at the fake server: what it has drawn, and how much of it the client was told in chunks."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.is_granted = self.is_aborted = False
        self.changed = asyncio.Event()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.num_told = 0

    async def wait(self) -> None:
        """Sleep until the server wakes this request."""
        self.changed.clear()
        await self.changed.wait()

    def add(self, token: int, logprob: float, version: int) -> None:
        """One more token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def chunks(self) -> list[GenerateChunk]:
        """What was not told yet, a chunk a version; it counts as told."""
        start, spans = self.num_told, self._spans()
        self.num_told = len(self.token_ids)
        return [
            GenerateChunk(
                token_ids=self.token_ids[start + span.start : start + span.end],
                logprobs=self.logprobs[start + span.start : start + span.end],
                version=span.version,
            )
            for span in spans
        ]

    def answer(self, reason: str) -> GenerateResponse:
        """What was not told yet, and how it ended."""
        told = self.num_told
        values: dict[str, Any] = {
            "token_ids": self.token_ids[told:],
            "logprobs": self.logprobs[told:],
            "version_spans": self._spans(),
        }
        return GenerateResponse(request_id=self.request.request_id, finish_reason=reason, **values)

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        for index, version in enumerate(self.versions[self.num_told :]):
            if spans and spans[-1].version == version:
                spans[-1] = Span(start=spans[-1].start, end=index + 1, version=version)
            else:
                spans.append(Span(start=index, end=index + 1, version=version))
        return spans


# Which parts of a fake engine server are awake, and the pushes that fill its weights. Knows no request that
# samples.


class FakeParts:
    """Parts of `part_bytes` each, asleep or awake.

    Life:       awake -> sleep() -> asleep -> wake() -> awake, weights without content until restored, or
    until take_push()
                has found a whole push.
    Knobs:      `fail_wake` (a reason answers 507: no memory).
    """

    def __init__(self, name: str, part_bytes: int = 1000) -> None:
        self.name, self.part_bytes = name, part_bytes
        self.asleep: set[EnginePart] = set()
        self.has_content, self.can_restore = True, True
        self.fail_wake = ""
        self.pushed: list[LoadChunkRequest] = []
        """The chunks of the push in hand."""

    @property
    def can_serve(self) -> bool:
        """Both parts are awake, and the weights are some version's."""
        return self.has_content and not self.asleep

    def sleep(self, request: SleepRequest) -> Moved:
        """Free the parts that are awake."""
        freed = set(request.parts) - self.asleep
        self.asleep |= freed
        if "weights" in freed:
            self.has_content, self.pushed = False, []
        return Moved(num_bytes=len(freed) * self.part_bytes, seconds=0.0)

    def wake(self, request: WakeRequest) -> Moved:
        """Take the parts that are asleep."""
        if self.fail_wake:
            raise self._refused("/wake", 507, self.fail_wake)
        if "weights" in request.parts and request.restore and not self.has_content:
            if not self.can_restore:
                raise self._refused("/wake", 409, "what served came in chunks, and is nowhere whole")
            self.has_content = True
        taken = set(request.parts) & self.asleep
        self.asleep -= taken
        return Moved(num_bytes=len(taken) * self.part_bytes, seconds=0.0)

    def load(self, request: LoadChunkRequest) -> None:
        """One more chunk of the push."""
        self.check_weights_awake("/load_chunk")
        if self.has_content:
            raise self._refused("/load_chunk", 409, "the weights are being served")
        if request.index == 0:
            self.pushed = []
        is_next = request.index == len(self.pushed) and all(
            chunk.version == request.version for chunk in self.pushed
        )
        if not is_next:
            raise self._refused("/load_chunk", 409, f"chunk {request.index} does not come next")
        self.pushed.append(request)

    def take_push(self, version: int) -> None:
        """Serve the push in hand, if it is this version and whole."""
        pushed, self.pushed = self.pushed, []
        if not pushed or pushed[0].version != version or not pushed[-1].is_last:
            raise self._refused("/commit", 409, f"no whole push of {version} is here")
        self.has_content, self.can_restore = True, len(pushed) == 1

    def check_weights_awake(self, path: str) -> None:
        """Raise CallRefused while there is no memory for weights."""
        if "weights" in self.asleep:
            raise self._refused(path, 409, "the weights are asleep")

    def _refused(self, path: str, status: int, why: str) -> CallRefused:
        return CallRefused(self.name, path, status, ErrorBody(error=why))
