"""Controller end of transport nccl."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from asyncrl.base.errors import (
    ComponentError,
    EngineError,
    TrainerError,
    TrainerLost,
    WeightsLost,
)
from asyncrl.messages.engine_api import GroupMember
from asyncrl.messages.trainer_api import BroadcastRequest

MIN_STEP_S = 60.0
STEP_FRACTION = 0.1
"""Fraction of weight_sync.timeout_s for forming a group and per buffer."""
Send = Callable[[BroadcastRequest], Awaitable[object]]
Take = Callable[[GroupMember], Awaitable[None]]
_FAILS_ALL = (
    "weights are sent once, to all engines; an early failure ends the broadcast for all"
)


@dataclass
class Broadcast:
    """A broadcast; the first of `ranks` asks the trainer to send. `outcome`: sent, or
    the first failure.
    """

    version: int
    ranks: dict[str, GroupMember]
    sender: GroupMember
    outcome: asyncio.Future[None]

    def fail_nowait(self, error: ComponentError) -> None:
        """End the round for all members, unless everything was sent."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            # retrieved: a failed round may have no member left
            self.outcome.exception()

    def failure(self, name: str) -> ComponentError:
        """WeightsLost if the trainer was lost: a new one has other weights to send."""
        why = self.outcome.exception()
        kind = WeightsLost if isinstance(why, TrainerLost) else EngineError
        what = f"was to be sent policy_version {self.version}: {why}"
        return kind(
            name,
            what,
            rule=_FAILS_ALL,
            way_out="read the logs of the engine and the trainer.",
        )


class BroadcastGroup:
    """Collects the engines of a broadcast; the trainer sends once all of them wait.

    Life: per version: engines are expected as they prepare -> each waits in receive(),
        or leaves -> the trainer sends -> all have the version, or it failed.
    Waits: receive sleeps for the trainer, all members, and its workers, at most
        weight_sync.timeout_s.
    Invariant: none joins later, so trainer and workers make the same calls.
    """

    def __init__(
        self,
        send: Send,
        folder: Path,
        *,
        timeout_s: float,
        store: Callable[[], str] = str,
        wait_up: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0),
    ) -> None:
        """`send` raises TrainerError; `wait_up` returns once the trainer can send.
        `folder`: of the group's file. `store`: ADDRESS:PORT of the trainer instead, for
        several nodes.
        """
        self._send_all, self._folder = send, folder
        # Shorter than the push's own limit, so a member that died in a broadcast fails
        # the round for the others before the push gives them up as well.
        self._timeout_s = min(timeout_s, max(MIN_STEP_S, STEP_FRACTION * timeout_s))
        self._store, self._wait_up = store, wait_up
        self._version = -1
        self._expected: dict[str, int] = {}
        self._here: dict[str, asyncio.Future[Broadcast]] = {}
        self._last: Broadcast | None = None
        """Its group is whole, and is used again by the same members."""

    def expect_nowait(self, name: str, version: int, num_workers: int) -> None:
        """Wait for this engine before `version` is sent."""
        if version != self._version:
            # A push of a new version starts from nothing: engines that prepared an
            # older one must prepare again.
            self._version, self._expected, self._here = version, {}, {}
        self._expected[name] = num_workers

    def leave_nowait(self, name: str) -> None:
        """Expect this lost or restarted engine no more. Idempotent."""
        self._expected.pop(name, None)
        begun = self._here.pop(name, None)
        if begun is not None and not begun.done():
            what = f"left before policy_version {self._version} was sent"
            begun.set_exception(
                EngineError(
                    name, what, rule="weights go only to engines that take part"
                )
            )
        # A successor is another process: the group of the old one cannot be used again.
        if self._last is not None and name in self._last.ranks:
            self._last = None
        # It may have been the last one that the others were waiting for.
        self._begin_nowait()

    def sender_gone_nowait(self) -> None:
        """Form a new group next time: the trainer is another process."""
        self._last = None

    async def receive(self, name: str, version: int, take: Take) -> None:
        """Have `take` join and receive for this engine. Raises EngineError,
        WeightsLost, and errors of wait_up.
        """
        # Before the check: a new version may be announced while the trainer restarts.
        await self._wait_up()
        if version != self._version or name not in self._expected:
            what = f"is to receive policy_version {version}, and it did not prepare it"
            raise EngineError(
                name, what, rule="an engine prepares a version before it receives it"
            )
        begins = self._here[name] = asyncio.get_running_loop().create_future()
        self._begin_nowait()
        try:
            await self._take_part(await begins, name, take)
        except BaseException as error:
            if begins.cancelled():
                # Cancelled before the round began, by a limit or a lost process. The
                # others must not wait for it.
                self.leave_nowait(name)
            # The round had begun: all members are in one sequence of collective calls,
            # which no member can finish by itself. An exception in `begins` means that it
            # had not.
            elif begins.exception() is None:
                begun = begins.result()
                # After a failed call the group's members may be at different calls.
                if self._last is begun:
                    self._last = None
                why = (
                    "is gone"
                    if isinstance(error, asyncio.CancelledError)
                    else f"failed: {error}"
                )
                begun.fail_nowait(ComponentError(name, why))
            raise

    def _begin_nowait(self) -> None:
        if not self._expected or self._here.keys() != self._expected.keys():
            return
        # Sorted, so that the same engines get the same ranks again: a group that is
        # whole is used for the next version, without connecting.
        sizes = dict(sorted(self._expected.items()))
        size = 1 + sum(sizes.values())
        last = self._last
        is_kept = (
            last is not None and [*last.ranks] == [*sizes] and last.sender.size == size
        )
        sender = GroupMember(
            # A path is used for one group only. A member that is late for an old group
            # then waits there, not in the new one.
            path=last.sender.path
            if last and is_kept
            else str(self._folder / f"group-{uuid.uuid4().hex}"),
            store=self._store(),
            is_new=not is_kept,
            size=size,
            rank=0,
            timeout_s=self._timeout_s,
        )
        # Rank 0 is the trainer. An engine has a rank per worker: the first one here,
        # and its workers add their own number.
        firsts = accumulate(sizes.values(), initial=1)
        ranks = {
            name: sender.model_copy(update={"rank": rank})
            for name, rank in zip(sizes, firsts, strict=False)
        }
        outcome = asyncio.get_running_loop().create_future()
        self._last = Broadcast(self._version, ranks, sender, outcome)
        for begins in self._here.values():
            begins.set_result(self._last)
        # Who comes now is in another round: members are fixed from here on.
        self._expected, self._here = {}, {}

    async def _take_part(self, begun: Broadcast, name: str, take: Take) -> None:
        """Take part until all are sent, or one has failed."""
        parts = [asyncio.ensure_future(take(begun.ranks[name]))]
        # Exactly one member asks the trainer. A separate task would outlive the push
        # that needs the answer.
        if name == next(iter(begun.ranks)):
            parts.append(asyncio.ensure_future(self._send(begun)))
        try:
            await asyncio.wait(
                [begun.outcome, *parts], return_when=asyncio.FIRST_EXCEPTION
            )
            # The own error before the round's: it names what happened here.
            for part in parts:
                if part.done():
                    part.result()
            if begun.outcome.exception() is not None:
                raise begun.failure(name)
        finally:
            for part in parts:
                # Also the other part: nothing of a round may outlive its push.
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _send(self, begun: Broadcast) -> None:
        try:
            await self._send_all(
                BroadcastRequest(version=begun.version, member=begun.sender)
            )
        except TrainerError as error:
            begun.fail_nowait(error)
        else:
            # A member may have failed while the last buffers were sent.
            if not begun.outcome.done():
                begun.outcome.set_result(None)
