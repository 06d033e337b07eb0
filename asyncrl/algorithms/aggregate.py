"""What the functions of tokens share: checks, ratios, sums over a sequence, and the weights by which the
losses of tokens become one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to so many nats before exp: e^20 = 5e8 is past every clip and cap, and e^89 is
infinite in float32, which times an advantage of 0, or a gradient of 0, would be NaN."""


def check_tokens(sequence_M: Tensor, *values_M: Tensor) -> None:
    """Raise ValueError unless all are [M] of the same M, sequence_M int64, the others float32."""
    check_vector("sequence_M", sequence_M, torch.int64, len(values_M[0]))
    for value_M in values_M:
        check_vector("a tensor over tokens", value_M, torch.float32, len(sequence_M))


def check_vector(name: str, tensor: Tensor, dtype: torch.dtype, length: int | None = None) -> None:
    """Raise ValueError unless `tensor` is one-dimensional, of `dtype` and of `length`, if one is given."""
    if tensor.ndim != 1 or tensor.dtype != dtype or length not in (None, len(tensor)):
        shape = "[M]" if length is None else [length]
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but must be {dtype} {shape}")


def exp_ratio(log_ratio_M: Tensor) -> Tensor:
    """How much more probable a token, or all of a sequence, is under one policy than under another: exp of a
    difference of logprobs. float32 [M].
    """
    return log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The sum over its sequence, at every token. float32 [M]."""
    # The buffer has room for M sequences, of which there are at most that many: no need to ask the device how
    # many there are.
    return torch.zeros_like(value_M).index_add(0, sequence_M, value_M)[sequence_M]


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The mean over its sequence's tokens, at every token. float32 [M]."""
    return sequence_sum(value_M, sequence_M) / sequence_sum(torch.ones_like(value_M), sequence_M)


def token_weights(
    aggregate: str, tokens_per_sequence_S: Tensor, num_sequences: int, num_loss_tokens: int, max_tokens: int
) -> Tensor:
    """float32 [S]: what every loss token of a sequence is multiplied with, so that the plain sum is the loss
    of an optimizer step.

    `tokens_per_sequence_S` int64, loss tokens of the sequences in question, all of the step's or some of
    them; `num_sequences` with loss tokens and `num_loss_tokens` in the whole step; `max_tokens` is
    rollout.max_tokens. A sequence without loss tokens has weight 0. By `aggregate`:

        token     1 / num_loss_tokens               DAPO, https://arxiv.org/abs/2503.14476
        sequence  1 / (num_sequences * its tokens)  GRPO, https://arxiv.org/abs/2402.03300
        constant  1 / (num_sequences * max_tokens)  Dr. GRPO, https://arxiv.org/abs/2503.20783
    """
    check_vector("tokens_per_sequence_S", tokens_per_sequence_S, torch.int64)
    divisors_S = {
        "token": torch.full_like(tokens_per_sequence_S, num_loss_tokens),
        "sequence": num_sequences * tokens_per_sequence_S,
        "constant": torch.full_like(tokens_per_sequence_S, num_sequences * max_tokens),
    }
    weight_S = 1.0 / divisors_S[aggregate].clamp(min=1).double()
    return torch.where(tokens_per_sequence_S > 0, weight_S, 0.0).float()
