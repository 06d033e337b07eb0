"""Messages of the trainer worker, batches apart."""

from __future__ import annotations

from pydantic import Field

from asyncrl.wire.base import Message, TrainerPart, WeightKind
from asyncrl.wire.chunks import ChunkMemory


class OffloadRequest(Message):
    """Move these parts of the trainer's state off its device (/offload), or back onto it (/onload). Idempotent."""

    parts: list[TrainerPart]


class Canary(Message):
    """What the trainer says of a fixed short text with the weights it exports: whoever loads them must find the same.

    `logprobs` are those of token_ids[1:], each after all ids before it, and `next_logprob` is that of the most likely id after the
    last one: float32 values in nats at temperature 1.
    """

    token_ids: list[int] = Field(min_length=2)
    logprobs: list[float] = Field(min_length=1)
    next_logprob: float


class ExportChunkRequest(Message):
    """Write chunk `index` of the current weights, publisher.chunk_bytes at most (or one tensor), into the one staging file or memory.

    Chunks are asked for in order, from 0; each replaces the one before.
    """

    version: int = Field(ge=0)
    index: int = Field(ge=0)


class ExportChunkResponse(Message):
    """A chunk lies at `path`, or in `memory`, which engines of this device open. With `is_last`, `whole_digest` is the digest of the
    tensors of all chunks, and `canary` theirs. Digests are wire.tensor_digest's, over a tensor's bytes, or in memory over their checksum.
    """

    version: int
    index: int
    path: str = ""
    memory: ChunkMemory | None = None
    digest: str
    num_tensors: int
    num_bytes: int
    is_last: bool
    whole_digest: str = ""
    canary: Canary | None = None


class TrainerHealth(Message):
    """Answer of GET /health of the trainer worker."""

    policy_version: int
    device: str
    is_busy: bool
    offloaded: list[TrainerPart] = []


class TrainResponse(Message):
    """One optimizer step was taken: the new version and its metrics by full name (`policy/loss`, ...).

    `not_finite`: metrics that a skipped step has left without a number.
    """

    policy_version: int
    metrics: dict[str, float]
    not_finite: list[str] = []


class ExportResponse(Message):
    """Weights of `version` lie in staging: all of them, or the adapters alone (see PrepareRequest).

    `held_digest`, over checksums of tensors: they are held for /broadcast, and lie in staging only if `path` says where.
    """

    version: int
    path: str
    digest: str
    num_tensors: int
    num_bytes: int
    kind: WeightKind = "weights"
    canary: Canary | None = None
    held_digest: str = ""


class SaveRequest(Message):
    """Write the current weights and tokenizer as a Hugging Face folder; not `merged`: the adapters alone, as a peft folder."""

    path: str
    merged: bool = True


class StateRequest(Message):
    """Save what is needed to go on into the new folder `path` (/begin_save_state), or go on from there (/load_state).

    `is_checked`: of a folder to load, every file was compared with its manifest by whoever asks; DCP itself checks nothing.
    """

    path: str
    is_checked: bool = False


class StateSaved(Message):
    """The copy is made, and is being written (/wait_save_state answers once it is): training stood still for `held_s`."""

    policy_version: int
    held_s: float
