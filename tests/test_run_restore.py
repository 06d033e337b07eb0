"""A killed run's parts return to their place. A checkpoint stays until a new trainer
has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from buffer_groups import make_buffer
from fakes import MemoryJournal
from journal_cases import (
    asked,
    make_group,
    make_partial,
    make_rollout,
    same_group,
    same_partial,
)
from restored_cases import (
    Life,
    batch_at,
    make_feed,
    save_checkpoint,
    weights_of,
)

from asyncrl.base.errors import (
    CheckpointError,
    JournalError,
    TaskError,
    TrainerError,
    TrainerLost,
)
from asyncrl.base.http import Refused
from asyncrl.config.checkpoint_config import CheckpointConfig
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.trainer_recovery import (
    journaled_batches,
    recover_trainer,
)
from asyncrl.journal.checkpoint_folders import Checkpoint, Checkpoints
from asyncrl.journal.read import run_story
from asyncrl.messages.records import (
    Batch,
    GroupId,
    Outcome,
    Prompt,
    Ticket,
)
from asyncrl.tasks.prompt_source import Epochs


def lives(path: Path, *stories: Callable[[Life], Awaitable[None]]) -> None:
    """Processes of a run, one after the other over one journal; each is cut off, not
    ended.
    """

    async def play(story: Callable[[Life], Awaitable[None]]) -> None:
        life = Life(path)
        async with aclosing(life.journal):
            await story(life)

    for story in stories:
        asyncio.run(play(story))


async def leave_something_of_everything(life: Life) -> None:
    """Take four batches, train three. Then g8 is ready, g9 half done, g10 returned, g11
    and g12 failed.
    """
    life.journal.note_nowait("order", life.feed.order)
    await life.run_steps(3)
    life.finish(life.admit(), life.admit())
    eight, nine = life.admit(), life.admit()
    await life.take_step(is_trained=False)
    life.finish(eight)
    life.journal.add_rollout_nowait(nine.group_id, make_rollout(9, 1, version=3))
    life.journal.add_failure_nowait(nine.group_id, 0, 3, "it timed out")
    life.journal.add_segment_nowait(nine.group_id, 2, 1, make_partial(5))
    life.journal.add_admission_nowait(Ticket(GroupId(10), 3), life.feed.next_nowait())
    life.journal.end_group_nowait(GroupId(10), "requeued", "dropped", requeued=1)
    for group_id, version in ((11, 3), (12, 4)):
        life.journal.add_admission_nowait(
            Ticket(GroupId(group_id), version), life.feed.next_nowait()
        )
        life.journal.end_group_nowait(
            GroupId(group_id), "failed", "no reward", requeued=2
        )


@pytest.mark.parametrize("version", [0, 2, 4])
def test_resume_trains_batches_again_and_restores_everything_else(
    tmp_path: Path, version: int
) -> None:
    async def resumed(life: Life) -> None:
        # no checkpoint can be ahead of the journal: its batch was trained
        if version == 4:
            life.journal.add_training_nowait(3, {})
        (nine,) = await life.restore(
            Checkpoint(version, tmp_path / "step", {}) if version else None
        )
        assert (life.restored, life.worker.weights, life.trainer.policy_version) == (
            1,
            weights_of(4),
            4,
        )
        assert [batch.version for batch, _ in life.steps] == list(range(version, 4))
        for batch, report in life.steps:
            expected = batch_at(batch.version)
            assert [group.prompt for group in batch.groups] == [
                group.prompt for group in expected.groups
            ]
            assert (batch.min_version, report.policy_version) == (
                expected.min_version,
                batch.version + 1,
            )
        assert (nine.ticket.group_id, nine.prompt.prompt_id) == (9, "0/9")
        assert {index: len(rollout) for index, rollout in nine.rollouts.items()} == {
            1: 2
        }
        assert (nine.failures, nine.partials.keys()) == ({0: (3, "it timed out")}, {2})
        attempt, partial = nine.partials[2]
        assert (attempt, same_partial(partial, make_partial(5))) == (1, True)
        assert (
            *life.numbers(),
            life.buffer.rule.served,
            life.buffer.rule.num_issued,
        ) == (4, 1, 1, 4, 13)
        assert life.next_prompts(3) == [("0/10", 1), ("0/11", 2), ("0/13", 0)]
        assert [
            (at, prompt.prompt_id, prompt.num_requeued) for at, prompt in life.returned
        ] == [(4, "0/12", 2)]
        assert life.buffer.finish_nowait(make_group(9, version=3)) == "ready"
        (eight, _) = life.buffer.take_nowait().groups
        assert same_group(eight, make_group(8, version=3))

    lives(tmp_path / "journal.sqlite", leave_something_of_everything, resumed, resumed)


def test_prompt_that_the_task_changed_starts_over_first(tmp_path: Path) -> None:
    async def first(life: Life) -> None:
        life.feed.next_nowait()
        prompt = Prompt("0/0", ({"role": "user", "content": "another question"},))
        life.journal.add_admission_nowait(life.buffer.admit_nowait(), prompt)
        life.admit()

    async def second(life: Life) -> None:
        assert [group.ticket.group_id for group in await life.restore()] == [1]
        assert life.admit() == Ticket(GroupId(2), 0), "no number is used twice"

    async def third(life: Life) -> None:
        found = [
            (group.ticket.group_id, group.prompt.prompt_id)
            for group in await life.restore()
        ]
        assert found == [(1, "0/1"), (2, "0/0")]
        assert life.next_prompts(1) == [("0/2", 0)]

    lives(tmp_path / "journal.sqlite", first, second, third)


def test_rewards_of_a_requeued_group_are_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    keys = list[str]()

    async def first(life: Life) -> None:
        prompt = Prompt("0/0", ({"role": "user", "content": "another question"},))
        life.journal.add_admission_nowait(life.buffer.admit_nowait(), prompt)
        key, digest = life.late.expect_nowait("g0/r1")
        keys.append(key)
        rollout, *others = make_rollout(0, 1, version=0)
        awaits = replace(rollout, reward=0.0, awaits=digest)
        life.journal.add_rollout_nowait(GroupId(0), (awaits, *others))

    async def second(life: Life) -> None:
        life.feed.next_nowait()
        assert await life.restore() == ()

    async def third(life: Life) -> None:
        for _ in range(2):
            life.late.is_open = True
            with pytest.raises(Refused, match="the task now makes a different prompt"):
                await life.late.post(keys[0], Outcome(1.0))
            await life.restore()

    lives(tmp_path / "journal.sqlite", first, second, third)


def test_too_old_groups_return_their_prompts_first(tmp_path: Path) -> None:
    """Batches 0 and 1 were taken with max_staleness 2; then g4 is ready and g5 runs, of
    version 0, and g6 is ready, of version 2.
    """

    async def first(life: Life) -> None:
        life.buffer = make_buffer(num_batches=20, max_staleness=2)
        tickets = [life.admit() for _ in range(6)]
        life.finish(*tickets[:5])
        await life.take_step()
        await life.take_step()
        life.finish(life.admit())
        life.journal.add_rollout_nowait(GroupId(5), make_rollout(5, 1, version=0))

    async def second(life: Life) -> None:
        life.buffer = make_buffer(num_batches=20, max_staleness=0)
        assert await life.restore() == ()
        assert life.numbers() == (2, 1, 0)
        assert life.admit().group_id == 7
        assert life.next_prompts(2) == [("0/5", 0), ("0/7", 0)], (
            "g7 has the prompt of g4"
        )
        life.finish(Ticket(GroupId(7), 2))
        await life.take_step()

    async def third(life: Life) -> None:
        life.buffer = make_buffer(num_batches=20, max_staleness=0)
        assert await life.restore() == ()
        assert life.trainer.policy_version == 3
        state = await life.journal.read_resume(0)
        assert state.counted["rollout/dropped"] == 0, "no batch left them too old"
        assert life.next_prompts(2) == [("0/5", 0), ("0/7", 0)]

    lives(tmp_path / "journal.sqlite", first, second, third)


@pytest.mark.parametrize("refusal", ["order", "task", "state", "tokens"])
def test_refused_resume_changes_nothing(tmp_path: Path, refusal: str) -> None:
    """The reporter cuts the killed run's lines (metrics.jsonl), and the journal then
    has another start.
    """
    whole = Checkpoint(2, tmp_path / "step_2", {})

    async def first(life: Life) -> None:
        await leave_something_of_everything(life)
        if refusal == "tokens":
            await life.journal.compact(4)

    async def refused(life: Life) -> None:
        if refusal == "order":
            life.feed = make_feed(seed=1)
        elif refusal == "task":
            life.feed._tasks[""].epochs = Epochs(1, seed=0, shuffle=False)
        elif refusal == "state":
            error = TrainerError("trainer-0", "the state is of another model")
            life.trainer.recover = AsyncMock(side_effect=error)  # type: ignore[method-assign]
        with pytest.raises((TaskError, TrainerError, JournalError)):
            await life.restore(whole)
        assert (life.restored, life.steps, life.worker.calls) == (0, [], [])
        await life.journal.flush()
        assert "restored" not in {
            event["what"] for event in asked(life.journal.path, run_story)["events"]
        }

    async def resumed(life: Life) -> None:
        unfinished = await life.restore(whole)
        assert (life.restored, len(life.steps), len(unfinished)) == (1, 2, 1)

    lives(
        tmp_path / "journal.sqlite",
        first,
        refused,
        *([] if refusal == "tokens" else [resumed]),
    )


def test_resume_from_a_checkpoint_loses_and_doubles_no_prompt(tmp_path: Path) -> None:
    controller: dict[str, Any] = {}
    whole = Checkpoint(3, tmp_path / "step_3", controller)

    async def first(life: Life) -> None:
        await life.run_steps(3)
        life.finish(life.admit())
        life.admit()
        ready = {prompt.prompt_id: 0 for prompt in life.buffer.prompts_ready()}
        controller.update(
            order=life.feed.order, num_drawn=life.feed.num_drawn, epochs=[]
        )
        controller.update(
            out={"0/7": 2, **ready},
            next_group_id=life.buffer.rule.num_issued,
            part_groups=4,
        )

    async def killed_before_a_group(life: Life) -> None:
        await life.restore(whole)
        assert life.next_prompts(3) == [("0/6", 0), ("0/7", 2), ("0/8", 0)]

    async def second(life: Life) -> None:
        assert await life.restore(whole) == ()
        assert (life.worker.weights, life.trainer.policy_version) == (weights_of(3), 3)
        assert life.numbers() == (3, 0, 0)
        assert [life.admit().group_id for _ in range(4)] == [8, 9, 10, 11]

    async def third(life: Life) -> None:
        unfinished = await life.restore(whole)
        assert [group.prompt.prompt_id for group in unfinished] == [
            "0/6",
            "0/7",
            "0/8",
            "0/9",
        ]
        assert life.next_prompts(1) == [("0/10", 0)], (
            "0 to 5 are consumed, though this journal saw none"
        )
        assert life.buffer.rule.num_issued == 12
        with pytest.raises(
            JournalError, match="begins at version 3, after the newest checkpoint, 2"
        ):
            await life.journal.read_resume(2)

    lives(tmp_path / "lost.sqlite", first)
    lives(tmp_path / "new.sqlite", killed_before_a_group, second, third)


LOST = TrainerLost("trainer", "no answer")
NO_SPACE = CheckpointError("the trainer cannot save its state: no space left")


class Trainer:
    """Writes its version as a state, once `go` is set. `fails`: what a call raises, by
    its name, once.
    """

    def __init__(self) -> None:
        self.version, self.fails = 0, dict[str, Exception]()
        self.go = asyncio.Event()
        self.go.set()

    async def begin_save_state(self, path: Path) -> int:
        self._fail("begin")
        path.mkdir()  # noqa: ASYNC240  one folder
        self._folder, self._begun = path, self.version
        return self.version

    async def wait_save_state(self) -> None:
        await self.go.wait()
        self._fail("wait")
        (self._folder / "weights").write_text(str(self._begun))

    def _fail(self, name: str) -> None:
        if name in self.fails:
            raise self.fails.pop(name)


class World:
    """A checkpointer over a trainer and a journal that the test moves. `told`:
    warnings.
    """

    def __init__(self, tasks: asyncio.TaskGroup, run_dir: Path, **config: Any) -> None:
        self.checkpoints = Checkpoints(
            run_dir, CheckpointConfig(**{"every": 2, **config})
        )
        self.trainer, self.journal = Trainer(), MemoryJournal()
        self.told, self.tasks = list[str](), list[asyncio.Task[None]]()

        def spawn(coro: Any, *, name: str) -> asyncio.Task[None]:
            self.tasks.append(tasks.create_task(coro, name=name))
            return self.tasks[-1]

        def controller_state() -> dict[str, Any]:
            return {"num_drawn": 10 * self.trainer.version}

        config_of_run = SimpleNamespace(journal=SimpleNamespace(keep="checkpoint"))
        log = SimpleNamespace(warn=self.told.append)
        life: Any = SimpleNamespace(
            spawn=spawn, log=log, config=config_of_run, run_dir=run_dir
        )
        trainer: Any = self.trainer
        self.checkpointer = Checkpointer(
            self.checkpoints, trainer, self.journal, controller_state, life
        )

    async def step(self, *, is_written: bool = True) -> None:
        """Take an optimizer step with its checkpoint; with `is_written`, wait until it
        is on disk.
        """
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


def live(
    story: Callable[[World], Awaitable[None]], run_dir: Path, **options: Any
) -> None:
    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            await story(World(tasks, run_dir, **options))

    asyncio.run(play())


def test_checkpoint_that_comes_due_during_another_is_skipped(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.trainer.go.clear()
        for _ in range(5):
            await world.step(is_written=False)
        assert world.told == [
            "checkpoint of version 4 skipped: the previous one is still being written"
        ]
        assert (world.whole, world.journal.events) == ([], [])
        world.trainer.go.set()
        await asyncio.wait(world.tasks)
        newest, _ = world.checkpoints.newest_valid()
        assert newest.controller == {"num_drawn": 20}, (
            "of the moment at which the weights were copied"
        )
        await world.step()
        assert (world.whole, len(world.told)) == ([2, 6], 1)

    live(story, tmp_path)


@pytest.mark.parametrize(
    ("saved", "reached", "every", "is_made"),
    [
        (0, 7, 5, True),
        (0, 5, 5, True),
        (5, 12, 5, True),
        (7, 10, 5, True),
        (5, 9, 5, False),
        (0, 4, 5, False),
        (7, 9, 5, False),
        (0, 9, None, False),
    ],
)
def test_catch_up_past_a_due_checkpoint_makes_one(
    tmp_path: Path, saved: int, reached: int, every: int | None, is_made: bool
) -> None:
    async def story(world: World) -> None:
        if saved:
            save_checkpoint(world.checkpoints, saved)
        world.trainer.version = reached
        await world.checkpointer.after_catch_up(reached)
        if world.tasks:
            await asyncio.wait(world.tasks)
        assert world.whole == [saved] * bool(saved) + [reached] * is_made

    live(story, tmp_path, every=every)


def break_at(world: World, place: str) -> None:
    if place == "finish":
        world.checkpoints.finish = Mock(side_effect=NO_SPACE)  # type: ignore[method-assign]
    else:
        world.trainer.fails[place.split()[0]] = (
            LOST if place.endswith("lost") else NO_SPACE
        )


@pytest.mark.parametrize(
    "place", ["begin refused", "begin lost", "wait refused", "wait lost", "finish"]
)
@pytest.mark.parametrize("is_last", [False, True])
def test_failed_checkpoint_is_reported_and_costs_no_more(
    tmp_path: Path, place: str, is_last: bool
) -> None:
    async def story(world: World) -> None:
        finish = world.checkpoints.finish
        for _ in range(3):
            await world.step()
        break_at(world, place)
        if is_last:
            world.trainer.version = 4
            await world.checkpointer.make_last(4)
        else:
            await world.step()
        assert (world.checkpointer.num_made, world.checkpointer.num_failed) == (1, 1)
        assert [text.startswith("no checkpoint: ") for text in world.told] == [True]
        assert (world.whole, [*world.checkpoints.root.glob(".step*")]) == ([2], []), (
            "the last one stays"
        )
        world.checkpoints.finish = finish  # type: ignore[method-assign]
        world.trainer.version = 7
        await world.step()
        assert world.whole == [2, 8], "and the next one is made"

    live(story, tmp_path)


def test_slow_or_failed_callback_is_a_warning_and_the_newest_checkpoint_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[tuple[str, ...]]()
    results: list[tuple[int | None, str] | OSError]
    results = [(0, "hello"), (None, ""), (1, "Killed"), OSError("no process")]

    async def story(world: World) -> None:
        go, called = asyncio.Event(), asyncio.Event()

        async def run(module: str, arguments: list[str], _: float) -> Any:
            started.append((module, *arguments))
            called.set()
            await go.wait()
            if isinstance(result := results.pop(0), OSError):
                raise result
            return result

        monkeypatch.setattr("asyncrl.job.checkpointer.run_module", run)
        writing = list[asyncio.Task[None]]()
        for _ in range(3):
            await world.step(is_written=False)
            writing = [
                task for task in world.tasks if "callback" not in task.get_name()
            ]
            await asyncio.wait(writing)
        go.set()
        await world.checkpointer.wait_callbacks()
        while results:
            await world.step()
            await world.checkpointer.wait_callbacks()
        go.clear()
        await world.step(is_written=False)
        called.clear()
        await called.wait()
        world.tasks[-1].cancel()
        await asyncio.wait(world.tasks)
        assert world.checkpointer.num_made == 6
        assert [text.partition(" of ")[2] for text in world.told] == [
            "version 2 failed: a newer checkpoint was made before its turn",
            "version 3 failed: exit code None (limit: 3600 s)",
            "version 4 failed: Killed",
            "version 5 failed: no process",
            "version 6 failed: it was ended with the run",
        ]

    live(story, tmp_path, every=1, callback="my_hub:push")
    module = "asyncrl.job.checkpoint_callback"
    assert started == [(module, str(tmp_path), str(n)) for n in (1, 3, 4, 5, 6)]


# ---- a trainer that is started again while a checkpoint is being finished


def test_checkpoint_waits_for_the_end_of_a_recovery(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.step()
        await world.step()
        await world.step()
        async with world.checkpoints.in_use:
            await world.step(is_written=False)
            for _ in range(20):  # all that could be handed to threads by now ends
                await asyncio.to_thread(int)
            assert world.whole == [2]
        await asyncio.wait(world.tasks)
        assert (world.whole, world.checkpointer.num_made, world.told) == ([4], 2, [])

    live(story, tmp_path, keep_last=1)


def test_recovery_keeps_its_checkpoint_until_it_ends(tmp_path: Path) -> None:
    async def story(life: Life) -> None:
        await life.run_steps(3)
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        save_checkpoint(checkpoints, 1)
        trained = list[int]()

        async def catch_up(
            state: Path, batches: AsyncIterator[Batch], _: object
        ) -> None:
            assert (state / "weights").read_text() == "1"
            async for batch in batches:
                assert checkpoints.in_use.locked()
                trained.append(batch.version)

        client: Any = SimpleNamespace(catch_up=catch_up)
        await recover_trainer(
            client,
            3,
            checkpoints=checkpoints,
            batches=partial(journaled_batches, life.journal),
        )
        assert trained == [1, 2]

    lives(tmp_path / "journal.sqlite", story)
