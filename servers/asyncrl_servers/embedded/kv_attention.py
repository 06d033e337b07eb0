"""Attention over the slot cache, called from inside any Hugging Face model. Knows tensors; knows no request,
no HTTP.

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
`canary.check_determinism` checks it at start, on the machine at hand.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

# Tensors whose memory leaves the process when they do. Knows the operating system; knows no model.
#
# An allocator keeps what is freed: glibc's malloc_trim gives back the holes in its heaps, but not the end of
# the heap of any thread but
# the main one (up to 64 MiB each). So weights and KV cache, which go to sleep, lie in mappings of their own
# on the CPU. On CUDA they
# come from torch's caching allocator, whose unused blocks `memory.give_back` returns to the device.


_LARGE_BYTES = 2**21
"""From here on a mapping may hold large pages: the first write to small ones costs several times what it
copies.
"""

_POPULATE_WRITE = 23
"""madvise of Linux 5.14 and later. It takes whole pages: tensors that it is for begin on one."""

_ALIGNMENT = 64
"""Bytes to which torch's CPU allocator aligns. A tensor in a mapped safetensors file lies where the ones
before it end.
"""


@torch.inference_mode(False)
def own_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without content. Raises OSError (CPU) or RuntimeError (CUDA) if there is no memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _mapped(num_bytes).view(dtype).view(tuple(shape))


@torch.inference_mode(False)
def own_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, whose memory is there. Raises as own_empty does."""
    tensor = own_empty(shape, dtype, device)
    return tensor if _is_there(tensor) else tensor.zero_()


@torch.inference_mode(False)
def own_empties(
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]], device: torch.device
) -> dict[str, Tensor]:
    """Tensors without content side by side, so that large pages hold small ones too; the memory goes with the
    last. Raises as own_empty.
    """
    if device.type != "cpu":
        return {name: own_empty(shape, dtype, device) for name, (shape, dtype) in kinds.items()}
    sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in kinds.items()}
    whole = _mapped(sum(_aligned(size) for size in sizes.values()))
    tensors, start = dict[str, Tensor](), 0
    for name, (shape, dtype) in kinds.items():
        tensors[name] = whole[start : start + sizes[name]].view(dtype).view(shape)
        start += _aligned(sizes[name])
    return tensors


@torch.inference_mode(False)
@torch.no_grad()
def own_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`."""
    return own_empty(tensor.shape, tensor.dtype, device).copy_(tensor)


def _mapped(num_bytes: int) -> Tensor:
    """Bytes of a new mapping, from the beginning of a large page on."""
    if num_bytes < _LARGE_BYTES:
        return torch.frombuffer(
            mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
        )
    mapping = mmap.mmap(-1, num_bytes + _LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_BYTES
    return whole[start : start + num_bytes]


def _is_there(tensor: Tensor) -> bool:
    """Have the kernel give a new mapping its pages, which are zeros; false where it is none, or the kernel
    does not know how.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _LARGE_BYTES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(libc.madvise(tensor.data_ptr(), tensor.nbytes, _POPULATE_WRITE) == 0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself if it lies in a mapped file or on another device, else a copy in a mapping of its
    own.
    """
    is_torchs = tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT == 0
    return own_copy(tensor, tensor.device) if is_torchs else tensor


NAME = "asyncrl_slots"
LENGTH_STEP = 32
"""Attention runs over a multiple of this many positions."""
CONTRACTION = 128
"""Positions summed in one matrix product with V."""
MIN_ROWS = 4
"""Rows of the smallest matrix product of attention."""


class UnsupportedAttentionError(Exception):
    """The model's attention is of a kind that the slot cache does not reproduce."""


def padded_length(length: int) -> int:
    """`length` rounded up to LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@dataclass(slots=True)
class SlotCache:
    """Keys and values: [layers, slots, kv_heads, positions, head_dim] each; positions is a multiple of
    LENGTH_STEP.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, shape: CacheShape, slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> SlotCache:
        """A cache of zeros: what was never written must be finite, since it is multiplied by a probability of
        0.
        """
        size = (shape.num_layers, slots, shape.kv_heads, padded_length(max_length), shape.head_dim)
        return cls(own_zeros(size, dtype, device), own_zeros(size, dtype, device))

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.keys.nbytes + self.values.nbytes

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a model's keys and values."""

    num_layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots [start, end) look at `length` positions, a multiple of LENGTH_STEP.

    `invalid` bool [end - start, 1, 1, length]: true beyond the row's own position.
    """

    start: int
    end: int
    length: int
    invalid: Tensor


@dataclass(slots=True)
class DecodePass:
    """Row i of the call is the newest token of the sequence in slot i, for all n running ones."""

    cache: SlotCache
    num_rows: int
    segments: list[Segment]
    flat_index: Tensor
    """int64 [n * kv_heads]: row of the flattened cache [slots * kv_heads * positions] that gets the new
    key.
    """
    is_exact: bool

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, heads, d] queries and [R, kv_heads, d] keys and values in, [R, heads, d] out."""
        n, (rows, heads, head_dim) = self.num_rows, query.shape
        kv_heads = key.shape[1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.view(-1, head_dim).index_copy_(0, self.flat_index, key[:n].reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.flat_index, value[:n].reshape(-1, head_dim))
        repeat = heads // kv_heads
        queries = (query[:n] * scaling).reshape(n, kv_heads, repeat, head_dim)
        if self.is_exact and repeat < MIN_ROWS:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, MIN_ROWS - repeat))
        parts = []
        for segment in self.segments:
            start, end, length = segment.start, segment.end, segment.length
            scores = torch.matmul(queries[start:end], keys[start:end, :, :length].transpose(2, 3))
            weights = attention_weights(scores, segment.invalid)
            mixed = mix_values(weights, values[start:end, :, :length], self.is_exact)
            parts.append(mixed[:, :, :repeat].reshape(end - start, heads, head_dim))
        if rows > n:
            parts.append(query.new_zeros(rows - n, heads, head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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


class Pass(Protocol):
    """One call of the model, as its attention layers see it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, heads, d] queries and [R, kv_heads, d] keys and values in, [R, heads, d] out."""
        ...


class in_force:  # noqa: N801  read as a statement: `with in_force(pass_, max_length):`
    """Makes `pass_` the one that the model's attention layers of this thread use."""

    def __init__(self, pass_: Pass, max_length: int) -> None:
        self.pass_, self.max_length = pass_, max_length

    def __enter__(self) -> None:
        _local.pass_, _local.max_length = self.pass_, self.max_length

    def __exit__(self, *_: object) -> None:
        _local.pass_ = None


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


def attention_weights(scores: Tensor, invalid: Tensor) -> Tensor:
    """Softmax in float32 over the positions that are not `invalid`; overwrites `scores`."""
    return torch.softmax(scores.masked_fill_(invalid, float("-inf")), dim=-1, dtype=torch.float32).to(
        scores.dtype
    )


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
    if layer is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} has no layer_idx")
    window = kwargs.get("sliding_window")
    if window is not None and window < _local.max_length:
        raise UnsupportedAttentionError(
            f"layer {layer} has a sliding window of {window}, below max_length {_local.max_length}"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"layer {layer} asks for {name}")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if query.shape[0] == 1:
        mixed = _local.pass_.attend(
            layer, *(states[0].transpose(0, 1) for states in (query, key, value)), scaling
        )
        return mixed[None], None
    mixed = _local.pass_.attend(layer, *(states[:, :, 0] for states in (query, key, value)), scaling)
    return mixed[:, None], None


# No mask function is registered under this name, so transformers builds no mask
# (masking_utils._preprocess_mask_arguments).
AttentionInterface.register(NAME, _attention)
