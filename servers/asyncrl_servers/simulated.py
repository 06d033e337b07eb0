"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: one simulated engine server, a child of the run.
The endpoints of an engine with a latency model and no model, for load tests and benchmarks. Imports no torch.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from asyncrl.messages.base import EnginePart, LatencyModel, Moved
from asyncrl.messages.calls import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    LoadChunkRequest,
    PrepareRequest,
    SleepRequest,
    WakeRequest,
)
from asyncrl.messages.digest import tensor_digest
from asyncrl.messages.frames import Asked, Sampled, spans_of
from asyncrl.serving import Refused, die_with_parent
from asyncrl.weights.tensor_files import read_or_refuse
from asyncrl_servers.engine_routes import serve_engine
from asyncrl_servers.served_engine import EngineSpec, Listener, Run, check_request, read_spec, uniform_draws
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
        if self.sigma == 0.0:
            return max(1, round(self.mean_tokens))
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


class SimulatedRun(Run):
    """A run, admitted at `start` with `first` tokens sampled before, and over at `end` = start + length of
    the step clock.
    """

    def __init__(self, asked: Asked, listener: Listener) -> None:
        super().__init__(asked, listener)
        self.start, self.end, self.length, self.is_stop = 0.0, 0.0, 0, False
        self.first = self.num_told = 0
        self.is_over = False

    def num_by(self, steps: float) -> int:
        """Tokens that the step clock has passed, without the one that ends it."""
        return self.first + max(0, min(int(steps - self.start + 1e-9), self.length - 1))


class SimulatedEngine:
    """Holds any number of requests at the cost of a heap entry each, whatever the number of their tokens.

    All running requests get a token a step, so one clock of steps tells how far each is: it runs at 1 /
    (decode_step_s + n * per_row_s) and stands still during prefill and swaps. A request ends when the clock
    reaches its start plus its length; version changes are places on the clock. Tokens are drawn at the end,
    or once a step if they are streamed.

    Life: a run is queued -> running -> over, or aborted from any state; an update or a sleep interrupts what
        runs, which holds its slot until it is resumed: to the head of the queue.
    Waits: one timer, for the next end (with a stream running, for the next step); every change of what runs
        sets it anew. A commit with interrupt=wait waits for the last running request, whose end or abort
        answers it.
    Invariant: the clock never runs back, and answers never hold a token that the clock has not passed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec, self.weights = spec, SimulatedWeights()
        self._queued: OrderedDict[SimulatedRun, None] = OrderedDict()
        self._running: dict[SimulatedRun, None] = {}
        self._interrupted: dict[SimulatedRun, None] = {}
        self._streamed: dict[SimulatedRun, None] = {}
        self._ends: list[tuple[float, int, SimulatedRun]] = []
        """A heap; what does not run until then any more is skipped."""
        self._admitted = count()
        self._steps, self._updated_s, self._stalled_until_s = 0.0, 0.0, 0.0
        self._changes: list[tuple[float, int]] = [(0.0, 0)]
        """(Place on the step clock, policy_version from there on), in order."""
        self._timer: asyncio.TimerHandle | None = None
        self._committed: asyncio.Future[CommitResponse]
        self._tokens_generated, self._busy_s = 0, 0.0

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queued)

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        self._advance()
        num_sampled = sum(run.num_by(self._steps) - run.num_told for run in self._running)
        return EngineHealth(
            name=self.spec.name,
            kind="simulated",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running) + len(self._interrupted),
            num_queued=self.num_queued,
            tokens_generated=self._tokens_generated + num_sampled,
            device="none",
            decode_s=self._busy_s,
            asleep=self.weights.asleep,
        )

    def run(self, asked: Asked, listener: Listener) -> SimulatedRun:
        """Stop strings never match: there is no text. Raises Refused (400)."""
        check_request(asked, self.spec.max_length, self.spec.vocab_size)
        if asked.request.grammar is not None or asked.request.top_logprobs:
            what = f"request {asked.request.request_id} has a grammar or top_logprobs"
            rule = "this server draws any token, each as likely as the other"
            raise Refused(400, what, rule=rule, way_out="set rollout.engine to embedded or vllm.")
        return SimulatedRun(asked, listener)

    def submit(self, runs: Sequence[SimulatedRun]) -> None:
        """Queue them."""
        self._queued.update(dict.fromkeys(runs))
        self._update()

    def resume(self, runs: Sequence[SimulatedRun]) -> None:
        """Those that were interrupted go on, before what is queued."""
        for run in reversed(runs):
            if run in self._interrupted:
                del self._interrupted[run]
                self._queued[run] = None
                self._queued.move_to_end(run, last=False)
        self._update()

    def abort(self, runs: Sequence[SimulatedRun]) -> None:
        """End them with what they have."""
        self._update()  # what is over by now has ended by itself
        self._end([(run, "abort") for run in runs if not run.is_over])
        self._update()

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
        """Interrupt what runs and put these parts to sleep; what is queued stays."""
        self._update()
        self._end([(run, "interrupted") for run in self._running])
        if self.weights.swapping is not None:
            self._swap()
        freed = set(request.parts) - set(self.weights.asleep)
        for part in freed:
            self.weights.set_asleep(part)
        return self._moved(freed)

    def wake(self, request: WakeRequest) -> asyncio.Future[Moved]:
        """Wake these parts."""
        taken = set(request.parts) & set(self.weights.asleep)
        for part in taken:
            self.weights.set_awake(part)
        return self._moved(taken)

    def _moved(self, parts: Collection[EnginePart]) -> asyncio.Future[Moved]:
        self._update()
        return _done(Moved(num_bytes=PART_BYTES * len(parts), seconds=0.0))

    def _swap(self) -> None:
        assert self.weights.swapping is not None
        (request, _), weights = self.weights.swapping, self.weights
        num_interrupted, pause_s = len(self._running), self.spec.swap_s
        if request.interrupt == "abort":
            self._end([(run, "interrupted") for run in self._running])
        if request.interrupt == "keep":
            for run in self._running:
                num_tokens = len(run.request.prompt_ids) + run.num_by(self._steps)
                pause_s += self.spec.prefill_s_per_token * num_tokens
        weights.settle(request.version, request.digest)
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
        ended: list[tuple[SimulatedRun, str]] = []
        while self._ends and (self._ends[0][0] <= self._steps + 1e-9 or not self._is_current(*self._ends[0])):
            entry = heapq.heappop(self._ends)
            if self._is_current(*entry):
                ended.append((entry[2], "stop" if entry[2].is_stop else "length"))
        self._end(ended)
        if self.weights.swapping is not None and not self._running:
            self._swap()
        may_start = self.weights.swapping is None and self.weights.can_serve
        slots = self.spec.slots - len(self._interrupted)
        while may_start and self._queued and len(self._running) < slots:
            self._start(self._queued.popitem(last=False)[0])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell([(run, run.num_by(self._steps), "more") for run in self._streamed])
        if self._ends:
            num_steps = self._ends[0][0] - self._steps
            wait_s = (min(num_steps, 1.0) if self._streamed else num_steps) * self._step_s()
            at_s = max(self._updated_s, self._stalled_until_s) + wait_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._update)

    def _is_current(self, end: float, _: int, run: SimulatedRun) -> bool:
        return run in self._running and run.end == end

    def _start(self, run: SimulatedRun) -> None:
        request = run.request
        limit = request.max_tokens - run.num_told
        wanted = max(1, self.spec.completion_length(request.seed) - request.num_resumed - run.num_told)
        run.is_stop, run.length = wanted <= limit, min(wanted, limit)
        run.first, run.start, run.end = run.num_told, self._steps, self._steps + run.length
        self._running[run] = None
        if run.is_streamed:
            self._streamed[run] = None
        heapq.heappush(self._ends, (run.end, next(self._admitted), run))
        self._stall(self.spec.prefill_s_per_token * (len(request.prompt_ids) + run.first))

    def _end(self, ended: Sequence[tuple[SimulatedRun, str]]) -> None:
        """These do not run any more."""
        rows = []
        for run, then in ended:
            num_tokens = run.num_told
            if run in self._running:
                is_whole = then in ("stop", "length")
                num_tokens = run.first + run.length if is_whole else run.num_by(self._steps)
            for runs in (self._running, self._streamed, self._queued, self._interrupted):
                runs.pop(run, None)
            if then == "interrupted":
                self._interrupted[run] = None
            else:
                run.is_over = True
            rows.append((run, num_tokens, then))
        self._tell(rows)

    def _tell(self, rows: Sequence[tuple[SimulatedRun, int, str]]) -> None:
        """What was sampled, up to so many tokens of each."""
        rows = [(run, end, then) for run, end, then in rows if end > run.num_told or then != "more"]
        if not rows:
            return
        sizes = [end - run.num_told for run, end, _ in rows]
        ends = np.cumsum(sizes)
        # Position of the first token of each, less its place among all that are drawn here.
        shifts = [len(run.request.prompt_ids) + run.num_told for run, _, _ in rows] - (ends - sizes)
        positions = np.arange(ends[-1]) + np.repeat(shifts, sizes)
        draws = uniform_draws(
            np.repeat(np.array([run.request.seed for run, _, _ in rows], np.uint64), sizes), positions
        )
        token_ids = (draws * self.spec.vocab_size).astype(np.int32)
        logprobs = np.full(len(token_ids), -math.log(self.spec.vocab_size), np.float32)
        told: dict[Listener, list[Sampled]] = {}
        for (run, end, then), size, last in zip(rows, sizes, ends.tolist(), strict=True):
            here, spans = slice(last - size, last), spans_of(self._marks(run), run.num_told, end)
            told.setdefault(run.listener, []).append(
                Sampled(run.number, token_ids[here], logprobs[here], spans, then)
            )
            run.num_told = end
        self._tokens_generated += len(token_ids)
        for listener, sampled in told.items():
            listener.sampled(sampled)

    def _marks(self, run: SimulatedRun) -> list[tuple[int, int]]:
        """(First token, policy_version) of each version since the admission.

        Token k since then is sampled when the clock reaches run.start + k + 1; it belongs to the last version
        in force before that.
        """
        since = self._changes[max(0, bisect_left(self._changes, (run.start, -1)) - 1) :]
        return [(run.first + max(0, int(steps - run.start + 1e-9)), version) for steps, version in since]


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
    serve_engine(SimulatedEngine(spec), fd)


if __name__ == "__main__":
    main()
