"""When checkpoints are made, what happens if one cannot be, and that the one a new trainer goes back to stays
until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import MemoryJournal
from test_run_restore import Life, lives, save_checkpoint

from asyncrl.base.errors import CheckpointError, TrainerLost
from asyncrl.config import CheckpointConfig
from asyncrl.job.trainer_recovery import Checkpointer, recover_trainer
from asyncrl.journal.checkpoints import Checkpoints, ControllerState
from asyncrl.messages.records import Batch

LOST = TrainerLost("trainer", "no answer")
NO_SPACE = CheckpointError("the trainer cannot save its state: no space left")


class Trainer:
    """Writes its version as a state, once `go` is set. `fails`: what a call raises, by its name, once."""

    def __init__(self) -> None:
        self.version, self.num_begun, self.fails = 0, 0, dict[str, Exception]()
        self.go = asyncio.Event()
        self.go.set()

    async def begin_save_state(self, path: Path) -> int:
        self._fail("begin")
        path.mkdir()  # noqa: ASYNC240  one folder
        self.num_begun += 1
        self._folder, self._begun = path, self.version
        return self.version

    async def wait_save_state(self) -> None:
        await self.go.wait()
        self._fail("wait")
        (self._folder / "weights").write_text(str(self._begun))

    def _fail(self, name: str) -> None:
        if name in self.fails:
            raise self.fails.pop(name)


class House:
    """A checkpointer over a trainer and a journal that the test moves. `told`: warnings."""

    def __init__(self, tasks: asyncio.TaskGroup, run_dir: Path, journal: Any = None, **config: Any) -> None:
        self.checkpoints = Checkpoints(run_dir, CheckpointConfig(**{"every": 2, **config}))
        self.trainer, self.journal = Trainer(), journal or MemoryJournal()
        self.told, self.tasks = list[str](), list[asyncio.Task[None]]()

        def spawn(coro: Any, *, name: str) -> asyncio.Task[None]:
            self.tasks.append(tasks.create_task(coro, name=name))
            return self.tasks[-1]

        def controller_state() -> ControllerState:
            return ControllerState(feed={"cursor": 10 * self.trainer.version}, out={}, next_group_id=0)

        config_of_run = SimpleNamespace(journal=SimpleNamespace(keep="checkpoint"))
        log = SimpleNamespace(warn=self.told.append)
        life: Any = SimpleNamespace(spawn=spawn, log=log, config=config_of_run)
        trainer: Any = self.trainer
        self.checkpointer = Checkpointer(self.checkpoints, trainer, self.journal, controller_state, life)

    async def step(self, *, is_written: bool = True) -> None:
        """One optimizer step and what follows it; with `is_written`, until the disk is quiet."""
        self.trainer.version += 1
        await self.checkpointer.after_step(self.trainer.version)
        if is_written and self.tasks:
            await asyncio.wait(self.tasks)

    @property
    def whole(self) -> list[int]:
        """Versions on disk; each one holds its own weights."""
        for version in self.checkpoints.versions():
            weights = self.checkpoints.root / f"step_{version}" / "trainer" / "weights"
            assert weights.read_text() == str(version)
        return self.checkpoints.versions()


def live(story: Callable[[House], Awaitable[None]], run_dir: Path, **options: Any) -> None:
    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            await story(House(tasks, run_dir, **options))

    asyncio.run(play())


def test_checkpoint_that_comes_due_during_another_is_skipped(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.trainer.go.clear()
        for _ in range(5):
            await house.step(is_written=False)
        assert house.told == ["checkpoint of version 4 skipped: the previous one is still being written"]
        assert (house.whole, house.journal.events) == ([], [])
        house.trainer.go.set()
        await asyncio.wait(house.tasks)
        newest, _ = house.checkpoints.newest_whole()
        assert newest.controller["feed"] == {"cursor": 20}, "of the moment at which the weights were copied"
        await house.step()
        assert (house.whole, len(house.told)) == ([2, 6], 1)
        assert [event[1] for event in house.journal.named("checkpointed")] == [2, 6]

    live(story, tmp_path)


def break_at(house: House, place: str) -> None:
    if place == "finish":
        house.checkpoints.finish = Mock(side_effect=NO_SPACE)  # type: ignore[method-assign]
    else:
        house.trainer.fails[place.split()[0]] = LOST if place.endswith("lost") else NO_SPACE


@pytest.mark.parametrize("place", ["begin refused", "begin lost", "wait refused", "wait lost", "finish"])
@pytest.mark.parametrize("is_last", [False, True])
def test_failed_checkpoint_is_reported_and_costs_no_more(tmp_path: Path, place: str, is_last: bool) -> None:
    async def story(house: House) -> None:
        finish = house.checkpoints.finish
        for _ in range(3):
            await house.step()
        break_at(house, place)
        if is_last:
            house.trainer.version = 4
            await house.checkpointer.make_last(4)
        else:
            await house.step()
        assert (house.checkpointer.num_made, house.checkpointer.num_failed) == (1, 1)
        assert [text.startswith("no checkpoint: ") for text in house.told] == [True]
        assert (house.whole, [*house.checkpoints.root.glob(".step*")]) == ([2], []), "the last one stays"
        house.checkpoints.finish = finish  # type: ignore[method-assign]
        house.trainer.version = 7
        await house.step()
        assert house.whole == [2, 8], "and the next one is made"

    live(story, tmp_path)


# ---- a trainer that is started again while a checkpoint is being finished


class NewTrainer:
    """Reads what it is to load, and counts the batches that it is given; held at `stops_at` until `go`."""

    def __init__(self, stops_at: str) -> None:
        self.stops_at = stops_at
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.loaded: str | None = None
        self.trained: list[int] = []

    async def catch_up(self, state: Path | None, batches: AsyncIterator[Batch], _: object) -> None:
        await self._pass("loading")
        self.loaded = None if state is None else (state / "weights").read_text()
        async for batch in batches:
            await self._pass("training")
            self.trained.append(batch.version)

    async def _pass(self, place: str) -> None:
        if place == self.stops_at:
            self.reached.set()
            await self.go.wait()


async def recover(life: Life, house: House, trainer: Any) -> None:
    await recover_trainer(trainer, 3, journal=life.journal, checkpoints=house.checkpoints, num_batches=20)


async def begin(life: Life, house: House) -> None:
    """Three batches are trained, checkpoint 1 is whole, the trainer writes checkpoint 3; keep_last is 1."""
    house.trainer.version = 3
    house.trainer.go.clear()
    await life.run_steps(3)
    save_checkpoint(house.checkpoints, 1)
    await house.checkpointer.after_step(3)


@pytest.mark.parametrize("place", ["loading", "training"])
def test_checkpoint_of_a_recovery_stays_until_the_recovery_ends(tmp_path: Path, place: str) -> None:
    async def story(life: Life) -> None:
        trainer = NewTrainer(place)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, tmp_path, life.journal, every=3, keep_last=1)
            await begin(life, house)
            task = tasks.create_task(recover(life, house, trainer))
            await trainer.reached.wait()
            house.trainer.go.set()
            for _ in range(20):  # all that could be handed to threads by now ends
                await asyncio.to_thread(int)
                await life.journal.flush()
            trainer.go.set()
            await task
            assert (trainer.loaded, trainer.trained) == ("1", [1, 2])
        assert (house.checkpoints.versions(), house.checkpointer.num_made, house.told) == ([3], 1, [])

    lives(tmp_path / "journal.sqlite", story)
