"""What the functions of tokens share: checks, ratios, sums over a sequence. Knows no loss."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to so many nats before exp: e^20 = 5e8 is past every clip and cap, and e^89 is
infinite in float32, which times an advantage of 0, or a gradient of 0, would be NaN."""


def check_tokens(sequence_M: Tensor, **named_M: Tensor) -> None:
    """Raise ValueError unless all are [M] of the same M, sequence_M int64, the others float32."""
    for name, tensor in {**named_M, "sequence_M": sequence_M}.items():
        check_vector(
            name,
            tensor,
            torch.int64 if name == "sequence_M" else torch.float32,
            len_like=next(iter(named_M.items())),
        )


def check_vector(
    name: str, tensor: Tensor, dtype: torch.dtype, len_like: tuple[str, Tensor] | None = None
) -> None:
    """Raise ValueError unless `tensor` is one-dimensional, of `dtype` and as long as the (name, tensor) it
    goes with.
    """
    like_name, like = len_like or (name, tensor)
    if tensor.ndim != 1 or tensor.dtype != dtype or tensor.shape != like.shape:
        beside = "" if like is tensor else f", as long as {like_name} {tuple(like.shape)}"
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but must be {dtype} of one dimension{beside}"
        )


def ratio(above_M: Tensor, below_M: Tensor) -> Tensor:
    """exp(above - below): how much more probable each token is under the policy above the line. float32
    [M].
    """
    return (above_M - below_M).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The sum over its sequence, at every token. float32 [M]."""
    # The buffer has room for M sequences, of which there are at most that many: no need to ask the device how
    # many there are.
    return torch.zeros_like(value_M).index_add(0, sequence_M, value_M)[sequence_M]


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The mean over its sequence's tokens, at every token. float32 [M]."""
    return sequence_sum(value_M, sequence_M) / sequence_sum(torch.ones_like(value_M), sequence_M)


# From the losses of tokens to one number: what each is multiplied with. Knows counts alone.


def token_weights(
    aggregate: str, tokens_per_sequence_S: Tensor, num_sequences: int, num_loss_tokens: int, max_tokens: int
) -> Tensor:
    """float32 [S]: what every loss token of a sequence is multiplied with, so that the plain sum is the loss
    of an optimizer step.

    `tokens_per_sequence_S` int64, loss tokens of the sequences in question, all of the step's or some of
    them; `num_sequences` with loss tokens and `num_loss_tokens` in the whole step; `max_tokens` is
    rollout.max_tokens. By `aggregate`: token     1 / num_loss_tokens                 the mean over tokens
    (DAPO, https://arxiv.org/abs/2503.14476) sequence  1 / (num_sequences * its tokens)    the mean over
    sequences of their means (GRPO, https://arxiv.org/abs/2402.03300) constant  1 / (num_sequences *
    max_tokens)    no length in it (Dr. GRPO, https://arxiv.org/abs/2503.20783) A sequence without loss tokens
    has weight 0. Raises ValueError for another word, and for counts that cannot be.
    """
    check_vector("tokens_per_sequence_S", tokens_per_sequence_S, torch.int64)
    num_here, tokens_here = int((tokens_per_sequence_S > 0).sum()), int(tokens_per_sequence_S.sum())
    if num_here > num_sequences or tokens_here > num_loss_tokens or max_tokens < 1:
        raise ValueError(
            f"{num_here} sequences with {tokens_here} loss tokens cannot be part of a step of "
            f"num_sequences={num_sequences}, "
            f"num_loss_tokens={num_loss_tokens} with max_tokens={max_tokens}"
        )
    divisors_S = {
        "token": torch.full_like(tokens_per_sequence_S, num_loss_tokens),
        "sequence": num_sequences * tokens_per_sequence_S,
        "constant": torch.full_like(tokens_per_sequence_S, num_sequences * max_tokens),
    }
    if aggregate not in divisors_S:
        raise ValueError(f"aggregate={aggregate!r} must be one of {', '.join(divisors_S)}")
    weight_S = 1.0 / divisors_S[aggregate].clamp(min=1).double()
    return torch.where(tokens_per_sequence_S > 0, weight_S, 0.0).float()
