"""Engine loop: one thread that owns the model and schedules decode steps."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.serving import Refused
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.engine_api import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    ScoreRequest,
    ScoreResponse,
    SleepRequest,
    TransferStats,
    WakeRequest,
)
from asyncrl_servers.embedded.admission import Prefill, admit, keep_next
from asyncrl_servers.embedded.constraints import Constraints
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.scoring import Scorer
from asyncrl_servers.embedded.sequence import Rows, Sequence, StopWatch, moves_after_removal, sample
from asyncrl_servers.served_engine import Listener, check_request

Answer = TypeVar("Answer")
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
STREAM_S = 0.005
"""Minimum seconds between stream updates: about one decode step."""


class Engine:
    """Continuous batching over slots.

    Life: start() -> serving -> stop(). An exception in the loop goes to `on_crash`, which ends the process.
    Waits: the loop sleeps in its inbox if nothing can run; every call wakes it. Callers wait on futures.
    Invariant: every token carries the version of the weights that computed it; both change together, only in
        _finish_commit, between decode steps. Interrupted requests keep their slot until resumed or aborted.
    """

    def __init__(
        self,
        spec: EmbeddedSpec,
        runner: Runner,
        weights: Weights,
        on_crash: Callable[[BaseException], None] | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.spec, self.runner, self.weights, self._on_crash = spec, runner, weights, on_crash
        self._scorer = scorer
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: OrderedDict[Sequence, None] = OrderedDict()
        self._interrupted: dict[Sequence, None] = {}
        self._constraints = Constraints(runner.loaded)
        self._rows = Rows(spec.slots, spec.num_kept, spec.max_length)
        self._eos_ids = np.array(sorted(runner.loaded.eos_ids), np.int64)
        self._committed: Future[CommitResponse]
        self._told: dict[Listener, list[Sampled]] = {}
        self._streamed_s = self._decode_s = 0.0
        self._is_stopping = False
        self._tokens_generated = self._tokens_prefilled = 0
        self._thread = threading.Thread(target=self._loop, name="engine-loop", daemon=True)

    # Methods for any thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the step, abort running requests and join the loop."""
        self._inbox.put(self._stop)
        self._thread.join()

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def health(self) -> EngineHealth:
        return EngineHealth(
            name=self.spec.name,
            kind="embedded",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._rows) + len(self._interrupted),
            num_queued=self.num_queued,
            tokens_generated=self._tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            device=str(self.runner.loaded.device),
            decode_s=self._decode_s,
            asleep=self.weights.asleep,
            graphs=self.runner.graphs.state if self.runner.graphs is not None else "",
        )

    def run(self, asked: Asked, listener: Listener) -> Sequence:
        """Return a run to submit. Raises Refused (400)."""
        token_ids = check_request(asked, self.spec.max_length, self.runner.loaded.vocab_size)
        request, tokenizer, stop_watch = asked.request, self.runner.loaded.tokenizer, None
        if request.stop:
            if tokenizer is None:
                what = f"request {request.request_id} has stop strings, but the model folder has no tokenizer"
                raise Refused(400, what, way_out="save the tokenizer beside the model.")
            resumed = token_ids[len(token_ids) - request.num_resumed :].tolist()
            stop_watch = StopWatch(request.stop, tokenizer, resumed)
        return Sequence(asked, listener, token_ids, stop_watch, self._constraints.begin(request, token_ids))

    def submit(self, runs: Iterable[Sequence]) -> None:
        self._inbox.put(lambda: self._queued.update(dict.fromkeys(runs)))

    def resume(self, runs: Iterable[Sequence]) -> None:
        """Resume interrupted runs ahead of the queue."""
        self._inbox.put(lambda: self._resume(list(runs)))

    def abort(self, runs: Iterable[Sequence]) -> None:
        self._inbox.put(lambda: self._abort(set(runs)))

    def commit(self, request: CommitRequest) -> Future[CommitResponse]:
        """Swap weights between decode steps. The future may raise Refused (409)."""
        return self._ask(lambda answer: self._commit(request, answer))

    def sleep(self, request: SleepRequest) -> Future[TransferStats]:
        """Interrupt running requests and free these parts. The future may raise Refused (409)."""
        return self._ask(lambda _: self._sleep(request))

    def wake(self, request: WakeRequest) -> Future[TransferStats]:
        """Allocate memory for these parts. The future may raise Refused (400, 409, 507)."""
        return self._ask(lambda _: self._wake(request))

    def score(self, request: ScoreRequest) -> Future[ScoreResponse]:
        """Compute logprobs of given tokens. The future may raise Refused (400)."""
        assert self._scorer is not None, "the route is there where the engine has one"
        return self._ask(partial(self._scorer.add, request))

    def _ask(self, action: Callable[[Future[Answer]], Answer | None]) -> Future[Answer]:
        """Run `action` in the loop's thread and set the future; None means that it answers later."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()

        def act() -> None:
            try:
                result = action(answer)
            except Refused as error:
                answer.set_exception(error)
            else:
                if result is not None:
                    answer.set_result(result)

        self._inbox.put(act)
        return answer

    # Methods for the loop's thread only.

    def _loop(self) -> None:
        torch.set_num_threads(self.spec.threads)  # OpenMP counts threads per calling thread
        try:
            while not self._is_stopping:
                if not self._rows and not self._may_admit:
                    self._inbox.get()()
                self.turn()
        except Exception as error:
            if self._on_crash is None:
                raise
            self._on_crash(error)

    @property
    def _may_admit(self) -> bool:
        has_slot = len(self._rows) + len(self._interrupted) < self.spec.slots
        is_serving = self.weights.swapping is None and self.weights.can_serve
        return bool(self._queued) and has_slot and is_serving

    @torch.inference_mode()
    def turn(self) -> None:
        """Run one iteration of the loop."""
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        if self._scorer is not None:
            self._scorer.run()
        started_s = time.perf_counter()
        if self._rows or self._may_admit:
            self._step()
            self._decode_s += time.perf_counter() - started_s
        if started_s - self._streamed_s >= STREAM_S:
            self._streamed_s = started_s
            for row, sequence in enumerate(self._rows.sequences):
                if sequence.is_streamed and sequence.num_told < self._rows.lengths[row]:
                    self._tell(row, "more")
        if self.weights.swapping is not None and not self._rows:
            self._finish_commit()
        self._hand_over()

    def _hand_over(self) -> None:
        """Pass this iteration's results to each listener in one call."""
        told, self._told = self._told, {}
        for listener, sampled in told.items():
            listener.sampled(sampled)

    def _stop(self) -> None:
        self._abort({*self._rows.sequences, *self._queued, *self._interrupted})
        self._is_stopping = True

    def _step(self) -> None:
        """Sample a token for each running and admitted sequence in one model call."""
        rows, num_running = self._rows, len(self._rows)
        reads = self._admit()
        last_ids, lengths = rows.last_ids(num_running), rows.lengths[:num_running].copy()
        for one in reads:
            if one.num_copied:
                self.runner.cache.copy_slot(one.source, one.row, one.num_copied)
            self._tokens_prefilled += len(one.ids) - one.num_shared
        shares = [(one.source, one.row, one.num_shared) for one in reads if one.num_copied < one.num_shared]
        jobs = [(one.row, one.ids, one.num_shared) for one in reads if not one.is_whole]
        logits = self.runner.step(last_ids, lengths, jobs, shares)
        if reads:
            logits = torch.cat([logits[:num_running], keep_next(rows, reads, logits[num_running:])])
        self._sample(logits)

    def _admit(self) -> list[Prefill]:
        num_free = self.spec.slots - len(self._rows) - len(self._interrupted) if self._may_admit else 0
        taken = [self._queued.popitem(last=False)[0] for _ in range(min(num_free, len(self._queued)))]
        return admit(self._rows, taken, self.weights.version)

    def _sample(self, logits_NV: Tensor) -> None:
        """Draw a token for each row and remove finished rows."""
        rows = self._rows
        positions = rows.lengths[: len(rows)]
        failed = self._constraints.mask(rows.sequences, logits_NV)
        token_ids, logprobs, top = sample(logits_NV, *rows.sampling(), positions, rows.num_top())
        if not np.isfinite(logprobs).all():
            what = f"the model of policy_version {self.weights.version} gives logits that are not finite"
            raise FloatingPointError(what)
        rows.append(token_ids, logprobs, top)
        self._constraints.took(rows.sequences, token_ids, failed)
        self._tokens_generated += len(token_ids)
        is_stop = (token_ids[:, None] == self._eos_ids).any(1)
        for row, sequence in enumerate(rows.sequences):
            if sequence.stop_watch is not None and sequence.stop_watch.is_complete(int(token_ids[row])):
                is_stop[row] = True
        is_over = is_stop | (rows.lengths[: len(rows)] >= rows.limits[: len(rows)])
        is_over[[*failed]] = True
        for row in np.flatnonzero(is_over)[::-1].tolist():  # only rows above a removed row move
            if row in failed:
                self._refuse(row, failed[row])
            else:
                self._tell(row, "stop" if is_stop[row] else "length")
            if not rows.sequences[row].is_mixed and (kept := rows.keep(row)) >= 0:
                self.runner.cache.copy_slot(row, kept, int(rows.lengths[kept]) - 1)
            self._remove(row)

    def _refuse(self, row: int, refusal: Refused) -> None:
        self._hand_over()  # results precede the refusal
        sequence = self._rows.sequences[row]
        sequence.listener.refused(sequence.number, refusal)

    def _tell(self, row: int, then: str) -> None:
        sampled = self._rows.untold(row, then, self.runner.cache.routing)
        self._told.setdefault(self._rows.sequences[row].listener, []).append(sampled)

    def _remove(self, row: int) -> None:
        rows = self._rows
        for source, target in moves_after_removal(row, rows.lengths[: len(rows)]):
            rows.move(source, target)
            self.runner.cache.copy_slot(source, target, int(rows.lengths[target]))
        rows.sequences.pop()

    def _interrupt(self) -> int:
        """Interrupt all running sequences; return their number."""
        rows = self._rows
        for row, sequence in enumerate(rows.sequences):
            self._tell(row, "interrupted")
            sequence.token_ids = rows.token_ids[row, : rows.lengths[row]].copy()
            sequence.next_logits_V, sequence.kept_row, sequence.is_mixed = None, -1, False
            self._interrupted[sequence] = None
        num_interrupted = len(rows)
        rows.sequences.clear()
        return num_interrupted

    def _resume(self, runs: list[Sequence]) -> None:
        for sequence in reversed(runs):
            if sequence in self._interrupted:
                del self._interrupted[sequence]
                self._queued[sequence] = None
                self._queued.move_to_end(sequence, last=False)

    def _abort(self, wanted: set[Sequence]) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows.sequences[row] in wanted:
                self._tell(row, "abort")
                self._remove(row)
        for waiting in (self._queued, self._interrupted):
            for sequence in [one for one in wanted if one in waiting]:
                del waiting[sequence]
                empty = Sampled(sequence.number, NO_IDS, NO_LOGPROBS, [], "abort")
                self._told.setdefault(sequence.listener, []).append(empty)

    @torch.inference_mode(False)  # other threads load chunks into these tensors
    def _sleep(self, request: SleepRequest) -> TransferStats:
        started_s, num_bytes = time.perf_counter(), 0
        if "weights" in request.parts:
            self.weights.check_may_sleep()
        self._interrupt()
        if self.weights.swapping is not None:
            self._finish_commit()
        parts = set(request.parts) - set(self.weights.asleep)
        if "weights" in parts:
            num_bytes += self.weights.free()
        if "kv" in parts:
            if not self.spec.stays:
                num_bytes += self.runner.cache.num_bytes
                self.runner.take_cache(slots=0)
            self._rows.forget_kept()
            self.weights.set_asleep("kv")
        if not self.spec.stays:
            self.runner.drop_graphs()
            self.runner.loaded.give_back()
        return TransferStats(num_bytes=num_bytes, seconds=time.perf_counter() - started_s)

    @torch.inference_mode(False)
    def _wake(self, request: WakeRequest) -> TransferStats:
        """Wake parts; a part that fails stays asleep."""
        started_s, weights, runner, num_bytes = time.perf_counter(), self.weights, self.runner, 0
        sizes = {"weights": weights.num_bytes, "kv": runner.cache_bytes}
        asleep = [part for part in request.parts if part in weights.asleep]
        needed = 0 if self.spec.stays else sum(sizes[part] for part in asleep)
        free = runner.loaded.free_bytes()
        try:
            if needed > free:  # a CPU allocation can succeed without physical memory
                raise RuntimeError(f"{needed} bytes are needed, {free} are free on {runner.loaded.device}")
            if "weights" in asleep:
                num_bytes += weights.take()
            if "kv" in asleep:
                if not self.spec.stays:
                    runner.take_cache(runner.slots)
                    num_bytes += runner.cache.num_bytes
                weights.set_awake("kv")
        except RuntimeError as error:  # raised by torch
            raise Refused(
                507,
                f"{' and '.join(asleep)} cannot wake: {error}",
                rule="an engine frees its memory to sleep, and needs as much free memory to wake",
                way_out="have the trainer offload first, lower rollout.slots, or use a smaller model.",
            ) from error
        return TransferStats(num_bytes=num_bytes, seconds=time.perf_counter() - started_s)

    def _commit(self, request: CommitRequest, answer: Future[CommitResponse]) -> CommitResponse | None:
        served = self.weights.begin_commit(request)
        if served is not None:
            self._rows.forget_kept()  # chunks were loaded while the cache was awake
        else:
            self._committed = answer
            if request.interrupt != "wait" or not self._rows:
                self._finish_commit()
        return served

    def _finish_commit(self) -> None:
        assert self.weights.swapping is not None
        request, started_s, rows = self.weights.swapping[0], time.perf_counter(), self._rows
        num_interrupted = self._interrupt() if request.interrupt == "abort" else len(rows)
        self._hand_over()  # the client works during the swap
        self.weights.swap()
        rows.forget_kept()
        for row, sequence in enumerate(rows.sequences):
            sequence.marks.append((int(rows.lengths[row]), request.version))
            sequence.next_logits_V = None
            sequence.is_mixed = request.interrupt != "keep"  # keep mode recomputes the cache below
        if request.interrupt == "keep" and rows:
            # Recompute the KV cache, without the newest tokens.
            rows.keep_routing(self.runner.cache.routing)
            kept = [rows.token_ids[row, : rows.lengths[row] - 1] for row in range(len(rows))]
            self.runner.prefill([(row, ids, 0) for row, ids in enumerate(kept)])
        pause_s, digest = time.perf_counter() - started_s, self.weights.digest
        self._committed.set_result(
            CommitResponse(
                version=request.version, digest=digest, pause_s=pause_s, num_interrupted=num_interrupted
            )
        )
