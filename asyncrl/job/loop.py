"""Control loop of a run: start the components, train batch after batch, end everything.
A broken component raises ComponentError; a lost process first restarts.

Tasks in quotes, queues in brackets; docs/architecture.md names the functions on the
way.

  "producers"          "rollout g3/r1", one per rollout   "next batch", train loop         "publisher"
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
tokens; "next batch" for a whole batch; the train loop (main task) for the trainer;
"publisher" for a new version, then for every engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.base.errors import EngineLost, TrainerError
from asyncrl.base.extensions import load_place
from asyncrl.base.host import hide_memory
from asyncrl.base.user_code import run_loop
from asyncrl.base.waits import Signal, clock, note_span, run_in_thread, span, waiting
from asyncrl.config import JobConfig
from asyncrl.job.build import build
from asyncrl.job.check.config_check import check_reports
from asyncrl.job.components import Components
from asyncrl.job.lifecycle import (
    Lifecycle,
    SentSignals,
    new_run_dir,
    refuse_few_files,
)
from asyncrl.job.reporter import Reporter, StepEnd, processes, reported
from asyncrl.job.resume import restore, show_done
from asyncrl.job.roles import extra_models, extra_servers
from asyncrl.job.training_job import GUARDS, TrainingJob, opened_run_dir
from asyncrl.launch.launchers import opened
from asyncrl.launch.plan import plan_run, refuse_over_capacity, resolve_auto
from asyncrl.launch.supervise import Server
from asyncrl.messages.records import Batch, UnfinishedGroup
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.console import TRAINING
from asyncrl.observe.metrics import batch_metrics
from asyncrl.observe.run_dir import LOG_FILE
from asyncrl.observe.trackers import Callbacks
from asyncrl.observe.watchdog import Reported
from asyncrl.tasks.sources import record_code
from asyncrl.trainer.model.model_folder import fetch_architectures

BegunStep = tuple[Batch, asyncio.Task[TrainResponse]]
"""A batch that the trainer has, and the step that trains it."""
EVALUATING = ("publisher", "evaluation", "stop")
"""Tasks that the last evaluation needs."""

logger = logging.getLogger("asyncrl.job.loop")


def run_job(
    settings: JobConfig,
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
    config = settings.as_run()
    is_run = settings is config
    if config.harnesses:
        hide_memory()  # protect keys and answers
    check_reports(config)  # refuse before creating anything
    refuse_few_files(config)
    with opened(config.launcher) as launcher:
        extra = extra_servers(config)
        config, resolved = resolve_auto(config, launcher.nodes, extra)
        settings = (
            config if is_run else settings.model_copy(update={"model": config.model})
        )
        own = [extra.model for extra in extra_models(config).values()]
        fetch_architectures(config.model, *own)
        plan, messages = plan_run(config, launcher.nodes, extra)
        refuse_over_capacity(plan, config)
        with opened_run_dir(
            settings, run_dir or new_run_dir(name), resume, allow_change
        ) as (folder, point):
            if point.is_done:
                show_done(folder, config.trainer.num_steps)
                return 0
            for text in (*resolved, *messages):
                logger.info("%s", text)
            reporter = Reporter(
                settings, folder, name, callbacks, is_resume=not point.is_new
            )
            lifecycle = Lifecycle(
                reporter.config,
                folder,
                reporter.log,
                launcher,
                on_end=reporter.finish,
                on_exit=reporter.aclose,
            )
            lifecycle.sent_signals = signals or lifecycle.sent_signals
            make_job: type[TrainingJob] = load_place(settings.job)
            job = make_job(settings, lifecycle, reporter, plan.placement, point)
            return run_loop(lifecycle.run(job.live))


class Job(TrainingJob):
    """A run: start -> catch up, if resumed -> train loop -> save -> close."""

    run: Components
    unfinished: Sequence[UnfinishedGroup] = ()
    """Groups of a resumed run that continue."""
    _num_done = 0
    """Steps that the train loop has finished."""
    _answered_s = 0.0

    async def build(self) -> None:
        lifecycle = self.lifecycle
        run = await build(lifecycle, self.placement, self.reporter, self.point)
        self.run, self.pins = run, run.pins
        self.trainer, self.checkpointer = run.trainer, run.checkpointer
        lifecycle.servers = run.fleet.servers
        lifecycle.closes("producers", run.producers.aclose)
        self._done = Signal()

    async def train(self) -> None:
        await self._start_services(self.run)
        await self._train_loop(self.run)

    def start_guards(self) -> None:
        super().start_guards()
        self.lifecycle.spawn(self.run.journal.wait_failed(), name="watch journal")
        self.run.scale.watch_nowait()
        for name, extra in self.run.fleet.extra.items():
            self.lifecycle.spawn(
                extra.watch(self.lifecycle.config.observe.heartbeat_s),
                name=f"watch {name}",
            )

    def reported(self) -> Reported:
        return reported(self.run)

    def processes(self) -> Sequence[Server]:
        return processes(self.run)

    async def restart(self) -> None:
        log_path = self.lifecycle.run_dir / LOG_FILE
        why = f"the run made no progress; {log_path} lists the open waits"
        for engine in self.run.scale.engines:
            engine.lost_nowait(
                EngineLost(engine.name, why, rule="supervision.on_stuck=restart")
            )

    def note(self, what: str, detail: Mapping[str, object]) -> None:
        self.run.journal.add_event_nowait(what, detail)

    def report_status(self, waits: Mapping[str, float]) -> None:
        self.reporter.status(self.run, waits)

    async def restore(self) -> None:
        point, run = self.point, self.run
        state = await run.journal.read_resume(point.version)
        self.lifecycle.log.activity(
            f"training again on {state.next_version - point.version} journaled batches"
        )
        self.unfinished = await restore(run, self.reporter, point, state)

    async def catch_up(self) -> None:
        await super().catch_up()
        lifecycle, run = self.lifecycle, self.run
        if self.point.is_new:
            run.journal.note_nowait("order", run.feed.order)
        else:
            # After the damaged ones have moved: one of them may have this version.
            await run.checkpointer.after_catch_up(run.trainer.policy_version)
        step = run.trainer.policy_version + 1
        for name in record_code(lifecycle.run_dir, lifecycle.config, step):
            lifecycle.log.warn(
                f"{name} has changed since the run last started; steps before {step} used the old one"
            )

    async def _start_services(self, run: Components) -> None:
        version = run.trainer.policy_version
        evaluation = run.evaluation
        on_rollout_engines = evaluation if run.fleet.eval_client is None else None
        self.lifecycle.spawn(self._stop(run), name="stop")
        if evaluation is not None:
            self.lifecycle.spawn(evaluation.run(), name="evaluation")
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
        for group in self.unfinished:
            run.producers.resume_nowait(group)
            # One group per loop iteration: a resume of thousands must not hold up
            # heartbeats.
            await asyncio.sleep(0)
        # Only now the run knows all rewards that the killed one awaited.
        run.late.is_open = True
        self.lifecycle.spawn(run.producers.run(), name="producers")
        if not run.scale.is_fixed:
            self.lifecycle.spawn(run.scale.follow(), name="scale")
        if run.pressure is not None:
            self.lifecycle.spawn(run.pressure.follow(), name="slots")
        is_auto = self.lifecycle.config.trainer.stream == "auto"
        if is_auto and run.buffer.part_tokens > 0 and not self.placement.moves:
            self.lifecycle.spawn(self._send_parts(run), name="parts")

    async def _stop(self, run: Components) -> None:
        await self.lifecycle.stop.wait()
        run.buffer.stop_nowait()
        # While rollout engines evaluate, the next push or handover waits. A stopped run
        # must not wait for a whole evaluation before it makes its checkpoint. And agents
        # that a signal ends must not count as the policy's failures.
        if run.evaluation is not None:
            run.evaluation.stop_nowait()

    async def _train_loop(self, run: Components) -> None:
        """Train step after step. With max_staleness >= 1, the next batch is formed, made
        durable, packed and sent while a step runs, so the trainer begins it at once.

        Example: step 8 runs.
            next batch    form batch 9, journal, pack, send      ... batch 10
            train loop    record step 7, push 8, wait for 8      record step 8 ...
            trainer       step 8                         export  step 9
        """
        self.lifecycle.can_stop = True
        spawn = self.lifecycle.spawn
        num_steps = self.lifecycle.config.trainer.num_steps
        self._num_done = run.trainer.policy_version
        recording: asyncio.Future[None] | None = None
        beginning: asyncio.Task[BegunStep | None] | None = None
        try:
            while self._num_done < num_steps:
                if beginning is None:
                    beginning = spawn(self._begin_step(run), name="next batch")
                step = await beginning
                beginning = None
                if step is None:
                    return
                waits = run.buffer.wait_gauges()  # before the next batch is waited for
                batch, answer = step
                if self._is_ahead and batch.version + 1 < num_steps:
                    beginning = spawn(self._begin_step(run), name="next batch")
                report = await answer
                if not run.trainer.is_training:
                    run.buffer.idle_nowait()
                # Not awaited: if this record is lost, the resume trains on the batch
                # again, as it does with every batch since the checkpoint.
                run.journal.add_training_nowait(batch.version, report.metrics)
                if recording is not None:
                    with span(self._lane(run), "record", batch.version - 1):
                        await recording
                counted = self.reporter.counted_before_publish(run, batch)
                # A stopped run needs its engines no more.
                if not self.lifecycle.stop.is_set():
                    with span(self._lane(run), "to engines", batch.version):
                        await run.scheduler.to_engines(report.policy_version)
                # After the handover, so that the engines already sample. The next step
                # need not wait for metrics and samples either.
                ended = self.reporter.end_step(run, batch)
                recording = asyncio.ensure_future(
                    self._record(run, batch, report, {**counted, **waits}, ended)
                )
                if run.checkpointer.is_due(report.policy_version):
                    # The checkpoint makes the line durable: a resume from that version
                    # does not write the line again.
                    with span("trainer", "record", batch.version):
                        await recording
                    with span("trainer", "copy", batch.version):
                        await run.checkpointer.after_step(report.policy_version)
                self._num_done = report.policy_version
                self._done.notify()
        finally:
            if recording is not None:
                # Also if the next step has failed. Not `await recording`: a second await
                # of a failed future takes the traceback from its error.
                await asyncio.gather(recording)

    @property
    def _is_ahead(self) -> bool:
        return self.lifecycle.config.buffer.max_staleness > 0

    def _lane(self, run: Components) -> str:
        """Return the timeline's lane for work of the train loop: the trainer's if it
        waits for this work.
        """
        return "next batch" if run.trainer.is_training else "trainer"

    async def _begin_step(self, run: Components) -> BegunStep | None:
        """Form a batch, make it durable, and send it to the trainer; None: the run stops."""
        batch = await run.buffer.wait_batch()
        if batch is None:
            return None
        version = batch.version
        # The step begins only once its batch is durable. If the process dies before, a
        # resume finds the groups in the buffer, and no trace of the step. If it dies
        # later, a resume trains on the same groups as the same version. So no group is
        # in two batches.
        durable = self.lifecycle.spawn(run.journal.add_batch(batch), name="durable")
        with span(self._lane(run), "to trainer", version):
            await run.scheduler.to_trainer()
        with span(self._lane(run), "pack", version):
            body = await run.trainer.pack(batch)
        with span(self._lane(run), "journal", version):
            await durable
        # A checkpoint is copied between two steps. One step may wait at the trainer.
        num_ahead = 0 if run.checkpointer.is_due(version) else 1
        with waiting("the step before", on="train loop", who="next batch"):
            await self._done.wait_for(lambda: self._num_done >= version - num_ahead)
        run.buffer.begin_step_nowait(version)
        training = self._train(run, version, body)
        answer = self.lifecycle.spawn(training, name=f"step {version + 1}")
        return batch, answer

    async def _send_parts(self, run: Components) -> None:
        """Send parts of batches as they become whole, until cancelled."""
        while True:
            part = await run.buffer.wait_part()
            # The rank takes them in any order, with the same bits.
            name = f"a part of step {part.version + 1}"
            self.lifecycle.spawn(self._send(run, part), name=name)

    async def _send(self, run: Components, part: Batch) -> None:
        try:
            with span("next batch", "part", part.version):
                await run.trainer.add_part(part)
        # The step trains the parts that the trainer lacks, and meets the same error.
        except TrainerError as error:
            logger.info("a part of step %d: %s", part.version + 1, error)

    async def _train(self, run: Components, version: int, body: bytes) -> TrainResponse:
        start_s = clock()
        report = await run.trainer.step(version, body)
        # Not the time in which the step before ran.
        start_s, self._answered_s = max(start_s, self._answered_s), clock()
        note_span("trainer", "train", start_s, self._answered_s, version)
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

    async def end(self) -> None:
        # A resume takes the rewards that are posted from here.
        self.run.late.is_open = False
        await super().end()
        if self.run.agents is not None and self.lifecycle.signal is None:
            # Remote workers exit with code 0 when they read this. Otherwise they wait
            # for the run to resume.
            self.run.agents.queue.is_over = True

    def needed_at_end(self) -> tuple[str, ...]:
        evaluates = self.run.evaluation is not None and self.lifecycle.signal is None
        return GUARDS + EVALUATING if evaluates else GUARDS

    async def save(self) -> None:
        run = self.run
        await run.scheduler.to_trainer()
        await super().save()
        if run.evaluation is not None:
            self.lifecycle.log.activity("evaluating the last weights")
            if run.fleet.eval_client is None:
                await run.scheduler.to_engines(
                    run.trainer.policy_version, is_for_evaluation=True
                )
            await run.evaluation.wait_last()
