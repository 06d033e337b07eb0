"""Content of tensors off their device: in pinned host memory, or of a CPU in a file.

Storages are copied and resized to 0; tensors stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.weights.host_memory import HostMemory, return_free_memory
from asyncrl.weights.ipc import aligned

Copies = list[tuple[torch.UntypedStorage, Tensor]]


def memory_beside(device: torch.device, folder: Path) -> HostMemory:
    """Return memory for what leaves `device`; for a CPU, a file in `folder`: host memory
    is the CPU's own, so a copy there would free nothing.
    """
    return HostMemory(device, folder if device.type == "cpu" else None)


def copy_out(
    tensors: Iterable[Tensor], device: torch.device, memory: HostMemory
) -> Copies:
    """Copy the storages of local tensors on `device` into `memory`. Raises MemoryError,
    OSError and RuntimeError.
    """
    found = dict[int, torch.UntypedStorage]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_here = tensor.device.type == device.type and storage.nbytes() > 0
        # Skip scalars, which are not worth it; tensors in host memory; and storages
        # that cannot give their memory back. Tied weights share a storage, which
        # `found` holds once.
        if tensor.ndim and is_here and storage.resizable():
            found[storage._cdata] = storage
    sizes = [aligned(storage.nbytes()) for storage in found.values()]
    pieces = torch.split(memory.of(sum(sizes)), sizes) if sizes else ()
    copies: Copies = []
    for storage, piece in zip(found.values(), pieces, strict=True):
        copy = piece[: storage.nbytes()]
        copy.copy_(_bytes_of(storage), non_blocking=True)
        copies.append((storage, copy))
    _settle(device)
    return copies


def copy_back(copies: Copies, device: torch.device) -> None:
    """Fill the storages again. Raises RuntimeError."""
    for storage, data in copies:
        storage.resize_(len(data))
        _bytes_of(storage).copy_(data, non_blocking=True)
    _settle(device)


def _settle(device: torch.device) -> None:
    # Copies are asynchronous: only after they have run may a source be freed, or success
    # reported to others.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_storages(copies: Copies) -> int:
    """Free the storages that were copied; return their bytes."""
    for storage, _ in copies:
        storage.resize_(0)
    return sum(len(data) for _, data in copies)


def content_in(copies: Copies, local: Tensor) -> Tensor:
    """Return the content of `local` from the copy of its storage; without one, itself."""
    for storage, data in copies:
        # An empty storage has no address, so storages are compared as objects.
        if storage._cdata == local.untyped_storage()._cdata:
            content = data.view(local.dtype)
            start = content.storage_offset() + local.storage_offset()
            return content.as_strided(local.shape, local.stride(), start)
    return local


def give_back(device: torch.device) -> None:
    """Return freed memory to the device: it stays in torch's cache, or malloc's, and
    others get it only once the cache gives it back.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_free_memory()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Aside:
    """The content of a server's tensors while another process has its device.

    Life: here -> send_away() -> away, the tensors have no memory -> bring_back() -> here.
        Both can be repeated. A call that fails changes nothing.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        """`folder`: for a file with what leaves a CPU."""
        self._device = device
        self._memory = memory_beside(device, folder)
        self._copies: Copies = []

    @property
    def is_away(self) -> bool:
        return bool(self._copies)

    def send_away(self, tensors: Iterable[Tensor]) -> TransferStats:
        """Free the memory of `tensors`, which is their own (own_memory). Raises Refused
        (507).
        """
        started_s = time.perf_counter()
        num_bytes = 0
        if not self.is_away:
            moved = list(tensors)
            try:
                copies = copy_out(moved, self._device, self._memory)
            except (OSError, MemoryError, RuntimeError) as error:
                raise _refused("leave its device", error) from error
            num_bytes = free_storages(copies)
            self._copies = copies
            self._memory.drop_pages()
            give_back(self._device)
        return transfer_stats(num_bytes, started_s)

    def bring_back(self) -> TransferStats:
        """Fill the tensors again, bit for bit. Raises Refused (507)."""
        started_s = time.perf_counter()
        num_bytes = sum(len(data) for _, data in self._copies)
        try:
            copy_back(self._copies, self._device)
        except RuntimeError as error:
            free_storages(self._copies)
            give_back(self._device)
            raise _refused("come back", error) from error
        self._copies = []
        if self._device.type == "cpu":  # no second copy stays in the same memory
            self._memory.free()
        return transfer_stats(num_bytes, started_s)


def _refused(what: str, error: Exception) -> Refused:
    reason = f"{type(error).__name__}: {str(error)[:500]}"
    return Refused(
        507,
        f"the model cannot {what}: {reason}",
        way_out="free memory, or disk space in the run directory.",
    )


def transfer_stats(num_bytes: int, started_s: float) -> TransferStats:
    """Return the stats of a transfer that ends now. `started_s`: of time.perf_counter."""
    return TransferStats(num_bytes=num_bytes, seconds=time.perf_counter() - started_s)
