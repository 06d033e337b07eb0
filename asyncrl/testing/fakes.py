"""A fake for every Protocol of types.py, with behaviour, for the virtual clock. Knows no room and runs no process.

FakeEngineServer stands at the far end of the HTTP calls: the real client code (asyncrl.engines) runs on top of it.
Its tokens depend on weights, seed, position and the ids before alone, like a deterministic engine's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel

from asyncrl.calling import Answer, Caller, CallLost, CallRefused
from asyncrl.errors import RewardFailure
from asyncrl.types import Batch, Completion, Group, GroupId, Prompt, SamplingRequest, StepReport, Ticket, VersionSpan, WeightManifest
from asyncrl.wire import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    PrepareRequest,
    PrepareResponse,
    Span,
)

END_TOKEN = 0
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Sampled tokens are the letters a..z, one id a character, and END_TOKEN."""


def fake_token(weights: str, seed: int, ids: Sequence[int], end_fraction: float) -> tuple[int, float]:
    """(token, logprob) that comes after `ids`: a pure function, a fresh draw for each seed and position."""
    key = f"{weights}|{seed}|{len(ids)}|{','.join(map(str, ids[-8:]))}"
    draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    is_end = (draw >> 32) / 2**32 < end_fraction
    return (END_TOKEN if is_end else FIRST_TOKEN + draw % NUM_TOKENS), -1.0 - (draw % 1024) / 1024


class _Run:
    """One request at the fake server."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.is_granted = self.is_aborted = False
        self.changed = asyncio.Event()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    async def wait(self) -> None:
        """Sleep until the server wakes this request."""
        self.changed.clear()
        await self.changed.wait()

    def add(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def answer(self, reason: str) -> GenerateResponse:
        spans: list[Span] = []
        for index, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = Span(start=spans[-1].start, end=index + 1, version=version)
            else:
                spans.append(Span(start=index, end=index + 1, version=version))
        values: dict[str, Any] = {"token_ids": self.token_ids, "logprobs": self.logprobs, "version_spans": spans}
        return GenerateResponse(request_id=self.request.request_id, finish_reason=reason, **values)  # type: ignore[arg-type]


class FakeEngineServer(Caller):
    """An engine server with slots, latency and versions, reached as if over HTTP.

    Life:       a request queues -> holds one of `slots` -> draws a token every `decode_s` -> END_TOKEN, max_tokens or
                abort. A commit closes the gate, ends or keeps what runs, swaps for `swap_s`, opens the gate.
    Knobs:      `refuse` (a reason answers 400), `corrupt_digest`, `mangle` (changes an answer), die().
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
        self.corrupt_digest = False
        self.requests: list[GenerateRequest] = []
        """Every /generate so far."""
        self.peak_running = 0
        self.tokens_generated = 0
        self._runs: dict[str, _Run] = {}
        self._queue: deque[_Run] = deque()
        self._staged: tuple[int, str] | None = None
        self._ended = asyncio.Event()
        self._is_open, self._is_granting, self._is_dead = True, True, False

    def __repr__(self) -> str:
        return f"<FakeEngineServer {self.name} {self.num_running}/{self.slots} running, v{self.policy_version}>"

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(run.is_granted for run in self._runs.values())

    def die(self) -> None:
        """Break every connection, those to come too."""
        self._is_dead = True
        for run in self._runs.values():
            run.changed.set()

    async def aclose(self) -> None:
        """Nothing is held."""

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET /health."""
        self._check_alive(path)
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
        )
        return answer.model_validate(values.model_dump())

    async def post(self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """POST /generate, /abort, /prepare or /commit; within `timeout_s`, as the real one."""
        self._check_alive(path)
        calls: Mapping[str, Callable[[Any], Any]] = {
            "/generate": self._generate,
            "/abort": self._abort,
            "/prepare": self._prepare,
            "/commit": self._commit,
        }
        try:
            async with asyncio.timeout(timeout_s):
                result: BaseModel = await calls[path](body)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        self._check_alive(path)
        return answer.model_validate(result.model_dump())

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        self.requests.append(request)
        needed = len(request.prompt_ids) + request.max_tokens
        reason = self.refuse(request)
        if needed > self.max_length:
            reason = f"{needed} tokens do not fit max_length={self.max_length}"
        if request.request_id in self._runs:
            reason = f"request_id {request.request_id} is running already"
        if reason:
            raise CallRefused(self.name, "/generate", 400, ErrorBody(error=reason))
        run = _Run(request)
        self._runs[request.request_id] = run
        self._queue.append(run)
        self._grant()
        try:
            return self.mangle(await self._decode(run))
        finally:  # cancelled too: a broken connection frees the slot
            del self._runs[request.request_id]
            if run in self._queue:
                self._queue.remove(run)
            self._ended.set()
            self._grant()

    async def _decode(self, run: _Run) -> GenerateResponse:
        request = run.request
        while True:
            while not (run.is_aborted or self._is_dead or (run.is_granted and self._is_open)):
                await run.wait()
            try:
                async with asyncio.timeout(self.decode_s):
                    while not (run.is_aborted or self._is_dead):
                        await run.wait()
                return run.answer("abort")
            except TimeoutError:
                if not self._is_open:
                    continue
            token, logprob = fake_token(self.weights, request.seed, [*request.prompt_ids, *run.token_ids], self.end_fraction)
            run.add(token, logprob, self.policy_version)
            self.tokens_generated += 1
            if token == END_TOKEN:
                return run.answer("stop")
            if len(run.token_ids) == request.max_tokens:
                return run.answer("length")

    async def _abort(self, request: AbortRequest) -> AbortResponse:
        wanted = list(self._runs) if request.request_ids is None else request.request_ids
        aborted = [name for name in wanted if name in self._runs]
        for name in aborted:
            self._runs[name].is_aborted = True
            self._runs[name].changed.set()
        return AbortResponse(aborted=aborted)

    async def _prepare(self, request: PrepareRequest) -> PrepareResponse:
        await asyncio.sleep(self.prepare_s)
        digest = "corrupt" if self.corrupt_digest else request.digest
        self._staged = (request.version, digest)
        return PrepareResponse(version=request.version, digest=digest)

    async def _commit(self, request: CommitRequest) -> CommitResponse:
        if self._staged != (request.version, request.digest):
            raise CallRefused(self.name, "/commit", 409, ErrorBody(error=f"staged is {self._staged}, not {request.version}"))
        if request.interrupt == "wait":
            self._is_granting = False
            while self.num_running:
                self._ended.clear()
                await self._ended.wait()
        running = [run for run in self._runs.values() if run.is_granted]
        self._is_open = self._is_granting = False
        if request.interrupt == "abort":
            await self._abort(AbortRequest(request_ids=[run.request.request_id for run in running]))
        try:
            await asyncio.sleep(self.swap_s)
            self.policy_version, self.weights = request.version, request.digest
        finally:
            self._is_open = self._is_granting = True
            for run in running:
                run.changed.set()
            self._grant()
        return CommitResponse(version=request.version, digest=request.digest, pause_s=self.swap_s, num_interrupted=len(running))

    def _grant(self) -> None:
        while self._is_granting and self._queue and self.num_running < self.slots:
            run = self._queue.popleft()
            run.is_granted = True
            run.changed.set()
        self.peak_running = max(self.peak_running, self.num_running)

    def _check_alive(self, path: str) -> None:
        if self._is_dead:
            raise CallLost(self.name, path, "ServerDisconnectedError: it died")


class FakeEngine:
    """A SamplingEngine with a latency for each request and no servers: `tokens` z, under `policy_version`.

    `latency_s(request)` seconds after it was sent, a request is answered; `tokens(request)` says with how many.
    """

    def __init__(
        self,
        *,
        latency_s: Callable[[SamplingRequest], float] = lambda _: 1.0,
        tokens: Callable[[SamplingRequest], int] = lambda _: 4,
    ) -> None:
        self._latency_s, self._tokens = latency_s, tokens
        self.policy_version = 0
        self.requests: list[SamplingRequest] = []
        self.cancelled: list[str] = []
        self.running = self.peak_running = 0

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sleep, then answer."""
        self.requests.append(request)
        version = self.policy_version
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            await asyncio.sleep(self._latency_s(request))
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running -= 1
        length = min(self._tokens(request), request.max_tokens)
        reason: Literal["stop", "length"] = "length" if length == request.max_tokens else "stop"
        return Completion((ord("z"),) * length, (-1.0,) * length, (VersionSpan(0, length, version),), reason)


class FakeTokenizer:
    """A ChatTokenizer with one token a character: its code point; the prompts' contents one after the other."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Code points of all contents."""
        return tuple(ord(character) for message in messages for character in message["content"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Characters, END_TOKEN left out."""
        return "".join(chr(token) for token in token_ids if token != END_TOKEN)


class FakeSource:
    """A PromptSource that never ends: prompts p0, p1, ..., after those that were handed back."""

    def __init__(self) -> None:
        self.handed_back: list[Prompt] = []
        self._front: deque[Prompt] = deque()
        self._numbers = count()

    def next_nowait(self) -> Prompt:
        """The front, or a new one."""
        if self._front:
            return self._front.popleft()
        name = f"p{next(self._numbers)}"
        return Prompt(name, ({"role": "user", "content": name},))

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """To the front."""
        self.handed_back.append(prompt)
        self._front.appendleft(prompt)


class FakeSink:
    """A GroupSink that gives `allow(n)` tickets and keeps what it is told."""

    def __init__(self, num_tickets: int = 0, *, start_version: int = 0) -> None:
        self.start_version = start_version
        self.admitted: list[Ticket] = []
        self.finished: list[Group] = []
        self.failed: dict[GroupId, str] = {}
        self._num_tickets = num_tickets
        self._changed = asyncio.Event()

    def allow(self, num_tickets: int) -> None:
        """Give leave for so many groups more."""
        self._num_tickets += num_tickets
        self._changed.set()

    async def wait_admit(self) -> Ticket:
        """The next ticket."""
        while not self._num_tickets:
            self._changed.clear()
            await self._changed.wait()
        self._num_tickets -= 1
        self.admitted.append(Ticket(GroupId(len(self.admitted)), self.start_version))
        return self.admitted[-1]

    def finish_nowait(self, group: Group) -> None:
        """Kept in `finished`."""
        self.finished.append(group)

    def fail_nowait(self, group_id: GroupId, reason: str) -> None:
        """Kept in `failed`."""
        self.failed[group_id] = reason


class FakeScorer:
    """A Scorer that answers `reward(prompt, completion)` after `latency_s`; a text instead of a number is a failure."""

    def __init__(self, reward: Callable[[Prompt, str], float | str] = lambda _, text: float(len(text)), *, latency_s: float = 0.0) -> None:
        self._reward, self.latency_s = reward, latency_s
        self.scored: list[tuple[str, str]] = []

    async def score(self, prompt: Prompt, completion: str) -> float:
        """The reward, or RewardFailure."""
        await asyncio.sleep(self.latency_s)
        self.scored.append((prompt.prompt_id, completion))
        reward = self._reward(prompt, completion)
        if isinstance(reward, str):
            raise RewardFailure(f"the reward of {prompt.prompt_id} failed: {reward}")
        return reward


class FakeTrainer:
    """A WeightSource, and the train() of a trainer's client: a step takes `train_s`, an export `export_s`.

    Like the worker it does one thing at a time: an export waits for the step that runs. The digest of a version
    is `w{version}`, or always `w0` if `is_frozen` (a publish of the same weights).
    """

    def __init__(self, *, train_s: float = 1.0, export_s: float = 0.0, num_bytes: int = 1000, is_frozen: bool = False) -> None:
        self.train_s, self.export_s, self.num_bytes, self.is_frozen = train_s, export_s, num_bytes, is_frozen
        self.policy_version = 0
        self.batches: list[Batch] = []
        self.exported: list[int] = []
        self._worker = asyncio.Lock()
        self._changed = asyncio.Event()

    async def train(self, batch: Batch) -> StepReport:
        """One optimizer step: the version goes up by one."""
        async with self._worker:
            await asyncio.sleep(self.train_s)
            self.batches.append(batch)
        self.step()
        return StepReport(self.policy_version, {"policy/loss": 0.0})

    def step(self) -> None:
        """The next version, at once."""
        self.policy_version += 1
        self._changed.set()

    async def wait_version_above(self, version: int) -> int:
        """The newest version, once it is above `version`."""
        while self.policy_version <= version:
            self._changed.clear()
            await self._changed.wait()
        return self.policy_version

    async def export(self) -> WeightManifest:
        """The newest weights in staging."""
        async with self._worker:
            await asyncio.sleep(self.export_s)
            self.exported.append(self.policy_version)
            digest = "w0" if self.is_frozen else f"w{self.policy_version}"
            return WeightManifest(self.policy_version, f"fake/{digest}", digest, 1, self.num_bytes)
