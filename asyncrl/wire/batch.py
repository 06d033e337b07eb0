"""A batch on its way to the trainer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from asyncrl.wire.base import Message


class CreditHeader(Message):
    """Tokens [start, end) of a trajectory, counted from its first, answer for `reward` as part `unit` of their rollout."""

    start: int
    end: int
    reward: float
    unit: int


class TrajectoryHeader(Message):
    """One trajectory of a batch: branch `branch` of a rollout. Its tokens are [start, end) of the packed arrays.

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
    credits: list[CreditHeader] = []


class BatchHeader(Message):
    """What /train carries beside the arrays. Tokens older than `min_version` get no loss, or the batch is refused."""

    version: int
    min_version: int
    mask_older: bool
    trajectories: list[TrajectoryHeader]


class BatchArrays(BaseModel):
    """Arrays of a batch, trajectories one after the other: N tokens in all, one entry each.

    token_ids int32 [N]; loss_mask bool [N]; behaviour_logprobs float32 [N] in nats; versions int32 [N], -1
    where a token was not sampled; engines int16 [N], the number of the engine server that sampled it, -1 where that is not known.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    engines: npt.NDArray[np.int16] = Field(default_factory=lambda given: np.full(len(given["token_ids"]), -1, np.int16))


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
