"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: engine server with only a latency model."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np
from pydantic import Field

from asyncrl.base.http import Refused, die_with_parent
from asyncrl.messages import engine_api
from asyncrl.messages.codec import Asked, Sampled, spans_of
from asyncrl.messages.engine_api import CommitResponse, LatencyModel, TransferStats
from asyncrl_servers import engine_routes
from asyncrl_servers.weight_state import ChunkedPush, WeightState

EPSILON = 1e-9


class SimulatedSpec(LatencyModel, engine_routes.EngineSpec):
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are uniform in 0..vocab_size-1."""

    def completion_length(self, seed: int) -> int:
        """Return a completion length, lognormal with mean `mean_tokens`."""
        normal = np.random.default_rng(seed).standard_normal() if self.sigma else 0.0
        return max(1, round(self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)))


class BelievedPush(ChunkedPush):
    def load(self, request: engine_api.LoadChunkRequest, read: object = None) -> str:
        self.version = request.version
        return request.digest

    def take(self, version: int, digest: str, names: object = ()) -> None:
        self.clear()


class SimulatedWeights(WeightState):
    """Only a version: what is announced is believed."""

    def __init__(self) -> None:
        super().__init__()
        self.push = BelievedPush()

    def read(self, request: engine_api.PrepareRequest) -> dict[str, bytes]:
        return {}


class SimulatedRun(engine_routes.Run):
    """A request admitted at clock `start` with `first` tokens; it ends as `then`, `length` steps later."""

    def __init__(self, asked: Asked, listener: engine_routes.Listener) -> None:
        super().__init__(asked, listener)
        self.start = 0.0
        self.length = 0
        self.first = 0
        self.then = ""
        self.num_told = 0
        self.token_ids = np.zeros(0, np.int32)
        """Of this segment, from `first` on."""
        self.marks: list[tuple[int, int]] = []
        """(position of the first token, policy_version)."""

    def num_sampled(self, clock: float) -> int:
        return self.first + max(0, min(int(clock - self.start + EPSILON), self.length - 1))


class SimulatedEngine:
    """Engine that costs one heap entry per request.

    All running requests share one step clock, which advances every decode_step_s + n * per_row_s seconds.

    Invariant: the clock never goes back, and no answer has tokens beyond the clock.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec = spec
        self.weights = SimulatedWeights()
        self._queued: OrderedDict[SimulatedRun, None] = OrderedDict()
        self._running: dict[SimulatedRun, float] = {}
        """The clock at the end of each."""
        self._streamed: dict[SimulatedRun, None] = {}
        self._interrupted: dict[SimulatedRun, None] = {}
        self._ends: list[tuple[float, int, SimulatedRun]] = []
        """Heap of ends; those of runs that ended early stay until they are due."""
        self._order = count()
        self._clock = 0.0
        self._updated_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._committed: Future[CommitResponse] = Future()
        self._results: dict[engine_routes.Listener, list[Sampled]] = {}
        self._num_tokens = 0
        self._busy_s = 0.0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def health(self) -> engine_api.EngineHealth:
        self._advance()
        num_untold = sum(run.num_sampled(self._clock) - run.num_told for run in self._running)
        return engine_api.EngineHealth(
            name=self.spec.name,
            kind="simulated",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running) + len(self._interrupted),
            num_queued=self.num_queued,
            tokens_generated=self._num_tokens + num_untold,
            device="none",
            decode_s=self._busy_s,
            asleep=self.weights.asleep,
        )

    def run(self, asked: Asked, listener: engine_routes.Listener) -> SimulatedRun:
        """Return a run; stop strings never match. Raises Refused (400)."""
        engine_routes.check_request(asked, self.spec.max_length, self.spec.vocab_size)
        if asked.request.grammar is not None or asked.request.top_logprobs:
            what = f"request {asked.request.request_id} has a grammar or top_logprobs"
            way_out = "set rollout.engine to embedded or vllm."
            raise Refused(400, what, rule="the simulated engine draws tokens uniformly", way_out=way_out)
        return SimulatedRun(asked, listener)

    def submit(self, runs: Sequence[SimulatedRun]) -> None:
        self._queued.update(dict.fromkeys(runs))
        self._update()

    def resume(self, runs: Sequence[SimulatedRun]) -> None:
        resumed = {run: None for run in runs if run in self._interrupted}
        self._interrupted = {run: None for run in self._interrupted if run not in resumed}
        self._queued = OrderedDict(resumed | self._queued)
        self._update()

    def abort(self, runs: Sequence[SimulatedRun]) -> None:
        self._update()
        places = (self._queued, self._running, self._interrupted)
        for run in runs:
            if any(run in place for place in places):
                self._end(run, "abort")
        self._update()

    def commit(self, request: engine_api.CommitRequest) -> Future[CommitResponse]:
        """Raises Refused (409)."""
        self._update()
        answer = self.weights.begin_commit(request)
        committed = self._committed = Future()
        if answer is not None:
            committed.set_result(answer)
        elif request.interrupt != "wait":
            self._swap()
        self._update()
        return committed

    def sleep(self, request: engine_api.SleepRequest) -> Future[TransferStats]:
        self._update()
        self._interrupt()
        if self.weights.swapping is not None:
            self._swap()
        parts = set(request.parts) - set(self.weights.asleep)
        for part in parts:
            self.weights.set_asleep(part)
        return self._moved(parts)

    def wake(self, request: engine_api.WakeRequest) -> Future[TransferStats]:
        parts = set(request.parts) & set(self.weights.asleep)
        for part in parts:
            self.weights.set_awake(part)
        return self._moved(parts)

    def _moved(self, parts: set[engine_api.EnginePart]) -> Future[TransferStats]:
        self._update()
        moved: Future[TransferStats] = Future()
        moved.set_result(TransferStats(num_bytes=2**20 * len(parts), seconds=0.0))
        return moved

    def _swap(self) -> None:
        assert self.weights.swapping is not None
        request = self.weights.swapping[0]
        version, digest, num_running = request.version, request.digest, len(self._running)
        if request.interrupt == "abort":
            self._interrupt()
        self.weights.settle(version, digest)
        for run in self._running:
            run.marks.append((run.num_sampled(self._clock), version))
        self._committed.set_result(
            CommitResponse(version=version, digest=digest, pause_s=0.0, num_interrupted=num_running)
        )

    def _step_s(self) -> float:
        return self.spec.decode_step_s + self.spec.per_row_s * len(self._running)

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self._busy_s += now_s - self._updated_s
            self._clock += (now_s - self._updated_s) / self._step_s()
        self._updated_s = now_s

    def _update(self) -> None:
        self._advance()
        while self._ends:
            end, _, run = self._ends[0]
            is_current = self._running.get(run) == end
            if is_current and end > self._clock + EPSILON:
                break
            heapq.heappop(self._ends)
            if is_current:
                self._end(run, run.then)
        if self.weights.swapping is not None and not self._running:
            self._swap()
        may_start = self.weights.swapping is None and self.weights.can_serve
        while may_start and self._queued and len(self._running) + len(self._interrupted) < self.spec.slots:
            self._start(self._queued.popitem(last=False)[0])
        for run in self._streamed:
            self._report(run, run.num_sampled(self._clock), "more")
        results, self._results = self._results, {}
        for listener, sampled in results.items():
            listener.sampled(sampled)
        if self._timer is not None:
            self._timer.cancel()
        if self._ends:
            num_steps = self._ends[0][0] - self._clock
            wait_s = (min(num_steps, 1.0) if self._streamed else num_steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(self._updated_s + wait_s, self._update)

    def _start(self, run: SimulatedRun) -> None:
        request = run.request
        limit = request.max_tokens - run.num_told
        wanted = max(1, self.spec.completion_length(request.seed) - request.num_resumed - run.num_told)
        run.then = "stop" if wanted <= limit else "length"
        run.length = min(wanted, limit)
        run.first = run.num_told
        run.start = self._clock
        positions = np.arange(run.length) + len(request.prompt_ids) + run.first
        draws = engine_routes.uniform_draws(np.full(run.length, request.seed, np.uint64), positions)
        run.token_ids = (draws * self.spec.vocab_size).astype(np.int32)
        run.marks.append((run.first, self.weights.version))
        self._running[run] = run.start + run.length
        if run.is_streamed:
            self._streamed[run] = None
        heapq.heappush(self._ends, (self._running[run], next(self._order), run))

    def _interrupt(self) -> None:
        for run in list(self._running):
            self._end(run, "interrupted")
            self._interrupted[run] = None

    def _end(self, run: SimulatedRun, then: str) -> None:
        end = run.num_told
        if run in self._running:
            end = run.first + run.length if then in ("stop", "length") else run.num_sampled(self._clock)
        for place in (self._running, self._streamed, self._queued, self._interrupted):
            place.pop(run, None)
        self._report(run, end, then)

    def _report(self, run: SimulatedRun, end: int, then: str) -> None:
        """Report the tokens before `end` with the next _update."""
        start = run.num_told
        if start == end and then == "more":
            return
        token_ids = run.token_ids[start - run.first : end - run.first]
        logprobs = np.full(len(token_ids), -math.log(self.spec.vocab_size), np.float32)
        sampled = Sampled(run.number, token_ids, logprobs, spans_of(run.marks, start, end), then)
        self._results.setdefault(run.listener, []).append(sampled)
        run.num_told = end
        self._num_tokens += end - start


def main() -> None:
    die_with_parent()
    spec, fd = engine_routes.read_spec(SimulatedSpec)
    engine_routes.serve_engine(SimulatedEngine(spec), fd)


if __name__ == "__main__":
    main()
