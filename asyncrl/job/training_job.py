"""A job that trains: its run directory, reports, guards, status and end. A run with engines
is in job/loop.py; extensions add other kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.base.files import write_whole
from asyncrl.base.waits import span
from asyncrl.config import JobConfig, run_config_yaml
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.lifecycle import (
    Lifecycle,
    locked_run_dir,
    rare_collections,
    run_again,
    run_id,
)
from asyncrl.job.reporter import Reporter
from asyncrl.job.resume import ResumePoint, find_resume, settle_saved
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.journal.checkpoint_folders import set_aside
from asyncrl.launch.placement import Placement
from asyncrl.launch.supervise import Server, ask_children
from asyncrl.observe.console import logging_to
from asyncrl.observe.run_dir import CONFIG_FILE, LOG_FILE, SUMMARY_FILE
from asyncrl.observe.watchdog import Reported, Watchdog
from asyncrl.tasks.sources import CODE_PIN, DATA_PIN, DataPin
from asyncrl.trainer.model.model_folder import MODEL_PIN, ModelPin

STATUS_PERIOD_S = 1.0
GUARDS = ("watch ", "status", "watchdog", "checkpoint ")
"""Tasks that run until the weights are saved, by prefix."""

logger = logging.getLogger("asyncrl.job.training_job")


@dataclass(eq=False)
class TrainingJob(ABC):
    """A job: build -> guards -> train -> save -> close. The first signal of
    base/signals.py finishes the step and makes a checkpoint; the second ends at once.
    Its methods are of a job whose only processes are the trainer's.
    """

    settings: JobConfig
    lifecycle: Lifecycle
    reporter: Reporter
    placement: Placement
    point: ResumePoint
    trainer: SupervisedTrainer = field(init=False)
    checkpointer: Checkpointer = field(init=False)
    pins: tuple[ModelPin, DataPin] = field(init=False)

    @abstractmethod
    async def build(self) -> None:
        """Build and start all parts, which `lifecycle` closes, and set the fields above."""

    @abstractmethod
    async def restore(self) -> None:
        """Restore the trainer and the reports of a resumed job."""

    @abstractmethod
    async def train(self) -> None:
        """Train to the last step or a signal."""

    async def live(self) -> int:
        lifecycle = self.lifecycle
        await self._start_reports()
        await self.build()
        # After the build: freeze() exempts what exists now, such as modules and
        # components, from every later collection.
        lifecycle.stack.enter_context(rare_collections())
        # Before the journaled batches are trained on again: a trainer that dies during
        # that is restarted by its guard, while recover() waits.
        self.start_guards()
        await self.catch_up()
        self.reporter.on_training()
        await self.train()
        await self.end()
        return lifecycle.exit_code

    async def _start_reports(self) -> None:
        """Start the reports and the status server, and warn of what a resume has found."""
        reporter, lifecycle = self.reporter, self.lifecycle
        reporter.start()
        if (server := reporter.status_server()) is not None:
            lifecycle.closes("status server", server.aclose)
            await server.start()
        lifecycle.stack.callback(reporter.close_console)
        for text in self.point.notes:
            lifecycle.log.warn(text)

    def start_guards(self) -> None:
        lifecycle = self.lifecycle
        log_path = lifecycle.run_dir / LOG_FILE
        again = run_again(
            lifecycle.run_dir, "--resume", "must", command=self.settings.command
        )
        watchdog = Watchdog(
            lifecycle.config.supervision,
            self.reported,
            log_path=log_path,
            tell=lifecycle.log.warn,
            way_out=f"read the stacks in {log_path} and the other logs; resume with `{again}`.",
            ask_children=lambda: ask_children(self.processes()),
            restart=self.restart,
            note=self.note,
        )
        lifecycle.spawn(watchdog.run(), name="watchdog")
        lifecycle.spawn(self._report_status(watchdog), name="status")
        lifecycle.spawn(self.trainer.run(), name="watch trainer")

    async def catch_up(self) -> None:
        if not self.point.is_new:
            await self.restore()
            # a refused resume changes nothing
            path = self.lifecycle.run_dir / CONFIG_FILE
            write_whole(path, run_config_yaml(self.settings))
        for pin in self.pins:
            pin.write()
        for text in await asyncio.to_thread(set_aside, self.point.damaged):
            self.lifecycle.log.info(text)

    async def _report_status(self, watchdog: Watchdog) -> None:
        while True:
            self.report_status(watchdog.look())
            await asyncio.sleep(STATUS_PERIOD_S)

    async def end(self) -> None:
        lifecycle = self.lifecycle
        is_interrupted = lifecycle.signal is not None
        # `stop` is looked at only while training, which is over.
        lifecycle.can_stop = is_interrupted  # else a signal cancels from here
        lifecycle.cancel_tasks(all_but=self.needed_at_end())
        # colocated: the host may lack memory for a second copy of the trainer's state
        lifecycle.log.activity("writing a checkpoint")
        await self.checkpointer.make_last(self.trainer.policy_version)
        # A stopped run writes no final/, even after its last step; a resume does.
        if is_interrupted:
            return
        await self.save()
        await self.checkpointer.wait_callbacks()

    # ---- parts that differ between kinds of jobs

    def reported(self) -> Reported:
        """Return what the watchdog compares."""
        return Reported(self.trainer.gauges(), is_starting=not self.trainer.is_up)

    def processes(self) -> Sequence[Server]:
        """Return the processes whose stacks the watchdog wants."""
        return self.lifecycle.servers

    async def restart(self) -> None:
        """Restart processes that make no progress."""
        for server in self.processes():
            server.child.kill_nowait()  # its supervisor starts it again

    def note(self, what: str, detail: Mapping[str, object]) -> None:
        """Record an event."""
        logger.info("%s %s", what, detail)

    def report_status(self, waits: Mapping[str, float]) -> None:
        self.reporter.write_status(self.trainer.policy_version, waits)

    def needed_at_end(self) -> tuple[str, ...]:
        """Return the tasks that the end needs, by prefix."""
        return GUARDS

    async def save(self) -> None:
        """Save the last weights."""
        await save_final(self.lifecycle, self.trainer)


@contextlib.contextmanager
def opened_run_dir(
    config: JobConfig,
    folder: Path,
    resume: str,
    allow_change: Sequence[str],
) -> Iterator[tuple[Path, ResumePoint]]:
    """Yield the locked directory and the point to start from."""
    if not folder.exists():
        find_resume(folder, config, resume)  # may refuse
    with locked_run_dir(folder, config.observe.dir_mode):
        is_ours = settle_saved(folder)  # before any refusal
        found = find_resume(folder, config, resume, allow_change)
        point = found or ResumePoint(is_new=True)
        # The next start may use another model or other data, and the pins of the failed
        # one would refuse it.
        if is_ours and point.is_new:  # a failed start
            shutil.rmtree(folder / "model", ignore_errors=True)
            for name in (MODEL_PIN, DATA_PIN, CODE_PIN):
                (folder / name).unlink(missing_ok=True)
        run_id(folder)  # before the config: only a run's directory has an id
        if point.is_new:
            write_whole(folder / CONFIG_FILE, run_config_yaml(config))
        with logging_to(folder):
            yield folder.absolute(), point  # a reward may change the working directory


async def save_final(lifecycle: Lifecycle, trainer: SupervisedTrainer) -> None:
    lifecycle.log.activity("saving the weights")
    # The summary of an earlier end has the version of the weights that are replaced. A
    # run that is killed here must not give that version to the new ones.
    (lifecycle.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    with span("trainer", "save"):
        await trainer.save(lifecycle.run_dir / "final")
