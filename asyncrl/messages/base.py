"""What all messages share: their base, the error body, and how a child says why it ended."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

SECRET_ENV = "ASYNCRL_SECRET"

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]
"""What a weight swap does to running requests (see `weight_sync.interrupt`)."""
TransportName = Literal["shm", "disk", "lora", "nccl", "ipc"]
"""The way of the weights (see `weight_sync.transport`)."""
WeightKind = Literal["weights", "lora"]
"""What a push carries: all weights, or adapters for the weights that the engines started with."""


class Message(BaseModel):
    """Base of all messages: frozen, and a field that is not known is an error at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(Message):
    """Body of every answer with a status of 400 or above: what failed, the rule, the way out."""

    error: str
    rule: str = ""
    way_out: str = ""


EnginePart = Literal["weights", "kv"]
TrainerPart = Literal["weights", "gradients", "optimizer"]


class Moved(Message):
    """Answer of /sleep, /wake, /offload and /onload: bytes freed, taken or moved, and the seconds it took."""

    num_bytes: int
    seconds: float


FATAL_PREFIX = "asyncrl-error: "
"""A child process that cannot start or go on prints this and an ErrorBody as JSON on one line of its log."""


def fatal_line(error: ErrorBody) -> str:
    """The log line from which the parent learns why a child ended."""
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    """The error in the last such line of a log, if there is one."""
    lines = [line for line in log.splitlines() if line.startswith(FATAL_PREFIX)]
    with contextlib.suppress(ValueError, IndexError):
        return ErrorBody.model_validate_json(lines[-1].removeprefix(FATAL_PREFIX))
    return None


# The digest of a set of weights, the same wherever it is computed: on the host, or on a device
# (asyncrl/weights/tensor_files.py). It proves that names, dtypes, shapes and bytes are those that were sent,
# against any fault and not against an attacker.

WORD_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The odd 64-bit numbers of splitmix64: https://prng.di.unimi.it/splitmix64.c."""
_PIECE_WORDS = 2**15
"""Words that are mixed at once: the temporaries stay in the processor's cache."""


def word_sum(data: memoryview | bytes) -> bytes:
    """Each 64-bit word is mixed with its position, and all are added modulo 2**64; then come the odd bytes.

    A change of one word always changes the sum, since mixing loses nothing; of several, all but once in
    2**64.
    """
    view = memoryview(data).cast("B")
    end = len(view) // 8 * 8
    words = np.frombuffer(view[:end], dtype=np.uint64)
    first, *mixers = (np.uint64(mixer) for mixer in WORD_MIXERS)
    positions = np.arange(min(len(words), _PIECE_WORDS), dtype=np.uint64) * first
    mixed, high = np.empty_like(positions), np.empty_like(positions)
    total = 0
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        mixed, high = mixed[: len(piece)], high[: len(piece)]
        np.add(positions[: len(piece)], np.uint64(start * WORD_MIXERS[0] % 2**64), out=mixed)
        np.bitwise_xor(mixed, piece, out=mixed)
        for shift, mixer in zip((30, 27), mixers, strict=True):
            np.right_shift(mixed, np.uint64(shift), out=high)
            np.bitwise_xor(mixed, high, out=mixed)
            np.multiply(mixed, mixer, out=mixed)
        total += int(mixed.sum())
    return (total % 2**64).to_bytes(8, "little") + bytes(view[end:])


def digest_of_sum(name: str, dtype: str, shape: Iterable[int], checksum: bytes) -> bytes:
    """Digest of one tensor from the word_sum of its bytes; dtype as torch calls it ("float32")."""
    return hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode() + checksum).digest()


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> bytes:
    """Digest of one tensor in host memory, with its name, dtype and shape."""
    return digest_of_sum(name, dtype, shape, word_sum(data))


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    """Digest of a set of weights from those of its tensors, in any order."""
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview | bytes]]) -> str:
    """Digest of a set of weights given as (name, dtype, shape, raw bytes), in any order."""
    return joint_digest(tensor_digest(*tensor) for tensor in tensors)


# Messages about weights that lie in memory which trainer and engine share: what it is, and where each tensor
# begins in it.


class MemoryHandle(Message):
    """What another process needs to open a piece of memory.

    `kind` file: `name` is the path of a file in shared memory, which is mapped. cuda: `name` is the
    CUipcMemHandle of an allocation on the device that both processes use, 64 bytes in base64. A handle is of
    one piece of memory, however often that is written to.
    """

    kind: Literal["file", "cuda"]
    name: str
    num_bytes: int = Field(ge=1)


class PlacedTensor(Message):
    """A contiguous tensor at bytes [start, start + its size). `dtype` as torch calls it: float32,
    bfloat16.
    """

    name: str
    dtype: str
    shape: list[int]
    start: int = Field(ge=0)


class ChunkMemory(Message):
    """The tensors of a chunk, in memory that is written over by the next chunk."""

    handle: MemoryHandle
    tensors: list[PlacedTensor]


# Messages about weights that the trainer sends to all workers of all engines at once
# (weight_sync.transport=nccl).


class GroupSeat(Message):
    """The place of one participant in the group that weights are sent through: the trainer has rank 0, an
    engine's workers the ranks from `rank` on.

    `path` is the file in which they find each other, one a group; `is_new`: the group is to be formed first.
    `timeout_s` bounds forming it, and each buffer that is sent.
    """

    path: str
    size: int = Field(ge=2)
    rank: int = Field(ge=0)
    is_new: bool
    timeout_s: float = Field(gt=0)


class BroadcastRequest(Message):
    """Send the weights of `version` to every member of the group."""

    version: int = Field(ge=0)
    seat: GroupSeat


class BroadcastResponse(Message):
    """The weights were sent; `digest` is of the trainer's copy. Each receiver says whether they arrived
    whole.
    """

    version: int
    digest: str
    num_bytes: int


class SentChunk(Message):
    """One buffer, and the tensors that lie in it."""

    num_bytes: int = Field(ge=1)
    tensors: list[PlacedTensor]


class SentWeights(Message):
    """What comes through the group, told in it before the first buffer."""

    version: int
    chunks: list[SentChunk]
