"""Lease of the devices that colocated trainer and engines time-share. Servers that score
rollouts on the trainer's devices belong to the engines' side.

Every call can be repeated. A failed handover is undone by the calls that bring the
owner back. Engines lose their weights when they sleep, so their way back has a push. A
device holds at most the engines' memory, the trainer's state, or the weights twice. If
both sides are resident, a handover is a pause or a push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from asyncrl.base.errors import AsyncrlError, ComponentError
from asyncrl.base.waits import clock, note_span, shielded, waiting
from asyncrl.engines.role_client import CALL_TIMEOUT_S
from asyncrl.messages.engine_api import TransferStats

Side = Literal["engines", "trainer"]


class LeaseState(StrEnum):
    IDLE = "idle"
    GENERATING = "generating"
    TRAINING = "training"
    HANDOVER = "handover"
    BROKEN = "broken"


RESTING: dict[Side | None, LeaseState] = {
    None: LeaseState.IDLE,
    "engines": LeaseState.GENERATING,
    "trainer": LeaseState.TRAINING,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A repeatable call to engines or trainer, or a push."""

    of: Literal["engines", "servers", "trainer", "publisher"]
    verb: Literal["sleep", "wake", "offload", "onload", "push"]
    parts: tuple[Any, ...] = ("weights",)

    def __str__(self) -> str:
        parts = " and ".join(self.parts)
        return f"{self.of}: {self.verb} {parts}"


SLEEP = Call("engines", "sleep", ("kv", "weights"))
SLEEP_SERVERS = Call("servers", "sleep")
OFFLOAD_REST = Call("trainer", "offload", ("gradients", "optimizer"))
TO_TRAINER = (
    SLEEP,
    SLEEP_SERVERS,
    Call("trainer", "onload", ("weights", "optimizer")),
)
# The order bounds the memory. Engines get their weights' memory first, because a push
# writes into it. The trainer's weights must still be on the device to be sent. Only
# then do they leave, and the KV cache and the servers take their place.
SERVE_AGAIN = (
    Call("engines", "wake"),
    Call("publisher", "push"),
    Call("trainer", "offload"),
    Call("engines", "wake", ("kv",)),
    Call("servers", "wake"),
)
# Gradients and optimizer leave before the engines wake: the device holds the weights
# twice, and nothing else.
TO_ENGINES = (OFFLOAD_REST, *SERVE_AGAIN)
"""From the trainer, which has its weights on the devices."""
WAY: dict[Side, tuple[Call, ...]] = {
    "trainer": TO_TRAINER,
    # SLEEP even if the engines are awake: a handover may have failed after some of them
    # woke or got new weights, and asleep all are in one state. The trainer then needs
    # its weights on the device to send them.
    "engines": (
        OFFLOAD_REST,
        SLEEP,
        SLEEP_SERVERS,
        Call("trainer", "onload"),
        *SERVE_AGAIN,
    ),
}
"""From any state."""


@dataclass(eq=False, repr=False, kw_only=True)
class Lease:
    """Time slices of trainer and engines on shared devices.

    Example: the engines own the devices, and a handover to the trainer fails in its
        second call.

        call                                      device holds         state
                                                  engines              generating
        hand_to("trainer")
          engines: sleep kv and weights           nothing              handover
          trainer: onload weights and optimizer   raises ComponentError     handover
        undo, by WAY["engines"]
          trainer: offload gradients, optimizer   nothing was moved    handover
          engines: sleep kv and weights           they sleep already   handover
          trainer: onload weights                 trainer's weights    handover
          engines: wake weights                   both, once each      handover
          publisher: push                         both, equal          handover
          trainer: offload weights                engines              handover
          engines: wake kv                        engines              generating
        hand_to raises the ComponentError; owner is "engines", as before.

    If a call of the undo fails too, the state is "broken" and nobody owns the devices.

    Life: idle -> handover -> generating or training -> handover -> ...; a failed undo
        breaks the lease.
    Waits: hand_to and undo wait timeout_s at most per call, apart from restarts of the
        trainer; cancellation does not interrupt an undo.
    Invariant: one owner after the first handover, unless broken; the other side has
        released its memory.
    """

    calls: Callable[[Call], Mapping[str, Awaitable[TransferStats]]]
    """Begins a call and returns pending answers by process name."""
    timeout_s: float
    on_change: Callable[[], None]
    """Called after a change of the state."""
    without: Collection[str] = ()
    """Whose calls are omitted, such as a resident trainer's."""
    wait_up: Callable[[], Awaitable[int]] | None = None
    """Returns once the trainer is up, with its number of restarts; None: it never
    restarts.
    """
    owner: Side | None = field(default=None, init=False)
    state = LeaseState.IDLE
    since_s = 0.0
    """Start of the owner's time slice, on the loop's clock."""
    phase = ""
    broken = ""
    failed = ""
    """Why the last handover failed; empty after a success."""
    num_handovers = 0
    num_phases = 0

    def __repr__(self) -> str:
        phase = f": {self.phase}" if self.phase else ""
        return f"<Lease {self.state}{phase}, owner {self.owner}>"

    async def hand_to(self, to: Side) -> TransferStats:
        """Return bytes freed, taken or moved. Raises ComponentError; the owner then
        keeps the devices.
        """
        if self.state in (LeaseState.HANDOVER, LeaseState.BROKEN) or self.owner == to:
            why = f"{self!r}; {self.broken}" if self.broken else repr(self)
            what = f"a handover to the {to} cannot begin ({why})"
            raise ComponentError("placement", what)
        began_s = clock()
        total_bytes = 0
        self.state = LeaseState.HANDOVER
        calls = WAY[to]
        if self.owner == "trainer":
            calls = TO_ENGINES  # the trainer has its weights on the devices already
        # One call after the other, never two at once: each relies on the memory that
        # the previous one has released.
        for call in self._kept(calls):
            phase_began_s = clock()
            self.phase = str(call)
            try:
                num_bytes, error = await self._make(call)
            # The server may still carry out the call that was cancelled here. The undo
            # repeats calls that may have been done, which is why every call must be
            # repeatable.
            except asyncio.CancelledError as cancelled:
                raise await self._undo("it was cancelled", cancelled) from None
            if error is not None:
                raise await self._undo(_shown(error), error)
            total_bytes += num_bytes
            now_s = clock()
            note_span("handovers", f"to {to}", phase_began_s, now_s, text=self.phase)
            self.phase = ""
            self.num_phases += 1
        self.owner = to
        self.since_s = clock()
        self.state = RESTING[to]
        self.failed = ""
        self.num_handovers += 1
        self.on_change()
        return TransferStats(num_bytes=total_bytes, seconds=clock() - began_s)

    def _kept(self, calls: Sequence[Call]) -> list[Call]:
        return [call for call in calls if call.of not in self.without]

    async def _make(self, call: Call) -> tuple[int, BaseException | None]:
        """Return (total bytes, first error)."""
        works = []
        for name, work in self.calls(call).items():
            works.append(self._one(name, call, work))
        # Wait for all answers, even after an error: the undo must not begin while an
        # engine still works on this call.
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        num_bytes = 0
        error: BaseException | None = None
        for outcome in outcomes:
            if isinstance(outcome, int):
                num_bytes += outcome
            elif error is None:
                error = outcome
        if isinstance(error, asyncio.CancelledError):
            # Only a cancellation of this handover may look like one. Unchanged, this
            # error would end the train loop's task without a message.
            error = ComponentError("placement", "a call was cancelled from outside")
        return num_bytes, error

    async def _one(self, name: str, call: Call, work: Awaitable[TransferStats]) -> int:
        working = asyncio.ensure_future(work)
        began_s = clock()
        num_restarts = 0
        last_restarts: int | None = None
        try:
            with waiting(f"{call.verb} of {name}", on=name, who="handover"):
                while not working.done():
                    # The call of a trainer that restarts is repeated, and a recovery
                    # may train for long on journaled batches. Only a trainer that was
                    # up all the time is late.
                    needs_trainer = call.of in ("trainer", "publisher")
                    if needs_trainer and self.wait_up is not None:
                        num_restarts = await self.wait_up()
                    if num_restarts == last_restarts:
                        raise self._late(name, call)
                    last_restarts = num_restarts
                    limit_s = self.timeout_s
                    # First the answers to sent calls come.
                    limit_s += CALL_TIMEOUT_S if call == SLEEP_SERVERS else 0.0
                    await asyncio.wait({working}, timeout=limit_s)
            num_bytes = working.result().num_bytes
            # The trainer's lane has its handovers as a whole, "weight sync" the pushes.
            if call.of in ("engines", "servers"):
                now_s = clock()
                parts = " and ".join(call.parts)
                note_span(name, call.verb, began_s, now_s, text=parts)
            return num_bytes
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _late(self, name: str, call: Call) -> ComponentError:
        return ComponentError(
            name,
            f"{call.verb} was not done within weight_sync.timeout_s={self.timeout_s} s",
            way_out=f"raise weight_sync.timeout_s if the machine is slow, else read the log of {name}.",
        )

    async def _undo(self, why: str, error: BaseException) -> BaseException:
        """Bring the owner back despite cancellation; return the error to raise."""
        phase = self.phase
        # Half undone, nobody could use the devices. Each of its calls has a limit, so
        # that a Ctrl-C waits for a bounded time.
        _, cancelled = await shielded(self._bring_back(why))
        self.on_change()
        outcome = f"undone, the devices belong to the {self.owner or 'start'} as before"
        if self.broken:
            outcome = f"the lease is broken: {self.broken}"
        self.failed = f"handing over failed while {phase!r}: {why}; {outcome}"
        if cancelled is not None or isinstance(error, asyncio.CancelledError):
            # A cancelled task must end with its CancelledError, or asyncio's timeouts
            # and groups lose count.
            return cancelled or error
        if not isinstance(error, AsyncrlError):
            error.add_note(f"in a handover, while {phase!r}; {outcome}")
            return error
        way_out = error.way_out or "read the logs of the trainer and the engines."
        failed = ComponentError(
            "placement",
            self.failed,
            rule=error.rule,
            way_out=way_out,
        )
        failed.__cause__ = error
        return failed

    async def _bring_back(self, why: str) -> None:
        """A failure breaks the lease and skips the rest."""
        # Before the first handover nobody owns the devices, so nothing is to be brought
        # back.
        calls = () if self.owner is None else WAY[self.owner]
        for call in self._kept(calls):
            _, error = await self._make(call)
            if error is not None:
                failed = f"{self.phase!r} failed ({why})"
                self.broken = f"{failed}, and so did {str(call)!r} ({_shown(error)})"
                self.owner = None
                break
        self.state = LeaseState.BROKEN if self.broken else RESTING[self.owner]
        self.phase = ""


def _shown(error: BaseException) -> str:
    if isinstance(error, AsyncrlError):
        return error.what
    return f"{type(error).__name__}: {error}"
