"""Brings the parts of a resumed run, or new processes of its trainer, to where the killed ones stood, and
makes the checkpoints that this needs. Generates nothing.

The checkpoint says what the weights were, the journal everything since: its batches are trained on again as
they are, its ready groups are ready again, what ran goes on from its partial turns, what had been handed back
comes first (what failed at the version that goes on comes after it, as it would have). So does, if settings
were changed (--allow-change), what is too old for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoints.folder import Checkpoints, Pending, set_aside
from asyncrl.errors import CheckpointError, TrainerLost
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState
from asyncrl.messages.records import Batch, GroupId, Prompt, UnfinishedGroup
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.run.resume import ResumePoint
from asyncrl.trainer.trainer_client import TrainerClient
from asyncrl.waits import waiting

if TYPE_CHECKING:
    from asyncrl.run.build import Rooms  # which makes the Checkpointer
    from asyncrl.run.life import Life
    from asyncrl.run.report import Reporter

logger = logging.getLogger("asyncrl.run.restore")


async def recover_trainer(
    client: TrainerClient, journal: Journal, checkpoints: Checkpoints, version: int, num_batches: int
) -> None:
    """A trainer that was started again, in the middle of a run, goes to `version`: newest whole checkpoint,
    then the journal's batches.

    Raises JournalError if batches in between are not there any more, CheckpointError if a checkpoint cannot
    be read, TrainerError.
    """
    # Held to the end: one that is finished meanwhile would take this one away, and the batches since.
    async with checkpoints.in_use:
        whole, damaged = await asyncio.to_thread(checkpoints.newest_whole, keep_unfinished=True)
        start = 0 if whole is None else whole.version
        state = await journal.read_resume(start)
        journal.restored_nowait(start)
        stop = min(max(version, start), num_batches)
        folder = None if whole is None else whole.trainer_dir
        await client.recover(folder, load_batches(state, start, stop), lambda _batch, _report: None)
        for text in [found.why for found in damaged] + await asyncio.to_thread(set_aside, damaged):
            logger.warning("%s", text)


async def restore(
    rooms: Rooms, reporter: Reporter, point: ResumePoint, state: ResumeState
) -> tuple[UnfinishedGroup, ...]:
    """Everything but the engines; returns what goes on once they have the current weights.

    What can refuse goes first: data, buffer, and the trainer that loads the state. Then reporter and journal
    are told, and nothing but a broken part can end it. Raises what the parts raise.
    """
    feed, journal = rooms.feed, rooms.journal
    if state.order is not None:
        feed.check_order(state.order)
    is_journal_new = state.num_drawn == 0 and point.checkpoint is not None
    unfinished: tuple[UnfinishedGroup, ...] = ()
    ended: dict[GroupId, tuple[Prompt, str]] = {}
    if is_journal_new:
        _from_checkpoint_alone(rooms, point)
    else:
        unfinished, ended = _from_journal(rooms, state)
    before = (feed.num_drawn, feed.prompts_back(), rooms.buffer.next_group_id)
    is_restored = False

    def restored() -> None:
        nonlocal is_restored
        if not is_restored:
            is_restored = True
            journal.order_nowait(feed.order)
            journal.restored_nowait(point.version)
            reporter.resumes(point.version, state.counted)

    def trained_again(batch: Batch, report: TrainResponse) -> None:
        restored()
        journal.trained_nowait(batch.version, report.metrics)
        reporter.step(rooms, batch, report, step_s=report.metrics.get("perf/train_s", 0.0))

    folder = None if point.checkpoint is None else point.checkpoint.trainer_dir
    await rooms.trainer.recover(
        folder, lambda: load_batches(state, point.version, state.next_version), trained_again
    )
    restored()
    if is_journal_new:
        journal.began_at_nowait(point.version, *before)
    for group_id, (prompt, why) in ended.items():  # no fault of their own: the same seeds
        journal.group_ended_nowait(group_id, "handed_back", why, requeued=prompt.num_handed_back)
    return unfinished


def _from_journal(
    rooms: Rooms, state: ResumeState
) -> tuple[tuple[UnfinishedGroup, ...], dict[GroupId, tuple[Prompt, str]]]:
    """(what goes on, what is handed back and why)."""
    feed, ready = rooms.feed, [group for _, group in state.ready]
    first = {name: count for name, count in state.requeued.items() if name not in state.returning}
    feed.restore_nowait(state.num_drawn, first)
    prompts = {group.group_id: group.prompt for group in ready}
    ended, whole = dict[GroupId, tuple[Prompt, str]](), dict[GroupId, UnfinishedGroup]()
    for found in state.running:
        group_id, prompt = found.ticket.group_id, found.prompt
        made = feed.make_again(prompt.prompt_id, prompt.num_handed_back)  # the task alone has its answer
        if tuple(map(dict, made.messages)) != prompt.messages:
            ended[group_id] = (prompt, "the task makes another prompt of it")
            continue
        prompts[group_id], whole[group_id] = made, replace(found, prompt=made)
    tickets = [group.ticket for group in whole.values()]
    late = rooms.buffer.restore_nowait(state.next_version, state.next_group_id, tickets, ready)
    if late:
        logger.warning("handed back, as too old for the settings that have changed: groups %s", list(late))
    for group_id in late:
        ended[group_id] = (prompts[group_id], "too old under the settings that it was resumed with")
        whole.pop(group_id, None)
    for prompt, _ in ended.values():
        feed.hand_back_nowait(prompt)
    for prompt_id in state.returning:
        prompt = Prompt(prompt_id, (), num_handed_back=state.requeued[prompt_id])
        rooms.producers.returns_nowait(state.next_version, prompt)
    return tuple(whole.values()), ended


def _from_checkpoint_alone(rooms: Rooms, point: ResumePoint) -> None:
    """The journal is gone: what was in flight when the checkpoint was made is generated again."""
    assert point.checkpoint is not None
    controller = point.checkpoint.controller
    try:
        rooms.feed.load_state(controller["feed"])
        for prompt_id, num_handed_back in controller["out"].items():
            rooms.feed.hand_back_nowait(Prompt(prompt_id, (), num_handed_back=int(num_handed_back)))
        rooms.buffer.restore_nowait(point.version, int(controller["next_group_id"]), [], [])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{point.checkpoint.folder} does not say where the run stood: {type(error).__name__} {error}",
            rule="without its journal a run goes on from what the checkpoint says",
            way_out="put journal.sqlite back, or start a new run.",
        ) from error


async def load_batches(state: ResumeState, start: int, stop: int) -> AsyncIterator[Batch]:
    """Batches start .. stop - 1 of the journal, one at a time."""
    for version in range(start, stop):
        yield await asyncio.to_thread(state.load_batch, version)


class Checkpointer:
    """Makes checkpoints beside the training.

    Life:       after_step() -> begun (training is held up for the copy alone) -> written, checked, renamed,
                journaled -> idle.
    Waits:      the train loop sleeps in after_step for the copy; the rest is a task of its own, which sleeps
                until the state is written, then while a trainer that was started again goes back to an older
                one.
    Invariant:  one at a time: what is due while one is being written is left out and told. What cannot be
                written is told, each time, and neither touches older checkpoints nor the run.
    """

    def __init__(self, rooms: Rooms, job: Life) -> None:
        self._rooms, self._job = rooms, job
        self._checkpoints, self._trainer = rooms.checkpoints, rooms.trainer
        self._writing: asyncio.Task[None] | None = None
        self.num_made = self.num_failed = 0

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        return {"checkpoint/made": self.num_made, "checkpoint/failed": self.num_failed}

    async def after_step(self, version: int) -> None:
        """Begin a checkpoint if one is due at this version."""
        every = self._checkpoints.config.every
        if every is None or version % every:
            return
        if self._writing is not None and not self._writing.done():
            self._job.warn(
                f"the checkpoint at version {version} is left out: the one before is being written"
            )
        elif (begun := await self._begin()) is not None:
            writing = self._finish(*begun, self._rooms.controller_state())
            self._writing = self._job.spawn(writing, name=f"checkpoint {begun[1]}")

    async def make_last(self, version: int) -> None:
        """A checkpoint right now, after the one that is being written; returns when it is whole. For the end
        of a run.
        """
        if self._checkpoints.config.every is None or version == 0:
            return
        if self._writing is not None:
            with waiting("the checkpoint before", on="checkpoint"):
                await asyncio.wait({self._writing})
        if version not in self._checkpoints.versions() and (begun := await self._begin()) is not None:
            await self._finish(*begun, self._rooms.controller_state())

    async def _begin(self) -> tuple[Pending, int] | None:
        """(what the trainer is writing into, the version that it is of); None if it cannot, which is told."""
        pending = None
        try:
            pending = await asyncio.to_thread(self._checkpoints.begin)
            return pending, await self._trainer.begin_save_state(pending.trainer_dir)
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)
            return None

    async def _finish(self, pending: Pending, version: int, controller: Mapping[str, Any]) -> None:
        try:
            await self._trainer.wait_save_state()
            # Only now: had the trainer died meanwhile, it would have to go back first.
            async with self._checkpoints.in_use:
                with waiting("the files of a checkpoint to be whole", on="disk"):
                    folder = await asyncio.to_thread(self._checkpoints.finish, pending, version, controller)
                self.num_made += 1
                self._rooms.journal.checkpointed_nowait(version, folder, self._checkpoints.versions())
                if self._job.config.journal.keep == "checkpoint":
                    await self._rooms.journal.compact(self._checkpoints.oldest_version())
        except (CheckpointError, TrainerLost) as error:
            await self._failed(pending, error)

    async def _failed(self, pending: Pending | None, error: CheckpointError | TrainerLost) -> None:
        if pending is not None:
            await asyncio.to_thread(self._checkpoints.abandon, pending)
        self.num_failed += 1
        logger.warning("no checkpoint: %s", error)
        self._job.warn(f"no checkpoint: {error.what}")
