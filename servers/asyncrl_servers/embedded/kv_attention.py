"""Attention over the slot cache, called from inside any Hugging Face model.

A call has one row per token. On CPU, float32 rows are batch-invariant and decoding equals prefilling bit
for bit. MKL changes the summation order of products below 4 rows and splits sums above 192, so both are
avoided; masked probabilities are 0 and cached values finite.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.weights.export import routers_of

NAME = "asyncrl_slots"
LENGTH_STEP = 32
CONTRACTION = 128
"""Positions summed in one matrix product with V."""
MIN_ROWS = 4
PAGE = 64
"""Positions of a page of a bounded cache."""
SPLITS = 8
"""Parts of a row's positions that a decoding kernel reads at once."""
CHUNK = 8
"""Rows per chunk when decoding slots are joined into stretches."""
STRETCH_FLOATS = 30_000
"""Keys read in the time of one more stretch (measured: 30 us per layer on one CPU thread)."""
CUDA_STRETCH_FLOATS = 10_000_000
"""The same on CUDA (estimated: five 3 us kernels, 3 TB/s)."""

Ints = npt.NDArray[np.int64]
Ids = Sequence[int] | Ints
ROUTED_TYPE = torch.int16
"""Type of cached expert numbers; its bytes are uint16."""
NO_INTS = np.zeros(0, np.int64)
Part = tuple[int, Ids, int, int]
"""(slot, token ids, start, end)."""


def padded_length(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    kv_heads: int
    head_dim: int
    num_routed: int = 0

    def stretch_worth(self, device: torch.device) -> float:
        floats = STRETCH_FLOATS if device.type == "cpu" else CUDA_STRETCH_FLOATS
        return floats / (self.kv_heads * self.head_dim)


class SlotCache:
    """Keys and values [layers, pages, kv_heads, positions, head_dim]; `routing`: ROUTED_TYPE [slots,
    positions, experts].

    Without a budget, page i is slot i and holds max_length tokens. A budget of tokens is cut into pages of
    PAGE positions. A slot owns the pages that it reserved: `table` names them, in the order of positions.

    Example: a slot that reserved 200 tokens owns 4 pages, such as table[slot] = [7, 2, 9, 4, 0, ..]. Position
    130 is position 2 of page 9.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget: int = 0,
    ) -> None:
        self.is_paged = budget > 0
        longest = padded_length(max_length)
        self.page = PAGE if self.is_paged else longest
        num_pages = budget // PAGE if self.is_paged else slots
        size = (shape.num_layers, num_pages if slots else 0, shape.kv_heads, self.page, shape.head_dim)
        # Unwritten values must be finite: they are multiplied by 0.
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        routed = (slots, longest, shape.num_routed)
        self.routing = torch.zeros(routed, dtype=ROUTED_TYPE, device=device)
        self.table = np.zeros((slots, -(-longest // self.page)), np.int64)
        self._num_owned = np.zeros(slots, np.int64)
        self._free = list(range(num_pages))
        if not self.is_paged:
            self.table[:, 0] = np.arange(slots)
        self._table_on_device = torch.from_numpy(self.table.astype(np.int32)).to(device)
        self._is_current = True

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.routing.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_of(self, length: int) -> int:
        """Return the number of pages that `length` tokens need from the budget."""
        return -(-length // self.page) if self.is_paged else 0

    def reserve(self, slot: int, length: int) -> None:
        """Give an empty slot pages for `length` tokens, which must be free."""
        num_pages = self.pages_of(length)
        self._num_owned[slot] = num_pages
        for place in range(num_pages):
            self.table[slot, place] = self._free.pop()
            self._is_current = False

    def release(self, slot: int) -> None:
        self._free += self.table[slot, : self._num_owned[slot]].tolist()
        self._num_owned[slot] = 0

    def table_on_device(self) -> Tensor:
        """Return int32 [slots, pages of a slot], always at the same address."""
        if not self._is_current:
            self._table_on_device.copy_(torch.from_numpy(self.table))
            self._is_current = True
        return self._table_on_device

    def rows_of(self, slots: Ints, positions: Ints) -> Ints:
        """Return [N, kv_heads]: rows of the cache flattened to [pages * kv_heads * positions]."""
        kv_heads = self.keys.shape[2]
        pages = self.table[slots, positions // self.page]
        heads = pages[:, None] * kv_heads + np.arange(kv_heads)
        return cast(Ints, heads * self.page + positions[:, None] % self.page)

    def read(self, layer: int, start: int, end: int, length: int) -> list[Tensor]:
        """Return keys and values [slots * kv_heads, length, head_dim] of slots `start` to `end`."""
        both = self.keys[layer], self.values[layer]
        if not self.is_paged:
            return [one[start:end].flatten(0, 1)[:, :length] for one in both]
        pages = self.table_on_device()[start:end, : self.pages_of(length)]
        shape = ((end - start) * self.keys.shape[2], -1, self.keys.shape[4])
        return [one[pages].transpose(1, 2).reshape(shape)[:, :length] for one in both]

    def copy_slot(self, source: int, target: int, length: int) -> None:
        places: list[Any] = [slice(source, source + 1), slice(target, target + 1)]
        num_positions = length
        if self.is_paged:
            num_pages = self.pages_of(length)
            places = [self.table[slot, :num_pages].tolist() for slot in (source, target)]
            num_positions = self.page
        sources, targets = places
        for one in (self.keys, self.values):
            one[:, targets, :, :num_positions] = one[:, sources, :, :num_positions]
        self.routing[target, :length] = self.routing[source, :length]

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Move tokens; the source's are undefined then, and a paged source is empty."""
        if not self.is_paged:
            self.copy_slot(source, target, length)
            return
        self.release(target)
        self.table[target] = self.table[source]
        self._num_owned[target] = self._num_owned[source]
        self._num_owned[source] = 0
        self._is_current = False


class RoutedExperts:
    """Router hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen: list[Tensor] = []
        """int64 [R, k] for each router."""
        for router in routers_of(model):
            router.register_forward_hook(self._note)

    def take(self) -> Tensor:
        """Return the last pass's experts, ROUTED_TYPE [R, num_routed]."""
        chosen, self._chosen = self._chosen, []
        return torch.cat(chosen, dim=1).to(ROUTED_TYPE)

    def _note(self, router: torch.nn.Module, inputs: Any, found: Any) -> None:
        if len(found) < 3 or found[2].is_floating_point():
            rule = "algorithm.router_replay needs a router that returns the experts it chooses"
            raise ValueError(f"{rule}, and {type(router).__name__} does not")
        self._chosen.append(found[2])


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of a call: `tokens` queries per slot in [start, end) over `length` positions.

    `invalid`, bool [end - start, 1, 1, tokens, length], is the causal mask.
    """

    start: int
    end: int
    tokens: int
    length: int
    invalid: Tensor


def cut_rows(padded_lengths: Ints, worth: float) -> list[tuple[int, int, int]]:
    """Return stretches (start, end, length) covering rows [n].

    Neighboring chunks are joined unless this wastes more positions than a stretch is `worth`.
    """
    stretches: list[tuple[int, int, int]] = []
    for chunk_start in range(0, len(padded_lengths), CHUNK):
        chunk_end = min(chunk_start + CHUNK, len(padded_lengths))
        length = int(padded_lengths[chunk_start:chunk_end].max())
        start, end, joined = stretches[-1] if stretches else (0, 0, length)
        common = max(joined, length)
        wasted = (end - start) * (common - joined) + (chunk_end - chunk_start) * (common - length)
        if wasted > worth:
            stretches.append((chunk_start, chunk_end, length))
        else:
            stretches[-1:] = [(start, chunk_end, common)]
    return stretches


@dataclass(slots=True)
class Pass:
    """A model call. Rows after the last stretch are padding."""

    cache: SlotCache
    stretches: list[Stretch]
    flat_index: Tensor
    """int64 [rows * kv_heads]: rows of the cache flattened to [slots * kv_heads * positions]."""
    is_exact: bool
    source: Tensor | None = None
    """int64: each key's row of the call; None: in order."""
    _biases: dict[int, Tensor] = field(default_factory=dict)
    """Additive masks by stretch: [slots * kv_heads, rows, length]; [1, rows, length] for one slot."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Map queries [R, heads, d], keys and values [R, kv_heads, d] to [R, heads, d]."""
        (num_rows, heads, head_dim), kv_heads = query.shape, key.shape[1]
        num_filled = len(self.flat_index) // kv_heads
        for cache, new in ((self.cache.keys, key), (self.cache.values, value)):
            new = new[:num_filled] if self.source is None else new.index_select(0, self.source)
            cache[layer].view(-1, head_dim).index_copy_(0, self.flat_index, new.reshape(-1, head_dim))
        queries = (query * scaling).view(num_rows, kv_heads, heads // kv_heads, head_dim)
        parts, row = [], 0
        for number, stretch in enumerate(self.stretches):
            end = row + (stretch.end - stretch.start) * stretch.tokens
            read = self.cache.read(layer, stretch.start, stretch.end, stretch.length)
            part = self._mix(number, queries[row:end], *read)
            parts.append(part.reshape(end - row, heads, head_dim))
            row = end
        if num_rows > row:
            parts.append(query.new_zeros(num_rows - row, heads, head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Map queries [G slots * T tokens, kv_heads, heads per kv_head, d] to [G, T, kv_heads, .., d]."""
        stretch, (_, kv_heads, repeat, head_dim) = self.stretches[number], queries.shape
        num_slots, tokens, length = stretch.end - stretch.start, stretch.tokens, stretch.length
        grouped = queries.view(num_slots, tokens, kv_heads, repeat, head_dim).permute(0, 2, 3, 1, 4)
        if self.is_exact and tokens * repeat < MIN_ROWS:
            grouped = torch.cat([grouped] * -(-MIN_ROWS // (tokens * repeat)), dim=2)
        num_rows = grouped.shape[2] * tokens
        flat = grouped.reshape(num_slots * kv_heads, num_rows, head_dim)
        if number not in self._biases:
            zeros = torch.zeros_like(stretch.invalid, dtype=flat.dtype)
            bias = zeros.masked_fill_(stretch.invalid, -torch.inf)
            shape = (num_slots, kv_heads if num_slots > 1 else 1, grouped.shape[2], tokens, length)
            self._biases[number] = bias.expand(shape).reshape(-1, num_rows, length)
        scores = torch.baddbmm(self._biases[number], flat, keys.transpose(1, 2))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        mixed = mix_values(weights, values, self.is_exact)
        return mixed.view(num_slots, kv_heads, -1, tokens, head_dim)[:, :, :repeat].permute(0, 3, 1, 2, 4)


def mix_values(probabilities: Tensor, values: Tensor, is_exact: bool) -> Tensor:
    """Multiply probabilities [..., rows, length] by values [..., length, d]; in blocks if `is_exact`."""
    length = values.shape[-2]
    if not is_exact or length <= CONTRACTION:
        return torch.matmul(probabilities, values)
    mixed = torch.matmul(probabilities[..., :CONTRACTION], values[..., :CONTRACTION, :])
    for start in range(CONTRACTION, length, CONTRACTION):
        end = min(start + CONTRACTION, length)
        mixed += torch.matmul(probabilities[..., start:end], values[..., start:end, :])
    return mixed


@dataclass(slots=True)
class ProbePass:
    """Pass that only records the keys' shape: (kv_heads, head_dim)."""

    shape: tuple[int, int] = (0, 0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.shape = key.shape[1], key.shape[2]
        return torch.zeros_like(query)


_local = threading.local()


@contextmanager
def in_force(pass_: Pass | ProbePass, max_length: int) -> Iterator[None]:
    _local.pass_, _local.max_length = pass_, max_length
    try:
        yield
    finally:
        _local.pass_ = None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers, with [1, heads, R, d] or [R, heads, 1, d]."""
    layer = cast(int, module.layer_idx)
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if window is not None and window < _local.max_length:
        refused.append(f"a sliding window of {window}, below max_length {_local.max_length}")
    if refused:
        raise ValueError(f"layer {layer} asks for {' and '.join(refused)}")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if query.shape[0] == 1:
        rows = (states[0].transpose(0, 1) for states in (query, key, value))
        return _local.pass_.attend(layer, *rows, scaling)[None], None
    rows = (states[:, :, 0] for states in (query, key, value))
    return _local.pass_.attend(layer, *rows, scaling)[:, None], None


# transformers builds no mask for unregistered names (masking_utils._preprocess_mask_arguments).
AttentionInterface.register(NAME, _attention)
