"""Tensors whose memory leaves the process when they do. Knows the operating system; knows no model.

An allocator keeps what is freed: glibc's malloc_trim gives back the holes in its heaps, but not the end of the heap of any thread but
the main one (up to 64 MiB each). So weights and KV cache, which go to sleep, lie in mappings of their own on the CPU. On CUDA they
come from torch's caching allocator, whose unused blocks `memory.give_back` returns to the device.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_LARGE_BYTES = 2**21
"""From here on a mapping may hold large pages: the first write to small ones costs several times what it copies."""

_POPULATE_WRITE = 23
"""madvise of Linux 5.14 and later. It takes whole pages: tensors that it is for begin on one."""

_ALIGNMENT = 64
"""Bytes to which torch's CPU allocator aligns. A tensor in a mapped safetensors file lies where the ones before it end."""


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
def own_empties(kinds: Mapping[str, tuple[torch.Size, torch.dtype]], device: torch.device) -> dict[str, Tensor]:
    """Tensors without content side by side, so that large pages hold small ones too; the memory goes with the last. Raises as own_empty."""
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
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes + _LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_BYTES
    return whole[start : start + num_bytes]


def _is_there(tensor: Tensor) -> bool:
    """Have the kernel give a new mapping its pages, which are zeros; false where it is none, or the kernel does not know how."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LARGE_BYTES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(libc.madvise(tensor.data_ptr(), tensor.nbytes, _POPULATE_WRITE) == 0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself if it lies in a mapped file or on another device, else a copy in a mapping of its own."""
    is_torchs = tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT == 0
    return own_copy(tensor, tensor.device) if is_torchs else tensor
