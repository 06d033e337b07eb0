"""The critic: a value model with its own optimizer, on the trainer's ranks
(docs/critic.md).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.algorithms.losses import value_loss
from asyncrl.config import AlgorithmConfig
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import BoolN
from asyncrl.trainer.loss import packing
from asyncrl.trainer.loss.objective import BatchNumbers, Float32N
from asyncrl.trainer.loss.packing import MicroBatch
from asyncrl.trainer.loss.step_metrics import StepMeter
from asyncrl.trainer.loss.sums import (
    MicroLoss,
    ValueLoss,
    gather_losses,
    gather_tokens,
)
from asyncrl.trainer.model.build_model import TrainedModel, reshard
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec


class ValueModel(Policy):
    """A language model whose head is one number per token: the value of the state
    before a token, which the text up to it is.
    """

    needs_head = False

    @staticmethod
    def prepare(model: PreTrainedModel) -> None:
        """Replace the head by zeros, so that the first values are 0 and not noise."""
        old = model.get_output_embeddings().weight
        head = nn.Linear(old.shape[1], 1, bias=False, device="meta")
        head.weight = nn.Parameter(old.new_zeros(1, old.shape[1]))
        model.set_output_embeddings(head)

    def forward(self, micro: MicroBatch) -> Tensor:  # type: ignore[override]
        """Return the values of the M tokens, float32 or wider."""
        states_ND = self.states(micro)
        weight_D = self.model.get_output_embeddings().weight[0]
        wide = torch.promote_types(weight_D.dtype, torch.float32)
        state_UD = states_ND.index_select(0, micro.predict_U).to(wide)
        value_U: Tensor = state_UD @ weight_D.to(wide)
        return value_U.index_select(0, micro.pair_M)


class Critic:
    """A value model and its optimizer, of one rank. All calls are collective.

    Life: values(), then for each optimizer step add_gradient(), clip(), and step() or
        drop_gradient(); then metrics().
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks, meter: StepMeter) -> None:
        assert spec.critic is not None
        self.settings = spec.critic
        # Adapters are the policy's: the new head needs a backbone that follows it.
        rate = spec.critic.learning_rate
        self._loop = spec.trainer.model_copy(
            update={"learning_rate": rate, "lora": None}
        )
        own_spec = spec.model_copy(
            update={
                "model_path": spec.critic_path or spec.model_path,
                "trainer": self._loop,
                # no replay of the policy's experts
                "algorithm": AlgorithmConfig(),
            }
        )
        self._ranks = ranks
        self._meter = meter
        self._built = TrainedModel(
            own_spec, ranks, needs_reference=False, kind=ValueModel
        )
        self.model = self._built.policy
        self.trained = self._built.trained
        self._steps = list[tuple[float, float, float]]()
        """Loss, clipped share and gradient norm of each step of the version."""

    @torch.no_grad()
    def values(self, batch: BatchNumbers) -> Float32N:
        """Return the value of the state before each sampled token, float32 [N], 0
        elsewhere. Waits for the device.

        Masked tokens too: they are states on the way to the reward of later tokens.
        """
        self._meter.enter("critic")
        self._steps.clear()
        is_sampled = batch.arrays.is_sampled
        outputs = list[tuple[MicroBatch, tuple[Tensor]]]()
        for micro, counts in self._micro_batches(batch, is_sampled):
            value_M = self.model(micro)
            if counts:
                outputs.append((micro, (value_M,)))
                flops = self.model.costs.flops(*micro.size, has_backward=False)
                self._meter.count(flops)
        shape = 1, len(is_sampled)
        value_N: Float32N = gather_tokens(outputs, shape, self._ranks)[0]
        # As after the policy's passes without a backward pass.
        reshard(self.model)
        self._meter.enter("")
        return value_N

    def add_gradient(self, batch: BatchNumbers, chosen: BoolN) -> ValueLoss:
        """Compute the gradient of the mean loss over the chosen tokens."""
        self._meter.enter("critic")
        num_chosen = int(chosen.sum())
        losses = list[MicroLoss]()
        for micro, counts in self._micro_batches(batch, chosen):
            value_M = self.model(micro)
            # As in the policy's pass: no rank leaves out a pass of FSDP2.
            if not counts:
                (value_M.sum() * 0.0).backward()
                continue
            assert batch.value_N is not None
            assert batch.return_N is not None
            old_M, return_M = (
                to_device(value_N[micro.source_M], value_M.device)
                for value_N in (batch.value_N, batch.return_N)
            )
            clip = self.settings.value_clip
            loss_M, is_clipped_M = value_loss(value_M, old_M, return_M, clip)
            loss = loss_M.sum() * (1.0 / num_chosen)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append((loss.detach(), {"clipped": is_clipped_M.sum()}))
            flops = self.model.costs.flops(*micro.size, has_backward=True)
            self._meter.count(flops)
        mean, stats = gather_losses(losses, self._ranks)
        self._meter.enter("")
        return ValueLoss(num_chosen, mean, stats["clipped"] / max(num_chosen, 1))

    def clip(self, step: int, loss: ValueLoss) -> dict[str, float]:
        """Clip the gradient for optimizer step `step` of the run; return loss and
        norm, which must be finite for a step.
        """
        norm = self.trained.prepare_step(step, self._ranks)
        self._steps.append((loss.loss, loss.clipped, norm))
        return {"the critic's loss": loss.loss, "its gradient norm": norm}

    def metrics(self, batch: BatchNumbers) -> dict[str, float]:
        """Return metrics of the batch's version by full name; loss, share and norm are
        means over finite steps.
        """
        metrics = dict[str, float]()
        finite = [step for step in self._steps if all(map(math.isfinite, step))]
        names = ("critic/loss", "critic/clip_fraction", "critic/grad_norm")
        for name, numbers in zip(names, zip(*finite, strict=True), strict=False):
            metrics[name] = sum(numbers) / len(numbers)
        assert batch.value_N is not None
        assert batch.return_N is not None
        value_M = batch.value_N[batch.has_loss].astype(np.float64)
        return_M = batch.return_N[batch.has_loss].astype(np.float64)
        metrics["critic/value_mean"] = float(value_M.mean())
        # Equal returns have no variance to explain.
        if (variance := float(return_M.var())) > 0:
            unexplained = float((return_M - value_M).var())
            metrics["critic/explained_variance"] = 1.0 - unexplained / variance
        return metrics

    def _micro_batches(
        self, batch: BatchNumbers, chosen: BoolN
    ) -> list[tuple[MicroBatch, bool]]:
        rules = self.model.plan.rules(self._loop.micro_batch_tokens)
        return packing.micro_batches(
            batch.header,
            batch.arrays,
            chosen,
            rules,
            self._built.device,
            self._ranks,
            self.model.costs,
        )
