"""A fake engine server, for the virtual clock: it stands at the far end of the HTTP calls, under the real client code.

Its tokens depend on weights, seed, position and the ids before alone, like a deterministic engine's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from asyncrl.calling import Answer, Caller, CallLost, CallRefused
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
        return GenerateResponse(request_id=self.request.request_id, finish_reason=reason, **values)


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
