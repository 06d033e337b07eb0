"""Batches, weights and lives of a run that is killed and restored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import AsyncMock

from buffer_groups import make_buffer
from fake_server import FakeProcess, FakeTrainerServer
from journal_cases import (
    make_batch,
    make_group,
    open_journal,
)

from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.job.resume import ResumePoint, restore
from asyncrl.job.trainer_recovery import (
    SupervisedTrainer,
)
from asyncrl.journal.checkpoint_folders import Checkpoint, Checkpoints
from asyncrl.launch.supervise import Supervision
from asyncrl.messages.records import (
    Batch,
    Prompt,
    Ticket,
    UnfinishedGroup,
)
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.metrics import SpecialTokens
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.tasks import PromptSource, TaskPrompts


def batch_at(version: int) -> Batch:
    return make_batch(version, 2 * version, 2 * version + 1)


def weights_of(version: int) -> list[str]:
    """The fake's weights after `version` batches of World.steps."""
    return [
        f"0/{2 * v}#0,0/{2 * v}#1,0/{2 * v + 1}#0,0/{2 * v + 1}#1"
        for v in range(version)
    ]


class Questions:
    """Prompt i is question i, like in journal_cases."""

    def __len__(self) -> int:
        return 100

    def prompt(self, index: int) -> str:
        return f"Question {index}"


def make_feed(seed: int = 0) -> PromptSource:
    return PromptSource(TaskPrompts(Questions(), seed=seed, shuffle=False))  # type: ignore[arg-type]


class Life:
    """One process of a run: its components, reporter and journal. `restored` counts
    calls of the reporter after a resume.
    """

    def __init__(self, path: Path) -> None:
        self.journal, self.buffer, self.feed = (
            open_journal(path),
            make_buffer(num_batches=20),
            make_feed(),
        )
        self.worker = FakeTrainerServer(train_s=0.0)
        self.worker.export_s = self.worker.load_s = self.worker.save_s = (
            self.worker.write_s
        ) = 0.0
        supervision, never = (
            Supervision(SupervisionConfig(), 1.0, print, print),
            AsyncMock(),
        )
        self.trainer = SupervisedTrainer(
            [FakeProcess(self.worker)],
            supervision,
            bring_back=never,
        )
        self.producers = self
        self.late = LateRewards(self.journal, timeout_s=9.0)
        self.steps: list[tuple[Batch, TrainResponse]] = []
        self.returned: list[tuple[int, Prompt]] = []
        self.restored = 0

    def admit(self) -> Ticket:
        ticket, prompt = self.buffer.admit_nowait(), self.feed.next_nowait()
        self.journal.add_admission_nowait(ticket, prompt)
        return ticket

    def finish(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            group = make_group(ticket.group_id, version=ticket.start_version)
            for trajectory in group.trajectories:
                self.journal.add_rollout_nowait(ticket.group_id, (trajectory,))
            assert self.buffer.finish_nowait(group) == "ready"
            self.journal.end_group_nowait(ticket.group_id, "ready", "")

    def numbers(self) -> tuple[int, int, int]:
        """(next batch, ready groups, running groups)."""
        return (
            self.buffer.rule.next_batch,
            self.buffer.rule.num_ready,
            self.buffer.rule.num_running,
        )

    async def take_step(self, *, is_trained: bool = True) -> None:
        batch = self.buffer.take_nowait()
        await self.journal.add_batch(batch)
        if is_trained:
            report = await self.trainer.train(batch)
            self.journal.add_training_nowait(batch.version, report.metrics)
            self.buffer.set_served_nowait(report.policy_version)

    async def run_steps(self, number: int) -> None:
        for _ in range(number):
            self.finish(self.admit(), self.admit())
            await self.take_step()

    async def restore(
        self, whole: Checkpoint | None = None
    ) -> tuple[UnfinishedGroup, ...]:
        point = ResumePoint(whole)
        if whole is not None:
            self.worker.states[str(whole.trainer_dir)] = weights_of(point.version)
        state = await self.journal.read_resume(point.version)
        return await restore(self, self, point, state)  # type: ignore[arg-type]

    def next_prompts(self, number: int) -> list[tuple[str, int]]:
        prompts = [self.feed.next_nowait() for _ in range(number)]
        return [(prompt.prompt_id, prompt.num_requeued) for prompt in prompts]

    # As reporter and producers.

    special_tokens = SpecialTokens()

    def resume_at(self, version: int, counted: object, spent_s: float) -> None:
        assert self.steps == []
        self.restored += 1

    def end_step(self, rooms: object, batch: Batch) -> None: ...

    def step(
        self,
        rooms: object,
        batch: Batch,
        report: TrainResponse,
        found: Mapping[str, float],
        ended: object,
    ) -> None:
        self.steps.append((batch, report))

    def returns_nowait(self, version: int, prompt: Prompt) -> None:
        self.returned.append((version, prompt))


def save_checkpoint(checkpoints: Checkpoints, version: int) -> None:
    pending = checkpoints.begin()
    (pending / "trainer").mkdir()
    (pending / "trainer" / "weights").write_text(str(version))
    checkpoints.finish(pending, version, {})
