"""Attention over the slot cache, called from inside any Hugging Face model.

A call of the model has one row a token, whatever sequence the token belongs to. Everything but attention
works on rows alone; attention finds out from the `Pass` of the call which slot a row belongs to. A model that
is run through its own forward reaches the pass through `in_force`.

Bits. On CPU a float32 row comes out with the same bits whatever stands beside it, and decoding a token gives
the same bits as prefilling it (so that a resumed request goes on exactly), because:
- each matrix product has at least 4 rows: below that MKL takes another kernel, with another order of
  summation;
- the product with V is summed in blocks of CONTRACTION positions: above 192 MKL splits the sum by its length;
- a masked probability is exactly 0 and every value in the cache is finite, so what lies beyond a sequence's
  end adds 0.
build_engine.check_determinism checks it at start, on the machine at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.weights.adapters import routers_of

NAME = "asyncrl_slots"
LENGTH_STEP = 32
"""Attention runs over a multiple of this many positions."""
CONTRACTION = 128
"""Positions summed in one matrix product with V."""
MIN_ROWS = 4
"""Rows of the smallest matrix product of attention."""
CHUNK = 8
"""Decoding slots are joined to stretches chunk by chunk."""
STRETCH_FLOATS = 30_000
"""Keys read in the time that one more stretch costs (measured: 30 us a layer, on one CPU thread)."""
CUDA_STRETCH_FLOATS = 10_000_000
"""The same on CUDA (an estimate, not run: five kernels of 3 us, at 3 TB/s of bfloat16 keys and values)."""

Ints = npt.NDArray[np.int64]
Ids = Sequence[int] | Ints
ROUTED_TYPE = torch.int16
"""Of experts in the cache: of the numbers that it has, the bytes are those of uint16, as they are told."""
MAX_EXPERTS = 2**15
NO_INTS = np.zeros(0, np.int64)
Share = tuple[int, int, int]
"""(slot of a job, another slot, how many of the first tokens are the other's, too)."""
Part = tuple[int, Ids, int, int]
"""(slot, its token ids, start, end): tokens of a job that go through one call."""


class UnsupportedAttentionError(Exception):
    """The model's attention is of a kind that the slot cache does not reproduce."""


def padded_length(length: int) -> int:
    """`length` rounded up to LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a model's keys and values; and of the experts of a token, where they are to be told."""

    num_layers: int
    kv_heads: int
    head_dim: int
    num_routed: int = 0

    def stretch_worth(self, device: torch.device) -> float:
        """Positions that are read in the time that one more stretch costs."""
        floats = STRETCH_FLOATS if device.type == "cpu" else CUDA_STRETCH_FLOATS
        return floats / (self.kv_heads * self.head_dim)

    def slot_bytes(self, max_length: int, itemsize: int) -> int:
        """Bytes of the keys, values and experts of one slot."""
        keys = 2 * self.num_layers * self.kv_heads * self.head_dim * itemsize
        return (keys + self.num_routed * ROUTED_TYPE.itemsize) * padded_length(max_length)


class SlotCache:
    """Keys and values: [layers, slots, kv_heads, positions, head_dim] each; positions is a multiple of
    LENGTH_STEP. `routing`: the experts that have read each token, ROUTED_TYPE [slots, positions, experts].
    """

    @torch.inference_mode(False)
    def __init__(
        self, shape: CacheShape, slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, slots, shape.kv_heads, padded_length(max_length), shape.head_dim)
        # Zeros: what was never written must be finite, since it is multiplied by a probability of 0.
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        routed = (slots, padded_length(max_length), shape.num_routed)
        self.routing = torch.zeros(routed, dtype=ROUTED_TYPE, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.keys.nbytes + self.values.nbytes + self.routing.nbytes

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.routing[target, :length] = self.routing[source, :length]


class RoutedExperts:
    """Listens to the routers of a model. `num_routed`: experts of a token, of all routers; 0 if there are
    none, or more experts than ROUTED_TYPE has numbers for.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen: list[Tensor] = []
        """By router, of the newest pass: int64 [R, k]."""
        routers = routers_of(model)
        is_small = all(len(router.weight) <= MAX_EXPERTS for router in routers)
        self.num_routed = sum(int(router.top_k) for router in routers) if is_small else 0
        for router in routers:
            router.register_forward_hook(lambda _, inputs, found: self._chosen.append(found[2]))

    def take(self) -> Tensor:
        """Of the newest pass, ROUTED_TYPE [R, num_routed]."""
        chosen, self._chosen = self._chosen, []
        return torch.cat(chosen, dim=1).to(ROUTED_TYPE)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The next rows of a call: `tokens` queries of each of the slots [start, end), slot after slot.

    They look at `length` positions, a multiple of LENGTH_STEP; `invalid` bool [end - start, 1, 1, tokens,
    length] is true beyond a query's own one. Slots with fewer queries: `gather` int64 [(end - start) *
    tokens] has the rows of the call, any one in place of those that lack, and `kept` those that do not.
    """

    start: int
    end: int
    tokens: int
    length: int
    invalid: Tensor
    gather: Tensor | None = None
    kept: Tensor | None = None


def cut_rows(padded_lengths: Ints, worth: float) -> list[tuple[int, int, int]]:
    """Stretches (start, end, length) that cover the rows [n]; each row's padded length is at most its
    stretch's.

    Neighbouring chunks are joined unless more positions are saved than a stretch of their own is `worth`: a
    long sequence does not make the short ones pay.
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


class Writes(NamedTuple):
    """Where the keys of a call go: those of row `rows`[i] (None: i) to position `positions`[i] of slot
    `slots`[i].
    """

    rows: Ints | None
    slots: Ints
    positions: Ints


def written(decoded: Ints, parts: Sequence[Part], shares: Sequence[Share]) -> Writes:
    """Rows are those of the slots 0..n-1, at the positions `decoded` [n], and then of the parts; what a slot
    shares of its parts goes to the other slot as well.
    """
    if not shares:
        slots = [np.full(end - start, slot) for slot, _, start, end in parts]
        positions = [np.arange(start, end) for _, _, start, end in parts]
        return Writes(
            None, np.concatenate([np.arange(len(decoded)), *slots]), np.concatenate([decoded, *positions])
        )
    of_slot, row = dict[int, tuple[int, Ints]](), len(decoded)
    """First position that is written, and the rows from there on."""
    for slot, _, start, end in parts:
        first, rows = of_slot.get(slot, (start, NO_INTS))
        of_slot[slot] = first, np.concatenate([rows, np.arange(row, row + end - start)])
        row += end - start
    for source, slot, length in shares:
        first, rows = of_slot.get(source, (length, NO_INTS))
        if first < length:
            own = of_slot[slot][1] if slot in of_slot else NO_INTS
            of_slot[slot] = first, np.concatenate([rows[: length - first], own])
    sizes = [len(rows) for _, rows in of_slot.values()]
    return Writes(
        np.concatenate([np.arange(len(decoded)), *(rows for _, rows in of_slot.values())]),
        np.concatenate([np.arange(len(decoded)), np.repeat(list(of_slot), sizes)]),
        np.concatenate([decoded, *(np.arange(first, first + len(rows)) for first, rows in of_slot.values())]),
    )


@dataclass(slots=True)
class Pass:
    """One call of the model; rows after those of the last stretch are padding."""

    cache: SlotCache
    stretches: list[Stretch]
    flat_index: Tensor
    """int64 [rows * kv_heads]: row of the flattened cache [slots * kv_heads * positions] that gets each
    key.
    """
    is_exact: bool
    source: Tensor | None = None
    """int64: the row of the call that each of those keys is of; None: the first ones, in order."""
    _biases: dict[int, Tensor] = field(default_factory=dict)
    """By stretch, what its scores are added to, the same in every layer: [slots * kv_heads, rows, length] of
    0 and -inf; of one slot [1, rows, length].
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, heads, d] queries and [R, kv_heads, d] keys and values in, [R, heads, d] out."""
        (num_rows, heads, head_dim), kv_heads = query.shape, key.shape[1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_filled = len(self.flat_index) // kv_heads
        for cached, new in ((keys, key), (values, value)):
            new = new[:num_filled] if self.source is None else new.index_select(0, self.source)
            cached.view(-1, head_dim).index_copy_(0, self.flat_index, new.reshape(-1, head_dim))
        queries = (query * scaling).view(num_rows, kv_heads, heads // kv_heads, head_dim)
        parts, row = [], 0
        for number, stretch in enumerate(self.stretches):
            slots = slice(stretch.start, stretch.end)
            if stretch.gather is None or stretch.kept is None:
                end = row + (stretch.end - stretch.start) * stretch.tokens
                part = self._mix(number, queries[row:end], keys[slots], values[slots])
                parts.append(part.reshape(end - row, heads, head_dim))
            else:
                end = row + len(stretch.kept)
                asked = queries.index_select(0, stretch.gather)
                part = self._mix(number, asked, keys[slots], values[slots])
                parts.append(part.reshape(-1, heads, head_dim).index_select(0, stretch.kept))
            row = end
        if num_rows > row:
            parts.append(query.new_zeros(num_rows - row, heads, head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of one stretch: [G slots * T tokens, kv_heads, heads a kv_head, d] queries in, [G, T, kv_heads, ..,
        d] out.
        """
        stretch, (_, kv_heads, repeat, head_dim) = self.stretches[number], queries.shape
        num_slots, tokens, length = stretch.end - stretch.start, stretch.tokens, stretch.length
        grouped = queries.view(num_slots, tokens, kv_heads, repeat, head_dim).permute(0, 2, 3, 1, 4)
        if self.is_exact and tokens == 1 and repeat < MIN_ROWS:
            grouped = torch.cat([grouped] * -(-MIN_ROWS // repeat), dim=2)
        num_rows = grouped.shape[2] * tokens
        flat = grouped.reshape(num_slots * kv_heads, num_rows, head_dim)
        if number not in self._biases:
            zeros = torch.zeros_like(stretch.invalid, dtype=flat.dtype)
            bias = zeros.masked_fill_(stretch.invalid, -torch.inf)
            shape = (num_slots, kv_heads if num_slots > 1 else 1, grouped.shape[2], tokens, length)
            self._biases[number] = bias.expand(shape).reshape(-1, num_rows, length)
        scores = torch.baddbmm(self._biases[number], flat, keys.flatten(0, 1)[:, :length].transpose(1, 2))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        mixed = mix_values(weights, values.flatten(0, 1)[:, :length], self.is_exact)
        return mixed.view(num_slots, kv_heads, -1, tokens, head_dim)[:, :, :repeat].permute(0, 3, 1, 2, 4)


def mix_values(probabilities: Tensor, values: Tensor, is_exact: bool) -> Tensor:
    """Probabilities [..., rows, length] times values [..., length, d], summed block after block if
    `is_exact`.
    """
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
    """Looks at what the model asks for: fills `shapes` by layer and attends to nothing."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Record kv_heads and head_dim."""
        if key.shape != value.shape or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            raise UnsupportedAttentionError(
                f"layer {layer} has queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
                f"{tuple(value.shape)}"
            )
        self.shapes[layer] = (key.shape[1], key.shape[2])
        return torch.zeros_like(query)


_local = threading.local()


@contextmanager
def in_force(pass_: Pass | ProbePass, max_length: int) -> Iterator[None]:
    """Within, the model's attention layers of this thread use `pass_`."""
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
    """What transformers calls in every attention layer, with [1, heads, R, d] or [R, heads, 1, d]. Refuses
    what it would get wrong.
    """
    layer = getattr(module, "layer_idx", None)
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if window is not None and window < _local.max_length:
        refused.append(f"a sliding window of {window}, below max_length {_local.max_length}")
    if refused or layer is None:
        raise UnsupportedAttentionError(f"layer {layer} asks for {' and '.join(refused) or 'no layer_idx'}")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if query.shape[0] == 1:
        rows = (states[0].transpose(0, 1) for states in (query, key, value))
        return _local.pass_.attend(layer, *rows, scaling)[None], None
    rows = (states[:, :, 0] for states in (query, key, value))
    return _local.pass_.attend(layer, *rows, scaling)[:, None], None


# No mask function is registered under this name, so transformers builds no mask
# (masking_utils._preprocess_mask_arguments).
AttentionInterface.register(NAME, _attention)
