"""Adapters of a forward pass: every row of a call has one of the open adapters.

The base product is computed for all rows. Then each adapter adds to its own rows, whose
number is padded as in any exact call, so their bits do not depend on other adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from asyncrl.models.low_rank import LowRank
from asyncrl.weights.tensor_files import SUFFIXES


@dataclass(frozen=True, eq=False)
class Adapter:
    """`low_ranks`: by name of the module. Empty: no module is adapted."""

    low_ranks: Mapping[str, LowRank]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of each module, by its name and suffix."""
        return {
            name + end: tensor
            for name, one in self.low_ranks.items()
            for end, tensor in zip(SUFFIXES, one[:2], strict=True)
        }


class AdapterRows(NamedTuple):
    """An adapter's rows of a call. The first `num_rows` of `rows` int64 count, the
    others are padding; None: all rows of the call.
    """

    adapter: Adapter
    rows: Tensor | None = None
    num_rows: int = 0


class AdaptersInCall(threading.local):
    """The adapters of this thread's call, and those of the rows that reach the head; ():
    all rows have the run's own.
    """

    of_layers: Sequence[AdapterRows] = ()
    of_head: Sequence[AdapterRows] = ()
    num_rows: int = 0
    """Rows of the call, padding included."""


in_call = AdaptersInCall()


class Added(NamedTuple):
    """What a linear layer's adapters add to its product. `own`: of the run."""

    name: str
    is_head: bool
    own: LowRank | None

    def add(self, product: Tensor, x: Tensor) -> Tensor:
        """Return product [..., out] = W x with the adapters of its rows; may write into
        it.
        """
        of_call = in_call.of_head if self.is_head else in_call.of_layers
        if not of_call:
            return product if self.own is None else self.own.add(product, x)
        for adapter, rows, num_rows in of_call:
            low_rank = adapter.low_ranks.get(self.name)
            if low_rank is None:
                continue
            if rows is None:
                return low_rank.add(product, x)
            flat, flat_x = product.flatten(0, -2), x.flatten(0, -2)
            # An expert that is a module of its own, say, which sees some rows.
            if not self.is_head and len(flat) != in_call.num_rows:
                what = (
                    f"{self.name} gets {len(flat)} of a call's {in_call.num_rows} rows"
                )
                raise RuntimeError(f"{what}, so it cannot have several adapters")
            added = low_rank.add(flat[rows], flat_x[rows])
            flat[rows[:num_rows]] = added[:num_rows]
            product = flat.view(product.shape)
        return product


@contextmanager
def adapted(
    of_layers: Sequence[AdapterRows], of_head: Sequence[AdapterRows], num_rows: int
) -> Iterator[None]:
    in_call.of_layers, in_call.of_head = of_layers, of_head
    in_call.num_rows = num_rows
    try:
        yield
    finally:
        in_call.of_layers = in_call.of_head = ()
