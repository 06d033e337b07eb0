"""A killed run's rooms go to where they stood: real journal, buffer and feed, a fake trainer worker, nothing
generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from journal_cases import make_batch, make_group, make_partial, make_rollout, open_journal, same_group

from asyncrl.buffer.buffer import Buffer
from asyncrl.checkpoints.folder import Checkpoints, Whole
from asyncrl.config import BufferConfig, CheckpointConfig, SupervisionConfig
from asyncrl.errors import CheckpointError, JournalError, TaskError, TrainerError
from asyncrl.journal.story import events
from asyncrl.messages.records import Batch, GroupId, Prompt, Ticket, UnfinishedGroup
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.run.resume import ResumePoint, restore
from asyncrl.run.supervise import Supervision
from asyncrl.run.supervise_trainer import SupervisedTrainer, recover_trainer
from asyncrl.tasks import Feed, Item
from asyncrl.testing.fake_trainer import FakeTrainerServer
from asyncrl.trainer.trainer_client import TrainerClient

SIZE = 100


class Questions:
    """Prompt i is question i, as journal_cases has it."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Item:
        return Item(f"Question {index}")

    def score(self, prompt: Any, completion: str) -> float:
        return 0.0


def make_feed(*, size: int = SIZE, **order: Any) -> Feed:
    return Feed(Questions(size), **{"seed": 0, "shuffle": False, **order})


def quick_worker() -> FakeTrainerServer:
    worker = FakeTrainerServer(train_s=0.0)
    worker.export_s = worker.load_s = worker.save_s = worker.write_s = 0.0
    return worker


class Life:
    """One life of a run: its rooms, with a journal that the next life finds, and its reporter. `restored`:
    how often it was told that nothing refuses any more, so that what the killed run reported may be cut.
    """

    def __init__(self, path: Path, *, num_batches: int = 20) -> None:
        self.journal = open_journal(path)
        self.worker = quick_worker()
        self.client, self.feed = TrainerClient(self.worker), make_feed()
        self.trainer = SupervisedTrainer(
            self.client,
            [],
            Supervision(SupervisionConfig(), 1.0, print, print),
            before_start=lambda: None,
            recover=self._never,
        )
        self.buffer = Buffer(
            BufferConfig(max_staleness=1, look_ahead=1),
            num_groups=2,
            num_batches=num_batches,
            on_handed_back=lambda *_: None,
        )
        self.producers = self
        self.steps: list[tuple[Batch, TrainResponse]] = []
        self.returned: list[tuple[int, str, int]] = []
        self.restored = 0

    async def _never(self, version: int) -> None:
        raise AssertionError(f"the worker of this test does not die, so nothing goes back to {version}")

    def admit(self) -> Ticket:
        ticket, prompt = self.buffer.admit_nowait(), self.feed.next_nowait()
        self.journal.admitted_nowait(ticket, prompt)
        return ticket

    def finish(self, ticket: Ticket) -> None:
        group = make_group(ticket.group_id, version=ticket.start_version)
        for trajectory in group.trajectories:
            self.journal.rollout_finished_nowait(ticket.group_id, (trajectory,))
        assert self.buffer.finish_nowait(group) == "ready"
        self.journal.group_ended_nowait(ticket.group_id, "ready", "")

    async def take_step(self, *, is_trained: bool = True) -> None:
        batch = self.buffer.take_nowait()
        await self.journal.batch_taken(batch)
        if is_trained:
            report = await self.client.train(batch)
            self.journal.trained_nowait(batch.version, report.metrics)
            self.buffer.set_served_nowait(report.policy_version)

    async def run_steps(self, number: int) -> None:
        for _ in range(number):
            for ticket in [self.admit(), self.admit()]:
                self.finish(ticket)
            await self.take_step()

    async def restore(self, whole: Whole | None = None) -> tuple[UnfinishedGroup, ...]:
        point = ResumePoint(whole)
        if whole is not None:
            self.worker.states[str(whole.trainer_dir)] = weights_of(point.version)
        state = await self.journal.read_resume(point.version)
        return await restore(self, self, point, state)  # type: ignore[arg-type]

    def resumes(self, version: int, counted: object) -> None:
        assert self.steps == [], "before the first step is told again"
        self.restored += 1

    def step(self, rooms: object, batch: Batch, report: TrainResponse, *, step_s: float) -> None:
        self.steps.append((batch, report))

    def returns_nowait(self, version: int, prompt: Prompt) -> None:
        self.returned.append((version, prompt.prompt_id, prompt.num_handed_back))


def weights_of(version: int) -> list[str]:
    return [f"0/{2 * v}#0,0/{2 * v}#1,0/{2 * v + 1}#0,0/{2 * v + 1}#1" for v in range(version)]


def lives(path: Path, *stories: Callable[[Life], Awaitable[None]], **options: Any) -> None:
    """One life after the other over one journal; each is cut off, not ended."""

    async def play(story: Callable[[Life], Awaitable[None]]) -> None:
        life = Life(path, **options)
        try:
            await story(life)
        finally:
            await life.journal.aclose()

    for story in stories:
        asyncio.run(play(story))


def make_whole(folder: Path, version: int, **controller: Any) -> Whole:
    return Whole(version, folder, controller)


async def leave_something_of_everything(life: Life) -> None:
    """Four batches, the last one taken and not trained on; then g8 ready, g9 in the middle, g10 given back,
    g11 and g12 failed.
    """
    await life.run_steps(3)
    for ticket in [life.admit(), life.admit()]:
        life.finish(ticket)
    eight, nine = life.admit(), life.admit()
    await life.take_step(is_trained=False)
    life.finish(eight)
    life.journal.rollout_finished_nowait(nine.group_id, make_rollout(9, 1, version=3))
    life.journal.rollout_failed_nowait(nine.group_id, 0, 3, "it timed out")
    life.journal.segment_nowait(nine.group_id, 2, 1, 0, make_partial(5))
    prompt = life.feed.next_nowait()
    life.journal.admitted_nowait(Ticket(GroupId(10), 3), prompt)
    life.journal.group_ended_nowait(GroupId(10), "handed_back", "dropped", requeued=1)
    for group_id, version in ((11, 3), (12, 4)):
        life.journal.admitted_nowait(Ticket(GroupId(group_id), version), life.feed.next_nowait())
        life.journal.group_ended_nowait(GroupId(group_id), "failed", "no reward", requeued=2)


@pytest.mark.parametrize("version", [0, 2, 4])
def test_batches_are_trained_again_as_they_are_and_everything_else_is_where_it_was(
    tmp_path: Path, version: int
) -> None:
    async def resumed(life: Life) -> None:
        whole = make_whole(tmp_path / "step", version) if version else None
        if version == 4:  # no checkpoint can be ahead of the journal: its batch was trained
            life.journal.trained_nowait(3, {})
        unfinished = await life.restore(whole)
        assert life.restored == 1
        assert life.worker.weights == weights_of(4)
        assert life.client.policy_version == 4
        assert [batch.version for batch, _ in life.steps] == list(range(version, 4))
        for batch, report in life.steps:
            expected = make_batch(batch.version, 2 * batch.version, 2 * batch.version + 1)
            assert [group.prompt for group in batch.groups] == [group.prompt for group in expected.groups]
            assert batch.min_version == expected.min_version
            assert report.policy_version == batch.version + 1
        (nine,) = unfinished
        assert (nine.ticket.group_id, nine.prompt.prompt_id) == (9, "0/9")
        assert ({index: len(rollout) for index, rollout in nine.rollouts.items()}, dict(nine.failures)) == (
            {1: 2},
            {0: (3, "it timed out")},
        )
        assert dict(nine.partials) == {2: (1, make_partial(5))}
        rule = life.buffer.rule
        assert (rule.next_batch, rule.num_ready, rule.num_running, rule.served) == (4, 1, 1, 4)
        assert life.buffer.next_group_id == 13
        prompts = [life.feed.next_nowait() for _ in range(3)]
        assert [(prompt.prompt_id, prompt.num_handed_back) for prompt in prompts] == [
            ("0/10", 1),
            ("0/11", 2),
            ("0/13", 0),
        ]
        assert life.returned == [(4, "0/12", 2)], "it failed at version 4, which goes on"
        assert life.buffer.finish_nowait(make_group(9, version=3)) == "ready"
        (eight, _) = life.buffer.take_nowait().groups
        assert same_group(eight, make_group(8, version=3))

    lives(tmp_path / "journal.sqlite", leave_something_of_everything, resumed)


def test_restoring_twice_in_a_row_comes_to_the_same(tmp_path: Path) -> None:
    found: list[Any] = []

    async def resumed(life: Life) -> None:
        unfinished = await life.restore()
        feed = [life.feed.next_nowait().prompt_id for _ in range(4)]
        found.append(
            (life.worker.weights, life.buffer.gauges(), feed, [group.ticket for group in unfinished])
        )

    lives(tmp_path / "journal.sqlite", leave_something_of_everything, resumed, resumed, resumed)
    assert found[0] == found[1] == found[2]


def test_a_prompt_that_the_task_makes_otherwise_now_starts_anew_and_comes_first(tmp_path: Path) -> None:
    async def first(life: Life) -> None:
        life.feed.next_nowait()
        prompt = Prompt("0/0", ({"role": "user", "content": "another question"},))
        life.journal.admitted_nowait(life.buffer.admit_nowait(), prompt)
        life.admit()

    async def second(life: Life) -> None:
        unfinished = await life.restore()
        assert [group.ticket.group_id for group in unfinished] == [1]
        assert life.buffer.rule.num_running == 1
        assert life.admit() == Ticket(GroupId(2), 0), "no number is used twice"

    async def third(life: Life) -> None:
        found = [(group.ticket.group_id, group.prompt.prompt_id) for group in await life.restore()]
        assert found == [(1, "0/1"), (2, "0/0")]
        assert life.feed.next_nowait().prompt_id == "0/2"

    lives(tmp_path / "journal.sqlite", first, second, third)


def test_groups_that_are_too_old_for_changed_settings_are_given_up_and_their_prompts_come_first(
    tmp_path: Path,
) -> None:
    """Batches 0 and 1 were taken with max_staleness 2; then g4 is ready and g5 runs, of version 0, and g6 is
    ready, of version 2.
    """

    def make_buffer(max_staleness: int) -> Buffer:
        config = BufferConfig(max_staleness=max_staleness, look_ahead=max_staleness)
        return Buffer(config, num_groups=2, num_batches=20, on_handed_back=lambda *_: None)

    async def first(life: Life) -> None:
        life.buffer = make_buffer(2)
        tickets = [life.admit() for _ in range(6)]
        for ticket in tickets[:5]:
            life.finish(ticket)
        await life.take_step()
        await life.take_step()
        life.finish(life.admit())
        life.journal.rollout_finished_nowait(GroupId(5), make_rollout(5, 1, version=0))

    async def second(life: Life) -> None:
        life.buffer = make_buffer(0)
        assert await life.restore() == ()
        rule = life.buffer.rule
        assert (rule.next_batch, rule.num_ready, rule.num_running) == (2, 1, 0)
        assert [life.admit().group_id] == [7]
        assert [life.feed.next_nowait().prompt_id, life.feed.next_nowait().prompt_id] == ["0/5", "0/7"], (
            "g7 has the prompt of g4"
        )
        life.finish(Ticket(GroupId(7), 2))
        await life.take_step()

    async def third(life: Life) -> None:
        life.buffer = make_buffer(0)
        assert await life.restore() == ()
        assert life.client.policy_version == 3, "what was given up stands in nobody's way"
        assert (await life.journal.read_resume(0)).counted["rollout/dropped"] == 0, (
            "the settings took them, and no batch left them too old"
        )
        assert [life.feed.next_nowait().prompt_id for _ in range(2)] == ["0/5", "0/7"]

    lives(tmp_path / "journal.sqlite", first, second, third)


class RefusesState:
    async def recover(self, *_: object) -> None:
        raise TrainerError("trainer-0", "the state is of another model")


@pytest.mark.parametrize("refusal", ["order", "task", "state", "tokens"])
def test_a_resume_that_is_refused_has_told_nobody_and_the_next_one_finds_all_as_it_was(
    tmp_path: Path, refusal: str
) -> None:
    """What the killed run had reported (metrics.jsonl) is cut at on_restored, and the journal then knows of
    another start.
    """
    whole = make_whole(tmp_path / "step_2", 2)

    async def first(life: Life) -> None:
        life.journal.order_nowait(life.feed.order)
        await leave_something_of_everything(life)
        if refusal == "tokens":
            await life.journal.compact(4)

    async def refused(life: Life) -> None:
        if refusal == "order":
            life.feed = make_feed(seed=1)
        elif refusal == "task":
            life.feed._num_prompts, life.feed._epoch = SIZE, lambda _: ([0], [0])
        elif refusal == "state":
            life.trainer = RefusesState()  # type: ignore[assignment]
        with pytest.raises((TaskError, TrainerError, JournalError)):
            await life.restore(whole)
        assert (life.restored, life.steps, life.worker.calls) == (0, [], [])
        await life.journal.flush()
        assert [event for event in events(life.journal.path) if event.what == "restored"] == []

    async def resumed(life: Life) -> None:
        unfinished = await life.restore(whole)
        assert (life.restored, len(life.steps), len(unfinished)) == (1, 2, 1)

    lives(tmp_path / "journal.sqlite", first, refused, *([] if refusal == "tokens" else [resumed]))


# ---- without the journal


def test_from_a_checkpoint_alone_what_was_out_comes_first_and_nothing_comes_twice(tmp_path: Path) -> None:
    controller: dict[str, Any] = {}

    async def first(life: Life) -> None:
        await life.run_steps(3)
        life.finish(life.admit())
        life.admit()
        controller.update(
            feed=life.feed.state(),
            out={"0/7": 2, **{prompt.prompt_id: 0 for prompt in life.buffer.prompts_ready()}},
        )
        controller["next_group_id"] = life.buffer.next_group_id

    async def second(life: Life) -> None:
        assert await life.restore(make_whole(tmp_path / "step_3", 3, **controller)) == ()
        assert life.worker.weights == weights_of(3)
        assert (life.client.policy_version, life.buffer.next_group_id) == (3, 8)
        rule = life.buffer.rule
        assert (rule.next_batch, rule.num_ready, rule.num_running) == (3, 0, 0)
        tickets = [life.admit() for _ in range(4)]
        assert [ticket.group_id for ticket in tickets] == [8, 9, 10, 11]

    async def third(life: Life) -> None:
        unfinished = await life.restore(make_whole(tmp_path / "step_3", 3, **controller))
        assert [group.prompt.prompt_id for group in unfinished] == ["0/6", "0/7", "0/8", "0/9"]
        assert life.feed.next_nowait().prompt_id == "0/10", (
            "prompts 0 to 5 are consumed, though this journal never saw them"
        )
        assert life.buffer.next_group_id == 12

    lives(tmp_path / "lost.sqlite", first)
    lives(tmp_path / "new.sqlite", second, third)


def test_killed_again_before_the_new_journal_saw_a_group_the_prompts_are_still_there(tmp_path: Path) -> None:
    feed = make_feed()
    for _ in range(8):
        feed.next_nowait()
    whole = make_whole(tmp_path / "step_3", 3, feed=feed.state(), out={"0/7": 1, "0/2": 0}, next_group_id=8)

    async def resumed(life: Life) -> None:
        await life.restore(whole)
        assert life.buffer.next_group_id == 8
        prompts = [life.feed.next_nowait() for _ in range(3)]
        assert [(prompt.prompt_id, prompt.num_handed_back) for prompt in prompts] == [
            ("0/2", 0),
            ("0/7", 1),
            ("0/8", 0),
        ]

    lives(tmp_path / "new.sqlite", resumed, resumed, resumed)


@pytest.mark.parametrize("spoil", ["out", "value"])
def test_a_checkpoint_that_does_not_say_where_the_run_stood_is_refused_with_a_way_out(
    tmp_path: Path, spoil: str
) -> None:
    controller: dict[str, Any] = {"feed": make_feed().state(), "out": {}, "next_group_id": 0}
    if spoil == "value":
        controller["out"] = {"0/5": 0}  # which was never drawn
    else:
        del controller[spoil]

    async def resumed(life: Life) -> None:
        with pytest.raises(CheckpointError, match="does not say where the run stood") as caught:
            await life.restore(make_whole(tmp_path / "step_3", 3, **controller))
        assert "journal.sqlite" in caught.value.way_out

    lives(tmp_path / "journal.sqlite", resumed)


# ---- a trainer that was started again in the middle of a run


def save_checkpoint(checkpoints: Checkpoints, version: int) -> None:
    pending = checkpoints.begin()
    pending.trainer_dir.mkdir()
    (pending.trainer_dir / "weights").write_text(str(version))
    checkpoints.finish(pending, version, {})


@pytest.mark.parametrize("saved", [(), (1, 2)])
def test_a_new_trainer_gets_the_newest_checkpoint_and_the_batches_up_to_the_version_that_was_answered(
    tmp_path: Path, saved: tuple[int, ...]
) -> None:
    async def story(life: Life) -> None:
        await life.run_steps(3)
        for ticket in [life.admit(), life.admit()]:
            life.finish(ticket)
        await life.take_step(is_trained=False)  # batch 3 is in the journal, and its step was never answered
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        for version in saved:
            save_checkpoint(checkpoints, version)
            life.worker.states[str(checkpoints.root / f"step_{version}" / "trainer")] = weights_of(version)
        unfinished = checkpoints.begin()
        life.worker.restart()
        await recover_trainer(life.client, life.journal, checkpoints, 3, num_batches=20)
        assert life.worker.weights == weights_of(3), "batch 3 is asked for again by the call that waits"
        assert life.worker.calls.count("/train") == 3 + 3 - max(saved, default=0)
        assert unfinished.folder.exists(), "one may be in the making"

    lives(tmp_path / "journal.sqlite", story)
