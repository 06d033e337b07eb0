"""The engine loop: one thread that owns the model and decides what happens between two decode steps. Knows no
HTTP.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from asyncrl.http import Refused
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
    WakeRequest,
)
from asyncrl_servers.checks import check_request, commit_waits_already, here_already, too_many_queued
from asyncrl_servers.embedded.inbox import Inbox, admit
from asyncrl_servers.embedded.loaded_weights import StagedWeights, Weights
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.sequence import (
    FinishReason,
    RunningRows,
    SamplingRows,
    Sequence,
    StopWatch,
    sample,
)
from asyncrl_servers.embedded.sleep_mode import SleepMode
from asyncrl_servers.streaming import TokenStream, hand_over

TELL_S = 0.005
"""Streams are told at most so often: every decode step of a model of some size, every few of a tiny one."""


class Engine:
    """Continuous batching over slots.

    Life:       start() -> serving -> stop(). An exception in the loop answers all requests with an error and
    calls
                `on_crash` once.
    Waits:      the loop sleeps in its inbox when nothing runs and nothing that is queued may run (nothing is,
    or parts are
                asleep); submit, abort, commit, sleep, wake and stop wake it. Callers sleep in the futures
                they got; each is answered, at the latest by the crash.
    Invariant:  every sampled token is stamped with the version of the weights that computed it: weights and
    version
                change together in _swap, between two decode steps, and nowhere else.
    """

    def __init__(
        self,
        runner: Runner,
        weights: Weights,
        *,
        name: str,
        slots: int,
        max_length: int,
        max_queued: int,
        threads: int = 1,
        on_crash: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        self.runner, self.weights, self.name = runner, weights, name
        self.resting = SleepMode(runner, weights)
        self.slots, self.max_length, self.max_queued, self.threads = slots, max_length, max_queued, threads
        self._on_crash = on_crash
        self._inbox = Inbox()
        self._queued: OrderedDict[str, Sequence] = OrderedDict()
        self._rows = RunningRows(slots, max_length)
        self._draining: tuple[CommitRequest, StagedWeights, Future[CommitResponse]] | None = None
        self._is_stopping = False
        self._tokens_generated = 0
        self._decode_s = self._told_s = 0.0
        self._is_eos = np.zeros(runner.loaded.vocab_size, dtype=np.bool_)
        self._is_eos[[token for token in runner.loaded.eos_ids if token < runner.loaded.vocab_size]] = True
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in hand; what is running is aborted. Returns when it has ended."""
        self._inbox.post(self._stop, Future())
        self._thread.join()

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        return EngineHealth(
            name=self.name,
            kind="embedded",
            policy_version=self.weights.version,
            slots=self.slots,
            max_length=self.max_length,
            num_running=self._rows.n,
            num_queued=len(self._queued),
            tokens_generated=self._tokens_generated,
            device=str(self.runner.loaded.device),
            decode_s=self._decode_s,
            asleep=self.resting.state.asleep,
        )

    def submit(self, request: GenerateRequest, stream: TokenStream | None = None) -> Future[GenerateResponse]:
        """Queue a request. Raises Refused (400) at once if it can never run; the future may carry Refused too
        (409, 503).

        `stream` is told of tokens as they are sampled, but for the last one; what it was told is left out of
        the answer.
        """
        self._check(request)
        tokenizer = self.runner.loaded.tokenizer
        resumed = request.prompt_ids[len(request.prompt_ids) - request.num_resumed :]
        sequence = Sequence(
            request, StopWatch(request.stop, tokenizer, resumed) if request.stop else None, stream
        )
        self._inbox.post(lambda: self._accept(sequence), sequence.answer)
        return sequence.answer

    def abort(self, request_ids: Iterable[str] | None) -> Future[list[str]]:
        """End these requests (None: all) with what they have; the future names those that were here."""
        wanted = None if request_ids is None else set(request_ids)
        return self._inbox.ask(lambda: self._abort(wanted))

    def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Stage weights while generation goes on; blocks the calling thread. Raises Refused."""
        staged = self.weights.stage(request)
        return PrepareResponse(version=staged.version, digest=staged.digest)

    def commit(self, request: CommitRequest) -> Future[CommitResponse]:
        """Swap between two decode steps; the future may carry Refused (409, 500)."""
        answer: Future[CommitResponse] = Future()
        answer.set_running_or_notify_cancel()
        self._inbox.post(lambda: self._commit(request, answer), answer)
        return answer

    def sleep(self, request: SleepRequest) -> Future[Moved]:
        """Abort what runs and free these parts; what is queued stays. The future may carry Refused (409)."""
        return self._inbox.ask(lambda: self._sleep(request))

    def wake(self, request: WakeRequest) -> Future[Moved]:
        """Take memory for these parts again; the future may carry Refused (409), or RuntimeError if there is
        none.
        """
        return self._inbox.ask(lambda: self._wake(request))

    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        """Load a chunk of a push into weights without content; blocks the calling thread. Raises Refused."""
        return self.resting.load_chunk(request)

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self.max_length, self.runner.loaded.vocab_size)
        if request.stop and self.runner.loaded.tokenizer is None:
            raise Refused(
                400,
                f"request {request.request_id} has stop strings, but the model folder has no tokenizer",
                way_out="save the tokenizer beside the model.",
            )

    # Called in the loop's thread alone.

    def _run(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP counts threads by the thread that calls
        try:
            while not self._is_stopping:
                if self._rows.n == 0 and not (self._queued and self.resting.state.can_serve):
                    self._inbox.wait_one()
                self.turn()
        finally:
            if not self._is_stopping:
                self._crash(sys.exception())

    @torch.inference_mode()
    def turn(self) -> None:
        """Take what came in, admit, decode one step. The loop's body; callers other than the loop must not
        have started it.
        """
        self._inbox.do_all_nowait()
        if self._draining is None and self.resting.state.can_serve:
            self._admit()
        self._step()
        if self._rows.num_streams:
            self._tell()
        if self._draining is not None and self._rows.n == 0:
            self._finish_commit()

    def _crash(self, error: BaseException | None) -> None:
        self._on_crash(
            error
        )  # first: it ends the process, and who waits must find it gone, not alive and answering 500
        self._inbox.crash(error)
        self._inbox.refuse(sequence.answer for sequence in (*self._rows.sequences, *self._queued.values()))
        if self._draining is not None:
            self._inbox.refuse([self._draining[2]])

    def _stop(self) -> None:
        self._abort(None)
        self._is_stopping = True

    def _accept(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        if request_id in self._queued or any(
            running.request.request_id == request_id for running in self._rows.sequences
        ):
            sequence.answer.set_exception(here_already(request_id))
        elif len(self._queued) >= self.max_queued:
            sequence.answer.set_exception(too_many_queued(self.max_queued))
        else:
            self._queued[request_id] = sequence

    def _admit(self) -> None:
        """Move queued requests into free slots; a prompt shared by several is prefilled once."""
        first = self._rows.n
        num_new = min(self.slots - first, len(self._queued))
        if num_new == 0:
            return
        started = time.perf_counter()
        admitted = [self._queued.popitem(last=False)[1] for _ in range(num_new)]
        self._sample(admit(self.runner, self._rows, admitted, self.weights.version), first)
        self._decode_s += time.perf_counter() - started

    def _step(self) -> None:
        """One decode step of everything that runs."""
        n = self._rows.n
        if n == 0:
            return
        started = time.perf_counter()
        self._sample(self.runner.decode(self._rows.last_ids[:n], self._rows.lengths[:n]), 0)
        self._decode_s += time.perf_counter() - started

    def _tell(self) -> None:
        """Tell the streams what is new: one wake-up of the event loop for all of them."""
        now_s = time.perf_counter()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            hand_over(self._rows.tell_nowait())

    def _sample(self, logits_NV: Tensor, first: int) -> None:
        """Draw a token for rows first..n-1 and answer those that are done."""
        rows = self._rows
        drawn = slice(first, rows.n)
        settings = SamplingRows(
            rows.temperatures[drawn], rows.top_ps[drawn], rows.seeds[drawn], rows.lengths[drawn]
        )
        token_ids, logprobs = sample(logits_NV, settings)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model of policy_version {self.weights.version} gives logits that are not finite"
            )
        rows.append(first, token_ids, logprobs)
        self._tokens_generated += len(token_ids)
        is_stop = self._is_eos[token_ids]
        for row in range(first, rows.n):
            watch = rows.sequences[row].stop_watch
            if watch is not None and watch.is_complete(int(token_ids[row - first])):
                is_stop[row - first] = True
        is_done = is_stop | (rows.counts[drawn] >= rows.max_tokens[drawn])
        for offset in np.flatnonzero(is_done)[
            ::-1
        ].tolist():  # from the last: only rows above a removed one move
            self._finish(first + offset, "stop" if is_stop[offset] else "length")

    def _finish(self, row: int, reason: FinishReason) -> None:
        rows = self._rows
        rows.sequences[row].finish(*rows.sampled(row), reason)
        for source, target in rows.remove(row):
            self.runner.cache.copy_slot(source, target, int(rows.lengths[target]))

    def _abort(self, wanted: set[str] | None) -> list[str]:
        aborted = []
        for row in reversed(range(self._rows.n)):
            request_id = self._rows.sequences[row].request.request_id
            if wanted is None or request_id in wanted:
                self._finish(row, "abort")
                aborted.append(request_id)
        for request_id in [key for key in self._queued if wanted is None or key in wanted]:
            self._queued.pop(request_id).finish([], [], "abort")
            aborted.append(request_id)
        return aborted

    def _sleep(self, request: SleepRequest) -> Moved:
        started = time.perf_counter()
        self.resting.check_may_free(request.parts)
        self._abort({sequence.request.request_id for sequence in self._rows.sequences})
        if self._draining is not None:
            self._finish_commit()
        num_bytes = self.resting.free(request.parts)
        return Moved(num_bytes=num_bytes, seconds=time.perf_counter() - started)

    def _wake(self, request: WakeRequest) -> Moved:
        started = time.perf_counter()
        num_bytes = self.resting.take(request.parts, restore=request.restore)
        return Moved(num_bytes=num_bytes, seconds=time.perf_counter() - started)

    def _commit(self, request: CommitRequest, answer: Future[CommitResponse]) -> None:
        has_content = self.resting.state.has_content
        try:
            self.resting.state.check_weights_awake(f"policy_version {request.version} cannot be committed")
            if self._draining is not None:
                raise commit_waits_already(self._draining[0].version)
            if not has_content and self.resting.push.version == request.version:
                self.resting.commit(request)
                has_content = True
            # The digest last: at the first commit it is not computed yet, which takes long, and decoding
            # stands still here.
            if (
                has_content
                and request.version == self.weights.version
                and request.digest == self.weights.digest
            ):
                answer.set_result(
                    CommitResponse(
                        version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=0
                    )
                )
                return
            staged = self.weights.staged_for(request.version, request.digest)
        except Refused as error:
            answer.set_exception(error)
            return
        self._draining = (request, staged, answer)
        if request.interrupt != "wait" or self._rows.n == 0:
            self._finish_commit()

    def _finish_commit(self) -> None:
        """Swap and answer. Decoding goes on afterwards in any case; if the swap fails, over the old
        weights.
        """
        assert self._draining is not None
        request, staged, answer = self._draining
        self._draining = None
        started = time.perf_counter()
        # Over weights without content nothing runs, and what waits for content goes on waiting.
        is_abort = request.interrupt == "abort" and self.resting.state.has_content
        num_interrupted = len(self._abort(None)) if is_abort else self._rows.n
        try:
            self._swap(staged)
        except RuntimeError as error:
            answer.set_exception(error)
            return
        if request.interrupt == "keep":
            self._prefill_running()
        pause_s = time.perf_counter() - started
        answer.set_result(
            CommitResponse(
                version=staged.version,
                digest=self.weights.digest,
                pause_s=pause_s,
                num_interrupted=num_interrupted,
            )
        )

    def _swap(self, staged: StagedWeights) -> None:
        """New weights, new version, no prompt remembered. If it raises, the old ones serve on."""
        self.weights.swap(staged)
        self.runner.prompts.clear()
        for row, sequence in enumerate(self._rows.sequences):
            sequence.marks.append((int(self._rows.counts[row]), staged.version))

    def _prefill_running(self) -> None:
        """Recompute the KV cache of all running rows; their newest token is not in it."""
        rows = self._rows
        jobs = []
        for row, sequence in enumerate(rows.sequences):
            sampled = rows.token_ids[row, : rows.counts[row] - 1].tolist()
            jobs.append((row, (*sequence.prompt_ids, *sampled)))
        if jobs:
            self.runner.prefill(jobs)
