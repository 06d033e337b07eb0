"""Logprobs of the trainer's weights, of the tokens that carry loss alone. Knows no loss.

The logits [B, T, V] of a micro-batch never exist: the head is applied to the positions that predict a loss token, in
chunks, and once more in the backward pass. The head and the log-softmax are computed in float32 (TF32 on CUDA in bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK_LOGITS = 2**24
"""Most logits alive at once: 64 MiB in float32."""


@dataclass(frozen=True)
class TokenPlaces:
    """Where the loss tokens of a micro-batch stand: token m is predicted at [row[m], column[m]] and is target[m]; int64 [M]."""

    row: Tensor
    column: Tensor
    target: Tensor


def token_logprobs(model: Any, ids_BT: Tensor, places: TokenPlaces, temperature: float, *, has_plain_head: bool) -> tuple[Tensor, Tensor]:
    """(logprobs_M with gradient, entropy_M without), float32 in nats, of softmax(logits / temperature).

    Sequences are padded on the right, so causality alone keeps padding away from real tokens, and no attention mask is made.
    """
    if not has_plain_head:
        logits_MV = model(input_ids=ids_BT, use_cache=False).logits[places.row, places.column]
        logprob_MV = functional.log_softmax(logits_MV.float() / temperature, dim=-1)
        with torch.no_grad():
            entropy_M = _entropy(logprob_MV)
        return logprob_MV.gather(-1, places.target[:, None]).squeeze(-1), entropy_M
    hidden_MD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[places.row, places.column]
    head = model.get_output_embeddings()
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return _HeadLogprobs.apply(hidden_MD.float(), head.weight, head.bias, places.target, temperature)  # type: ignore[no-any-return, no-untyped-call]


def has_plain_head(model: Any) -> bool:
    """Whether logits are exactly the output embedding applied to the last hidden state: no soft cap, scale or other step between."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    ids_BT = torch.arange(4, device=head.weight.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return bool(torch.allclose(model(input_ids=ids_BT, use_cache=False).logits, head(hidden), rtol=1e-4, atol=1e-5))


class _HeadLogprobs(torch.autograd.Function):
    """Logprob of each target under softmax((hidden W^T + b) / temperature), chunk by chunk; saves no logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_M: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprob_M, entropy_M = torch.empty_like(hidden_MD[:, 0]), torch.empty_like(hidden_MD[:, 0])
        for rows in _chunks(len(hidden_MD), len(weight_VD)):
            logprob_RV = functional.log_softmax(functional.linear(hidden_MD[rows], weight_VD, bias_V) / temperature, dim=-1)
            logprob_M[rows] = logprob_RV.gather(-1, target_M[rows, None]).squeeze(-1)
            entropy_M[rows] = _entropy(logprob_RV)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_M)
        return logprob_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, target_M = ctx.saved_tensors
        grad_M = grads[0] / ctx.temperature
        grad_hidden_MD, grad_weight_VD = torch.empty_like(hidden_MD), torch.zeros_like(weight_VD)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for rows in _chunks(len(hidden_MD), len(weight_VD)):
            probability_RV = torch.softmax(functional.linear(hidden_MD[rows], weight_VD, bias_V) / ctx.temperature, dim=-1)
            grad_RV = probability_RV.mul_(-grad_M[rows, None])
            grad_RV.scatter_add_(-1, target_M[rows, None], grad_M[rows, None])
            grad_hidden_MD[rows] = grad_RV @ weight_VD
            grad_weight_VD.addmm_(grad_RV.T, hidden_MD[rows])
            if grad_bias_V is not None:
                grad_bias_V += grad_RV.sum(dim=0)
        return grad_hidden_MD, grad_weight_VD, grad_bias_V, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(CHUNK_LOGITS // vocab_size, 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _entropy(logprob_RV: Tensor) -> Tensor:
    """Entropy of each row in nats; a token of probability 0 adds 0."""
    entropy_R: Tensor = torch.special.entr(logprob_RV.exp()).sum(dim=-1)
    return entropy_R
