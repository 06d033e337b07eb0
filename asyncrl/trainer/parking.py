"""The memory of one part of a trainer, and where its bytes lie while it is given up. Knows storages; knows no tensor and no rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.trainer.memory import Memory, bytes_of, view_of
from asyncrl.trainer.stores import Store

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
        """Take memory, and read it; then come forget(), or free_again() if it raises or another rank could not."""
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
        if place.storage.nbytes():  # on the CPU: the ends stayed, and the rest is not touched, or it would be resident again
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
