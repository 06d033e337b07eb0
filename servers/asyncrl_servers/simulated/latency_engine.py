"""A latency model behind the endpoints of an engine server. Knows asyncio's clock and numbers; knows no
model, no torch, no HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from asyncrl.messages.base import Moved
from asyncrl.messages.engine_calls import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
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
from asyncrl_servers.checks import (
    check_request,
    commit_waits_already,
    here_already,
    not_newer,
    not_staged,
    spans_of,
    too_many_queued,
    uniform_draws,
)
from asyncrl_servers.simulated.simulated_state import SimulatedSleep, SimulatedSpec, verify_weights
from asyncrl_servers.sleeping import Source
from asyncrl_servers.streaming import TokenStream

# One request at the simulated engine: its place on the step clock, and the tokens that it draws. Knows no
# clock but steps.


class Running:
    """A request, admitted at `start` and done at `start + length` of the step clock."""

    __slots__ = ("answer", "end", "is_stop", "length", "num_told", "request", "start", "stream")

    def __init__(
        self, request: GenerateRequest, answer: asyncio.Future[GenerateResponse], stream: TokenStream | None
    ) -> None:
        self.request, self.answer, self.stream, self.num_told = request, answer, stream, 0
        self.start, self.end, self.length = 0.0, 0.0, 0
        self.is_stop = False

    def __lt__(self, other: Running) -> bool:
        return self.end < other.end

    def untold(
        self, end: int, vocab_size: int, changes: Sequence[tuple[float, int]]
    ) -> tuple[list[int], list[float], list[Span]]:
        """Tokens from the first that was not told up to number `end`, their logprobs and spans; they count as
        told.

        `changes`: (place on the step clock, policy_version from there on), in order.
        """
        start, num_tokens = self.num_told, end - self.num_told
        if num_tokens == 0:
            return [], [], []
        self.num_told = end
        first_position = len(self.request.prompt_ids) + start
        draws = uniform_draws(
            np.full(num_tokens, self.request.seed, np.uint64),
            np.arange(first_position, first_position + num_tokens),
        )
        # Token k is sampled when the clock reaches start + k + 1; it belongs to the last version in force
        # before that.
        first = max(0, bisect_left(changes, (self.start, -1)) - 1)
        marks = [
            (max(0, int(steps - self.start + 1e-9) - start), version) for steps, version in changes[first:]
        ]
        logprobs = [float(np.float32(-math.log(vocab_size)))] * num_tokens
        spans = spans_of([mark for mark in marks if mark[0] <= num_tokens], num_tokens)
        return (draws * vocab_size).astype(np.int64).tolist(), logprobs, spans


Answer = TypeVar("Answer")


class SimulatedEngine:
    """Holds any number of requests at the cost of a heap entry each, whatever the number of their tokens.

    All running requests get a token a step, so one clock of steps tells how far each is: it runs at
    1 / (decode_step_s + n * per_row_s) and stands still during prefill and swaps. A request ends when the
    clock reaches its start plus its length; version changes are places on the clock. Tokens are drawn at the
    end, or when a stream is told of them, once a step.

    Life:       a request is queued -> running -> answered, or queued -> answered (aborted).
    Waits:      one timer, for the next end (with a stream running, for the next step); every change of what
    runs sets it
                anew. A commit with interrupt=wait waits for the last running request, whose end or abort
                answers it.
    Invariant:  the clock never runs back, and answers never hold a token that the clock has not passed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec, self.version = spec, spec.start_version
        self._digest = ""
        self._staged: tuple[int, str] | None = None
        self._staged_path = ""
        self.resting = SimulatedSleep(spec)
        self._queued: OrderedDict[str, Running] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._streamed: dict[str, Running] = {}
        self._ends: list[Running] = []
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
            asleep=self.resting.state.asleep,
        )

    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> asyncio.Future[GenerateResponse]:
        """Queue a request. Stop strings never match: there is no text. Raises Refused (400, 409, 503)."""
        check_request(request, self.spec.max_length, self.spec.vocab_size)
        if request.request_id in self._running or request.request_id in self._queued:
            raise here_already(request.request_id)
        if len(self._queued) >= self.spec.max_queued:
            raise too_many_queued(self.spec.max_queued)
        entry = Running(request, asyncio.get_running_loop().create_future(), stream)
        self._queued[request.request_id] = entry
        self._update()
        return entry.answer

    def abort(self, request_ids: list[str] | None) -> asyncio.Future[list[str]]:
        """End these requests (None: all) with what they have; names those that were here."""
        self._update()  # what is over by now has ended by itself
        wanted = [*self._running, *self._queued] if request_ids is None else list(dict.fromkeys(request_ids))
        aborted = [request_id for request_id in wanted if self._end_early(request_id)]
        self._update()
        return _done(aborted)

    def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Read and verify the weights, then drop them. Raises Refused (400, 409)."""
        self.resting.state.check_weights_awake(f"policy_version {request.version} cannot be staged")
        self._staged = None
        digest = verify_weights(request)
        self._staged, self._staged_path = (request.version, digest), request.path
        return PrepareResponse(version=request.version, digest=digest)

    def commit(self, request: CommitRequest) -> asyncio.Future[CommitResponse]:
        """Serve under the new version after swap_s; the answer comes when decoding can go on. Raises Refused
        (409).
        """
        answer: asyncio.Future[CommitResponse] = asyncio.get_running_loop().create_future()
        if self._draining is not None:
            raise commit_waits_already(self._draining[0].version)
        self.resting.state.check_weights_awake(f"policy_version {request.version} cannot be committed")
        if not self.resting.state.has_content and self.resting.push.version == request.version:
            self.resting.commit(request, self.version, self._digest)
            self._serve(request)
            self._update()
        if self.resting.state.has_content and (request.version, request.digest) == (
            self.version,
            self._digest,
        ):
            answer.set_result(
                CommitResponse(version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=0)
            )
            return answer
        self._check_commit(request)
        self._update()
        self._draining = (request, answer)
        if request.interrupt != "wait":
            self._swap()
        self._update()
        return answer

    def sleep(self, request: SleepRequest) -> asyncio.Future[Moved]:
        """Abort what runs and put these parts to sleep; what is queued stays."""
        self._update()
        for request_id in list(self._running):
            self._end_early(request_id)
        if self._draining is not None:
            self._swap()
        num_bytes = self.resting.free(request.parts)
        if "weights" in request.parts:
            self._staged = None
        self._update()
        return _done(Moved(num_bytes=num_bytes, seconds=0.0))

    def wake(self, request: WakeRequest) -> asyncio.Future[Moved]:
        """Wake these parts. Raises Refused (409)."""
        num_bytes = self.resting.take(request.parts, self.version, restore=request.restore)
        self._update()
        return _done(Moved(num_bytes=num_bytes, seconds=0.0))

    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        """Read and verify a chunk, then drop it. Raises Refused (400, 409)."""
        return self.resting.load_chunk(request, self.version)

    def _serve(self, request: CommitRequest) -> None:
        self.version, self._digest, self._staged = request.version, request.digest, None
        self._changes.append((self._steps, self.version))

    def _check_commit(self, request: CommitRequest) -> None:
        is_again = (request.version, request.digest) == (
            self.version,
            self._digest,
        ) and not self.resting.state.has_content
        if request.version <= self.version and not is_again:
            raise not_newer(request.version, self.version)
        if self._staged != (request.version, request.digest):
            raise not_staged(request.version, request.digest, self._staged)

    def _swap(self) -> None:
        assert self._draining is not None
        request, answer = self._draining
        self._draining = None
        is_abort = request.interrupt == "abort" and self.resting.state.has_content
        num_interrupted = len(self._running) + (len(self._queued) if is_abort else 0)
        pause_s = self.spec.swap_s
        if is_abort:
            for request_id in [*self._running, *self._queued]:
                self._end_early(request_id)
        if request.interrupt == "keep":
            contexts = (
                len(entry.request.prompt_ids) + self._num_sampled(entry) for entry in self._running.values()
            )
            pause_s += self.spec.prefill_s_per_token * sum(contexts)
        self._serve(request)
        self.resting.settle(Source(self._staged_path, request.digest))
        self._stall(pause_s)
        response = CommitResponse(
            version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted
        )

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
        while (
            self._draining is None
            and self.resting.state.can_serve
            and self._queued
            and len(self._running) < self.spec.slots
        ):
            self._start(self._queued.popitem(last=False)[1])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in self._streamed.values():
            self._tell(entry)
        if self._ends:
            num_steps = self._ends[0].end - self._steps
            wait_s = (min(num_steps, 1.0) if self._streamed else num_steps) * self._step_s()
            at_s = max(self._updated_s, self._stalled_until_s) + wait_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._update)

    def _start(self, entry: Running) -> None:
        request = entry.request
        wanted = max(1, self._completion_length(request.seed) - request.num_resumed)
        entry.is_stop = wanted <= request.max_tokens
        entry.length = min(wanted, request.max_tokens)
        entry.start, entry.end = self._steps, self._steps + entry.length
        self._running[request.request_id] = entry
        if entry.stream is not None:
            self._streamed[request.request_id] = entry
        heapq.heappush(self._ends, entry)
        self._stall(self.spec.prefill_s_per_token * len(request.prompt_ids))

    def _completion_length(self, seed: int) -> int:
        """Tokens of the whole completion, its resumed part included: lognormal (Box and Muller 1958), from
        the seed alone.
        """
        first, second = uniform_draws(np.full(2, seed, dtype=np.uint64), np.array([-1, -2])).tolist()
        normal = math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * second)
        sigma = self.spec.sigma
        return max(1, round(self.spec.mean_tokens * math.exp(sigma * normal - sigma * sigma / 2)))

    def _num_sampled(self, entry: Running) -> int:
        return max(0, min(int(self._steps - entry.start + 1e-9), entry.length - 1))

    def _end_early(self, request_id: str) -> bool:
        if (entry := self._running.get(request_id)) is not None:
            self._finish(entry, self._num_sampled(entry), "abort")
            return True
        if (entry := self._queued.pop(request_id, None)) is not None:
            self._answer(entry, 0, "abort")
            return True
        return False

    def _finish(self, entry: Running, num_tokens: int, reason: str) -> None:
        del self._running[entry.request.request_id]
        self._streamed.pop(entry.request.request_id, None)
        self._tokens_generated += num_tokens
        self._answer(entry, num_tokens, reason)

    def _tell(self, entry: Running) -> None:
        """Tell a running entry's stream what is new."""
        assert entry.stream is not None
        token_ids, logprobs, spans = entry.untold(
            self._num_sampled(entry), self.spec.vocab_size, self._changes
        )
        for span in spans:
            entry.stream.put(
                (token_ids[span.start : span.end], logprobs[span.start : span.end], span.version)
            )

    def _answer(self, entry: Running, num_tokens: int, reason: str) -> None:
        token_ids, logprobs, spans = entry.untold(num_tokens, self.spec.vocab_size, self._changes)
        values = {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "version_spans": spans,
            "finish_reason": reason,
        }
        if not entry.answer.done():
            entry.answer.set_result(
                GenerateResponse.model_validate({"request_id": entry.request.request_id, **values})
            )


def _done(result: Answer) -> asyncio.Future[Answer]:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    answer.set_result(result)
    return answer
