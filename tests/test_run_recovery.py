"""A trainer is started again while a checkpoint is being finished: the one that it goes back to stays until
it has caught up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from test_run_restore import Life, lives, save_checkpoint

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import CheckpointConfig
from asyncrl.errors import TrainerLost
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.run.restore import Checkpointer, recover_trainer
from asyncrl.trainer.trainer_client import TrainerClient

Place = Literal["reading", "loading", "training"]
"""Where a recovery stands: checkpoint 1 is compared with its manifest, the trainer loads it, it trains on
batch 1 of 1 and 2.
"""


class Gate:
    """`reached` once somebody has come to it, who goes on with open(). One comes in a thread, or one in the
    loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached, self._opened, self._opened_to_threads = (
            asyncio.Event(),
            asyncio.Event(),
            threading.Event(),
        )

    async def pass_through(self) -> None:
        self.reached.set()
        await self._opened.wait()

    def pass_through_in_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        self._opened_to_threads.wait()

    def open(self) -> None:
        self._opened.set()
        self._opened_to_threads.set()


class NewTrainer:
    """Reads what it is to load, and counts the batches that it is given."""

    def __init__(self, gate: Gate, stops_at: Place) -> None:
        self._gate, self._stops_at = gate, stops_at
        self.loaded: str | None = None
        self.trained: list[int] = []

    async def recover(
        self,
        state: Path | None,
        batches: AsyncIterator[Batch],
        on_step: Callable[[Batch, TrainResponse], None],
    ) -> None:
        await self._pass("loading")
        if state is not None:
            self.loaded = (state / "weights").read_text()
        async for batch in batches:
            await self._pass("training")
            self.trained.append(batch.version)

    async def _pass(self, place: Place) -> None:
        if place == self._stops_at:
            await self._gate.pass_through()


class WritingTrainer:
    """The trainer before: its state is on disk once `is_written`, unless it is `lost` by then."""

    def __init__(self) -> None:
        self.is_written = asyncio.Event()
        self.is_lost = False

    async def begin_save_state(self, path: Path) -> int:
        path.mkdir()  # noqa: ASYNC240  one folder
        (path / "weights").write_text("3")
        return 3

    async def wait_save_state(self) -> None:
        await self.is_written.wait()
        if self.is_lost:
            raise TrainerLost("trainer", "no answer")


async def let_threads_end(life: Life) -> None:
    """Return when what could be handed to threads by now has ended: the one that is free and the journal's
    work off one thing at a time.
    """
    for _ in range(20):
        await asyncio.to_thread(int)
        await life.journal.flush()


class House:
    """Three batches are trained, checkpoint 1 is whole, checkpoint 3 is being written by the trainer;
    keep_last is 1.
    """

    def __init__(self, life: Life, run_dir: Path) -> None:
        self.life, self.checkpoints = life, Checkpoints(run_dir, CheckpointConfig(every=3, keep_last=1))
        self.writing, self.told = WritingTrainer(), list[str]()
        self.tasks: list[asyncio.Task[None]] = []

        def spawn(coro: Any, *, name: str) -> asyncio.Task[None]:
            self.tasks.append(asyncio.create_task(coro, name=name))
            return self.tasks[-1]

        self.checkpointer = Checkpointer(
            self.checkpoints,
            self.writing,
            life.journal,
            controller_state=dict,
            spawn=spawn,
            warn=self.told.append,
        )

    async def begin(self) -> None:
        await self.life.run_steps(3)
        save_checkpoint(self.checkpoints, 1)
        await self.checkpointer.after_step(3)

    async def recover(self, client: object) -> None:
        await recover_trainer(
            cast(TrainerClient, client), self.life.journal, self.checkpoints, 3, num_batches=20
        )


@pytest.mark.parametrize("place", ["reading", "loading", "training"])
def test_what_a_recovery_goes_back_to_stays_until_it_is_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    async def story(life: Life) -> None:
        gate, house = Gate(), House(life, tmp_path)
        sha256_of = manifest.sha256_of

        def slow_sha256_of(path: Path) -> str:
            if place == "reading" and "step_1" in path.parts:
                gate.pass_through_in_thread()
            return sha256_of(path)

        monkeypatch.setattr(manifest, "sha256_of", slow_sha256_of)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 if place == "reading" else 1))
        await house.begin()
        trainer = NewTrainer(gate, place)
        recovering = asyncio.create_task(house.recover(trainer))
        await gate.reached.wait()
        house.writing.is_written.set()
        await let_threads_end(life)
        gate.open()
        await recovering
        assert (trainer.loaded, trainer.trained) == ("1", [1, 2])
        await asyncio.wait(house.tasks)
        assert (house.checkpoints.versions(), house.checkpointer.num_made, house.told) == ([3], 1, [])

    lives(tmp_path / "journal.sqlite", story)


def test_a_checkpoint_whose_trainer_dies_while_it_is_written_holds_up_no_recovery(tmp_path: Path) -> None:
    async def story(life: Life) -> None:
        gate, house = Gate(), House(life, tmp_path)
        await house.begin()
        trainer = NewTrainer(gate, "reading")
        await house.recover(trainer)
        assert (trainer.loaded, trainer.trained) == ("1", [1, 2]), (
            "though nobody has told the checkpointer yet"
        )
        house.writing.is_lost = True
        house.writing.is_written.set()
        await asyncio.wait(house.tasks)
        assert (house.checkpoints.versions(), house.told) == ([1], ["no checkpoint: trainer: no answer"])

    lives(tmp_path / "journal.sqlite", story)
