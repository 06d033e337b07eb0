"""Logit bias and penalties by transformers' processors, and by OpenAI's formula where
transformers has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

ADJUSTED: list[dict[str, Any]] = [
    {"logit_bias": {7: 3.5, 11: -100.0, 40: 1.0}},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "logit_bias": {10: -2.0, 12: 4.0}},
    {
        "logit_bias": {7: 2.0},
        "presence_penalty": -0.5,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.2,
    },
]


def adjusted_logits(
    logits_V: Tensor, ids: Sequence[int], num_prompt: int, **given: Any
) -> Tensor:
    """Return the logits of the token after `ids`."""
    scores_1V = logits_V[None].clone()
    ids_1T = torch.tensor([list(ids)])
    if bias := given.get("logit_bias"):
        pairs = [[[token_id], float(one)] for token_id, one in bias.items()]
        scores_1V = SequenceBiasLogitsProcessor(pairs)(ids_1T, scores_1V)
    if penalty := given.get("repetition_penalty"):
        # Each id once: the gradient of its scatter would count copies.
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        scores_1V = processor(ids_1T.unique()[None], scores_1V)
    less_1V = torch.zeros_like(scores_1V, requires_grad=False)
    for token_id, count in Counter(list(ids)[num_prompt:]).items():
        less_1V[0, token_id] += given.get("frequency_penalty", 0.0) * count
        less_1V[0, token_id] += given.get("presence_penalty", 0.0)
    return (scores_1V - less_1V)[0]
