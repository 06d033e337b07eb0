"""A latency model behind the endpoints of an engine server. Knows asyncio's clock and numbers; knows no model, no torch, no HTTP."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import OrderedDict

import numpy as np

from asyncrl.wire import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    PrepareRequest,
    PrepareResponse,
)
from asyncrl_servers.checks import check_request, commit_waits_already, here_already, not_newer, not_staged, spans_of, too_many_queued
from asyncrl_servers.draws import uniform_draws
from asyncrl_servers.simulated.spec import SimulatedSpec
from asyncrl_servers.simulated.staging import verify_weights


class _Running:
    """A request and its place on the step clock: admitted at `start`, done at `start + length`."""

    __slots__ = ("answer", "end", "is_stop", "length", "request", "start")

    def __init__(self, request: GenerateRequest, answer: asyncio.Future[GenerateResponse]) -> None:
        self.request, self.answer = request, answer
        self.start, self.end, self.length = 0.0, 0.0, 0
        self.is_stop = False

    def __lt__(self, other: _Running) -> bool:
        return self.end < other.end


class SimulatedEngine:
    """Holds any number of requests at the cost of a heap entry each, whatever the number of their tokens.

    All running requests get a token a step, so one clock of steps tells how far each is: it runs at
    1 / (decode_step_s + n * per_row_s) and stands still during prefill and swaps. A request ends when the clock
    reaches its start plus its length; version changes are places on the clock. Tokens are only drawn at the end.

    Life:       a request is queued -> running -> answered, or queued -> answered (aborted).
    Waits:      one timer, for the next end; every change of what runs sets it anew. A commit with interrupt=wait waits
                for the last running request, whose end or abort answers it.
    Invariant:  the clock never runs back, and answers never hold a token that the clock has not passed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec, self.version = spec, spec.start_version
        self._digest = ""
        self._staged: tuple[int, str] | None = None
        self._queued: OrderedDict[str, _Running] = OrderedDict()
        self._running: dict[str, _Running] = {}
        self._ends: list[_Running] = []
        self._steps, self._updated_s, self._stalled_until_s = 0.0, 0.0, 0.0
        self._changes: list[tuple[float, int]] = [(0.0, spec.start_version)]
        self._timer: asyncio.TimerHandle | None = None
        self._draining: tuple[CommitRequest, asyncio.Future[CommitResponse]] | None = None
        self._tokens_generated, self._busy_s = 0, 0.0

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        self._advance()
        return EngineHealth(
            name=self.spec.name,
            kind="simulated",
            policy_version=self.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running),
            num_queued=len(self._queued),
            tokens_generated=self._tokens_generated + sum(map(self._num_sampled, self._running.values())),
            device="none",
            decode_s=self._busy_s,
        )

    def submit(self, request: GenerateRequest) -> asyncio.Future[GenerateResponse]:
        """Queue a request. Stop strings never match: there is no text. Raises Refused (400, 409, 503)."""
        check_request(request, self.spec.max_length, self.spec.vocab_size)
        if request.request_id in self._running or request.request_id in self._queued:
            raise here_already(request.request_id)
        if len(self._queued) >= self.spec.max_queued:
            raise too_many_queued(self.spec.max_queued)
        entry = _Running(request, asyncio.get_running_loop().create_future())
        self._queued[request.request_id] = entry
        self._update()
        return entry.answer

    def abort(self, request_ids: list[str] | None) -> asyncio.Future[list[str]]:
        """End these requests (None: all) with what they have; names those that were here."""
        self._update()  # what is over by now has ended by itself
        wanted = [*self._running, *self._queued] if request_ids is None else list(dict.fromkeys(request_ids))
        aborted = [request_id for request_id in wanted if self._end_early(request_id)]
        self._update()
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        answer.set_result(aborted)
        return answer

    def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Read and verify the weights, then drop them. Raises Refused (400, 409)."""
        self._staged = None
        digest = verify_weights(request)
        self._staged = (request.version, digest)
        return PrepareResponse(version=request.version, digest=digest)

    def commit(self, request: CommitRequest) -> asyncio.Future[CommitResponse]:
        """Serve under the new version after swap_s; the answer comes when decoding can go on. Raises Refused (409)."""
        answer: asyncio.Future[CommitResponse] = asyncio.get_running_loop().create_future()
        if self._draining is not None:
            raise commit_waits_already(self._draining[0].version)
        if (request.version, request.digest) == (self.version, self._digest):
            answer.set_result(CommitResponse(version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=0))
            return answer
        self._check_commit(request)
        self._update()
        self._draining = (request, answer)
        if request.interrupt != "wait":
            self._swap()
        self._update()
        return answer

    def _check_commit(self, request: CommitRequest) -> None:
        if request.version <= self.version:
            raise not_newer(request.version, self.version)
        if self._staged != (request.version, request.digest):
            raise not_staged(request.version, request.digest, self._staged)

    def _swap(self) -> None:
        assert self._draining is not None
        request, answer = self._draining
        self._draining = None
        num_interrupted = len(self._running) + (len(self._queued) if request.interrupt == "abort" else 0)
        pause_s = self.spec.swap_s
        if request.interrupt == "abort":
            for request_id in [*self._running, *self._queued]:
                self._end_early(request_id)
        if request.interrupt == "keep":
            contexts = (len(entry.request.prompt_ids) + self._num_sampled(entry) for entry in self._running.values())
            pause_s += self.spec.prefill_s_per_token * sum(contexts)
        self.version, self._digest, self._staged = request.version, request.digest, None
        self._changes.append((self._steps, self.version))
        self._stall(pause_s)
        response = CommitResponse(version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted)

        def tell() -> None:
            if not answer.done():
                answer.set_result(response)

        asyncio.get_running_loop().call_later(pause_s, tell)

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._updated_s) + seconds
        self._busy_s += seconds

    def _step_s(self) -> float:
        return self.spec.decode_step_s + self.spec.per_row_s * len(self._running)

    def _advance(self) -> None:
        """Bring the step clock to this moment."""
        now_s = asyncio.get_running_loop().time()
        if self._running:
            decoded_s = max(0.0, now_s - max(self._updated_s, self._stalled_until_s))
            self._busy_s += decoded_s
            self._steps += decoded_s / self._step_s()
        self._updated_s = now_s

    def _update(self) -> None:
        """End what is over, admit what fits, and set the timer for the next end."""
        self._advance()
        while self._ends and (self._ends[0].end <= self._steps + 1e-9 or self._ends[0].answer.done()):
            entry = heapq.heappop(self._ends)
            if not entry.answer.done():
                self._finish(entry, entry.length, "stop" if entry.is_stop else "length")
        if self._draining is not None and not self._running:
            self._swap()
        while self._draining is None and self._queued and len(self._running) < self.spec.slots:
            self._start(self._queued.popitem(last=False)[1])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            wait_s = (self._ends[0].end - self._steps) * self._step_s()
            at_s = max(self._updated_s, self._stalled_until_s) + wait_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._update)

    def _start(self, entry: _Running) -> None:
        request = entry.request
        wanted = max(1, self._completion_length(request.seed) - request.num_resumed)
        entry.is_stop = wanted <= request.max_tokens
        entry.length = min(wanted, request.max_tokens)
        entry.start, entry.end = self._steps, self._steps + entry.length
        self._running[request.request_id] = entry
        heapq.heappush(self._ends, entry)
        self._stall(self.spec.prefill_s_per_token * len(request.prompt_ids))

    def _completion_length(self, seed: int) -> int:
        """Tokens of the whole completion, its resumed part included: lognormal (Box and Muller 1958), from the seed alone."""
        first, second = uniform_draws(np.full(2, seed, dtype=np.uint64), np.array([-1, -2])).tolist()
        normal = math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * second)
        sigma = self.spec.sigma
        return max(1, round(self.spec.mean_tokens * math.exp(sigma * normal - sigma * sigma / 2)))

    def _num_sampled(self, entry: _Running) -> int:
        return max(0, min(int(self._steps - entry.start + 1e-9), entry.length - 1))

    def _end_early(self, request_id: str) -> bool:
        if (entry := self._running.get(request_id)) is not None:
            self._finish(entry, self._num_sampled(entry), "abort")
            return True
        if (entry := self._queued.pop(request_id, None)) is not None:
            self._answer(entry, 0, "abort", [])
            return True
        return False

    def _finish(self, entry: _Running, num_tokens: int, reason: str) -> None:
        del self._running[entry.request.request_id]
        self._tokens_generated += num_tokens
        # Token k is sampled when the clock reaches start + k + 1; it belongs to the last version in force before that.
        first = max(0, bisect_left(self._changes, (entry.start, -1)) - 1)
        marks = [(max(0, int(steps - entry.start + 1e-9)), version) for steps, version in self._changes[first:]]
        self._answer(entry, num_tokens, reason, [mark for mark in marks if mark[0] <= num_tokens])

    def _answer(self, entry: _Running, num_tokens: int, reason: str, marks: list[tuple[int, int]]) -> None:
        request, vocab_size = entry.request, self.spec.vocab_size
        positions = np.arange(len(request.prompt_ids), len(request.prompt_ids) + num_tokens)
        draws = uniform_draws(np.full(num_tokens, request.seed, dtype=np.uint64), positions)
        answer = GenerateResponse.model_validate(
            {
                "request_id": request.request_id,
                "token_ids": (draws * vocab_size).astype(np.int64).tolist(),
                "logprobs": [float(np.float32(-math.log(vocab_size)))] * num_tokens,
                "version_spans": spans_of(marks, num_tokens),
                "finish_reason": reason,
            }
        )
        if not entry.answer.done():
            entry.answer.set_result(answer)
