"""Chosen ids of the vocabulary per token. Supports of sampled tokens: the sets of ids
from which top_p, top_k and min_p let the engine draw them; the trainer renormalises
over them. And the ids that a loss compares with another model (algorithm.distill_loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.tokens import (
    DISTILL_IDS,
    DISTILL_LOGPROBS,
    SUPPORT,
    Ragged,
    Tokens,
)
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import BoolN, IntN

FULL = -1


class SupportSets(NamedTuple):
    """Different supports of a batch, int32 each. `set_N` int32 [N]: each token's set,
    or FULL.
    """

    sets: list[npt.NDArray[np.int32]]
    set_N: npt.NDArray[np.int32]


def find_supports(arrays: Tokens, has_loss: BoolN) -> SupportSets | None:
    """Return the supports of loss tokens, each once, or None if all are full."""
    if SUPPORT not in arrays.columns:
        return None
    support = arrays.column(SUPPORT)
    ends_N = support.sizes.cumsum()
    set_N = np.full(len(has_loss), FULL, np.int32)
    known = dict[bytes, int]()
    for place in np.flatnonzero(has_loss & (support.sizes > 0)).tolist():
        start = ends_N[place] - support.sizes[place]
        ids = support.values[start : ends_N[place]].tobytes()
        set_N[place] = known.setdefault(ids, len(known))
    if not known:
        return None
    return SupportSets([np.frombuffer(ids, np.int32) for ids in known], set_N)


def check_supports(arrays: Tokens, vocab_size: int) -> None:
    """Raise Refused (422) for a support that no token can have been drawn from."""
    support = arrays.columns.get(SUPPORT)
    if not isinstance(support, Ragged):
        return
    values = support.values
    token_E = np.repeat(np.arange(len(arrays)), support.sizes)
    has_own = support.sizes == 0
    has_own[token_E[values == arrays.ids[token_E]]] = True
    is_wrong = ~has_own
    is_wrong[token_E[(values < 0) | (values >= vocab_size)]] = True
    # A repeated id would count twice in the sum over the support.
    is_same = token_E[1:] == token_E[:-1]
    is_wrong[token_E[1:][is_same & (values[1:] <= values[:-1])]] = True
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise Refused(
            422,
            f"{is_wrong.sum()} tokens have invalid supports, for example id {arrays.ids[first]} with a "
            f"support of {support.sizes[first]} ids",
            rule=f"a support is ascending ids below {vocab_size}, and has the sampled token itself",
            way_out="use engines that serve this model; start the run again.",
        )


class EntriesPart(NamedTuple):
    """Neighboring entries. `places`: (row, column) of each one in a slice's logits."""

    entries: slice
    places: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Entries:
    """E logits of a micro-batch, in order of their ids.

    `row_E`, `id_E` int64: the pair and the id of each entry. `ids` is `id_E` on the
    host.
    """

    row_E: Tensor
    id_E: Tensor
    ids: npt.NDArray[np.int32]

    def within(self, part: slice) -> EntriesPart | None:
        """Return the entries in a slice of the vocabulary, or None if it has none."""
        first, last = np.searchsorted(self.ids, [part.start, part.stop]).tolist()
        if first == last:
            return None
        entries = slice(first, last)
        return EntriesPart(
            entries, (self.row_E[entries], self.id_E[entries] - part.start)
        )


@dataclass(frozen=True)
class DistillRows(Entries):
    """The ids that distillation compares. `token_E` int64: the loss token of each entry.
    `other_E` float32: the other model's logprobs, in nats.
    """

    token_E: Tensor
    other_E: Tensor

    @classmethod
    def of(
        cls, arrays: Tokens, source_M: IntN, pair_M: IntN, device: torch.device
    ) -> DistillRows | None:
        """Return the entries of the tokens at `source_M`, or None if there are none."""
        tops: Ragged = arrays.column(DISTILL_IDS)  # empty without distillation
        sizes_M = tops.sizes[source_M]
        num_entries = int(sizes_M.sum())
        if num_entries == 0:
            return None
        token_E = np.repeat(np.arange(len(source_M)), sizes_M)
        # The entries of token m begin at first_M in the column, and at start_M here.
        first_M = (tops.sizes.cumsum() - tops.sizes)[source_M]
        start_M = sizes_M.cumsum() - sizes_M
        place_E = np.arange(num_entries) + (first_M - start_M)[token_E]
        order = np.argsort(tops.values[place_E], kind="stable")
        token_E, place_E = token_E[order], place_E[order]
        ids = tops.values[place_E]
        row, id, token = (
            to_device(array.astype(np.int64), device)
            for array in (pair_M[token_E], ids, token_E)
        )
        logprob_E = arrays.column(DISTILL_LOGPROBS).values[place_E]
        other_E = to_device(logprob_E, device)
        return cls(row, id, ids, token, other_E)


@dataclass(frozen=True)
class SupportRows(Entries):
    """Supports of the last R of a micro-batch's U pairs, as E entries in order of their
    ids.

    `row_E`: counted from `num_plain`. `target_R` int64: the entry of each pair's target.

    Example: the second pair and the third have the supports {2, 5} and {5}.
        >>> sets = [np.array([2, 5], np.int32), np.array([5], np.int32)]
        >>> rows = SupportRows.of(sets, np.array([2, 5]), 1, torch.device("cpu"))
        >>> rows.id_E.tolist(), rows.row_E.tolist(), rows.target_R.tolist()
        ([2, 5, 5], [0, 0, 1], [0, 2])
    """

    num_plain: int
    target_R: Tensor

    @classmethod
    def of(
        cls,
        sets: list[npt.NDArray[np.int32]],
        target_R: npt.NDArray[np.int64],
        num_plain: int,
        device: torch.device,
    ) -> SupportRows:
        """`sets`: the support of each pair. `target_R`: its target, which is in it."""
        ids = np.concatenate(sets)
        row_E = np.repeat(np.arange(len(sets)), [len(one) for one in sets])
        # A slice of the vocabulary needs the entries of its ids, which are neighbors
        # then.
        order = np.argsort(ids, kind="stable")
        ids, row_E = ids[order], row_E[order]
        (own,) = np.nonzero(ids == target_R[row_E])
        place_R = own[np.argsort(row_E[own])]
        row, id, target = (
            to_device(array.astype(np.int64), device) for array in (row_E, ids, place_R)
        )
        return cls(row, id, ids, num_plain, target)

    def scores(self, value_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logprob of each pair [R], its entropy and its highest logprob.
        `value_E`: logits of the entries. Only the logprob has a gradient.
        """
        num_rows = len(self.target_R)
        zeros_R = value_E.new_zeros(num_rows)
        highest_R = torch.full_like(zeros_R, -torch.inf).scatter_reduce(
            0, self.row_E, value_E.detach(), "amax"
        )
        change_E = value_E - highest_R[self.row_E]
        # Sums of e^(x - h) over the logits x of a pair, whose highest is h.
        exponential_E = change_E.exp()
        sum_R = zeros_R.index_add(0, self.row_E, exponential_E)
        logsum_R = sum_R.log()
        with torch.no_grad():
            product_R = zeros_R.index_add(0, self.row_E, change_E * exponential_E)
            entropy_R = logsum_R - product_R / sum_R
        logprob_R = change_E[self.target_R] - logsum_R
        return logprob_R, entropy_R, -logsum_R.detach()
