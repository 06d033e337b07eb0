"""Messages of the trainer worker, batches apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from asyncrl.messages.base import ChunkMemory, Message, TrainerPart, WeightKind


class OffloadRequest(Message):
    """Move these parts of the trainer's state off its device (/offload), or back onto it (/onload).
    Idempotent.
    """

    parts: list[TrainerPart]


class Canary(Message):
    """Logprobs of a fixed short text, computed by the trainer with the weights that it exports. An engine
    that has loaded them must compute the same.

    `logprobs` are those of token_ids[1:], each after all ids before it, and `next_logprob` is that of the
    most likely id after the last one: float32 values in nats at temperature 1.
    """

    token_ids: list[int] = Field(min_length=2)
    logprobs: list[float] = Field(min_length=1)
    next_logprob: float


class ExportChunkRequest(Message):
    """Write chunk `index` of the current weights, weight_sync.chunk_bytes at most (or one tensor), into the
    one staging file or memory.

    Chunks are asked for in order, from 0; each replaces the one before.
    """

    version: int = Field(ge=0)
    index: int = Field(ge=0)


class ExportChunkResponse(Message):
    """A chunk lies at `path`, or in `memory`, which engines of this device open. With `is_last`,
    `whole_digest` is the digest of the tensors of all chunks, and `canary` theirs.
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
    """A set of weights in staging: all of them, or the adapters alone (see PrepareRequest).

    `digest` is `asyncrl.messages.base.weights_digest` of all tensors; `path` is a safetensors file that every
    engine server of this machine can read. `canary` is what the trainer says of a short text with these
    weights, if it was asked to. `is_held`: the trainer holds them to send them itself (/broadcast); `path`
    may be '' then.
    """

    version: int
    path: str
    digest: str
    num_tensors: int
    num_bytes: int
    kind: WeightKind = "weights"
    canary: Canary | None = None
    is_held: bool = False


class SaveRequest(Message):
    """Write the current weights and tokenizer as a Hugging Face folder; not `merged`: the adapters alone, as
    a peft folder.
    """

    path: str
    merged: bool = True


class StateRequest(Message):
    """Save what is needed to go on into the new folder `path` (/begin_save_state answers once the copy is
    made, /wait_save_state once it is written), or go on from there (/load_state). Of a folder to load, the
    client has compared every file with the checkpoint's manifest.
    """

    path: str


# A batch on its way to the trainer.


@dataclass(frozen=True, slots=True)
class Credit:
    """Tokens [start, end) of a trajectory, counted from its first, answer for `reward` as part `unit` of
    their rollout.

    Units of one rollout with the same number are one sample of the advantage, wherever their tokens lie, and
    have one reward.
    """

    start: int
    end: int
    reward: float
    unit: int


class TrajectoryHeader(Message):
    """One trajectory of a batch: branch `branch` of a rollout. Its tokens are [start, end) of the packed
    arrays.

    `reward` is the rollout's. Where its branches have `credits`, those stand in for it in the advantage.
    """

    group_index: int
    group_id: int
    sample_index: int
    prompt_id: str
    start: int
    end: int
    reward: float
    branch: int = 0
    credits: list[Credit] = []


class BatchHeader(Message):
    """What /train carries beside the arrays. Tokens older than `min_version` get no loss, or the batch is
    refused.
    """

    version: int
    min_version: int
    mask_older: bool
    trajectories: list[TrajectoryHeader]


class BatchArrays(BaseModel):
    """Arrays of a batch, trajectories one after the other: N tokens in all, one entry each.

    token_ids int32 [N]; loss_mask bool [N]; behaviour_logprobs float32 [N] in nats; versions int32 [N], -1
    where a token was not sampled; engines int16 [N], the number of the engine server that sampled it, -1
    where that is not known.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    engines: npt.NDArray[np.int16] = Field(
        default_factory=lambda given: np.full(len(given["token_ids"]), -1, np.int16)
    )


def pack_batch(header: BatchHeader, arrays: BatchArrays) -> bytes:
    """Body of POST /train: one safetensors blob, the header as JSON in its first array."""
    blob = np.frombuffer(header.model_dump_json().encode(), dtype=np.uint8)
    body: bytes = save_safetensors(
        {
            "header": blob,
            "token_ids": arrays.token_ids,
            "loss_mask": arrays.loss_mask,
            "behaviour_logprobs": arrays.behaviour_logprobs,
            "versions": arrays.versions,
            "engines": arrays.engines,
        }
    )
    return body


def unpack_batch(body: bytes) -> tuple[BatchHeader, BatchArrays]:
    """The inverse of pack_batch. Raises ValueError if the body is not such a blob."""
    try:
        tensors: dict[str, Any] = load_safetensors(body)
        header = BatchHeader.model_validate(json.loads(tensors.pop("header").tobytes()))
        return header, BatchArrays(**tensors)
    except Exception as error:
        raise ValueError(f"not a batch: {error}") from error
