"""Messages of engine servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.messages.base import ChunkMemory, EnginePart, Interrupt, Message, WeightKind


class Span(Message):
    """Sampled tokens [start, end) of this answer were sampled under policy_version `version`."""

    start: int
    end: int
    version: int


class GenerateRequest(Message):
    """Sample up to `max_tokens` after `prompt_ids`.

    `stream`: the answer is a line of JSON a GenerateChunk, as tokens are sampled, and last the
    GenerateResponse, whose tokens are those after the last chunk's: chunks and response, joined, are what the
    same request without `stream` answers. The token that ends an answer comes in the response, never in a
    chunk.

    The last `num_resumed` ids of the prompt were sampled by an earlier segment of the same logical request:
    they count for stop strings that lie over the joint, and nothing else. The draw of each token depends on
    (`seed`, its absolute position, counted from the first prompt id) alone.
    """

    request_id: str
    prompt_ids: list[int] = Field(min_length=1)
    num_resumed: int = Field(default=0, ge=0)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    stop: list[str] = Field(default=[], max_length=16)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stream: bool = False


class GenerateChunk(Message):
    """Some tokens of a streamed answer, all sampled under policy_version `version`; `logprobs` as in
    GenerateResponse.
    """

    token_ids: list[int] = Field(min_length=1)
    logprobs: list[float]
    version: int


class GenerateResponse(Message):
    """`finish_reason` abort: the partial answer of a request that a publish or an /abort interrupted.

    `logprobs`: float32 values in nats, of the distribution that was sampled from (temperature and top_p
    applied; temperature 0 is greedy, with the logprobs of temperature 1). Spans cover every token once, in
    order.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[Span]
    finish_reason: Literal["stop", "length", "abort"]


class AbortRequest(Message):
    """Abort these requests; None aborts all."""

    request_ids: list[str] | None = None


class AbortResponse(Message):
    """The ids that were running or queued here and now end with finish_reason abort. Unknown ids are left
    out.
    """

    aborted: list[str]


class PrepareRequest(Message):
    """Read the safetensors file `path` into staging beside the serving weights.

    `kind` weights: a whole set of them. lora: adapters for the weights that the server started with, as
    `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of each layer that has one,
    and the scalar `scale`; staged is base + scale * B A, computed in float32. `digest` is that of the tensors
    in the file, in either case.
    """

    version: int = Field(ge=0)
    path: str
    digest: str
    num_tensors: int
    num_bytes: int
    kind: WeightKind = "weights"


class PrepareResponse(Message):
    """`digest` of the tensors as they were read into staging, computed by the server, not copied from the
    request.
    """

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
    """Free the memory of these parts. Aborts what runs; requests that come now wait until all parts are
    awake. Idempotent.
    """

    parts: list[EnginePart] = ["kv", "weights"]


class WakeRequest(Message):
    """Take memory for these parts again. Weights that are awake have no content until a push is committed,
    unless `restore`: then they are loaded again from where the serving ones came from. Idempotent.
    """

    parts: list[EnginePart]
    restore: bool = False


class LoadChunkRequest(Message):
    """Load the tensors of the safetensors file `path`, or in `memory`, into the awake weights: chunk `index`
    of the push of `version`.

    `digest` is that of this chunk's tensors. `is_last`: the next request of this push is /commit, with the
    digest of all tensors.
    """

    version: int = Field(ge=0)
    index: int = Field(ge=0)
    path: str = ""
    memory: ChunkMemory | None = None
    digest: str
    num_tensors: int
    num_bytes: int
    is_last: bool

    @property
    def place(self) -> str:
        """Where the tensors are, for messages."""
        return self.path if self.memory is None else f"chunk {self.index} in {self.memory.handle.kind} memory"


class LoadChunkResponse(Message):
    """`digest` of the tensors as they were loaded, computed by the server."""

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
    asleep: list[EnginePart] = []
