"""Makes checkpoints while the run goes on: when they are due, beside training, and what happens if one cannot be written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from asyncrl.checkpoint.checkpoints import Checkpoints, Pending
from asyncrl.errors import CheckpointError, TrainerLost
from asyncrl.journal.journal import Journal

logger = logging.getLogger("asyncrl.running.checkpointing")


class Saves(Protocol):
    """What the trainer does for a checkpoint; LivingTrainer is it."""

    async def begin_save_state(self, path: Any) -> int:
        """Copy the state, have it written beside training; the version that it is of."""
        ...

    async def wait_save_state(self) -> None:
        """Until it is written."""
        ...


class Checkpointer:
    """Life: after_step() -> begun (training is held up for the copy alone) -> written, checked, renamed, journaled -> idle.

    Waits:      the train loop sleeps in after_step for the copy; the rest is a task of its own, which sleeps until the state is written,
                then while a trainer that was started again goes back to an older one.
    Invariant:  one at a time: what is due while one is being written is left out and told. What cannot be written is told, each
                time, and neither touches older checkpoints nor the run.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: Saves,
        journal: Journal,
        *,
        controller_state: Callable[[], Mapping[str, Any]],
        spawn: Callable[..., asyncio.Task[None]],
        warn: Callable[[str], None],
        keep: Literal["checkpoint", "all"] = "checkpoint",
    ) -> None:
        """`keep`: whether the journal forgets the tokens of batches before the oldest checkpoint that counts (journal.keep)."""
        self._checkpoints, self._trainer, self._journal = checkpoints, trainer, journal
        self._controller_state, self._spawn, self._warn = controller_state, spawn, warn
        self._keep = keep
        self._writing: asyncio.Task[None] | None = None
        self.num_made = self.num_failed = 0

    def __repr__(self) -> str:
        return f"<Checkpointer {self.num_made} made, {self.num_failed} failed{', writing' if self._writing else ''}>"

    async def after_step(self, version: int) -> None:
        """Begin a checkpoint if one is due at this version."""
        every = self._checkpoints.config.every
        if every is None or version % every:
            return
        if self._writing is not None and not self._writing.done():
            self._warn(f"the checkpoint at version {version} is left out: the one before is still being written")
            return
        begun = await self._begin()
        if begun is not None:
            self._writing = self._spawn(self._finish(*begun, self._controller_state()), name=f"checkpoint {begun[1]}")

    async def make_last(self, version: int) -> None:
        """A checkpoint right now, after the one that is being written; returns when it is whole. For the end of a run."""
        if self._checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if version in self._checkpoints.versions():
            return
        begun = await self._begin()
        if begun is not None:
            await self._finish(*begun, self._controller_state())

    async def _begin(self) -> tuple[Pending, int] | None:
        """(what the trainer is writing into, the version that it is of); None if it cannot, which is told."""
        pending = None
        try:
            pending = await asyncio.to_thread(self._checkpoints.begin)
            return pending, await self._trainer.begin_save_state(pending.trainer_dir)
        except (CheckpointError, TrainerLost) as error:
            if pending is not None:
                await asyncio.to_thread(self._checkpoints.abandon, pending)
            self._failed(error)
            return None

    async def _finish(self, pending: Pending, version: int, controller: Mapping[str, Any]) -> None:
        try:
            await self._trainer.wait_save_state()
            async with self._checkpoints.in_use:  # only now: had the trainer died meanwhile, it would have to go back first
                folder = await asyncio.to_thread(self._checkpoints.finish, pending, version, controller)
                self.num_made += 1
                self._journal.checkpointed_nowait(version, folder, self._checkpoints.versions())
                if self._keep == "checkpoint":
                    await self._journal.compact(self._checkpoints.oldest_version())
        except (CheckpointError, TrainerLost) as error:
            await asyncio.to_thread(self._checkpoints.abandon, pending)
            self._failed(error)

    def _failed(self, error: CheckpointError | TrainerLost) -> None:
        self.num_failed += 1
        logger.warning("no checkpoint: %s", error)
        self._warn(f"no checkpoint: {error.what}")
