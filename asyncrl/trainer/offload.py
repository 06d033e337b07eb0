"""Move a trainer's tensors off its device and back.

Storages are copied to host memory (CUDA) or a mapped file (CPU) and resized to 0; tensors stay the same
objects.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.base.host import available_memory
from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.trainer_api import TrainerPart
from asyncrl.trainer.ranks import Ranks
from asyncrl.weights.ipc import ALIGNMENT

PARTS: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")

Copies = list[tuple[torch.UntypedStorage, Tensor]]


class HostMemory:
    """Reusable host memory, pinned at its exact size; torch's allocator rounds up."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._cuda = cuda if device.type == "cuda" else None
        self._ordinal = 0 if self._cuda is None else self._cuda.current_device()

    def __len__(self) -> int:
        return len(self._data)

    def __del__(self) -> None:
        self.free()

    def of(self, num_bytes: int) -> Tensor:
        """Return uint8 of this size; growing loses the content. Raises MemoryError and RuntimeError."""
        if num_bytes > len(self):
            self.free()
            available = available_memory()
            if num_bytes > available:
                raise MemoryError(f"{num_bytes} bytes are needed, and the host has {available} available")
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)  # 2 MB at once: pinning walks every page
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._call("cudaHostRegister", data.data_ptr(), num_bytes, 0)
            self._data = data
        return self._data[:num_bytes]

    def free(self) -> None:
        if len(self):
            self._call("cudaHostUnregister", self._data.data_ptr())
        self._data = torch.empty(0, dtype=torch.uint8)

    @property
    def is_short(self) -> bool:
        return available_memory() < len(self)

    def _call(self, name: str, *arguments: int) -> None:
        if self._cuda is not None:
            with self._cuda.device(self._ordinal):  # else a context is created on the first device
                try:
                    self._cuda.check_error(getattr(self._cuda.cudart(), name)(*arguments))
                except RuntimeError:
                    # CUDA reports the refusal again at the next launch.
                    with suppress(RuntimeError):
                        self._cuda._sleep(1)
                    raise


class Offload:
    """Tracks parts of a trainer's state off its device. Collective.

    Invariant: a part is here or away on all ranks: a move that fails on one rank is reverted on the others.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        folder: Path,
        tensors_of: Callable[[TrainerPart], Iterable[Tensor]],
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._folder = folder
        self._tensors_of = tensors_of
        self._pinned = {part: HostMemory(device) for part in PARTS if device.type == "cuda"}
        self._copies: dict[TrainerPart, Copies] = {}
        self.away: frozenset[TrainerPart] = frozenset()

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move `parts`. Raises Refused and moves nothing."""
        started_s = time.perf_counter()
        moving = [part for part in PARTS if part in set(parts) - self.away]
        is_cpu = self._device.type == "cpu"
        way_out = f"free space on the disk of {self._folder}." if is_cpu else "free host memory."

        def copy() -> dict[TrainerPart, Copies]:
            with self._moving(f"offload {', '.join(moving)}", way_out):
                return {part: self._copied(part) for part in moving}

        copies = self._ranks.agree(copy)
        num_bytes = sum(_free(copied) for copied in copies.values())
        self._copies |= copies
        self.away |= set(moving)
        if not is_cpu:
            torch.cuda.empty_cache()
        return self._moved(num_bytes, started_s)

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Restore `parts`, bit for bit. Raises Refused and moves nothing."""
        started_s = time.perf_counter()
        moving = [part for part in PARTS if part in self.away & set(parts)]
        copied = [entry for part in moving for entry in self._copies[part]]

        def bring_back() -> None:
            way_out = "free memory of the device (lower the engine's rollout.slots, say) and try again."
            with self._moving(f"onload {', '.join(moving)}", way_out):
                for storage, data in copied:
                    storage.resize_(len(data))
                    _bytes_of(storage).copy_(data, non_blocking=True)

        try:
            self._ranks.agree(bring_back)
        except Refused:
            _free(copied)
            raise
        for part in moving:
            del self._copies[part]
        self.away -= set(moving)
        return self._moved(sum(len(data) for _, data in copied), started_s)

    def need(self, what: str, *parts: TrainerPart) -> None:
        """Raise Refused if some of `parts` are away."""
        if missing := [part for part in parts if part in self.away]:
            error = f"cannot {what}: {' and '.join(missing)} offloaded"
            way_out = f"POST /onload with parts {missing} first."
            raise Refused(409, error, rule="it needs them on its device", way_out=way_out)

    def content_of(self, local: Tensor) -> Tensor:
        """Return `local`, or its content while away, valid until the next offload()."""
        for storage, data in (entry for copied in self._copies.values() for entry in copied):
            if storage._cdata == local.untyped_storage()._cdata:
                content = data.view(local.dtype)
                start = content.storage_offset() + local.storage_offset()
                return content.as_strided(local.shape, local.stride(), start)
        return local

    def _storages(self, part: TrainerPart) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors_of(part):
            local = local_of(tensor)
            storage = local.untyped_storage()
            is_here = local.device.type == self._device.type and storage.nbytes() > 0
            if local.ndim and is_here and storage.resizable():
                found[storage._cdata] = storage
        return list(found.values())

    def _copied(self, part: TrainerPart) -> Copies:
        storages = self._storages(part)
        sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages]
        pieces = torch.split(self._host_memory(part, sum(sizes)), sizes) if sizes else ()
        copies = [
            (storage, piece[: storage.nbytes()]) for storage, piece in zip(storages, pieces, strict=True)
        ]
        for storage, piece in copies:
            piece.copy_(_bytes_of(storage), non_blocking=True)
        return copies

    def _host_memory(self, part: TrainerPart, num_bytes: int) -> Tensor:
        if self._pinned:
            return self._pinned[part].of(num_bytes)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{part}.{self._ranks.rank}"
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _moving(self, what: str, way_out: str) -> Iterator[None]:
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (OSError, MemoryError, RuntimeError) as error:
            what = f"cannot {what} on rank {self._ranks.rank}: {type(error).__name__}: {str(error)[:500]}"
            rule = "if a part cannot be moved on one rank, it stays where it was on all ranks"
            raise Refused(507, what, rule=rule, way_out=way_out) from error

    def _moved(self, num_bytes: int, started_s: float) -> TransferStats:
        all_bytes = sum(self._ranks.gather(num_bytes))
        return TransferStats(num_bytes=all_bytes, seconds=time.perf_counter() - started_s)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _free(copied: Copies) -> int:
    for storage, _ in copied:
        storage.resize_(0)
    return sum(len(data) for _, data in copied)
