"""Move a trainer's tensors off its device and back.

Storages are copied to host memory and resized to 0; tensors stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.trainer_api import TrainerPart
from asyncrl.trainer.ranks import Ranks
from asyncrl.weights.host_memory import HostMemory
from asyncrl.weights.ipc import ALIGNMENT

T = TypeVar("T")
PARTS: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")

Copies = list[tuple[torch.UntypedStorage, Tensor]]


class Offload:
    """Tracks parts of a trainer's state off its device. Collective.

    Invariant: a part is here or away on all ranks: a move that fails on one rank is
        reverted on the others.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        tensors_of: Callable[[TrainerPart], Iterable[Tensor]],
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._tensors_of = tensors_of
        self._memory = {part: HostMemory(device) for part in PARTS}
        self._copies: dict[TrainerPart, Copies] = {}

    @property
    def away(self) -> frozenset[TrainerPart]:
        return frozenset(self._copies)

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move `parts`. Raises Refused and moves nothing."""
        started_s = time.perf_counter()
        moving = [part for part in PARTS if part in set(parts) - self.away]
        what = f"offload {', '.join(moving)}"
        copies = self._together(
            what, lambda: {part: self._copy_out(part) for part in moving}
        )
        num_bytes = sum(_free(copied) for copied in copies.values())
        self._copies |= copies
        # Freed storages stay in torch's cache. Engines get the memory only once the
        # cache gives it back.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._stats(num_bytes, started_s)

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Restore `parts`, bit for bit. Raises Refused and moves nothing."""
        started_s = time.perf_counter()
        moving = [part for part in PARTS if part in self.away & set(parts)]
        copied = [entry for part in moving for entry in self._copies[part]]

        def bring_back() -> None:
            for storage, data in copied:
                storage.resize_(len(data))
                _bytes_of(storage).copy_(data, non_blocking=True)

        try:
            # A failure on this rank or another gives the memory back everywhere. The
            # host copies are untouched, so the call may be repeated.
            way_out = "free memory of the device (lower the engine's rollout.slots, say) and try again."
            self._together(f"onload {', '.join(moving)}", bring_back, way_out)
        except Refused:
            _free(copied)
            raise
        for part in moving:
            del self._copies[part]
            if self._device.type == "cpu":  # no second copy stays in the same memory
                self._memory[part].free()
        return self._stats(sum(len(data) for _, data in copied), started_s)

    def need(self, what: str, *parts: TrainerPart) -> None:
        """Raise Refused if some of `parts` are away."""
        if missing := [part for part in parts if part in self.away]:
            error = f"cannot {what}: {' and '.join(missing)} offloaded"
            way_out = f"POST /onload with parts {missing} first."
            raise Refused(
                409, error, rule="it needs them on its device", way_out=way_out
            )

    def content_of(self, local: Tensor) -> Tensor:
        """Return `local`, or its content while away, valid until the next offload()."""
        for storage, data in (
            entry for copied in self._copies.values() for entry in copied
        ):
            # An empty storage has no address, so storages are compared as objects.
            if storage._cdata == local.untyped_storage()._cdata:
                content = data.view(local.dtype)
                start = content.storage_offset() + local.storage_offset()
                return content.as_strided(local.shape, local.stride(), start)
        return local

    def _copy_out(self, part: TrainerPart) -> Copies:
        found = dict[int, torch.UntypedStorage]()
        for tensor in self._tensors_of(part):
            local = local_of(tensor)
            storage = local.untyped_storage()
            is_here = local.device.type == self._device.type and storage.nbytes() > 0
            # Skip scalars, which are not worth it; tensors in host memory; and storages
            # that cannot give their memory back. Tied weights share a storage, which
            # `found` holds once.
            if local.ndim and is_here and storage.resizable():
                found[storage._cdata] = storage
        sizes = [
            -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in found.values()
        ]
        pieces = torch.split(self._memory[part].of(sum(sizes)), sizes) if sizes else ()
        copies = list[tuple[torch.UntypedStorage, Tensor]]()
        for storage, piece in zip(found.values(), pieces, strict=True):
            copy = piece[: storage.nbytes()]
            copy.copy_(_bytes_of(storage), non_blocking=True)
            copies.append((storage, copy))
        return copies

    def _together(
        self, what: str, move: Callable[[], T], way_out: str = "free host memory."
    ) -> T:
        """Call `move` on all ranks. Raises Refused on all if it fails on one."""

        def moved() -> T:
            try:
                # Copies are asynchronous: only after they have run may a source be
                # freed, or success reported to the other ranks.
                result = move()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                return result
            except (OSError, MemoryError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {str(error)[:500]}"
                failed = f"cannot {what} on rank {self._ranks.rank}: {reason}"
                rule = "if a part cannot be moved on one rank, it stays where it was on all ranks"
                raise Refused(507, failed, rule=rule, way_out=way_out) from error

        return self._ranks.agree(moved)

    def _stats(self, num_bytes: int, started_s: float) -> TransferStats:
        all_bytes = sum(self._ranks.gather(num_bytes))
        return TransferStats(
            num_bytes=all_bytes, seconds=time.perf_counter() - started_s
        )


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _free(copied: Copies) -> int:
    for storage, _ in copied:
        storage.resize_(0)
    return sum(len(data) for _, data in copied)
