"""Logit bias and penalties of calls: the trainer computes them again from the ids of
the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.config.trainer_config import MOST_ADJUSTED
from asyncrl.messages.records import Adjustment
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.models.devices import to_device
from asyncrl.trainer.tree import BoolN, IntN

PLAIN = -1


class AdjustedCall(NamedTuple):
    """Tokens [start, end) of a batch, of a trajectory that begins at `text`."""

    text: int
    start: int
    end: int
    adjustment: Adjustment


@dataclass(frozen=True)
class AdjustedCalls:
    """`set_N` int32 [N]: the number of each loss token's adjustment, or PLAIN. Tokens
    with one number and equal texts before them have the same logits.
    """

    calls: list[AdjustedCall]
    set_N: npt.NDArray[np.int32]


def find_adjusted(
    header: BatchHeader, arrays: Tokens, has_loss: BoolN
) -> AdjustedCalls | None:
    """Return the calls with adjusted logits, or None."""
    set_N = np.full(len(has_loss), PLAIN, np.int32)
    calls = list[AdjustedCall]()
    known = dict[tuple[int, int], int]()
    starts = np.array([entry.start for entry in header.trajectories])
    for span in arrays.calls:
        if span.adjustment is None or not has_loss[span.start : span.end].any():
            continue
        text = int(starts[np.searchsorted(starts, span.start, side="right") - 1])
        calls.append(AdjustedCall(text, span.start, span.end, span.adjustment))
        # The place too: what one rollout has sampled may be the prompt of another, and
        # penalties tell them apart. Calls with equal settings share an object.
        key = id(span.adjustment), span.start - text
        set_N[span.start : span.end] = known.setdefault(key, len(known))
    set_N[~has_loss] = PLAIN
    return AdjustedCalls(calls, set_N) if calls else None


def check_adjusted(arrays: Tokens, vocab_size: int) -> None:
    """Raise Refused (422) for a bias of a token that the model does not know."""
    for span in arrays.calls:
        if span.adjustment is None:
            continue
        for token_id in span.adjustment.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise Refused(
                    422,
                    f"a call has a logit_bias of token id {token_id}",
                    rule=f"ids are below {vocab_size}",
                    way_out="use engines that serve this model; start the run again.",
                )


@dataclass(frozen=True)
class ChangedCall:
    """Changes of the logits of K rows, which are pairs of a call, in their tokens' order.

    Only ids that have a bias, or are in the text, change: these are `ids` int64 [U] on
    the host, ascending, and `id_U`. From row `begin_A` on, id number `column_A` is in the
    text once more; `own_A` int32 is 1 if the call has sampled it. All A are ordered by
    their ids, and `before` int64 [U + 1] on the host counts pairs of smaller ids. `less_C`
    float32: the amount subtracted after C samples of an id. `slope_3`: derivatives of
    changed logits, outside of the text, above 0 and below.

    Example: the prompt 7, and 5 5 6 sampled with a frequency penalty. No logit of the
    first token changes, that of id 5 counts once for the second and twice for the third.
        >>> call = AdjustedCall(0, 1, 4, Adjustment(frequency_penalty=0.5))
        >>> ids = np.array([7, 5, 5, 6], np.int32)
        >>> rows = np.array([0, 1, 2])
        >>> changed = ChangedCall.of(call, ids, rows, rows + 1, torch.device("cpu"))
        >>> logits = torch.zeros(3, 8)
        >>> _ = [*changed.apply_to(logits, slice(0, 8), 1.0)]
        >>> logits[:, 5].tolist()
        [0.0, -0.5, -1.0]
    """

    ids: IntN
    before: IntN
    has_factors: bool
    row_K: Tensor
    id_U: Tensor
    bias_U: Tensor
    begin_A: Tensor
    column_A: Tensor
    own_A: Tensor
    less_C: Tensor
    slope_3: Tensor

    @classmethod
    def of(
        cls,
        call: AdjustedCall,
        ids: npt.NDArray[np.int32],
        row_K: IntN,
        place_K: IntN,
        device: torch.device,
    ) -> ChangedCall:
        """`ids`: of the batch, in which the rows' targets are at `place_K`, ascending."""
        given = call.adjustment
        has_factors = given.repetition_penalty != 1.0
        first = call.text if has_factors else call.start
        # The last target is behind no row.
        last = place_K[-1] if given.has_penalty else first
        place_A = first + np.argsort(ids[first:last], kind="stable")
        changed_U = np.union1d(ids[place_A], [*given.logit_bias]).astype(np.int64)
        column_A = np.searchsorted(changed_U, ids[place_A])
        biases = [given.logit_bias.get(one, 0.0) for one in changed_U.tolist()]
        is_own_A = place_A >= call.start
        most = np.bincount(column_A[is_own_A], minlength=1).max()
        count_C = np.arange(most + 1)
        less_C = given.frequency_penalty * count_C + given.presence_penalty * (
            count_C > 0
        )
        factor = np.float32(given.repetition_penalty)
        arrays = (
            row_K,
            changed_U,
            np.array(biases, np.float32),
            np.searchsorted(place_K, place_A, side="right"),
            column_A,
            is_own_A.astype(np.int32),
            less_C.astype(np.float32),
            np.array([1.0, np.float32(1.0) / factor, factor], np.float32),
        )
        before = np.searchsorted(column_A, np.arange(len(changed_U) + 1))
        tensors = (to_device(array, device) for array in arrays)
        return cls(changed_U, before, has_factors, *tensors)

    def apply_to(
        self, logits_MC: Tensor, part: slice, temperature: float
    ) -> Iterator[ChangedBlock]:
        """Change a slice of the vocabulary in place, at most MOST_ADJUSTED logits at
        once. The logits are divided by `temperature`.
        """
        first, last = np.searchsorted(self.ids, [part.start, part.stop]).tolist()
        width = max(MOST_ADJUSTED // len(self.row_K), 1)
        for start in range(first, last, width):
            ids = slice(start, min(start + width, last))
            index = self.row_K[:, None], self.id_U[ids] - part.start
            bias_W = self.bias_U[ids].to(logits_MC.dtype)
            value_KW = logits_MC[index] + bias_W / temperature
            kind_KW = None
            if self.has_factors:
                kind_KW = self._count(ids, torch.ones_like(self.own_A)).clamp_(max=1)
                kind_KW *= 2 - (value_KW > 0).int()
                value_KW = value_KW * self.slope_3[kind_KW].to(value_KW.dtype)
                kind_KW = kind_KW.to(torch.int8)
            less_C = self.less_C.to(logits_MC.dtype) / temperature
            logits_MC[index] = value_KW - less_C[self._count(ids, self.own_A)]
            yield ChangedBlock(index, kind_KW, self.slope_3)

    def _count(self, ids: slice, number_A: Tensor) -> Tensor:
        """Return int32 [K, W]: the sums up to each row for W of the ids."""
        these = slice(*self.before[[ids.start, ids.stop]].tolist())
        zero_KW = number_A.new_zeros(len(self.row_K), ids.stop - ids.start)
        places = self.begin_A[these], self.column_A[these] - ids.start
        return zero_KW.index_put_(places, number_A[these], accumulate=True).cumsum(
            0, dtype=torch.int32
        )


class ChangedBlock(NamedTuple):
    """Changed logits of a slice of the vocabulary, at `places`. `kind_KW`: the numbers
    of their derivatives in `slope_3`, if these are not all 1.
    """

    places: tuple[Tensor, Tensor]
    kind_KW: Tensor | None
    slope_3: Tensor

    def correct(self, grad_MC: Tensor, grad_bias_C: Tensor | None) -> None:
        """Multiply gradients by the derivatives, in place."""
        if self.kind_KW is None:
            return
        before_KW = grad_MC[self.places]
        after_KW = (before_KW * self.slope_3[self.kind_KW.int()]).to(grad_MC.dtype)
        grad_MC[self.places] = after_KW
        if grad_bias_C is not None:
            change_W = (after_KW - before_KW).to(grad_bias_C.dtype).sum(dim=0)
            grad_bias_C.index_add_(0, self.places[1], change_W)


def changed_calls(
    adjusted: AdjustedCalls | None,
    ids: npt.NDArray[np.int32],
    source_U: IntN,
    device: torch.device,
) -> list[ChangedCall]:
    """Return the changes of pairs, whose targets are at `source_U` of the batch; row u
    is pair u.
    """
    if adjusted is None:
        return []
    (row_K,) = np.nonzero(adjusted.set_N[source_U] != PLAIN)
    row_K = row_K[np.argsort(source_U[row_K])]
    place_K = source_U[row_K]
    starts = np.array([call.start for call in adjusted.calls])
    number_K = np.searchsorted(starts, place_K, side="right") - 1
    # Without penalties nothing is counted, so all calls with one bias are like one call.
    first = dict[int, int]()
    owners = [
        number
        if call.adjustment.has_penalty
        else first.setdefault(id(call.adjustment), number)
        for number, call in enumerate(adjusted.calls)
    ]
    number_K = np.array(owners)[number_K]
    changed = list[ChangedCall]()
    for number in np.unique(number_K).tolist():
        is_own_K = number_K == number
        own = row_K[is_own_K], place_K[is_own_K]
        changed.append(ChangedCall.of(adjusted.calls[number], ids, *own, device))
    return changed


def change(
    calls: Iterable[ChangedCall], logits_MC: Tensor, part: slice, temperature: float
) -> list[ChangedBlock]:
    """Change the logits of a slice of the vocabulary in place."""
    blocks = (call.apply_to(logits_MC, part, temperature) for call in calls)
    return [*chain.from_iterable(blocks)]
