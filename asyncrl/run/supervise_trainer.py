"""The trainer as the run sees it: when one of its processes dies, all are started again and brought to where
they were, and the calls that were lost are made again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.errors import RoomError, TrainerError, TrainerLost
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, Moved, TrainerPart
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_calls import ExportChunkResponse, ExportResponse, TrainResponse
from asyncrl.run.start import Server
from asyncrl.run.supervise import GRACE_S, Supervisor, until_lost
from asyncrl.trainer.trainer_client import TrainerClient
from asyncrl.waits import waiting

T = TypeVar("T")


class SupervisedTrainer(Supervisor):
    """One trainer, of one process a rank, that survives them.

    Life:       as a Supervisor's; new ranks load the newest checkpoint, train again on the batches since, and
                are off the devices where the old ones were. Calls that were lost are made again.
    Waits:      calls sleep while the trainer is not up, at most as long as restarts take: once run has given
                up, they raise what it raised.
    Invariant:  a batch is trained once on the way to each version: what was trained and lost with its process
                is trained again by `recover`, and a call goes on from the version that was answered last.
    """

    kind = "trainer"
    whom = "the trainer"
    name = "trainer"

    def __init__(
        self,
        client: TrainerClient,
        ranks: Sequence[Server],
        *args: Any,
        before_start: Callable[[], None],
        recover: Callable[[int], Awaitable[None]],
        wait_room: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> None:
        """`recover` brings new ranks to a version. `wait_room`: until engines on the same devices have
        gone.
        """
        super().__init__(ranks, *args, **options)
        self.client, self._before_start, self._recover = client, before_start, recover
        self._wait_room = wait_room
        self._over: RoomError | None = None
        """Why there will be no trainer any more."""
        self._changed = asyncio.Event()
        self._offloaded = frozenset[TrainerPart]()

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
        on_step: Callable[[Batch, TrainResponse], None],
    ) -> None:
        """For a run that goes on: load a state, train on `batches()`. If it dies meanwhile, all over again;
        each is told once.
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

    async def export(self) -> ExportResponse:
        """Have the newest weights written into staging."""
        return await self._when_up(self.client.export)

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Have one chunk of the newest weights written. New processes go on with the chunk that the lost ones
        were asked for.
        """
        return await self._when_up(lambda: self.client.export_chunk(version, index))

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
                lost = error if isinstance(error, TrainerLost) else await self._loss_behind(error)
                if lost is None or not self.config.max_restarts:
                    raise
                if self.num_restarts == number:  # else a late word of processes that are gone
                    self._lost_by(lost)

    async def _loss_behind(self, error: TrainerError) -> TrainerLost | None:
        """The first rank refuses what it cannot do without another one that has died: the kernel says so in a
        moment.
        """
        if len(self._processes) == 1 or not await until_lost(
            self._processes, self.heartbeat_s, asyncio.sleep(GRACE_S)
        ):
            return None
        return TrainerLost("trainer", error.fault, rule=error.rule, way_out=error.way_out)

    def _check_up(self) -> None:
        """New processes, on their way to where the old ones were, must not be taken for them."""
        if not self.is_up:
            raise TrainerLost("trainer", "is being started again", rule="a checkpoint is of an answered step")

    @contextlib.asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        if self._wait_room is not None:
            await self._wait_room()
        yield

    async def _start_all(self) -> None:
        self._before_start()
        await super()._start_all()

    async def _bring_back(self) -> None:
        """To the newest version that was answered, and off the device where the lost processes were off
        it.
        """
        await self._recover(self.client.policy_version)
        if self._offloaded:
            await self.client.offload(sorted(self._offloaded))

    async def _works_again(self) -> Mapping[str, Any]:
        self._wake()
        return {"policy_version": self.client.policy_version}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
