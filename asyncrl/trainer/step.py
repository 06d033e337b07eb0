"""Optimizer steps, exports, checkpoints and offloads of one rank.

All calls are collective; rank 0 writes files. An export's canary is the logprobs of a short text, which
engines recompute.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from asyncrl.base.http import Refused
from asyncrl.messages import trainer_api as api
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.messages.tokens import Tokens
from asyncrl.trainer import objective, packing, step_metrics
from asyncrl.trainer.build_model import TrainedModel, reshard, use_deterministic
from asyncrl.trainer.fused import compilations
from asyncrl.trainer.objective import BatchNumbers, Float32N, Objective, Stats
from asyncrl.trainer.offload import Offload
from asyncrl.trainer.optimizer import clip_gradient, learning_rate_at, make_optimizer
from asyncrl.trainer.policy import Policy, Scores
from asyncrl.trainer.ranks import ONE_RANK, Ranks
from asyncrl.trainer.state import Progress, TrainerState, save_folder
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.trainer.tree import BoolN
from asyncrl.weights import export as exports
from asyncrl.weights.export import AdapterTransport
from asyncrl.weights.ipc import ChunkFile, ChunkPlace, Chunks, SharedChunk, SharedTransport
from asyncrl.weights.nccl import BroadcastTransport
from asyncrl.weights.tensor_files import Pieces, digest_tensors, stored_names, stored_pieces

log = logging.getLogger("asyncrl.trainer")
MAX_SKIPPED_STEPS = 3
TRANSPORTS = {"lora": AdapterTransport, "nccl": BroadcastTransport, "ipc": SharedTransport}
"""Transports that write no file of all weights, by name."""

Output = tuple[packing.MicroBatch, Scores, Tensor | float, Stats]


@dataclass
class StepSums:
    """Sums of an optimizer step. `grad_norm` is NaN for a skipped step; `gap` is of the batch's first."""

    logprobs_N: Float32N
    entropies_N: Float32N
    num_tokens: int
    loss: float = 0.0
    stats: Counter[str] = field(default_factory=Counter)
    gap: dict[str, float] = field(default_factory=dict)
    grad_norm: float = math.nan


def add_up(outputs: list[Output], chosen: BoolN, ranks: Ranks) -> StepSums:
    """Read micro-batches from the device, and sum over all ranks."""
    logprobs_N, entropies_N = np.zeros((2, len(chosen)), np.float32)
    sums = StepSums(logprobs_N, entropies_N, int(chosen.sum()))
    loss = 0.0
    stats = Counter[str]()
    for micro, scores, micro_loss, micro_stats in outputs:
        sums.logprobs_N[micro.source_M] = scores.logprob_M.cpu().numpy()
        sums.entropies_N[micro.source_M] = scores.entropy_M.cpu().numpy()
        loss += float(micro_loss)
        stats.update({name: float(value) for name, value in micro_stats.items()})
    ranks.add_up(sums.logprobs_N, sums.entropies_N)
    for rank_loss, rank_stats in ranks.gather([loss, stats]):
        sums.loss += rank_loss
        sums.stats.update(rank_stats)
    return sums


class TrainStep(TrainedModel):
    """Weights and optimizer, owned by one thread. A refused batch leaves policy_version unchanged."""

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ONE_RANK) -> None:
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        use_deterministic(is_on=spec.trainer.deterministic)
        self.spec = spec
        self.ranks = ranks
        self.policy_version = 0
        self.num_skipped_in_a_row = 0
        self.rollout_gaps: list[tuple[int, int, float]] = []
        self.rollout_advantages: list[tuple[int, int, float]] = []
        self._has_recorded = False
        self._objective = Objective(spec)
        super().__init__(spec, ranks, needs_reference=self._objective.needs_reference)
        self._vocab_size = self.policy.model.get_input_embeddings().num_embeddings
        self._optimizer = make_optimizer(self.masters, spec.trainer)
        cuda = torch.cuda if self.device.type == "cuda" else None
        dtype_name = str(self.dtype).removeprefix("torch.")
        made = compilations if self.policy.is_compiled else None
        self._meter = step_metrics.StepMeter(ranks, dtype_name, cuda, made)
        self._state = TrainerState(self.masters, self._optimizer, ranks, spec, self.device)
        self._offload = Offload(ranks, self.device, self._tensors_of)
        self._pieces: Pieces | None = None
        self._chunks = Chunks(self._chunk_place(), self._lazy_weights(), spec.chunk_bytes, self.dtype)
        end = exports.TrainerEnd(
            self.device,
            self.dtype,
            spec.chunk_bytes,
            is_first=ranks.is_first,
            is_file_wanted=spec.is_file_wanted,
            store=spec.weights_store,
        )
        # Colocated engines get chunks in shared memory; a whole export is a file, for evaluation.
        of_name = TRANSPORTS if spec.chunks == "file" else {}
        self.transport = of_name.get(spec.transport, exports.Transport)(end)
        self._exporting: Future[api.ExportResponse] | None = None

    # ---- training

    def train(self, header: api.BatchHeader, arrays: Tokens) -> dict[str, float]:
        """Train on a batch; return metrics by full name, NaN without a value. Raises Refused."""
        self._offload.need("train", "weights", "optimizer")
        self._meter.start()
        objective.check_batch(header, arrays, self.policy_version, self._vocab_size)
        has_loss = objective.loss_tokens(header, arrays)
        allowed = packing.find_allowed(arrays, has_loss, lambda: self._grammars)
        objective.check_any_loss(header, arrays, has_loss)
        batch = self._numbers(BatchNumbers(header, arrays, has_loss, allowed=allowed))
        self.rollout_advantages = step_metrics.means_of_rollouts(header, has_loss, batch.advantage_N)
        loop = self.spec.trainer
        parts = packing.mini_batches(header, has_loss, loop.mini_batches)
        steps = list[StepSums]()
        for epoch in range(loop.epochs):
            for number, chosen in enumerate(parts):
                # Masked parts and skipped steps count too, so that the schedule ends.
                index = (self.policy_version * loop.epochs + epoch) * loop.mini_batches + number
                for group in self._optimizer.param_groups:
                    group["lr"] = learning_rate_at(loop, index)
                steps.append(self._optimizer_step(batch, chosen, is_first=not steps))
        self.policy_version += 1
        metrics = self._metrics(batch, steps)
        if self.ranks.is_first:
            if not self._has_recorded:  # earlier lines are repeated
                self._note_restored(header.version)
            line = step_metrics.trained_line(header, arrays, has_loss, metrics["policy/loss"])
            step_metrics.append_line(self.spec.record_path, line)
        self._state.wait_lent()  # charge a slow disk to a step, not to a handover
        return metrics

    def _metrics(self, batch: BatchNumbers, steps: list[StepSums]) -> dict[str, float]:
        has_loss = batch.has_loss
        num_loss_tokens = int(has_loss.sum())
        taken = [(one.loss, one.grad_norm) for one in steps if math.isfinite(one.grad_norm)]
        loss, grad_norm = np.mean(taken or [(math.nan, math.nan)], axis=0).tolist()
        num_tokens = sum(one.num_tokens for one in steps)
        stats = Counter[str]()
        for one in steps:
            stats.update(one.stats)
        first_epoch = steps[: len(steps) // self.spec.trainer.epochs]
        logprobs_N = np.sum([one.logprobs_N for one in first_epoch], axis=0)
        entropies_N = np.sum([one.entropies_N for one in first_epoch], axis=0)
        behaviour_M = batch.arrays.behaviour_logprobs[has_loss]
        return {
            "policy/clip_fraction": 0.0,
            **{f"policy/{name}": value / num_tokens for name, value in stats.items()},
            "policy/loss": loss,
            "policy/grad_norm": grad_norm,
            **step_metrics.policy_metrics(logprobs_N[has_loss], behaviour_M, entropies_N[has_loss]),
            **steps[0].gap,
            "sample/masked_fraction": 1.0 - num_loss_tokens / int(batch.arrays.is_sampled.sum()),
            "tokens/trained": float(num_loss_tokens),
            "trainer/learning_rate": self._optimizer.param_groups[0]["lr"],
            "trainer/skipped_steps": float(len(steps) - len(taken)),
            **self._meter.numbers(),
            **self.kernels,
        }

    @cached_property
    def _grammars(self) -> TokenGrammars:
        # The controller's class: AutoTokenizer may rebuild the pre-tokenizer of tokenizer.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.spec.model_path)
        return TokenGrammars(tokenizer, self._vocab_size)

    def _numbers(self, batch: BatchNumbers) -> BatchNumbers:
        if self._objective.needs_proximal:
            batch.proximal_N, batch.entropy_N = self._forward(self.policy, batch)
        if self.reference is not None:
            batch.reference_N, _ = self._forward(self.reference, batch)
        elif self._objective.needs_reference:
            assert self.adapters is not None
            with self.adapters.off():
                batch.reference_N, _ = self._forward(self.policy, batch)
        batch.advantage_N = self._objective.advantages(batch)
        return batch

    @torch.no_grad()
    def _forward(self, policy: Policy, batch: BatchNumbers) -> tuple[Float32N, Float32N]:
        """Return logprobs and entropies, float32 [N], 0 without loss."""
        micros = self._micro_batches(batch, batch.has_loss)
        self._meter.enter("logprobs")
        outputs = list[Output]()
        for micro, counts in micros:
            scores = policy(micro, self.spec.temperature)
            if counts:
                self._meter.count(policy.costs.flops(*micro.size, has_backward=False))
                outputs.append((micro, scores, 0.0, {}))
        sums = add_up(outputs, batch.has_loss, self.ranks)
        reshard(policy)
        self._meter.enter("")
        return sums.logprobs_N, sums.entropies_N

    def _micro_batches(self, batch: BatchNumbers, chosen: BoolN) -> list[tuple[packing.MicroBatch, bool]]:
        self._meter.enter("pack")
        rules = self.policy.plan.rules(self.spec.trainer.micro_batch_tokens)
        costs = self.policy.costs
        return packing.micro_batches(
            batch.header, batch.arrays, chosen, rules, self.device, self.ranks, costs, batch.allowed
        )

    def _optimizer_step(self, batch: BatchNumbers, chosen: BoolN, *, is_first: bool) -> StepSums:
        """Take one step, or skip a non-finite gradient."""
        try:
            sums = self._accumulate(batch, chosen)
            if is_first:  # later steps start from other weights than the samples
                sums.gap = self._check_gap(batch, chosen, sums)
            self._meter.enter("optimizer")
            norm = clip_gradient(self.masters.named.values(), self.spec.trainer.max_grad_norm)
            grad_norm = float(self.ranks.gather(norm)[0])
            if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
                self._skip(batch, f"loss {sums.loss} and gradient norm {grad_norm}")
            else:
                self._meter.enter("blocked")
                self.before_change()
                self._meter.enter("optimizer")
                self._optimizer.step()
                self.masters.write_back()
                self.num_skipped_in_a_row = 0
                sums.grad_norm = grad_norm
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._meter.enter("")
        return sums

    def _accumulate(self, batch: BatchNumbers, chosen: BoolN) -> StepSums:
        numbers = self._objective.step_numbers(batch, chosen)
        outputs = list[Output]()
        for micro, counts in self._micro_batches(batch, chosen):
            self._meter.enter("forward")
            scores = self.policy(micro, self.spec.temperature)
            if not counts:
                self._meter.enter("backward")
                (scores.logprob_M.sum() * 0.0).backward()
                continue
            loss, stats = self._objective.micro_loss(micro, scores.logprob_M, batch, numbers)
            self._meter.enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            detached = scores._replace(logprob_M=scores.logprob_M.detach())
            outputs.append((micro, detached, loss.detach(), stats))
            flops = self.policy.costs.flops(*micro.size, has_backward=True)
            self._meter.count(flops, micro.layout.num_tokens)
        self._meter.enter("")
        return add_up(outputs, chosen, self.ranks)

    def _skip(self, batch: BatchNumbers, what: str) -> None:
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_STEPS:
            rule = f"the run ends after {MAX_SKIPPED_STEPS} skipped steps in a row"
            raise self._refused(batch, what, rule, f"{step_metrics.NOT_FINITE_ADVICE}.")
        log.warning("%s: step skipped, %s", _name(batch), what)

    def _check_gap(self, batch: BatchNumbers, chosen: BoolN, sums: StepSums) -> dict[str, float]:
        """Return |current - behaviour| metrics. Raises Refused above the limit."""
        self.rollout_gaps = []
        if not self.spec.measures_gap:
            return {}
        arrays = batch.arrays
        limit = self.spec.trainer.logprob_gap_limit
        is_fresh = chosen & (arrays.versions == batch.header.version)
        gap_N = np.abs(sums.logprobs_N.astype(np.float64) - arrays.behaviour_logprobs)
        self.rollout_gaps = step_metrics.means_of_rollouts(batch.header, is_fresh, gap_N)
        gaps = step_metrics.measure_gaps(
            sums.logprobs_N[is_fresh], arrays.behaviour_logprobs[is_fresh], arrays.engines[is_fresh]
        )
        if limit is not None and (fault := step_metrics.gap_fault(gaps, limit)):
            rule = f"trainer.logprob_gap_limit={limit}, for the means of all fresh tokens and of each engine"
            raise self._refused(batch, fault, rule, f"{step_metrics.GAP_ADVICE}; or raise the limit.")
        if fault := step_metrics.gap_fault(gaps, step_metrics.GAP_WARNING):
            log.warning("step %d: %s; %s", batch.header.version + 1, fault, step_metrics.GAP_ADVICE)
        return step_metrics.gap_metrics(gaps)

    def _refused(self, batch: BatchNumbers, error: str, rule: str, way_out: str) -> Refused:
        what = f"{_name(batch)} gave {error}; policy_version stays {self.policy_version}"
        return Refused(422, what, rule=rule, way_out=way_out)

    def _note_restored(self, version: int) -> None:
        if self.ranks.is_first:
            step_metrics.note_restored(self.spec.record_path, version)
            self._has_recorded = True

    def before_change(self) -> None:
        """Wait for exports and copies that read the weights."""
        readers: list[Future[Any] | None] = [self._exporting, self._state.copying]
        wait([reader for reader in readers if reader is not None])

    # ---- checkpoints and model folders

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder, adapters merged. Raises OSError, SafetensorError and Refused."""
        self._offload.need("save", "weights")
        weights = dict(self._lazy_weights())
        if not self.ranks.is_first:
            exports.gather_along(weights, self.dtype)
            return
        gathered = exports.in_export_dtype(weights, self.dtype)
        base, template = Path(self.spec.model_path), self.spec.chat_template
        save_folder(self.policy.model, gathered, base, path, dtype=self.dtype, template=template)

    def begin_save_state(self, path: Path) -> Future[None]:
        """Begin to write the state to the new folder `path`."""
        progress = Progress.model_validate(self, from_attributes=True)
        return self._state.begin_save(progress, path, self._offload.content_of)

    def wait_save_state(self) -> None:
        if self._state.pending is not None:
            self._state.pending.result()

    def load_state(self, path: Path) -> None:
        self._offload.need("load a state", "weights", "optimizer")
        self.before_change()
        self._chunks.forget()
        vars(self).update(self._state.load(path))
        self._note_restored(self.policy_version)

    # ---- exports

    def begin_export(self, path: Path) -> Callable[[], api.ExportResponse]:
        """Begin an export. The returned function waits, in any thread, and raises OSError, or Refused for
        NaN.
        """
        self._offload.need("export", "weights")
        canary = self._canary()
        adapters = None if self.adapters is None else self._export_adapters
        exported = exports.Exported(self.policy_version, self._lazy_weights, adapters)
        exporting = self._exporting = self.transport.begin(exported, path)
        return lambda: exporting.result().model_copy(update={"canary": _checked(canary)})

    def _export_adapters(self) -> dict[str, Tensor]:
        assert self.adapters is not None
        return self.adapters.export_tensors(stored_names(self._lazy_weights().pieces))

    def export(self, path: Path) -> api.ExportResponse:
        return self.begin_export(path)()

    def weights_digest(self) -> str:
        return digest_tensors(dict(exports.whole_tensors(self.masters.named)))

    def export_chunk(self, version: int, index: int) -> api.ExportChunkResponse | None:
        """Write a chunk; the last has the canary. Return None on other ranks. Raises OSError or Refused."""
        self._offload.need("export a chunk", "weights")
        if version != self.policy_version:
            what = f"a chunk of version {version} was requested at policy_version {self.policy_version}"
            rule = "chunks are of the newest version"
            raise Refused(409, what, rule=rule, way_out="begin again with chunk 0 of that.")
        canary = self._canary() if self._chunks.is_last(index) else None
        is_first = self.ranks.is_first
        chunk = self._chunks.write(self._lazy_weights(), version, index, is_first=is_first)
        return chunk.model_copy(update={"canary": _checked(canary)}) if chunk and is_first else None

    @torch.no_grad()
    def _canary(self) -> api.Canary | None:
        if not self.spec.canary_tokens:
            return None
        ids = np.random.default_rng(0).integers(0, self._vocab_size, self.spec.canary_tokens)
        scores = self.policy(packing.pack_texts([np.append(ids, 0)], self.device))
        reshard(self.policy)
        logprobs = scores.logprob_M[:-1].tolist()
        return api.Canary(token_ids=ids.tolist(), logprobs=logprobs, next_logprob=float(scores.highest_M[-1]))

    def _chunk_place(self) -> ChunkPlace:
        spec = self.spec
        if spec.chunks == "file" or (spec.chunks == "memory" and not self.ranks.is_first):
            return ChunkFile(spec.staging_dir / "chunk.safetensors")
        gather = self.ranks.gather if spec.chunks == "memories" else None
        chunks = exports.chunks_of(self._lazy_weights(), self.dtype, spec.chunk_bytes)
        entries = [exports.entries_of(chunk, self.dtype) for chunk in chunks]
        return SharedChunk(spec.staging_dir, entries, self.device, self.ranks.rank, gather)

    def _lazy_weights(self) -> exports.LazyWeights:
        merges: dict[str, Callable[[], Tensor]] = {}
        if self.adapters is None:
            weights = exports.named_weights(self.policy.model)
        else:
            weights, merges = self.adapters.merging()
        if self._pieces is None:
            self._pieces = stored_pieces(self.policy.model, weights)
        return exports.LazyWeights(weights, merges, self._pieces)

    # ---- colocation

    @property
    def offloaded(self) -> list[api.TrainerPart]:
        return sorted(self._offload.away)

    def offload(self, parts: Iterable[api.TrainerPart]) -> TransferStats:
        self.before_change()
        self._state.wait_lent()
        parts = frozenset(parts)
        if self.adapters is not None and "weights" in parts:
            self.adapters.forget_merged()
        return self._offload.offload(parts)

    def onload(self, parts: Iterable[api.TrainerPart]) -> TransferStats:
        self.before_change()
        return self._offload.onload(parts)

    def _tensors_of(self, part: api.TrainerPart) -> list[Tensor]:
        if part == "gradients":
            return []
        models = [self.policy] if self.reference is None else [self.policy, self.reference]
        weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        if part == "weights":
            return weights
        of_model = {id(tensor) for tensor in weights}
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        masters = [master for master in self.masters.named.values() if id(master) not in of_model]
        return [*masters, *(value for value in states if isinstance(value, Tensor))]


def _name(batch: BatchNumbers) -> str:
    ids = dict.fromkeys(entry.group_id for entry in batch.header.trajectories)
    return f"step {batch.header.version + 1} (groups {', '.join(map(str, ids))})"


def _checked(canary: api.Canary | None) -> api.Canary | None:
    if canary is None or all(map(math.isfinite, [*canary.logprobs, canary.next_logprob])):
        return canary
    what = "the weights give logprobs of the canary that are not finite"
    rule = "every engine must reproduce the logprobs of a fixed text"
    way_out = "resume from a checkpoint with a lower trainer.learning_rate, or weight_sync.canary_limit=none."
    raise Refused(422, what, rule=rule, way_out=way_out)
