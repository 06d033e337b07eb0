"""Gives the memory under a storage up and takes it again, the storage staying where it is. Knows torch's
storages and the kernel.

On CUDA the storage is set to size 0, and its memory goes back to the device. On the CPU the kernel takes its
whole pages and keeps their addresses (MADV_DONTNEED of https://man7.org/linux/man-pages/man2/madvise.2.html):
what is taken reads as zeros, and the next write has a page again, a large one where the kernel has them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Tensors of the host side by side in one mapping, so that their memory comes and goes in large pages. Knows
# torch and the kernel.
#
# A page of 4 KiB costs the kernel several times what it costs to fill it; one of 2 MiB about half. It gives
# those only for whole ones
# that hold nothing: tensors between others of an allocator's heap leave some page of each behind, and get
# small ones back.


LARGE_PAGE = 2**21
GROUP_BYTES = 2**26
"""So many are moved at a time: what it takes beside them."""


def gather(tensors: Iterable[Tensor], release: Callable[[], None] = lambda: None) -> int:
    """Move those that can be moved into a mapping of their own; returns their bytes. Those that were moved
    before are left there.

    `release` gives the kernel what an allocator keeps of the memory that they leave, group after group: else
    both would be there at once. A tensor can be moved if nobody else looks at its storage: no view, no shard,
    no optimizer. Tied parameters are one tensor. Small ones move too, since one of them that lies in a mapped
    model file keeps all of the file resident; single numbers stay.
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
    if (
        whole := sum(sizes) // LARGE_PAGE * LARGE_PAGE
    ):  # no more: what a large page holds beyond the last place is never given back
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
    if (
        isinstance(tensor, DTensor)
        or tensor.device.type != "cpu"
        or not tensor.ndim
        or not tensor.nbytes
        or not tensor.is_contiguous()
    ):
        return False
    storage = tensor.untyped_storage()
    is_moved = storage.data_ptr() % mmap.PAGESIZE == 0 and storage.nbytes() == _paged(tensor.nbytes)
    return (
        not is_moved and torch._C._storage_Use_Count(storage._cdata) == 2
    )  # the tensor's, and the one of `storage`


def _paged(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


log = logging.getLogger("asyncrl.trainer")

LARGE_BYTES = 2**21
"""From here on a range may hold a large page."""


class Memory(Protocol):
    """How memory is freed on one kind of device."""

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Prepare tensors that will come and go together."""
        ...

    def movable(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """(first byte, number of bytes) of what free() takes."""
        ...

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give it up, and with it the content."""
        ...

    def take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Have memory for the `num_bytes` that movable() said before free() again. Raises RuntimeError."""
        ...

    def settle(self) -> None:
        """After many calls of free(): let go of what an allocator has kept for itself."""
        ...


class CudaMemory:
    """Of a CUDA device."""

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """They are as they should be."""

    def movable(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """All of it."""
        return 0, storage.nbytes()

    def free(self, storage: torch.UntypedStorage) -> None:
        """To torch's allocator."""
        storage.resize_(0)

    def take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """From torch's allocator."""
        storage.resize_(num_bytes)

    def settle(self) -> None:
        """From torch's allocator to the device."""
        torch.cuda.empty_cache()


class HostMemory:
    """Of the host."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Side by side, where large pages hold several."""
        gather(tensors, trim)

    def movable(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Its whole pages: the ends of other storages lie on the others."""
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        return start - storage.data_ptr(), max(end - start, 0)

    def free(self, storage: torch.UntypedStorage) -> None:
        """To the kernel. Locked memory, which it does not take, keeps its content."""
        first, num_bytes = self.movable(storage)
        if num_bytes and self._advise(storage.data_ptr() + first, num_bytes, mmap.MADV_DONTNEED):
            log.warning(
                "%d bytes that are offloaded stay resident too: %s",
                num_bytes,
                os.strerror(ctypes.get_errno()),
            )

    def take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """The kernel gives pages as they are written to, large ones where there are any."""
        if num_bytes >= LARGE_BYTES:
            self._advise(storage.data_ptr() + self.movable(storage)[0], num_bytes, mmap.MADV_HUGEPAGE)

    def settle(self) -> None:
        """Whatever else was freed, too: gradients, and copies."""
        trim()

    def _advise(self, address: int, num_bytes: int, advice: int) -> int:
        return int(self._libc.madvise(address, num_bytes, advice))


def memory_of(device: torch.device) -> Memory:
    """That of the device."""
    return CudaMemory() if device.type == "cuda" else HostMemory()


def trim() -> None:
    """Have glibc, where it is that, give freed host memory to the kernel."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """uint8 view of all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def view_of(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over `storage` that lies in it as `like` lies in its own."""
    return torch.empty(0, dtype=like.dtype, device=storage.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )
