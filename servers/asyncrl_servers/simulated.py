"""`python -m asyncrl_servers.simulated --spec FILE --fd N`: engine server with only a latency model."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from pydantic import Field

from asyncrl.base.http import Refused, die_with_parent
from asyncrl.messages import engine_api
from asyncrl.messages.codec import Asked, Sampled, spans_of
from asyncrl.messages.digest import tensor_digest
from asyncrl.messages.engine_api import EnginePart, LatencyModel, TransferStats
from asyncrl.weights.tensor_files import read_or_refuse
from asyncrl_servers.engine_routes import serve_engine
from asyncrl_servers.served_engine import EngineSpec, Listener, Run, check_request, read_spec, uniform_draws
from asyncrl_servers.weight_state import Arrived, WeightState, check_arrived

EPSILON = 1e-9


class SimulatedSpec(LatencyModel, EngineSpec):
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are uniform in 0..vocab_size-1."""

    def completion_length(self, seed: int) -> int:
        """Return a completion length, lognormal with mean `mean_tokens`."""
        normal = np.random.default_rng(seed).standard_normal() if self.sigma else 0.0
        return max(1, round(self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)))


class SimulatedWeights(WeightState):
    def read(self, request: engine_api.PrepareRequest) -> dict[str, Any]:
        check_arrived(request.path, _arrived(request.path), request)
        return {}

    def load(self, request: engine_api.LoadChunkRequest) -> Arrived:
        return _arrived(request.path)


class SimulatedRun(Run):
    """A request admitted at clock `start` with `first` tokens; it ends `length` steps later."""

    start = 0.0
    length = 0
    is_stop = False
    first = 0
    num_told = 0

    def __init__(self, asked: Asked, listener: Listener) -> None:
        super().__init__(asked, listener)
        self.marks: list[tuple[int, int]] = []
        """(position of the first token, policy_version)."""

    @property
    def end(self) -> float:
        return self.start + self.length

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
        self._running: dict[SimulatedRun, None] = {}
        self._streamed: dict[SimulatedRun, None] = {}
        self._interrupted: dict[SimulatedRun, None] = {}
        self._ends: list[tuple[float, int, SimulatedRun]] = []
        self._order = count()
        self._clock = 0.0
        self._updated_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._committed: asyncio.Future[engine_api.CommitResponse]
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

    def run(self, asked: Asked, listener: Listener) -> SimulatedRun:
        """Return a run; stop strings never match. Raises Refused (400)."""
        check_request(asked, self.spec.max_length, self.spec.vocab_size)
        if asked.request.grammar is not None or asked.request.top_logprobs:
            what = f"request {asked.request.request_id} has a grammar or top_logprobs"
            way_out = "set rollout.engine to embedded or vllm."
            raise Refused(400, what, rule="the simulated engine draws tokens uniformly", way_out=way_out)
        return SimulatedRun(asked, listener)

    def submit(self, runs: Sequence[SimulatedRun]) -> None:
        self._queued.update(dict.fromkeys(runs))
        self._update()

    def resume(self, runs: Sequence[SimulatedRun]) -> None:
        for run in reversed(runs):
            if run in self._interrupted:
                del self._interrupted[run]
                self._queued[run] = None
                self._queued.move_to_end(run, last=False)
        self._update()

    def abort(self, runs: Sequence[SimulatedRun]) -> None:
        self._update()
        places = (self._queued, self._running, self._interrupted)
        self._end([(run, "abort") for run in runs if any(run in place for place in places)])
        self._update()

    def commit(self, request: engine_api.CommitRequest) -> asyncio.Future[engine_api.CommitResponse]:
        """Raises Refused (409)."""
        self._update()
        answer = self.weights.begin_commit(request)
        committed: asyncio.Future[engine_api.CommitResponse] = asyncio.get_running_loop().create_future()
        if answer is not None:
            committed.set_result(answer)
        else:
            self._committed = committed
            if request.interrupt != "wait":
                self._swap()
        self._update()
        return committed

    def sleep(self, request: engine_api.SleepRequest) -> asyncio.Future[TransferStats]:
        self._update()
        self._end([(run, "interrupted") for run in self._running])
        if self.weights.swapping is not None:
            self._swap()
        parts = set(request.parts) - set(self.weights.asleep)
        for part in parts:
            self.weights.set_asleep(part)
        return self._moved(parts)

    def wake(self, request: engine_api.WakeRequest) -> asyncio.Future[TransferStats]:
        parts = set(request.parts) & set(self.weights.asleep)
        for part in parts:
            self.weights.set_awake(part)
        return self._moved(parts)

    def _moved(self, parts: set[EnginePart]) -> asyncio.Future[TransferStats]:
        self._update()
        moved: asyncio.Future[TransferStats] = asyncio.get_running_loop().create_future()
        moved.set_result(TransferStats(num_bytes=2**20 * len(parts), seconds=0.0))
        return moved

    def _swap(self) -> None:
        assert self.weights.swapping is not None
        request = self.weights.swapping[0]
        num_interrupted = len(self._running)
        if request.interrupt == "abort":
            self._end([(run, "interrupted") for run in self._running])
        self.weights.settle(request.version, request.digest)
        for run in self._running:
            run.marks.append((run.num_sampled(self._clock), request.version))
        answer = engine_api.CommitResponse(
            version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=num_interrupted
        )
        self._committed.set_result(answer)

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
        ended = []
        while self._ends:
            end, _, run = self._ends[0]
            is_current = run in self._running and run.end == end
            if is_current and end > self._clock + EPSILON:
                break
            heapq.heappop(self._ends)
            if is_current:
                ended.append((run, "stop" if run.is_stop else "length"))
        self._end(ended)
        if self.weights.swapping is not None and not self._running:
            self._swap()
        may_start = self.weights.swapping is None and self.weights.can_serve
        while may_start and self._queued and len(self._running) + len(self._interrupted) < self.spec.slots:
            self._start(self._queued.popitem(last=False)[0])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell([(run, run.num_sampled(self._clock), "more") for run in self._streamed])
        if self._ends:
            num_steps = self._ends[0][0] - self._clock
            wait_s = (min(num_steps, 1.0) if self._streamed else num_steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(self._updated_s + wait_s, self._update)

    def _start(self, run: SimulatedRun) -> None:
        request = run.request
        limit = request.max_tokens - run.num_told
        wanted = max(1, self.spec.completion_length(request.seed) - request.num_resumed - run.num_told)
        run.is_stop = wanted <= limit
        run.length = min(wanted, limit)
        run.first = run.num_told
        run.start = self._clock
        run.marks.append((run.first, self.weights.version))
        self._running[run] = None
        if run.is_streamed:
            self._streamed[run] = None
        heapq.heappush(self._ends, (run.end, next(self._order), run))

    def _end(self, ended: Iterable[tuple[SimulatedRun, str]]) -> None:
        rows = []
        for run, then in list(ended):
            num_tokens = run.num_told
            if run in self._running:
                is_whole = then in ("stop", "length")
                num_tokens = run.first + run.length if is_whole else run.num_sampled(self._clock)
            rows.append((run, num_tokens, then))
            for runs in (self._running, self._streamed, self._queued, self._interrupted):
                runs.pop(run, None)
            if then == "interrupted":
                self._interrupted[run] = None
        self._tell(rows)

    def _tell(self, rows: Iterable[tuple[SimulatedRun, int, str]]) -> None:
        rows = [(run, end, then) for run, end, then in rows if end > run.num_told or then != "more"]
        if not rows:
            return
        sizes = [end - run.num_told for run, end, _ in rows]
        ends = np.cumsum(sizes)
        shifts = [len(run.request.prompt_ids) + run.num_told for run, _, _ in rows] - (ends - sizes)
        positions = np.arange(ends[-1]) + np.repeat(shifts, sizes)
        seeds = np.repeat(np.array([run.request.seed for run, _, _ in rows], np.uint64), sizes)
        token_ids = (uniform_draws(seeds, positions) * self.spec.vocab_size).astype(np.int32)
        logprobs = np.full(len(token_ids), -math.log(self.spec.vocab_size), np.float32)
        told: dict[Listener, list[Sampled]] = {}
        for (run, end, then), size, last in zip(rows, sizes, ends.tolist(), strict=True):
            part = slice(last - size, last)
            spans = spans_of(run.marks, run.num_told, end)
            row = Sampled(run.number, token_ids[part], logprobs[part], spans, then)
            told.setdefault(run.listener, []).append(row)
            run.num_told = end
        self._num_tokens += len(token_ids)
        for listener, sampled in told.items():
            listener.sampled(sampled)


def _arrived(path: str) -> Arrived:
    tensors = read_or_refuse(path)
    digests = {name: tensor_digest(name, raw.dtype, raw.shape, raw.data) for name, raw in tensors.items()}
    return digests, sum(len(raw.data) for raw in tensors.values())


def main() -> None:
    die_with_parent()
    spec, fd = read_spec(SimulatedSpec)
    serve_engine(SimulatedEngine(spec), fd)


if __name__ == "__main__":
    main()
