"""From the losses of tokens to one number: what each is multiplied with. Knows counts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.tokens import check_vector


def token_weights(aggregate: str, tokens_per_sequence_S: Tensor, num_sequences: int, num_loss_tokens: int, max_tokens: int) -> Tensor:
    """float32 [S]: what every loss token of a sequence is multiplied with, so that the plain sum is the loss of an optimizer step.

    `tokens_per_sequence_S` int64, loss tokens of the sequences in question, all of the step's or some of them;
    `num_sequences` with loss tokens and `num_loss_tokens` in the whole step; `max_tokens` is rollout.max_tokens. By `aggregate`:
    token     1 / num_loss_tokens                 the mean over tokens (DAPO, https://arxiv.org/abs/2503.14476)
    sequence  1 / (num_sequences * its tokens)    the mean over sequences of their means (GRPO, https://arxiv.org/abs/2402.03300)
    constant  1 / (num_sequences * max_tokens)    no length in it (Dr. GRPO, https://arxiv.org/abs/2503.20783)
    A sequence without loss tokens has weight 0. Raises ValueError for another word, and for counts that cannot be.
    """
    check_vector("tokens_per_sequence_S", tokens_per_sequence_S, torch.int64)
    num_here, tokens_here = int((tokens_per_sequence_S > 0).sum()), int(tokens_per_sequence_S.sum())
    if num_here > num_sequences or tokens_here > num_loss_tokens or max_tokens < 1:
        raise ValueError(
            f"{num_here} sequences with {tokens_here} loss tokens cannot be part of a step of num_sequences={num_sequences}, "
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
