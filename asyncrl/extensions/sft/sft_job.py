"""The job of `asyncrl sft`. There is no journal: the batch of each version follows from the
seed, so a resume trains on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asyncrl.base.waits import span
from asyncrl.extensions.sft.demonstrations import (
    DemonstrationFeed,
    Demonstrations,
    held_out_batches,
    read_demonstrations,
)
from asyncrl.extensions.sft.sft_config import SftConfig
from asyncrl.job.build import make_fleet, prepare_model
from asyncrl.job.check.model_check import positions_of
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.resume import has_trained_all, show_done
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.job.training_job import TrainingJob
from asyncrl.messages.records import Batch
from asyncrl.messages.tokens import Tokens
from asyncrl.observe.console import TRAINING
from asyncrl.observe.run_dir import (
    EVAL_FILE,
    cut_steps,
    read_object,
)
from asyncrl.observe.watchdog import Reported
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import DATA_PIN, DataPin
from asyncrl.trainer.model.model_folder import ModelPin


class SftData(NamedTuple):
    train: Demonstrations
    held_out: Demonstrations | None
    model_path: Path
    tokenizer: HFChatTokenizer
    feed: DemonstrationFeed


@dataclass(eq=False)
class SftJob(TrainingJob):
    """Reads all rows -> starts the trainer -> trains, measures, checkpoints -> saves.

    Waits: the main task for the trainer. Dies anywhere: the newest checkpoint has a
        version, and the versions after it are trained again from the same rows.
    """

    settings: SftConfig
    data: SftData = field(init=False)
    num_measured: int = field(default=0, init=False)
    """Held-out batches."""

    async def live(self) -> int:
        # Before the reports, which show the number of steps.
        self.data = await self._read_data()
        if self._is_done():
            return 0
        return await super().live()

    async def _read_data(self) -> SftData:
        config, run_dir, point = self.settings, self.lifecycle.run_dir, self.point
        model_pin = ModelPin(run_dir, config.model.path, is_free=point.may_change_model)
        # Templates may write the date. A resume must read the same tokens.
        began = read_object(run_dir / DATA_PIN, []).get("date")
        began = began or date.today().isoformat()
        model_path, tokenizer = await prepare_model(
            self.lifecycle, model_pin.revision, date.fromisoformat(began)
        )
        await asyncio.to_thread(model_pin.read, model_path)
        self.lifecycle.log.activity("reading the demonstrations")
        positions = positions_of(config.model)
        read = partial(read_demonstrations, config.data, tokenizer, positions)
        train = await asyncio.to_thread(read)
        held_out = None
        if config.data.eval_files is not None:
            held_out = await asyncio.to_thread(read, "eval_files")
        pins = {"rows": train.digest, "date": began}
        data_pin = DataPin(run_dir, pins, is_free=point.may_change_data, section="data")
        feed = DemonstrationFeed(train.rows, config.trainer.num_groups, config.seed)
        self.pins = (model_pin, data_pin)
        return SftData(train, held_out, model_path, tokenizer, feed)

    def _is_done(self) -> bool:
        """Set the number of steps; return whether an earlier start has trained them all
        and saved the model.
        """
        num_steps = self.settings.data.epochs * self.data.feed.steps_per_epoch
        most = self.settings.trainer.num_steps
        key = "data.epochs"
        if 0 < most < num_steps:
            num_steps, key = most, "trainer.num_steps"
        run_dir = self.lifecycle.run_dir
        version = self.point.version
        if not self.point.is_new and has_trained_all(run_dir, num_steps, version, key):
            show_done(run_dir, num_steps, key)
            return True
        run = self.settings.as_run(num_steps, self.data.train.longest)
        self.lifecycle.config = run
        self.reporter.settle(run)
        return False

    async def build(self) -> None:
        lifecycle, data = self.lifecycle, self.data
        for rows in filter(None, (data.train, data.held_out)):
            for text in rows.warnings(data.tokenizer):
                lifecycle.log.warn(text)
        fleet = await make_fleet(
            lifecycle,
            self.placement,
            data.model_path,
            data.tokenizer,
            note=self.note,
            batches=partial(_batches, data.feed),
        )
        lifecycle.servers = fleet.servers
        await fleet.start(0)
        self.trainer = fleet.trainer
        self.checkpointer = Checkpointer(
            fleet.checkpoints, fleet.trainer, None, dict, lifecycle
        )

    def reported(self) -> Reported:
        known = super().reported()
        # A held-out measurement may take longer than watchdog_s.
        measured = {"evaluation/ended": self.num_measured}
        return known._replace(marks={**known.marks, **measured})

    async def restore(self) -> None:
        version, feed = self.point.version, self.data.feed
        # No batch: the training continues from there.
        await self.trainer.recover(
            self.point.trainer_dir, lambda: _batches(feed, 0, 0), lambda *_: None
        )
        # From here on nothing refuses, so the records of later steps may go.
        with suppress(FileNotFoundError):
            cut_steps(self.lifecycle.run_dir / EVAL_FILE, version)
        self.reporter.resume_at(version, {})

    # ---- the training

    async def train(self) -> None:
        self.lifecycle.can_stop = True
        trainer, held_out = self.trainer, self.data.held_out
        num_steps = self.lifecycle.config.trainer.num_steps
        every = self.settings.data.eval_every or self.data.feed.steps_per_epoch

        while trainer.policy_version < num_steps:
            if self.lifecycle.stop.is_set():
                return
            batch = self.data.feed.batch(trainer.policy_version)
            with span("trainer", "train", batch.version):
                report = await trainer.train(batch)
            version = report.policy_version
            is_due = version % every == 0 or version == num_steps
            # Before the checkpoint, which makes the line durable. A stop waits for it.
            if held_out is not None and is_due:
                await self._measure(trainer, held_out.rows, version)
            self.reporter.step_alone(trainer, self.checkpointer, report)
            await self.checkpointer.after_step(version)

    async def _measure(
        self, trainer: SupervisedTrainer, rows: Sequence[Tokens], version: int
    ) -> None:
        """Report the mean loss per token of the held-out rows."""
        losses = list[float]()
        counts = list[float]()
        per_batch = self.settings.trainer.num_groups
        self.lifecycle.log.activity("measuring the held-out loss")
        with span("evaluations", "evaluation", version):
            for batch in held_out_batches(rows, per_batch, version):
                measured = (await trainer.evaluate(batch)).metrics
                self.num_measured += 1
                counts.append(measured["eval/tokens"])
                # A loss that is not finite is not in the answer.
                losses.append(measured.get("eval/loss", math.nan) * counts[-1])
        self.lifecycle.log.activity(TRAINING)
        self.reporter.report_loss(
            version, math.fsum(losses) / math.fsum(counts), math.fsum(counts)
        )


async def _batches(
    feed: DemonstrationFeed, start: int, stop: int
) -> AsyncIterator[Batch]:
    for version in range(start, stop):
        yield feed.batch(version)
