"""Exports weights chunk by chunk into one place that is written over again and again. Knows digests; knows no
engine.

A chunk is as many tensors, in the order of an export, as fit into chunk_bytes, or one that does not. Whoever
asks for the next chunk has loaded the one before: it is overwritten. Any chunk may be asked for at any time:
a trainer that was started again goes on where the lost one was.

Each tensor is gathered, written and forgotten: beside the place (chunk_places.py), which holds one chunk,
that is the memory it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import ChunkMemory, PlacedTensor, joint_digest
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.weights.export import digests_of, num_bytes, whole_tensors, write_tensors
from asyncrl.weights.shared_memory import SharedMemory, make_memory, shared_digest

# Where a chunk of weights is put for the engines: a file, or memory that they share. Knows tensors and
# digests; knows no version.
#
# There is one place, made once and written over by each chunk: beside the weights it is all the memory that a
# push takes here.


ALIGNMENT = 256
"""Each tensor begins on a multiple of so many bytes, as torch's allocators have it."""

Tensors = Iterator[tuple[str, Tensor]]


class ChunkPlace(Protocol):
    """`device`: where tensors must be to be put there."""

    device: torch.device

    def put(self, like: Mapping[str, Tensor], tensors: Tensors) -> dict[str, bytes]:
        """Write `tensors`, which have names, shapes and order of `like`, over what was there; their digests.
        Raises OSError.
        """
        ...

    def digests(self, tensors: Tensors) -> dict[str, bytes]:
        """As put() computes them, of tensors that are not put there."""
        ...

    def told(self) -> dict[str, Any]:
        """The fields of an ExportChunkResponse that say where the chunk is."""
        ...


class ChunkFile:
    """A safetensors file, whose pages are used again."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.path, self._dtype = path, dtype
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"<ChunkFile {self.path}>"

    def put(self, like: Mapping[str, Tensor], tensors: Tensors) -> dict[str, bytes]:
        """The whole file."""
        with open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0) as file:  # noqa: PTH123  its pages are used again
            digests = write_tensors(file, like, tensors, self._dtype)
            file.truncate()
        return digests

    def digests(self, tensors: Tensors) -> dict[str, bytes]:
        """Of all bytes."""
        return digests_of(tensors)

    def told(self) -> dict[str, Any]:
        """Its path."""
        return {"path": str(self.path)}


class SharedChunk:
    """Memory of `device`, of `num_bytes`, which engines have open for as long as this process lives.

    Digests are those of the tensors before they are copied: a fault in the copy shows at the other end too.
    """

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
        digest: Callable[[str, Tensor], bytes] = shared_digest,
    ) -> None:
        """`folder`: for a file in shared memory, on the CPU; of trainers before this one none stays there.
        Raises OSError.
        """
        for old in folder.glob("chunk-*.bin"):
            old.unlink()
        self.device, self._dtype, self._digest = device, dtype, digest
        self._memory: SharedMemory = make_memory(num_bytes, device, folder)
        self._placed: list[PlacedTensor] = []

    def __repr__(self) -> str:
        return f"<SharedChunk in {self._memory!r}>"

    def put(self, like: Mapping[str, Tensor], tensors: Tensors) -> dict[str, bytes]:
        """One tensor after the other; done when it returns."""
        digests: dict[str, bytes] = {}
        starts = starts_of(like, self._dtype)
        self._placed = []
        for name in like:
            found, tensor = next(tensors)
            assert found == name, f"{found} came where {name} was to come"
            start = starts[name]
            self._memory.data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(
                tensor
            )
            digests[name] = self._digest(name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._placed.append(PlacedTensor(name=name, dtype=dtype, shape=list(tensor.shape), start=start))
        self._memory.settle()
        return digests

    def digests(self, tensors: Tensors) -> dict[str, bytes]:
        """Of checksums, which a device computes itself."""
        return {name: self._digest(name, tensor) for name, tensor in tensors}

    def told(self) -> dict[str, Any]:
        """Its handle, and where each tensor begins."""
        return {"memory": ChunkMemory(handle=self._memory.handle, tensors=self._placed)}


def starts_of(like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """Where each tensor of a chunk begins."""
    starts, end = dict[str, int](), 0
    for name, tensor in like.items():
        starts[name] = end
        end += aligned(num_bytes({name: tensor}, dtype))
    return starts


def aligned(size: int) -> int:
    """Up to the next place where a tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class LazyWeights(Mapping[str, Tensor]):
    """Weights of which some are computed each time they are asked for. `like` has the shape and dtype of
    each, for nothing.
    """

    def __init__(
        self, like: Mapping[str, Tensor], computed: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> None:
        self.like, self._computed = like, computed or {}

    def __repr__(self) -> str:
        return f"<LazyWeights {len(self.like)} tensors, {len(self._computed)} of them computed>"

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        return self.like[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def only(self, names: list[str]) -> LazyWeights:
        """These, in this order."""
        return LazyWeights({name: self.like[name] for name in names}, self._computed)


class Chunks:
    """The chunks of one trainer's weights, version after version; on rank 0.

    Life:       for each version: chunk after chunk; with the last one the digest of all, for which each
    tensor's is kept.
    """

    def __init__(self, place: ChunkPlace, chunk_bytes: int, dtype: torch.dtype) -> None:
        self._place, self.chunk_bytes, self._dtype = place, chunk_bytes, dtype
        self._version = -1
        self._digests: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"<Chunks of {self.chunk_bytes} bytes, {len(self._digests)} tensors of v{self._version} sent>"

    def forget(self) -> None:
        """The weights are others, under whatever version."""
        self._version, self._digests = -1, {}

    def names(self, weights: LazyWeights, version: int, index: int) -> list[str]:
        """What is to be gathered, in this order, for this chunk; with the last one, what has no digest yet
        comes before it.

        Raises Refused.
        """
        if version != self._version:
            self._version, self._digests = version, {}
        chunks = self._cut(weights)
        if index >= len(chunks):
            raise Refused(
                422,
                f"chunk {index} was asked for, and version {version} has {len(chunks)} of them",
                rule=f"chunks are numbered from 0, of publisher.chunk_bytes={self.chunk_bytes} each",
                way_out="ask for no more after is_last.",
            )
        is_last = index + 1 == len(chunks)
        before = (
            [name for chunk in chunks[:index] for name in chunk if name not in self._digests]
            if is_last
            else []
        )
        return before + chunks[index]

    def is_last(self, weights: LazyWeights, index: int) -> bool:
        """Whether this chunk ends them."""
        return index + 1 == len(self._cut(weights))

    def write(self, weights: LazyWeights, index: int) -> ExportChunkResponse:
        """Write the chunk over the one before, gathering what names() said. Raises OSError."""
        chunks, names = self._cut(weights), self.names(weights, self._version, index)
        chunk = weights.only(chunks[index])
        tensors = whole_tensors(weights.only(names), self._dtype, self._place.device)
        try:
            self._digests.update(self._place.digests(next(tensors) for _ in range(len(names) - len(chunk))))
            digests = self._place.put(chunk.like, tensors)
        finally:
            for _ in tensors:  # after an error: the other ranks gather on to the end
                pass
        self._digests.update(digests)
        is_last = index + 1 == len(chunks)
        return ExportChunkResponse(
            version=self._version,
            index=index,
            **self._place.told(),
            digest=joint_digest(digests.values()),
            num_tensors=len(chunk),
            num_bytes=num_bytes(chunk.like, self._dtype),
            is_last=is_last,
            whole_digest=joint_digest(self._digests.values()) if is_last else "",
        )

    def _cut(self, weights: LazyWeights) -> list[list[str]]:
        return cut(sizes_of(weights, self._dtype), self.chunk_bytes)


def sizes_of(weights: LazyWeights, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tensor as it is exported."""
    return {name: num_bytes({name: tensor}, dtype) for name, tensor in weights.like.items()}


def largest_chunk(sizes: Mapping[str, int], chunk_bytes: int) -> int:
    """Bytes that the place of a chunk must have."""
    return max(sum(aligned(sizes[name]) for name in chunk) for chunk in cut(sizes, chunk_bytes))


def cut(sizes: Mapping[str, int], chunk_bytes: int) -> list[list[str]]:
    """Names by chunk, in their order: as many as fit into chunk_bytes, or one that does not."""
    chunks: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not chunks or size > room:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append(name)
        room -= size
    return chunks
