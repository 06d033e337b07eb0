"""HTTP messages of the engine servers. Imports no numpy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from asyncrl.base.errors import Message
from asyncrl.messages.records import Count

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]

TransportName = Literal["shm", "disk", "stream", "nccl", "ipc"]


EnginePart = Literal["weights", "kv"]
TrainerPart = Literal["weights", "gradients", "optimizer"]


class TransferStats(Message):
    num_bytes: int
    seconds: float


class MemoryHandle(Message):
    """Handle of a memory block for another process; valid across writes.

    `name`: a file in shared memory, or base64 of a CUipcMemHandle. `device`: UUID of a
    CUDA device, "" for a file.
    """

    kind: Literal["file", "cuda"]
    name: str
    device: str = ""
    num_bytes: Count


class PlacedTensor(Message):
    """A contiguous tensor from byte `start`. `dtype`: float32, bfloat16."""

    name: str
    dtype: str
    shape: list[int]
    start: NonNegativeInt


class ChunkMemory(Message):
    """The tensors of a chunk, in memory that the next chunk overwrites. One handle per
    device.
    """

    handles: list[MemoryHandle] = Field(min_length=1)
    tensors: list[PlacedTensor]


class GroupMember(Message):
    """A participant's place in the group that weights are sent through: rank 0 is the
    trainer, an engine's workers have the ranks from `rank` on.

    `path`: a file where the members meet, or with `store` (the trainer's ADDRESS:PORT)
    a name there. `is_new`: form the group first.
    """

    path: str
    store: str = ""
    size: int = Field(ge=2)
    rank: NonNegativeInt
    is_new: bool
    timeout_s: PositiveFloat


class SentChunk(Message):
    num_bytes: Count
    tensors: list[PlacedTensor]


class SentWeights(Message):
    version: int
    chunks: list[SentChunk]


class FileRequest(Message):
    """`key` names the content, `purpose` its reader."""

    url: str
    secret: str
    key: str
    purpose: Literal["rollout", "evaluation"] = "rollout"


MAX_TOP_LOGPROBS = 20


class AdapterSpec(Message):
    """Low-rank adapters, scaled by `scale`. `targets`: names of linear layers or ends of
    them.
    """

    rank: int = Field(ge=1)
    scale: float
    targets: list[str] | Literal["all-linear", "all"] = "all-linear"


class OpenAdapterRequest(AdapterSpec):
    """Make room for another adapter. Its first push brings the content."""

    adapter: str = Field(min_length=1)


class DropAdapterRequest(Message):
    """Forget an adapter. Its requests end with their tokens, as aborted."""

    adapter: str = Field(min_length=1)


class OpenAdapters(Message):
    names: list[str]


class WeightsBody(Message):
    """Weights of the run, or of another adapter than the run's own, which is ""."""

    adapter: str = ""
    version: NonNegativeInt
    digest: str
    num_tensors: int
    num_bytes: int


class ChunkBody(WeightsBody):
    """Chunk `index` of the weights: a safetensors file `path`, or `memory`."""

    index: NonNegativeInt
    path: str = ""
    memory: ChunkMemory | None = None
    is_last: bool


class PrepareRequest(WeightsBody):
    """Read the safetensors file `path`, or the trainer's `memory`, into staging; with a
    `member`, receive the weights there.

    An engine with adapters gets `<module>.lora_A.weight` [rank, in] and
    `<module>.lora_B.weight` [out, rank]; others all weights.
    """

    path: str
    memory: ChunkMemory | None = None
    member: GroupMember | None = None

    @property
    def place(self) -> str:
        return (
            self.path
            if self.memory is None
            else f"policy_version {self.version} in the trainer's memory"
        )


class Loaded(Message):
    """`digest` is computed by the server."""

    digest: str


class CommitRequest(Message):
    """Swap to the adapter's staged weights with this `digest`. Requests of other
    adapters are not interrupted.
    """

    adapter: str = ""
    version: NonNegativeInt
    digest: str
    interrupt: Interrupt = "abort"


class CommitResponse(Message):
    """`pause_s`: time in which no token could be decoded."""

    version: int
    digest: str
    pause_s: float
    num_interrupted: int


class WakeRequest(Message):
    """Allocate these parts again. Weights have no content until a push is committed.
    Idempotent.
    """

    parts: list[EnginePart]


class LoadChunkRequest(ChunkBody):
    """Load a chunk into the awake weights. `is_last`: /commit follows, with the digest
    of all tensors.
    """

    @property
    def place(self) -> str:
        memory = self.memory
        return (
            self.path
            if memory is None
            else f"chunk {self.index} in {memory.handles[0].kind} memory"
        )


class ScoreRequest(Message):
    """Return the logprob of each token id from `start` on, of logits / `temperature`. At
    each of these places the engine also reports the `top_k` likeliest ids, the logprobs
    of the K ids in `targets` (-1: none), and `draws` ids that it draws with replacement.

    A draw depends only on (seed, place, number of the draw). The first draw is the token
    that a SamplingRequest of this seed and temperature samples there.
    """

    token_ids: list[int] = Field(min_length=1)
    start: Count = 1
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    targets: list[list[int]] | None = None
    """[len(token_ids) - start, K]"""
    draws: int = Field(default=0, ge=0, lt=2**16)
    seed: int = Field(default=0, ge=0, lt=2**64)
    adapter: str = ""


class ScoreResponse(Message):
    """float32 logprobs in nats, of token_ids[start:]. The other lists have top_k, K or
    `draws` values for each of these tokens, one token after the other. `version`:
    policy_version of the weights that scored; all tokens have one.
    """

    version: int = 0
    logprobs: list[float]
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    """Descending."""
    target_logprobs: list[float] = []
    """0.0 where the target is -1."""
    draw_ids: list[int] = []
    draw_logprobs: list[float] = []


class EngineHealth(Message):
    policy_version: int
    num_running: int
    num_queued: int
    tokens_generated: int
    decode_s: float = 0.0
    kv_fraction: float = 0.0
    """Part of the KV cache in use, 0..1."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds; 0: unknown, or all slots at full length."""
    num_preempted: int = 0
    """Sequences that lost their place in a full KV cache, since the process began."""
    asleep: list[EnginePart] = []
    note: str = ""
    """What the controller logs when the engine is ready."""
