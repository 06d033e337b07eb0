"""Which tokens a grammar allowed where one was sampled, found again from the grammar and the tokens: the
output head masks the others, so that logprobs are those of the distribution that was sampled from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.calls import BatchArrays, BatchHeader
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars
from asyncrl.trainer.model.kernel_calls import to_device

log = logging.getLogger("asyncrl.trainer")

NOT_ALLOWED = -1e30
"""In place of a logit: its exponential is 0 beside any other. Differences of -inf would be no number."""
ANY = -1


@dataclass(frozen=True)
class AllowedSets:
    """K sets of tokens as bits, uint8 [K, B]: entry v of the vocabulary is bit v % 8 of byte v // 8, the
    lowest bit first. `set_N` int32 [N]: the set of each token of a batch, or ANY.
    """

    bits_KB: npt.NDArray[np.uint8]
    set_N: npt.NDArray[np.int32]


@dataclass(frozen=True)
class AllowedRows:
    """Of M tokens on the device: `set_M` int64 [M] says which of the sets `bits_KB` each has, or ANY; the
    tokens `row_R` have one. The host knows them: to look for them on the device is to wait for it, once a
    slice of the vocabulary.
    """

    bits_KB: Tensor
    set_M: Tensor
    row_R: Tensor

    @classmethod
    def of(
        cls, bits_KB: npt.NDArray[np.uint8], set_M: npt.NDArray[np.int64], device: torch.device
    ) -> AllowedRows:
        """Sent to the device."""
        arrays = bits_KB, set_M, np.flatnonzero(set_M != ANY)
        return cls(*(to_device(torch.from_numpy(array), device) for array in arrays))

    def select(self, index: Tensor) -> AllowedRows:
        """Of the tokens at these places. Waits for the device."""
        set_M = self.set_M[index]
        return AllowedRows(self.bits_KB, set_M, (set_M != ANY).nonzero()[:, 0])

    def mask(self, logits_MC: Tensor, part: slice) -> None:
        """Leave what is allowed of these vocabulary entries, in place; other rows are not touched."""
        rows = self.row_R
        first, last = part.start // 8, -(-part.stop // 8)
        bytes_RB = self.bits_KB[self.set_M[rows], first:last]
        shifts = torch.arange(8, device=bytes_RB.device, dtype=torch.uint8)
        is_set_RC = (bytes_RB[:, :, None] >> shifts & 1).flatten(1).bool()
        is_set_RC = is_set_RC[:, part.start - 8 * first :][:, : part.stop - part.start]
        logits_MC[rows] = logits_MC[rows].masked_fill(~is_set_RC, NOT_ALLOWED)


def find_allowed(
    header: BatchHeader,
    arrays: BatchArrays,
    has_loss: npt.NDArray[np.bool_],
    make: Callable[[], TokenGrammars],
) -> AllowedSets | None:
    """The sets of the loss tokens that a grammar allowed; None if there are none. `make` is asked where there
    are.

    Tokens that a grammar does not allow, where an engine has another version of llguidance say, lose their
    loss in `has_loss`.
    """
    if not any(entry.grammars for entry in header.trajectories):
        return None
    set_N, known = np.full(len(has_loss), ANY, np.int32), dict[bytes, int]()
    num_lost, reason = 0, ""
    for entry in header.trajectories:
        for start, end, number in entry.grammars:
            span = slice(entry.start + start, entry.start + end)
            places = np.flatnonzero(has_loss[span]) + span.start
            if not len(places):
                continue
            try:
                matcher, at = make().begin(header.grammars[number]), span.start
                for at in range(span.start, int(places[-1]) + 1):
                    if has_loss[at]:
                        set_N[at] = known.setdefault(matcher.allowed_bits(), len(known))
                    matcher.take(int(arrays.token_ids[at]))
            except GrammarError as error:
                reason, lost = str(error), places[places >= at]
                set_N[lost], has_loss[lost] = ANY, False
                num_lost += len(lost)
    if num_lost:
        log.warning(
            "%d tokens are not trained: their grammar does not allow them here (%s)", num_lost, reason
        )
    if not known:
        return None
    return AllowedSets(np.stack([np.frombuffer(bits, np.uint8) for bits in known]), set_N)
