"""Trainer that restarts, recovers and repeats lost calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from asyncrl.base.errors import RoomError, TrainerError, TrainerLost
from asyncrl.base.waits import waiting
from asyncrl.launch.server import Server
from asyncrl.launch.supervise import GRACE_S, Supervision, Supervisor
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

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
