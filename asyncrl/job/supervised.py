"""`asyncrl sft`: supervised fine-tuning with the trainer, checkpoints and reports of a
run, and without engines. There is no journal: the batch of each version follows from
the seed, so a resume trains on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from asyncrl.base.files import (
    clear_stale_staging,
    new_staging_dir,
    remove_staging_dir,
    write_whole,
)
from asyncrl.base.user_code import run_loop
from asyncrl.base.waits import span
from asyncrl.config import SftConfig, run_config_yaml
from asyncrl.job.build import prepare_model
from asyncrl.job.check import check_reports, positions_of
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.lifecycle import Lifecycle, new_run_dir, rare_collections
from asyncrl.job.loop import (
    STATUS_PERIOD_S,
    opened_run_dir,
    reported_lifecycle,
    save_final,
    start_reports,
)
from asyncrl.job.reporter import Reporter
from asyncrl.job.resume import ResumePoint, has_trained_all, show_done
from asyncrl.job.servers import ServerFactory, first_ranks, forget_meeting
from asyncrl.job.trainer_recovery import SupervisedTrainer, recover_trainer
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.launch.launchers import opened
from asyncrl.launch.placement import Placement
from asyncrl.launch.plan import (
    plan_run,
    refuse_over_capacity,
    resolve_auto,
)
from asyncrl.launch.supervise import ask_children
from asyncrl.messages.records import Batch
from asyncrl.messages.tokens import Tokens
from asyncrl.observe.console import TRAINING
from asyncrl.observe.run_dir import (
    EVAL_FILE,
    LOG_FILE,
    cut_steps,
    read_evaluations,
    read_object,
)
from asyncrl.observe.watchdog import Reported, Watchdog
from asyncrl.rollouts.demonstrations import (
    DemonstrationFeed,
    Demonstrations,
    held_out_batches,
    read_demonstrations,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import DATA_PIN, DataPin
from asyncrl.trainer.model_folder import ModelPin, fetch_architectures

logger = logging.getLogger("asyncrl.job.supervised")


def run_sft(
    config: SftConfig,
    run_dir: Path | None,
    *,
    name: str,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
) -> int:
    """Train on demonstrations, or resume; return 0, or 130 or 143 after SIGINT or
    SIGTERM. Raises AsyncrlError, leaving no child process and no shared memory.
    """
    check_reports(config)  # refuse before creating anything
    with opened(config.launcher) as launcher:
        fetch_architectures(config.model)
        run, resolved = resolve_auto(config.as_run(), launcher.nodes)
        config = config.model_copy(update={"model": run.model})
        plan = plan_run(run, launcher.nodes)[0]
        refuse_over_capacity(plan, run)
        with opened_run_dir(
            config, run_dir or new_run_dir(name), resume, allow_change
        ) as (folder, point):
            for text in resolved:
                logger.info("%s", text)
            reporter = Reporter(
                run, folder, name, is_resume=not point.is_new, command="sft"
            )
            lifecycle = reported_lifecycle(reporter, launcher)
            job = SftJob(config, lifecycle, reporter, plan.placement, point)
            return run_loop(lifecycle.run(job.live))


@dataclass(frozen=True, slots=True, eq=False)
class SftData:
    train: Demonstrations
    held_out: Demonstrations | None
    pins: tuple[ModelPin, DataPin]
    model_path: Path
    tokenizer: HFChatTokenizer


@dataclass(slots=True, eq=False)
class SftJob:
    """Reads all rows -> starts the trainer -> trains, measures, checkpoints -> saves.

    Waits: the main task for the trainer. Dies anywhere: the newest checkpoint has a
        version, and the versions after it are trained again from the same rows.
    """

    config: SftConfig
    lifecycle: Lifecycle
    reporter: Reporter
    placement: Placement
    point: ResumePoint
    num_measured: int = 0
    """Held-out batches."""

    async def live(self) -> int:
        lifecycle = self.lifecycle
        data = await self._read_data()
        feed = DemonstrationFeed(
            data.train.rows,
            self.config.trainer.num_groups,
            self.config.seed,
            is_shuffled=self.config.data.shuffle,
        )
        if self._is_done(data, feed):
            return 0
        await start_reports(lifecycle, self.reporter, self.point)
        for rows in filter(None, (data.train, data.held_out)):
            for text in rows.warnings(data.tokenizer):
                lifecycle.log.warn(text)
        trainer, checkpointer = await self._start_trainer(data, feed)
        lifecycle.stack.enter_context(rare_collections())
        lifecycle.spawn(trainer.run(), name="watch trainer")
        lifecycle.spawn(self._report_status(trainer), name="status")
        await self._restore(trainer, feed)
        for pin in data.pins:
            pin.write()
        self.reporter.on_training()
        await self._train(trainer, feed, checkpointer, data.held_out)
        await self._end(trainer, checkpointer)
        return lifecycle.exit_code

    # ---- before the training

    async def _read_data(self) -> SftData:
        config, run_dir, point = self.config, self.lifecycle.run_dir, self.point
        model_pin = ModelPin(
            run_dir, config.model.source, is_free=point.may_change_model
        )
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
        return SftData(train, held_out, (model_pin, data_pin), model_path, tokenizer)

    def _is_done(self, data: SftData, feed: DemonstrationFeed) -> bool:
        """Set the number of steps; return whether an earlier start has trained them all
        and saved the model.
        """
        num_steps = self.config.data.epochs * feed.steps_per_epoch
        most = self.config.trainer.num_steps
        key = "data.epochs"
        if 0 < most < num_steps:
            num_steps, key = most, "trainer.num_steps"
        run_dir = self.lifecycle.run_dir
        version = self.point.version
        if not self.point.is_new and has_trained_all(run_dir, num_steps, version, key):
            show_done(run_dir, num_steps, key)
            return True
        run = self.config.as_run(num_steps, data.train.longest)
        self.lifecycle.config = run
        self.reporter.settle(run, self.config)
        return False

    async def _start_trainer(
        self, data: SftData, feed: DemonstrationFeed
    ) -> tuple[SupervisedTrainer, Checkpointer]:
        lifecycle, config = self.lifecycle, self.lifecycle.config
        await asyncio.to_thread(clear_stale_staging)
        staging_dir = new_staging_dir()
        lifecycle.stack.callback(remove_staging_dir, staging_dir)
        factory = ServerFactory(
            config,
            self.placement,
            data.model_path,
            data.tokenizer,
            lifecycle.run_dir,
            lifecycle.launcher,
        )
        await factory.hold(staging_dir)
        ranks = factory.trainers(staging_dir)
        checkpoints = Checkpoints(lifecycle.run_dir, config.checkpoint)
        supervision = lifecycle.supervision(_log_event)

        trainer = SupervisedTrainer(
            ranks,
            supervision,
            timeout_s=config.trainer.timeout_s,
            on_start=partial(forget_meeting, staging_dir),
            bring_back=partial(
                recover_trainer,
                checkpoints=checkpoints,
                batches=partial(_batches, feed),
            ),
        )
        for rank in ranks:
            lifecycle.closes(rank.name, rank.aclose)
        lifecycle.servers = ranks
        lifecycle.log.activity("loading the model")
        await first_ranks(ranks, supervision, staging_dir).run()
        checkpointer = Checkpointer(checkpoints, trainer, None, dict, lifecycle)
        return trainer, checkpointer

    async def _restore(
        self, trainer: SupervisedTrainer, feed: DemonstrationFeed
    ) -> None:
        point, run_dir = self.point, self.lifecycle.run_dir
        if point.is_new:
            return
        # No batch: the training continues from there.
        await trainer.recover(
            point.trainer_dir, lambda: _batches(feed, 0, 0), lambda *_: None
        )
        # From here on nothing refuses, so the records of later steps may go.
        write_whole(run_dir / "config.yaml", run_config_yaml(self.config))
        with suppress(FileNotFoundError):
            cut_steps(run_dir / EVAL_FILE, point.version)
        self.reporter.resume_at(point.version, {})
        await point.set_damaged_aside(self.lifecycle.log)

    # ---- the training

    async def _train(
        self,
        trainer: SupervisedTrainer,
        feed: DemonstrationFeed,
        checkpointer: Checkpointer,
        held_out: Demonstrations | None,
    ) -> None:
        self.lifecycle.can_stop = True
        num_steps = self.lifecycle.config.trainer.num_steps
        every = self.config.data.eval_every or feed.steps_per_epoch

        def is_due(version: int) -> bool:
            return version % every == 0 or version == num_steps

        # A stop during a measurement gave it up, and the resume makes up for it.
        version = trainer.policy_version
        lines = read_evaluations(self.lifecycle.run_dir, [])
        is_missing = version not in [line["policy_version"] for line in lines]
        if held_out is not None and version > 0 and is_due(version) and is_missing:
            await self._measure(trainer, held_out.rows, version)
        while trainer.policy_version < num_steps:
            if self.lifecycle.stop.is_set():
                return
            batch = feed.batch(trainer.policy_version)
            with span("trainer", "train", batch.version):
                report = await trainer.train(batch)
            version = report.policy_version
            if held_out is not None and is_due(version):
                await self._measure(trainer, held_out.rows, version)
            # Before the checkpoint, which makes the line durable.
            self.reporter.supervised_step(trainer, checkpointer, report)
            await checkpointer.after_step(version)

    async def _measure(
        self, trainer: SupervisedTrainer, rows: Sequence[Tokens], version: int
    ) -> None:
        """Report the mean loss per token of the held-out rows, unless a stop comes."""
        losses = list[float]()
        counts = list[float]()
        per_batch = self.config.trainer.num_groups
        self.lifecycle.log.activity("measuring the held-out loss")
        with span("evaluations", "evaluation", version):
            for batch in held_out_batches(rows, per_batch, version):
                if self.lifecycle.stop.is_set():
                    return
                measured = (await trainer.evaluate(batch)).metrics
                self.num_measured += 1
                counts.append(measured["eval/tokens"])
                # A loss that is not finite is not in the answer.
                losses.append(measured.get("eval/loss", math.nan) * counts[-1])
        self.lifecycle.log.activity(TRAINING)
        self.reporter.report_loss(
            version, math.fsum(losses) / math.fsum(counts), math.fsum(counts)
        )

    async def _end(
        self, trainer: SupervisedTrainer, checkpointer: Checkpointer
    ) -> None:
        is_interrupted = self.lifecycle.signal is not None
        self.lifecycle.can_stop = is_interrupted  # else a signal cancels from here
        self.lifecycle.log.activity("writing a checkpoint")
        await checkpointer.make_last(trainer.policy_version)
        if is_interrupted:
            return
        await save_final(self.lifecycle, trainer)
        await checkpointer.wait_callbacks()

    async def _report_status(self, trainer: SupervisedTrainer) -> None:
        log_path = self.lifecycle.run_dir / LOG_FILE

        async def restart() -> None:
            for server in self.lifecycle.servers:
                server.child.kill_nowait()  # its supervisor starts it again

        watchdog = Watchdog(
            self.config.supervision,
            # A held-out measurement may take longer than watchdog_s.
            lambda: Reported(
                {**trainer.gauges(), "evaluation/ended": self.num_measured},
                is_starting=not trainer.is_up,
            ),
            log_path=log_path,
            tell=self.lifecycle.log.warn,
            way_out=f"read the stacks in {log_path} and the log of the trainer.",
            ask_children=lambda: ask_children(self.lifecycle.servers),
            restart=restart,
            note=_log_event,
        )
        self.lifecycle.spawn(watchdog.run(), name="watchdog")
        while True:
            self.reporter.write_status(trainer.policy_version, watchdog.look())
            await asyncio.sleep(STATUS_PERIOD_S)


def _log_event(what: str, detail: Mapping[str, object]) -> None:
    logger.info("%s %s", what, detail)


async def _batches(
    feed: DemonstrationFeed, start: int, stop: int
) -> AsyncIterator[Batch]:
    for version in range(start, stop):
        yield feed.batch(version)
