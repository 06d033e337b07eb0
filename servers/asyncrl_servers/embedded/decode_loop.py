"""The engine loop: one thread that owns the model and decides what happens between two decode steps."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import Moved
from asyncrl.messages.calls import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    SleepRequest,
    WakeRequest,
)
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner, moves_after_removal
from asyncrl_servers.embedded.sequence import RunningSequence, StopWatch, sample
from asyncrl_servers.engine_app import TokenStream, Told, check_queue, check_request, hand_over

Answer = TypeVar("Answer")
TELL_S = 0.005
"""Least seconds between two updates of a stream: about a decode step of a usual model, several of a tiny
one.
"""


class Engine:
    """Continuous batching over slots. Row i of `_running` stands in slot i of the KV cache.

    Life: start() -> serving -> stop(). An exception in the loop is given to `on_crash`, which ends the
        process: no request is answered after it.
    Waits: the loop sleeps in its inbox when nothing runs and nothing that is queued may run (nothing is, or
        parts are asleep); every call wakes it. Callers sleep in the futures they got.
    Invariant: every sampled token is stamped with the version of the weights that computed it: weights and
        version change together in _finish_commit, between two decode steps, and nowhere else.
    """

    def __init__(
        self,
        spec: EmbeddedSpec,
        runner: Runner,
        weights: Weights,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.spec, self.runner, self.weights, self._on_crash = spec, runner, weights, on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: OrderedDict[str, RunningSequence] = OrderedDict()
        self._running: list[RunningSequence] = []
        self._committed: Future[CommitResponse]
        self._told: list[tuple[TokenStream, Told]] = []
        self._told_s = self._decode_s = 0.0
        self._is_stopping = False
        self._tokens_generated = 0
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in hand; what is running is aborted. Returns when it has ended."""
        self._inbox.put(self._stop)
        self._thread.join()

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        return EngineHealth(
            name=self.spec.name,
            kind="embedded",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running),
            num_queued=len(self._queued),
            tokens_generated=self._tokens_generated,
            device=str(self.runner.loaded.device),
            decode_s=self._decode_s,
            asleep=self.weights.asleep,
        )

    def submit(self, request: GenerateRequest, stream: TokenStream | None = None) -> Future[GenerateResponse]:
        """Queue a request. Raises Refused (400) if it can never run; the future may carry Refused (409, 503).
        `stream` gets all tokens but the last one, as they are sampled.
        """
        check_request(request, self.spec.max_length, self.runner.loaded.vocab_size)
        tokenizer, stop_watch = self.runner.loaded.tokenizer, None
        if request.stop:
            if tokenizer is None:
                what = f"request {request.request_id} has stop strings, but the model folder has no tokenizer"
                raise Refused(400, what, way_out="save the tokenizer beside the model.")
            resumed = request.prompt_ids[len(request.prompt_ids) - request.num_resumed :]
            stop_watch = StopWatch(request.stop, tokenizer, resumed)
        return self._ask(lambda answer: self._accept(RunningSequence(request, answer, stop_watch, stream)))

    def abort(self, request_ids: Iterable[str] | None) -> Future[list[str]]:
        """End these requests (None: all) with what they have; the future names those that were here."""
        wanted = None if request_ids is None else set(request_ids)
        return self._ask(lambda _: self._abort(wanted))

    def commit(self, request: CommitRequest) -> Future[CommitResponse]:
        """Swap between two decode steps; the future may carry Refused (409)."""
        return self._ask(lambda answer: self._commit(request, answer))

    def sleep(self, request: SleepRequest) -> Future[Moved]:
        """Abort what runs and free these parts; what is queued stays. The future may carry Refused (409)."""
        return self._ask(lambda _: self._sleep(request))

    def wake(self, request: WakeRequest) -> Future[Moved]:
        """Take memory for these parts; the future may carry Refused (400, 409, 507)."""
        return self._ask(lambda _: self._wake(request))

    def _ask(self, action: Callable[[Future[Answer]], Answer | None]) -> Future[Answer]:
        """Run `action` in the loop's thread; the future has its result, or the refusal that it raises. None:
        it will answer later.
        """
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

    # Called in the loop's thread alone.

    def _run(self) -> None:
        torch.set_num_threads(self.spec.threads)  # OpenMP counts threads by the thread that calls
        try:
            while not self._is_stopping:
                if not self._running and not (self._queued and self.weights.can_serve):
                    self._inbox.get()()
                self.turn()
        except Exception as error:
            if self._on_crash is None:
                raise
            self._on_crash(error)

    @torch.inference_mode()
    def turn(self) -> None:
        """Take what came in, admit, decode one step: the loop's body, for callers that have not started
        it.
        """
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        started_s = time.perf_counter()
        if self.weights.swapping is None and self.weights.can_serve and self._queued:
            self._admit()
        if self._running:
            last_ids = np.array([sequence.token_ids[-1] for sequence in self._running])
            lengths = np.array([sequence.length for sequence in self._running])
            self._sample(self.runner.decode(last_ids, lengths), 0)
            self._decode_s += time.perf_counter() - started_s
        if self._told and started_s - self._told_s >= TELL_S:
            self._told_s = started_s
            hand_over(self._told)
            self._told = []
        if self.weights.swapping is not None and not self._running:
            self._finish_commit()

    def _stop(self) -> None:
        self._abort(None)
        self._is_stopping = True

    def _accept(self, sequence: RunningSequence) -> None:
        request_id = sequence.request.request_id
        check_queue(request_id, [one.request.request_id for one in self._running], self._queued)
        self._queued[request_id] = sequence

    def _admit(self) -> None:
        """Move queued requests into free slots. A prompt that stands in a slot, read by the weights that
        serve, is copied from there.
        """
        first = len(self._running)
        # One mark: admitted under the weights that serve.
        rows = {one.prompt_ids: row for row, one in enumerate(self._running) if len(one.marks) == 1}
        jobs = []
        while self._queued and len(self._running) < self.spec.slots:
            _, sequence = self._queued.popitem(last=False)
            sequence.marks.append((0, self.weights.version))
            if sequence.prompt_ids not in rows:
                rows[sequence.prompt_ids] = len(self._running)
                jobs.append((len(self._running), sequence.prompt_ids))
            self._running.append(sequence)
        if jobs:
            for (row, _), logits_V in zip(jobs, self.runner.prefill(jobs), strict=True):
                self._running[row].prompt_logits_V = logits_V.clone()
        logits = []
        for row in range(first, len(self._running)):
            sequence = self._running[row]
            source = rows[sequence.prompt_ids]
            if source != row:
                self.runner.cache.copy_slot(source, row, len(sequence.prompt_ids))
                sequence.prompt_logits_V = self._running[source].prompt_logits_V
            assert sequence.prompt_logits_V is not None
            logits.append(sequence.prompt_logits_V)
        if logits:
            self._sample(torch.stack(logits), first)

    def _sample(self, logits_NV: Tensor, first: int) -> None:
        """Draw a token for the running sequences from number `first` on, and answer those that are done."""
        drawn, version = self._running[first:], self.weights.version
        token_ids, logprobs = sample(logits_NV, [one.request for one in drawn], [one.length for one in drawn])
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model of policy_version {version} gives logits that are not finite"
            )
        self._tokens_generated += len(drawn)
        tokens = list(zip(drawn, token_ids.tolist(), logprobs.tolist(), strict=True))
        for offset, (sequence, token_id, logprob) in reversed(list(enumerate(tokens))):
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            watch = sequence.stop_watch
            is_stop = watch is not None and watch.is_complete(token_id)
            if is_stop or token_id in self.runner.loaded.eos_ids:
                self._finish(first + offset, "stop")  # from the last: only rows above a removed one move
            elif len(sequence.token_ids) >= sequence.request.max_tokens:
                self._finish(first + offset, "length")
            elif sequence.stream is not None:
                self._told.append((sequence.stream, (token_id, logprob, version)))

    def _finish(self, row: int, reason: Literal["stop", "length", "abort"]) -> None:
        self._running[row].finish(reason)
        for source, target in moves_after_removal(row, [one.length for one in self._running]):
            self._running[target] = self._running[source]
            self.runner.cache.copy_slot(source, target, self._running[target].length)
        self._running.pop()

    def _abort(self, wanted: set[str] | None) -> list[str]:
        aborted = []
        for row in reversed(range(len(self._running))):
            request_id = self._running[row].request.request_id
            if wanted is None or request_id in wanted:
                self._finish(row, "abort")
                aborted.append(request_id)
        for request_id in [key for key in self._queued if wanted is None or key in wanted]:
            self._queued.pop(request_id).finish("abort")
            aborted.append(request_id)
        return aborted

    @torch.inference_mode(False)  # chunks are loaded into these tensors in other threads
    def _sleep(self, request: SleepRequest) -> Moved:
        started_s, num_bytes = time.perf_counter(), 0
        if "weights" in request.parts:
            self.weights.check_may_sleep()
        self._abort({sequence.request.request_id for sequence in self._running})
        if self.weights.swapping is not None:
            self._finish_commit()
        parts = set(request.parts) - set(self.weights.asleep)
        if "weights" in parts:
            num_bytes += self.weights.free()
        if "kv" in parts:
            num_bytes += self.runner.cache.num_bytes
            self.runner.take_cache(slots=0)
            self.weights.set_asleep("kv")
        self.runner.loaded.give_back()
        return Moved(num_bytes=num_bytes, seconds=time.perf_counter() - started_s)

    @torch.inference_mode(False)
    def _wake(self, request: WakeRequest) -> Moved:
        """A part that could not be woken is asleep as it was."""
        started_s, weights, runner, num_bytes = time.perf_counter(), self.weights, self.runner, 0
        must_restore = weights.must_restore(request.parts, restore=request.restore)
        sizes = {"weights": weights.num_bytes, "kv": runner.cache_bytes}
        asleep = [part for part in request.parts if part in weights.asleep]
        needed, free = sum(sizes[part] for part in asleep), runner.loaded.free_bytes()
        try:
            if needed > free:  # asked first, as a CPU's memory is promised before it is there
                raise RuntimeError(f"{needed} bytes are needed, {free} are free on {runner.loaded.device}")
            if must_restore or "weights" in asleep:
                num_bytes += weights.take(must_restore=must_restore)
            if "kv" in asleep:
                runner.take_cache(runner.slots)
                num_bytes += runner.cache.num_bytes
                weights.set_awake("kv")
        except RuntimeError as error:  # what torch raises; an answer, not a crash
            raise Refused(
                507,
                f"{' and '.join(asleep)} cannot wake: {error}",
                rule="an engine frees its memory to sleep, and needs as much free memory to wake",
                way_out="have the trainer offload first, lower rollout.slots, or use a smaller model.",
            ) from error
        return Moved(num_bytes=num_bytes, seconds=time.perf_counter() - started_s)

    def _commit(self, request: CommitRequest, answer: Future[CommitResponse]) -> CommitResponse | None:
        served = self.weights.begin_commit(request)
        if served is None:
            self._committed = answer
            if request.interrupt != "wait" or not self._running:
                self._finish_commit()
        return served

    def _finish_commit(self) -> None:
        """Swap and answer: new weights and new version for all that runs."""
        assert self.weights.swapping is not None
        request, started_s = self.weights.swapping[0], time.perf_counter()
        # Over weights without content nothing runs, and what waits for content goes on waiting.
        is_abort = request.interrupt == "abort" and self.weights.has_content
        num_interrupted = len(self._abort(None)) if is_abort else len(self._running)
        self.weights.swap()
        for sequence in self._running:
            sequence.marks.append((len(sequence.token_ids), request.version))
        if request.interrupt == "keep" and self._running:
            # Recompute the KV cache; the newest token of each is not in it.
            kept = [(*one.prompt_ids, *one.token_ids[:-1]) for one in self._running]
            self.runner.prefill(list(enumerate(kept)))
        pause_s, digest = time.perf_counter() - started_s, self.weights.digest
        self._committed.set_result(
            CommitResponse(
                version=request.version, digest=digest, pause_s=pause_s, num_interrupted=num_interrupted
            )
        )
