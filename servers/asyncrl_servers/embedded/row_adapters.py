"""Adapters of a forward pass: every row of a call has one of the open adapters.

The base product W x is computed for all rows. Adapters are joined in blocks: one product
with A of all adapters of a block, in which each row is set to 0 in the columns of other
adapters, and one with B of all of them. Added zeros change no bit of a sum, so the bits
of a row do not depend on other adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.devices import to_device
from asyncrl.models.low_rank import LowRank
from asyncrl.weights.tensor_files import SUFFIXES

RANK_STEP = 16
"""A column of a float32 product keeps its bits from this number of columns on. With 4 or
8 columns other kernels compute it.
"""
BLOCK = 4
"""Adapters of a block. With 16 in one block, products with zeros take 1.5 times as long as
products of four blocks.
"""
BLOCK_ROWS = 4
"""A row of a block's products keeps its bits from this multiple of rows on. Products with
fewer rows than runner.EXACT_ROWS keep them here, because they have RANK_STEP columns.
"""


def padded(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class Adapter:
    """`low_ranks`: by name of the module, with zeros from `rank` to padded_rank. Empty: no
    module is adapted. A push makes a new object of the same tensors.
    """

    low_ranks: Mapping[str, LowRank]
    rank: int = 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of each module without padding, by its name and suffix."""
        tensors = dict[str, Tensor]()
        for name, (down, up, _) in self.low_ranks.items():
            tensors[name + SUFFIXES[0]] = down[: self.rank]
            tensors[name + SUFFIXES[1]] = up[:, : self.rank]
        return tensors


class JoinedLayer(NamedTuple):
    """Adapters of a layer, joined in S blocks of K ranks."""

    down: Tensor
    """[S, K, in]"""
    up: Tensor
    """[S, K, out]"""
    scale: Tensor
    """float32 [S, 1, K]"""


class InUse(NamedTuple):
    """The adapters of a call's rows: one by name of the module, or several, joined in S
    blocks, each of which computes P rows.
    """

    layers: Mapping[str, LowRank | JoinedLayer]
    rows: Tensor = torch.empty(0)
    """int64 [S, P]. Free places have rows of other blocks."""
    is_other: Tensor = rows
    """bool [S, P, K]: the ranks that do not belong to the row's adapter."""


class JoinedAdapters:
    """A copy of the adapters of a call, joined in blocks of BLOCK.

    It serves until a call has an adapter that it lacks. An adapter with other content is
    another object.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Free the copy."""
        self.layers = dict[str, JoinedLayer]()
        self._numbers = dict[Adapter, int]()

    def of_rows(self, adapters: Sequence[Adapter], num_rows: int) -> InUse | None:
        """Return what adds these adapters to the first rows of a call of `num_rows`; None
        without adapters.
        """
        used = {one: number for number, one in enumerate(dict.fromkeys(adapters))}
        if len(used) < 2:
            return InUse(adapters[0].low_ranks) if used else None
        # Requests come and go more often than adapters, so others may be in the copy.
        is_large = len(self._numbers) > 2 * len(used)
        if is_large or not used.keys() <= self._numbers.keys():
            self.clear()  # Two copies at once may not fit on the device.
            self.layers, self._numbers = joined([*used]), used
        own_R = np.full(num_rows, -1)
        own_R[: len(adapters)] = [self._numbers[one] for one in adapters]
        own_SK = np.arange(padded(len(self._numbers), BLOCK)).reshape(-1, BLOCK)
        is_in_SR = own_SK[:, :1] == own_R - own_R % BLOCK
        num_places = padded(is_in_SR.sum(axis=1).max(), BLOCK_ROWS)
        row_SP = np.argsort(~is_in_SR, axis=1, kind="stable")[:, :num_places]
        layer = next(iter(self.layers.values()))
        own_SK = own_SK.repeat(layer.down.shape[1] // BLOCK, axis=1)
        is_other_SPK = own_R[row_SP][:, :, None] != own_SK[:, None]
        device = layer.down.device
        return InUse(
            self.layers, to_device(row_SP, device), to_device(is_other_SPK, device)
        )


def joined(adapters: Sequence[Adapter]) -> dict[str, JoinedLayer]:
    """Return all layers, with zeros for adapters without the layer."""
    rank = max(padded(one.rank, RANK_STEP) for one in adapters)
    shape = padded(len(adapters), BLOCK) // BLOCK, BLOCK * rank
    layers = dict[str, JoinedLayer]()
    for number, adapter in enumerate(adapters):
        block, start = number // BLOCK, number % BLOCK * rank
        for name, (down, up, scale) in adapter.low_ranks.items():
            if name not in layers:
                layers[name] = JoinedLayer(
                    down.new_zeros(*shape, down.shape[1]),
                    up.new_zeros(*shape, len(up)),
                    down.new_zeros(shape, dtype=torch.float32).unsqueeze(1),
                )
            into, ranks = layers[name], slice(start, start + len(down))
            # 0 * NaN is NaN, so B of a diverged adapter would reach the rows of others.
            # A reaches its own rows only.
            is_finite = up.isfinite().all()
            into.down[block, ranks] = torch.where(is_finite, down, torch.nan)
            into.up[block, ranks] = up.T.nan_to_num(0.0, 0.0, 0.0)
            into.scale[block, :, ranks] = scale
    for name, layer in layers.items():
        # Measured: products of bfloat16 keep their bits only in the layout of B.
        if layer.up.dtype != torch.float32:
            layers[name] = layer._replace(up=layer.up.mT.contiguous().mT)
    return layers


class AdaptersInCall(threading.local):
    """The adapters of this thread's call, and those of the rows that reach the head;
    None: all rows have the run's own.
    """

    of_layers: InUse | None = None
    of_head: InUse | None = None


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
        in_use = in_call.of_head if self.is_head else in_call.of_layers
        if in_use is None:
            return product if self.own is None else self.own.add(product, x)
        layer = in_use.layers.get(self.name)
        if layer is None:
            return product
        if isinstance(layer, LowRank):
            return layer.add(product, x)
        row_N = in_use.rows.flatten()
        x_SPD = x.flatten(0, -2).index_select(0, row_N)
        x_SPD = x_SPD.view(*in_use.rows.shape, -1)
        narrow_SPK = x_SPD @ layer.down.mT * layer.scale
        narrow_SPK = narrow_SPK.masked_fill(in_use.is_other, 0.0).to(x.dtype)
        added_NO = (narrow_SPK @ layer.up).flatten(0, 1)
        # Free places add zeros.
        product.view(-1, product.shape[-1]).index_add_(0, row_N, added_NO)
        return product


@contextmanager
def adapted(of_layers: InUse | None, of_head: InUse | None) -> Iterator[None]:
    in_call.of_layers, in_call.of_head = of_layers, of_head
    try:
        yield
    finally:
        in_call.of_layers = in_call.of_head = None
