"""Hands shared devices from one side to the other: makes the calls that the lease names, in time, and undoes them if one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asyncrl.errors import AsyncrlError, RoomError
from asyncrl.limits import TimeLimit
from asyncrl.placement.lease import Call, EngineCall, HandoverReport, Lease, Side, TrainerCall, Undo
from asyncrl.types import OffloadingTrainer, SleepingEngine
from asyncrl.uncut import uncut
from asyncrl.wire import Moved

Push = Callable[[], Awaitable[Moved | None]]
"""Brings the trainer's weights to all engines; may say what moved."""
Tell = Callable[[str, Mapping[str, Any]], None]

ROUTINE = frozenset({"handover", "handover phase", "handed over"})
"""Events of every step. All others tell of something that went wrong."""


class HandOver:
    """Drives the lease: engines and trainer do what its phases say. Knows no weights; a push is a function that it is given.

    Life:       made -> start(side) -> to_training(push) and to_generating(push) in turn. One handover at a time. `push` brings the
                trainer's weights to all engines, whose weights are awake and empty; to_training needs it to undo itself.
    Waits:      for the calls of a phase, timeout_s at most each; all engines at once. An undo is bounded the same way, and is not cut
                short by a cancellation: that passes once what had begun is undone.
    Invariant:  when a call of this class returns or raises, the side that owns the lease has what it needs and the other has given it
                away; or the lease is broken, and the error and the event say what was left.
    """

    def __init__(
        self, lease: Lease, engines: Sequence[SleepingEngine], trainer: OffloadingTrainer, *, timeout_s: float, on_event: Tell
    ) -> None:
        self.lease, self._engines, self._trainer = lease, tuple(engines), trainer
        self._timeout_s, self._on_event = timeout_s, on_event

    def __repr__(self) -> str:
        return f"<HandOver {self.lease!r}, {len(self._engines)} engines>"

    async def start(self, side: Side) -> HandoverReport:
        """The first turn. For the engines: with the weights that they have; for the trainer, whose weights are pushed later."""
        return await self._hand(side, _no_push)

    async def to_training(self, push: Push) -> HandoverReport:
        """The engines sleep, the trainer has the devices. Raises RoomError, after which the engines have them still.

        Then `push` has brought them the version again that they served: the trainer has not gone on from it.
        """
        return await self._hand("trainer", push)

    async def to_generating(self, push: Push) -> HandoverReport:
        """The trainer moves out, `push` brings its weights to the engines. Raises RoomError, after which the trainer has them still."""
        return await self._hand("engines", push)

    async def _hand(self, to: Side, push: Push) -> HandoverReport:
        clock = asyncio.get_running_loop().time
        came_from = self.lease.state
        self.lease.begin_nowait(to, clock())
        self._on_event("handover", {"from": came_from, "to": to})
        while (phase := self.lease.begin_phase_nowait(clock())) is not None:
            try:
                num_bytes, error = await self._call(phase.call, push)
            except asyncio.CancelledError as cancelled:
                raise await self._undo("it was cancelled", cancelled, push) from None
            if error is not None:
                raise await self._undo(_shown(error), error, push)
            time = self.lease.finish_phase_nowait(clock(), num_bytes)
            self._on_event("handover phase", {"phase": time.name, "seconds": time.seconds, "num_bytes": time.num_bytes})
        report = self.lease.finish_nowait(clock())
        self._on_event("handed over", {"to": to, "seconds": report.seconds})
        return report

    async def _call(self, call: Call, push: Push) -> tuple[int, BaseException | None]:
        """Bytes of the call on all it is made on, and the first error. Returns once none of them is under way any more."""
        match call:
            case EngineCall("sleep", parts, _):
                calls = [self._one(engine.name, "sleep", engine.sleep(parts)) for engine in self._engines]
            case EngineCall(_, parts, restore):
                calls = [self._one(engine.name, "wake", engine.wake(parts, restore=restore)) for engine in self._engines]
            case TrainerCall("offload", parts):
                calls = [self._one("trainer", "offload", self._trainer.offload(parts))]
            case TrainerCall(_, parts):
                calls = [self._one("trainer", "onload", self._trainer.onload(parts))]
            case _:
                calls = [self._one("publisher", "push", push())]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [_not_ours(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        return sum(outcome for outcome in outcomes if isinstance(outcome, int)), errors[0] if errors else None

    async def _one(self, room: str, verb: str, work: Awaitable[Any]) -> int:
        limit = TimeLimit(self._timeout_s)
        try:
            async with limit:
                moved = await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise RoomError(
                room, f"{verb} was not done within {self._timeout_s} s", rule=f"publisher.timeout_s={self._timeout_s} is the limit",
                way_out=f"raise publisher.timeout_s if the machine is slow, else read the log of {room}.",
            ) from None  # fmt: skip
        return 0 if moved is None else int(moved.num_bytes)

    async def _undo(self, why: str, error: BaseException, push: Push) -> BaseException:
        """Undo what had begun; returns what is to be raised. A cancellation meanwhile does not cut it short, and is not lost."""
        owner, phase = self.lease.owner, self.lease.phase
        undos = self.lease.fail_nowait(why)
        self._on_event("handover failed", {"phase": phase, "why": why})
        left, cancelled = await uncut(self._undo_calls(undos, push))
        if left:
            self._on_event("lease broken", {"why": left})
        else:
            self._on_event("handover undone", {"back to": self.lease.state})
        outcome = f"the lease is broken: {left}" if left else f"undone, the devices belong to the {owner or 'start'} as before"
        if cancelled is not None or isinstance(error, asyncio.CancelledError):
            return cancelled or error
        if not isinstance(error, AsyncrlError):
            error.add_note(f"in a handover, while {phase!r}; {outcome}")
            return error
        failed = RoomError(
            "placement", f"handing over failed while {phase!r}: {why}; {outcome}",
            rule=error.rule, way_out=error.way_out or "read the logs of the trainer and the engines.",
        )  # fmt: skip
        failed.__cause__ = error
        return failed

    async def _undo_calls(self, undos: Sequence[Undo], push: Push) -> str:
        """Make the calls, one after the other; '' if all were done, else why the lease is broken.

        Stops there: what is still to be woken might have no room.
        """
        for undo in undos:
            _, error = await self._call(undo.call, push)
            if error is not None:
                return self.lease.undo_failed_nowait(undo, _shown(error))
        self.lease.undone_nowait(asyncio.get_running_loop().time())
        return ""


async def _no_push() -> None:
    """The start brings no weights to the engines."""


def _not_ours(error: BaseException) -> BaseException:
    """A call that somebody else cancelled has failed: it is not for us to end as if we had been cancelled."""
    return RoomError("placement", "a call was cancelled from outside") if isinstance(error, asyncio.CancelledError) else error


def _shown(error: BaseException) -> str:
    return error.what if isinstance(error, AsyncrlError) else f"{type(error).__name__}: {error}"
