"""Attention over the slot cache, called from inside any Hugging Face model.

A call has one row per token. On CPU, float32 rows are batch-invariant and decoding
equals prefilling bit for bit. MKL changes the summation order of products below 4 rows
and splits sums above 192, so both are avoided; masked probabilities are 0 and cached
values finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from asyncrl.models.attention_kinds import (
    AttentionKind,
    UnknownAttentionError,
    by_position,
    kind_of,
)
from asyncrl.models.devices import to_device
from asyncrl.weights.export import routers_of
from asyncrl_servers.embedded.fixed_memory import FixedMemory
from asyncrl_servers.embedded.slot_states import Cut, SlotStates, running

NAME = "asyncrl_slots"
LENGTH_STEP = 16
CONTRACTION = 128
"""Positions summed in one matrix product with V."""
MIN_ROWS = 4
SPLITS = 8
"""Parts of a row's positions that a decoding kernel reads at once."""
CHUNK = 8
"""Rows per chunk when decoding slots are joined into stretches."""
STRETCH_FLOATS = 30_000
"""Keys read in the time of one more stretch (measured: 30 us per layer on one CPU
thread).
"""
CUDA_STRETCH_FLOATS = 10_000_000
"""The same on CUDA (estimated: five 3 us kernels, 3 TB/s)."""

Ints = npt.NDArray[np.int64]
Ids = Sequence[int] | Ints
ROUTED_TYPE = torch.int16
"""Type of cached expert numbers; its bytes are uint16."""
NO_INTS = np.zeros(0, np.int64)
NO_POSITIONS = torch.zeros(0, dtype=torch.int64)
Part = tuple[int, Ids, int, int]
"""(slot, token ids, start, end)."""


MOST_COPIED_BYTES = 2**24
"""Most bytes of a tensor that are copied together. The copy holds them twice."""
Copy = tuple[int, int, int]
"""(source slot, target slot, number of tokens)."""


def padded_length(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class LayerShape(NamedTuple):
    """Shape of an attention call's keys and values."""

    kv_heads: int
    head_dim: int
    value_dim: int
    kind: AttentionKind = AttentionKind()


class CacheShape(NamedTuple):
    """Shapes of the attention calls of a forward pass, in their order.

    A call, not a layer, has a place in the cache: hybrids have layers without
    attention, and Zamba 2 calls the same module in several layers.
    """

    layers: tuple[LayerShape, ...]
    num_routed: int = 0
    state: DynamicCache | None = None
    """The cache of a text, with what recurrent layers keep."""

    @property
    def is_plain(self) -> bool:
        """Whether all calls are full causal attention of one shape."""
        return len(set(self.layers)) == 1 and self.layers[0].kind == AttentionKind()

    def stretch_worth(self, device: torch.device) -> float:
        floats = STRETCH_FLOATS if device.type == "cpu" else CUDA_STRETCH_FLOATS
        return floats / max(
            (one.kv_heads * one.head_dim for one in self.layers), default=1
        )


class SlotCache:
    """Keys and values [slots, kv_heads, positions, head_dim] of each attention call (on a
    CPU, keys are stored with the positions last);
    `routing`: ROUTED_TYPE [slots, positions, experts]; `states`: what recurrent layers
    keep.
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
        memory: FixedMemory | None = None,
    ) -> None:
        """`memory`: of keys and values (None: torch's)."""
        longest = padded_length(max_length)
        # Unwritten values must be finite: they are multiplied by 0.
        zeros = (
            partial(torch.zeros, dtype=dtype, device=device)
            if memory is None
            else partial(memory.zeros, dtype=dtype)
        )
        # A CPU multiplies queries by keys in 0.3 to 0.9 of the time if the positions are
        # innermost in memory.
        is_turned = device.type == "cpu"
        self.keys = [
            zeros(slots, one.kv_heads, one.head_dim, longest).mT
            if is_turned
            else zeros(slots, one.kv_heads, longest, one.head_dim)
            for one in shape.layers
        ]
        self.values = [
            zeros(slots, one.kv_heads, longest, one.value_dim) for one in shape.layers
        ]
        self.states = SlotStates(shape.state, slots)
        routed = (slots, longest, shape.num_routed)
        self.routing = torch.zeros(routed, dtype=ROUTED_TYPE, device=device)
        self.table = torch.arange(slots, dtype=torch.int32, device=device)[:, None]
        """Each slot's place in keys and values, for decode_attention."""
        self._position_bytes = dtype.itemsize * max(
            (one.kv_heads * max(one.head_dim, one.value_dim) for one in shape.layers),
            default=0,
        )
        """Of one position in the largest tensor."""
        self._moves = list[Copy]()

    @property
    def num_bytes(self) -> int:
        tensors = (*self.keys, *self.values, self.routing, *self.states.tensors)
        return sum(one.nbytes for one in tensors)

    def read(self, layer: int, start: int, end: int, length: int) -> list[Tensor]:
        """Return keys and values [slots * kv_heads, length, head_dim] of slots `start`
        to `end`.
        """
        both = [self.keys[layer], self.values[layer]]
        return [one[start:end].flatten(0, 1)[:, :length] for one in both]

    def copy_slots(self, copies: list[Copy]) -> None:
        """Copy tokens from slot to slot, one copy after the other.

        Example: after 1 -> 0, 2 -> 1, slot 0 has the tokens that were in 1.
        """
        longest = max((length for _, _, length in copies), default=0)
        num_bytes = len(copies) * longest * self._position_bytes
        if num_bytes > MOST_COPIED_BYTES:
            for one in copies:
                self._copy([one])
        elif copies:
            self._copy(copies)

    def _copy(self, copies: list[Copy]) -> None:
        # In one operation for each tensor: half of the rows of a tiny model move in a
        # step, and a copy for each of them took a sixth of the engine's time.
        origin = dict[int, int]()
        for source, target, _ in copies:
            origin[target] = origin.get(source, source)
        targets, sources = [*origin], [*origin.values()]
        # Positions after a row's own length are masked until they are written.
        longest = max(length for _, _, length in copies)
        device = self.routing.device
        both = to_device(np.array([targets, sources]), device)
        cached = [one[:, :, :longest] for one in (*self.keys, *self.values)]
        if self.routing.shape[2]:
            cached.append(self.routing[:, :longest])
        for one in cached:
            # In the order of memory, which takes half the time for keys on a CPU.
            one = one if one.stride(-1) == 1 else one.mT
            # Half the time of an assignment to one[targets] on a CPU.
            one.index_copy_(0, both[0], one.index_select(0, both[1]))
        self.states.copy(sources, targets)

    def clear(self, slots: Sequence[int]) -> None:
        for one in (*self.keys, *self.values):
            one[slots] = 0

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Move tokens at the next settle(). The source's are undefined then."""
        self._moves.append((source, target, length))

    def settle(self) -> None:
        moves, self._moves = self._moves, []
        self.copy_slots(moves)


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

    def _note(
        self, router: torch.nn.Module, inputs: object, found: Sequence[Tensor]
    ) -> None:
        if len(found) < 3 or found[2].is_floating_point():
            rule = "algorithm.router_replay needs a router that returns the experts it chooses"
            raise ValueError(f"{rule}, and {type(router).__name__} does not")
        self._chosen.append(found[2])


class Stretch(NamedTuple):
    """Rows of a call: `tokens` queries per slot in [start, end) over `length`
    positions.
    """

    start: int
    end: int
    tokens: int
    length: int
    positions: Tensor
    """int64 [length]: 0, 1, .. of the keys."""
    own: Tensor
    """int64 [end - start or 1, 1, 1, tokens, 1]: positions of the queries."""


def cut_rows(padded_lengths: Ints, worth: float) -> list[tuple[int, int, int]]:
    """Return stretches (start, end, length) covering rows [n].

    Neighboring chunks are joined unless this wastes more positions than a stretch is
    `worth`.

    Example: the second chunk would waste 8 * 32 positions in a stretch of 96. The third
    wastes only 2 * 32 in one of 64.
        >>> cut_rows(np.array([96] * 8 + [64] * 8 + [32] * 2), worth=100)
        [(0, 8, 96), (8, 18, 64)]
    """
    stretches: list[tuple[int, int, int]] = []
    for chunk_start in range(0, len(padded_lengths), CHUNK):
        chunk_end = min(chunk_start + CHUNK, len(padded_lengths))
        length = int(padded_lengths[chunk_start:chunk_end].max())
        start, end, joined = stretches[-1] if stretches else (0, 0, length)
        common = max(joined, length)
        wasted = (end - start) * (common - joined) + (chunk_end - chunk_start) * (
            common - length
        )
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
    slots: Tensor
    """int64: each row's slot of the cache."""
    offsets: Tensor
    """int64: each row's position in its slot."""
    is_exact: bool
    source: Tensor | None = None
    """int64: each key's row of the call; None: in order."""
    positions: Tensor = NO_POSITIONS
    """int64 [R]: of the tokens."""
    cuts: Sequence[Cut] = ()
    """Rows with their states, if the model has any."""
    known: None = None
    _biases: dict[object, Tensor] = field(default_factory=dict)
    """Additive masks by stretch and kind: [slots * kv_heads, rows, length]; [1, rows,
    length] if all slots have the same.
    """

    def attend(
        self,
        place: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        kind: AttentionKind = AttentionKind(),
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Map queries [R, heads, d], keys [R, kv_heads, d] and values [R, kv_heads, v]
        to [R, heads, v].

        `place`: number of this call in the forward pass.
        """
        (num_rows, heads, head_dim), kv_heads = query.shape, key.shape[1]
        for cache, new in ((self.cache.keys, key), (self.cache.values, value)):
            new = (
                # The rows after these are padding of exact mode, which has no place in
                # the cache.
                new[: len(self.slots)]
                if self.source is None
                else new.index_select(0, self.source)
            )
            cache[place][self.slots, :, self.offsets] = new
        queries = (query * scaling).view(
            num_rows, kv_heads, heads // kv_heads, head_dim
        )
        parts, row = [], 0
        for number, stretch in enumerate(self.stretches):
            end = row + (stretch.end - stretch.start) * stretch.tokens
            keys, values = self.cache.read(
                place, stretch.start, stretch.end, stretch.length
            )
            part = self._mix(number, queries[row:end], keys, values, kind, sinks_H)
            parts.append(part.reshape(end - row, heads, -1))
            row = end
        if num_rows > row:
            parts.append(query.new_zeros(num_rows - row, heads, value.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(
        self,
        number: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        kind: AttentionKind,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Map queries [G slots * T tokens, kv_heads, heads per kv_head, d] to [G, T,
        kv_heads, .., v].
        """
        stretch, (_, kv_heads, repeat, head_dim) = self.stretches[number], queries.shape
        num_slots, tokens = stretch.end - stretch.start, stretch.tokens
        grouped = queries.view(num_slots, tokens, kv_heads, repeat, head_dim).permute(
            0, 2, 3, 1, 4
        )
        copies = 1
        if self.is_exact and tokens * repeat < MIN_ROWS:
            # Below 4 rows MKL sums in another order. Copies of the queries fill the
            # product up, and only the first of them are used.
            copies = -(-MIN_ROWS // (tokens * repeat))
            grouped = torch.cat([grouped] * copies, dim=2)
        num_rows = grouped.shape[2] * tokens
        flat = grouped.reshape(num_slots * kv_heads, num_rows, head_dim)
        bias = self._bias(number, kind, (kv_heads, grouped.shape[2]), flat.dtype)
        if kind.softcap is None:
            scores = torch.baddbmm(bias, flat, keys.transpose(1, 2))
        else:
            scores = torch.bmm(flat, keys.transpose(1, 2)) / kind.softcap
            scores = torch.tanh(scores) * kind.softcap + bias
        if sinks_H is not None:
            # A block of columns before the scores: rows of whole vectors keep their
            # bits at any length.
            block = scores.new_full(
                (num_slots, kv_heads, copies, repeat, tokens, LENGTH_STEP), -torch.inf
            )
            block[..., 0] = sinks_H.view(kv_heads, 1, repeat, 1)
            scores = torch.cat((block.view(*scores.shape[:2], -1), scores), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        mixed = mix_values(weights[..., -stretch.length :], values, self.is_exact)
        mixed = mixed.view(num_slots, kv_heads, -1, tokens, values.shape[2])[
            :, :, :repeat
        ]
        return mixed.permute(0, 3, 1, 2, 4)

    def _bias(
        self,
        number: int,
        kind: AttentionKind,
        heads: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the additive mask of a stretch for `heads`: key heads, and queries of
        each.
        """
        key = number, kind.window, kind.chunk, heads
        # One mask serves all layers of a kind in this call.
        if key not in self._biases:
            stretch, (kv_heads, queries) = self.stretches[number], heads
            positions, own = stretch.positions, stretch.own
            invalid = positions > own
            if kind.window is not None:
                invalid |= positions <= own - kind.window
            if kind.chunk is not None:
                invalid |= positions // kind.chunk != own // kind.chunk
            bias = torch.zeros_like(invalid, dtype=dtype).masked_fill_(
                invalid, -torch.inf
            )
            num_masks = len(own)  # one for all slots that read the same positions
            shape = (
                num_masks,
                kv_heads if num_masks > 1 else 1,
                queries,
                stretch.tokens,
                stretch.length,
            )
            self._biases[key] = bias.expand(shape).reshape(
                -1, queries * stretch.tokens, stretch.length
            )
        return self._biases[key]


def mix_values(probabilities: Tensor, values: Tensor, is_exact: bool) -> Tensor:
    """Multiply probabilities [..., rows, length] by values [..., length, d]; in blocks
    if `is_exact`.
    """
    length = values.shape[-2]
    if not is_exact or length <= CONTRACTION:
        return torch.matmul(probabilities, values)
    # Above 192 positions the library splits the sum, and the bits change with the
    # batch. Sums over at most 128 keep theirs, and the blocks are added from left to
    # right.
    mixed = torch.matmul(probabilities[..., :CONTRACTION], values[..., :CONTRACTION, :])
    for start in range(CONTRACTION, length, CONTRACTION):
        end = min(start + CONTRACTION, length)
        mixed += torch.matmul(probabilities[..., start:end], values[..., start:end, :])
    return mixed


@dataclass(slots=True)
class ProbePass:
    """Pass of a first call, which records the shapes of attention."""

    positions: Tensor
    cuts: Sequence[Cut]
    known: set[int] = field(default_factory=set)
    """Dictionaries of states that modules made."""
    layers: list[LayerShape] = field(default_factory=list)

    def attend(
        self,
        place: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        kind: AttentionKind,
        sinks_H: Tensor | None,
    ) -> Tensor:
        self.layers.append(LayerShape(key.shape[1], key.shape[2], value.shape[2], kind))
        return query.new_zeros(*query.shape[:2], value.shape[2])


@contextmanager
def in_force(pass_: Pass | ProbePass, max_length: int) -> Iterator[None]:
    running.pass_, running.max_length, running.place = pass_, max_length, 0
    try:
        yield
    finally:
        running.pass_ = None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Tensor | float | None,
) -> tuple[Tensor, None]:
    """Attend for transformers, with [1, heads, R, d] or [R, heads, 1, d]. Raises
    UnknownAttentionError.
    """
    kind = kind_of(module, attention_mask, options).within(running.max_length)
    if running.mixer:
        raise UnknownAttentionError(f"{running.mixer} has both attention and a state")
    # Counted, not taken from the layer's number: hybrids skip layers, and a module may
    # be called more than once in a pass.
    place, running.place = running.place, running.place + 1
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    query = by_position(module, query, running.pass_.positions)
    axis = 2 if query.shape[0] == 1 else 0
    rows = [
        states[0].transpose(0, 1) if axis else states[:, :, 0]
        for states in (query, key, value)
    ]
    mixed = running.pass_.attend(
        place, *rows, scaling, kind, options.get("s_aux")
    ).contiguous()
    return (mixed[None] if axis else mixed[:, None]), None


# transformers builds no mask for unregistered names
# (masking_utils._preprocess_mask_arguments).
AttentionInterface.register(NAME, _attention)
