"""Spec, requests, checks and random numbers of all engine servers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from asyncrl.base.message import Message
from asyncrl.base.serving import Refused, child_arguments, fail
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.engine_api import (
    MAX_TOP_LOGPROBS,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    SleepRequest,
    TransferStats,
    WakeRequest,
)
from asyncrl_servers.weight_state import WeightState

if TYPE_CHECKING:
    import asyncio

Answer = TypeVar("Answer")
AnyFuture: TypeAlias = "Future[Answer] | asyncio.Future[Answer]"
MAX_QUEUED = 1_000_000
"""Maximum requests waiting for a slot; others get 503."""
MAX_STOP = 16


class EngineSpec(Message):
    """Spec file of an engine server: one JSON object."""

    name: str
    """Server name in logs and errors, like engine-0."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    max_length: int = Field(ge=2)
    """Maximum tokens of prompt and completion together."""


Spec = TypeVar("Spec", bound=EngineSpec)


def read_spec(kind: type[Spec]) -> tuple[Spec, int]:
    """Return the spec and the socket number. End the process if the spec is invalid."""
    text, fd = child_arguments()
    try:
        return kind.model_validate_json(text), fd
    except ValidationError as error:
        fail(
            f"the spec of this server is wrong: {error}", rule=f"its fields are the fields of {kind.__name__}"
        )


class Listener(Protocol):
    """Receives tokens and refusals, from any thread."""

    def sampled(self, rows: Sequence[Sampled]) -> None: ...
    def refused(self, number: int, refusal: Refused) -> None: ...


class Run:
    """A request from arrival to end, which `listener` gets with its last tokens."""

    def __init__(self, asked: Asked, listener: Listener) -> None:
        self.number, self.request, self.is_streamed = asked
        self.listener = listener


Of = TypeVar("Of", bound=Run)


class ServedEngine(Protocol[Of]):
    """Engine interface of the routes. Futures may raise Refused; other errors become 500.

    `run` checks a request and raises Refused (400). `submit` queues runs, `resume` continues interrupted
    runs, and `abort` ends runs with their tokens so far. Finished runs are ignored.
    """

    @property
    def weights(self) -> WeightState: ...
    @property
    def num_queued(self) -> int: ...
    def health(self) -> EngineHealth: ...
    def run(self, asked: Asked, listener: Listener) -> Of: ...
    def submit(self, runs: Sequence[Of]) -> None: ...
    def resume(self, runs: Sequence[Of]) -> None: ...
    def abort(self, runs: Sequence[Of]) -> None: ...
    def commit(self, request: CommitRequest) -> AnyFuture[CommitResponse]: ...
    def sleep(self, request: SleepRequest) -> AnyFuture[TransferStats]: ...
    def wake(self, request: WakeRequest) -> AnyFuture[TransferStats]: ...


def check_request(asked: Asked, max_length: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the prompt ids, int64 [P]. Raises Refused (400)."""
    request = asked.request
    name, num_prompt = f"request {request.request_id}", len(request.prompt_ids)
    total = num_prompt + request.max_tokens
    if total > max_length:
        what = f"{name} wants {num_prompt} + {request.max_tokens} = {total} tokens, a slot holds {max_length}"
        rule = "prompt and completion must fit into a slot"
        way_out = "shorten the prompt, or raise rollout.max_prompt_tokens or rollout.max_tokens."
        raise Refused(400, what, rule=rule, way_out=way_out)
    ids = np.asarray(request.prompt_ids, np.int64)
    is_unknown = ids.view(np.uint64) >= vocab_size  # negative ids too
    if is_unknown.any():
        rule = f"the model knows ids 0..{vocab_size - 1}"
        way_out = "encode the prompt with the model's own tokenizer."
        raise Refused(400, f"{name} has token id {ids[is_unknown][0]}", rule=rule, way_out=way_out)
    if not 0 <= request.num_resumed <= num_prompt:
        rule = "resumed ids are the last ones of the prompt"
        raise Refused(400, f"{name} has num_resumed={request.num_resumed} of {num_prompt} ids", rule=rule)
    if not (
        num_prompt >= 1
        and request.max_tokens >= 1
        and request.temperature >= 0.0
        and 0.0 < request.top_p <= 1.0
        and 0 <= request.seed < 2**63
        and len(request.stop) <= MAX_STOP
        and 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS
    ):
        raise Refused(
            400,
            f"{name} has {num_prompt} prompt ids and {replace(request, prompt_ids=())}",
            rule="a prompt has an id, max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, 0 <= seed < 2**63, "
            f"at most {MAX_STOP} stop strings, 0 <= top_logprobs <= {MAX_TOP_LOGPROBS}",
        )
    return ids


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 finalizer (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return float64 in [0, 1) with 53 random bits, by (seed, absolute position) only, so that resumed
    requests repeat their draws.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
