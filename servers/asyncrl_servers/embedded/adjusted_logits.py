"""Logit bias and penalties of an embedded engine's sequences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.messages.records import Adjustment
from asyncrl.models.devices import to_device


class AdjustedIds:
    """The ids of a sequence whose next logits differ from the model's: those with a
    bias and, with a penalty, those that the text has.
    """

    def __init__(
        self,
        adjustment: Adjustment,
        token_ids: npt.NDArray[np.int64],
        num_sampled: int,
        max_tokens: int,
    ) -> None:
        """The last `num_sampled` ids were sampled by earlier segments of the call, which
        may sample `max_tokens` more.
        """
        self._adjustment = adjustment
        self._places = dict[int, int]()
        most = len(adjustment.logit_bias) + len(token_ids) + max_tokens
        self._ids = np.zeros(most, np.int64)
        self._biases = np.zeros(most, np.float32)
        self._counts = np.zeros(most, np.float32)
        """How often this call has sampled each id."""
        self._is_in_text = np.zeros(most, np.bool_)
        for token_id, bias in adjustment.logit_bias.items():
            self._biases[self._place_of(token_id)] = bias
        num_prompt = len(token_ids) - num_sampled
        if adjustment.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(token_ids[:num_prompt].tolist()):
                self._is_in_text[self._place_of(token_id)] = True
        for token_id in token_ids[num_prompt:].tolist():
            self.take(token_id)

    def take(self, token_id: int) -> None:
        """Count a sampled token."""
        if self._adjustment.has_penalty:
            place = self._place_of(token_id)
            self._counts[place] += 1.0
            self._is_in_text[place] = True

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """int64 [A], each id once."""
        return self._ids[: len(self._places)]

    @property
    def changes(self) -> npt.NDArray[np.float32]:
        """float32 [3, A]: bias, factor, and what is subtracted."""
        given = self._adjustment
        length = len(self._places)
        counts = self._counts[:length]
        factors = np.where(self._is_in_text[:length], given.repetition_penalty, 1.0)
        less = given.frequency_penalty * counts + given.presence_penalty * (counts > 0)
        return np.stack([self._biases[:length], factors, less]).astype(np.float32)

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        self._ids[place] = token_id
        return place


def adjust(adjusted: Mapping[int, AdjustedIds], logits_NV: Tensor) -> Tensor:
    """Return the logits, float32, with these rows adjusted; may overwrite them."""
    if not adjusted:
        return logits_NV
    logits_NV = logits_NV.float()
    row_A = np.repeat([*adjusted], [len(one.ids) for one in adjusted.values()])
    id_A = np.concatenate([one.ids for one in adjusted.values()])
    changes_3A = np.concatenate([one.changes for one in adjusted.values()], axis=1)
    device = logits_NV.device
    index = to_device(np.stack([row_A, id_A]), device).unbind()
    bias_A, factor_A, less_A = to_device(changes_3A, device).unbind()
    value_A = logits_NV[index] + bias_A
    value_A = (value_A / factor_A).where(value_A > 0, value_A * factor_A)
    logits_NV[index] = value_A - less_A
    return logits_NV
