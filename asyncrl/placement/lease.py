"""Whose turn it is on devices that trainer and engines share. Pure: is told the time and what happened; calls
nobody.

A turn goes  generating -> handover -> training -> handover -> generating. What a handover does, and what
undoes it, is data here:

    to the trainer    1 engines sleep               (undo: the way to the engines below, with the version that
    they served)
                      2 trainer onloads             (undo: offload the optimizer)
    to the engines    1 trainer offloads the rest   gradients and optimizer (undo: onload the optimizer)
                      2 engines wake weights        (undo: sleep weights)
                      3 push weights                trainer -> engines, chunk by chunk, digest checked (undone
                      with 2) 4 trainer offloads weights    (undo: onload them)
                      5 engines wake kv             (undo: sleep kv)

So a device holds the engines' weights and KV cache, or the trainer's state, or the weights twice: the largest
of the three, not the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import AsyncrlError, RoomError
from asyncrl.messages.base import EnginePart, Moved, TrainerPart
from asyncrl.messages.protocols import OffloadingTrainer, SleepingEngine
from asyncrl.waits import TimeLimit, uncut

Side = Literal["engines", "trainer"]
State = Literal["idle", "generating", "training", "handover", "broken"]
RESTING: dict[Side, State] = {"engines": "generating", "trainer": "training"}


@dataclass(frozen=True, slots=True)
class EngineCall:
    """POST /sleep or /wake of every engine. `restore`: weights that wake are read again, where they never
    served another version.
    """

    verb: Literal["sleep", "wake"]
    parts: tuple[EnginePart, ...]
    restore: bool = False


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """POST /offload or /onload of the trainer."""

    verb: Literal["offload", "onload"]
    parts: tuple[TrainerPart, ...]


@dataclass(frozen=True, slots=True)
class PushCall:
    """The trainer's weights go into the weights of every engine, which are awake and empty: whoever hands
    over brings the function.
    """


Call = EngineCall | TrainerCall | PushCall


@dataclass(frozen=True, slots=True)
class Phase:
    """A named part of a handover: one call, and the calls that undo it, in their order. Every call may be
    made twice.
    """

    name: str
    call: Call
    undo: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Undo:
    """A call that is to be made because its phase had begun when the handover failed."""

    phase: str
    call: Call


BACK_TO_ENGINES: tuple[Call, ...] = (
    EngineCall(
        "sleep", ("kv", "weights")
    ),  # those that did not, or not wholly: a push goes into empty weights
    TrainerCall("onload", ("weights",)),
    EngineCall("wake", ("weights",)),
    PushCall(),
    TrainerCall("offload", ("weights",)),
    EngineCall("wake", ("kv",)),
)
"""An engine cannot read again what came to it chunk by chunk: the trainer, which still has that version,
brings it once more.
"""

TO_TRAINER = (
    Phase("engines sleep", EngineCall("sleep", ("kv", "weights")), BACK_TO_ENGINES),
    Phase(
        "trainer onloads",
        TrainerCall("onload", ("weights", "optimizer")),
        (TrainerCall("offload", ("gradients", "optimizer")),),
    ),
)
TO_ENGINES = (
    Phase(
        "trainer offloads gradients and optimizer",
        TrainerCall("offload", ("gradients", "optimizer")),
        (TrainerCall("onload", ("optimizer",)),),
    ),
    Phase("engines wake weights", EngineCall("wake", ("weights",)), (EngineCall("sleep", ("weights",)),)),
    Phase("push weights", PushCall(), ()),
    Phase(
        "trainer offloads weights",
        TrainerCall("offload", ("weights",)),
        (TrainerCall("onload", ("weights",)),),
    ),
    Phase("engines wake kv", EngineCall("wake", ("kv",)), (EngineCall("sleep", ("kv",)),)),
)
FIRST: dict[Side, tuple[Phase, ...]] = {
    "engines": (
        Phase(
            "trainer offloads everything", TrainerCall("offload", ("weights", "gradients", "optimizer")), ()
        ),
        Phase("engines wake weights", EngineCall("wake", ("weights",), restore=True), ()),
        Phase("engines wake kv", EngineCall("wake", ("kv",)), ()),
    ),
    "trainer": tuple(Phase(phase.name, phase.call, ()) for phase in TO_TRAINER),
}
"""The start of a run, where nobody had a turn: there is nothing to go back to, and it may be begun again."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """How long a phase took, and how many bytes it freed, took or moved."""

    name: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """One handover that is over. `failed`: the phase that failed, after which everything was undone; '' if
    none did.
    """

    to: Side
    phases: tuple[PhaseTime, ...]
    seconds: float
    failed: str = ""


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Where the lease is, how many handovers there were, and the seconds of all of them."""

    state: State
    owner: Side | None
    phase: str
    num_handovers: int
    num_failed: int
    handover_s: float


class Lease:
    """The turns of trainer and engines on shared devices. Knows phases and seconds; knows no device and no
    message.

    Life:       idle -> handover -> generating or training -> handover -> the other one -> ... In a handover:
    begin_nowait, then for each
                phase begin_phase_nowait and finish_phase_nowait, then finish_nowait. If one fails:
                fail_nowait says what to undo, undone_nowait returns the lease to where it came from;
                undo_failed_nowait leaves it broken, for good.
    Invariant:  at most one owner, and exactly one from the first turn on, unless broken: finish_nowait alone
    changes it, once every phase
                is done. A handover that fails changes nothing.
    """

    def __init__(self) -> None:
        self.state: State = "idle"
        self.owner: Side | None = None
        self.broken: str = ""
        """Which phase failed, and which undo of which phase after it; '' unless broken."""
        self._to: Side = "engines"
        self._phases: tuple[Phase, ...] = ()
        self._num_begun = 0
        self._failed = ""
        self._why = ""
        self._began_s = self._phase_began_s = 0.0
        self._times: list[PhaseTime] = []
        self._num_handovers = self._num_failed = 0
        self._handover_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<Lease {self.state}{f' to {self._to}: {self.phase}' if self.state == 'handover' else ''}, "
            f"owner {self.owner}>"
        )

    @property
    def phase(self) -> str:
        """Name of the phase in hand, '' outside a handover and between phases."""
        if self.state != "handover" or len(self._times) == self._num_begun:
            return ""
        return self._phases[self._num_begun - 1].name

    def stats(self) -> LeaseStats:
        """The numbers so far."""
        return LeaseStats(
            self.state, self.owner, self.phase, self._num_handovers, self._num_failed, self._handover_s
        )

    def begin_nowait(self, to: Side, now_s: float) -> None:
        """The handover to this side begins. Raises RoomError if it has its turn already, or the lease is busy
        or broken.
        """
        if self.state in ("handover", "broken") or self.owner == to:
            raise self._misuse(f"a handover to the {to} cannot begin")
        self._phases = FIRST[to] if self.owner is None else TO_TRAINER if to == "trainer" else TO_ENGINES
        self.state, self._to, self._num_begun, self._failed = "handover", to, 0, ""
        self._began_s, self._times = now_s, []

    def begin_phase_nowait(self, now_s: float) -> Phase | None:
        """The phase to be done now, None if all are done."""
        self._expect(is_in_phase=False)
        if self._num_begun == len(self._phases):
            return None
        self._num_begun += 1
        self._phase_began_s = now_s
        return self._phases[self._num_begun - 1]

    def finish_phase_nowait(self, now_s: float, num_bytes: int = 0) -> PhaseTime:
        """The phase in hand is done."""
        self._expect(is_in_phase=True)
        self._times.append(
            PhaseTime(self._phases[self._num_begun - 1].name, now_s - self._phase_began_s, num_bytes)
        )
        return self._times[-1]

    def finish_nowait(self, now_s: float) -> HandoverReport:
        """All phases are done: the other side is the owner."""
        self._expect(is_in_phase=False)
        if self._num_begun < len(self._phases):
            raise self._misuse(f"the handover cannot be over before {self._phases[self._num_begun].name}")
        self._num_handovers += 1
        self.state, self.owner = RESTING[self._to], self._to
        return self._report(now_s)

    def fail_nowait(self, why: str) -> tuple[Undo, ...]:
        """The phase in hand failed, or was left: what to call, in this order. What had begun is undone, done
        or not.
        """
        self._expect(is_in_phase=True)
        self._failed, self._why = self.phase, why
        return tuple(
            Undo(phase.name, call)
            for phase in reversed(self._phases[: self._num_begun])
            for call in phase.undo
        )

    def undone_nowait(self, now_s: float) -> HandoverReport:
        """Everything was undone: the lease is where the handover began."""
        self._expect_failed()
        self._num_failed += 1
        self.state = "idle" if self.owner is None else RESTING[self.owner]
        return self._report(now_s)

    def undo_failed_nowait(self, undo: Undo, why: str) -> str:
        """An undo failed too: nobody can say what the device holds. Returns what is then in `broken`."""
        self._expect_failed()
        self.broken = f"{self._failed!r} failed ({self._why}), and so did undoing {undo.phase!r} ({why})"
        self.state, self.owner = "broken", None
        return self.broken

    def _report(self, now_s: float) -> HandoverReport:
        self._handover_s += now_s - self._began_s
        return HandoverReport(self._to, tuple(self._times), now_s - self._began_s, self._failed)

    def _expect(self, *, is_in_phase: bool) -> None:
        if self.state != "handover" or self._failed or (self._num_begun > len(self._times)) != is_in_phase:
            raise self._misuse("this is not its time")

    def _expect_failed(self) -> None:
        if self.state != "handover" or not self._failed:
            raise self._misuse("nothing is being undone")

    def _misuse(self, what: str) -> RoomError:
        return RoomError(
            "placement",
            f"{what} ({self!r}{f'; {self.broken}' if self.broken else ''})",
            rule="one side at a time has the device",
        )


# Hands shared devices from one side to the other: makes the calls that the lease names, in time, and undoes
# them if one fails.


Push = Callable[[], Awaitable[Moved | None]]
"""Brings the trainer's weights to all engines; may say what moved."""
Tell = Callable[[str, Mapping[str, Any]], None]

ROUTINE = frozenset({"handover", "handover phase", "handed over"})
"""Events of every step. All others tell of something that went wrong."""


class HandOver:
    """Drives the lease: engines and trainer do what its phases say. Knows no weights; a push is a function
    that it is given.

    Life:       made -> start(side) -> to_training(push) and to_generating(push) in turn. One handover at a
    time. `push` brings the
                trainer's weights to all engines, whose weights are awake and empty; to_training needs it to
                undo itself.
    Waits:      for the calls of a phase, timeout_s at most each; all engines at once. An undo is bounded the
    same way, and is not cut
                short by a cancellation: that passes once what had begun is undone.
    Invariant:  when a call of this class returns or raises, the side that owns the lease has what it needs
    and the other has given it
                away; or the lease is broken, and the error and the event say what was left.
    """

    def __init__(
        self,
        lease: Lease,
        engines: Sequence[SleepingEngine],
        trainer: OffloadingTrainer,
        *,
        timeout_s: float,
        on_event: Tell,
    ) -> None:
        self.lease, self._engines, self._trainer = lease, tuple(engines), trainer
        self._timeout_s, self._on_event = timeout_s, on_event

    def __repr__(self) -> str:
        return f"<HandOver {self.lease!r}, {len(self._engines)} engines>"

    async def start(self, side: Side) -> HandoverReport:
        """The first turn. For the engines: with the weights that they have; for the trainer, whose weights
        are pushed later.
        """
        return await self._hand(side, _no_push)

    async def to_training(self, push: Push) -> HandoverReport:
        """The engines sleep, the trainer has the devices. Raises RoomError, after which the engines have them
        still.

        Then `push` has brought them the version again that they served: the trainer has not gone on from it.
        """
        return await self._hand("trainer", push)

    async def to_generating(self, push: Push) -> HandoverReport:
        """The trainer moves out, `push` brings its weights to the engines. Raises RoomError, after which the
        trainer has them still.
        """
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
            self._on_event(
                "handover phase", {"phase": time.name, "seconds": time.seconds, "num_bytes": time.num_bytes}
            )
        report = self.lease.finish_nowait(clock())
        self._on_event("handed over", {"to": to, "seconds": report.seconds})
        return report

    async def _call(self, call: Call, push: Push) -> tuple[int, BaseException | None]:
        """Bytes of the call on all it is made on, and the first error. Returns once none of them is under way
        any more.
        """
        match call:
            case EngineCall("sleep", parts, _):
                calls = [self._one(engine.name, "sleep", engine.sleep(parts)) for engine in self._engines]
            case EngineCall(_, parts, restore):
                calls = [
                    self._one(engine.name, "wake", engine.wake(parts, restore=restore))
                    for engine in self._engines
                ]
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
                room,
                f"{verb} was not done within {self._timeout_s} s",
                rule=f"publisher.timeout_s={self._timeout_s} is the limit",
                way_out=f"raise publisher.timeout_s if the machine is slow, else read the log of {room}.",
            ) from None
        return 0 if moved is None else int(moved.num_bytes)

    async def _undo(self, why: str, error: BaseException, push: Push) -> BaseException:
        """Undo what had begun; returns what is to be raised. A cancellation meanwhile does not cut it short,
        and is not lost.
        """
        owner, phase = self.lease.owner, self.lease.phase
        undos = self.lease.fail_nowait(why)
        self._on_event("handover failed", {"phase": phase, "why": why})
        left, cancelled = await uncut(self._undo_calls(undos, push))
        if left:
            self._on_event("lease broken", {"why": left})
        else:
            self._on_event("handover undone", {"back to": self.lease.state})
        outcome = (
            f"the lease is broken: {left}"
            if left
            else f"undone, the devices belong to the {owner or 'start'} as before"
        )
        if cancelled is not None or isinstance(error, asyncio.CancelledError):
            return cancelled or error
        if not isinstance(error, AsyncrlError):
            error.add_note(f"in a handover, while {phase!r}; {outcome}")
            return error
        failed = RoomError(
            "placement",
            f"handing over failed while {phase!r}: {why}; {outcome}",
            rule=error.rule,
            way_out=error.way_out or "read the logs of the trainer and the engines.",
        )
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
    return (
        RoomError("placement", "a call was cancelled from outside")
        if isinstance(error, asyncio.CancelledError)
        else error
    )


def _shown(error: BaseException) -> str:
    return error.what if isinstance(error, AsyncrlError) else f"{type(error).__name__}: {error}"
