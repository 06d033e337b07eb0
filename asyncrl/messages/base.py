"""Messages about engines, weights in memory and pushes."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from asyncrl.base.message import Message

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]
"""Effect of a weight swap on running requests (`weight_sync.interrupt`)."""
TransportName = Literal["shm", "disk", "stream", "lora", "nccl", "ipc"]
"""The way of the weights (see `weight_sync.transport`)."""
WeightKind = Literal["weights", "lora"]
"""Content of a push: all weights, or adapters for the weights of the engines' start."""


NO_EXPERT = 65535
"""In the record of a token's routing, uint16: which expert read it is not known. Others count from 0."""


class LatencyModel(Message):
    """The latency model of rollout.engine=simulated. With n running sequences a decode step takes
    decode_step_s + n * per_row_s, and each of them gets one token, drawn at random from the model's
    vocabulary.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)  # they are what `asyncrl keys` says

    decode_step_s: float = Field(default=0.002, gt=0)
    """Seconds of a decode step, however many sequences run."""
    per_row_s: float = Field(default=0.0001, ge=0)
    """Seconds that each running sequence adds to a decode step."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Seconds per prompt token, during which decoding stops."""
    swap_s: float = Field(default=0.001, ge=0)
    """Seconds that a weight swap stops decoding."""
    mean_tokens: float = Field(default=64.0, ge=1)
    """Mean length of a completion, lognormal; rollout.max_tokens cuts it."""
    sigma: float = Field(default=1.0, ge=0)
    """Sigma of the lognormal length (0 = all completions have mean_tokens)."""


EnginePart = Literal["weights", "kv"]
TrainerPart = Literal["weights", "gradients", "optimizer"]


class Moved(Message):
    """Answer of /sleep, /wake, /offload and /onload: bytes freed, taken or moved, and the seconds it took."""

    num_bytes: int
    seconds: float


# Messages about weights in memory shared by trainer and engine: its handles, and the start of each tensor.


class MemoryHandle(Message):
    """Handle that opens a block of memory in another process.

    `kind` file: `name` is the path of a file in shared memory, to be mapped. cuda: `name` is the
    CUipcMemHandle of an allocation on the shared device, 64 bytes in base64. A handle stays valid across
    writes to its memory. `device`: the UUID of a CUDA device, equal in every process; "" for a file.
    """

    kind: Literal["file", "cuda"]
    name: str
    device: str = ""
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
    """The tensors of a chunk, in memory that the next chunk overwrites. There is one handle per device, and
    all handles have the same layout.
    """

    handles: list[MemoryHandle] = Field(min_length=1)
    tensors: list[PlacedTensor]


# Messages about weights that the trainer sends to all workers of all engines at once
# (weight_sync.transport=nccl).


class GroupSeat(Message):
    """The place of one participant in the group that weights are sent through: the trainer has rank 0, an
    engine's workers the ranks from `rank` on.

    `path` is the file in which they find each other, one a group; with `store`, which is ADDRESS:PORT on the
    trainer's node, the group's name there. `is_new`: the group is to be formed first. `timeout_s` bounds
    forming it, and each buffer that is sent.
    """

    path: str
    store: str = ""
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
    """A buffer and its tensors."""

    num_bytes: int = Field(ge=1)
    tensors: list[PlacedTensor]


class SentWeights(Message):
    """Contents of the following broadcast, sent through the group before the first buffer."""

    version: int
    chunks: list[SentChunk]


class FileRequest(Message):
    """Fetch a file of weights from `url` to a node. `key` names its content, `purpose` who reads it."""

    url: str
    secret: str
    key: str
    purpose: Literal["rollout", "evaluation"] = "rollout"


# ---- a teacher is asked for the logprobs of given tokens


class ScoreRequest(Message):
    """POST /score: the logprob of each of these token ids, from number `start` on, given all ids before it.

    `temperature`: the sampling temperature; logprobs are of logits / temperature.
    """

    token_ids: list[int] = Field(min_length=2)
    start: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)


class ScoreResponse(Message):
    """`logprobs`: float32 values in nats, of token_ids[start:]."""

    logprobs: list[float]
