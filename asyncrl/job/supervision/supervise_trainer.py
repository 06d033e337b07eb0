"""Trainer that restarts, recovers and repeats lost calls, and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.base.errors import CheckpointError, RoomError, TrainerError, TrainerLost
from asyncrl.base.spans import note_span
from asyncrl.base.waits import waiting
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import GRACE_S, Supervision, Supervisor
from asyncrl.journal.checkpoints import Checkpoints, ControllerState, Pending, set_aside
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportChunkResponse,
    ExportResponse,
    TrainerPart,
    TrainResponse,
)
from asyncrl.trainer.trainer_client import TrainerClient

if TYPE_CHECKING:
    from asyncrl.job.build import Parts  # imports this module
    from asyncrl.job.life import Life

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.supervision.supervise_trainer")


class SupervisedTrainer(Supervisor):
    """Trainer with one process per rank that survives their loss.

    Life: as Supervisor; new ranks load the newest checkpoint, train again on later batches, and repeat
        offloads. Lost calls are repeated.
    Waits: calls sleep while the trainer is down, at most as long as restarts take; once run has given up,
        they raise its error.
    Invariant: a batch is trained once on the way to each version: `recover` repeats training lost with its
        process, and a call continues from the last answered version.
    """

    kind = "trainer"
    whom = "the trainer"
    name = "trainer"

    def __init__(
        self,
        client: TrainerClient,
        ranks: Sequence[Server],
        supervision: Supervision,
        *,
        before_start: Callable[[], Awaitable[None]],
        recover: Callable[[int], Awaitable[None]],
    ) -> None:
        """Initialize. `before_start` returns when new ranks may start; `recover` brings them to a version."""
        super().__init__(ranks, supervision)
        self.client, self._recover, self._may_start = client, recover, before_start
        self._over: RoomError | None = None
        self._changed = asyncio.Event()
        self._offloaded = frozenset[TrainerPart]()

    @property
    def policy_version(self) -> int:
        """Return the version of the newest answered step."""
        return self.client.policy_version

    def gauges(self) -> dict[str, float]:
        return {
            "policy_version": self.policy_version,
            "trainer/restarts": self.num_restarts,
            "trainer/down": not self.is_up,
        }

    async def recover(
        self,
        state: Path | None,
        batches: Callable[[], AsyncIterator[Batch]],
        on_step: Callable[[Batch, TrainResponse], None],
    ) -> None:
        """Load a state and train on `batches()`, for a resumed run. If the trainer dies, start over; each
        batch is reported once.
        """
        told = -1

        def once(batch: Batch, report: TrainResponse) -> None:
            nonlocal told
            if batch.version > told:
                told = batch.version
                on_step(batch, report)

        await self._when_up(lambda: self.client.recover(state, batches(), once))

    async def train(self, batch: Batch) -> TrainResponse:
        """Train on one batch. Raises TrainerError if it is refused."""
        return await self._when_up(lambda: self.client.train(batch))

    async def wait_version_above(self, version: int) -> int:
        return await self.client.wait_version_above(version)

    async def wait_up(self) -> None:
        """Return once the processes are restored. Raises RoomError if they never will be."""
        with waiting("the trainer to be back", on="watch trainer"):
            while not self.is_up:
                if self._over is not None:
                    raise self._over
                await self._changed.wait()

    async def begin_export(self) -> int:
        return await self._when_up(self.client.begin_export)

    async def export(self) -> ExportResponse:
        """Export the newest weights, or wait for the export in progress. New processes export the weights
        that are newest then.
        """
        return await self._when_up(self.client.export)

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Export one chunk. New processes continue with the lost chunk."""
        return await self._when_up(lambda: self.client.export_chunk(version, index))

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Broadcast without retries: the receiving engines have failed too, and new processes copy the
        weights again on request.
        """
        self._check_up()
        return await self.client.broadcast(request)

    async def offload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await self._when_up(lambda: self.client.offload(parts))
        self._offloaded |= frozenset(parts)
        return moved

    async def onload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await self._when_up(lambda: self.client.onload(parts))
        self._offloaded -= frozenset(parts)
        return moved

    async def save(self, path: Path, *, merged: bool = True) -> None:
        """Save the newest weights, replacing an existing folder."""
        await self._when_up(lambda: self.client.save(path, merged=merged))

    async def begin_save_state(self, path: Path) -> int:
        """Begin saving the state, without retries: the checkpointer handles TrainerLost."""
        self._check_up()
        return await self.client.begin_save_state(path)

    async def wait_save_state(self) -> None:
        """Wait for the save, without retries."""
        self._check_up()
        await self.client.wait_save_state()

    async def run(self) -> None:
        """Watch and restart until cancelled. Raises the RoomError that ends the run."""
        try:
            await super().run()
        except RoomError as error:
            self._over = error
            # after this task has ended: a waiting call is already cancelled and does not repeat the error
            asyncio.get_running_loop().call_soon(self._wake)
            raise

    async def _when_up(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self.wait_up()
            number = self.num_restarts
            try:
                return await call()
            except TrainerError as error:
                lost = await self._loss_behind(error)
                if lost is None or not self.config.max_restarts:
                    raise
                if self.num_restarts == number:  # else it is a late answer of processes that have ended
                    self._lost_by(lost)

    async def _loss_behind(self, error: TrainerError) -> TrainerLost | None:
        """Return the loss if the trainer, or a rank other than the first, has died. The death itself, the
        error to report, arrives a moment later.
        """
        died = len(self._processes) > 1 and await self._until_lost(asyncio.sleep(GRACE_S))
        if died or isinstance(error, TrainerLost):
            return TrainerLost("trainer", error.fault, rule=error.rule, way_out=error.way_out)
        return None

    def _check_up(self) -> None:
        """Raise TrainerLost during a restart: new processes must not pass for the old ones."""
        if not self.is_up:
            raise TrainerLost("trainer", "is being started again", rule="a checkpoint is of a finished step")

    async def _before_start(self) -> None:
        await self._may_start()

    async def _bring_back(self) -> None:
        """Recover the newest answered version and repeat offloads."""
        await self._recover(self.client.policy_version)
        if self._offloaded:
            await self.client.offload(sorted(self._offloaded))

    async def _works_again(self) -> None:
        self._wake()

    def _told_up(self) -> Mapping[str, Any]:
        return {"policy_version": self.client.policy_version}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def recover_trainer(
    client: TrainerClient, journal: Journal, checkpoints: Checkpoints, version: int, num_batches: int
) -> None:
    """Bring a restarted trainer to `version` from the newest complete checkpoint and the journal's batches.

    Raises JournalError if batches in between are gone, CheckpointError for an unreadable checkpoint,
    TrainerError.
    """
    # held to the end: a newer checkpoint would delete this one, and the batches since
    async with checkpoints.in_use:
        whole, damaged = await asyncio.to_thread(checkpoints.newest_whole, keep_unfinished=True)
        start = 0 if whole is None else whole.version
        state = await journal.read_resume(start)
        journal.restored_nowait(start)
        stop = min(max(version, start), num_batches)
        folder = None if whole is None else whole.trainer_dir
        await client.recover(folder, load_batches(state, start, stop), lambda _batch, _report: None)
        for text in [found.why for found in damaged] + await asyncio.to_thread(set_aside, damaged):
            logger.warning("%s", text)


async def load_batches(state: ResumeState, start: int, stop: int) -> AsyncIterator[Batch]:
    for version in range(start, stop):
        yield await asyncio.to_thread(state.load_batch, version)


class Checkpointer:
    """Makes checkpoints in parallel with training.

    Life: after_step() -> begun (the copy is made during the next step) -> written, checked, renamed,
        journaled -> idle.
    Waits: the train loop sleeps in after_step until the copy has begun. A separate task sleeps until the
        state is written, then while a restarted trainer goes back to an older one.
    Invariant: one at a time: a checkpoint due during another write is skipped with a warning. A failed write
        is a warning each time; older checkpoints and the run are unaffected.
    """

    def __init__(self, parts: Parts, job: Life) -> None:
        self._parts, self._job = parts, job
        self._checkpoints, self._trainer = parts.checkpoints, parts.trainer
        self._writing: asyncio.Task[None] | None = None
        self.num_made = self.num_failed = 0

    def gauges(self) -> dict[str, float]:
        return {"checkpoint/made": self.num_made, "checkpoint/failed": self.num_failed}

    async def after_step(self, version: int) -> None:
        every = self._checkpoints.config.every
        if every is None or version % every:
            return
        if self._writing is not None and not self._writing.done():
            what = f"the checkpoint at version {version} is left out"
            self._job.warn(f"{what}: the one before is being written")
        elif (begun := await self._begin()) is not None:
            self._writing = self._job.spawn(self._finish(*begun), name=f"checkpoint {version}")

    async def make_last(self, version: int) -> None:
        """Make the final checkpoint, after the one in progress, and wait for it."""
        if self._checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            with waiting("the checkpoint before", on="checkpoint"):
                await asyncio.wait({self._writing})
        if version not in self._checkpoints.versions() and (begun := await self._begin()) is not None:
            await self._finish(*begun)

    async def _begin(self) -> tuple[Pending, int, ControllerState] | None:
        """Return (pending folder, version, controller state); None, after a warning, if it fails."""
        pending = None
        try:
            pending = await asyncio.to_thread(self._checkpoints.begin)
            version = await self._trainer.begin_save_state(pending.trainer_dir)
            return pending, version, self._parts.controller_state()
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)
            return None

    async def _finish(self, pending: Pending, version: int, controller: ControllerState) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            await self._trainer.wait_save_state()
            # only now: if the trainer had died, it would need to go back first
            async with self._checkpoints.in_use:
                with waiting("the files of a checkpoint to be whole", on="disk"):
                    finish = self._checkpoints.finish
                    folder = await asyncio.to_thread(
                        lambda: finish(pending, version, controller.model_dump())
                    )
                self.num_made += 1
                note_span("checkpoints", "checkpoint", began_s, asyncio.get_running_loop().time(), version)
                self._parts.journal.checkpointed_nowait(version, folder, self._checkpoints.versions())
                if self._job.config.journal.keep == "checkpoint":
                    await self._parts.journal.compact(self._checkpoints.oldest_version())
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)

    async def _failed(self, pending: Pending | None, error: CheckpointError | TrainerLost) -> None:
        if pending is not None:
            await asyncio.to_thread(self._checkpoints.abandon, pending)
        self.num_failed += 1
        logger.warning("no checkpoint: %s", error)
        self._job.warn(f"no checkpoint: {error.what}")
