"""Control loop of a run: start its parts, train batch after batch, end everything.

Each wait is declared in place (asyncrl.base.waits.waiting) with its purpose and the event that ends it;
`asyncrl status` and the watchdog list open waits.

A broken part raises RoomError, which closes everything and leaves `run_job`. A lost process first restarts,
up to supervision.max_restarts times. Only the end of the run waits for the evaluation, and the loss of its
engine is only a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from asyncrl.agents.command import passed_env
from asyncrl.algorithms.registry import resolve
from asyncrl.base.errors import EngineLost
from asyncrl.base.files import RunLock, write_whole
from asyncrl.base.host import hide_memory
from asyncrl.base.spans import span
from asyncrl.base.user_code import cancel_remaining
from asyncrl.base.waits import computed
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.job.build import Parts, open_parts
from asyncrl.job.life import (
    Interrupts,
    Life,
    logging_to,
    make_run_dir,
    new_run_dir,
    rare_collections,
    removed_if_refused,
    run_again,
    run_id,
)
from asyncrl.job.parts_read import processes, reported
from asyncrl.job.report import Reporter
from asyncrl.job.resume import ResumeMode, ResumePoint, find_resume, restore, resumed_dtype, settle_saved
from asyncrl.job.scale import first_wanted
from asyncrl.job.supervision.supervise import heartbeat
from asyncrl.journal.checkpoints import set_aside
from asyncrl.launch.devices import Placement
from asyncrl.launch.fit import refuse_what_cannot_fit, settle, settle_share, start_words
from asyncrl.launch.launchers import opened
from asyncrl.launch.nodes import Launcher
from asyncrl.launch.plan import make_plan
from asyncrl.messages.records import Batch, UnfinishedGroup
from asyncrl.observe.metrics import batch_metrics
from asyncrl.observe.trackers import Tracker, check_trackers
from asyncrl.observe.watchdog import ChildState, Watchdog
from asyncrl.rollouts.evaluation import Evaluation
from asyncrl.tasks.pinned_data import DATA_PIN
from asyncrl.trainer.model_folder import MODEL_PIN, fetch_architectures

STATUS_PERIOD_S = 1.0
GUARDS = ("watch ", "heartbeat ", "status", "watchdog", "checkpoint ")
"""Name prefixes of tasks that run until the weights are saved."""
EVALUATING = ("publisher", "evaluation")
"""Name prefixes of tasks that the last evaluation also needs."""

logger = logging.getLogger("asyncrl.job.loop")


def run_job(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    resume: ResumeMode = "auto",
    allow_change: Sequence[str] = (),
    trackers: Sequence[Tracker] = (),
    interrupts: Interrupts | None = None,
) -> int:
    """Train by `config`, from the start or from a killed run's state. Return 0, or 130 or 143 after SIGINT or
    SIGTERM (resumable). `trackers` are added to the config's. `interrupts` delivers signals outside the main
    thread.

    Raises AsyncrlError if a part failed, leaving no child process and no shared memory.
    """
    if config.generator.is_harness:
        hide_memory()  # protect keys, answers and rewards of all rollouts
    resolve(config.algorithm)  # refuse an unknown loss before creating anything
    passed_env(config.generator.pass_env)  # likewise an unset variable
    check_trackers(config.observe)
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(opened(config.launcher))
        num_first = first_wanted(config, run_dir)  # read once: `asyncrl scale` may change it at any time
        config, settled = settle(config, launcher.nodes, begun=resumed_dtype(run_dir))
        fetch_architectures(config)
        plan, share_words = settle_share(make_plan(config, launcher.nodes), config)
        refuse_what_cannot_fit(plan, config)
        folder = run_dir or new_run_dir(name)
        if resume == "must" and not folder.exists():
            find_resume(folder, config, resume)  # raises ConfigError
        stack.enter_context(removed_if_refused(folder))
        make_run_dir(folder, config.observe.dir_mode)
        lock = RunLock(folder / "run.lock").acquire()
        try:
            # before any refusal: the weights of a finished run are its last ones
            is_ours = settle_saved(folder)
            point = find_resume(folder, config, resume, allow_change)
            if is_ours and point is None:  # of a failed start
                shutil.rmtree(folder / "model", ignore_errors=True)
                for made in (MODEL_PIN, DATA_PIN):
                    (folder / made).unlink(missing_ok=True)
            run_id(folder)  # before the config: a directory with a config but no id is not a run's
            if point is None:
                write_whole(folder / "config.yaml", run_config_yaml(config))
            with logging_to(folder):
                job = Job(
                    config, folder, name, point, plan.placement, launcher, trackers, num_first=num_first
                )
                job.interrupts = interrupts
                for words in filter(None, (*settled, share_words, *start_words(plan, config))):
                    logger.info("%s", words)
                return asyncio.run(cancel_remaining(job.run()))
        finally:
            lock.release()


class Job(Life):
    """A run: open its parts -> catch up, if resumed -> train loop -> save -> close.

    The first SIGINT or SIGTERM finishes the step, makes a checkpoint and closes; the second ends at once,
    without losing journaled work.
    """

    ending = "stopping after this step"
    main_task = "train loop"

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        name: str,
        point: ResumePoint | None,
        placement: Placement,
        launcher: Launcher | None = None,
        trackers: Sequence[Tracker] = (),
        *,
        num_first: int,
    ) -> None:
        self.reporter = Reporter(config, run_dir, name, trackers, goes_on=point is not None)
        super().__init__(config, run_dir, self.reporter, launcher)
        self._point, self._placement = point, placement
        self._num_first = num_first

    async def live(self) -> int:
        self.reporter.start()
        if (server := self.reporter.status_server()) is not None:
            self.closes("status server", server.aclose)
            await server.start()
        self.stack.callback(self.reporter.close_console)
        for text in () if self._point is None else self._point.told:
            self.warn(text)
        parts = await open_parts(
            self, self._placement, self._point, self.reporter.evaluated, num_first=self._num_first
        )
        self.servers = parts.servers
        self.stack.enter_context(rare_collections())
        self.closes("producers", parts.producers.aclose)
        self._start_guards(parts)
        unfinished = await self._catch_up(parts)
        self.reporter.training_starts()
        await self._start_services(parts, unfinished)
        await self._train_loop(parts)
        await self._end(parts)
        return 0 if self._signal is None else 128 + self._signal

    def _start_guards(self, parts: Parts) -> None:
        """Start supervision, from before the first batch until the weights are saved."""
        watchdog = self._make_watchdog(parts)
        self.spawn(watchdog.run(), name="watchdog")
        self.spawn(self._report_status(parts, watchdog), name="status")
        self.spawn(parts.journal.wait_failed(), name="watch journal")
        self.spawn(parts.trainer.run(), name="watch trainer")
        workers = () if parts.harnessing is None else parts.harnessing.supervisors
        for supervisor in (*parts.supervisors, *parts.supervisors_beside, *workers):
            self.spawn(supervisor.run(), name=f"watch {supervisor.name}")
        if parts.harnessing is not None:
            self.spawn(self.wait_broken(), name="watch gateway")

    def _make_watchdog(self, parts: Parts) -> Watchdog:
        log_path = self.run_dir / "logs" / "controller.log"
        command = run_again(self.run_dir, "--resume", "must")

        async def ask_children() -> tuple[ChildState, ...]:
            for server in processes(parts):
                server.dump_stacks_nowait()
            return tuple(await asyncio.gather(*(server.state() for server in processes(parts))))

        async def restart_engines() -> None:
            why = f"the run has stopped moving; {log_path} says who waited for whom"
            for supervisor in parts.supervisors:
                supervisor.lost_nowait(EngineLost(supervisor.name, why, rule="supervision.on_stuck=restart"))

        return Watchdog(
            self.config.supervision,
            lambda: reported(parts),
            log_path=log_path,
            tell=self.warn,
            way_out=f"{log_path} and the logs beside it have all stacks; `{command}` goes on.",
            ask_children=ask_children,
            restart=restart_engines,
            note=parts.journal.event_nowait,
        )

    async def _catch_up(self, parts: Parts) -> Sequence[UnfinishedGroup]:
        """Restore a killed run; the returned groups continue once the engines have the weights."""
        point = self._point
        if point is None:
            parts.write_pins()
            parts.journal.order_nowait(parts.feed.order)
            return ()
        state = await parts.journal.read_resume(point.version)
        self.tell(f"training again on {state.next_version - point.version} journaled batches")
        unfinished = await restore(parts, self.reporter, point, state)
        # only now: a refused resume must change nothing
        write_whole(self.run_dir / "config.yaml", run_config_yaml(self.config))
        parts.write_pins()
        for text in await asyncio.to_thread(set_aside, point.damaged):
            self.say(text)
        return unfinished

    async def _start_services(self, parts: Parts, unfinished: Sequence[UnfinishedGroup]) -> None:
        version = parts.trainer.policy_version
        if parts.evaluation is not None:
            self.spawn(parts.evaluation.run(), name="evaluation")
        if parts.evaluation is not None and parts.eval_server is not None:
            server, guard = parts.eval_server, parts.evaluation.guard
            self.spawn(guard(server.child.watch()), name=f"watch {server.name}")
            beats = heartbeat(server, self.config.observe.heartbeat_s)
            self.spawn(guard(beats), name=f"heartbeat {server.name}")
        if version > 0:
            self.tell("bringing the weights to the engines")
        await parts.turns.start(version)
        if parts.evaluation is not None and parts.eval_server is None:
            self.spawn(self._stop_evaluation(parts.evaluation), name="evaluation stop")
            if version == 0:  # otherwise publishing reported it
                parts.evaluation.served_nowait(version)
        self.tell("training")
        for group in unfinished:
            parts.producers.resume_nowait(group)
            await asyncio.sleep(0)  # there may be thousands
        self.spawn(parts.producers.run(), name="producers")
        if not parts.scale.is_fixed:
            self.spawn(parts.scale.follow(), name="scale")

    async def _stop_evaluation(self, evaluation: Evaluation) -> None:
        await self.stop.wait()
        evaluation.stop_nowait()

    async def _train_loop(self, parts: Parts) -> None:
        """Repeat: take a batch within the staleness bound, train, publish."""
        self.can_stop = True
        while parts.trainer.policy_version < self.config.trainer.num_steps:
            batch = await self._next_batch(parts)
            if batch is None:
                return
            with span("trainer", "journal", batch.version):
                await parts.journal.batch_taken(batch)  # durable before it is used
            with span("trainer", "to trainer", batch.version):
                await parts.turns.to_trainer()
            with span("trainer", "train", batch.version):
                report = await parts.trainer.train(batch)
            parts.journal.trained_nowait(batch.version, report.metrics)
            counted = self.reporter.counted_before_publish(parts, batch)
            with span("trainer", "to engines", batch.version):
                await parts.turns.to_engines(report.policy_version)
            with span("trainer", "record", batch.version):
                found = counted | await computed(batch_metrics, batch, parts.special_tokens)
                self.reporter.step(parts, batch, report, found)
            with span("trainer", "copy", batch.version):
                await parts.checkpointer.after_step(report.policy_version)

    async def _next_batch(self, parts: Parts) -> Batch | None:
        """Return None once the run stops."""
        if self.stop.is_set():
            return None
        waiting = asyncio.ensure_future(parts.buffer.wait_batch())
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _end(self, parts: Parts) -> None:
        """Save after the last step or a stop, still under supervision."""
        if self._signal is not None:
            self.end_tasks(all_but=GUARDS)
            self.tell("writing a checkpoint")
            await parts.checkpointer.make_last(parts.trainer.policy_version)
            return
        self.can_stop = False  # no step to wait for: from here a signal cancels
        self.end_tasks(all_but=GUARDS if parts.evaluation is None else GUARDS + EVALUATING)
        # colocated: the trainer's state is on the host now, which may lack memory for a second copy
        self.tell("writing a checkpoint")
        await parts.checkpointer.make_last(parts.trainer.policy_version)
        await parts.turns.to_trainer()
        self.tell("saving the weights")
        with span("trainer", "save"):
            await parts.trainer.save(self.run_dir / "final")
            if self.config.trainer.lora is not None:
                await parts.trainer.save(self.run_dir / "adapter", merged=False)
        if parts.evaluation is not None:
            self.tell("evaluating the last weights")
            if parts.eval_server is None:
                await parts.turns.to_engines(parts.trainer.policy_version, is_for_evaluation=True)
            await parts.evaluation.wait_last()
        if parts.harnessing is not None:
            parts.harnessing.queue.is_over = True

    async def _report_status(self, parts: Parts, watchdog: Watchdog) -> None:
        while True:
            self.reporter.status(parts, watchdog.look())
            await asyncio.sleep(STATUS_PERIOD_S)
