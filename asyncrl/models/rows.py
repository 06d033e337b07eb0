"""Recurrences and convolutions over packed tokens: each sequence is one row of a padded
batch.

Only the modules that mix tokens by themselves (structure.py) run on rows; all others,
and attention, run on packed tokens. Rows of about one length share a call. Padding
comes after a row's tokens, where nothing causal can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from asyncrl.models.structure import outermost

MOST_PADDING, FREE_PADDING = 0.25, 64
"""Padding of a call, as a fraction of its tokens, and tokens that cost less than one
more call.
"""

IntN = npt.NDArray[np.int64]
T = TypeVar("T")


class RowCall(NamedTuple):
    """Rows of one call: `place_SL` int64 [S, L] of each token among the packed ones; a
    row's end is repeated. Tokens `own_R` of the S * L are the outputs of packed tokens
    `place_R`.
    """

    place_SL: Tensor
    own_R: Tensor
    place_R: Tensor


def row_calls(rows: Sequence[IntN], device: torch.device) -> list[RowCall]:
    """Return the calls for rows of packed tokens, each int64 [T]. A token of several
    rows has one owner.

    Example: two sequences share tokens 0 and 1. Of the second row, only the end is new:
    number 5 of the flat batch is packed token 3.
        >>> rows = [np.array([0, 1, 2]), np.array([0, 1, 3])]
        >>> (call,) = row_calls(rows, torch.device("cpu"))
        >>> call.own_R.tolist(), call.place_R.tolist()
        ([0, 1, 2, 5], [0, 1, 2, 3])
    """
    groups = list[list[IntN]]()
    # Longest first: the first row of a group is its width, and padding is known before
    # a row joins.
    for row in sorted(rows, key=len, reverse=True):
        group = [*(groups[-1] if groups else ()), row]
        num_tokens = sum(map(len, group))
        padding = len(group[0]) * len(group) - num_tokens
        if groups and padding <= FREE_PADDING + MOST_PADDING * num_tokens:
            groups[-1] = group
        else:
            groups.append([row])
    # A common prefix is stored once among packed tokens, but each row computes it
    # again, since a recurrence needs it. One row's output is kept.
    is_owned = np.zeros(1 + max(int(row.max()) for row in rows), np.bool_)
    calls = []
    for group in groups:
        width = len(group[0])
        place_SL = np.stack(
            [np.pad(row, (0, width - len(row)), mode="edge") for row in group]
        )
        is_real_SL = np.arange(width) < np.array([*map(len, group)])[:, None]
        real_R = np.flatnonzero(is_real_SL)
        place_R, first_R = np.unique(place_SL.reshape(-1)[real_R], return_index=True)
        is_new_R = ~is_owned[place_R]
        is_owned[place_R] = True
        arrays = place_SL, real_R[first_R[is_new_R]], place_R[is_new_R]
        calls.append(RowCall(*(torch.from_numpy(array).to(device) for array in arrays)))
    return calls


class MixerRows:
    """Runs a model's mixers on the rows of the packed tokens that `use` announced."""

    def __init__(self, model: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
        self._calls = list[RowCall]()
        self._num_tokens = 0
        self._mixers = [*outermost(model, classes).values()]
        for module in self._mixers:
            module.forward = partial(self._run, module.forward)

    def use(self, calls: list[RowCall], num_tokens: int) -> None:
        """Set the rows of the next forward and backward passes."""
        self._calls = calls
        self._num_tokens = num_tokens

    def close(self) -> None:
        """Give the mixers their own forward functions back."""
        for module in self._mixers:
            # The instance's attribute hid the method of its class.
            del module.forward

    def _run(
        self, forward: Callable[..., object], *args: object, **options: object
    ) -> object:
        calls = self._calls
        num_tokens = self._num_tokens
        outputs = list[object]()
        for call in calls:
            row_args = by_row(args, call, num_tokens)
            row_options = by_row(options, call, num_tokens)
            outputs.append(forward(*row_args, **row_options))
        # Every token has one owner, so place_N is a permutation, and order_N its
        # inverse.
        place_N = torch.cat([call.place_R for call in calls])
        order_N = torch.empty_like(place_N)
        order_N[place_N] = torch.arange(num_tokens, device=place_N.device)
        return joined(outputs, calls, order_N)


def by_row(value: T, call: RowCall, num_tokens: int) -> T:
    """Replace tensors [1, N, ...] by [S, L, ...]."""

    def rows(tensor: Tensor) -> Tensor:
        is_of_tokens = tensor.shape[:2] == (1, num_tokens)
        return tensor[0][call.place_SL] if is_of_tokens else tensor

    cut: T = tree_map_only(Tensor, rows, value)
    return cut


def joined(outputs: list[T], calls: list[RowCall], order_N: Tensor) -> T:
    """Return the output of packed tokens from the outputs of the calls."""

    def join(first: object, *others: Tensor) -> object:
        if not isinstance(first, Tensor) or first.shape[:2] != calls[0].place_SL.shape:
            return first
        pairs = zip([first, *others], calls, strict=True)
        token_R = torch.cat([rows.flatten(0, 1)[call.own_R] for rows, call in pairs])
        return token_R[order_N][None]

    whole: T = tree_map(join, *outputs)
    return whole
