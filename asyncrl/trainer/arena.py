"""Tensors of the host side by side in one mapping, so that their memory comes and goes in large pages. Knows torch and the kernel.

A page of 4 KiB costs the kernel several times what it costs to fill it; one of 2 MiB about half. It gives those only for whole ones
that hold nothing: tensors between others of an allocator's heap leave some page of each behind, and get small ones back.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGE_PAGE = 2**21
GROUP_BYTES = 2**26
"""So many are moved at a time: what it takes beside them."""


def gather(tensors: Iterable[Tensor], release: Callable[[], None] = lambda: None) -> int:
    """Move those that can be moved into a mapping of their own; returns their bytes. Those that were moved before are left there.

    `release` gives the kernel what an allocator keeps of the memory that they leave, group after group: else both would be there at once.
    A tensor can be moved if nobody else looks at its storage: no view, no shard, no optimizer. Tied parameters are one tensor. Small ones
    move too, since one of them that lies in a mapped model file keeps all of the file resident; single numbers stay.
    """
    alone = list({id(tensor): tensor for tensor in tensors if _is_alone(tensor)}.values())
    group, size, num_bytes = list[Tensor](), 0, 0
    for tensor in alone:
        group.append(tensor)
        size += _paged(tensor.nbytes)
        if size >= GROUP_BYTES or tensor is alone[-1]:
            _move(group)
            release()
            group, size, num_bytes = [], 0, num_bytes + size
    return num_bytes


def new_places(sizes: Iterable[int]) -> list[Tensor]:
    """Places of so many bytes, in whole pages, one after the other; each is a storage. Raises OSError."""
    sizes = [_paged(size) for size in sizes]
    mapping = mmap.mmap(-1, sum(sizes) + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE
    if whole := sum(sizes) // LARGE_PAGE * LARGE_PAGE:  # no more: what a large page holds beyond the last place is never given back
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    places = []
    for size in sizes:
        places.append(torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=size))
        start += size
    return places


def _move(tensors: list[Tensor]) -> None:
    for tensor, place in zip(tensors, new_places(tensor.nbytes for tensor in tensors), strict=True):
        moved = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor.detach())
        tensor.data = moved


def _is_alone(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor) or tensor.device.type != "cpu" or not tensor.ndim or not tensor.nbytes or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    is_moved = storage.data_ptr() % mmap.PAGESIZE == 0 and storage.nbytes() == _paged(tensor.nbytes)
    return not is_moved and torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's, and the one of `storage`


def _paged(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
