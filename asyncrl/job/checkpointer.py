"""Make checkpoints during training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.base.errors import CheckpointError, TrainerLost
from asyncrl.base.waits import note_span, waiting
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.journal.checkpoint_folders import TRAINER, Checkpoints, ControllerState
from asyncrl.journal.journal import Journal

logger = logging.getLogger("asyncrl.job.checkpointer")


class Checkpointer:
    """Makes checkpoints in parallel with training.

    Life: after_step() -> begun (copied during the next step) -> written, checked, renamed -> idle.
    Waits: after_step sleeps until the copy has begun.
    Invariant: one at a time; a checkpoint due during another write is skipped, and a failed write only warns.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: SupervisedTrainer,
        journal: Journal,
        controller_state: Callable[[], ControllerState],
        life: Lifecycle,
    ) -> None:
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._journal = journal
        self._controller_state = controller_state
        self._life = life
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
            text = "the previous one is still being written"
            self._life.log.warn(f"checkpoint of version {version} skipped: {text}")
        elif (begun := await self._begin()) is not None:
            self._writing = self._life.spawn(self._finish(*begun), name=f"checkpoint {version}")

    async def make_last(self, version: int) -> None:
        if self._checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            with waiting("the previous checkpoint", on="checkpoint"):
                await asyncio.wait({self._writing})
        if version not in self._checkpoints.versions() and (begun := await self._begin()) is not None:
            await self._finish(*begun)

    async def _begin(self) -> tuple[Path, int, ControllerState] | None:
        """Return None, after a warning, if it fails."""
        pending = None
        try:
            pending = await asyncio.to_thread(self._checkpoints.begin)
            version = await self._trainer.begin_save_state(pending / TRAINER)
            return pending, version, self._controller_state()
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)
            return None

    async def _finish(self, pending: Path, version: int, controller: ControllerState) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            await self._trainer.wait_save_state()
            # a dead trainer goes back first
            async with self._checkpoints.in_use:
                with waiting("the files of a checkpoint to be whole", on="disk"):
                    await asyncio.to_thread(
                        self._checkpoints.finish, pending, version, controller.model_dump()
                    )
                self.num_made += 1
                note_span("checkpoints", "checkpoint", began_s, asyncio.get_running_loop().time(), version)
                if self._life.config.journal.keep == "checkpoint":
                    await self._journal.compact(self._checkpoints.oldest_version())
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)

    async def _failed(self, pending: Path | None, error: CheckpointError | TrainerLost) -> None:
        if pending is not None:
            await asyncio.to_thread(self._checkpoints.abandon, pending)
        self.num_failed += 1
        logger.warning("no checkpoint: %s", error)
        self._life.log.warn(f"no checkpoint: {error.what}")
