"""Lease of the devices that colocated trainer and engines time-share.

Calls of a handover, with their undo calls:

to the trainer:
1 engines sleep (undo: the steps to the engines below, with their version)
2 trainer onloads (undo: offload the optimizer)

to the engines:
1 trainer offloads gradients and optimizer (undo: onload the optimizer)
2 engines wake weights (undo: sleep weights)
3 push weights chunk by chunk, digest checked (undone with 2)
4 trainer offloads weights (undo: onload them)
5 engines wake kv (undo: sleep both; push the weights again)

The first turn is the engines', with a push: they lost their weights in their first sleep. A device holds at
most the engines' memory, the trainer's state, or the weights twice. If both sides are resident, a handover is
a pause or a push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from asyncrl.base.errors import AsyncrlError, RoomError
from asyncrl.base.waits import note_span, uncut, waiting, within
from asyncrl.messages.engine_api import TransferStats

Side = Literal["engines", "trainer"]
State = Literal["idle", "generating", "training", "handover", "broken"]
RESTING: dict[Side, State] = {"engines": "generating", "trainer": "training"}


@dataclass(frozen=True, slots=True)
class Call:
    """A repeatable call to engines or trainer, or a push."""

    of: Literal["engines", "trainer", "publisher"]
    verb: Literal["sleep", "wake", "offload", "onload", "push"]
    parts: tuple[Any, ...] = ("weights",)

    def __str__(self) -> str:
        return f"{self.of}: {self.verb} {' and '.join(self.parts)}"


Phase: TypeAlias = tuple[Call, tuple[Call, ...]]
"""A call, and its undo calls in order."""

SLEEP, PUSH = Call("engines", "sleep", ("kv", "weights")), Call("publisher", "push")
WAKE_WEIGHTS, WAKE_KV = Call("engines", "wake"), Call("engines", "wake", ("kv",))
ONLOAD_WEIGHTS, OFFLOAD_WEIGHTS = Call("trainer", "onload"), Call("trainer", "offload")
OFFLOAD_REST = Call("trainer", "offload", ("gradients", "optimizer"))
BACK_TO_ENGINES = (SLEEP, ONLOAD_WEIGHTS, WAKE_WEIGHTS, PUSH, OFFLOAD_WEIGHTS, WAKE_KV)
"""Sleeping engines lose their weights."""

TURNS: dict[Side, tuple[Phase, ...]] = {
    "trainer": (
        (SLEEP, BACK_TO_ENGINES),
        (Call("trainer", "onload", ("weights", "optimizer")), (OFFLOAD_REST,)),
    ),
    "engines": (
        (OFFLOAD_REST, (Call("trainer", "onload", ("optimizer",)),)),
        (WAKE_WEIGHTS, (Call("engines", "sleep"),)),
        (PUSH, ()),
        (OFFLOAD_WEIGHTS, (ONLOAD_WEIGHTS,)),
        (WAKE_KV, (SLEEP,)),
    ),
}
FIRST: dict[Side, tuple[Phase, ...]] = {
    "engines": tuple((call, ()) for call in (OFFLOAD_REST, *BACK_TO_ENGINES)),
    "trainer": tuple((call, ()) for call, _ in TURNS["trainer"]),
}


def resident_turns(turns: Mapping[Side, Sequence[Phase]]) -> dict[Side, tuple[Phase, ...]]:
    return {
        side: tuple(
            (call, tuple(undo for undo in undoing if undo.of != "trainer"))
            for call, undoing in phases
            if call.of != "trainer"
        )
        for side, phases in turns.items()
    }


class Lease:
    """Turns of trainer and engines on shared devices.

    Life: idle -> handover -> generating or training -> handover -> ...; a failed undo breaks the lease.
    Waits: hand_to and undo wait timeout_s at most per call; cancellation does not interrupt an undo.
    Invariant: one owner after the first turn, unless broken; the other side has released its memory.
    """

    def __init__(
        self,
        calls: Callable[[Call], Mapping[str, Awaitable[TransferStats]]],
        *,
        timeout_s: float,
        on_event: Callable[[str, Mapping[str, Any]], None],
        resident: bool = False,
    ) -> None:
        """`calls` begins a call and returns pending answers by process name."""
        self._first = resident_turns(FIRST) if resident else FIRST
        self._turns = resident_turns(TURNS) if resident else TURNS
        self._calls, self._timeout_s, self._on_event = calls, timeout_s, on_event
        self.state: State = "idle"
        self.owner: Side | None = None
        self.phase = ""
        self.broken = ""
        self.num_handovers = 0

    def __repr__(self) -> str:
        return f"<Lease {self.state}{f': {self.phase}' if self.phase else ''}, owner {self.owner}>"

    async def hand_to(self, to: Side) -> TransferStats:
        """Return bytes freed, taken or moved. Raises RoomError; the owner then keeps the devices."""
        if self.state in ("handover", "broken") or self.owner == to:
            why = f"{self!r}; {self.broken}" if self.broken else repr(self)
            raise RoomError("placement", f"a handover to the {to} cannot begin ({why})")
        clock = asyncio.get_running_loop().time
        phases = (self._first if self.owner is None else self._turns)[to]
        began_s, total_bytes = clock(), 0
        self._on_event("handover", {"from": self.state, "to": to})
        self.state = "handover"
        for number, (call, _) in enumerate(phases, start=1):
            self.phase, phase_began_s = str(call), clock()
            try:
                num_bytes, error = await self._make(call)
            except asyncio.CancelledError as cancelled:
                raise await self._undo(phases[:number], "it was cancelled", cancelled) from None
            if error is not None:
                raise await self._undo(phases[:number], _shown(error), error)
            total_bytes += num_bytes
            detail = {"phase": self.phase, "seconds": clock() - phase_began_s, "num_bytes": num_bytes}
            note_span("handovers", f"to {to}", phase_began_s, clock(), text=self.phase)
            self.phase = ""
            self._on_event("handover phase", detail)
        self.state, self.owner = RESTING[to], to
        self.num_handovers += 1
        moved = TransferStats(num_bytes=total_bytes, seconds=clock() - began_s)
        self._on_event("handed over", {"to": to, "seconds": moved.seconds})
        return moved

    async def _make(self, call: Call) -> tuple[int, BaseException | None]:
        """Return (total bytes, first error)."""
        works = [self._one(name, call.verb, work) for name, work in self._calls(call).items()]
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if isinstance(error, asyncio.CancelledError):
            error = RoomError("placement", "a call was cancelled from outside")
        return sum(outcome for outcome in outcomes if isinstance(outcome, int)), error

    async def _one(self, name: str, verb: str, work: Awaitable[TransferStats]) -> int:
        late = RoomError(
            name,
            f"{verb} was not done within weight_sync.timeout_s={self._timeout_s} s",
            way_out=f"raise weight_sync.timeout_s if the machine is slow, else read the log of {name}.",
        )
        with waiting(f"{verb} of {name}", on=name, who="handover"):
            async with within(self._timeout_s, lambda: late):
                return (await work).num_bytes

    async def _undo(self, begun: Sequence[Phase], why: str, error: BaseException) -> BaseException:
        """Undo all calls despite cancellation; return the error to raise."""
        phase = self.phase
        self._on_event("handover failed", {"phase": phase, "why": why})
        _, cancelled = await uncut(self._undo_calls(begun, why))
        if self.broken:
            self._on_event("lease broken", {"why": self.broken})
            outcome = f"the lease is broken: {self.broken}"
        else:
            self._on_event("handover undone", {"back to": self.state})
            outcome = f"undone, the devices belong to the {self.owner or 'start'} as before"
        if cancelled is not None or isinstance(error, asyncio.CancelledError):
            return cancelled or error
        if not isinstance(error, AsyncrlError):
            error.add_note(f"in a handover, while {phase!r}; {outcome}")
            return error
        what = f"handing over failed while {phase!r}: {why}; {outcome}"
        way_out = error.way_out or "read the logs of the trainer and the engines."
        failed = RoomError("placement", what, rule=error.rule, way_out=way_out)
        failed.__cause__ = error
        return failed

    async def _undo_calls(self, begun: Sequence[Phase], why: str) -> None:
        """A failure breaks the lease and skips the rest."""
        for undone, calls in reversed(begun):
            for call in calls:
                _, error = await self._make(call)
                if error is not None:
                    undo = f"so did undoing {str(undone)!r} ({_shown(error)})"
                    self.broken = f"{self.phase!r} failed ({why}), and {undo}"
                    self.state, self.owner, self.phase = "broken", None, ""
                    return
        self.state, self.phase = "idle" if self.owner is None else RESTING[self.owner], ""


def _shown(error: BaseException) -> str:
    return error.what if isinstance(error, AsyncrlError) else f"{type(error).__name__}: {error}"
