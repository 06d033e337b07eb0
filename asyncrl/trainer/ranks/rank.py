"""One rank of the trainer: optimizer steps, checkpoints and offloads.

All calls are collective; rank 0 writes files.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics
from transformers import PreTrainedTokenizerFast

from asyncrl.base.http import Refused
from asyncrl.config.offload_config import (
    CRITIC_GRADIENTS,
    CRITIC_PASS,
    CRITIC_STEP,
    CRITIC_WEIGHTS,
    POLICY_GRADIENTS,
    POLICY_PASS,
    POLICY_STEP,
    POLICY_WEIGHTS,
    REFERENCE_WEIGHTS,
    ModelPart,
    offload_rules,
)
from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.messages import trainer_api as api
from asyncrl.messages.engine_api import TrainerPart, TransferStats
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.messages.tokens import Tokens
from asyncrl.models.profiling import StepProfiler
from asyncrl.trainer.attention.tree import BoolN
from asyncrl.trainer.loss import objective, packing, step_metrics
from asyncrl.trainer.loss.objective import BatchNumbers, Float32N, Objective
from asyncrl.trainer.loss.packing import LogitSets, MicroBatch
from asyncrl.trainer.loss.sums import (
    MicroLoss,
    StepSums,
    gather_losses,
    gather_tokens,
    version_metrics,
)
from asyncrl.trainer.loss.supports import find_supports
from asyncrl.trainer.model.build_model import TrainedModel, reshard, set_up_torch
from asyncrl.trainer.model.critic import Critic
from asyncrl.trainer.model.exports import Exports
from asyncrl.trainer.model.lora import POLICY_ADAPTER, refuse_unknown
from asyncrl.trainer.model.policy import BalanceLoss, Policy
from asyncrl.trainer.ranks.offload import Offload
from asyncrl.trainer.ranks.optimizer import Trained
from asyncrl.trainer.ranks.ranks import ONE_RANK, BrokenStepError, Ranks
from asyncrl.trainer.ranks.state import CRITIC, POLICY, Progress, TrainerState
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.tensor_files import dtype_name

log = logging.getLogger("asyncrl.trainer")
# One bad batch is passed over. Several in a row mean that the weights or the loss are
# broken, and skipping would only burn the rest of the run.
MAX_SKIPPED_STEPS = 3


class TrainerRank(TrainedModel):
    """Weights and optimizer of one rank, owned by one thread.

    Life: train() makes a version: begin(), then for each optimizer step
        forward_backward() and optimizer_step(). Of a batch in parts, add_part() makes
        the gradient of each, before train() or within it.
    Invariant: a refused batch leaves policy_version unchanged.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ONE_RANK) -> None:
        set_up_torch(spec)
        self.spec = spec
        self.ranks = ranks
        self.policy_version = 0
        self.skipped_in_a_row = dict[str, int]()
        """Steps of each policy, by its adapter."""
        self._parts = dict[str, tuple[BatchNumbers, StepSums]]()
        """Parts of the next batch whose gradient is added."""
        self.rollout_gaps: list[tuple[int, int, float]] = []
        self.rollout_advantages: list[tuple[int, int, float]] = []
        self._record = step_metrics.RecordWriter(spec.record_path)
        self._objective = Objective(spec)
        needs_reference = self._objective.needs_reference
        super().__init__(spec, ranks, needs_reference=needs_reference)
        balance = BalanceLoss(self.policy.model, spec.trainer.router_aux_loss)
        self.policy.balance = balance if balance.weight > 0 else None
        if self.adapters is not None:
            self.adapters.before_change = self.before_change
        self.meter = self._make_meter()
        models = {POLICY: self.trained}
        self.critic = None
        if spec.critic is not None:
            self.critic = Critic(spec, ranks, self.meter)
            models[CRITIC] = self.critic.trained
        self._state = TrainerState(models, ranks, spec, self.device)
        has_critic = spec.critic is not None
        rules = offload_rules(spec.trainer.offload, has_critic=has_critic)
        run_folder = spec.record_path.parent
        self._offload = Offload(ranks, self.device, self._tensors_of, rules, run_folder)
        self.exports = Exports(self, spec, ranks)
        self._profiler = StepProfiler(
            run_folder / PROFILE_FOLDER,
            f"trainer-{ranks.rank}",
            spec.trainer.profile_steps,
            self.device,
        )

    def _make_meter(self) -> step_metrics.StepMeter:
        cuda = torch.cuda if self.device.type == "cuda" else None
        made = get_compilation_metrics if self.policy.is_compiled else None
        return step_metrics.StepMeter(self.ranks, dtype_name(self.dtype), cuda, made)

    # ---- training

    def train(self, header: api.BatchHeader, arrays: Tokens) -> dict[str, float]:
        """Train on a batch: a gradient and a step for each mini-batch of each epoch.

        Return metrics by full name, NaN without a value. Raises Refused.
        """
        parts = packing.cut_parts(header, arrays)
        self.rollout_gaps = []
        try:
            # The loss of a router's balance is a mean over the whole batch.
            if len(parts) > 1 and self.policy.balance is None:
                batch, step = self._join_parts(header, arrays, parts)
                self.optimizer_step(batch, step, 0)
                return self._end_version(batch, [step])
            # One policy, or that of each role: none changes what another one computes.
            batches = self._begin(header, arrays)
            steps = [self._take_steps(batch) for batch in batches]
            if self.spec.trainer.roles is None:
                return self._end_version(batches[0], steps[0])
            return self._end_policies(header, arrays, batches, steps)
        # Some micro-batches may have added their gradient and others not: no later step
        # may apply a part of a gradient.
        except BaseException:
            self._drop_parts()
            raise

    def _take_steps(self, batch: BatchNumbers) -> list[StepSums]:
        """Take the optimizer steps of a policy's batch; none without loss tokens."""
        loop = self.spec.trainer
        # Proximal and reference logprobs and advantages are computed once, in begin(),
        # by the weights before the first step. All epochs and mini-batches compare with
        # these.
        choices = packing.mini_batches(batch.header, batch.has_loss, loop.mini_batches)
        steps = list[StepSums]()
        for epoch in range(loop.epochs):
            for number, chosen in enumerate(choices):
                step = self.forward_backward(batch, chosen)
                # Later steps start from other weights than the samples.
                if not steps:
                    self._measure_gaps(batch, chosen, step)
                # Masked parts and skipped steps count too, so that the schedule ends.
                index = epoch * loop.mini_batches + number
                self.optimizer_step(batch, step, index)
                steps.append(step)
        return steps

    def add_part(self, header: api.BatchHeader, arrays: Tokens) -> None:
        """Add the gradient of a part of the next batch, also before the rest of the
        batch is known. Does nothing for a part that is added. Raises Refused.
        """
        key = _part_key(header, arrays)
        if key in self._parts:
            return
        batch = self._read(header, arrays)
        try:
            self._numbers(batch)
            step = self.forward_backward(batch, batch.has_loss)
            self.trained.add_part(step.size)
            if self.critic is not None:
                self.critic.trained.add_part(step.value_loss.size)
        except BaseException:
            self._drop_parts()
            raise
        batch.packed = None
        self._parts[key] = batch, step
        self.meter.pause()

    def _join_parts(
        self,
        header: api.BatchHeader,
        arrays: Tokens,
        parts: Sequence[tuple[api.BatchHeader, Tokens]],
    ) -> tuple[BatchNumbers, StepSums]:
        """Return a whole batch and its step, with the gradient of all parts. The parts
        that were not added before are added here. Raises Refused.
        """
        keys = [_part_key(*part) for part in parts]
        if self._parts.keys() - set(keys):
            # Of groups that are not in the batch after all.
            log.warning("%s: all parts are trained again", _name(header))
            self._drop_parts()
        for part in parts:
            self.add_part(*part)
        self.meter.resume()
        added = [self._parts[key] for key in keys]
        batch = BatchNumbers.join(header, arrays, [numbers for numbers, _ in added])
        objective.check_any_loss(header, arrays, batch.has_loss)
        step = StepSums.join([own for _, own in added])
        self._measure_gaps(batch, batch.has_loss, step)
        self.trained.join_parts(step.size)
        if self.critic is not None:
            self.critic.trained.join_parts(step.value_loss.size)
        return batch, step

    def add_gradients(self, header: api.BatchHeader, arrays: Tokens) -> list[StepSums]:
        """Add the gradients of the adapters that a batch names, each as of a batch
        without the others. AdapterTable.step() applies them. Raises Refused, and then
        these adapters have no gradient.

        Consecutive trajectories with one adapter have a loss together.
        """
        assert self.adapters is not None
        names = {one.adapter for one in header.trajectories}
        self._check(header, arrays)
        try:
            batches = self._begin(header, arrays)
            return [self._policys_gradient(own, own.has_loss) for own in batches]
        except BaseException:
            for adapter in self.adapters.need(names):
                adapter.trained.drop_gradient()
            raise

    def evaluate(self, header: api.BatchHeader, arrays: Tokens) -> dict[str, float]:
        """Return the mean negative log-likelihood of the loss tokens in nats, and their
        number. Changes nothing. Raises Refused.
        """
        self._offload.need("evaluate", "weights")
        self._check(header, arrays)
        has_loss = objective.loss_tokens(header, arrays)
        logprobs_N, _ = self._forward(
            self.policy, BatchNumbers(header, arrays, has_loss)
        )
        return {
            "eval/loss": -float(logprobs_N[has_loss].mean(dtype=np.float64)),
            "eval/tokens": float(has_loss.sum()),
        }

    def _drop_parts(self) -> None:
        self._profiler.drop()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._parts.clear()
        self.trained.drop_gradient()
        if self.critic is not None:
            self.critic.trained.drop_gradient()
        for gradients in (POLICY_GRADIENTS, CRITIC_GRADIENTS):
            self._offload.forget(gradients)

    def begin(self, header: api.BatchHeader, arrays: Tokens) -> BatchNumbers:
        """Check a batch, and compute what its loss needs. Changes no gradient. Raises
        Refused.
        """
        (batch,) = self._begin(header, arrays)
        return batch

    def _begin(self, header: api.BatchHeader, arrays: Tokens) -> list[BatchNumbers]:
        """Begin the batches of all policies, of which some may have no loss. Consecutive
        trajectories with one adapter have a policy. Raises Refused.
        """
        if self._parts:
            self._drop_parts()  # of groups that are not in the batch
        batches = list[BatchNumbers]()
        for own in packing.cut_where(header, arrays, lambda one: one.adapter):
            batches.append(self._read(*own, is_first=not batches))
        has_loss_N = np.concatenate([batch.has_loss for batch in batches])
        objective.check_any_loss(header, arrays, has_loss_N)
        for batch in batches:
            self._numbers(batch)
        return batches

    def _read(
        self, header: api.BatchHeader, arrays: Tokens, *, is_first: bool = True
    ) -> BatchNumbers:
        """Check a batch or a part, and find its loss tokens. `is_first`: of several
        policies. Raises Refused.
        """
        self._offload.need("train", "weights", "optimizer")
        # Before a refusal, too: the next part or batch does this again.
        if self._parts or not is_first:
            self.meter.resume()
        else:
            self.meter.start()
            self._profiler.enter(self.policy_version + 1)
        self._check(header, arrays)
        has_loss = objective.loss_tokens(header, arrays)
        # Takes the loss of forbidden tokens out of has_loss, in place.
        allowed = packing.find_allowed(arrays, has_loss, lambda: self._grammars)
        sets = LogitSets(allowed, find_supports(arrays, has_loss))
        return BatchNumbers(header, arrays, has_loss, sets=sets)

    def _check(self, header: api.BatchHeader, arrays: Tokens) -> None:
        """Raise Refused for invalid tokens, and for adapters that are not open."""
        objective.check_batch(header, arrays, self.policy_version, self.vocab_size)
        names = {one.adapter for one in header.trajectories}
        known = [POLICY_ADAPTER] if self.adapters is None else self.adapters.names
        refuse_unknown(names, known)

    @cached_property
    def _grammars(self) -> TokenGrammars:
        # The controller's class: AutoTokenizer may rebuild the pre-tokenizer of
        # tokenizer.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.spec.model_path)
        return TokenGrammars(tokenizer, self.vocab_size)

    def _numbers(self, batch: BatchNumbers) -> None:
        if self._objective.needs_proximal:
            batch.proximal_N, batch.entropy_N = self._forward(self.policy, batch)
        if self.reference is not None:
            batch.reference_N, _ = self._forward(self.reference, batch)
        # With adapters the base weights are the initial weights: no second model is
        # needed.
        elif self._objective.needs_reference:
            assert self.adapters is not None
            with self.adapters.off():
                batch.reference_N, _ = self._forward(self.policy, batch)
        # By this critic, not by the one at sampling: its values of all tokens, however
        # old, are of one function, and need not travel.
        if self.critic is not None:
            self._use_in_step("compute values", CRITIC_WEIGHTS)
            batch.value_N = self.critic.values(batch)
        batch.advantage_N = self._objective.advantages(batch)

    @torch.no_grad()
    def _forward(
        self, policy: Policy, batch: BatchNumbers
    ) -> tuple[Float32N, Float32N]:
        """Return logprobs and entropies, float32 [N], 0 without loss."""
        is_reference = policy is self.reference
        self._use_in_step(
            "score", REFERENCE_WEIGHTS if is_reference else POLICY_WEIGHTS
        )
        outputs = list[tuple[MicroBatch, Sequence[Tensor]]]()
        passes = self._passes(batch, batch.has_loss, has_backward=False)
        for micro, counts in passes:
            scores = policy(micro, self.spec.temperature)
            if counts:
                outputs.append((micro, (scores.logprob_M, scores.entropy_M)))
        shape = 2, len(batch.has_loss)
        logprobs_N, entropies_N = gather_tokens(outputs, shape, self.ranks)
        # FSDP2 keeps the root's gathered weights after a forward pass, until a backward
        # pass. Without one the next forward would use these, from before the optimizer
        # step.
        reshard(policy)
        self.meter.enter("")
        return logprobs_N, entropies_N

    def _passes(
        self, batch: BatchNumbers, chosen: BoolN, *, has_backward: bool
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches (packing.micro_batches) for a pass each, and
        count these.
        """
        self.meter.enter("pack")
        costs = self.policy.costs
        micros = self._packed(batch, chosen)
        if has_backward:
            batch.packed = None  # no later pass reads the same tokens
        for micro, counts in micros:
            self.meter.enter("forward" if has_backward else "logprobs")
            yield micro, counts
            if counts:
                flops = costs.flops(*micro.size, has_backward=has_backward)
                num_tokens = micro.layout.num_tokens if has_backward else 0
                self.meter.count(flops, num_tokens)

    def _packed(
        self, batch: BatchNumbers, chosen: BoolN
    ) -> list[tuple[MicroBatch, bool]]:
        # With one mini-batch, the passes of the reference and of the loss read the same
        # tokens. Packing them twice took a tenth of a small model's step.
        if batch.packed is not None:
            packed_N, micros = batch.packed
            if np.array_equal(packed_N, chosen):
                return micros
        batch.packed = None  # before the next ones need memory
        micros = packing.micro_batches(
            batch.header,
            batch.arrays,
            chosen,
            self.policy.plan.rules(
                self.spec.trainer.micro_batch_tokens,
                reads_all=self.policy.balance is not None,
            ),
            self.device,
            self.ranks,
            self.policy.costs,
            batch.sets,
        )
        batch.packed = chosen.copy(), micros
        return micros

    def forward_backward(self, batch: BatchNumbers, chosen: BoolN) -> StepSums:
        """Compute the gradient of the chosen tokens' loss."""
        step = self._policys_gradient(batch, chosen)
        if self.critic is not None:
            self._use_in_step("add the critic's gradient", *CRITIC_PASS)
            step.value_loss = self.critic.add_gradient(batch, chosen)
        return step

    def _policys_gradient(self, batch: BatchNumbers, chosen: BoolN) -> StepSums:
        self._use_in_step("add a gradient", *POLICY_PASS)
        numbers = self._objective.step_numbers(batch, chosen)
        read = packing.token_ranges(batch.header, chosen, reads_all=True)
        num_read = sum(one.length for one in read)
        outputs = list[tuple[MicroBatch, Sequence[Tensor]]]()
        losses = list[MicroLoss]()
        for micro, counts in self._passes(batch, chosen, has_backward=True):
            scores = self.policy(micro, self.spec.temperature)
            # FSDP2 gathers and reduces in both passes, and hangs if a rank leaves one
            # out. A rank without sequences runs a token with a gradient of zero.
            if not counts:
                self.meter.enter("backward")
                (scores.logprob_M.sum() * 0.0).backward()
                continue
            loss, stats = self._objective.micro_loss(
                micro, scores.logprob_M, batch, numbers, scores.entry_E
            )
            if self.policy.balance is not None:
                # As in TRL a mean over micro-batches, here by their tokens: one
                # micro-batch has the exact loss of the part.
                balance = scores.balance / num_read
                loss = loss + self.policy.balance.weight * balance
                stats["router_aux_loss"] = balance.detach() * int(chosen.sum())
            self.meter.enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            # Keep tensors on the device: reading them here would wait for each
            # micro-batch. gather_tokens() and gather_losses() wait once, for all.
            outputs.append((micro, (scores.logprob_M.detach(), scores.entropy_M)))
            losses.append((loss.detach(), stats))
        self.meter.enter("")
        # Every rank gets the scores and the loss of all ranks, so each takes the same
        # decisions below: skip, refuse, or step.
        shape = 2, len(chosen)
        logprobs_N, entropies_N = gather_tokens(outputs, shape, self.ranks)
        shared_loss, stats_sums = gather_losses(losses, self.ranks)
        return StepSums(
            size=numbers.size,
            logprobs_M=logprobs_N[chosen],
            entropies_M=entropies_N[chosen],
            loss=shared_loss,
            stats=stats_sums,
        )

    def optimizer_step(self, batch: BatchNumbers, step: StepSums, index: int) -> None:
        """Apply the gradient, or skip it if it is not finite. `index`: of the step in its
        version.
        """
        loop = self.spec.trainer
        # The schedule follows from the version, so a resumed run continues it: no other
        # counter has to be saved.
        number = self.policy_version * loop.epochs * loop.mini_batches + index
        self._use_in_step("take an optimizer step", POLICY_GRADIENTS)
        self.meter.enter("optimizer")
        grad_norm = self.trained.prepare_step(number, self.ranks)
        needed = {"loss": step.loss, "gradient norm": grad_norm}
        # Both models take a step, or none: their steps have one number.
        if self.critic is not None:
            self._use_in_step("take the critic's step", CRITIC_GRADIENTS)
            needed |= self.critic.clip(number, step.value_loss)
        if all(map(math.isfinite, needed.values())):
            self.meter.enter("blocked")
            # Only here, after both passes: the export and the copy of a checkpoint have
            # had the whole step to read the old weights. The metric "blocked" counts
            # the rest of their time.
            self.before_change()
            self.meter.enter("optimizer")
            if self.critic is not None:
                self._use_in_step("take the critic's step", *CRITIC_STEP)
                self.critic.trained.step()
            if not self._is_warming_up:
                self._use_in_step("take an optimizer step", *POLICY_STEP)
                self.trained.step()
            self.skipped_in_a_row.pop(batch.header.adapter, None)
            step.grad_norm = grad_norm
        else:
            numbers = [f"{name} {value}" for name, value in needed.items()]
            self._skip(batch, " and ".join(numbers))
        self._drop_gradients()
        self.meter.enter("")

    @property
    def _is_warming_up(self) -> bool:
        """Return whether this version trains only the critic."""
        critic = self.spec.critic
        return critic is not None and self.policy_version < critic.warmup_steps

    def _skip(self, batch: BatchNumbers, reason: str) -> None:
        adapter = batch.header.adapter
        num_skipped = self.skipped_in_a_row.get(adapter, 0) + 1
        self.skipped_in_a_row[adapter] = num_skipped
        if num_skipped >= MAX_SKIPPED_STEPS:
            raise self._refused(
                batch,
                reason,
                rule=f"the run ends after {MAX_SKIPPED_STEPS} skipped steps in a row",
                way_out=f"{step_metrics.NOT_FINITE_ADVICE}.",
            )
        log.warning("%s: step skipped, %s", _name(batch.header), reason)

    def _measure_gaps(self, batch: BatchNumbers, chosen: BoolN, step: StepSums) -> None:
        """Compare a step's logprobs with those of the engines. Raises Refused above the
        limit.
        """
        if not self.spec.measures_gap:
            return
        arrays = batch.arrays
        logprobs_N = np.zeros(len(chosen), np.float32)
        logprobs_N[chosen] = step.logprobs_M
        limit = self.spec.trainer.logprob_gap_limit
        # Only tokens of this version were sampled with the trainer's weights. On older
        # ones a difference is staleness, not a fault.
        is_fresh = chosen & (arrays.versions == batch.header.version)
        gap_N = np.abs(logprobs_N.astype(np.float64) - arrays.behaviour_logprobs)
        self.rollout_gaps += step_metrics.means_of_rollouts(
            batch.header, is_fresh, gap_N
        )
        gaps = step_metrics.measure_gaps(gap_N[is_fresh], arrays.engines[is_fresh])
        fault = "" if limit is None else step_metrics.gap_fault(gaps, limit)
        if fault:
            raise self._refused(
                batch,
                fault,
                rule=f"trainer.logprob_gap_limit={limit}, "
                "for the means of all fresh tokens and of each engine",
                way_out=f"{step_metrics.GAP_ADVICE}; or raise the limit.",
            )
        warning = step_metrics.gap_fault(gaps, step_metrics.GAP_WARNING)
        if warning:
            number = batch.header.version + 1
            log.warning("step %d: %s; %s", number, warning, step_metrics.GAP_ADVICE)
        step.gaps = gaps

    def _refused(
        self, batch: BatchNumbers, error: str, rule: str, way_out: str
    ) -> Refused:
        return Refused(
            422,
            f"{_name(batch.header)} gave {error}; policy_version stays {self.policy_version}",
            rule=rule,
            way_out=way_out,
        )

    def _end_policies(
        self,
        header: api.BatchHeader,
        arrays: Tokens,
        batches: Sequence[BatchNumbers],
        steps: Sequence[list[StepSums]],
    ) -> dict[str, float]:
        """Count the version of all roles, and return its metrics, with /ROLE also those of
        each policy.
        """
        num_epochs = self.spec.trainer.epochs
        # As of one policy: all tokens of an epoch before the next epoch.
        by_epoch = [
            step
            for epoch in range(num_epochs)
            for own in steps
            for step in own[epoch * len(own) // num_epochs :][: len(own) // num_epochs]
        ]
        # Of the policy that deviates most.
        gaps = [own[0].gaps for own in steps if own and own[0].gaps]
        by_epoch[0].gaps = max(gaps, key=lambda one: one[0].mean, default=[])
        whole = BatchNumbers.join(header, arrays, batches)
        metrics = self._end_version(whole, by_epoch)
        for batch, own in zip(batches, steps, strict=True):
            if own:
                numbers = version_metrics(batch, own, num_epochs).items()
                role = batch.header.adapter
                metrics |= {f"{name}/{role}": value for name, value in numbers}
        return metrics

    def _end_version(
        self, batch: BatchNumbers, steps: list[StepSums]
    ) -> dict[str, float]:
        """Count the version, record it, and return its metrics."""
        self._profiler.end()
        self.rollout_advantages = step_metrics.means_of_rollouts(
            batch.header, batch.has_loss, batch.advantage_N
        )
        # Counted even if all steps were skipped: version v + 1 means that batch v was
        # used up (docs/decisions/0007).
        self.policy_version += 1
        metrics = {
            **version_metrics(batch, steps, self.spec.trainer.epochs),
            "trainer/learning_rate": self.trained.optimizer.param_groups[0]["lr"],
            **self.meter.numbers(),
            **self.kernels,
        }
        if self.critic is not None:
            metrics |= self.critic.metrics(batch)
        # Rank 0 has the numbers of all ranks. A second line from another rank would look
        # like a batch that was trained twice.
        if self.ranks.is_first:
            line = step_metrics.trained_line(
                batch.header, batch.arrays, batch.has_loss, metrics["policy/loss"]
            )
            self._record.note(line)
            try:
                self._record.write()
            # The weights have moved, so the step cannot be refused any more. No
            # checkpoint is made before the line is written (begin_save_state).
            except OSError as error:
                path = self.spec.record_path
                log.warning(
                    "%s lacks step %d for now: %s", path, self.policy_version, error
                )
        self._state.wait_lent()  # charge a slow disk to a step, not to a handover
        self.meter.end()
        return metrics

    def _write_record(self) -> None:
        """Write the lines of all steps, which rank 0 has. Raises Refused."""
        try:
            self._record.write()
        except OSError as error:
            raise Refused(
                507,
                f"{self.spec.record_path} lacks trained steps: {error.strerror}",
                rule="neither a checkpoint nor the final model is newer than the record of trained tokens",
                way_out="free space on the disk of the run directory; the next checkpoint or a resume tries "
                "again.",
            ) from error

    def before_change(self) -> None:
        """Wait for exports and copies that read the weights."""
        readers: list[Future[Any] | None] = [
            self.exports.exporting,
            self._state.copying,
        ]
        wait(filter(None, readers))

    # ---- checkpoints and exports

    def begin_save_state(self, path: Path) -> Future[None]:
        """Begin to write the state to the new folder `path`. Raises Refused."""
        self.ranks.agree(self._write_record)
        # Read on the torch thread, between two steps. The writing thread would see
        # later counts.
        progress = Progress(
            policy_version=self.policy_version,
            skipped_in_a_row=self.skipped_in_a_row.copy(),
        )
        return self._state.begin_save(progress, path, self._offload.content_of)

    def wait_save_state(self) -> None:
        """Wait until the state is written. Raises Refused if it cannot be."""
        if self._state.pending is not None:
            self._state.pending.result()

    def load_state(self, path: Path) -> None:
        """Restore a saved state. Raises Refused, and BrokenStepError if only a part could
        be read.
        """
        self._offload.need("load a state", "weights", "optimizer")
        self._drop_parts()  # of the weights before
        self.before_change()
        # The loaded weights may have the version of chunks that were written before,
        # with other content.
        self.exports.forget_chunks()
        progress = self._state.load(path, self._use_model)
        self.policy_version = progress.policy_version
        self.skipped_in_a_row = progress.skipped_in_a_row.copy()
        # The record may have lines of this version and later, from before the restart.
        # They are void now.
        if self.ranks.is_first:
            self._record.note_restored(self.policy_version)

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder, adapters merged. Raises OSError, SafetensorError
        and Refused.
        """
        # The run may end now: its record must be whole.
        self.ranks.agree(self._write_record)
        self._use("save", POLICY_WEIGHTS)
        self.exports.save(path)

    def begin_export(self, path: Path) -> Callable[[], api.ExportResponse]:
        """Begin an export; the returned function waits for it, in any thread. Both
        raise OSError, Refused.
        """
        self._use("export", POLICY_WEIGHTS)
        return self.exports.begin(path, self.policy_version)

    def export_chunk(self, version: int, index: int) -> api.ExportChunkResponse | None:
        """Write a chunk of the newest version. Return None on other ranks. Raises
        OSError or Refused.
        """
        self._use("export a chunk", POLICY_WEIGHTS)
        if version != self.policy_version:
            raise Refused(
                409,
                f"a chunk of version {version} was requested at policy_version {self.policy_version}",
                rule="chunks are of the newest version",
                way_out="begin again with chunk 0 of that.",
            )
        return self.exports.chunk(version, index)

    # ---- colocation

    @property
    def offloaded(self) -> list[TrainerPart]:
        return sorted(self._offload.taken)

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move parts to host memory. Raises Refused."""
        self._before_moves()
        self._drop_parts()  # train() adds them again
        return self._offload.offload(parts)

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move parts back to the device. Raises Refused."""
        # The copy of a checkpoint reads offloaded parts from the table that onload()
        # empties.
        self.before_change()
        return self._offload.onload(parts)

    def _before_moves(self) -> None:
        # An export and the copy of a checkpoint read the tensors. The writer of a
        # checkpoint may still read host memory that the previous offload filled and
        # this one overwrites.
        self.before_change()
        self._state.wait_lent()

    def _use(self, what: str, *used: ModelPart) -> None:
        """Bring the parts that `what` needs to the device, and let parts with the rule
        "always" leave it. Collective. Raises Refused.
        """
        # The engines take no gradient: none is kept until their time slice.
        parts = dict.fromkeys(one.part for one in used if one.part != "gradients")
        self._offload.need(what, *parts)
        if not self._offload.is_settled(used):
            phase = self.meter.enter("offload")
            self._before_moves()
            self._offload.use(used)
            self.meter.enter(phase)

    def _use_in_step(self, what: str, *used: ModelPart) -> None:
        """As _use(), after other ranks or the other model have begun. Raises BrokenStepError."""
        try:
            self._use(what, *used)
        except Refused as refused:
            # A refusal promises that nothing has changed. Here a critic may have taken
            # its step.
            raise BrokenStepError(str(refused)) from refused

    def _use_model(self, prefix: str) -> None:
        """Bring the model whose tensors have `prefix` in a state."""
        self._use_in_step("load a state", *(CRITIC_STEP if prefix else POLICY_STEP))

    def _tensors_of(self, moved: ModelPart) -> list[Tensor]:
        model: nn.Module | None = self.policy
        trained: Trained | None = self.trained
        if moved.model == "reference":
            model, trained = self.reference, None
        if moved.model == "critic":
            assert self.critic is not None
            model, trained = self.critic.model, self.critic.trained
        weights = list[Tensor]()
        if model is not None:
            weights = [*model.parameters(), *model.buffers()]
        if moved.part == "weights":
            return weights
        assert trained is not None
        masters = trained.masters.named.values()
        if moved.part == "gradients":
            return [master.grad for master in masters if master.grad is not None]
        tensors = [*masters]
        for state in trained.optimizer.state.values():
            tensors += filter(torch.is_tensor, state.values())
        # Float32 weights are their own masters.
        of_model = {id(tensor) for tensor in weights}
        return [tensor for tensor in tensors if id(tensor) not in of_model]


def _part_key(header: api.BatchHeader, arrays: Tokens) -> str:
    """Return a digest of a part's rollouts and tokens."""
    digest = hashlib.sha256(header.model_dump_json().encode())
    for array in (arrays.ids, arrays.versions, arrays.behaviour_logprobs):
        digest.update(array.tobytes())
    return digest.hexdigest()


def _name(header: api.BatchHeader) -> str:
    """Return the name of a step for messages, like "step 3 (groups 10, 11)"."""
    ids = dict[str, None]()
    for entry in header.trajectories:
        ids[str(entry.group_id)] = None
    groups = ", ".join(ids)
    return f"step {header.version + 1} (groups {groups})"
