"""Logit bias and penalties of calls: the trainer computes them again from the ids of
the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.records import Adjustment
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.tree import BoolN, IntN, to_device

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


class Changes(NamedTuple):
    """Changes of A logits. `row_A`: the pair that they belong to."""

    row_A: npt.NDArray[np.int64]
    id_A: npt.NDArray[np.int64]
    bias_A: npt.NDArray[np.float32]
    factor_A: npt.NDArray[np.float32]
    less_A: npt.NDArray[np.float32]

    def where(self, chosen: npt.NDArray[np.generic]) -> Changes:
        return Changes(*(array[chosen] for array in self))

    def from_row(self, first: int) -> Changes:
        """Return the changes of pairs from `first` on, and count pairs from there."""
        kept = self.where(self.row_A >= first)
        return kept._replace(row_A=kept.row_A - first)


def changes_of(call: AdjustedCall, ids: npt.NDArray[np.int32]) -> Changes:
    """Return the changes of all logits of a call; a row is a token's place in the batch.
    `ids`: of the batch.

    Each id begins with its bias or its first place in the text, and each further place
    changes the logits of the rows behind it, up to the next place.

    Example: the prompt 7, and 5 5 6 sampled with a frequency penalty. No logit of the
    first token changes, that of id 5 counts once for the second and twice for the third.
        >>> call = AdjustedCall(0, 1, 4, Adjustment(frequency_penalty=0.5))
        >>> found = changes_of(call, np.array([7, 5, 5, 6], np.int32))
        >>> found.row_A.tolist(), found.id_A.tolist(), found.less_A.tolist()
        ([2, 3], [5, 5], [0.5, 1.0])
    """
    given = call.adjustment
    first = call.text if given.repetition_penalty != 1.0 else call.start
    # The last token is behind no row.
    last = call.end - 1 if given.has_penalty else first
    bias_ids = np.array([*given.logit_bias], np.int64)
    id_E = np.concatenate([bias_ids, ids[first:last]])
    # A bias is there before all places.
    place_E = np.concatenate([np.full(len(bias_ids), -1), np.arange(first, last)])
    bias_E = np.zeros(len(id_E), np.float32)
    bias_E[: len(bias_ids)] = [*given.logit_bias.values()]
    order = np.lexsort((place_E, id_E))
    id_E, place_E, bias_E = id_E[order], place_E[order], bias_E[order]
    is_first_E = np.append(True, id_E[1:] != id_E[:-1])[: len(id_E)]
    starts = np.flatnonzero(is_first_E)
    group_E = is_first_E.cumsum() - 1
    is_own_E = (place_E >= call.start).astype(np.int64)
    sum_E = is_own_E.cumsum()
    count_E = sum_E - (sum_E - is_own_E)[starts][group_E]
    begin_E = np.maximum(place_E + 1, call.start)
    end_E = np.append(np.where(is_first_E[1:], call.end, place_E[1:] + 1), call.end)
    size_E = np.maximum(end_E[: len(id_E)] - begin_E, 0)
    factor_E = np.where(place_E >= 0, given.repetition_penalty, 1.0)
    less_E = given.frequency_penalty * count_E + given.presence_penalty * (count_E > 0)
    row_A = np.arange(size_E.sum()) + np.repeat(
        begin_E - (size_E.cumsum() - size_E), size_E
    )
    return Changes(
        row_A,
        np.repeat(id_E, size_E).astype(np.int64),
        np.repeat(bias_E[starts][group_E], size_E),
        np.repeat(factor_E, size_E).astype(np.float32),
        np.repeat(less_E, size_E).astype(np.float32),
    )


def changes_of_pairs(
    adjusted: AdjustedCalls | None, ids: npt.NDArray[np.int32], source_U: IntN
) -> Changes | None:
    """Return the changes of the logits of pairs, whose targets are at `source_U`, in
    order of their ids; or None.
    """
    if adjusted is None:
        return None
    own_U = np.flatnonzero(adjusted.set_N[source_U] != PLAIN)
    if not len(own_U):
        return None
    row_N = np.full(len(ids), -1, np.int64)
    row_N[source_U[own_U]] = own_U
    starts = np.array([call.start for call in adjusted.calls])
    numbers = np.searchsorted(starts, source_U[own_U], side="right") - 1
    found = list[Changes]()
    for number in np.unique(numbers).tolist():
        whole = changes_of(adjusted.calls[number], ids)
        whole = whole._replace(row_A=row_N[whole.row_A])
        found.append(whole.where(whole.row_A >= 0))
    joined = Changes(*map(np.concatenate, zip(*found, strict=True)))
    return joined.where(np.argsort(joined.id_A, kind="stable"))


@dataclass(frozen=True)
class ChangedLogits:
    """Changes of A logits on the device. `index`: where the logits are. `ids`: on the
    host, ascending.
    """

    index: tuple[Tensor, ...]
    bias_A: Tensor
    factor_A: Tensor
    less_A: Tensor
    ids: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, changes: Changes, index: list[npt.NDArray[np.int64]], device: torch.device
    ) -> ChangedLogits:
        numbers = np.stack([changes.bias_A, changes.factor_A, changes.less_A])
        bias, factor, less = to_device(torch.from_numpy(numbers), device).unbind()
        places = to_device(torch.from_numpy(np.stack(index)), device).unbind()
        return cls(places, bias, factor, less, changes.id_A)

    @classmethod
    def of_plain(
        cls, changes: Changes, num_plain: int, device: torch.device
    ) -> ChangedLogits | None:
        """Return the changes of the first `num_plain` pairs, or None."""
        plain = changes.where(changes.row_A < num_plain)
        if not len(plain.id_A):
            return None
        return cls.of(plain, [plain.row_A, plain.id_A], device)

    def apply(self, value_A: Tensor, part: slice, temperature: float) -> Changed:
        """Return the changed logits of a part of the entries, all divided by
        `temperature`, and their derivatives.
        """
        bias_A, factor_A, less_A = (
            one[part].to(value_A.dtype)
            for one in (self.bias_A, self.factor_A, self.less_A)
        )
        raised_A = value_A + bias_A / temperature
        slope_A = torch.where(raised_A > 0, 1.0 / factor_A, factor_A)
        return Changed(raised_A * slope_A - less_A / temperature, slope_A)

    def apply_to(self, logits_MC: Tensor, part: slice, temperature: float) -> Changed:
        """Change a slice of the vocabulary in place."""
        first, last = np.searchsorted(self.ids, [part.start, part.stop]).tolist()
        entries = slice(first, last)
        row_A, id_A = self.index
        index = row_A[entries], id_A[entries] - part.start
        changed = self.apply(logits_MC[index], entries, temperature)
        logits_MC[index] = changed.value_A
        return changed._replace(places=index)


class Changed(NamedTuple):
    value_A: Tensor
    slope_A: Tensor
    places: tuple[Tensor, ...] = ()

    def correct(self, grad_MC: Tensor, grad_bias_C: Tensor | None) -> None:
        """Multiply gradients of changed logits by the derivatives, in place."""
        before_A = grad_MC[self.places]
        after_A = (before_A * self.slope_A).to(grad_MC.dtype)
        grad_MC[self.places] = after_A
        if grad_bias_C is not None:
            change_A = (after_A - before_A).to(grad_bias_C.dtype)
            grad_bias_C.index_add_(0, self.places[1], change_A)
