"""Engine loop: one thread owns the model and schedules decode steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice, pairwise
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused, fail
from asyncrl.messages import engine_api as api
from asyncrl.messages.codec import Asked
from asyncrl.models.profiling import StepProfiler
from asyncrl.weights.aside import transfer_stats
from asyncrl.weights.ipc import limit_memory
from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel, PlainDecoder
from asyncrl_servers.embedded.fused_decode import FusedSteps, why_not_fused
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.row_adapters import Adapter
from asyncrl_servers.embedded.runner import DecodeGraphs, Runner
from asyncrl_servers.embedded.scheduler import Scheduler, Sequence
from asyncrl_servers.embedded.text_scores import ScoredText, Scorer
from asyncrl_servers.engine_routes import Listener, no_adapter

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
STREAM_S = 0.005
"""About one decode step."""
PROFILED_ITERATIONS = 100
"""Decode steps of a profile: about as many operators as one step of the trainer has."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""Maximum difference to the model's own logits, relative to the largest."""


class Engine:
    """Continuous batching over slots.

    Life: start() -> serving -> stop(). A loop exception ends the process through
        `on_crash`.
    Waits: the loop sleeps in its inbox; callers wait on futures.
    Invariant: weights and version of an adapter change together, in _finish_commit,
        between decode steps. Requests of other adapters do not notice.
    """

    def __init__(
        self,
        spec: EmbeddedSpec,
        runner: Runner,
        weights: Weights,
        on_crash: Callable[[BaseException], None] | None = None,
        scorer: Scorer | None = None,
        *,
        keeps_addresses: bool = False,
    ) -> None:
        """`keeps_addresses`: graphs outlive a sleep."""
        self.spec = spec
        self.runner = runner
        self._weights = {"": weights}
        """By adapter. Replaced, not changed: other threads read it."""
        self._on_crash = on_crash
        self._scorer = scorer
        self._keeps_addresses = keeps_addresses
        self._scheduler = Scheduler(spec, runner)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._committed: dict[Weights, Future[api.CommitResponse]] = {}
        """Commits that are not answered yet."""
        self._streamed_s = self._decode_s = 0.0
        self._is_stopping = False
        self._profiler = StepProfiler(
            spec.profile_dir, spec.name, spec.profile_steps, runner.loaded.device
        )
        self._num_profiled = 0
        self._thread = threading.Thread(
            target=self._loop, name="engine-loop", daemon=True
        )

    # Methods for any thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the step, abort all requests and join the loop."""
        self._inbox.put(self._stop)
        self._thread.join()

    @property
    def weights(self) -> Weights:
        """Of the run's own adapter, or all weights."""
        return self._weights[""]

    def weights_of(self, adapter: str, *, for_request: bool = False) -> Weights:
        """Return an adapter's weights. Raises Refused (404), and for a request to
        another adapter than the run's own Refused (409) before its push.
        """
        weights = self._weights.get(adapter)
        if weights is None:
            raise no_adapter(adapter, self._weights, 404)
        if for_request and adapter and not weights.has_content:
            raise no_adapter(adapter, self._weights, 409)
        return weights

    def health(self) -> api.EngineHealth:
        scheduler = self._scheduler
        return api.EngineHealth(
            policy_version=self.weights.version,
            num_running=len(scheduler.rows) + len(scheduler.interrupted),
            num_queued=len(scheduler.queued),
            tokens_generated=scheduler.num_generated,
            decode_s=self._decode_s,
            kv_fraction=len(scheduler.rows) / self.spec.slots,
            asleep=self.weights.asleep,
            note=self.runner.note,
        )

    def run(self, asked: Asked, listener: Listener) -> Sequence:
        """Check a request and return its sequence for submit(). Raises Refused (400)."""
        return self._scheduler.new_sequence(asked, listener)

    def submit(self, runs: Iterable[Sequence]) -> None:
        self._inbox.put(partial(self._submit, list(runs)))

    def resume(self, runs: Iterable[Sequence]) -> None:
        self._inbox.put(partial(self._scheduler.resume, list(runs)))

    def abort(self, runs: Iterable[Sequence]) -> None:
        self._inbox.put(partial(self._scheduler.abort, set(runs)))

    def commit(self, request: api.CommitRequest) -> Future[api.CommitResponse]:
        """Swap weights between decode steps. Raises Refused (409)."""
        return self.ask(partial(self._commit, request))

    def open_adapter(self, request: api.OpenAdapterRequest) -> Future[api.OpenAdapters]:
        """Add an adapter without content. Raises Refused (400, 409, 422)."""
        return self.ask(partial(self._open, request))

    def drop_adapter(self, request: api.DropAdapterRequest) -> Future[api.OpenAdapters]:
        """End an adapter's requests and forget it. Raises Refused (404)."""
        return self.ask(partial(self._drop, request))

    def score(self, request: api.ScoreRequest) -> Future[api.ScoreResponse]:
        """Score a text as soon as its weights serve. Raises Refused (400, 404, 409, 501)."""
        scorer = self._scorer
        if scorer is None:
            raise Refused(
                501,
                f"{self.spec.name} scores no texts",
                rule="an engine with score_slots above 0 does",
            )
        wanted_ids = scorer.wanted_ids(request)

        def add(answer: Future[api.ScoreResponse]) -> None:
            weights = self.weights_of(request.adapter, for_request=True)
            _refuse_role(weights, "")
            scorer.add(ScoredText(request, wanted_ids, weights, answer))

        return self.ask(add)

    def sleep(self) -> Future[api.TransferStats]:
        """Interrupt requests and free all memory."""
        return self.ask(lambda answer: answer.set_result(self._sleep()))

    def wake(self, request: api.WakeRequest) -> Future[api.TransferStats]:
        """Allocate memory for these parts. Raises Refused (507)."""
        return self.ask(lambda answer: answer.set_result(self._wake(request)))

    def ask(self, action: Callable[[Future[Answer]], None]) -> Future[Answer]:
        """Run `action`, which answers or raises Refused, in the loop's thread."""
        answer: Future[Answer] = Future()
        # A caller that leaves cancels its future. A running future cannot be cancelled,
        # so set_result never raises in the engine's thread.
        answer.set_running_or_notify_cancel()

        def act() -> None:
            try:
                action(answer)
            # Other errors end the loop, and with it the process: they leave weights or
            # cache in an unknown state.
            except Refused as error:
                answer.set_exception(error)

        self._inbox.put(act)
        return answer

    # Methods for the loop's thread only.

    def _loop(self) -> None:
        # OpenMP counts threads per calling thread
        torch.set_num_threads(self.spec.threads)
        try:
            while not self._is_stopping:
                # Everything that can give it work (a request, a resume, a commit, a
                # wake) comes through the inbox.
                if not self._scheduler.has_work:
                    self._inbox.get()()
                # Also after an action without work: a commit may be due, and results
                # wait for hand_over.
                self.iterate()
            self._profiler.end()
        except Exception as error:
            if self._on_crash is None:
                raise
            self._on_crash(error)

    @torch.inference_mode()
    def iterate(self) -> None:
        # All at once: requests of one frame are admitted in the same step, and a
        # group's prompt is read once.
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        if self._scorer is not None:
            self._scorer.run()
        started_s = time.perf_counter()
        if self._scheduler.has_work:
            self._profile()
            self._scheduler.step()
            self._decode_s += time.perf_counter() - started_s
        if started_s - self._streamed_s >= STREAM_S:
            self._streamed_s = started_s
            self._scheduler.report_streams()
        # interrupt=wait: the last running row has ended in this iteration.
        for weights in [*self._committed]:
            if not self._scheduler.rows.of(weights):
                self._finish_commit(weights)
        # At the end: tokens of a step leave as one frame for each controller.
        self._scheduler.hand_over()

    def _profile(self) -> None:
        """Profile the first decode steps with the weights from which a chosen step of
        the trainer begins. Writing it stops decoding for some seconds.
        """
        if self._profiler.enter(self.weights.version + 1):
            self._num_profiled = 0
        if self._num_profiled == PROFILED_ITERATIONS:
            self._profiler.end()
        self._num_profiled += 1

    def _stop(self) -> None:
        own = self._scheduler
        own.abort({*own.rows.sequences, *own.queued, *own.interrupted})
        self._is_stopping = True

    @torch.inference_mode(False)  # other threads load chunks into these tensors
    def _sleep(self) -> api.TransferStats:
        started_s = time.perf_counter()
        # First: the rest frees memory that a decode step would read.
        for weights in self._weights.values():
            self._scheduler.interrupt(weights)
            # The caller of a commit that still waits for rows gets its answer; the
            # weights are gone right after.
            if weights in self._committed:
                self._finish_commit(weights)
            self._scheduler.rows.forget_kept(weights)
        num_bytes = sum(weights.free() for weights in self._weights.values())
        if not self.spec.stays:
            # Graphs hold memory of the device, and addresses that are freed here.
            if self.runner.graphs is not None and not self._keeps_addresses:
                self.runner.graphs.drop()
            for reader in filter(None, (self.runner, self._scorer)):
                num_bytes += reader.free_cache()
            self.runner.loaded.give_back()
        return transfer_stats(num_bytes, started_s)

    @torch.inference_mode(False)
    def _wake(self, request: api.WakeRequest) -> api.TransferStats:
        started_s = time.perf_counter()
        num_bytes = 0
        parts = set(request.parts) & set(self.weights.asleep)
        # The run's own last: a wake that failed in the middle is then repeated for all.
        states = [*reversed(self._weights.values())]
        try:
            if "weights" in parts:
                num_bytes += sum(weights.take() for weights in states)
            if "kv" in parts:
                if not self.spec.stays:
                    for reader in filter(None, (self.runner, self._scorer)):
                        num_bytes += reader.allocate_cache()
                for weights in states:
                    weights.set_awake("kv")
        # The part stays asleep, as /health reports it, so the wake can be repeated.
        except (OSError, RuntimeError) as error:
            way_out = "lower rollout.slots, or use a smaller model."
            raise Refused(
                507, f"{' and '.join(parts)} cannot wake: {error}", way_out=way_out
            ) from error
        return transfer_stats(num_bytes, started_s)

    def _commit(
        self, request: api.CommitRequest, answer: Future[api.CommitResponse]
    ) -> None:
        weights = self.weights_of(request.adapter)
        served = weights.begin_commit(request)
        if served is not None:
            # chunks were loaded while the cache was awake
            self._scheduler.rows.forget_kept(weights)
            answer.set_result(served)
            return
        # Answered by _finish_commit: now, or when the last row has ended.
        self._committed[weights] = answer
        if request.interrupt != "wait" or not self._scheduler.rows.of(weights):
            self._finish_commit(weights)

    def _finish_commit(self, weights: Weights) -> None:
        assert weights.swapping is not None
        request = weights.swapping[0]
        scheduler = self._scheduler
        started_s = time.perf_counter()
        num_interrupted = (
            scheduler.interrupt(weights)
            if request.interrupt == "abort"
            else len(scheduler.rows.of(weights))
        )
        scheduler.hand_over()  # the client works during the swap
        # Nothing is sampled between swap and weights_changed, so no token can carry the
        # wrong version.
        weights.swap()
        scheduler.weights_changed(weights, rereads=request.interrupt == "keep")
        answer = api.CommitResponse(
            version=request.version,
            digest=weights.digest,
            pause_s=time.perf_counter() - started_s,
            num_interrupted=num_interrupted,
        )
        self._committed.pop(weights).set_result(answer)

    def _submit(self, runs: list[Sequence]) -> None:
        for run in runs:
            try:
                run.weights = self.weights_of(run.request.adapter, for_request=True)
                _refuse_role(run.weights, run.request.role)
                self._scheduler.submit([run])
            except Refused as refusal:
                run.listener.on_refused(run.number, refusal)

    @torch.inference_mode(False)  # other threads load chunks into these tensors
    def _open(
        self, request: api.OpenAdapterRequest, answer: Future[api.OpenAdapters]
    ) -> None:
        name, most, opened = request.adapter, self.spec.max_adapters, [*self._weights]
        if name in opened or len(opened) > most:
            raise Refused(
                409,
                f"adapter {name!r} cannot be opened: open are {opened}",
                rule=f"{most} adapters with different names besides the run's own",
                way_out="drop one.",
            )
        loaded, asleep = self.runner.loaded, self.weights.asleep
        try:
            weights = Weights(loaded, self.spec, request, asleep)
        except ConfigError as error:
            raise Refused(400, error.what, rule=error.rule) from None
        adapters = [*loaded.adapters.values(), *weights.adapters.values()]
        if partial_layer := loaded.partial_layer(adapters):
            raise Refused(
                422,
                f"adapter {name!r} cannot be opened: {partial_layer} gets some tokens of a call only",
                rule=WHOLE_CALLS,
                way_out="leave the layer out of the targets of all adapters.",
            )
        self._weights = {**self._weights, name: weights}
        answer.set_result(api.OpenAdapters(names=[*self._weights]))

    def _drop(
        self, request: api.DropAdapterRequest, answer: Future[api.OpenAdapters]
    ) -> None:
        dropped = self.weights_of(request.adapter)
        kept = {name: one for name, one in self._weights.items() if one is not dropped}
        self._weights = kept
        self._scheduler.forget(dropped)
        self.runner.joined.clear()
        if self._scorer is not None:
            self._scorer.joined.clear()
            self._scorer.forget(dropped)
        # A commit that waited for its rows is answered at the end of this iteration.
        answer.set_result(api.OpenAdapters(names=[*kept]))


WHOLE_CALLS = "with several adapters, their layers get all tokens of a call"


def _refuse_role(weights: Weights, role: str) -> None:
    """Raise Refused (404) if the weights have no such adapter."""
    known = [*weights.adapters] or [""]
    if role not in known:
        raise Refused(
            404,
            f"role {role!r} has no adapter here; known are {known}",
            rule="a request names a role of the engine's start, or none if it has none",
        )


def build_engine(
    spec: EmbeddedSpec,
    on_crash: Callable[[BaseException], None] | None = None,
) -> Engine:
    """Return a checked engine. On failure print an ErrorBody line and exit with 1."""
    if spec.max_adapters and spec.adapters is None:
        rule = "other adapters are added to weights that no push changes"
        fail(f"max_adapters={spec.max_adapters} without adapters", rule=rule)
    torch.set_num_threads(spec.threads)
    try:
        loaded = LoadedModel(spec)
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)
    adapters = [*loaded.adapters.values()]
    if len(adapters) > 1 and (partial_layer := loaded.partial_layer(adapters)):
        fail(
            f"{partial_layer} gets some tokens of a call only",
            rule=WHOLE_CALLS,
            way_out="leave the layer out of the targets of trainer.roles.",
        )
    runner = Runner(
        loaded,
        spec.slots + spec.num_kept,
        spec.max_length,
        is_exact=loaded.is_exact,
    )
    # Before the checks, so that they check the steps that will serve.
    is_fused = use_fused(runner, spec)
    # On the loaded model and this machine: which kernels run depends on both, and no
    # library promises their bits.
    with loaded.short_windows(spec.max_length):
        if runner.is_exact:
            # Products with adapters must not depend on the batch either.
            with loaded.random_adapters(spec) as adapters:
                check_determinism(runner, spec, adapters)
        check_same_model(runner)
    if loaded.device.type == "cuda" and runner.plain is not None and not is_fused:
        runner.graphs = DecodeGraphs(runner, runner.plain, spec.slots)
    if runner.graphs is not None and spec.max_adapters:
        log.info("steps with other adapters than the run's own use no CUDA graphs")
    scorer = Scorer(loaded, spec, runner.is_exact) if spec.score_slots else None
    weights = Weights(loaded, spec)
    # Initial weights under adapters come back at other addresses.
    keeps = is_fused and spec.moves and not loaded.adapters
    is_fixed = keeps and fix_addresses(runner, weights, spec)
    engine = Engine(spec, runner, weights, on_crash, scorer, keeps_addresses=is_fixed)
    if isinstance(runner.graphs, FusedSteps):
        runner.graphs.capture_all()
    return engine


def use_fused(runner: Runner, spec: EmbeddedSpec) -> bool:
    """Let the runner decode by fused steps, if the spec wants them and they know the
    model.

    Weights are merged before Weights keeps the initial ones, so that they exist once.
    """
    if not spec.fused_decode:
        return False
    if reason := why_not_fused(runner):
        log.warning("%s: decode steps are not fused: %s", spec.name, reason)
        return False
    runner.graphs = FusedSteps(runner, cast(PlainDecoder, runner.plain), spec.slots)
    return True


def fix_addresses(runner: Runner, weights: Weights, spec: EmbeddedSpec) -> bool:
    """Let weights and KV cache keep their addresses over sleeps; return whether they do."""
    try:
        weights.fix()
        runner.fix_cache()
    except (MemoryError, OSError, RuntimeError) as error:
        log.warning(
            "%s: decode steps are captured again after each sleep: no memory at fixed addresses: %s",
            spec.name,
            error,
        )
        return False
    finally:
        # torch does not count this memory, and `share` limits all of the engine's.
        taken = 0
        if weights.fixed is not None:
            taken += weights.fixed.memory.num_bytes
        if runner.memory is not None:
            taken += runner.memory.num_bytes
        limit_memory(runner.loaded.device, spec.share, taken)
    return True


@torch.inference_mode()
def check_same_model(runner: Runner) -> None:
    """End the process if logits differ from the model's own."""
    loaded = runner.loaded
    ids, reference_TV = loaded.probe_ids, loaded.reference_logits
    num_prefilled = max(1, len(ids) - 2)
    ends = sorted({max(1, num_prefilled // 2), num_prefilled})
    # Two parts of the prompt and two decoded tokens, so that all paths are compared: a
    # fresh prefill, a continued one and decoding.
    ours = [
        runner.step([(0, ids[:end], start)])[0] for start, end in pairwise([0, *ends])
    ]
    ours += [
        _decoded(runner.step, 1, ids[at], at + 1)
        for at in range(num_prefilled, len(ids))
    ]
    lasts = torch.tensor([*ends, *range(num_prefilled + 1, len(ids) + 1)]) - 1
    difference = (torch.stack(ours).float() - reference_TV[lasts]).abs().max().item()
    limit = TOLERANCE[loaded.dtype] * max(1.0, reference_TV.abs().max().item())
    # `not <=`: NaN is a difference too.
    if not difference <= limit:
        fail(
            f"logits over the slot cache differ from {type(loaded.model).__name__}'s own by "
            f"{difference:.4g}, {limit:.4g} is the limit",
            way_out="set rollout.engine=vllm: the embedded engine does not reproduce this model.",
        )


@torch.inference_mode()
def check_determinism(
    runner: Runner, spec: EmbeddedSpec, adapters: list[Adapter]
) -> None:
    """Measure whether logits are batch-invariant. If they are not, end the process, or
    for deterministic=auto continue without exact mode, and note it.
    """
    cause = find_dependence(runner, adapters)
    runner.joined.clear()
    if not cause:
        return
    what = f"a sequence's logits depend on {cause} ({runner.loaded.dtype})"
    if spec.deterministic == "auto":
        runner.is_exact = False
        runner.note = f"rollout.deterministic: auto is false here: {what}"
        return
    ways = ["rollout.deterministic=auto"]
    if runner.loaded.dtype != torch.float32:
        ways.append("model.dtype=float32")
    if spec.threads > 1:
        ways.append("rollout.threads=1")
    fail(
        what,
        rule="rollout.deterministic=true: tokens depend only on prompt, seed and weights",
        way_out=f"set {' or '.join(ways)}.",
    )


def find_dependence(runner: Runner, adapters: list[Adapter]) -> str:
    """Return what a sequence's logits depend on besides its tokens, or an empty text. It
    has the first of the `adapters`; the sequences before it have all of them.
    """
    total = min(max(40, len(runner.loaded.probe_ids)), runner.max_length)
    slots = runner.slots
    ids = [(5 * i + 1) % runner.loaded.vocab_size for i in range(total)]
    first = total - min(3, total - 1)

    def logits(n: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits in slot n - 1: of each of the last tokens, decoded; and of the
        last one after a prefill of all tokens, of the second half, and beside equal
        texts.
        """
        slot = n - 1
        owners = [*islice(cycle(adapters), slot), *adapters[:1]]
        read = partial(runner.step, adapters=owners)
        # Prompts of other lengths in all slots below, so that rows, padding and
        # stretches differ from a single sequence's.
        others = [(other, ids[: 1 + other % min(4, total)], 0) for other in range(slot)]
        decoded = [read([*others, (slot, ids[:first], 0)])[-1]]
        decoded += [_decoded(read, n, ids[at], at + 1) for at in range(first, total)]
        prefilled = [read([(slot, ids, 0), *others])[0]]
        prefilled.append(read([*others, (slot, ids, total // 2)])[-1])
        # Neighbors that read the same positions share a stretch.
        equal = [(other, ids, 0) for other in range(max(0, n - 4), n)]
        prefilled.append(read(equal)[-1])
        return decoded, prefilled

    alone, _ = logits(1)
    # 17 needs a second block of EXACT_ROWS and a third chunk of rows.
    for n in sorted({1, min(2, slots), min(17, slots), slots}):
        decoded, prefilled = logits(n)
        if not all(map(torch.equal, decoded, alone)):
            others = f"the number of others in the batch (0 and {n - 1})"
            return others if n > 1 else "chance (two equal steps differ)"
        if not all(torch.equal(one, alone[-1]) for one in prefilled):
            return "how a token is read: decoded alone, or prefilled with its prompt"
    return ""


def _decoded(step: Callable[..., Tensor], n: int, token_id: int, length: int) -> Tensor:
    """Return logits [V] of slot n-1, which takes `token_id` as token number length-1."""
    last_ids, lengths = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    last_ids[-1] = token_id
    lengths[-1] = length
    return step((), last_ids, lengths)[-1].clone()
