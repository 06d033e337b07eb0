"""Trainer that restarts, recovers and repeats lost calls, and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from asyncrl.messages.trainer_api import TrainerPart
from asyncrl.trainer.trainer_client import TrainerClient

if TYPE_CHECKING:
    from asyncrl.job.build import Parts  # imports this module
    from asyncrl.job.life import Life

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.supervision.supervise_trainer")


class SupervisedTrainer(Supervisor, TrainerClient):
    """Trainer with one process per rank that survives their loss: lost calls are repeated.

    Life: as Supervisor; new ranks load the newest checkpoint, train again on later batches, and repeat
        offloads.
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
        ranks: Sequence[Server],
        supervision: Supervision,
        *,
        timeout_s: float | None = None,
        before_start: Callable[[], Awaitable[None]],
        bring_back: Callable[[TrainerClient, int], Awaitable[None]],
    ) -> None:
        """`before_start` returns when new ranks may start; `bring_back` catches up to a version."""
        Supervisor.__init__(self, ranks, supervision)
        TrainerClient.__init__(self, ranks[0].caller, timeout_s=timeout_s)
        self._catches_up = bring_back
        self._may_start = before_start
        self._over: RoomError | None = None
        self._up_changed = asyncio.Event()
        self._offloaded = frozenset[TrainerPart]()

    def gauges(self) -> dict[str, float]:
        return {
            "policy_version": self.policy_version,
            "trainer/restarts": self.num_restarts,
            "trainer/down": not self.is_up,
        }

    async def wait_up(self) -> None:
        """Return once the processes are restored. Raises RoomError if they never will be."""
        with waiting("the trainer to be back", on="watch trainer"):
            while not self.is_up:
                if self._over is not None:
                    raise self._over
                await self._up_changed.wait()

    async def offload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await super().offload(parts)
        self._offloaded |= frozenset(parts)
        return moved

    async def onload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await super().onload(parts)
        self._offloaded -= frozenset(parts)
        return moved

    async def run(self) -> None:
        """Watch and restart until cancelled. Raises the RoomError that ends the run."""
        try:
            await super().run()
        except RoomError as error:
            self._over = error
            # after this task has ended: a waiting call is already cancelled and does not repeat the error
            asyncio.get_running_loop().call_soon(self._wake)
            raise

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self.wait_up()
            number = self.num_restarts
            try:
                return await call()
            except TrainerError as error:
                # A rank other than the first may have died; its death, the better error, arrives a moment
                # later.
                died = len(self._processes) > 1 and await self._until_lost(asyncio.sleep(GRACE_S))
                if not (died or isinstance(error, TrainerLost)) or not self.config.max_restarts:
                    raise
                if self.num_restarts == number:  # else it is a late answer of processes that have ended
                    lost = TrainerLost("trainer", error.fault, rule=error.rule, way_out=error.way_out)
                    self._lost_by(lost)

    def _check_up(self) -> None:
        """Raise TrainerLost during a restart: new processes must not pass for the old ones."""
        if not self.is_up:
            raise TrainerLost("trainer", "is restarting", rule="a checkpoint is of a finished step")

    async def _before_start(self) -> None:
        await self._may_start()

    async def _bring_back(self) -> None:
        """Recover the newest answered version and repeat offloads."""
        client = TrainerClient(self._caller, policy_version=self.policy_version, timeout_s=self._timeout_s)
        await self._catches_up(client, self.policy_version)
        self._reached(client.policy_version)
        if self._offloaded:
            await client.offload(sorted(self._offloaded))

    async def _works_again(self) -> None:
        self._wake()

    def _told_up(self) -> Mapping[str, Any]:
        return {"policy_version": self.policy_version}

    def _wake(self) -> None:
        self._up_changed.set()
        self._up_changed = asyncio.Event()


async def recover_trainer(
    client: TrainerClient, version: int, *, journal: Journal, checkpoints: Checkpoints, num_batches: int
) -> None:
    """Bring a restarted trainer to `version` from the newest whole checkpoint and the journal's batches.

    Raises JournalError if batches in between are gone, CheckpointError for an unreadable checkpoint,
    TrainerError.
    """
    # Hold the lock until recovery ends: a checkpoint that completes meanwhile would prune this one and its
    # journaled batches.
    async with checkpoints.in_use:
        whole, damaged = await asyncio.to_thread(checkpoints.newest_whole, keep_unfinished=True)
        start = 0 if whole is None else whole.version
        state = await journal.read_resume(start)
        journal.restored_nowait(start)
        stop = min(max(version, start), num_batches)
        folder = None if whole is None else whole.trainer_dir
        await client.catch_up(folder, load_batches(state, start, stop), lambda _batch, _report: None)
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
        self._parts = parts
        self._job = job
        self._checkpoints = parts.checkpoints
        self._trainer: TrainerClient = parts.trainer
        self._writing: asyncio.Task[None] | None = None
        self.num_made = 0
        self.num_failed = 0

    def gauges(self) -> dict[str, float]:
        return {"checkpoint/made": self.num_made, "checkpoint/failed": self.num_failed}

    async def after_step(self, version: int) -> None:
        every = self._checkpoints.config.every
        if every is None or version % every:
            return
        if self._writing is not None and not self._writing.done():
            self._job.warn(
                f"the checkpoint at version {version} is skipped: the last one is still being written"
            )
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
                    folder = await asyncio.to_thread(
                        self._checkpoints.finish, pending, version, controller.model_dump()
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
