"""The trainer as the run sees it: when one of its processes dies, all are started again and brought to where
they were.

Knows processes and the trainer's client; where weights and batches come from, `recover` knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import SupervisionConfig
from asyncrl.errors import ConnectionShortage, RoomError, TrainerError, TrainerLost
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, Moved, TrainerPart
from asyncrl.messages.records import Batch, StepReport, WeightManifest
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.run.supervise import GRACE_S, Restartable, Restarts, backoff_s, heartbeat, in_short
from asyncrl.trainer.trainer_client import TrainerClient
from asyncrl.waits import waiting

T = TypeVar("T")
logger = logging.getLogger("asyncrl.run.supervise")


async def _at_once() -> None:
    """There is always room on devices of one's own."""


class LivingTrainer:
    """One trainer, of one process a rank, that survives them; a types.WeightSource.

    Life:       up -> lost: a process died, gave no answer for heartbeat_s, or broke a call -> all ranks are
    killed -> backoff, and
                wait_room: until engines that share its devices have gone -> new ones answer ->
                recover(version): checkpoint, and the journaled batches since -> what the old ones had
                offloaded is offloaded -> up. Calls that were lost are made again.
    Waits:      run sleeps until a process is lost; calls sleep while the trainer is not up, at most as long
    as restarts take: once run
                has given up, they raise what it raised.
    Invariant:  a batch is trained once on the way to each version: what was trained and lost with its process
    is trained again
                by recover, and a call goes on from the version that was answered last. More than max_restarts
                (see Restarts) end the run.
    """

    def __init__(
        self,
        client: TrainerClient,
        ranks: Sequence[Restartable],
        config: SupervisionConfig,
        *,
        heartbeat_s: float,
        before_start: Callable[[], None],
        recover: Callable[[int], Awaitable[None]],
        warn: Callable[[str], None],
        on_event: Callable[[str, Mapping[str, Any]], None],
        wait_room: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        self.client, self._ranks, self.config, self.heartbeat_s = client, tuple(ranks), config, heartbeat_s
        self._before_start, self._wait_room, self._recover, self._warn, self._on_event = (
            before_start,
            wait_room,
            recover,
            warn,
            on_event,
        )
        self.is_up, self._restarts = True, Restarts(config)
        self.is_starting = False
        """The old processes are ended, or new ones on their way, which has limits of its own. While
        batches are trained again they show their progress."""
        self._over: RoomError | None = None
        """Why there will be no trainer any more."""
        self._changed = asyncio.Event()
        self._offloaded = frozenset[TrainerPart]()
        self._report: TrainerLost | None = None
        self._reported = asyncio.Event()

    def __repr__(self) -> str:
        return f"<LivingTrainer {'up' if self.is_up else 'down'}, {self.num_restarts}/{self.config.max_restarts} restarts, {self.client!r}>"

    @property
    def num_restarts(self) -> int:
        """So far, those that failed included."""
        return self._restarts.num

    @property
    def policy_version(self) -> int:
        """Of the newest step that was answered."""
        return self.client.policy_version

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        return {
            "policy_version": self.policy_version,
            "trainer/restarts": self.num_restarts,
            "trainer/down": not self.is_up,
        }

    async def recover(
        self,
        state: Path | None,
        batches: Callable[[], AsyncIterator[Batch]],
        on_step: Callable[[Batch, StepReport], None],
    ) -> None:
        """For a run that goes on: load a state, train on `batches()`. If it dies meanwhile, all over again;
        each is told once.
        """
        told = -1

        def once(batch: Batch, report: StepReport) -> None:
            nonlocal told
            if batch.version > told:
                told = batch.version
                on_step(batch, report)

        await self._when_up(lambda: self.client.recover(state, batches(), once))

    async def train(self, batch: Batch) -> StepReport:
        """One batch. Raises TrainerError if it is refused."""
        return await self._when_up(lambda: self.client.train(batch))

    async def wait_version_above(self, version: int) -> int:
        """Return policy_version once it is greater than `version`."""
        return await self.client.wait_version_above(version)

    async def wait_up(self) -> None:
        """Return once its processes answer and are where they were. Raises RoomError if they never will."""
        with waiting("the trainer to be back", on="watch trainer"):
            while not self.is_up:
                if self._over is not None:
                    raise self._over
                await self._changed.wait()

    async def export(self) -> WeightManifest:
        """Have the newest weights written into staging."""
        return await self._when_up(self.client.export)

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Not tried again: the engines that were to receive have failed too, and new processes hold what is
        asked of them anew.
        """
        self._check_up()
        return await self.client.broadcast(request)

    async def offload(self, parts: Sequence[TrainerPart]) -> Moved:
        """Move these parts off the trainer's device."""
        moved = await self._when_up(lambda: self.client.offload(parts))
        self._offloaded |= frozenset(parts)
        return moved

    async def onload(self, parts: Sequence[TrainerPart]) -> Moved:
        """Move these parts back."""
        moved = await self._when_up(lambda: self.client.onload(parts))
        self._offloaded -= frozenset(parts)
        return moved

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Have one chunk of the newest weights written. New processes go on with the chunk that the lost ones
        were asked for.
        """
        return await self._when_up(lambda: self.client.export_chunk(version, index))

    async def save(self, path: Path, *, merged: bool = True) -> None:
        """Have the newest weights written as a folder, which replaces one that is there."""
        await self._when_up(lambda: self.client.save(path, merged=merged))

    async def begin_save_state(self, path: Path) -> int:
        """Not tried again: who makes checkpoints hears TrainerLost."""
        self._check_up()
        return await self.client.begin_save_state(path)

    async def wait_save_state(self) -> None:
        """Not tried again either."""
        self._check_up()
        await self.client.wait_save_state()

    async def run(self) -> None:
        """Watch, and start again, until cancelled. Raises the RoomError that ends the run."""
        try:
            while True:
                self._restarts.works_nowait()
                lost = await self._until_lost(asyncio.Event().wait())
                while lost is not None:
                    lost = await self._replace(lost)
        except RoomError as error:
            self._over = error
            # A moment later: who ends with this task is cancelled by then, and does not say the same once
            # more.
            asyncio.get_running_loop().call_soon(self._wake)
            raise

    async def _when_up(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self.wait_up()
            number = self.num_restarts
            try:
                return await call()
            except TrainerError as error:
                lost = error if isinstance(error, TrainerLost) else await self._loss_behind(error)
                if lost is None or not self.config.max_restarts:
                    raise
                if (
                    self.num_restarts != number
                ):  # a late word of processes that are gone says nothing of those in their place
                    continue
                if self._report is None:
                    self._report = lost
                    self._reported.set()
                self.is_up = False

    async def _loss_behind(self, error: TrainerError) -> TrainerLost | None:
        """The first rank refuses what it cannot do without another one that has died: the kernel says so in a
        moment.
        """
        if len(self._ranks) == 1:
            return None
        watching = [asyncio.ensure_future(rank.watch()) for rank in self._ranks]
        try:
            done, _ = await asyncio.wait(watching, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        return (
            TrainerLost(
                "trainer", error.what.removeprefix("trainer: "), rule=error.rule, way_out=error.way_out
            )
            if done
            else None
        )

    def _check_up(self) -> None:
        """New processes, on their way to where the old ones were, must not be taken for them."""
        if not self.is_up:
            raise TrainerLost(
                "trainer",
                "is being started again",
                rule="a checkpoint is of the newest step that was answered",
            )

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """One restart of all ranks: why it was lost again, or None once it is where it was."""
        self.is_up = False
        number = self._restarts.again_nowait(lost)
        logger.warning("the trainer is lost: %s", lost)
        self.is_starting = True
        for rank in self._ranks:
            if left := await rank.end():
                self._warn(left)
        self._warn(f"{in_short(lost)}; starting the trainer again, {number} of {self.config.max_restarts}")
        self._on_event("trainer lost", {"why": str(lost), "restart": self.num_restarts})
        await asyncio.sleep(backoff_s(self.config, number))
        self.is_starting = False  # it is not, while the devices are somebody else's
        await self._wait_room()
        self.is_starting = True
        self._report, self._reported = None, asyncio.Event()
        self._before_start()
        try:
            with waiting("new processes of the trainer", on=self._ranks[0].name):
                await self._start_all()
        except ConnectionShortage:
            raise
        except RoomError as error:
            return error
        self.is_starting = False
        again = await self._until_lost(self._go_back())
        if again is not None:
            return again
        self.is_up = True
        self._wake()
        self._on_event(
            "trainer up", {"restart": self.num_restarts, "policy_version": self.client.policy_version}
        )
        return None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _go_back(self) -> None:
        """To the newest version that was answered, and off the device where the lost processes were off
        it.
        """
        await self._recover(self.client.policy_version)
        if self._offloaded:
            await self.client.offload(sorted(self._offloaded))

    async def _start_all(self) -> None:
        """Return when all ranks answer. Raises the RoomError of the first that cannot: the others would wait
        for it.
        """
        starts = [asyncio.ensure_future(rank.start_again()) for rank in self._ranks]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _until_lost(self, work: Awaitable[Any]) -> RoomError | None:
        """Watch over all ranks until `work` is done (None), or one of them is lost (why). Raises what else
        `work` raises.
        """
        watching = [asyncio.ensure_future(rank.watch()) for rank in self._ranks]
        beating = [asyncio.ensure_future(heartbeat(rank, self.heartbeat_s)) for rank in self._ranks]
        working = asyncio.ensure_future(work)
        tasks = [*watching, *beating, asyncio.ensure_future(self._raise_report()), working]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done <= {working}:
                try:
                    working.result()
                    return None
                except TrainerError:
                    pass  # its process, or that of another rank, says why in a moment
            if not any(task.done() for task in watching):
                await asyncio.wait(watching, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # a death before the calls that broke because of it
                if task.done():
                    try:
                        task.result()
                    except RoomError as error:
                        if task is working and not isinstance(error, TrainerLost):
                            raise  # it is well, and refuses
                        return error
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _raise_report(self) -> None:
        await self._reported.wait()
        assert self._report is not None
        raise self._report
