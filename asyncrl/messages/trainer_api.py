"""HTTP messages of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeInt
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from asyncrl.base.errors import Message
from asyncrl.messages.engine_api import (
    ChunkBody,
    ChunkMemory,
    GroupMember,
    TrainerPart,
    WeightsBody,
)
from asyncrl.messages.records import CallSpan, Credit, RewardPart
from asyncrl.messages.tokens import Tokens


class BroadcastRequest(Message):
    version: NonNegativeInt
    member: GroupMember


class BroadcastResponse(Message):
    """`digest`: of the trainer's copy."""

    version: int
    digest: str
    num_bytes: int


class OffloadRequest(Message):
    """Move these parts of the trainer's state off or back onto its device. Idempotent."""

    parts: list[TrainerPart]


class Canary(Message):
    """The trainer's logprobs of a fixed text under the exported weights, in nats at
    temperature 1.

    `logprobs`: of token_ids[1:]. `next_logprob`: of the most likely next id.
    `noise`: median distance of the logprobs from a second pass that differs by
    rounding only.
    """

    token_ids: list[int] = Field(min_length=2)
    logprobs: list[float] = Field(min_length=1)
    next_logprob: float
    noise: float = 0.0


class BeginExportRequest(Message):
    """Begin an export of the first version above `above`."""

    above: int


class ExportChunkRequest(Message):
    """Write chunk `index` of the weights, at most chunk_bytes or one
    tensor.

    Each chunk replaces the one before.
    """

    version: NonNegativeInt
    index: NonNegativeInt


class ExportChunkResponse(ChunkBody):
    """With `is_last`, `whole_digest` and `canary` are of all chunks."""

    whole_digest: str = ""
    canary: Canary | None = None


class TrainerHealth(Message):
    policy_version: int
    device: str
    offloaded: list[TrainerPart] = []


class TrainResponse(Message):
    """Metrics of an optimizer step by full name (`policy/loss`, ...).

    `not_finite`: metrics without a finite value after a skipped step. `rollout_gaps`:
    (group_id, sample_index, mean |engine - trainer| in nats over fresh tokens).
    `rollout_advantages`: likewise, mean advantage over tokens in the loss.
    """

    policy_version: int
    metrics: dict[str, float]
    not_finite: list[str] = []
    rollout_gaps: list[tuple[int, int, float]] = []
    rollout_advantages: list[tuple[int, int, float]] = []


class ExportResponse(WeightsBody):
    """A set of weights or adapters in staging.

    `path`: a safetensors file. `is_held`: the trainer keeps them on its device and
    sends them (/broadcast), or shares `memory`, until the next export overwrites them.
    """

    path: str
    canary: Canary | None = None
    is_held: bool = False
    memory: ChunkMemory | None = None


class StateRequest(Message):
    """Save the training state into the new folder `path`, or load it; /save: write a
    Hugging Face folder. /begin_save_state answers once training may continue,
    /wait_save_state once the folder is written.
    """

    path: Path


class TrajectoryHeader(Message):
    """A trajectory of a batch, in tokens [start, end).

    `credits` of the branches replace the rollout's `reward` and its `parts`.
    `adapter`: the adapter that it trains; "" for the run's policy.
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
    parts: dict[str, RewardPart] = {}
    adapter: str = ""


class BatchHeader(Message):
    """Tokens older than `min_version` get no loss, or the batch is refused.
    `part_groups`: see Batch.
    """

    version: int
    min_version: int
    mask_older: bool
    trajectories: list[TrajectoryHeader]
    part_groups: int = 0

    @property
    def adapter(self) -> str:
        """Return the adapter of the first trajectory, and so of a batch of one policy."""
        return self.trajectories[0].adapter


def pack_batch(header: BatchHeader, tokens: Tokens) -> bytes:
    """Return a safetensors blob with the header and the calls as JSON in its first
    array.
    """
    # One grammar may hold for thousands of spans, and has up to 256 KiB.
    number_of = dict[str, int]()
    spans = list[tuple[int, int, int]]()
    for call in tokens.calls:
        number = number_of.setdefault(call.grammar, len(number_of))
        spans.append((call.start, call.end, number))
    head = {
        "batch": header.model_dump(mode="json"),
        "grammars": [*number_of],
        "calls": spans,
    }
    # In an array, because safetensors' own metadata is in its header, which may have
    # 100 MB at most.
    blob = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
    arrays = {"header": blob, **tokens.arrays()}
    body: bytes = save_safetensors(arrays)
    return body


def unpack_batch(body: bytes) -> tuple[BatchHeader, Tokens]:
    """Return the header and the tokens of all trajectories, one after the other.

    Raises ValueError for an invalid body.
    """
    try:
        arrays: dict[str, Any] = load_safetensors(body)
        head = json.loads(arrays.pop("header").tobytes())
        calls = [
            CallSpan(start, end, head["grammars"][number])
            for start, end, number in head["calls"]
        ]
        return BatchHeader.model_validate(head["batch"]), Tokens.from_arrays(
            arrays, calls
        )
    except Exception as error:
        raise ValueError(f"not a batch: {error}") from error
