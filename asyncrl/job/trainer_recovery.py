"""Keep the trainer running: restart it, make checkpoints, and recover from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from asyncrl.base.errors import ComponentError, TrainerError, TrainerLost
from asyncrl.base.waits import Signal, waiting
from asyncrl.journal.checkpoint_folders import Checkpoints, set_aside
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState
from asyncrl.launch.supervise import GRACE_S, Server, Supervision, Supervisor
from asyncrl.messages.engine_api import TrainerPart, TransferStats
from asyncrl.messages.records import Batch
from asyncrl.trainer.trainer_client import TrainerClient

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.trainer_recovery")


class SupervisedTrainer(Supervisor, TrainerClient):
    """Trainer with one process per rank; calls lost with a process are repeated.

    Life: as Supervisor; new ranks load the newest checkpoint, train again on later
        batches, and repeat offloads.
    Waits: calls sleep while the trainer is down, as long as restarts take.
    Invariant: a batch is trained once on the way to each version.
    """

    name = "trainer"

    def __init__(
        self,
        ranks: Sequence[Server],
        supervision: Supervision,
        *,
        timeout_s: float | None = None,
        on_start: Callable[[], None] = lambda: None,
        bring_back: Callable[[TrainerClient, int], Awaitable[None]],
    ) -> None:
        """Supervise ranks that are not started yet; the first takes the calls.
        `on_start` is called before new ranks start; `bring_back` catches up to a
        version.
        """
        self._up_changed = Signal()
        Supervisor.__init__(
            self,
            ranks,
            supervision,
            kind="trainer",
            on_start=on_start,
            on_up=self._up_changed.notify,
        )
        TrainerClient.__init__(self, ranks[0].caller, timeout_s=timeout_s)
        self._catch_up = bring_back
        self._over: ComponentError | None = None
        self._offloaded = frozenset[TrainerPart]()

    def gauges(self) -> dict[str, float]:
        return {
            "policy_version": self.policy_version,
            "trainer/restarts": self.num_restarts,
            "trainer/down": not self.is_up,
        }

    async def wait_up(self) -> None:
        """Return once the trainer takes calls. Raises the ComponentError that ends the
        run if it never does.
        """
        with waiting("the trainer to be back", on="watch trainer"):
            await self._up_changed.wait_for(
                lambda: self.is_up or self._over is not None
            )
        if not self.is_up and self._over is not None:
            raise self._over

    async def offload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await super().offload(parts)
        self._offloaded |= frozenset(parts)
        return moved

    async def onload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        moved = await super().onload(parts)
        self._offloaded -= frozenset(parts)
        return moved

    async def run(self) -> None:
        try:
            await super().run()
        except ComponentError as error:
            self._over = error
            asyncio.get_running_loop().call_soon(self._up_changed.notify)
            raise

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self.wait_up()
            number = self.num_restarts
            try:
                return await call()
            except TrainerError as error:
                # the death of another rank, the better error, arrives a moment
                died = len(self._processes) > 1 and await self._until_lost(
                    asyncio.sleep(GRACE_S)
                )
                if (
                    not (died or isinstance(error, TrainerLost))
                    or not self.config.max_restarts
                ):
                    raise
                if self.num_restarts == number:  # else a late answer of ended processes
                    self._lost_by(error.as_kind(TrainerLost, "trainer"))

    async def _bring_back(self) -> None:
        # Calls of this client wait until the trainer is up, which it is only after this
        # method. A plain client raises TrainerLost at once, and the supervisor starts
        # over.
        client = TrainerClient(
            self._caller,
            policy_version=self.policy_version,
            timeout_s=self._timeout_s,
        )
        await self._catch_up(client, self.policy_version)
        self._reached(client.policy_version)
        # A new process has everything on the devices. Before it counts as up, it must
        # give back what the engines' time slice expects to be free.
        if self._offloaded:
            await client.offload(sorted(self._offloaded))


async def recover_trainer(
    client: TrainerClient,
    version: int,
    *,
    checkpoints: Checkpoints,
    batches: Callable[[int, int], AsyncIterator[Batch]],
) -> None:
    """Bring a restarted trainer to `version`: by the newest checkpoint, then by the
    `batches` from its version up to that one.
    """
    # A checkpoint that completes during recovery would prune this one and its journaled
    # batches.
    async with checkpoints.in_use:
        # keep_unfinished: this process may be writing a checkpoint at this moment. Only
        # a new process can know that unfinished folders are leftovers.
        whole, damaged = await asyncio.to_thread(
            checkpoints.newest_valid, keep_unfinished=True
        )
        start = 0 if whole is None else whole.version
        # `version` is still 0 if the trainer dies while a resume catches up. Then only
        # the checkpoint is loaded here, and recover() trains on the batches again.
        missed = batches(start, max(version, start))
        folder = None if whole is None else whole.trainer_dir
        # No callback: the steps were reported when they were trained the first time.
        await client.catch_up(folder, missed, lambda _batch, _report: None)
        for text in [found.what for found in damaged] + await asyncio.to_thread(
            set_aside, damaged
        ):
            logger.warning("%s", text)


async def journaled_batches(
    journal: Journal, start: int, stop: int
) -> AsyncIterator[Batch]:
    """Yield the batches for a trainer that a checkpoint has brought to `start`."""
    state = await journal.read_resume(start)
    journal.add_event_nowait("restored", {"version": start, "who": "trainer"})
    async for batch in load_batches(state, start, stop):
        yield batch


async def load_batches(
    state: ResumeState, start: int, stop: int
) -> AsyncIterator[Batch]:
    for version in range(start, stop):
        yield await asyncio.to_thread(state.load_batch, version)
