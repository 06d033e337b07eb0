"""When checkpoints are made, and what happens if one cannot be: it is told, older ones stay, and the run goes
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import CheckpointConfig
from asyncrl.errors import CheckpointError, TrainerLost
from asyncrl.journal.journal import Journal
from asyncrl.run.restore import Checkpointer
from asyncrl.testing.memory_journal import MemoryJournal

LOST = TrainerLost("trainer", "no answer")
NO_SPACE = CheckpointError("the trainer cannot save its state: no space left")


class Trainer:
    """Writes a file as a state. `go` unset: it is still writing. `fails`: what a call raises, by its name,
    once.
    """

    def __init__(self) -> None:
        self.version = 0
        self.go = asyncio.Event()
        self.go.set()
        self.fails: dict[str, Exception] = {}
        self.num_begun = 0
        self._folder = Path()

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
    def __init__(
        self, tasks: asyncio.TaskGroup, run_dir: Path, *, keep: Any = "checkpoint", **config: Any
    ) -> None:
        self.checkpoints = Checkpoints(run_dir, CheckpointConfig(**{"every": 2, **config}))
        self.trainer, self.journal = Trainer(), MemoryJournal()
        self.told: list[str] = []
        self.cursor = 0
        self.tasks: list[asyncio.Task[None]] = []

        def spawn(coro: Any, *, name: str) -> asyncio.Task[None]:
            self.tasks.append(tasks.create_task(coro, name=name))
            return self.tasks[-1]

        self.checkpointer = Checkpointer(
            self.checkpoints,
            self.trainer,
            cast(Journal, self.journal),
            controller_state=lambda: {"cursor": self.cursor},
            spawn=spawn,
            warn=self.told.append,
            keep=keep,
        )

    async def step(self, *, is_written: bool = True) -> None:
        """One optimizer step and what follows it; with `is_written`, until the disk is quiet."""
        self.trainer.version += 1
        self.cursor += 10
        await self.checkpointer.after_step(self.trainer.version)
        if is_written and self.tasks:
            await asyncio.wait(self.tasks)

    @property
    def whole(self) -> list[int]:
        """Versions on disk; each one is whole and holds its own weights, and nothing is left half done."""
        assert (
            not self.tasks[-1:] or not self.tasks[-1].done() or not list(self.checkpoints.root.glob(".step*"))
        )
        for version in self.checkpoints.versions():
            assert (self.checkpoints.root / f"step_{version}" / "trainer" / "weights").read_text() == str(
                version
            )
        return self.checkpoints.versions()


def live(story: Callable[[House], Awaitable[None]], run_dir: Path, **options: Any) -> None:
    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            await story(House(tasks, run_dir, **options))

    asyncio.run(play())


def test_a_checkpoint_is_made_at_each_multiple_and_journaled_once_it_is_whole(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        for _ in range(5):
            await house.step()
        assert house.whole == [2, 4]
        assert [event[1] for event in house.journal.named("checkpointed")] == [2, 4]
        whole, _ = house.checkpoints.newest_whole()
        assert whole is not None
        assert whole.controller == {"cursor": 40}
        assert (house.checkpointer.num_made, house.checkpointer.num_failed, house.told) == (2, 0, [])
        assert [task.get_name() for task in house.tasks] == ["checkpoint 2", "checkpoint 4"]

    live(story, tmp_path)


def test_the_run_goes_on_while_one_is_written_and_what_is_due_meanwhile_is_left_out_and_told(
    tmp_path: Path,
) -> None:
    async def story(house: House) -> None:
        house.trainer.go.clear()
        for _ in range(5):
            await house.step(is_written=False)
        assert house.told == ["the checkpoint at version 4 is left out: the one before is being written"]
        assert (house.whole, house.journal.events) == ([], [])
        house.trainer.go.set()
        await asyncio.wait(house.tasks)
        await house.step()
        assert house.whole == [2, 6]
        assert len(house.told) == 1
        whole, _ = house.checkpoints.newest_whole()
        assert whole is not None
        assert whole.controller == {"cursor": 60}

    live(story, tmp_path)


def test_what_it_says_of_the_controller_is_of_the_moment_at_which_the_weights_were_copied(
    tmp_path: Path,
) -> None:
    async def story(house: House) -> None:
        house.trainer.go.clear()
        await house.step(is_written=False)
        await house.step(is_written=False)
        house.cursor = 999
        house.trainer.go.set()
        await asyncio.wait(house.tasks)
        whole, _ = house.checkpoints.newest_whole()
        assert whole is not None
        assert whole.controller == {"cursor": 20}

    live(story, tmp_path)


def break_folder(house: House) -> None:
    house.checkpoints.root.parent.joinpath("checkpoints").rename(house.checkpoints.root.with_name("away"))
    house.checkpoints.root.write_text("a file where the folder was")


def break_finish(house: House) -> None:
    def finish(*_: Any) -> Path:
        raise CheckpointError("no checkpoint can be written: No space left on device")

    house.checkpoints.finish = finish  # type: ignore[method-assign]


PLACES: dict[str, Callable[[House], Any]] = {
    "no folder": break_folder,
    "begin refused": lambda house: house.trainer.fails.update(begin=NO_SPACE),
    "begin lost": lambda house: house.trainer.fails.update(begin=LOST),
    "wait refused": lambda house: house.trainer.fails.update(wait=NO_SPACE),
    "wait lost": lambda house: house.trainer.fails.update(wait=LOST),
    "finish": break_finish,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_last", [False, True])
def test_one_that_cannot_be_made_is_told_each_time_and_costs_nothing_else(
    tmp_path: Path, place: str, is_last: bool
) -> None:
    async def story(house: House) -> None:
        finish = house.checkpoints.finish
        await house.step()
        await house.step()
        for number in (1, 2):
            PLACES[place](house)
            if is_last:
                house.trainer.version = 2 + number
                await house.checkpointer.make_last(2 + number)
            else:
                await house.step()
                await house.step()
            assert (house.checkpointer.num_made, house.checkpointer.num_failed) == (1, number)
            assert len(house.told) == number
            assert house.told[-1].startswith("no checkpoint: ")
            if place == "no folder":
                house.checkpoints.root.unlink()
                house.checkpoints.root.with_name("away").rename(house.checkpoints.root)
            house.checkpoints.finish = finish  # type: ignore[method-assign]
            assert house.whole == [2], "the last whole one stays"
        house.trainer.version = 7
        await house.step()
        assert house.whole == [2, 8], "and the next one is made"

    live(story, tmp_path)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_version_that_has_its_checkpoint_gets_no_second_one_at_the_end(
    tmp_path: Path, is_written: bool
) -> None:
    async def story(house: House) -> None:
        if not is_written:
            house.trainer.go.clear()
        await house.step(is_written=False)
        await house.step(is_written=is_written)
        last = asyncio.ensure_future(house.checkpointer.make_last(2))
        await asyncio.sleep(0)
        house.trainer.go.set()
        await last
        assert (house.whole, house.trainer.num_begun, house.checkpointer.num_made) == ([2], 1, 1)

    live(story, tmp_path)


@settings(max_examples=20, deadline=None)
@given(
    keep_last=st.integers(1, 3),
    fails=st.lists(st.sampled_from(["", "begin", "wait"]), min_size=1, max_size=8),
)
def test_no_batch_is_forgotten_that_a_checkpoint_on_disk_would_need(
    tmp_path_factory: pytest.TempPathFactory, keep_last: int, fails: list[str]
) -> None:
    async def story(house: House) -> None:
        for number, name in enumerate(fails, start=1):
            house.trainer.fails = {name: NO_SPACE} if name else {}
            await house.step()
            bound = max((event[1] for event in house.journal.named("compact")), default=0)
            made = [version for version in range(1, number + 1) if not fails[version - 1]]
            assert house.whole == made[-keep_last:]
            assert bound <= min(house.whole, default=0)
            assert bound == 0 or len(house.whole) == keep_last
        assert len(house.told) == sum(map(bool, fails))

    live(story, tmp_path_factory.mktemp("run"), every=1, keep_last=keep_last)
