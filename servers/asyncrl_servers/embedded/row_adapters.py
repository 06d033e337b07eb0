"""Adapters of a forward pass: every row of a call has one of the open adapters.

The base product is computed for all rows. Then each adapter adds to its own rows, whose
number is padded as in any exact call, so their bits do not depend on other adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.messages.engine_api import AdapterSpec
from asyncrl.models.low_rank import LowRank
from asyncrl.weights.tensor_files import SUFFIXES


class Adapter:
    """A and B of each adapted layer, zero at first: `tensors` by module name and suffix,
    and `low_ranks` by module, in the same memory.
    """

    def __init__(self, spec: AdapterSpec | None) -> None:
        """`spec`: None for an adapter without layers."""
        self.spec = spec
        self.tensors = dict[str, Tensor]()
        self.low_ranks = dict[nn.Module, LowRank]()

    def add(self, name: str, linear: nn.Linear) -> None:
        """Adapt a layer."""
        assert self.spec is not None
        weight, rank = linear.weight, self.spec.rank
        down = weight.new_zeros(rank, linear.in_features)
        up = weight.new_zeros(linear.out_features, rank)
        self.low_ranks[linear] = LowRank(down, up, self.spec.scale)
        self.tensors |= zip((name + end for end in SUFFIXES), (down, up), strict=True)

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for one in self.tensors.values():
            one.normal_(std=one.shape[1] ** -0.5, generator=generator)


class AdapterRows(NamedTuple):
    """An adapter's rows of a call. The first `num_rows` of `rows` int64 count, the
    others are padding; None: all rows of the call.
    """

    adapter: Adapter
    rows: Tensor | None = None
    num_rows: int = 0


class AdaptersInCall(threading.local):
    """Adapters of the rows of this thread's call; (): all have the run's own."""

    adapters: Sequence[AdapterRows] = ()
    head_adapters: Sequence[AdapterRows] = ()
    """Of the rows that reach the head."""


in_call = AdaptersInCall()


class Added(NamedTuple):
    """What a linear layer's adapters add to its product."""

    linear: nn.Linear
    first: tuple[AdapterRows]
    """The run's own adapter, which all rows have unless the call says otherwise."""
    is_head: bool

    @property
    def own(self) -> LowRank | None:
        return self.first[0].adapter.low_ranks.get(self.linear)

    def add(self, product: Tensor, x: Tensor) -> Tensor:
        """Return product [..., out] = W x with the adapters of its rows; may write into
        it.
        """
        of_call = in_call.head_adapters if self.is_head else in_call.adapters
        for adapter, rows, num_rows in of_call or self.first:
            low_rank = adapter.low_ranks.get(self.linear)
            if low_rank is None:
                continue
            if rows is None:
                product = low_rank.add(product, x)
                continue
            flat, flat_x = product.flatten(0, -2), x.flatten(0, -2)
            added = low_rank.add(flat[rows], flat_x[rows])
            flat[rows[:num_rows]] = added[:num_rows]
        return product


@contextmanager
def adapted(
    adapters: Sequence[AdapterRows], head_adapters: Sequence[AdapterRows]
) -> Iterator[None]:
    """Let the rows of a call, and those that reach the head, have these adapters."""
    in_call.adapters, in_call.head_adapters = adapters, head_adapters
    try:
        yield
    finally:
        in_call.adapters = in_call.head_adapters = ()
