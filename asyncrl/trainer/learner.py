"""Optimizer steps on this rank's part of a batch."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.base.http import Refused
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.messages.trainer_api import BatchArrays, BatchHeader, pack_batch
from asyncrl.trainer import objective, step_report
from asyncrl.trainer.model.build_model import TrainedModel, reshard
from asyncrl.trainer.model.loading import load_tokenizer
from asyncrl.trainer.model.optimizer import learning_rate_at, make_optimizer
from asyncrl.trainer.model.packing import BoolN, MicroBatch, mini_batches, rank_micro_batches
from asyncrl.trainer.model.policy import Policy, Scores
from asyncrl.trainer.model.support_mask import AllowedSets, find_allowed
from asyncrl.trainer.model.tree import IntN
from asyncrl.trainer.objective import BatchNumbers, Float32N, Objective, Stats
from asyncrl.trainer.ranks import ONE_RANK, Ranks
from asyncrl.trainer.trainer_client import TrainerSpec

log = logging.getLogger("asyncrl.trainer")
MAX_SKIPPED_STEPS = 3


class StepSums:
    """Sums over micro-batches, on the device until read()."""

    def __init__(self, num_tokens: int) -> None:
        self.logprobs_N = np.zeros(num_tokens, np.float32)
        self.entropies_N = np.zeros(num_tokens, np.float32)
        self.loss = 0.0
        self.stats = Counter[str]()
        self._unread = list[tuple[IntN, Tensor, Tensor, Tensor | float, Stats]]()

    def add(self, micro: MicroBatch, scores: Scores, loss: Tensor | float, stats: Stats) -> None:
        self._unread.append((micro.source_M, scores.logprob_M.detach(), scores.entropy_M, loss, stats))

    def read(self) -> None:
        for source_M, logprob_M, entropy_M, loss, stats in self._unread:
            self.logprobs_N[source_M] = logprob_M.cpu().numpy()
            self.entropies_N[source_M] = entropy_M.cpu().numpy()
            self.loss += float(loss)
            self.stats.update({name: float(value) for name, value in stats.items()})
        self._unread.clear()

    def add_up(self, ranks: Ranks) -> None:
        ranks.add_up(self.logprobs_N, self.entropies_N)
        parts = ranks.gather([self.loss, self.stats])
        self.loss = 0.0
        self.stats = Counter()
        for loss, stats in parts:
            self.loss += loss
            self.stats.update(stats)


@dataclass
class BatchTotals:
    logprobs_N: Float32N
    entropies_N: Float32N
    steps: list[tuple[float, float]] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)
    gap: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_skipped: int = 0


class Learner:
    """Weights, optimizer and step counts, owned by one thread. A refused batch leaves policy_version
    unchanged.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ONE_RANK) -> None:
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.ranks = ranks
        self.policy_version = 0
        self.num_optimizer_steps = 0
        self.num_skipped_in_a_row = 0
        self.rollout_gaps: list[tuple[int, int, float]] = []
        self._schedule_ahead = 0
        self._has_recorded = False
        self._allowed: AllowedSets | None = None
        self._objective = Objective(spec)
        parts = TrainedModel(spec, ranks, needs_reference=self._objective.needs_reference)
        self.device = parts.device
        self.dtype = parts.dtype
        self.policy = parts.policy
        self._reference = parts.reference
        self._adapters = parts.adapters
        self._masters = parts.masters
        self._optimizer = make_optimizer(self._masters.named.values(), spec.trainer)
        cuda = torch.cuda if self.device.type == "cuda" else None
        self._meter = step_report.StepMeter(ranks, str(self.dtype).removeprefix("torch."), cuda)

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        """Train on a batch; return metrics by full name, NaN without a value. Raises Refused."""
        self._meter.start()
        vocab_size = self.policy.model.get_input_embeddings().num_embeddings
        objective.check_batch(header, arrays, self.policy_version, vocab_size)
        has_loss = objective.loss_tokens(header, arrays)
        self._allowed = find_allowed(header, arrays, has_loss, lambda: self._grammars)
        objective.check_any_loss(header, arrays, has_loss)
        batch = self._numbers(header, arrays, has_loss)
        taken = BatchTotals(*np.zeros((2, len(has_loss)), np.float32))
        parts = mini_batches(header, has_loss, self.spec.trainer.mini_batches)
        for epoch in range(self.spec.trainer.epochs):
            for chosen in parts:
                self._optimizer_step(batch, chosen, taken, is_first=epoch == 0)
            # Empty parts count as steps, so that the schedule ends.
            self.num_optimizer_steps += self.spec.trainer.mini_batches - len(parts)
        self.policy_version += 1
        columns = zip(*(taken.steps or [(math.nan, math.nan)]), strict=True)
        loss, grad_norm = (float(np.mean(column)) for column in columns)
        if self.ranks.is_first:
            if not self._has_recorded:  # earlier lines are repeated
                self._note_restored(header.version)
            line = step_report.trained_line(header, arrays, has_loss, loss)
            step_report.append_line(self.spec.record_path, line)
        num_loss_tokens = int(has_loss.sum())
        means = {f"policy/{name}": value / taken.num_tokens for name, value in taken.stats.items()}
        return {
            "policy/clip_fraction": 0.0,
            **means,
            "policy/loss": loss,
            "policy/grad_norm": grad_norm,
            **step_report.policy_metrics(
                taken.logprobs_N[has_loss], arrays.behaviour_logprobs[has_loss], taken.entropies_N[has_loss]
            ),
            **taken.gap,
            "sample/masked_fraction": 1.0 - num_loss_tokens / int(arrays.loss_mask.sum()),
            "tokens/trained": float(num_loss_tokens),
            "trainer/learning_rate": self._optimizer.param_groups[0]["lr"],
            "trainer/skipped_steps": float(taken.num_skipped),
            **self._meter.numbers(),
        }

    @cached_property
    def _grammars(self) -> TokenGrammars:
        vocab_size = self.policy.model.get_input_embeddings().num_embeddings
        return TokenGrammars(load_tokenizer(self.spec.model_path, self.spec.chat_template), vocab_size)

    def _numbers(self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN) -> BatchNumbers:
        batch = BatchNumbers(header, arrays, has_loss)
        if self._objective.needs_proximal:
            batch.proximal_N, batch.entropy_N = self._forward(self.policy, header, arrays, has_loss)
        if self._reference is not None:
            batch.reference_N, _ = self._forward(self._reference, header, arrays, has_loss)
        elif self._objective.needs_reference:
            assert self._adapters is not None
            with self._adapters.off():
                batch.reference_N, _ = self._forward(self.policy, header, arrays, has_loss)
        batch.advantage_N = self._objective.advantages(batch)
        return batch

    @torch.no_grad()
    def _forward(
        self, policy: Policy, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN
    ) -> tuple[Float32N, Float32N]:
        """Return logprobs and entropies, float32 [N], 0 without loss."""
        sums = StepSums(len(has_loss))
        micros = self._micro_batches(header, arrays, has_loss)
        self._meter.enter("logprobs")
        for micro, counts in micros:
            scores = policy(micro, self.spec.temperature)
            if counts:
                self._meter.count(policy.costs.flops(micro.size, has_backward=False))
                sums.add(micro, scores, 0.0, {})
        sums.read()
        self.ranks.add_up(sums.logprobs_N, sums.entropies_N)
        reshard(policy)
        self._meter.enter("")
        return sums.logprobs_N, sums.entropies_N

    def _micro_batches(
        self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN
    ) -> list[tuple[MicroBatch, bool]]:
        self._meter.enter("pack")
        longest = max(entry.end - entry.start for entry in header.trajectories)
        can_pack = self.policy.plan.packs(longest)
        max_tokens = self.spec.trainer.micro_batch_tokens if can_pack else 0
        return rank_micro_batches(
            header, arrays, has_loss, max_tokens, self.device, self.ranks, self.policy.costs, self._allowed
        )

    def _optimizer_step(
        self, batch: BatchNumbers, chosen: BoolN, taken: BatchTotals, *, is_first: bool
    ) -> None:
        """Take one step, or skip and count a non-finite gradient."""
        try:
            sums = self._accumulate(batch, chosen)
            if is_first:
                taken.logprobs_N[chosen] = sums.logprobs_N[chosen]
                taken.entropies_N[chosen] = sums.entropies_N[chosen]
            if taken.num_tokens == 0:  # later steps would start from other weights than the samples
                taken.gap = self._check_gap(batch, chosen, sums)
            self._meter.enter("optimizer")
            grad_norm = self._clip_gradient()
            if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
                self._skip(batch, taken, f"loss {sums.loss} and gradient norm {grad_norm}")
            elif unfit := {name: value for name, value in sums.stats.items() if not math.isfinite(value)}:
                rule = "metrics are finite numbers, including those of algorithm.loss"
                raise self._refused_saved(batch, f"statistics {unfit}", rule)
            else:
                self._step(taken, sums, grad_norm)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._meter.enter("")
        taken.num_tokens += int(chosen.sum())
        taken.stats.update(sums.stats)

    def _accumulate(self, batch: BatchNumbers, chosen: BoolN) -> StepSums:
        numbers = self._objective.step_numbers(batch, chosen)
        sums = StepSums(len(chosen))
        for micro, counts in self._micro_batches(batch.header, batch.arrays, chosen):
            self._meter.enter("forward")
            scores = self.policy(micro, self.spec.temperature)
            if not counts:
                self._meter.enter("backward")
                (scores.logprob_M.sum() * 0.0).backward()
                continue
            loss, stats = self._objective.micro_loss(micro, scores.logprob_M, batch, numbers)
            self._meter.enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(micro, scores, loss.detach(), stats)
            flops = self.policy.costs.flops(micro.size, has_backward=True)
            self._meter.count(flops, micro.size.num_tokens)
        self._meter.enter("")
        sums.read()
        sums.add_up(self.ranks)
        return sums

    def _step(self, taken: BatchTotals, sums: StepSums, grad_norm: float) -> None:
        learning_rate = learning_rate_at(self.spec.trainer, self.num_optimizer_steps + self._schedule_ahead)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._meter.enter("blocked")
        self.before_change()
        self._meter.enter("optimizer")
        self._optimizer.step()
        self._masters.write_back()
        self.num_optimizer_steps += 1
        self.num_skipped_in_a_row = 0
        taken.steps.append((sums.loss, grad_norm))

    def before_change(self) -> None: ...

    def _skip(self, batch: BatchNumbers, taken: BatchTotals, what: str) -> None:
        self.num_skipped_in_a_row += 1
        self.num_optimizer_steps += 1
        taken.num_skipped += 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_STEPS:
            rule = f"the run ends after {MAX_SKIPPED_STEPS} skipped steps in a row"
            raise self._refused_saved(batch, what, rule)
        log.warning("%s: step skipped, %s; saved in %s", _name(batch), what, self._save_failed(batch))

    def _check_gap(self, batch: BatchNumbers, chosen: BoolN, sums: StepSums) -> dict[str, float]:
        """Return |current - behaviour| metrics. Raises Refused above the limit."""
        self.rollout_gaps = []
        if not self.spec.measures_gap:
            return {}
        arrays = batch.arrays
        limit = self.spec.trainer.logprob_gap_limit
        is_fresh = chosen & (arrays.versions == batch.header.version)
        self.rollout_gaps = step_report.gaps_of_rollouts(batch.header, arrays, is_fresh, sums.logprobs_N)
        gaps = step_report.measure_gaps(
            sums.logprobs_N[is_fresh], arrays.behaviour_logprobs[is_fresh], arrays.engines[is_fresh]
        )
        if limit is not None and (fault := step_report.gap_fault(gaps, limit)):
            rule = f"trainer.logprob_gap_limit={limit}, for the means of all fresh tokens and of each engine"
            raise self._refused_saved(batch, fault, rule, f"{step_report.GAP_ADVICE}; or raise the limit.")
        if fault := step_report.gap_fault(gaps, step_report.GAP_WARNING):
            log.warning("step %d: %s; %s", batch.header.version + 1, fault, step_report.GAP_ADVICE)
        return step_report.gap_metrics(gaps)

    def _clip_gradient(self) -> float:
        limit = self.spec.trainer.max_grad_norm
        weights = list(self._masters.named.values())
        norm = torch.nn.utils.clip_grad_norm_(weights, math.inf if limit is None else limit)
        whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(self.ranks.gather(float(whole))[0])

    def _save_failed(self, batch: BatchNumbers) -> Path:
        path = self.spec.failed_dir / f"step_{batch.header.version + 1}.safetensors"
        if self.ranks.is_first:
            self.spec.failed_dir.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack_batch(batch.header, batch.arrays))
        return path

    def _refused_saved(self, batch: BatchNumbers, error: str, rule: str, way_out: str = "") -> Refused:
        saved = f"policy_version stays {self.policy_version}, the batch is in {self._save_failed(batch)}"
        unpack = "lower trainer.learning_rate; asyncrl.messages.trainer_api.unpack_batch reads the batch."
        return Refused(422, f"{_name(batch)} gave {error}; {saved}", rule=rule, way_out=way_out or unpack)

    def _note_restored(self, version: int) -> None:
        if self.ranks.is_first:
            step_report.note_restored(self.spec.record_path, version)
            self._has_recorded = True


def _name(batch: BatchNumbers) -> str:
    ids = dict.fromkeys(entry.group_id for entry in batch.header.trajectories)
    return f"step {batch.header.version + 1} (groups {', '.join(map(str, ids))})"
