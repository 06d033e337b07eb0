"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: one simulated engine server, a child of the run.
The endpoints of an engine with a latency model and no model, for load tests and benchmarks. Imports no torch.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from asyncrl.http import Refused, die_with_parent, serve
from asyncrl.messages.base import EnginePart, LatencyModel, Moved
from asyncrl.messages.calls import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    PrepareRequest,
    SleepRequest,
    WakeRequest,
)
from asyncrl.messages.digest import joint_digest, tensor_digest
from asyncrl.weights.tensor_files import read_or_refuse
from asyncrl_servers.engine_app import (
    EngineSpec,
    TokenStream,
    check_queue,
    check_request,
    engine_app,
    read_spec,
    spans_of,
    uniform_draws,
)
from asyncrl_servers.weight_state import Arrived, WeightState, check_arrived

Answer = TypeVar("Answer")
PART_BYTES = 2**20
"""What it says that each part of its memory takes, when they sleep and wake."""


class SimulatedSpec(LatencyModel, EngineSpec):
    """The spec file of this server."""

    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are drawn from 0..vocab_size-1, each as likely as the other."""

    def completion_length(self, seed: int) -> int:
        """Tokens until the end, lognormal with mean mean_tokens; from the seed alone."""
        first, second = uniform_draws(np.full(2, seed, dtype=np.uint64), np.array([-1, -2])).tolist()
        normal = math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * second)
        scale = math.exp(self.sigma * normal - self.sigma * self.sigma / 2)
        return max(1, round(self.mean_tokens * scale))


class SimulatedWeights(WeightState):
    """Reads and verifies weights, then drops them."""

    def read(self, request: PrepareRequest) -> dict[str, Any]:
        if request.kind != "weights":
            what = f"policy_version {request.version} is of adapters: there are no weights to merge them over"
            way_out = "set weight_sync.transport=shm, or rollout.engine=embedded."
            raise Refused(400, what, rule="this server takes whole weights alone", way_out=way_out)
        check_arrived(request.path, _arrived(request.path), request)
        return {}

    def load(self, request: LoadChunkRequest) -> Arrived:
        return _arrived(request.path)

    def restore(self) -> None:
        """What served serves again. Raises Refused (400, 409)."""
        if self.source:
            self.check_restored(joint_digest(_arrived(self.source)[0].values()), self.source)
        self.settle(self.version, self.digest, self.source)


class SimulatedRequest:
    """A request, admitted at `start` and done at `start + length` of the step clock."""

    def __init__(self, request: GenerateRequest, stream: TokenStream | None) -> None:
        self.request, self.stream, self.num_told = request, stream, 0
        self.answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        self.start, self.end, self.length, self.is_stop = 0.0, 0.0, 0, False

    def __lt__(self, other: SimulatedRequest) -> bool:
        return self.end < other.end

    def num_sampled(self, steps: float) -> int:
        """Tokens that the step clock has passed, without the one that ends it."""
        return max(0, min(int(steps - self.start + 1e-9), self.length - 1))


class SimulatedEngine:
    """Holds any number of requests at the cost of a heap entry each, whatever the number of their tokens.

    All running requests get a token a step, so one clock of steps tells how far each is: it runs at 1 /
    (decode_step_s + n * per_row_s) and stands still during prefill and swaps. A request ends when the clock
    reaches its start plus its length; version changes are places on the clock. Tokens are drawn at the end,
    or once a step if they are streamed.

    Life: a request is queued -> running -> answered, or queued -> answered (aborted).
    Waits: one timer, for the next end (with a stream running, for the next step); every change of what runs
        sets it anew. A commit with interrupt=wait waits for the last running request, whose end or abort
        answers it.
    Invariant: the clock never runs back, and answers never hold a token that the clock has not passed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec, self.weights = spec, SimulatedWeights()
        self._queued: OrderedDict[str, SimulatedRequest] = OrderedDict()
        self._running: dict[str, SimulatedRequest] = {}
        self._streamed: dict[str, SimulatedRequest] = {}
        self._ends: list[SimulatedRequest] = []
        self._steps, self._updated_s, self._stalled_until_s = 0.0, 0.0, 0.0
        self._changes: list[tuple[float, int]] = [(0.0, 0)]
        """(Place on the step clock, policy_version from there on), in order."""
        self._timer: asyncio.TimerHandle | None = None
        self._committed: asyncio.Future[CommitResponse]
        self._tokens_generated, self._busy_s = 0, 0.0

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        self._advance()
        num_sampled = sum(entry.num_sampled(self._steps) for entry in self._running.values())
        return EngineHealth(
            name=self.spec.name,
            kind="simulated",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running),
            num_queued=len(self._queued),
            tokens_generated=self._tokens_generated + num_sampled,
            device="none",
            decode_s=self._busy_s,
            asleep=self.weights.asleep,
        )

    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> asyncio.Future[GenerateResponse]:
        """Queue a request. Stop strings never match: there is no text. Raises Refused (400, 409, 503)."""
        check_request(request, self.spec.max_length, self.spec.vocab_size)
        check_queue(request.request_id, self._running, self._queued)
        entry = self._queued[request.request_id] = SimulatedRequest(request, stream)
        self._update()
        return entry.answer

    def abort(self, request_ids: list[str] | None) -> asyncio.Future[list[str]]:
        """End these requests (None: all) with what they have; names those that were here."""
        self._update()  # what is over by now has ended by itself
        wanted = [*self._running, *self._queued] if request_ids is None else dict.fromkeys(request_ids)
        aborted = [request_id for request_id in wanted if self._end_early(request_id)]
        self._update()
        return _done(aborted)

    def commit(self, request: CommitRequest) -> asyncio.Future[CommitResponse]:
        """Serve under the new version after swap_s; the answer comes when decoding can go on. Raises Refused
        (409).
        """
        self._update()
        answer = self.weights.begin_commit(request)
        if answer is not None:
            if self._changes[-1][1] != request.version:
                self._changes.append((self._steps, request.version))
            committed = _done(answer)
        else:
            committed = self._committed = asyncio.get_running_loop().create_future()
            if request.interrupt != "wait":
                self._swap()
        self._update()
        return committed

    def sleep(self, request: SleepRequest) -> asyncio.Future[Moved]:
        """Abort what runs and put these parts to sleep; what is queued stays."""
        self._update()
        for request_id in list(self._running):
            self._end_early(request_id)
        if self.weights.swapping is not None:
            self._swap()
        freed = set(request.parts) - set(self.weights.asleep)
        for part in freed:
            self.weights.set_asleep(part)
        return self._moved(freed)

    def wake(self, request: WakeRequest) -> asyncio.Future[Moved]:
        """Wake these parts. Raises Refused (400, 409) with nothing changed."""
        if self.weights.must_restore(request.parts, restore=request.restore):
            self.weights.restore()
        taken = set(request.parts) & set(self.weights.asleep)
        for part in taken:
            self.weights.set_awake(part)
        return self._moved(taken)

    def _moved(self, parts: Collection[EnginePart]) -> asyncio.Future[Moved]:
        self._update()
        return _done(Moved(num_bytes=PART_BYTES * len(parts), seconds=0.0))

    def _swap(self) -> None:
        assert self.weights.swapping is not None
        (request, staged), weights = self.weights.swapping, self.weights
        is_abort = request.interrupt == "abort" and weights.has_content
        num_interrupted = len(self._running) + (len(self._queued) if is_abort else 0)
        pause_s = self.spec.swap_s
        if is_abort:
            for request_id in [*self._running, *self._queued]:
                self._end_early(request_id)
        if request.interrupt == "keep":
            for entry in self._running.values():
                num_tokens = len(entry.request.prompt_ids) + entry.num_sampled(self._steps)
                pause_s += self.spec.prefill_s_per_token * num_tokens
        weights.settle(request.version, request.digest, staged.request.path)
        self._changes.append((self._steps, request.version))
        self._stall(pause_s)
        answer = CommitResponse(
            version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted
        )
        asyncio.get_running_loop().call_later(pause_s, _answer, self._committed, answer)

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
        if self.weights.swapping is not None and not self._running:
            self._swap()
        may_start = self.weights.swapping is None and self.weights.can_serve
        while may_start and self._queued and len(self._running) < self.spec.slots:
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

    def _start(self, entry: SimulatedRequest) -> None:
        request = entry.request
        wanted = max(1, self.spec.completion_length(request.seed) - request.num_resumed)
        entry.is_stop, entry.length = wanted <= request.max_tokens, min(wanted, request.max_tokens)
        entry.start, entry.end = self._steps, self._steps + entry.length
        self._running[request.request_id] = entry
        if entry.stream is not None:
            self._streamed[request.request_id] = entry
        heapq.heappush(self._ends, entry)
        self._stall(self.spec.prefill_s_per_token * len(request.prompt_ids))

    def _end_early(self, request_id: str) -> bool:
        entry = self._running.get(request_id) or self._queued.get(request_id)
        if entry is not None:
            num_tokens = entry.num_sampled(self._steps) if request_id in self._running else 0
            self._finish(entry, num_tokens, "abort")
        return entry is not None

    def _finish(
        self, entry: SimulatedRequest, num_tokens: int, reason: Literal["stop", "length", "abort"]
    ) -> None:
        for entries in (self._running, self._streamed, self._queued):
            entries.pop(entry.request.request_id, None)
        self._tokens_generated += num_tokens
        _answer(entry.answer, self._sampled(entry, 0, num_tokens, reason))

    def _tell(self, entry: SimulatedRequest) -> None:
        """Put the tokens of a streamed request up to this moment into its stream."""
        end = entry.num_sampled(self._steps)
        if entry.stream is None or end <= entry.num_told:
            return
        new = self._sampled(entry, entry.num_told, end, "length")
        for span in new.version_spans:
            tokens = slice(span.start, span.end)
            pairs = zip(new.token_ids[tokens], new.logprobs[tokens], strict=True)
            entry.stream.put((token_id, logprob, span.version) for token_id, logprob in pairs)
        entry.num_told = end

    def _sampled(
        self, entry: SimulatedRequest, start: int, end: int, reason: Literal["stop", "length", "abort"]
    ) -> GenerateResponse:
        """The tokens [start, end) of a request as an answer."""
        request, vocab_size, num_tokens = entry.request, self.spec.vocab_size, end - start
        positions = np.arange(num_tokens) + len(request.prompt_ids) + start
        draws = uniform_draws(np.full(num_tokens, request.seed, np.uint64), positions)
        # Token k is sampled when the clock reaches entry.start + k + 1; it belongs to the last version in
        # force before that.
        since = self._changes[max(0, bisect_left(self._changes, (entry.start, -1)) - 1) :]
        marks = [(max(0, int(steps - entry.start + 1e-9) - start), version) for steps, version in since]
        return GenerateResponse(
            request_id=request.request_id,
            token_ids=(draws * vocab_size).astype(np.int64).tolist(),
            logprobs=[float(np.float32(-math.log(vocab_size)))] * num_tokens,
            version_spans=spans_of([mark for mark in marks if mark[0] <= num_tokens], num_tokens),
            finish_reason=reason,
        )


def _arrived(path: str) -> Arrived:
    """What lies in a file. Raises Refused (400)."""
    tensors = read_or_refuse(path)
    digests = {name: tensor_digest(name, raw.dtype, raw.shape, raw.data) for name, raw in tensors.items()}
    return digests, sum(len(raw.data) for raw in tensors.values())


def _done(result: Answer) -> asyncio.Future[Answer]:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    answer.set_result(result)
    return answer


def _answer(future: asyncio.Future[Answer], result: Answer) -> None:
    if not future.done():
        future.set_result(result)


def main() -> None:
    """Serve until SIGTERM or until the parent is gone."""
    die_with_parent()
    spec, fd = read_spec(SimulatedSpec)
    serve(engine_app(SimulatedEngine(spec)), fd)


if __name__ == "__main__":
    main()
