"""Messages about weights that lie in memory which trainer and engine share: what it is, and where each tensor begins in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.wire.base import Message


class MemoryHandle(Message):
    """What another process needs to open a piece of memory.

    `kind` file: `name` is the path of a file in shared memory, which is mapped. cuda: `name` is the CUipcMemHandle of an allocation on
    the device that both processes use, 64 bytes in base64. A handle is of one piece of memory, however often that is written to.
    """

    kind: Literal["file", "cuda"]
    name: str
    num_bytes: int = Field(ge=1)


class PlacedTensor(Message):
    """A contiguous tensor at bytes [start, start + its size). `dtype` as torch calls it: float32, bfloat16."""

    name: str
    dtype: str
    shape: list[int]
    start: int = Field(ge=0)


class ChunkMemory(Message):
    """The tensors of a chunk, in memory that is written over by the next chunk."""

    handle: MemoryHandle
    tensors: list[PlacedTensor]
