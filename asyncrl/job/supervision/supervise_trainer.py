"""The trainer under supervision: when one of its processes dies, all are started again and restored, and lost
calls are repeated. Also makes the checkpoints that this needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.checkpoints.folder import Checkpoints, ControllerState, Pending, set_aside
from asyncrl.errors import CheckpointError, RoomError, TrainerError, TrainerLost
from asyncrl.job.start import Server
from asyncrl.job.supervision.supervise import GRACE_S, Supervision, Supervisor
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, Moved, TrainerPart
from asyncrl.messages.calls import ExportChunkResponse, ExportResponse, TrainResponse
from asyncrl.messages.records import Batch
from asyncrl.spans import note_span
from asyncrl.trainer.trainer_client import TrainerClient
from asyncrl.waits import waiting

if TYPE_CHECKING:
    from asyncrl.job.build import Parts  # which makes both
    from asyncrl.job.life import Life

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.supervision.supervise_trainer")


class SupervisedTrainer(Supervisor):
    """One trainer, of one process a rank, that survives them.

    Life: as a Supervisor's; new ranks load the newest checkpoint, train again on the batches since, and are
        off the devices where the old ones were. Calls that were lost are made again.
    Waits: calls sleep while the trainer is not up, at most as long as restarts take: once run has given up,
        they raise what it raised.
    Invariant: a batch is trained once on the way to each version: what was trained and lost with its process
        is trained again by `recover`, and a call goes on from the version that was answered last.
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
        """`before_start` returns when new ranks may start, `recover` brings them to a version."""
        super().__init__(ranks, supervision)
        self.client, self._recover, self._may_start = client, recover, before_start
        self._over: RoomError | None = None
        """Why there will be no trainer any more."""
        self._changed = asyncio.Event()
        self._offloaded = frozenset[TrainerPart]()

    @property
    def policy_version(self) -> int:
        """Of the newest step that was answered."""
        return self.client.policy_version

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py."""
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
        """For a resumed run: load a state, then train on `batches()`. If the trainer dies meanwhile, start
        over; each batch is reported once.
        """
        told = -1

        def once(batch: Batch, report: TrainResponse) -> None:
            nonlocal told
            if batch.version > told:
                told = batch.version
                on_step(batch, report)

        await self._when_up(lambda: self.client.recover(state, batches(), once))

    async def train(self, batch: Batch) -> TrainResponse:
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

    async def begin_export(self) -> int:
        """Have an export of the newest weights begun; returns their version."""
        return await self._when_up(self.client.begin_export)

    async def export(self) -> ExportResponse:
        """Have the newest weights written into staging, or wait for what was begun. New processes export what
        is the newest then.
        """
        return await self._when_up(self.client.export)

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Have one chunk of the newest weights written. New processes go on with the chunk that the lost ones
        were asked for.
        """
        return await self._when_up(lambda: self.client.export_chunk(version, index))

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Not repeated: the receiving engines have failed too, and new trainer processes copy the weights
        again when they are asked for.
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

    async def save(self, path: Path, *, merged: bool = True) -> None:
        """Have the newest weights written as a folder, which replaces one that is there."""
        await self._when_up(lambda: self.client.save(path, merged=merged))

    async def begin_save_state(self, path: Path) -> int:
        """Not tried again: the checkpointer hears TrainerLost."""
        self._check_up()
        return await self.client.begin_save_state(path)

    async def wait_save_state(self) -> None:
        """Not tried again either."""
        self._check_up()
        await self.client.wait_save_state()

    async def run(self) -> None:
        """Watch, and start again, until cancelled. Raises the RoomError that ends the run."""
        try:
            await super().run()
        except RoomError as error:
            self._over = error
            # After this task has ended: a call that waited for this one is cancelled by then, and does not
            # say the same once more.
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
        """The first rank refuses a call, or has lost the others, if another rank has died; that death, which
        the run is to name, is reported a moment later.
        """
        died = len(self._processes) > 1 and await self._until_lost(asyncio.sleep(GRACE_S))
        if died or isinstance(error, TrainerLost):
            return TrainerLost("trainer", error.fault, rule=error.rule, way_out=error.way_out)
        return None

    def _check_up(self) -> None:
        """New processes, on their way to where the old ones were, must not be taken for them."""
        if not self.is_up:
            raise TrainerLost("trainer", "is being started again", rule="a checkpoint is of a finished step")

    async def _before_start(self) -> None:
        await self._may_start()

    async def _bring_back(self) -> None:
        """To the newest version that was answered, and off the device where the lost processes were off
        it.
        """
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
    """A trainer that was started again, in the middle of a run, goes to `version`: newest whole checkpoint,
    then the journal's batches.

    Raises JournalError if batches in between are not there any more, CheckpointError if a checkpoint cannot
    be read, TrainerError.
    """
    # Held to the end: one that is finished meanwhile would take this one away, and the batches since.
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
    """Batches start .. stop - 1 of the journal, one at a time."""
    for version in range(start, stop):
        yield await asyncio.to_thread(state.load_batch, version)


class Checkpointer:
    """Makes checkpoints beside the training.

    Life: after_step() -> begun (the copy is made beside the next step) -> written, checked, renamed,
        journaled -> idle.
    Waits: the train loop sleeps in after_step until the copy is begun; the rest is a task of its own, which
        sleeps until the state is written, then while a trainer that was started again goes back to an older
        one.
    Invariant: one at a time: one that is due while another is being written is left out, with a warning. A
        failed write is a warning each time; older checkpoints and the run are not affected.
    """

    def __init__(self, parts: Parts, job: Life) -> None:
        self._parts, self._job = parts, job
        self._checkpoints, self._trainer = parts.checkpoints, parts.trainer
        self._writing: asyncio.Task[None] | None = None
        self.num_made = self.num_failed = 0

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py."""
        return {"checkpoint/made": self.num_made, "checkpoint/failed": self.num_failed}

    async def after_step(self, version: int) -> None:
        """Begin a checkpoint if one is due at this version."""
        every = self._checkpoints.config.every
        if every is None or version % every:
            return
        if self._writing is not None and not self._writing.done():
            what = f"the checkpoint at version {version} is left out"
            self._job.warn(f"{what}: the one before is being written")
        elif (begun := await self._begin()) is not None:
            self._writing = self._job.spawn(self._finish(*begun), name=f"checkpoint {version}")

    async def make_last(self, version: int) -> None:
        """A checkpoint right now, after the one that is being written; returns when it is whole. For the end
        of a run.
        """
        if self._checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            with waiting("the checkpoint before", on="checkpoint"):
                await asyncio.wait({self._writing})
        if version not in self._checkpoints.versions() and (begun := await self._begin()) is not None:
            await self._finish(*begun)

    async def _begin(self) -> tuple[Pending, int, ControllerState] | None:
        """(what the trainer is writing into, the version that it is of, the rest of that moment); None, after
        a warning, if it cannot.
        """
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
            # Only now: had the trainer died meanwhile, it would have to go back first.
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
