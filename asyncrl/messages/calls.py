"""Messages of engine servers, of the trainer worker, and the batch on its way to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from asyncrl.base.message import Message
from asyncrl.messages.base import ChunkMemory, EnginePart, GroupSeat, Interrupt, TrainerPart, WeightKind
from asyncrl.messages.records import Credit, TopLogprobs

MAX_TOP_LOGPROBS = 20


class Span(Message):
    """Sampled tokens [start, end) of this answer were sampled under policy_version `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Sample up to `max_tokens` after `prompt_ids`, int [P].

    The last `num_resumed` ids of the prompt were sampled by an earlier segment of the same logical request:
    they count only for stop strings that span the joint. The draw of each token depends only on (`seed`, its
    absolute position, counted from the first prompt id). `max_tokens` >= 1; `temperature` >= 0; 0 < `top_p`
    <= 1; 0 <= `seed` < 2**63; 0 <= `top_logprobs` <= MAX_TOP_LOGPROBS. `grammar` (see token_grammars.py)
    covers the sampled text, including the resumed ids.
    """

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    num_resumed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    grammar: str | None = None
    top_logprobs: int = 0


class GenerateChunk(Message):
    """Some tokens of a streamed answer, all sampled under policy_version `version`; `logprobs` and
    `top_logprobs` as in GenerateResponse.
    """

    token_ids: list[int] = Field(min_length=1)
    logprobs: list[float]
    version: int
    top_logprobs: list[TopLogprobs] = []

    @property
    def version_spans(self) -> list[Span]:
        """Like GenerateResponse."""
        return [Span(start=0, end=len(self.token_ids), version=self.version)]


class GenerateResponse(Message):
    """`finish_reason` abort: the partial answer of a request that a publish, a sleep or an abort ended early.

    `logprobs`: float32 values in nats, of the distribution that was sampled from (temperature and top_p
    applied; temperature 0 is greedy, with the logprobs of temperature 1), restricted to the allowed tokens
    under a grammar. Spans cover every token once, in order. `top_logprobs`: one entry per token if requested,
    or empty.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[Span]
    finish_reason: Literal["stop", "length", "abort"]
    top_logprobs: list[TopLogprobs] = []
    routing: bytes = Field(default=b"", exclude=True)
    """Over a link: what RoutedTokens of engines/segment_check.py is made of."""

    def after(self, num_tokens: int) -> GenerateResponse:
        """Return the segment without its first tokens, which were already sent."""
        spans = [
            Span(start=max(0, span.start - num_tokens), end=span.end - num_tokens, version=span.version)
            for span in self.version_spans
            if span.end > num_tokens
        ]
        lists = ("token_ids", "logprobs", "top_logprobs")
        rest = {name: getattr(self, name)[num_tokens:] for name in lists}
        return self.model_copy(update={**rest, "version_spans": spans})


class WeightsBody(Message):
    """A set of tensors, pushed as `version`; `digest` is their `asyncrl.messages.digest.weights_digest`."""

    version: int = Field(ge=0)
    digest: str
    num_tensors: int
    num_bytes: int


class ChunkBody(WeightsBody):
    """Chunk `index` of the weights: in the safetensors file `path`, or in `memory`, open on each device."""

    index: int = Field(ge=0)
    path: str = ""
    memory: ChunkMemory | None = None
    is_last: bool


class PrepareRequest(WeightsBody):
    """Read the safetensors file `path` into staging during serving; with a `seat`, and no path, receive a
    whole set of weights from the trainer there.

    `kind` weights: a whole set of them. lora: adapters for the weights that the server started with, as
    `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of each adapted layer, and
    the scalar `scale`; staged is base + scale * B A, computed in float32. `digest` covers the tensors in the
    file, in either case.
    """

    path: str
    kind: WeightKind = "weights"
    seat: GroupSeat | None = None


class PrepareResponse(Message):
    """`digest` of the tensors read into staging, computed by the server, not copied from the request."""

    version: int
    digest: str


class CommitRequest(Message):
    """Swap to the staged weights, whose digest must be `digest`, and serve on as `version`."""

    version: int = Field(ge=0)
    digest: str
    interrupt: Interrupt = "abort"


class CommitResponse(Message):
    """`digest` is that of the weights now serving; `pause_s` the time in which no token could be decoded."""

    version: int
    digest: str
    pause_s: float
    num_interrupted: int


class SleepRequest(Message):
    """Free the memory of these parts. Interrupts what runs; requests that come now wait until all parts are
    awake. Idempotent.
    """

    parts: list[EnginePart] = ["kv", "weights"]


class WakeRequest(Message):
    """Take memory for these parts again. Weights that slept have no content until a push is committed.
    Idempotent.
    """

    parts: list[EnginePart]


class LoadChunkRequest(ChunkBody):
    """Load this chunk of a push into the awake weights. `is_last`: the next request of the push is /commit,
    with the digest of all tensors.
    """

    @property
    def place(self) -> str:
        """Return the place of the tensors for error messages."""
        memory = self.memory
        return self.path if memory is None else f"chunk {self.index} in {memory.handles[0].kind} memory"


class LoadChunkResponse(Message):
    """`digest` of the loaded tensors, computed by the server."""

    version: int
    index: int
    digest: str


class EngineHealth(Message):
    """Answer of GET /health of an engine server. `max_length` bounds prompt plus completion, in tokens."""

    name: str
    kind: str
    policy_version: int
    slots: int
    max_length: int
    num_running: int
    num_queued: int
    tokens_generated: int
    device: str
    decode_s: float = 0.0
    """Seconds spent in prefill and decode so far."""
    tokens_prefilled: int = 0
    """Prompt tokens that were computed, not copied from the KV cache, so far."""
    asleep: list[EnginePart] = []
    graphs: str = ""
    """Use of CUDA graphs for decode steps: on, or off and why; empty if the engine has none."""


# The trainer worker.


class OffloadRequest(Message):
    """Move these parts of the trainer's state off its device (/offload), or back onto it (/onload).
    Idempotent.
    """

    parts: list[TrainerPart]


class Canary(Message):
    """Logprobs of a fixed short text, computed by the trainer with the weights that it exports. An engine
    with these weights must compute the same.

    `logprobs`: of token_ids[1:], each given all ids before it. `next_logprob`: of the most likely id after
    the last one. float32 values in nats at temperature 1.
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


class ExportChunkResponse(ChunkBody):
    """A chunk is ready. With `is_last`, `whole_digest` is the digest of the tensors of all chunks, and
    `canary` theirs.
    """

    whole_digest: str = ""
    canary: Canary | None = None


class TrainerHealth(Message):
    """Answer of GET /health of the trainer worker."""

    policy_version: int
    device: str
    is_busy: bool
    offloaded: list[TrainerPart] = []


class TrainResponse(Message):
    """Result of an optimizer step: the new version and its metrics by full name (`policy/loss`, ...).

    `not_finite`: metrics without a finite value after a skipped step. `rollout_gaps`: (group_id,
    sample_index, mean of |engine - trainer| in nats over its fresh tokens) of each rollout that has some.
    """

    policy_version: int
    metrics: dict[str, float]
    not_finite: list[str] = []
    rollout_gaps: list[tuple[int, int, float]] = []


class ExportResponse(WeightsBody):
    """A set of weights in staging: all of them, or only the adapters (see PrepareRequest).

    `path` is a safetensors file that every engine server of this machine can read. `canary`: the trainer's
    logprobs of a short text with these weights, if requested. `is_held`: the trainer holds them to send them
    itself (/broadcast); `path` may be '' then.
    """

    path: str
    kind: WeightKind = "weights"
    canary: Canary | None = None
    is_held: bool = False


class SaveRequest(Message):
    """Write the current weights and tokenizer as a Hugging Face folder; not `merged`: only the adapters, as a
    peft folder.
    """

    path: str
    merged: bool = True


class StateRequest(Message):
    """Save the training state into the new folder `path` (/begin_save_state answers once training may
    continue, /wait_save_state once the folder is written), or load it (/load_state). Before a load the client
    has compared every file with the checkpoint's manifest.
    """

    path: str


# A batch on its way to the trainer.


class TrajectoryHeader(Message):
    """A trajectory of a batch: branch `branch` of a rollout. Its tokens are [start, end) of the packed
    arrays.

    `reward` is the rollout's. If its branches have `credits`, they replace it in the advantage.
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
    grammars: list[tuple[int, int, int]] = []
    """(start, end, number among those of the batch) of its GrammarSpans."""


class BatchHeader(Message):
    """Fields of /train other than the arrays. Tokens older than `min_version` get no loss, or the batch is
    refused. `grammars`: different ones.
    """

    version: int
    min_version: int
    mask_older: bool
    trajectories: list[TrajectoryHeader]
    grammars: list[str] = []


class BatchArrays(BaseModel):
    """Arrays of a batch, trajectories one after the other: N tokens in all, one entry each.

    token_ids int32 [N]; loss_mask bool [N]; behaviour_logprobs float32 [N] in nats; versions int32 [N], -1
    for a token that was not sampled; engines int16 [N], the number of the engine server that sampled the
    token, -1 if unknown; teacher_logprobs float32 [N] in nats, None without a teacher; routing uint16 [N, E],
    None without router replay: see Trajectory.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    engines: npt.NDArray[np.int16] = Field(
        default_factory=lambda given: np.full(len(given["token_ids"]), -1, np.int16)
    )
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    routing: npt.NDArray[np.uint16] | None = None


def pack_batch(header: BatchHeader, arrays: BatchArrays) -> bytes:
    """Body of POST /train: one safetensors blob, the header as JSON in its first array."""
    blob = np.frombuffer(header.model_dump_json().encode(), dtype=np.uint8)
    given = {name: array for name, array in arrays if array is not None}
    body: bytes = save_safetensors({"header": blob, **given})
    return body


def unpack_batch(body: bytes) -> tuple[BatchHeader, BatchArrays]:
    """The inverse of pack_batch. Raises ValueError if the body is not such a blob."""
    try:
        tensors: dict[str, Any] = load_safetensors(body)
        header = BatchHeader.model_validate(json.loads(tensors.pop("header").tobytes()))
        return header, BatchArrays(**tensors)
    except Exception as error:
        raise ValueError(f"not a batch: {error}") from error
