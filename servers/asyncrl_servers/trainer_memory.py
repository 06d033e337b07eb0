"""Memory that the trainer shares with a server of its device: CUDA IPC, or a mapped file on the CPU; and the
tensors in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import ChunkMemory, MemoryHandle, PlacedTensor
from asyncrl.weights.shared_memory import SharedMemory, open_memory
from asyncrl_servers.checks import RESEND

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


class TrainerMemory:
    """Life: a trainer's memory stays open from its first chunk until another one tells a handle, or this
    process ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: SharedMemory | None = None

    def __repr__(self) -> str:
        return f"<TrainerMemory, open {self._memory!r}>"

    def opened(self, handle: MemoryHandle) -> SharedMemory:
        """The memory behind a handle. Raises Refused (400)."""
        if self._memory is None or self._memory.handle != handle:
            self._memory = None
            try:
                self._memory = open_memory(handle, self._device)
            except (OSError, ValueError) as error:
                raise Refused(
                    400,
                    f"cannot open the {handle.kind} memory of {handle.num_bytes} bytes that holds the chunk: "
                    f"{error}",
                    rule="trainer and engine take turns on one device of one machine, and share a piece of "
                    "its memory",
                    way_out="give them the same device (placement), or devices of their own; in containers, "
                    "one that holds both.",
                ) from error
        return self._memory

    def copies(self, chunk: ChunkMemory) -> dict[str, Tensor]:
        """Its tensors, which may be written over when this returns. Raises Refused (400)."""
        memory = self.opened(chunk.handle)
        tensors = {name: view.clone() for name, view in views(chunk, memory.data).items()}
        memory.settle()
        return tensors


def views(memory: ChunkMemory, data: Tensor) -> Mapping[str, Tensor]:
    """Each tensor where it lies in `data`. Raises Refused (400) if one cannot lie there."""
    tensors: dict[str, Tensor] = {}
    for placed in memory.tensors:
        dtype = DTYPES.get(placed.dtype)
        if (
            dtype is None
            or any(size < 0 for size in placed.shape)
            or placed.start % dtype.itemsize
            or placed.name in tensors
        ):
            raise _wrong(
                placed,
                "it is of a dtype that weights do not have, begins between two numbers, or comes twice",
            )
        shape = torch.Size(placed.shape)
        end = placed.start + shape.numel() * dtype.itemsize
        if end > len(data):
            raise _wrong(placed, f"it would end at byte {end} of {len(data)}")
        tensors[placed.name] = data[placed.start : end].view(dtype).view(shape)
    return tensors


def _wrong(placed: PlacedTensor, why: str) -> Refused:
    return Refused(
        400,
        f"{placed.name}, {placed.dtype} {placed.shape} at byte {placed.start}, cannot be in a chunk: {why}",
        way_out=RESEND,
    )
