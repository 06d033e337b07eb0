"""Move a trainer's tensors off its device and back.

Storages are copied to host memory, of a CPU to a file, and resized to 0; tensors stay
the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.base.http import Refused
from asyncrl.config.offload_config import ModelPart, Rule
from asyncrl.messages.engine_api import TrainerPart, TransferStats
from asyncrl.trainer.ranks import Ranks
from asyncrl.weights.host_memory import HostMemory, return_free_memory
from asyncrl.weights.ipc import ALIGNMENT

T = TypeVar("T")
Copies = list[tuple[torch.UntypedStorage, Tensor]]


class Offload:
    """Tracks parts of the trainer's models off their device. Collective.

    A part may leave for two reasons. The engines' turn takes the device: offload() and
    onload(), which leave parts with the rule "never" on the device. Or another part
    works: use() brings its parts and sends those with the rule "always" away.

    Example: the rule of the critic's weights is "always".
        use(policy weights)       the critic's weights leave
        use(critic weights)       they come back
        offload(["weights"])      all weights leave; use() of any is refused
        onload(["weights"])       the policy's come back, the critic's with its next use()

    Invariant: a part is here or away on all ranks: a move that fails on one rank is
        reverted on the others.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        tensors_of: Callable[[ModelPart], Iterable[Tensor]],
        rules: Mapping[ModelPart, Rule],
        folder: Path,
    ) -> None:
        """`folder`: for files with what leaves a CPU."""
        self._ranks = ranks
        self._device = device
        self._tensors_of = tensors_of
        self._rules = rules
        # Host memory is the memory of a CPU, so a copy there would free nothing.
        files = folder if device.type == "cpu" else None
        self._memory = {one: HostMemory(device, files) for one in rules}
        self._copies: dict[ModelPart, Copies] = {}
        self._taken = frozenset[TrainerPart]()

    @property
    def taken(self) -> frozenset[TrainerPart]:
        """Return the parts whose device others have: offload() since the last onload()."""
        return self._taken

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move `parts`. Raises Refused and moves nothing."""
        leaving = frozenset(parts)
        moving = [
            one
            for one, rule in self._rules.items()
            if one.part in leaving and rule != "never"
        ]
        moved = self._move_out(moving)
        self._taken |= leaving
        return moved

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Restore `parts`, bit for bit. Raises Refused and moves nothing."""
        returning = frozenset(parts)
        moving = [
            one
            for one, rule in self._rules.items()
            if one.part in returning and rule != "always"
        ]
        moved = self._move_in(moving)
        self._taken -= returning
        return moved

    def is_settled(self, used: Sequence[ModelPart]) -> bool:
        """Return whether use() has nothing to move."""
        return self._copies.keys().isdisjoint(used) and not self._idle(used)

    def use(self, used: Sequence[ModelPart]) -> None:
        """Bring `used` parts to the device, after sending the unused parts with the rule
        "always" away. Raises Refused.
        """
        self._move_out(self._idle(used))
        self._move_in(used)

    def forget(self, one: ModelPart) -> None:
        """Count a part as here whose tensors were dropped."""
        if self._copies.pop(one, None) is not None and self._device.type == "cpu":
            self._memory[one].free()

    def _idle(self, used: Sequence[ModelPart]) -> list[ModelPart]:
        """Return the parts on the device that use() sends away."""
        return [
            one
            for one, rule in self._rules.items()
            if rule == "always" and one not in used and one not in self._copies
        ]

    def _move_out(self, parts: Iterable[ModelPart]) -> TransferStats:
        started_s = time.perf_counter()
        moving = [one for one in parts if one not in self._copies]
        what = f"offload {_named(moving)}"
        copies = self._together(
            what, lambda: {one: self._copy_out(one) for one in moving}
        )
        num_bytes = sum(_free(copied) for copied in copies.values())
        self._copies |= copies
        for one in moving:
            self._memory[one].drop_pages()
        # Freed storages stay in torch's cache, or malloc's. Engines get the memory only
        # once the cache gives it back.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_free_memory()
        return self._stats(num_bytes, started_s)

    def _move_in(self, parts: Iterable[ModelPart]) -> TransferStats:
        started_s = time.perf_counter()
        moving = [one for one in parts if one in self._copies]
        copied = [entry for one in moving for entry in self._copies[one]]

        def bring_back() -> None:
            for storage, data in copied:
                storage.resize_(len(data))
                _bytes_of(storage).copy_(data, non_blocking=True)

        try:
            # A failure on this rank or another gives the memory back everywhere. The
            # host copies are untouched, so the call may be repeated.
            way_out = "free memory of the device (lower the engine's rollout.slots, say) and try again."
            self._together(f"onload {_named(moving)}", bring_back, way_out)
        except Refused:
            _free(copied)
            raise
        for one in moving:
            del self._copies[one]
            if self._device.type == "cpu":  # no second copy stays in the same memory
                self._memory[one].free()
        return self._stats(sum(len(data) for _, data in copied), started_s)

    def need(self, what: str, *parts: TrainerPart) -> None:
        """Raise Refused if others have the device of some of `parts`."""
        if missing := [part for part in parts if part in self._taken]:
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

    def _copy_out(self, moved: ModelPart) -> Copies:
        found = dict[int, torch.UntypedStorage]()
        for tensor in self._tensors_of(moved):
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
        pieces = torch.split(self._memory[moved].of(sum(sizes)), sizes) if sizes else ()
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


def _named(parts: Iterable[ModelPart]) -> str:
    return ", ".join(f"{one.model} {one.part}" for one in parts)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _free(copied: Copies) -> int:
    for storage, _ in copied:
        storage.resize_(0)
    return sum(len(data) for _, data in copied)
