"""The optimizer steps on one batch, on this rank's part of it. Knows tensors; knows no HTTP, and which loss
only by name.

A batch is good for epochs * mini_batches optimizer steps and makes one policy_version. Master weights,
gradients and optimizer state are float32; with dtype bfloat16 the forward pass and the exported weights are
bfloat16, as in the engine.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config import TrainerConfig
from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, Canary, ExportResponse, pack_batch
from asyncrl.trainer.batch_checks import check_batch, loss_tokens
from asyncrl.trainer.canary import checked, make_canary
from asyncrl.trainer.gap import GAP_WARNING, gap_advice, gap_metrics, gap_words, measure_gaps, worst_gap
from asyncrl.trainer.model.packing import MicroBatch
from asyncrl.trainer.model.parts import load_tokenizer, make_optimizer, make_parts, reshard
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.objective import BatchNumbers, Objective
from asyncrl.trainer.ranks import ALONE, Ranks
from asyncrl.trainer.record import append_line, note_restored, trained_line
from asyncrl.trainer.shares import BatchTotals, StepSums, mini_batches, rank_micro_batches
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.state import PendingSave, Progress, TrainerState
from asyncrl.weights.export import (
    LazyWeights,
    digest_of,
    gather_along,
    in_export_dtype,
    in_file_order,
    named_weights,
    save_folder,
)
from asyncrl.weights.transport import Exported, TrainerEnd, make_transport

log = logging.getLogger("asyncrl.trainer")

BoolN = npt.NDArray[np.bool_]
Float32N = npt.NDArray[np.float32]


class TrainStep:
    """Weights, optimizer and the number of steps taken. Not thread-safe: one thread owns it.

    Life:       policy_version 0 -> train -> 1 -> train -> 2 ...; a refused batch leaves policy_version as it
    was. Invariant:  each batch is trained on once, by the policy_version that it is for. On the CPU the same
    batches with the
                same number of threads give the same bits.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ALONE) -> None:
        """Load everything. Raises ConfigError if the model or a function cannot be had, or memory is
        short.
        """
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        self.spec, self.ranks, self.policy_version, self.num_optimizer_steps = spec, ranks, 0, 0
        self._schedule_ahead = 0
        """Steps that the present settings would have taken so far, above those that were: 0 unless a resume
        changed them.
        """
        self.num_skipped_in_a_row = 0
        self._objective = Objective(spec)
        parts = make_parts(spec, ranks, needs_reference=self._objective.needs_reference)
        self.device, self.dtype = parts.device, parts.dtype
        self.policy, self._reference, self._adapters, self._masters = (
            parts.policy,
            parts.reference,
            parts.adapters,
            parts.masters,
        )
        self._optimizer = make_optimizer(self._masters.named.values(), spec.trainer)
        end = TrainerEnd(self.device, self.dtype, spec.chunk_bytes, ranks.is_first, spec.is_file_wanted)
        self.transport = make_transport(spec.transport, end)
        self._pending: PendingSave | None = None
        self._state = TrainerState(
            self._masters,
            self._optimizer,
            model_path=spec.model_path,
            dtype=self.dtype,
            device=self.device,
            lora=spec.trainer.lora,
        )
        self._has_recorded = False

    def __repr__(self) -> str:
        return f"<TrainStep {self.spec.model_path} v{self.policy_version} on {self.device.type}>"

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        """Take the optimizer steps of one batch; returns its metrics by full name. Raises Refused.

        What a skipped step has spoilt is NaN: the loss and the gradient norm of a batch all of whose steps
        were skipped, say.
        """
        started = time.perf_counter()
        check_batch(
            header, arrays, self.policy_version, self.policy.model.get_input_embeddings().num_embeddings
        )
        has_loss = loss_tokens(header, arrays)
        batch = self._numbers(header, arrays, has_loss)
        taken = BatchTotals(np.zeros(len(has_loss), np.float32), np.zeros(len(has_loss), np.float32))
        parts = mini_batches(header, has_loss, self.spec.trainer.mini_batches)
        for epoch in range(self.spec.trainer.epochs):
            for chosen in parts:
                self._optimizer_step(batch, chosen, taken, is_first=epoch == 0)
            # A part without a loss token is no step, and counts as one: the schedule ends with the run's last
            # batch.
            self.num_optimizer_steps += self.spec.trainer.mini_batches - len(parts)
        self.policy_version += 1
        self._record(header, arrays, has_loss, taken)
        num_loss_tokens = int(has_loss.sum())
        policy = {
            "policy/clip_fraction": 0.0,  # of a loss that clips nothing
            **{
                f"policy/{name}": value / taken.num_tokens for name, value in taken.stats.items()
            },  # a user's name hides none below
            "policy/loss": taken.loss,
            "policy/grad_norm": taken.grad_norm,
            **policy_metrics(
                taken.logprobs_N[has_loss], arrays.behaviour_logprobs[has_loss], taken.entropies_N[has_loss]
            ),
            **taken.gap,
        }
        return {
            **policy,
            "sample/masked_fraction": 1.0 - num_loss_tokens / int(arrays.loss_mask.sum()),
            "tokens/trained": float(num_loss_tokens),
            "trainer/learning_rate": self._optimizer.param_groups[0]["lr"],
            "trainer/optimizer_steps": float(self.num_optimizer_steps),
            "trainer/skipped_steps": float(taken.num_skipped),
            "perf/train_s": time.perf_counter() - started,
        }

    def export(self, path: Path) -> ExportResponse:
        """Bring the current weights, in the engine's dtype, to where engines take them from; on all ranks.
        Rank 0 answers. Raises OSError, or Refused if they give NaN.
        """
        canary = self._canary()
        adapters = None if self._adapters is None else self._adapters.export_tensors
        answer = self.transport.export(Exported(self.policy_version, self._lazy_weights, adapters), path)
        return answer.model_copy(update={"canary": checked(canary)})

    def save(self, path: Path, *, merged: bool = True) -> None:
        """Write the current weights and the tokenizer as a Hugging Face folder, or the adapters alone as a
        peft folder.

        One that is there is replaced by the whole new one. Raises OSError, or ValueError if there are no
        adapters.
        """
        self.check_save(merged=merged)
        if merged:
            weights = in_export_dtype(
                self._merged_weights(), self.dtype
            )  # first of all: other ranks are in join_save
            save_folder(self.policy.model, weights, load_tokenizer(self.spec), self.dtype, path)
        elif self._adapters is not None:
            self._adapters.save(path, self.spec.model_path)

    def check_save(self, *, merged: bool) -> None:
        """Raises what save would before it gathers a shard: ValueError if there are no adapters."""
        if not merged and self._adapters is None:
            raise ValueError("adapters were asked for, and trainer.lora is none: all weights are trained")

    def join_save(self, *, merged: bool) -> None:
        """The other ranks' part of save: their shards."""
        if merged:
            gather_along(self._merged_weights(), self.dtype)
        elif self._adapters is not None:
            gather_along(self._adapters.tensors(), self.dtype)

    def begin_save_state(self, path: Path) -> PendingSave:
        """Copy all that is needed to go on; it is written to the new folder `path` beside training. Raises
        StateError.
        """
        self._pending = self._state.begin_save(
            Progress(self.policy_version, self.num_optimizer_steps, self.num_skipped_in_a_row), path
        )
        return self._pending

    def wait_save_state(self) -> None:
        """Return when what was begun last is complete, at once if nothing was. Raises StateError. Any thread
        may call it.
        """
        if self._pending is not None:
            self._pending.wait()

    def load_state(self, path: Path, *, is_checked: bool = False) -> None:
        """Go on from a saved folder; it must be from a run directory that the user named. Raises StateError.

        `is_checked`: each file of it was compared with its manifest already.
        """
        progress = self._state.load(path, is_checked=is_checked)
        self.policy_version, self.num_optimizer_steps = progress.policy_version, progress.num_optimizer_steps
        self._schedule_ahead = self.policy_version * self.spec.steps_per_batch - self.num_optimizer_steps
        self.num_skipped_in_a_row = progress.num_skipped_in_a_row
        self._note_restored(self.policy_version)  # now: there may be no batch left to train on

    def weights_digest(self) -> str:
        """Digest of the float32 master weights: of what is trained, so of the adapters alone with
        trainer.lora.
        """
        return digest_of(self._masters.named)

    def _numbers(self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN) -> BatchNumbers:
        """All that is computed before the first step, which may change the weights."""
        proximal_N = (
            self._forward(self.policy, header, arrays, has_loss) if self._objective.needs_proximal else None
        )
        reference_N = (
            self._reference_logprobs(header, arrays, has_loss) if self._objective.needs_reference else None
        )
        advantage_N = self._objective.advantages(header, arrays, has_loss, proximal_N, reference_N)
        return BatchNumbers(header, arrays, advantage_N, proximal_N, reference_N)

    def _canary(self) -> Canary | None:
        """What goes with the export of these weights, if the spec asks for it; on all ranks."""
        return make_canary(self.policy, self.spec.canary_tokens) if self.spec.canary_tokens else None

    def _merged_weights(self) -> dict[str, Tensor]:
        """All weights by the names that the model was loaded with."""
        return named_weights(self.policy.model) if self._adapters is None else self._adapters.merged()

    def _lazy_weights(self) -> LazyWeights:
        """As _merged_weights, in the order of an export, each weight that has an adapter merged only when it
        is asked for.
        """
        if self._adapters is None:
            return LazyWeights(in_file_order(named_weights(self.policy.model)))
        weights, merges = self._adapters.merging()
        return LazyWeights(in_file_order(weights), merges)

    def _reference_logprobs(self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN) -> Float32N:
        """float32 [N], by the initial weights."""
        if self._adapters is None:
            assert self._reference is not None
            return self._forward(self._reference, header, arrays, has_loss)
        with self._adapters.off():
            return self._forward(self.policy, header, arrays, has_loss)

    @torch.no_grad()
    def _forward(self, policy: Policy, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN) -> Float32N:
        """float32 [N]: logprobs of the loss tokens, 0 elsewhere; no gradient."""
        logprobs_N = np.zeros(len(has_loss), np.float32)
        for micro, counts in self._micro_batches(header, arrays, has_loss):
            logprob_M, _ = policy(micro, self.spec.temperature)
            if counts:
                logprobs_N[micro.source_M] = logprob_M.cpu().numpy()
        self.ranks.add_up(logprobs_N)
        reshard(policy)
        return logprobs_N

    def _micro_batches(
        self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN
    ) -> list[tuple[MicroBatch, bool]]:
        """Those of this rank, and whether each one counts."""
        max_tokens = self.spec.trainer.micro_batch_tokens
        return rank_micro_batches(
            header, arrays, has_loss, max_tokens, self.device, self.ranks, self.policy.plan
        )

    def _optimizer_step(
        self, batch: BatchNumbers, chosen: BoolN, taken: BatchTotals, *, is_first: bool
    ) -> None:
        """One forward-backward over the chosen tokens and one step; a gradient that is not finite is skipped
        and counted.
        """
        try:
            sums = self._accumulate(batch, chosen)
            if is_first:
                taken.logprobs_N[chosen], taken.entropies_N[chosen] = (
                    sums.logprobs_N[chosen],
                    sums.entropies_N[chosen],
                )
            if (
                taken.num_tokens == 0
            ):  # later steps of a batch start from other weights than those it was sampled with
                taken.gap = self._check_gap(batch, chosen, sums)
            grad_norm = self._clip_gradient()
            if not (
                math.isfinite(sums.loss) and math.isfinite(grad_norm)
            ):  # first: its statistics are as spoilt as its gradient
                self._skip(batch, taken, f"loss {sums.loss} and gradient norm {grad_norm}")
            elif unfit := {name: value for name, value in sums.stats.items() if not math.isfinite(value)}:
                self._refuse_saved(
                    batch,
                    f"statistics {unfit}",
                    "metrics are finite numbers, those of algorithm.loss included",
                )
            else:
                self._step(taken, sums, grad_norm)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        taken.add(sums, chosen)

    def _accumulate(self, batch: BatchNumbers, chosen: BoolN) -> StepSums:
        """Forward and backward over all micro-batches; the gradients add up to that of the step's loss."""
        numbers = self._objective.step_numbers(batch, chosen)
        sums = StepSums(np.zeros(len(chosen), np.float32), np.zeros(len(chosen), np.float32))
        for micro, counts in self._micro_batches(batch.header, batch.arrays, chosen):
            logprob_M, entropy_M = self.policy(micro, self.spec.temperature)
            if not counts:
                (logprob_M.sum() * 0.0).backward()
                continue
            with self.ranks.apart():
                loss, stats = self._objective.micro_loss(micro, logprob_M, batch, numbers)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(micro.source_M, logprob_M, entropy_M, loss, stats)
        sums.add_up(self.ranks)
        return sums

    def _step(self, taken: BatchTotals, sums: StepSums, grad_norm: float) -> None:
        learning_rate = learning_rate_at(self.spec.trainer, self.num_optimizer_steps + self._schedule_ahead)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._masters.write_back()
        self.num_optimizer_steps += 1
        self.num_skipped_in_a_row = 0
        taken.losses.append(sums.loss)
        taken.grad_norms.append(grad_norm)

    def _skip(self, batch: BatchNumbers, taken: BatchTotals, what: str) -> None:
        """Leave the weights as they are; the batch is saved for inspection. Refuses once it happens too
        often.
        """
        self.num_skipped_in_a_row += 1
        self.num_optimizer_steps += 1
        taken.num_skipped += 1
        if self.num_skipped_in_a_row >= self.spec.trainer.max_skipped_steps:
            rule = f"trainer.max_skipped_steps={self.spec.trainer.max_skipped_steps} steps in a row may be skipped before the run ends"
            self._refuse_saved(batch, what, rule)
        path = self._save_failed(batch)
        log.warning(
            "batch %d (%s): step skipped, %s; the batch is saved in %s",
            batch.header.version,
            _groups(batch),
            what,
            path,
        )

    def _check_gap(self, batch: BatchNumbers, chosen: BoolN, sums: StepSums) -> dict[str, float]:
        """Metrics of |current - behaviour| on fresh tokens, where both come from the same weights. Refuses
        past the limit.
        """
        if not self.spec.measures_gap:
            return {}
        arrays, limit = batch.arrays, self.spec.trainer.logprob_gap_limit
        is_fresh = chosen & (arrays.versions == batch.header.version)
        gaps = measure_gaps(
            sums.logprobs_N[is_fresh], arrays.behaviour_logprobs[is_fresh], arrays.engines[is_fresh]
        )
        if limit is not None and (worst := worst_gap(gaps, limit)) is not None:
            self._refuse_saved(
                batch,
                gap_words(worst, gaps),
                f"trainer.logprob_gap_limit={limit}, for the mean of all fresh tokens and for that of each "
                f"engine",
                f"{gap_advice(worst, gaps)}; or raise trainer.logprob_gap_limit.",
            )
        if (worst := worst_gap(gaps, GAP_WARNING)) is not None:
            log.warning(
                "batch %d: %s; %s", batch.header.version, gap_words(worst, gaps), gap_advice(worst, gaps)
            )
        return gap_metrics(gaps)

    def _clip_gradient(self) -> float:
        """Clip to trainer.max_grad_norm; returns the norm before."""
        limit = self.spec.trainer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            list(self._masters.named.values()), math.inf if limit is None else limit
        )
        return float(self.ranks.gather(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))[0])

    def _save_failed(self, batch: BatchNumbers) -> Path:
        path = self.spec.failed_dir / f"step_{batch.header.version}.safetensors"
        if self.ranks.is_first:
            self.spec.failed_dir.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack_batch(batch.header, batch.arrays))
        return path

    def _refuse_saved(self, batch: BatchNumbers, error: str, rule: str, way_out: str = "") -> None:
        path = self._save_failed(batch)
        raise Refused(
            422,
            f"batch {batch.header.version} ({_groups(batch)}) gave {error}; policy_version stays "
            f"{self.policy_version}, "
            f"the batch is saved in {path}",
            rule=rule,
            way_out=way_out
            or "look at the batch with asyncrl.messages.trainer_calls.unpack_batch; lower "
            "trainer.learning_rate or trainer.max_grad_norm.",
        )

    def _record(self, header: BatchHeader, arrays: BatchArrays, has_loss: BoolN, taken: BatchTotals) -> None:
        digest = self.weights_digest() if self.spec.record_digest else None
        if not self.ranks.is_first:
            return
        if (
            not self._has_recorded
        ):  # the first batch of this process: what an earlier one has written from here on is done again
            self._note_restored(header.version)
        append_line(self.spec.record_path, trained_line(header, arrays, has_loss, taken.loss, digest))

    def _note_restored(self, version: int) -> None:
        if self.ranks.is_first:
            note_restored(self.spec.record_path, version)
            self._has_recorded = True


def _groups(batch: BatchNumbers) -> str:
    """`groups 40, 41`: the prompts in question, for `asyncrl inspect --group`."""
    ids = dict.fromkeys(entry.group_id for entry in batch.header.trajectories)
    return f"{'group' if len(ids) == 1 else 'groups'} {', '.join(map(str, ids))}"


# Metrics of one step from the logprobs of its loss tokens, all measured before the update. Knows numbers
# alone.


Float32M = npt.NDArray[np.float32]


def policy_metrics(current_M: Float32M, behaviour_M: Float32M, entropy_M: Float32M) -> dict[str, float]:
    """Entropy, distance and effective sample size of M >= 1 loss tokens; logprobs and entropy in nats.

    kl_behaviour estimates KL(behaviour || current) by the mean of w - 1 - log w, w = exp(current -
    behaviour), which is unbiased and never negative (http://joschu.net/blog/kl-approx.html). ess is the
    effective sample size of the weights w as a fraction of M, (sum w)^2 / (M sum w^2): 1 on-policy.
    """
    log_weight_M = current_M.astype(np.float64) - behaviour_M.astype(np.float64)
    weight_M = np.exp(log_weight_M)
    return {
        "policy/entropy": float(entropy_M.mean(dtype=np.float64)),
        "policy/kl_behaviour": float((weight_M - 1.0 - log_weight_M).mean()),
        "policy/ess": float(weight_M.sum() ** 2 / (len(weight_M) * np.square(weight_M).sum())),
    }


# The learning rate of each optimizer step. Knows numbers alone.


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run.

    Warm-up rises linearly and reaches the peak in its last step, number warmup_steps - 1; then the rate stays
    (constant) or falls to 0 one step after the last of num_steps * mini_batches * epochs.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    length = max(config.num_steps * config.mini_batches * config.epochs - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / length, 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
