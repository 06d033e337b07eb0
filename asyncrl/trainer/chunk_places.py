"""Where a chunk of weights is put for the engines: a file, or memory that they share. Knows tensors and digests; knows no version.

There is one place, made once and written over by each chunk: beside the weights it is all the memory that a push takes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.sharing import SharedMemory, make_memory, shared_digest
from asyncrl.trainer.weights import digests_of, num_bytes, write_tensors
from asyncrl.wire import ChunkMemory, PlacedTensor

ALIGNMENT = 256
"""Each tensor begins on a multiple of so many bytes, as torch's allocators have it."""

Tensors = Iterator[tuple[str, Tensor]]


class ChunkPlace(Protocol):
    """`device`: where tensors must be to be put there."""

    device: torch.device

    def put(self, like: Mapping[str, Tensor], tensors: Tensors) -> dict[str, bytes]:
        """Write `tensors`, which have names, shapes and order of `like`, over what was there; their digests. Raises OSError."""
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
        """`folder`: for a file in shared memory, on the CPU; of trainers before this one none stays there. Raises OSError."""
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
            self._memory.data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
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
