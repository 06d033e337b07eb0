"""`python -m asyncrl_simulated.simulated_engine --spec FILE --fd N`: engine server with
only a latency model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Never

import numpy as np
from pydantic import Field

from asyncrl.base.http import die_with_parent
from asyncrl.messages import engine_api
from asyncrl.messages.codec import Asked, Sampled, spans_between
from asyncrl.messages.engine_api import CommitResponse, TransferStats
from asyncrl.messages.tokens import BEHAVIOUR, Tokens
from asyncrl_servers import engine_routes
from asyncrl_servers.weight_state import ChunkedPush, WeightState
from asyncrl_simulated.latency_model import LatencyModel

EPSILON = 1e-9


class SimulatedSpec(LatencyModel, engine_routes.EngineSpec):
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are uniform in 0..vocab_size-1."""

    def completion_length(self, seed: int) -> int:
        """Return a completion length, lognormal with mean `mean_tokens`."""
        normal = np.random.default_rng(seed).standard_normal() if self.sigma else 0.0
        return max(
            1,
            round(self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)),
        )


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

    def read(self, request: engine_api.PrepareRequest) -> dict[str, Never]:
        return {}


class SimulatedRun(engine_routes.Run):
    """A request that runs since `start_s` with `first` tokens, and ends as `then` after
    `length` more.
    """

    def __init__(self, asked: Asked, listener: engine_routes.Listener) -> None:
        super().__init__(asked, listener)
        self.start_s = 0.0
        self.length = 0
        self.first = 0
        self.then = ""
        self.token_ids = np.zeros(0, np.int32)
        """Of this segment, from `first` on."""


class SimulatedEngine(engine_routes.RunQueue[SimulatedRun]):
    """Engine that costs one timer per request: each token takes decode_step_s.

    Invariant: no answer has a token before its time.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weights = SimulatedWeights()
        self._running: dict[SimulatedRun, asyncio.TimerHandle] = {}
        self._streamed: dict[SimulatedRun, None] = {}
        self._streaming: asyncio.TimerHandle | None = None
        self._committed: Future[CommitResponse] = Future()
        self._is_due = False
        """_go_on comes with the next iteration of the event loop."""
        self._full: asyncio.TimerHandle | None = None
        """When the KV cache is full, if no run ends before."""
        self._num_tokens = self._num_preempted = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    def weights_of(self, adapter: str) -> SimulatedWeights:
        if adapter:
            raise engine_routes.no_adapter(adapter, [""], 404)
        return self.weights

    def health(self) -> engine_api.EngineHealth:
        num_unsent = sum(self._num_sampled(run) - run.num_told for run in self._running)
        return engine_api.EngineHealth(
            policy_version=self.weights.version,
            num_running=len(self._running) + len(self.interrupted),
            num_queued=len(self.queued),
            tokens_generated=self._num_tokens + num_unsent,
            decode_s=self._busy_s
            + (_now_s() - self._busy_since_s if self._running else 0.0),
            kv_fraction=self._kv_used() / (self.spec.kv_tokens or math.inf),
            kv_tokens=self.spec.kv_tokens or 0,
            num_preempted=self._num_preempted,
            asleep=self.weights.asleep,
        )

    def run(self, asked: Asked, listener: engine_routes.Listener) -> SimulatedRun:
        """Return a run; stop strings and grammars have no effect. Raises Refused (400,
        404).
        """
        self.weights_of(asked.request.adapter)
        engine_routes.check_request(asked, self.spec.max_length, self.spec.vocab_size)
        return SimulatedRun(asked, listener)

    def submit(self, runs: Iterable[SimulatedRun]) -> None:
        super().submit(runs)
        self._go_on()

    def resume(self, runs: Sequence[SimulatedRun]) -> None:
        super().resume(runs)
        self._go_on()

    def abort(self, runs: Sequence[SimulatedRun]) -> None:
        for run in runs:
            if any(
                run in place for place in (self.queued, self._running, self.interrupted)
            ):
                self._end(run, "abort")
        self._go_on()

    def commit(self, request: engine_api.CommitRequest) -> Future[CommitResponse]:
        """Swap now, or with interrupt=wait once no run is active. Raises Refused (409)."""
        answer = self.weights.begin_commit(request)
        committed = self._committed = Future()
        if answer is not None:
            committed.set_result(answer)
        elif request.interrupt != "wait":
            self._swap()
        self._go_on()
        return committed

    def sleep(self) -> Future[TransferStats]:
        self._interrupt()
        if self.weights.swapping is not None:
            self._swap()
        num_awake = 2 - len(self.weights.asleep)
        self.weights.set_asleep()
        return self._moved(num_awake)

    def wake(self, request: engine_api.WakeRequest) -> Future[TransferStats]:
        parts = set(request.parts) & set(self.weights.asleep)
        for part in parts:
            self.weights.set_awake(part)
        return self._moved(len(parts))

    def _moved(self, num_parts: int) -> Future[TransferStats]:
        self._go_on()
        moved: Future[TransferStats] = Future()
        moved.set_result(TransferStats(num_bytes=2**20 * num_parts, seconds=0.0))
        return moved

    def _swap(self) -> None:
        assert self.weights.swapping is not None
        request = self.weights.swapping[0]
        version = request.version
        digest = request.digest
        num_running = len(self._running)
        if request.interrupt == "abort":
            self._interrupt()
        self.weights.settle(version, digest)
        for run in self._running:
            run.marks.append((self._num_sampled(run), version))
        self._committed.set_result(
            CommitResponse(
                version=version, digest=digest, pause_s=0.0, num_interrupted=num_running
            )
        )

    def _go_on(self) -> None:
        """Swap weights that no run holds up, start queued runs, and hand over results."""
        self._is_due = False
        if self.weights.swapping is not None and not self._running:
            self._swap()
        while (
            self.weights.may_start
            and self.queued
            and len(self._running) + len(self.interrupted) < self.spec.slots
            and self._fits(next(iter(self.queued)))
        ):
            self._start(self.queued.popitem(last=False)[0])
        self._watch_kv()
        if self._streamed and self._streaming is None:
            loop = asyncio.get_running_loop()
            self._streaming = loop.call_later(self.spec.decode_step_s, self._stream)
        self.hand_over()

    def _kv_used(self) -> int:
        if self.spec.kv_tokens is None:
            return 0
        return sum(
            len(run.request.prompt_ids) + self._num_sampled(run) + 1
            for run in self._running
        )

    def _fits(self, run: SimulatedRun) -> bool:
        """Return whether the run and all others can have their next token. A run that is
        alone always fits.
        """
        if self.spec.kv_tokens is None or not self._running:
            return True
        tokens = len(run.request.prompt_ids) + run.num_told + 1
        used = self._kv_used() + len(self._running)
        return used + tokens < self.spec.kv_tokens

    def _watch_kv(self) -> None:
        """Wake up when the KV cache is full. Each step adds a token for each run."""
        if self._full is not None:
            self._full.cancel()
            self._full = None
        if self.spec.kv_tokens is None or len(self._running) < 2:
            return
        free = max(0, self.spec.kv_tokens - self._kv_used())
        num_steps = 1 + free // len(self._running)
        self._full = asyncio.get_running_loop().call_later(
            num_steps * self.spec.decode_step_s, self._preempt
        )

    def _preempt(self) -> None:
        """Take the newest runs out of a full KV cache, with the tokens not yet reported."""
        self._full = None
        limit = self.spec.kv_tokens or math.inf
        while len(self._running) > 1 and self._kv_used() > limit:
            run, timer = self._running.popitem()
            timer.cancel()
            self._streamed.pop(run, None)
            # They are sampled again, perhaps from other weights.
            run.marks = [mark for mark in run.marks if mark[0] < run.num_told]
            self.put_first([run])
            self._num_preempted += 1
        self._watch_kv()

    def _stream(self) -> None:
        self._streaming = None
        for run in self._streamed:
            self._report(run, self._num_sampled(run), "more")
        self._go_on()

    def _start(self, run: SimulatedRun) -> None:
        request = run.request
        limit = request.max_tokens - run.num_told
        wanted = max(
            1,
            self.spec.completion_length(request.seed)
            - request.num_resumed
            - run.num_told,
        )
        # The length follows from the seed, so an interrupted request ends where an
        # uninterrupted one ends.
        run.then = "stop" if wanted <= limit else "length"
        run.length = min(wanted, limit)
        run.first = run.num_told
        run.start_s = _now_s()
        positions = np.arange(run.length) + len(request.prompt_ids) + run.first
        draws = engine_routes.uniform_draws(
            np.full(run.length, request.seed, np.uint64), positions
        )
        run.token_ids = (draws * self.spec.vocab_size).astype(np.int32)
        run.marks.append((run.first, self.weights.version))
        if run.is_streamed:
            self._streamed[run] = None
        if not self._running:
            self._busy_since_s = run.start_s
        end_s = run.start_s + run.length * self.spec.decode_step_s
        self._running[run] = asyncio.get_running_loop().call_at(
            end_s, self._finish, run
        )

    def _finish(self, run: SimulatedRun) -> None:
        self._end(run, run.then)
        if not self._is_due:  # runs that end together share a frame
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _interrupt(self) -> None:
        for run in list(self._running):
            self._end(run, "interrupted")
            self.interrupted[run] = None

    def _end(self, run: SimulatedRun, then: str) -> None:
        end = run.num_told
        if run in self._running:
            end = (
                run.first + run.length
                if then in ("stop", "length")
                else self._num_sampled(run)
            )
            self._running.pop(run).cancel()
            if not self._running:
                # Seconds in which at least one request ran, like decode_s of a real
                # engine.
                self._busy_s += _now_s() - self._busy_since_s
        for place in (self._streamed, self.queued, self.interrupted):
            place.pop(run, None)
        self._report(run, end, then)

    def _num_sampled(self, run: SimulatedRun) -> int:
        # EPSILON: a timer that fires on time may see a clock that is a rounding error
        # early.
        num_steps = int((_now_s() - run.start_s) / self.spec.decode_step_s + EPSILON)
        # The last token comes only with its end, from _finish.
        return run.first + max(0, min(num_steps, run.length - 1))

    def _report(self, run: SimulatedRun, end: int, then: str) -> None:
        """Report the tokens before `end` with the next _go_on."""
        start = run.num_told
        if start == end and then == "more":
            return
        token_ids = run.token_ids[start - run.first : end - run.first]
        logprobs = np.full(len(token_ids), -math.log(self.spec.vocab_size), np.float32)
        tokens = Tokens(
            token_ids, spans_between(run.marks, start, end), {BEHAVIOUR: logprobs}
        )
        self.report(run, Sampled(run.number, tokens, then))
        run.num_told = end
        self._num_tokens += end - start


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def main() -> None:
    die_with_parent()
    spec, fd = engine_routes.read_spec(SimulatedSpec)
    engine_routes.serve_engine(SimulatedEngine(spec), fd)


if __name__ == "__main__":
    main()
