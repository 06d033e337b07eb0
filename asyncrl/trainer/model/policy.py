"""The language model as the trainer sees it: packed tokens in, logprobs out. Knows transformers; knows no
loss.

Two plans, chosen at the start by comparing both with one plain forward pass a sequence (plan_check.py):

    packed   every token once, no padding, shared prefixes computed once (attention.py). All usual
             architectures.
    padded   rows of similar length padded on the right, where causality alone keeps padding away from real
             tokens. Slower; for recurrent state, attention of the model's own, and sliding windows that are
             shorter than a sequence.

Output head: logits [M, V] never exist as a whole. The head is applied to all M tokens and a slice of C
vocabulary entries at a time, with the running maximum, sum of exponentials and entropy sum of an online
softmax. Of each slice the exponentials are kept for the backward pass, in the weights' dtype, up to
SAVED_BYTES; beyond it they are computed once more. Logits, softmax and entropy are float32 (float64 for
float64 weights): products of bfloat16 numbers are exact in it. The backward pass multiplies in the weights'
dtype.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.trainer.model.attention import ATTENTION
from asyncrl.trainer.model.packing import MicroBatch
from asyncrl.trainer.model.plan_check import Plan, find_plan, packed_inputs

CHUNK_LOGITS = {"cpu": 2**21}
"""Most logits alive at once on such a device: what stays in its caches."""
GPU_CHUNK_LOGITS = 2**26
"""The same on any other: what fills it."""
MIN_CHUNK = 256
"""Fewest vocabulary entries of a slice, however many tokens there are."""
SAVED_BYTES = 2**30
"""Most memory for exponentials kept for the backward pass."""


def head_logprobs(
    hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_M: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(logprob_M with gradient, entropy_M without) in nats, of softmax((hidden W^T + b) / temperature)."""
    keep = torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad)
    return _HeadLogprobs.apply(hidden_MD, weight_VD, bias_V, target_M, temperature, keep)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def highest_logprob(hidden_D: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Of the most likely vocabulary entry, scalar: as head_logprobs gives it at temperature 1."""
    wide_1D = (hidden_D.to(_wide(weight_VD)) if _multiplies_wide(weight_VD) else hidden_D)[None]
    anything_1 = torch.zeros(1, dtype=torch.int64, device=hidden_D.device)
    logits_V = torch.cat(
        [_logits(wide_1D, weight_VD, bias_V, part, 1.0)[0] for part in _slices(anything_1, len(weight_VD))]
    )
    return torch.log_softmax(logits_V, dim=-1).max()


@dataclass(frozen=True)
class _Slice:
    """Vocabulary entries [start, end) and the tokens whose target is one of them: `rows`, and the targets
    counted from start.
    """

    start: int
    end: int
    rows: Tensor
    targets: Tensor


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        wide_MD = hidden_MD.to(_wide(weight_VD)) if _multiplies_wide(weight_VD) else hidden_MD
        target_logit_M, sum_M, product_M = hidden_MD.new_zeros(
            (3, len(hidden_MD)), dtype=_wide(weight_VD)
        ).unbind()
        highest_M = torch.full_like(sum_M, -torch.inf)
        kept: list[tuple[Tensor | None, Tensor]] = []
        saved_bytes = 0
        parts = _slices(target_M, len(weight_VD))
        for part in parts:
            logits_MC = _logits(wide_MD, weight_VD, bias_V, part, temperature)
            target_logit_M[part.rows] = logits_MC[part.rows, part.targets]
            top_M = torch.maximum(logits_MC.amax(dim=-1), highest_M)
            change_M = (highest_M - top_M).clamp_(min=-1e30)  # the first is -inf, and -inf * 0 no number
            product_M = (product_M + sum_M * change_M) * change_M.exp()
            sum_M, highest_M = sum_M * change_M.exp(), top_M
            logits_MC -= highest_M[:, None]
            exponential_MC = logits_MC.exp()
            sum_M = sum_M + exponential_MC.sum(dim=-1)
            product_M = product_M + logits_MC.mul_(exponential_MC).sum(dim=-1)
            saved_bytes += logits_MC.numel() * weight_VD.element_size()
            kept.append(
                (
                    exponential_MC.to(weight_VD.dtype) if keep and saved_bytes <= SAVED_BYTES else None,
                    highest_M,
                )
            )
        # The log-sum-exp is highest + log(sum): kept apart, since their sum would lose digits where logits
        # are large.
        logprob_M, entropy_M = (target_logit_M - highest_M) - sum_M.log(), sum_M.log() - product_M / sum_M
        if keep:
            ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, highest_M, sum_M)
            ctx.parts, ctx.kept, ctx.temperature = parts, kept, temperature
        ctx.mark_non_differentiable(entropy_M)
        return logprob_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, target_M, highest_M, sum_M = ctx.saved_tensors
        grad_M = grads[0] / ctx.temperature
        wide = _wide(weight_VD)
        wide_MD = hidden_MD.to(wide)
        grad_hidden_MD = torch.zeros_like(wide_MD)
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.empty_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None
        for number, part in enumerate(ctx.parts):
            exponential_MC, reference_M = kept[number]
            kept[number] = None
            if exponential_MC is None:
                operand_MD = wide_MD if _multiplies_wide(weight_VD) else hidden_MD
                logits_MC = _logits(operand_MD, weight_VD, bias_V, part, ctx.temperature)
                exponential_MC = (logits_MC - reference_M[:, None]).exp_().to(weight_VD.dtype)
            # probability = exponential * exp(reference - highest) / sum: the factor goes to the smaller side
            # of each product.
            factor_M = -grad_M * (reference_M - highest_M).exp() / sum_M
            weight_CD = weight_VD[part.start : part.end]
            grad_hidden_MD.addcmul_((exponential_MC @ weight_CD).to(wide), factor_M[:, None])
            if grad_weight_VD is not None:
                grad_CD = (exponential_MC.t() @ (wide_MD * factor_M[:, None]).to(weight_VD.dtype)).to(wide)
                grad_CD.index_add_(0, part.targets, wide_MD[part.rows] * grad_M[part.rows, None])
                grad_weight_VD[part.start : part.end] = grad_CD
            if grad_bias_V is not None:
                grad_C = exponential_MC.t().to(wide) @ factor_M
                grad_bias_V[part.start : part.end] = grad_C.index_add_(0, part.targets, grad_M[part.rows])
        grad_hidden_MD.addcmul_(weight_VD[target_M].to(wide), grad_M[:, None])
        return grad_hidden_MD.to(hidden_MD.dtype), grad_weight_VD, grad_bias_V, None, None, None


def _slices(target_M: Tensor, vocab_size: int) -> list[_Slice]:
    size = max(CHUNK_LOGITS.get(target_M.device.type, GPU_CHUNK_LOGITS) // max(len(target_M), 1), MIN_CHUNK)
    starts = list(range(0, vocab_size, size))
    ordered_M, order_M = target_M.sort(stable=True)
    bounds = torch.searchsorted(
        ordered_M, torch.tensor([*starts, vocab_size], device=target_M.device)
    ).tolist()
    return [
        _Slice(start, min(start + size, vocab_size), order_M[first:last], ordered_M[first:last] - start)
        for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True)
    ]


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _multiplies_wide(weight: Tensor) -> bool:
    """Whether logits come from operands converted to float32: everywhere but on CUDA, whose kernels can sum
    up in it.
    """
    return not (weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16))


def _logits(
    hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: _Slice, temperature: float
) -> Tensor:
    weight_CD = weight_VD[part.start : part.end]
    if _multiplies_wide(weight_VD):
        logits_MC = hidden_MD @ weight_CD.to(hidden_MD.dtype).t()
    else:
        logits_MC = torch.mm(hidden_MD, weight_CD.t(), out_dtype=torch.float32)
    if bias_V is not None:
        logits_MC += bias_V[part.start : part.end]
    return logits_MC if temperature == 1.0 else logits_MC.mul_(1.0 / temperature)


log = logging.getLogger("asyncrl.trainer")

PADDED_SPREAD_TOKENS = 32
"""On the padded plan, rows whose lengths differ by no more than this share one forward pass."""


class Policy(nn.Module):
    """A Hugging Face causal language model and the plan by which it is run.

    Everything that calls the model's forward is in here, and every weight is used inside forward(): FSDP2
    wraps this module.
    """

    def __init__(self, model: Any, plan: Plan | None = None) -> None:
        """Finds the plan by running the model on a few tokens, unless one is given."""
        super().__init__()
        self.model = model
        self.plan = find_plan(model) if plan is None else plan
        if self.plan.is_packed and model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        if not self.plan.is_packed:
            log.warning(
                "%s is trained on padded rows, which is slower: %s", type(model).__name__, self.plan.reason
            )

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(logprob_M with gradient, entropy_M without): float32 nats of softmax(logits / temperature)."""
        return self._packed(micro, temperature) if self._fits(micro) else self._padded(micro, temperature)

    @torch.no_grad()
    def text_logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of one sequence: (logprob_M of its targets; the highest logprob where the last one stands), in nats
        at temperature 1.

        As forward() computes them, without a gradient. What shards a policy must know of this second way in.
        """
        inputs = packed_inputs(micro) if self._fits(micro) else {"input_ids": micro.token_ids_N[None]}
        if self.plan.has_plain_head:
            hidden_MD = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0, micro.predict_M]
            head = self.model.get_output_embeddings()
            logprob_M, _ = head_logprobs(hidden_MD, head.weight, head.bias, micro.target_M, 1.0)
            return logprob_M, highest_logprob(hidden_MD[-1], head.weight, head.bias)
        logprob_MV = torch.log_softmax(
            self.model(**inputs, use_cache=False).logits[0, micro.predict_M].float(), dim=-1
        )
        return logprob_MV.gather(-1, micro.target_M[:, None]).squeeze(-1), logprob_MV[-1].max()

    def enable_gradient_checkpointing(self) -> None:
        """Keep only each layer's input for the backward pass, which then computes the layer once more. Raises
        ConfigError.
        """
        model = self.model
        # The old name warns that it goes in transformers v6; the new one came in the course of v5.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(
                f"trainer.gradient_checkpointing=true, but {type(model).__name__} cannot do it ({error})",
                way_out="set trainer.gradient_checkpointing=false and a smaller trainer.micro_batch_tokens.",
            ) from error
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                # transformers checkpoints layers in training mode alone; their children stay without dropout.
                module.training = True

    def _fits(self, micro: MicroBatch) -> bool:
        """Whether the packed plan can have it."""
        return self.plan.is_packed and (self.plan.window is None or micro.layout.longest <= self.plan.window)

    def _packed(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._run(packed_inputs(micro), None, micro.predict_M, micro.target_M, temperature)

    def _padded(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        column_M = micro.position_N[micro.predict_M]
        logprobs, entropies, order = [], [], []
        for rows in _similar_rows([prefix + own for _, prefix, _, own in micro.layout.rows]):
            index_BT = torch.from_numpy(_row_index([micro.layout.rows[row] for row in rows])).to(
                micro.token_ids_N.device
            )
            place_S = torch.full((len(micro.layout.rows),), -1, device=index_BT.device)
            place_S[torch.tensor(rows, device=index_BT.device)] = torch.arange(
                len(rows), device=index_BT.device
            )
            row_M = place_S[micro.sequence_M]
            here = (row_M >= 0).nonzero().squeeze(-1)
            inputs = {"input_ids": micro.token_ids_N[index_BT]}
            logprob, entropy = self._run(
                inputs, row_M[here], column_M[here], micro.target_M[here], temperature
            )
            logprobs.append(logprob)
            entropies.append(entropy)
            order.append(here)
        place_M = torch.cat(order).argsort()
        return torch.cat(logprobs)[place_M], torch.cat(entropies)[place_M]

    def _run(
        self,
        inputs: dict[str, Any],
        row_M: Tensor | None,
        column_M: Tensor,
        target_M: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Forward, and the logprobs of the targets that the hidden states at [row, column] predict."""
        if self.plan.has_plain_head:
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            head = self.model.get_output_embeddings()
            chosen = hidden[0].index_select(0, column_M) if row_M is None else hidden[row_M, column_M]
            return head_logprobs(chosen, head.weight, head.bias, target_M, temperature)
        logits = self.model(**inputs, use_cache=False).logits
        logits_MV = (logits[0, column_M] if row_M is None else logits[row_M, column_M]).float() / temperature
        logprob_MV = torch.log_softmax(logits_MV, dim=-1)
        with torch.no_grad():
            entropy_M = torch.special.entr(logprob_MV.exp()).sum(dim=-1)
        return logprob_MV.gather(-1, target_M[:, None]).squeeze(-1), entropy_M


def _similar_rows(lengths: list[int]) -> list[list[int]]:
    """Numbers of the sequences, cut into rows of similar length, longest first."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not batches or lengths[batches[-1][0]] - lengths[row] > PADDED_SPREAD_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _row_index(rows: list[tuple[int, int, int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[B, T] where each row's tokens stand among the packed ones; 0, any token, where there is none."""
    width = max(prefix + own for _, prefix, _, own in rows)
    index_BT = np.zeros((len(rows), width), np.int64)
    for row, (prefix_start, prefix, own_start, own) in enumerate(rows):
        index_BT[row, :prefix] = prefix_start + np.arange(prefix)
        index_BT[row, prefix : prefix + own] = own_start + np.arange(own)
    return index_BT
