"""Shared by all engine servers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from asyncrl.base.http import Refused, child_arguments, fail
from asyncrl.base.message import Message
from asyncrl.messages.codec import Asked, Sampled, request_fault
from asyncrl.messages.engine_api import (
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


class EngineSpec(Message):
    name: str
    slots: int = Field(ge=1)
    max_length: int = Field(ge=2)
    """Prompt and completion together."""


Spec = TypeVar("Spec", bound=EngineSpec)


def read_spec(kind: type[Spec]) -> tuple[Spec, int]:
    """Return the spec and the socket number; exit if the spec is invalid."""
    text, fd = child_arguments()
    try:
        return kind.model_validate_json(text), fd
    except ValidationError as error:
        fail(
            f"the spec of this server is wrong: {error}", rule=f"its fields are the fields of {kind.__name__}"
        )


class Listener(Protocol):
    def sampled(self, rows: Sequence[Sampled]) -> None: ...
    def refused(self, number: int, refusal: Refused) -> None: ...


class Run:
    def __init__(self, asked: Asked, listener: Listener) -> None:
        self.number, self.request, self.is_streamed = asked
        self.listener = listener


Of = TypeVar("Of", bound=Run)


class ServedEngine(Protocol[Of]):
    """Engine interface of the routes.

    Futures may raise Refused; other errors become 500. `run` raises Refused (400). `abort` ends runs with
    their tokens so far.
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
    if fault := request_fault(asked.request, max_length, vocab_size):
        what = f"request {asked.request.request_id}: {fault.error}"
        raise Refused(400, what, rule=fault.rule, way_out=fault.way_out)
    return np.asarray(asked.request.prompt_ids, np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 finalizer (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return float64 in [0, 1) with 53 random bits, by (seed, absolute position) for resumed requests."""
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
