"""Moves the memory of a trainer's tensors off its device and back. Knows tensors and ranks; what a part is
for, it does not know.

What moves is the memory under the tensors and not the tensors: the bytes of a storage go elsewhere, and its
memory is given up (parking.py, memory.py). Whatever points at it (a parameter and its tied twin, a view,
FSDP's flat shard and the DTensor over it, an optimizer's key) stays what it is, is not to be read meanwhile,
and has its content again once the storage has.

    on CUDA    into pinned host memory. What lies in host memory already (trainer.cpu_offload) stays there.
    on the CPU into a file in the run directory. Memory goes by whole pages: what is smaller stays. Before a
    tensor goes for the
               first time it moves into memory with others (arena.py), which comes back in large pages.

Single numbers stay: they are not worth the copy, and a checkpoint reads the optimizer's step counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.http import Refused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.trainer.host_memory import Memory, bytes_of, memory_of, view_of
from asyncrl.trainer.ranks import Ranks
from asyncrl.weights.stores import HostBuffers, HostFile, Store

PARTS: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")

CANNOT_MOVE = (OSError, MemoryError, RuntimeError)
"""A full disk; no host memory; no device memory, which torch reports as a RuntimeError."""


class Offload:
    """What of a trainer's state is away from its device. Made on all ranks; offload and onload are called on
    all of them at once.

    Life:       here -> offload(parts) -> away -> onload(parts) -> here ...
    Invariant:  a part is here on all ranks or away on all of them: a move that fails on one rank is taken
    back on the others.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        folder: Path,
        tensors_of: Callable[[TrainerPart], Iterable[Tensor]],
        with_gradients: Callable[[], Iterable[Tensor]],
    ) -> None:
        """`tensors_of` weights and of the optimizer, DTensors or not, each storage in one part only; on the
        device, or not to be moved.
        """
        self._ranks, self._device, self._folder = ranks, device, folder
        self._tensors_of, self._with_gradients = tensors_of, with_gradients
        self._memory = memory_of(device)
        self._parking: dict[TrainerPart, Parking] = {
            part: self._new_parking() for part in PARTS if part != "gradients"
        }
        self.away: frozenset[TrainerPart] = frozenset()

    def __repr__(self) -> str:
        return f"<Offload to {'host memory' if self._device.type == 'cuda' else self._folder}, away: {self.listed() or 'nothing'}>"

    def listed(self) -> list[TrainerPart]:
        """The parts that are away."""
        return [part for part in PARTS if part in self.away]

    def offload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move what is here of `parts`; gradients are dropped, the next backward pass makes new ones. Raises
        Refused.
        """
        started, moving = time.perf_counter(), [part for part in PARTS if part in set(parts) - self.away]
        copied: dict[TrainerPart, list[Place]] = {}

        def copy() -> None:
            for part in moving:
                if part in self._parking:
                    self._memory.gather(self._tensors_of(part))
                    copied[part] = self._parking[part].copy(self._storages(part))

        self._all_ranks(
            copy,
            f"offload {', '.join(moving)} to {self._target()}",
            "what cannot be moved stays where it was",
        )
        num_bytes = self._drop_gradients() if "gradients" in moving else 0
        for part, places in copied.items():
            self._parking[part].free(places)
            num_bytes += self._parking[part].num_bytes
        self.away |= set(moving)
        if moving:
            self._memory.settle()
        return self._moved(num_bytes, started)

    def onload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move what is away of `parts` back, to the bit. Raises Refused, and then all is as before."""
        started, moving = time.perf_counter(), [part for part in PARTS if part in self.away & set(parts)]
        parking = [self._parking[part] for part in moving if part in self._parking]

        def bring_back() -> None:
            for one in parking:
                one.bring_back()

        def undo() -> None:
            for one in parking:
                one.free_again()
            self._memory.settle()

        self._all_ranks(
            bring_back,
            f"onload {', '.join(moving)} from {self._target()}",
            "what cannot be moved stays offloaded",
            undo,
        )
        num_bytes = sum(one.num_bytes for one in parking)
        for one in parking:
            one.forget()
        self.away -= set(moving)
        return self._moved(num_bytes, started)

    def gradients_made(self) -> None:
        """A step has made gradients anew."""
        self.away -= {"gradients"}

    def need(self, what: str, *parts: TrainerPart) -> None:
        """Raises Refused if one of `parts` is away, on all ranks alike."""
        missing = [part for part in parts if part in self.away]
        if missing:
            raise Refused(
                409,
                f"cannot {what}: {' and '.join(missing)} {'is' if missing == ['optimizer'] else 'are'} "
                f"offloaded",
                rule=f"it needs {' and '.join(parts)} on the trainer's device",
                way_out=f"POST /onload with parts {missing} first.",
            )

    def content_of(self, local: Tensor) -> Tensor:
        """`local`, or if it is away, a copy of what it held."""
        for parking in self._parking.values():
            content = parking.content_of(local)
            if content is not None:
                return content
        return local

    def _storages(self, part: TrainerPart) -> list[torch.UntypedStorage]:
        """Each once, of what lies on the device."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors_of(part):
            local = local_of(tensor)
            if local.ndim and local.device.type == self._device.type:
                storages.setdefault(local.untyped_storage()._cdata, local.untyped_storage())
        return [storage for storage in storages.values() if storage.nbytes()]

    def _drop_gradients(self) -> int:
        num_bytes = 0
        for tensor in self._with_gradients():
            if tensor.grad is not None:
                num_bytes += local_of(tensor.grad).nbytes
                tensor.grad = None
        return num_bytes

    def _all_ranks(
        self, work: Callable[[], None], what: str, rule: str, undo: Callable[[], None] = lambda: None
    ) -> None:
        """Do it on all ranks. If it fails on one: undo it and raise Refused on all."""
        reason = ""
        try:
            work()
        except CANNOT_MOVE as error:
            reason = f"{type(error).__name__}: {error}"[:500]
        reasons = self._ranks.gather(reason)
        failed = [rank for rank, text in enumerate(reasons) if text]
        if not failed:
            return
        undo()
        on_rank = f" on rank {failed[0]}" if self._ranks.size > 1 else ""
        raise Refused(
            507, f"cannot {what}{on_rank}: {reasons[failed[0]]}", rule=rule, way_out=self._way_out(what)
        )

    def _way_out(self, what: str) -> str:
        if what.startswith("onload"):
            return "free memory of the device (the engine's rollout.slots, say) and try again."
        if self._device.type == "cuda":
            return "free host memory, or keep trainer and engines on devices of their own."
        return f"free space on the disk of the run directory, or make {self._folder} a link to a folder on another one."

    def _target(self) -> str:
        return "host memory" if self._device.type == "cuda" else str(self._folder)

    def _new_parking(self) -> Parking:
        if self._device.type == "cuda":
            return Parking(self._memory, HostBuffers(self._device))
        return Parking(self._memory, HostFile(self._folder))

    def _moved(self, num_bytes: int, started: float) -> Moved:
        return Moved(num_bytes=sum(self._ranks.gather(num_bytes)), seconds=time.perf_counter() - started)


def local_of(tensor: Tensor) -> Tensor:
    """The shard of this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The memory of one part of a trainer, and where its bytes lie while it is given up. Knows storages; knows no
# tensor and no rank.


ALIGNMENT = 4096
"""Each storage begins on a page of the file."""


@dataclass(frozen=True)
class Place:
    """Where the bytes [first, first + num_bytes) of a storage lie in the store while they are away."""

    storage: torch.UntypedStorage
    first: int
    num_bytes: int
    offset: int

    @property
    def data(self) -> Tensor:
        """A view of these bytes, while they are here."""
        return bytes_of(self.storage)[self.first : self.first + self.num_bytes]

    @property
    def address(self) -> int:
        """Of the first of them."""
        return self.storage.data_ptr() + self.first

    @property
    def end(self) -> int:
        """Where the next one may begin in the store."""
        return self.offset + -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def laid_out(storages: Iterable[torch.UntypedStorage], memory: Memory, end: int = 0) -> list[Place]:
    """A place for what can be moved of each, one after the other from `end` on."""
    places: list[Place] = []
    for storage in storages:
        first, num_bytes = memory.movable(storage)
        if num_bytes:
            places.append(Place(storage, first, num_bytes, end))
            end = places[-1].end
    return places


class Parking:
    """The memory of one part, on this rank, and its store.

    Life:       here -> copied -> away (freed) -> here ...; a copy that fails has freed nothing.
    Invariant:  while away, the store holds what the storages of `places` held.
    """

    def __init__(self, memory: Memory, store: Store) -> None:
        self._memory, self.store = memory, store
        self.places: dict[int, Place] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.num_bytes} bytes away in {self.store!r}>"

    @property
    def num_bytes(self) -> int:
        """That are away."""
        return sum(place.num_bytes for place in self.places.values())

    def copy(self, storages: Iterable[torch.UntypedStorage]) -> list[Place]:
        """Copy them; they are as they were."""
        places = laid_out(storages, self._memory)
        self._write(places)
        return places

    def free(self, places: Sequence[Place]) -> None:
        """Give their memory up. The tensors over them must not be read from here on."""
        for place in places:
            self._memory.free(place.storage)
        self.places = {place.storage._cdata: place for place in places}

    def bring_back(self) -> None:
        """Take memory, and read it; then come forget(), or free_again() if it raises or another rank could
        not.
        """
        for place in self.places.values():
            self._memory.take(place.storage, place.num_bytes)
            self.store.read(place.offset, place.data)
        self.store.wait()

    def forget(self) -> None:
        """All is here."""
        self.places = {}

    def free_again(self) -> None:
        """The store holds it all still."""
        self.free(list(self.places.values()))

    def content_of(self, local: Tensor) -> Tensor | None:
        """What `local` held, on the CPU; None if nothing of it is away."""
        place = self.places.get(local.untyped_storage()._cdata)
        if place is None:
            return None
        end = place.first + place.num_bytes
        data = torch.empty(max(place.storage.nbytes(), end), dtype=torch.uint8)
        if (
            place.storage.nbytes()
        ):  # on the CPU: the ends stayed, and the rest is not touched, or it would be resident again
            here = bytes_of(place.storage)
            data[: place.first], data[end:] = here[: place.first], here[end:]
        self.store.read(place.offset, data[place.first : end])
        self.store.wait()
        return view_of(data.untyped_storage(), local)

    def _write(self, places: Sequence[Place]) -> None:
        self.store.reserve(max((place.end for place in places), default=0))
        for place in places:
            self.store.write(place.offset, place.data)
        self.store.wait()
