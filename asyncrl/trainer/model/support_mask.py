"""Recompute the tokens that a grammar allowed; the output head masks the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.grammar_checks import GrammarError
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.messages.trainer_api import BatchArrays, BatchHeader
from asyncrl.trainer.model.kernel_calls import to_device

log = logging.getLogger("asyncrl.trainer")

NOT_ALLOWED = -1e30
"""Masked logit. Differences stay finite, unlike with -inf."""
ANY = -1


@dataclass(frozen=True)
class AllowedSets:
    """K token sets as bits, uint8 [K, B], lowest bit first. `set_N` int32 [N]: each token's set, or ANY."""

    bits_KB: npt.NDArray[np.uint8]
    set_N: npt.NDArray[np.int32]


@dataclass(frozen=True)
class AllowedRows:
    """Sets of M tokens: `set_M` int64 indexes `bits_KB`, or ANY; tokens `row_R` have a set."""

    bits_KB: Tensor
    set_M: Tensor
    row_R: Tensor

    @classmethod
    def of(
        cls, bits_KB: npt.NDArray[np.uint8], set_M: npt.NDArray[np.int64], device: torch.device
    ) -> AllowedRows:
        arrays = bits_KB, set_M, np.flatnonzero(set_M != ANY)
        return cls(*(to_device(torch.from_numpy(array), device) for array in arrays))

    def mask(self, logits_MC: Tensor, part: slice) -> None:
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
    """Return the sets of loss tokens with a grammar, or None. Forbidden tokens lose their loss."""
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
