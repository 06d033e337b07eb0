"""Shapes of every HTTP message, and the digest both ends compute. All that servers/ may import; imports no asyncrl.

Every server listens on 127.0.0.1 and answers only to `Authorization: Bearer <the run's secret>`; the secret
reaches a child process in the environment variable SECRET_ENV. Errors are `ErrorBody` with a 4xx or 5xx status.
Tensors travel as safetensors bytes; nothing is pickled.

Engine servers (embedded, simulated, vllm):   GET /health, POST /generate /abort /prepare /commit
Trainer worker (rank 0):                      GET /health, POST /train /export /save
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

SECRET_ENV = "ASYNCRL_SECRET"

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]


class Message(BaseModel):
    """Base of all messages: frozen, and a field that is not known is an error at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(Message):
    """Body of every answer with a status of 400 or above: what failed, the rule, the way out."""

    error: str
    rule: str = ""
    way_out: str = ""


class Span(Message):
    """Sampled tokens [start, end) of this answer were sampled under policy_version `version`."""

    start: int
    end: int
    version: int


class GenerateRequest(Message):
    """Sample up to `max_tokens` after `prompt_ids`.

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


class GenerateResponse(Message):
    """`finish_reason` abort: the partial answer of a request that a publish or an /abort interrupted.

    `logprobs`: float32 values in nats, of the distribution that was sampled from (temperature and top_p
    applied; temperature 0 is greedy, with the logprobs of temperature 1). Spans cover every token once, in order.
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
    """The ids that were running or queued here and now end with finish_reason abort. Unknown ids are left out."""

    aborted: list[str]


class PrepareRequest(Message):
    """Read the safetensors file `path` into staging beside the serving weights."""

    version: int = Field(ge=0)
    path: str
    digest: str
    num_tensors: int
    num_bytes: int


class PrepareResponse(Message):
    """`digest` of the tensors as they now lie in staging, computed by the server, not copied from the request."""

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


class TrainerHealth(Message):
    """Answer of GET /health of the trainer worker."""

    policy_version: int
    device: str
    is_busy: bool


class TrainResponse(Message):
    """One optimizer step was taken: the new version and its metrics by full name (`policy/loss`, ...)."""

    policy_version: int
    metrics: dict[str, float]


class ExportResponse(Message):
    """Weights of `version` lie in staging."""

    version: int
    path: str
    digest: str
    num_tensors: int
    num_bytes: int


class SaveRequest(Message):
    """Write the current weights and tokenizer as a Hugging Face folder."""

    path: str


class TrajectoryHeader(Message):
    """One trajectory of a batch; its tokens are [start, end) of the packed arrays."""

    group_index: int
    group_id: int
    sample_index: int
    prompt_id: str
    start: int
    end: int
    reward: float


class BatchHeader(Message):
    """What /train carries beside the arrays. Tokens older than `min_version` get no loss, or the batch is refused."""

    version: int
    min_version: int
    mask_older: bool
    trajectories: list[TrajectoryHeader]


class BatchArrays(BaseModel):
    """Arrays of a batch, trajectories one after the other: N tokens in all, one entry each.

    token_ids int32 [N]; loss_mask bool [N]; behaviour_logprobs float32 [N] in nats; versions int32 [N], -1
    where a token was not sampled.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


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


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview | bytes]]) -> str:
    """Digest of a set of weights, the same on both ends of a publish.

    Takes (name, dtype, shape, raw bytes) in any order. Each tensor is hashed by itself together with its name,
    dtype ("float32", "bfloat16") and shape, and the sorted per-tensor digests are hashed again, so that a
    swapped name, a skipped tensor and a changed byte all change the result.
    """
    parts = []
    for name, dtype, shape, data in tensors:
        digest = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
        digest.update(data)
        parts.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()[:32]


FATAL_PREFIX = "asyncrl-error: "
"""A child process that cannot start or go on prints this and an ErrorBody as JSON on one line of its log."""


def fatal_line(error: ErrorBody) -> str:
    """The log line from which the parent learns why a child ended."""
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    """The last such line of a log, if there is one."""
    for line in reversed(log.splitlines()):
        if line.startswith(FATAL_PREFIX):
            try:
                return ErrorBody.model_validate_json(line.removeprefix(FATAL_PREFIX))
            except ValueError:
                return None
    return None
