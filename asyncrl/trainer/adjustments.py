"""Logit bias and penalties of calls: the trainer computes them again from the ids of
the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


class Stretches(NamedTuple):
    """E changes of logits: of one id each, for the rows [begin, end)."""

    id_E: npt.NDArray[np.int64]
    begin_E: npt.NDArray[np.int64]
    end_E: npt.NDArray[np.int64]
    bias_E: npt.NDArray[np.float32]
    factor_E: npt.NDArray[np.float32]
    less_E: npt.NDArray[np.float32]

    def where(self, chosen: npt.NDArray[np.generic]) -> Stretches:
        return Stretches(*(array[chosen] for array in self))


def stretches_of(call: AdjustedCall, ids: npt.NDArray[np.int32]) -> Stretches:
    """Return the changes of all logits of a call; a row is a token's place in the batch.
    `ids`: of the batch.

    Each id begins with its bias or its first place in the text, and each further place
    changes the logits of the rows behind it, up to the next place.

    Example: the prompt 7, and 5 5 6 sampled with a frequency penalty. No logit of the
    first token changes, that of id 5 counts once for the second and twice for the third.
        >>> call = AdjustedCall(0, 1, 4, Adjustment(frequency_penalty=0.5))
        >>> found = stretches_of(call, np.array([7, 5, 5, 6], np.int32))
        >>> found.id_E.tolist(), found.begin_E.tolist(), found.end_E.tolist()
        ([5, 5], [2, 3], [3, 4])
        >>> found.less_E.tolist()
        [0.5, 1.0]
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
    end_E = np.append(np.where(is_first_E[1:], call.end, place_E[1:] + 1), call.end)
    factor_E = np.where(place_E >= 0, given.repetition_penalty, 1.0)
    less_E = given.frequency_penalty * count_E + given.presence_penalty * (count_E > 0)
    whole = Stretches(
        id_E,
        np.maximum(place_E + 1, call.start),
        end_E[: len(id_E)],
        bias_E[starts][group_E],
        factor_E.astype(np.float32),
        less_E.astype(np.float32),
    )
    return whole.where(whole.begin_E < whole.end_E)


@dataclass(frozen=True)
class PairChanges:
    """Changes of the logits of pairs. `pair_K`: the K pairs of adjusted calls, in the
    order of the calls' tokens; `stretches` are of these, in order of their ids.
    """

    pair_K: npt.NDArray[np.int64]
    stretches: Stretches

    @classmethod
    def of(
        cls,
        adjusted: AdjustedCalls | None,
        ids: npt.NDArray[np.int32],
        source_U: IntN,
    ) -> PairChanges | None:
        """Return the changes of pairs, whose targets are at `source_U`; None without."""
        if adjusted is None:
            return None
        own_U = np.flatnonzero(adjusted.set_N[source_U] != PLAIN)
        if not len(own_U):
            return None
        pair_K = own_U[np.argsort(source_U[own_U])]
        place_K = source_U[pair_K]
        starts = np.array([call.start for call in adjusted.calls])
        numbers = np.searchsorted(starts, place_K, side="right") - 1
        found = [
            stretches_of(adjusted.calls[number], ids)
            for number in np.unique(numbers).tolist()
        ]
        joined = Stretches(*map(np.concatenate, zip(*found, strict=True)))
        # From places to K: calls are disjoint, and so are stretches of one id.
        joined = joined._replace(
            begin_E=np.searchsorted(place_K, joined.begin_E),
            end_E=np.searchsorted(place_K, joined.end_E),
        )
        joined = joined.where(joined.begin_E < joined.end_E)
        if not len(joined.id_E):
            return None  # such as first tokens: no penalty has anything to count
        return cls(pair_K, joined.where(np.lexsort((joined.begin_E, joined.id_E))))

    def of_plain(self, num_plain: int, device: torch.device) -> ChangedLogits | None:
        """Return the changes of the first `num_plain` pairs, or None."""
        is_plain_K = self.pair_K < num_plain
        before_K = np.append(0, is_plain_K.cumsum())
        plain = self.stretches._replace(
            begin_E=before_K[self.stretches.begin_E],
            end_E=before_K[self.stretches.end_E],
        )
        plain = plain.where(plain.begin_E < plain.end_E)
        if not len(plain.id_E):
            return None
        return ChangedLogits.of(self.pair_K[is_plain_K], plain, device)

    def of_entries(
        self,
        pair_E: npt.NDArray[np.int64],
        id_E: npt.NDArray[np.int64],
        device: torch.device,
    ) -> ChangedEntries:
        """Return the changes of single logits: of `id_E` for `pair_E`."""
        place_U = np.full(max(self.pair_K.max(), pair_E.max()) + 1, -1)
        place_U[self.pair_K] = np.arange(len(self.pair_K))
        place_E = place_U[pair_E]
        known = self.stretches
        # The last stretch of the id that begins at or before the pair.
        most = len(self.pair_K) + 1
        number_E = np.searchsorted(
            known.id_E * most + known.begin_E, id_E * most + place_E, side="right"
        )
        number_E -= 1
        is_changed_E = (place_E >= 0) & (number_E >= 0)
        is_changed_E &= known.id_E[number_E] == id_E
        is_changed_E &= place_E < known.end_E[number_E]
        (changed,) = np.nonzero(is_changed_E)
        chosen = known.where(number_E[changed])
        place = to_device(torch.from_numpy(changed), device)
        return ChangedEntries(place, Numbers.of(chosen, device))


class Numbers(NamedTuple):
    """What changes A logits, float32 on their device."""

    bias_A: Tensor
    factor_A: Tensor
    less_A: Tensor

    @classmethod
    def of(cls, stretches: Stretches, device: torch.device) -> Numbers:
        numbers = np.stack([stretches.bias_E, stretches.factor_E, stretches.less_E])
        return cls(*to_device(torch.from_numpy(numbers), device).unbind())

    def at(self, index: Tensor) -> Numbers:
        return Numbers(*(one[index] for one in self))

    def change(self, value_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return changed logits, all divided by `temperature`, and those that are
        divided by their factor, bool; the others are multiplied.
        """
        bias_A, _, less_A = (one.to(value_A.dtype) for one in self)
        raised_A = value_A + bias_A / temperature
        is_raised_A = raised_A > 0
        slope_A = _slopes(is_raised_A, self.factor_A).to(value_A.dtype)
        return raised_A * slope_A - less_A / temperature, is_raised_A


def _slopes(is_raised_A: Tensor, factor_A: Tensor) -> Tensor:
    """Return the derivatives of changed logits."""
    return torch.where(is_raised_A, 1.0 / factor_A, factor_A)


@dataclass(frozen=True)
class ChangedEntries:
    """Changes of single logits: of the entries at `place_A`."""

    place_A: Tensor
    numbers: Numbers

    def apply(self, value_E: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the entries' adjusted logits, all divided by `temperature`, and their
        derivatives.
        """
        value_A, is_raised_A = self.numbers.change(value_E[self.place_A], temperature)
        slope_A = _slopes(is_raised_A, self.numbers.factor_A).to(value_E.dtype)
        slope_E = torch.ones_like(value_E).index_copy(0, self.place_A, slope_A)
        return value_E.index_copy(0, self.place_A, value_A), slope_E


class ChangedPlaces(NamedTuple):
    """Logits of a slice of the vocabulary that some stretches change. `number_A`: their
    stretch.
    """

    row_A: Tensor
    column_A: Tensor
    number_A: Tensor


@dataclass(frozen=True)
class ChangedLogits:
    """Changes of the logits of K rows, as stretches on the device.

    Each sampled token may change a logit for each different id of its text: a list of
    all entries would take gigabytes for a long answer with a repetition penalty. So the
    entries of a slice of the vocabulary are found when they are needed, and no more than
    MOST_ADJUSTED at once.

    `ids`, `before`: on the host, the stretches' ids, ascending, and the number of
    entries before each stretch and behind the last.
    """

    row_K: Tensor
    id_E: Tensor
    begin_E: Tensor
    size_E: Tensor
    numbers: Numbers
    ids: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    has_factors: bool

    @classmethod
    def of(
        cls,
        row_K: npt.NDArray[np.int64],
        stretches: Stretches,
        device: torch.device,
    ) -> ChangedLogits:
        size_E = stretches.end_E - stretches.begin_E
        places = np.stack([stretches.id_E, stretches.begin_E, size_E])
        id, begin, size = to_device(torch.from_numpy(places), device).unbind()
        return cls(
            to_device(torch.from_numpy(row_K), device),
            id,
            begin,
            size,
            Numbers.of(stretches, device),
            ids=stretches.id_E,
            before=np.append(0, size_E.cumsum()),
            has_factors=bool((stretches.factor_E != 1.0).any()),
        )

    def apply_to(
        self, logits_MC: Tensor, part: slice, temperature: float
    ) -> ChangedSlice:
        """Change a slice of the vocabulary in place."""
        is_raised = list[Tensor]()
        for entries in self.entries(part):
            index = entries.row_A, entries.column_A
            numbers = self.numbers.at(entries.number_A)
            value_A, is_raised_A = numbers.change(logits_MC[index], temperature)
            logits_MC[index] = value_A
            is_raised.append(is_raised_A)
        return ChangedSlice(self, part, is_raised)

    def entries(self, part: slice) -> Iterator[ChangedPlaces]:
        """Return the changed logits of a slice of the vocabulary, in pieces."""
        first, last = np.searchsorted(self.ids, [part.start, part.stop]).tolist()
        while first < last:
            most = self.before[first] + MOST_ADJUSTED
            end = int(np.searchsorted(self.before, most, side="right")) - 1
            end = min(max(end, first + 1), last)
            yield self._entries(first, end, part.start)
            first = end

    def _entries(self, first: int, last: int, first_id: int) -> ChangedPlaces:
        device = self.row_K.device
        num_entries = int(self.before[last] - self.before[first])
        size_E = self.size_E[first:last]
        # With its size known, the device needs not be waited for.
        number_A = torch.repeat_interleave(
            torch.arange(first, last, device=device), size_E, output_size=num_entries
        )
        # Entry a of its piece is entry a - start of its stretch.
        start_E = size_E.cumsum(0) - size_E
        offset_E = self.begin_E[first:last] - start_E
        place_A = torch.arange(num_entries, device=device) + offset_E[number_A - first]
        return ChangedPlaces(
            self.row_K[place_A], self.id_E[number_A] - first_id, number_A
        )


@dataclass(frozen=True)
class ChangedSlice:
    """Changed logits of a slice of the vocabulary. `is_raised`: of each piece, which
    are divided by their factors.
    """

    changed: ChangedLogits
    part: slice
    is_raised: list[Tensor]

    def correct(self, grad_MC: Tensor, grad_bias_C: Tensor | None) -> None:
        """Multiply gradients of changed logits by the derivatives, in place."""
        if not self.changed.has_factors:
            return
        pieces = self.changed.entries(self.part)
        for entries, is_raised_A in zip(pieces, self.is_raised, strict=True):
            index = entries.row_A, entries.column_A
            factor_A = self.changed.numbers.factor_A[entries.number_A]
            slope_A = _slopes(is_raised_A, factor_A)
            before_A = grad_MC[index]
            after_A = (before_A * slope_A).to(grad_MC.dtype)
            grad_MC[index] = after_A
            if grad_bias_C is not None:
                change_A = (after_A - before_A).to(grad_bias_C.dtype)
                grad_bias_C.index_add_(0, entries.column_A, change_A)
