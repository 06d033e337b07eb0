"""Make checkpoints during training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.base.errors import CheckpointError, TrainerLost, find_fatal
from asyncrl.base.waits import clock, note_span, waiting
from asyncrl.job import checkpoint_callback
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.journal.checkpoint_folders import TRAINER, Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.launch.processes import run_module

logger = logging.getLogger("asyncrl.job.checkpointer")

CALLBACK_TIMEOUT_S = 3600.0
"""Limit of one export with its call."""


@dataclass(eq=False)
class Checkpointer:
    """Makes checkpoints in parallel with training.

    Life: after_step() or after_catch_up() -> begun (copied during the next step) -> written, checked,
        renamed -> idle.
    Waits: both sleep until the copy has begun.
    Invariant: one at a time; a checkpoint due during another write is skipped, and a
        failed write only warns.
    """

    checkpoints: Checkpoints
    trainer: SupervisedTrainer
    journal: Journal | None
    """None: the run has no journal."""
    controller_state: Callable[[], Mapping[str, object]]
    lifecycle: Lifecycle
    num_made: int = field(default=0, init=False)
    num_failed: int = field(default=0, init=False)
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    _callback: asyncio.Task[None] | None = field(default=None, init=False)
    """The call for the newest checkpoint, after all others."""

    def gauges(self) -> dict[str, float]:
        return {"checkpoint/made": self.num_made, "checkpoint/failed": self.num_failed}

    def is_due(self, version: int) -> bool:
        every = self.checkpoints.config.every
        return every is not None and version % every == 0

    async def after_step(self, version: int) -> None:
        if not self.is_due(version):
            return
        if self._writing is not None and not self._writing.done():
            text = "the previous one is still being written"
            self.lifecycle.log.warn(f"checkpoint of version {version} skipped: {text}")
            return
        await self._begin(version)

    async def after_catch_up(self, version: int) -> None:
        """Make a checkpoint if batches that were trained again have passed a due one.
        Otherwise each of several kills would make the next catch-up longer.

        Example: every=5. A resume from version 0 trains 7 batches again, and makes a
        checkpoint of version 7.
        """
        every = self.checkpoints.config.every
        newest = max(self.checkpoints.versions(), default=0)
        if every is not None and version // every > newest // every:
            await self._begin(version)

    async def _begin(self, version: int) -> None:
        begun = asyncio.Event()
        self._writing = self.lifecycle.spawn(
            self._make(begun), name=f"checkpoint {version}"
        )
        # The next step may begin during the copy. The trainer itself finishes the copy
        # before it changes a weight (docs/decisions/0021).
        await begun.wait()

    async def make_last(self, version: int) -> None:
        if self.checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            with waiting("the previous checkpoint", on="checkpoint"):
                await asyncio.wait({self._writing})
        # If the last step was a multiple of checkpoint.every, its checkpoint exists.
        if version not in self.checkpoints.versions():
            await self._make(asyncio.Event())

    async def wait_callbacks(self) -> None:
        if self._callback is not None:
            with waiting("checkpoint.callback to end", on="checkpoint.callback"):
                await asyncio.wait({self._callback})

    async def _call_back(
        self, version: int, previous: asyncio.Task[None] | None
    ) -> None:
        """Export a checkpoint and call checkpoint.callback, in another process. A failure
        is a warning.

        Example: if checkpoints 10 and 15 are made during the call for 5, the next call is
        for 15, and 10 is skipped with a warning.
        """
        code: int | None = 1
        output = "it was ended with the run"
        try:
            if previous is not None:
                await asyncio.wait({previous})
            output = "a newer checkpoint was made before its turn"
            if version == max(self.checkpoints.versions()):
                output = "it was ended with the run"
                arguments = [str(self.lifecycle.run_dir), str(version)]
                code, output = await run_module(
                    checkpoint_callback.__name__, arguments, CALLBACK_TIMEOUT_S
                )
        except OSError as error:  # no process can be started
            output = str(error)
        finally:
            logger.info("checkpoint.callback of version %d:\n%s", version, output)
            if code != 0:
                fatal = find_fatal(output)
                why = fatal.error if fatal else output[-500:]
                # run_module returns no output of a process that took too long
                why = why or f"exit code {code} (limit: {CALLBACK_TIMEOUT_S:g} s)"
                text = f"checkpoint.callback of version {version} failed: {why}"
                self.lifecycle.log.warn(text)

    async def _make(self, begun: asyncio.Event) -> None:
        """Set `begun` once the copy has begun, or failed. A failure is a warning."""
        pending: Path | None = None
        try:
            pending = await asyncio.to_thread(self.checkpoints.begin)
            version = await self.trainer.begin_save_state(pending / TRAINER)
            # Before begun.set(): the train loop still waits for it and takes no batch,
            # so this state belongs to `version`.
            controller = self.controller_state()
            # From here on, training continues while the files are written.
            begun.set()
            began_s = clock()
            # Not under the lock below: a trainer that dies now must be able to recover.
            await self.trainer.wait_save_state()
            # A trainer that recovers holds this lock and goes first: finish() may prune
            # the checkpoint that it loads.
            async with self.checkpoints.in_use:
                with waiting("the files of a checkpoint to be whole", on="disk"):
                    await asyncio.to_thread(
                        self.checkpoints.finish, pending, version, controller
                    )
                self.num_made += 1
                if self.checkpoints.config.callback is not None:
                    self._callback = self.lifecycle.spawn(
                        self._call_back(version, self._callback),
                        name=f"checkpoint callback {version}",
                    )
                note_span(
                    "checkpoints",
                    "checkpoint",
                    began_s,
                    clock(),
                    version,
                )
                # Still under the lock: a recovery needs the batches since its
                # checkpoint.
                keeps = self.lifecycle.config.journal.keep
                if self.journal is not None and keeps == "checkpoint":
                    await self.journal.compact(self.checkpoints.oldest_version())
        # The previous checkpoint and the journal are enough for a resume, so a full
        # disk or a dead trainer costs this checkpoint and not the run.
        except (CheckpointError, TrainerLost) as error:
            if pending is not None:
                await asyncio.to_thread(self.checkpoints.abandon, pending)
            self.num_failed += 1
            logger.warning("no checkpoint: %s", error)
            self.lifecycle.log.warn(f"no checkpoint: {error.what}")
        finally:
            begun.set()
