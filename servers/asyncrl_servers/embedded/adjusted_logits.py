"""Logit bias and penalties of an embedded engine's sequences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.messages.records import Adjustment
from asyncrl.models.devices import to_device


class AdjustedRow:
    """How the logits of a sequence differ from the model's, for each id."""

    def __init__(
        self,
        adjustment: Adjustment,
        token_ids: npt.NDArray[np.int64],
        num_sampled: int,
        vocab_size: int,
    ) -> None:
        """The last `num_sampled` ids were sampled by earlier segments of the call."""
        self._adjustment = adjustment
        self._bias_V = np.zeros(vocab_size, np.float32)
        for token_id, bias in adjustment.logit_bias.items():
            self._bias_V[token_id] = bias
        self._is_in_text_V = np.zeros(vocab_size, np.bool_)
        self._is_in_text_V[token_ids] = True
        sampled = token_ids[len(token_ids) - num_sampled :]
        self._count_V = np.bincount(sampled, minlength=vocab_size).astype(np.float32)
        """How often this call has sampled each id."""

    def take(self, token_id: int) -> None:
        """Count a sampled token."""
        self._count_V[token_id] += 1.0
        self._is_in_text_V[token_id] = True

    def changes(self) -> npt.NDArray[np.float32]:
        """Return float32 [3, V]: bias, factor, and the subtracted penalty."""
        given = self._adjustment
        factor_V = np.where(self._is_in_text_V, given.repetition_penalty, 1.0)
        less_V = given.frequency_penalty * self._count_V
        less_V += given.presence_penalty * (self._count_V > 0)
        return np.stack([self._bias_V, factor_V, less_V]).astype(np.float32)


def adjust(adjusted: Mapping[int, AdjustedRow], logits_NV: Tensor) -> Tensor:
    """Return the logits, float32, with these rows adjusted; may overwrite them."""
    if not adjusted:
        return logits_NV
    logits_NV = logits_NV.float()
    for row, one in adjusted.items():
        bias_V, factor_V, less_V = to_device(one.changes(), logits_NV.device)
        value_V = logits_NV[row] + bias_V
        value_V = (value_V / factor_V).where(value_V > 0, value_V * factor_V)
        logits_NV[row] = value_V - less_V
    return logits_NV
