"""Control loop of a run: start the components, train batch after batch, end everything.
A broken component raises ComponentError; a lost process first restarts.

Tasks in quotes, queues in brackets; docs/architecture.md names the functions on the
way.

  "producers"          "rollout g3/r1", one per rollout      train loop (main task)        "publisher"
      |                    ^      |       |                      ^       |   |                ^     |
      | 1 ticket, prompt   |      |       | 4 group      5 batch |       |   | 7 new version  |     |
      +--------------------+      |       +----> [Buffer] -------+       |   +----------------+     |
                                  |                 ^                    |                          |
                                  |                 | 9 served version   |                          |
                                  |                 +--------------------|--------------------------+
                                  | 2 request                            | 6 batch        8 export, |
                                  v 3 tokens                             v          prepare, commit v
 ---------------------------- WebSocket ------------------------------ HTTP ---------------------- HTTP --
  engine servers: [inbox] --> engine thread  <=== weights ===  trainer: rank 0 --> all ranks

"producers" wait for a free slot, then for the rule to open a batch; a rollout for its
tokens; the train loop for a whole batch, then for the trainer; "publisher" for a new
version, then for every engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.errors import EngineLost
from asyncrl.base.files import write_whole
from asyncrl.base.host import hide_memory
from asyncrl.base.user_code import run_loop
from asyncrl.base.waits import run_in_thread, span
from asyncrl.config import RunConfig, SftConfig, run_config_yaml
from asyncrl.job.build import build
from asyncrl.job.check import check_reports
from asyncrl.job.components import Components
from asyncrl.job.lifecycle import (
    Lifecycle,
    SentSignals,
    locked_run_dir,
    new_run_dir,
    rare_collections,
    refuse_few_files,
    run_again,
    run_id,
)
from asyncrl.job.reporter import Reporter, StepEnd, processes, reported
from asyncrl.job.resume import (
    ResumePoint,
    find_resume,
    restore,
    settle_saved,
    show_done,
)
from asyncrl.job.roles import extra_models, extra_servers
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.launch.launchers import opened
from asyncrl.launch.placement import Placement
from asyncrl.launch.plan import plan_run, refuse_over_capacity, resolve_auto
from asyncrl.launch.processes import Launcher
from asyncrl.launch.supervise import ask_children
from asyncrl.messages.records import Batch, UnfinishedGroup
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.console import TRAINING, logging_to
from asyncrl.observe.metrics import batch_metrics
from asyncrl.observe.run_dir import LOG_FILE, SUMMARY_FILE
from asyncrl.observe.trackers import Callbacks
from asyncrl.observe.watchdog import Watchdog
from asyncrl.rollouts.evaluation import Evaluation
from asyncrl.tasks.sources import CODE_PIN, DATA_PIN, record_code
from asyncrl.trainer.model_folder import MODEL_PIN, fetch_architectures

STATUS_PERIOD_S = 1.0
GUARDS = ("watch ", "status", "watchdog", "checkpoint ")
"""Tasks that run until the weights are saved, by prefix."""
EVALUATING = ("publisher", "evaluation")
"""Tasks that the last evaluation needs."""

logger = logging.getLogger("asyncrl.job.loop")


def run_job(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    callbacks: Callbacks | None = None,
    signals: SentSignals | None = None,
) -> int:
    """Train, or resume; return 0, or 130 or 143 after SIGINT or SIGTERM. Raises
    AsyncrlError, leaving no child process and no shared memory. `signals`: of the main
    thread, if this is another one.
    """
    if config.harnesses:
        hide_memory()  # protect keys and answers
    check_reports(config)  # refuse before creating anything
    refuse_few_files(config)
    with opened(config.launcher) as launcher:
        extra = extra_servers(config)
        config, resolved = resolve_auto(config, launcher.nodes, extra)
        own = [extra.model for extra in extra_models(config).values()]
        fetch_architectures(config.model, *own)
        plan, messages = plan_run(config, launcher.nodes, extra)
        refuse_over_capacity(plan, config)
        with opened_run_dir(
            config, run_dir or new_run_dir(name), resume, allow_change
        ) as (folder, point):
            if point.is_done:
                show_done(folder, config.trainer.num_steps)
                return 0
            for text in (*resolved, *messages):
                logger.info("%s", text)
            reporter = Reporter(
                config, folder, name, callbacks, is_resume=not point.is_new
            )
            lifecycle = reported_lifecycle(reporter, launcher)
            lifecycle.sent_signals = signals or lifecycle.sent_signals
            job = Job(lifecycle, reporter, plan.placement, point)
            return run_loop(lifecycle.run(job.live))


def reported_lifecycle(reporter: Reporter, launcher: Launcher) -> Lifecycle:
    return Lifecycle(
        reporter.config,
        reporter.run_dir,
        reporter.log,
        launcher,
        on_end=reporter.finish,
        on_exit=reporter.aclose,
    )


async def start_reports(
    lifecycle: Lifecycle, reporter: Reporter, point: ResumePoint
) -> None:
    """Start the reports and the status server, and warn of what a resume has found."""
    reporter.start()
    if (server := reporter.status_server()) is not None:
        lifecycle.closes("status server", server.aclose)
        await server.start()
    lifecycle.stack.callback(reporter.close_console)
    for text in point.notes:
        lifecycle.log.warn(text)


@contextlib.contextmanager
def opened_run_dir(
    config: RunConfig | SftConfig,
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
            write_whole(folder / "config.yaml", run_config_yaml(config))
        with logging_to(folder):
            yield folder.absolute(), point  # a reward may change the working directory


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A run: start -> catch up, if resumed -> train loop -> save -> close. The first
    signal of base/signals.py finishes the step and makes a checkpoint; the second ends at
    once.
    """

    lifecycle: Lifecycle
    reporter: Reporter
    placement: Placement
    point: ResumePoint

    async def live(self) -> int:
        lifecycle = self.lifecycle
        await start_reports(lifecycle, self.reporter, self.point)
        run = await build(lifecycle, self.placement, self.reporter, self.point)
        lifecycle.servers = run.fleet.servers
        # After the build: freeze() exempts what exists now, such as modules and
        # components, from every later collection.
        lifecycle.stack.enter_context(rare_collections())
        lifecycle.closes("producers", run.producers.aclose)
        # Before the journaled batches are trained on again: a trainer that dies during
        # that is restarted by its guard, while recover() waits.
        self._start_guards(run)
        unfinished = await self._catch_up(run)
        step = run.trainer.policy_version + 1
        for name in record_code(lifecycle.run_dir, lifecycle.config, step):
            lifecycle.log.warn(
                f"{name} has changed since the run last started; steps before {step} used the old one"
            )
        self.reporter.on_training()
        await self._start_services(run, unfinished)
        await self._train_loop(run)
        await self._end(run)
        return lifecycle.exit_code

    def _start_guards(self, run: Components) -> None:
        watchdog = self._make_watchdog(run)
        self.lifecycle.spawn(watchdog.run(), name="watchdog")
        self.lifecycle.spawn(self._report_status(run, watchdog), name="status")
        self.lifecycle.spawn(run.journal.wait_failed(), name="watch journal")
        self.lifecycle.spawn(run.trainer.run(), name="watch trainer")
        run.scale.watch_nowait()
        for name, extra in run.fleet.extra.items():
            self.lifecycle.spawn(
                extra.watch(self.lifecycle.config.observe.heartbeat_s),
                name=f"watch {name}",
            )

    def _make_watchdog(self, run: Components) -> Watchdog:
        log_path = self.lifecycle.run_dir / LOG_FILE
        command = run_again(self.lifecycle.run_dir, "--resume", "must")

        async def restart_engines() -> None:
            why = f"the run made no progress; {log_path} lists the open waits"
            for engine in run.scale.engines:
                engine.lost_nowait(
                    EngineLost(engine.name, why, rule="supervision.on_stuck=restart")
                )

        return Watchdog(
            self.lifecycle.config.supervision,
            lambda: reported(run),
            log_path=log_path,
            tell=self.lifecycle.log.warn,
            way_out=f"read the stacks in {log_path} and the other logs; resume with `{command}`.",
            ask_children=lambda: ask_children(processes(run)),
            restart=restart_engines,
            note=run.journal.add_event_nowait,
        )

    async def _catch_up(self, run: Components) -> Sequence[UnfinishedGroup]:
        """Return the groups that continue."""
        point = self.point
        if point.is_new:
            run.write_pins()
            run.journal.note_nowait("order", run.feed.order)
            return ()
        state = await run.journal.read_resume(point.version)
        self.lifecycle.log.activity(
            f"training again on {state.next_version - point.version} journaled batches"
        )
        unfinished = await restore(run, self.reporter, point, state)
        # a refused resume changes nothing
        write_whole(
            self.lifecycle.run_dir / "config.yaml",
            run_config_yaml(self.lifecycle.config),
        )
        run.write_pins()
        await point.set_damaged_aside(self.lifecycle.log)
        # After the damaged ones have moved: one of them may have this version.
        await run.checkpointer.after_catch_up(run.trainer.policy_version)
        return unfinished

    async def _start_services(
        self, run: Components, unfinished: Sequence[UnfinishedGroup]
    ) -> None:
        version = run.trainer.policy_version
        evaluation = run.evaluation
        on_rollout_engines = evaluation if run.fleet.eval_client is None else None
        if evaluation is not None:
            self.lifecycle.spawn(evaluation.run(), name="evaluation")
            self.lifecycle.spawn(
                self._stop_evaluation(evaluation), name="evaluation stop"
            )
        if version > 0:
            self.lifecycle.log.activity("bringing the weights to the engines")
        # Before any rollout: the engines of a resumed run still have the initial
        # weights, but its groups continue at `version`.
        await run.scheduler.start(version)
        # The run's own engines start with version 0, so nothing announces it to the
        # evaluation.
        if on_rollout_engines is not None and version == 0:
            on_rollout_engines.on_served_nowait(version)
        self.lifecycle.log.activity(TRAINING)
        for group in unfinished:
            run.producers.resume_nowait(group)
            # One group per loop iteration: a resume of thousands must not hold up
            # heartbeats.
            await asyncio.sleep(0)
        # Only now the run knows all rewards that the killed one awaited.
        run.late.is_open = True
        self.lifecycle.spawn(run.producers.run(), name="producers")
        if not run.scale.is_fixed:
            self.lifecycle.spawn(run.scale.follow(), name="scale")

    async def _stop_evaluation(self, evaluation: Evaluation) -> None:
        # While rollout engines evaluate, the next push or handover waits. A stopped run
        # must not wait for a whole evaluation before it makes its checkpoint. And agents
        # that a signal ends must not count as the policy's failures.
        await self.lifecycle.stop.wait()
        evaluation.stop_nowait()

    async def _train_loop(self, run: Components) -> None:
        self.lifecycle.can_stop = True
        recording: asyncio.Future[None] | None = None
        try:
            while run.trainer.policy_version < self.lifecycle.config.trainer.num_steps:
                batch = await self._next_batch(run)
                if batch is None:
                    return
                report = await self._train(run, batch)
                if recording is not None:
                    with span("trainer", "record", batch.version - 1):
                        await recording
                counted = self.reporter.counted_before_publish(run, batch)
                # A stopped run needs its engines no more.
                if not self.lifecycle.stop.is_set():
                    with span("trainer", "to engines", batch.version):
                        await run.scheduler.to_engines(report.policy_version)
                # After the handover, so that the engines already sample. The next step
                # need not wait for metrics and samples either.
                ended = self.reporter.end_step(run, batch)
                recording = asyncio.ensure_future(
                    self._record(run, batch, report, counted, ended)
                )
                if run.checkpointer.is_due(report.policy_version):
                    # The checkpoint makes the line durable: a resume from that version
                    # does not write the line again.
                    with span("trainer", "record", batch.version):
                        await recording
                    with span("trainer", "copy", batch.version):
                        await run.checkpointer.after_step(report.policy_version)
        finally:
            if recording is not None:
                await recording  # also if the next step has failed

    async def _train(self, run: Components, batch: Batch) -> TrainResponse:
        """Train on a batch, which becomes durable while it is packed."""
        # The step begins only once its batch is durable. If the process dies before, a
        # resume finds the groups in the buffer, and no trace of the step. If it dies
        # later, a resume trains on the same groups as the same version. So no group is
        # in two batches.
        durable = asyncio.ensure_future(run.journal.add_batch(batch))
        try:
            with span("trainer", "to trainer", batch.version):
                await run.scheduler.to_trainer()
            with span("trainer", "train", batch.version):
                report = await run.trainer.train(batch, durable)
        finally:
            durable.cancel()
            # Retrieves its error. If the journal fails, its watch ends the run.
            await asyncio.gather(durable, return_exceptions=True)
        # Not awaited: if this record is lost, the resume trains on the batch again, as
        # it does with every batch since the checkpoint.
        run.journal.add_training_nowait(batch.version, report.metrics)
        return report

    async def _record(
        self,
        run: Components,
        batch: Batch,
        report: TrainResponse,
        counted: Mapping[str, float],
        ended: StepEnd,
    ) -> None:
        found = await run_in_thread(batch_metrics, batch, run.special_tokens)
        self.reporter.step(run, batch, report, {**counted, **found}, ended)

    async def _next_batch(self, run: Components) -> Batch | None:
        if self.lifecycle.stop.is_set():
            return None
        waiting = asyncio.ensure_future(run.buffer.wait_batch())
        stopping = asyncio.ensure_future(self.lifecycle.stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # A batch that forms as the stop arrives is still trained on: its groups
            # have left the buffer.
            return waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _end(self, run: Components) -> None:
        is_interrupted = self.lifecycle.signal is not None
        run.late.is_open = False  # a resume takes the rewards that are posted from here
        # `stop` is looked at only in the train loop, which is over.
        self.lifecycle.can_stop = is_interrupted  # else a signal cancels from here
        has_evaluation = run.evaluation is not None and not is_interrupted
        self.lifecycle.cancel_tasks(
            all_but=GUARDS + EVALUATING if has_evaluation else GUARDS
        )
        # colocated: the host may lack memory for a second copy of the trainer's state
        self.lifecycle.log.activity("writing a checkpoint")
        await run.checkpointer.make_last(run.trainer.policy_version)
        # A stopped run writes no final/, even after its last step; a resume does.
        if is_interrupted:
            return
        await run.scheduler.to_trainer()
        await save_final(self.lifecycle, run.trainer)
        if run.evaluation is not None:
            self.lifecycle.log.activity("evaluating the last weights")
            if run.fleet.eval_client is None:
                await run.scheduler.to_engines(
                    run.trainer.policy_version, is_for_evaluation=True
                )
            await run.evaluation.wait_last()
        await run.checkpointer.wait_callbacks()
        if run.agents is not None:
            # Remote workers exit with code 0 when they read this. Otherwise they wait
            # for the run to resume.
            run.agents.queue.is_over = True

    async def _report_status(self, run: Components, watchdog: Watchdog) -> None:
        while True:
            self.reporter.status(run, watchdog.look())
            await asyncio.sleep(STATUS_PERIOD_S)


async def save_final(lifecycle: Lifecycle, trainer: SupervisedTrainer) -> None:
    lifecycle.log.activity("saving the weights")
    # The summary of an earlier end has the version of the weights that are replaced. A
    # run that is killed here must not give that version to the new ones.
    (lifecycle.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    with span("trainer", "save"):
        await trainer.save(lifecycle.run_dir / "final")
