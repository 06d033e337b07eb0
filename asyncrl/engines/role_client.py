"""Client of a server that is neither trainer nor engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from asyncrl.base.errors import EngineError, EngineLost, RequestRefused
from asyncrl.base.http import Answer, Caller, CallRefused
from asyncrl.base.waits import Signal, clock, note_span, waiting
from asyncrl.engines.engine import CallScope, ServerClient, raise_lost
from asyncrl.messages.engine_api import EngineHealth, TransferStats, WakeRequest
from asyncrl.messages.records import Prompt, Rollout

CALL_TIMEOUT_S = 120.0
T = TypeVar("T")
Copy = TypeVar("Copy", bound="RoleClient")
Annotate = Callable[[Rollout, Prompt, Sequence[Rollout]], Awaitable[Rollout]]
"""Adds to a rollout of a prompt, whose siblings have ended, or which are not given. Raises
RolloutFailure (data) or EngineError.
"""


@dataclass(frozen=True, slots=True)
class Annotation:
    """An addition to each rollout (Extension.annotations): at its end, or `by_group` once
    all rollouts of the group have their rewards.
    """

    annotate: Annotate
    by_group: bool
    gauges: Callable[[], Mapping[str, float]]


class RoleClient(ServerClient):
    """Calls one server. A call that is lost with its process is repeated in the next
    process.

    Life: up -> disconnect_nowait(): open calls restart later -> reset_nowait(): a new
        process -> up_nowait(). On a device of the trainer: awake -> sleep() -> asleep
        -> wake() -> awake.
    Waits: call() sleeps until the server is up and awake, for one of `places`, then for
        the answer, at most CALL_TIMEOUT_S. sleep() sleeps until sent calls are answered.
    Invariant: nothing is sent to a server that sleeps. A new process is awake: it starts
        in the engines' time slice only.

    `on_lost` gets every EngineLost and must take the client down; without it the error
    reaches the caller.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        places: int = 1,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        self.name = caller.name
        self._caller = caller
        self._on_lost = on_lost or raise_lost
        self._places = asyncio.Semaphore(places)
        self._scope = self._open_scope()
        self.is_up = True
        self.is_asleep = False
        self._num_sent = 0
        self._changed = Signal()
        """Of the three values above."""
        self._span = list[float]()
        """First and last second of this time slice's calls."""
        self.num_calls = 0
        """Open calls, also while they wait for a place or a restart."""

    def _open_scope(self) -> CallScope:
        return CallScope(self._caller)

    def disconnect_nowait(self) -> None:
        self.is_up = False
        self._scope.disconnect_nowait()

    def reset_nowait(self) -> None:
        self.disconnect_nowait()
        self._scope = self._open_scope()

    def up_nowait(self) -> None:
        self.is_up = True
        self._changed.notify()

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        return await self._caller.get("/health", EngineHealth, timeout_s=timeout_s)

    async def sleep(self) -> TransferStats:
        """Hold new calls, and free the server's memory once sent calls are answered.
        Idempotent. Raises EngineError.
        """
        self.is_asleep = True
        with waiting("answers to sent calls", on=self.name, who="handover"):
            await self._changed.wait_for(lambda: not self._num_sent)
        if self._span:
            note_span(self.name, "score", self._span[0], self._span[-1])
            self._span = []
        return await self._move("/sleep", None)

    async def wake(self) -> TransferStats:
        """Let the server take its memory, and send calls again. Idempotent. Raises
        EngineError.
        """
        moved = await self._move("/wake", WakeRequest(parts=["weights", "kv"]))
        self.is_asleep = False
        self._changed.notify()
        return moved

    async def _move(self, path: str, body: BaseModel | None) -> TransferStats:
        # A lost process holds no memory, and the next one starts awake.
        if self.is_up:
            try:
                async with self._scope.calls():
                    return await self._caller.post(
                        path, body, TransferStats, timeout_s=None
                    )
            except EngineLost as lost:
                self._on_lost(lost)
        return TransferStats(num_bytes=0, seconds=0.0)

    async def call(self, path: str, body: BaseModel, answer: type[Answer]) -> Answer:
        """POST a message. Raises RequestRefused (data) or EngineError."""

        async def send() -> Answer:
            # The scope is read after the wait for a place, during which the process may
            # have been replaced.
            async with self._scope.calls():
                return await self._caller.post(
                    path, body, answer, timeout_s=CALL_TIMEOUT_S
                )

        return await self.repeat(f"an answer to {path}", send)

    async def repeat(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `send`, which is called again if its process is lost.

        `what` names the wait. Raises RequestRefused (data) or EngineError.
        """
        self.num_calls += 1
        try:
            return await self._until_answered(what, send)
        finally:
            self.num_calls -= 1

    async def _until_answered(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        while True:
            with waiting(f"{self.name} to be up", on="supervisor", who="rollouts"):
                await self._changed.wait_for(lambda: self.is_up)
            with waiting(
                f"the engines' time slice, to call {self.name}",
                on="the train loop",
                who="rollouts",
            ):
                await self._changed.wait_for(lambda: not self.is_asleep)
            try:
                with waiting(what, on=self.name, who="rollouts"):
                    async with self._places:
                        # A wait for a place may have outlived the time slice.
                        if not self.is_asleep:
                            return await self._sent(send)
            except EngineLost as lost:
                # It clears `is_up`, so the next round waits for a new process. Repeating
                # is safe, because these servers keep nothing between calls.
                self._on_lost(lost)
            except EngineError as error:
                refusal = error.__cause__
                # 400 is about this rollout's data, and fails only this rollout. Any
                # other status would fail every rollout.
                if not isinstance(refusal, CallRefused) or refusal.status != 400:
                    raise
                raise RequestRefused(
                    error.what, rule=error.rule, way_out=error.way_out
                ) from refusal

    async def _sent(self, send: Callable[[], Awaitable[T]]) -> T:
        self._num_sent += 1
        self._span = self._span[:1] or [clock()]
        try:
            return await send()
        finally:
            self._num_sent -= 1
            self._span = [self._span[0], clock()]
            self._changed.notify()


def least_busy(copies: Sequence[Copy]) -> Copy:
    """Return the client of the copy of a server that the next call goes to: an up one,
    better awake, with the fewest open calls.
    """
    return min(
        copies,
        key=lambda client: (not client.is_up, client.is_asleep, client.num_calls),
    )
