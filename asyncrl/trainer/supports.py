"""Supports of sampled tokens: the sets of ids from which top_p, top_k and min_p let the
engine draw them. The trainer renormalises over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.tokens import SUPPORT, Ragged, Tokens
from asyncrl.trainer.adjustments import ChangedEntries, PairChanges
from asyncrl.trainer.tree import BoolN, to_device

FULL = -1


@dataclass(frozen=True)
class SupportSets:
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


@dataclass(frozen=True)
class SupportRows:
    """Supports of the last R of a micro-batch's U pairs, as E entries in order of their
    ids.

    `row_E`, `id_E` int64: the pair, counted from `num_plain`, and the id of each entry.
    `target_R` int64: the entry of each pair's target. `ids` is `id_E` on the host.
    `changed`: entries whose logits the call has adjusted.

    Example: the second pair and the third have the supports {2, 5} and {5}.
        >>> sets = [np.array([2, 5], np.int32), np.array([5], np.int32)]
        >>> rows = SupportRows.of(sets, np.array([2, 5]), 1, torch.device("cpu"))
        >>> rows.id_E.tolist(), rows.row_E.tolist(), rows.target_R.tolist()
        ([2, 5, 5], [0, 0, 1], [0, 2])
    """

    num_plain: int
    row_E: Tensor
    id_E: Tensor
    target_R: Tensor
    ids: npt.NDArray[np.int32]
    changed: ChangedEntries | None = None

    @classmethod
    def of(
        cls,
        sets: list[npt.NDArray[np.int32]],
        target_R: npt.NDArray[np.int64],
        num_plain: int,
        device: torch.device,
        changes: PairChanges | None = None,
    ) -> SupportRows:
        """`sets`: the support of each pair. `target_R`: its target, which is in it.
        `changes`: of all pairs.
        """
        ids = np.concatenate(sets)
        row_E = np.repeat(np.arange(len(sets)), [len(one) for one in sets])
        # A slice of the vocabulary needs the entries of its ids, which are neighbors
        # then.
        order = np.argsort(ids, kind="stable")
        ids, row_E = ids[order], row_E[order]
        (own,) = np.nonzero(ids == target_R[row_E])
        place_R = own[np.argsort(row_E[own])]
        row, id, target = (
            to_device(torch.from_numpy(array.astype(np.int64)), device)
            for array in (row_E, ids, place_R)
        )
        changed = None
        if changes is not None:
            pair_E = row_E + num_plain
            changed = changes.of_entries(pair_E, ids.astype(np.int64), device)
        return cls(num_plain, row, id, target, ids, changed)

    def parts(self, slices: Iterator[slice]) -> Iterator[tuple[slice, slice]]:
        """Return each slice of the vocabulary with the slice of its entries."""
        for part in slices:
            first, last = np.searchsorted(self.ids, [part.start, part.stop]).tolist()
            yield part, slice(first, last)

    def adjust(
        self, value_E: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the entries' adjusted logits, and their derivatives (None: 1)."""
        if self.changed is None:
            return value_E, None
        return self.changed.apply(value_E, temperature)

    def sums(self, value_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return e^(x - h) [E] of the entries' logits x, where h is the highest of a
        pair, and for each pair [R]: its logprob, entropy and highest logprob.
        """
        num_rows = len(self.target_R)
        zeros_R = value_E.new_zeros(num_rows)
        highest_R = torch.full_like(zeros_R, -torch.inf).scatter_reduce(
            0, self.row_E, value_E.detach(), "amax"
        )
        change_E = value_E - highest_R[self.row_E]
        exponential_E = change_E.exp()
        sum_R = zeros_R.index_add(0, self.row_E, exponential_E)
        logsum_R = sum_R.log()
        with torch.no_grad():
            product_R = zeros_R.index_add(0, self.row_E, change_E * exponential_E)
            entropy_R = logsum_R - product_R / sum_R
        logprob_R = change_E[self.target_R] - logsum_R
        return exponential_E, logprob_R, entropy_R, -logsum_R.detach()
