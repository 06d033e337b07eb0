"""One run: wires the rooms, owns the one asyncio.TaskGroup, and ends everything that it started.

Who consumes what, who waits for whom, who unblocks whom:

    who waits                in                                  for                                   woken
    by -----------------------  ----------------------------------  ------------------------------------
    ------------------------------ producers                Slots.wait_spare                    a free
    sequence in the engines        a rollout that stops sampling a rollout                Slots.wait
    a free sequence in the engines        a rollout that stops sampling producers
    Buffer.wait_open                    leave under the staleness rule        a version served, a group failed
    a rollout                EnginePool.generate                 its completion, timeout_s at most     its
    engine server a rollout                RolloutQueue.run                    a harness worker, then its
    outcome    a worker; its silence, timeout_s a harness                POST /v1/chat/completions
    EnginePool.generate                   its engine server, its session's end a worker                 POST
    /work/take                     work, MAX_WAIT_S at most              a rollout that starts watch gateway
    Rooms.broken                        an engine that broke under a call     the gateway watch worker-N
    WorkerSupervisor.run                a worker to end or hang               kernel, heartbeat a rollout
    Scorer.score                        its reward, reward_timeout_s at most  the reward function train loop
                Buffer.wait_batch                   num_groups ready groups               a group finished,
    failed, dropped train loop               Journal.batch_taken                 the batch on disk
    the journal's thread train loop               TrainerClient.train, save           the optimizer step, the
    saved weights  the trainer worker train loop               Publisher.wait_exported_or_busy     the copy of
    the new weights           the publisher publisher                TrainerClient.wait_version_above    a new
    policy_version                  the train loop publisher                prepare and commit
    every engine, timeout_s at most       the engine servers evaluation               Evaluation.run
    a published version that is due       the publisher evaluation               prepare, commit, generate,
    score    eval.timeout_s at most for all of it  engine-eval, its reward function the run's end
    Evaluation.wait_last                the evaluation of the last version    evaluation, guard of engine-eval
    watch NAME               ChildProcess.watch                  a child process to end                the
    kernel heartbeat NAME           GET /health                         an answer, heartbeat_s at most
    the server watch engine-N           EngineSupervisor.run                both of these, or a call that
    broke   kernel, pool, publisher watch engine-N           backoff_s, start, bring_up          a new process
    with current weights    the server, a push that runs a rollout                EnginePool.generate
    a server that is up, if none is       watch engine-N watch trainer            LivingTrainer.run
    a rank to end, or a call that broke   kernel, heartbeat, its callers watch trainer            backoff_s,
    start, recover           new ranks, and the journal's batches  the ranks, the journal train loop,
    publisher    LivingTrainer.train, export, save   the trainer to be back, if it is not  watch trainer train
    loop               Checkpointer.after_step             the copy of the trainer's state       the trainer
    worker checkpoint N             TrainerClient.wait_save_state       the state on disk
    the trainer worker checkpoint N             Checkpoints.in_use                  a trainer that goes back
    to an older  watch trainer watch trainer            Checkpoints.in_use                  a checkpoint that
    is made whole       checkpoint N the run's start          Journal.read_resume, recover        the batches
    to be trained again       the journal, the trainer worker the run's start
    Publisher.wait_announced            the weights it goes on with           the publisher the run's start
    TakingTurns.start                   the first turn                        engines, the trainer train loop
                 TakingTurns.to_trainer              engines that sleep, the trainer's memory  engines, the
    trainer train loop               TakingTurns.to_engines              memory, weights chunk by chunk
    the trainer, engines watch engine-N           TakingTurns.room_for_engine         the engines' turn
    the train loop watch trainer            TakingTurns.wait_room_for_trainer   engines that sleep
    the train loop watchdog                 Watchdog.run                        watchdog_s without any
    progress       its timer

A room that breaks raises RoomError: the TaskGroup falls, everything is closed, and `run_job` raises that
error. An engine server or a trainer that is lost is started again first, supervision.max_restarts times. The
evaluation is the exception: nobody waits for it but the end of the run, and without its engine the run goes
on, with a warning. A child process that died is named before the call that broke because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.agents.command import passed_env
from asyncrl.agents.process_group import hide_memory
from asyncrl.checkpoints.folder import set_aside
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.errors import AsyncrlError, ConfigError, RoomError, first_cause
from asyncrl.files import RunLock, write_whole
from asyncrl.http import OURS, out_of
from asyncrl.messages.records import Batch, UnfinishedGroup
from asyncrl.observe.watchdog import Watchdog
from asyncrl.placement.choices import settle_dtype
from asyncrl.placement.fit import refuse_what_cannot_fit
from asyncrl.placement.plan import make_plan
from asyncrl.placement.staging import clear_own_staging
from asyncrl.run.build import CLOSE_TIMEOUT_S, Rooms, close_within, open_rooms, run_id
from asyncrl.run.replay import settle_copy
from asyncrl.run.report import Reporter
from asyncrl.run.restore import restore
from asyncrl.run.resume import ResumeMode, ResumePoint, begun_dtype, find_resume, settle_saved
from asyncrl.run.run_folder import (
    MODEL_PIN,
    allow_many_connections,
    logging_to,
    make_run_dir,
    refused_by_system,
)
from asyncrl.run.specs import objective_spec
from asyncrl.run.start import Server, note_deaths
from asyncrl.run.supervise import heartbeat
from asyncrl.run.watch import make_watchdog
from asyncrl.user_code import end_what_is_left

logger = logging.getLogger("asyncrl.run.loop")

STATUS_PERIOD_S = 1.0
GUARDS = ("watch ", "heartbeat ", "status", "watchdog", "checkpoint ")
"""Tasks that stay until the weights are saved, by the start of their names."""
EVALUATING = ("publisher", "evaluation")
"""Tasks that the last evaluation needs beside them."""


def run_job(
    config: RunConfig,
    run_dir: Path | None,
    *,
    name: str,
    resume: ResumeMode = "auto",
    allow_change: Sequence[str] = (),
) -> int:
    """Train as `config` says, from start to end or from where a killed run stood, and return the exit code.

    0 done; 130 or 143 interrupted by SIGINT or SIGTERM, to be gone on with. Raises AsyncrlError when a part
    of the run failed; by then everything is closed: no child process and no shared memory is left.
    """
    if config.generator.is_harness:
        hide_memory()  # keys, answers and rewards of all rollouts
    config, dtype_words = settle_dtype(config, begun=begun_dtype(run_dir))
    objective_spec(config.algorithm)  # a loss that is not known is refused before anything is made
    passed_env(config.generator.pass_env)  # and so is a variable that is not set
    refuse_what_cannot_fit(make_plan(config), config)
    folder = run_dir or Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    if resume == "must" and not folder.exists():
        find_resume(folder, config, resume)  # says that there is none
    make_run_dir(folder, config.observe.dir_mode)
    lock = RunLock(folder / "run.lock").acquire()
    try:
        is_ours = settle_saved(
            folder
        )  # before anything may refuse: the weights of a run that is done are the last ones
        point = find_resume(folder, config, resume, allow_change)
        if is_ours:
            settle_copy(config, folder, is_new=point is None)
            if point is None:  # of a start that failed
                shutil.rmtree(folder / "model", ignore_errors=True)
                (folder / MODEL_PIN).unlink(missing_ok=True)
        run_id(folder)  # before the config: a directory with a config and without an id is not a run's
        if point is None:
            _write_config(folder, config)
        allow_many_connections()
        with logging_to(folder):
            return asyncio.run(end_what_is_left(Job(config, folder, name, lock, point, dtype_words).run()))
    finally:
        lock.release()


def _write_config(folder: Path, config: RunConfig) -> None:
    write_whole(folder / "config.yaml", run_config_yaml(config))


class Job:
    """The life of one run: open the rooms -> catch up, if resumed -> train loop -> save -> close. Owns the
    TaskGroup and the signals.

    The first SIGINT or SIGTERM lets the step in hand end, has a checkpoint made, and closes; the second one
    ends at once: what was journaled is not lost.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        name: str,
        lock: RunLock,
        point: ResumePoint | None,
        note: str = "",
    ) -> None:
        """`note`: what whoever starts the run has to know."""
        self._note = note
        self.config, self.run_dir, self._lock, self._point = config, run_dir, lock, point
        self.reporter = Reporter(config, run_dir, name, goes_on=point is not None)
        self._signal: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: tuple[Server, ...] = ()
        self._eval_server: Server | None = None
        self._stop = asyncio.Event()
        self._is_training = False

    async def run(self) -> int:
        """The exit code. Raises the AsyncrlError that ended the run."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, main)
        try:
            await self._live()
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            main.uncancel()
            self._finish("interrupted", f"interrupted by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        except BaseExceptionGroup as errors:
            raise self._fail(first_cause(errors)) from errors
        except (
            Exception
        ) as error:  # the outermost border: what is foreign is named here too, and never swallowed
            raise self._fail(error) from error
        else:
            if self._signal is not None:
                self._finish("interrupted", f"interrupted by {signal.Signals(self._signal).name}")
                return 128 + self._signal
            self._finish("done")
            return 0
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _live(self) -> None:
        """Everything between the first process and the last one ended."""
        async with AsyncExitStack() as stack:
            self.reporter.start()
            for text in () if self._point is None else self._point.told:
                self.reporter.warn(text)
            stack.callback(self.reporter.close_console)
            if self._note:
                self.reporter.say(self._note)
            rooms = await open_rooms(
                self.config,
                self.run_dir,
                stack,
                spawn=self._spawn,
                listener=self.reporter,
                lock=self._lock,
                may_change_model=self._point is not None and self._point.may_change_model,
            )
            self._servers, self._eval_server = rooms.servers, rooms.eval_server
            try:
                async with asyncio.TaskGroup() as self._group:
                    self._start_guards(rooms)
                    unfinished = await self._catch_up(rooms)
                    self.reporter.training_starts()
                    await self._start_services(rooms, unfinished)
                    await self._train_loop(rooms)
                    await self._end(rooms)
                    self._end_tasks()
            except BaseExceptionGroup as errors:
                await self._reap(rooms, errors)
                raise
            finally:
                await close_within(CLOSE_TIMEOUT_S, "producers", rooms.producers.aclose)

    def _start_guards(self, rooms: Rooms) -> None:
        """Whoever watches that the run lives: from before the first batch until the weights are saved."""
        watchdog = make_watchdog(self.config, self.run_dir, rooms, tell=self.reporter.warn)
        self._spawn(watchdog.run(), name="watchdog")
        self._spawn(self._report_status(rooms, watchdog), name="status")
        self._spawn(rooms.journal.wait_failed(), name="watch journal")
        self._spawn(rooms.trainer.run(), name="watch trainer")
        for supervisor in rooms.supervisors:
            self._spawn(supervisor.run(), name=f"watch {supervisor.name}")
        if rooms.harnessing is not None:
            self._spawn(self._watch_broken(rooms), name="watch gateway")
            for keeper in rooms.harnessing.supervisors:
                self._spawn(keeper.run(), name=f"watch {keeper.name}")

    async def _watch_broken(self, rooms: Rooms) -> None:
        """The gateway answers harnesses, who cannot end the run; what broke there is raised here."""
        assert rooms.broken is not None
        raise await rooms.broken

    async def _catch_up(self, rooms: Rooms) -> Sequence[UnfinishedGroup]:
        """A run that was killed goes to where it stood; what is returned runs again once the engines have the
        weights.
        """
        if self._point is None:
            await self._pin_model(rooms)
            rooms.journal.order_nowait(rooms.feed.order)
            return ()
        point = self._point
        state = await rooms.journal.read_resume(point.version)
        self.reporter.tell(f"training again on {state.next_version - point.version} journaled batches")
        unfinished = await restore(
            point,
            state,
            trainer=rooms.trainer,
            journal=rooms.journal,
            buffer=rooms.buffer,
            feed=rooms.feed,
            returns=rooms.producers.returns_nowait,
            on_restored=lambda: self.reporter.resumes(point.version, state.counted),
            on_step=lambda batch, report: self.reporter.step(
                rooms, batch, report, step_s=report.metrics.get("perf/train_s", 0.0)
            ),
        )
        _write_config(self.run_dir, self.config)  # only now: a resume that was refused has changed nothing
        await self._pin_model(rooms)
        for text in await asyncio.to_thread(set_aside, point.damaged):
            self.reporter.say(text)
        return unfinished

    async def _pin_model(self, rooms: Rooms) -> None:
        if rooms.pin is not None:
            await asyncio.to_thread(rooms.pin.write)

    async def _start_services(self, rooms: Rooms, unfinished: Sequence[UnfinishedGroup]) -> None:
        version = rooms.trainer.policy_version
        if rooms.evaluation is not None and rooms.eval_server is not None:
            child, guard = rooms.eval_server.child, rooms.evaluation.guard
            self._spawn(rooms.evaluation.run(), name="evaluation")
            self._spawn(guard(child.watch()), name=f"watch {child.name}")
            self._spawn(
                guard(heartbeat(rooms.eval_server, self.config.observe.heartbeat_s)),
                name=f"heartbeat {child.name}",
            )
        if version > 0:
            self.reporter.tell("bringing the weights to the engines")
        await rooms.turns.start(version)
        self.reporter.tell("training")
        for group in unfinished:
            rooms.producers.resume_nowait(group)
        self._spawn(rooms.producers.run(), name="producers")

    async def _train_loop(self, rooms: Rooms) -> None:
        """The loop: a batch that keeps the bound, one optimizer step, and what its weights need before the
        next one.
        """
        clock = asyncio.get_running_loop().time
        self._is_training = True
        while rooms.trainer.policy_version < self.config.trainer.num_steps:
            started_s = clock()
            batch = await self._next_batch(rooms)
            if batch is None:
                return
            await rooms.journal.batch_taken(batch)  # durable before it is acted on
            await rooms.turns.to_trainer()
            report = await rooms.trainer.train(batch)
            rooms.journal.trained_nowait(batch.version, report.metrics)
            await rooms.turns.to_engines(report.policy_version)
            self.reporter.step(rooms, batch, report, step_s=clock() - started_s)
            await rooms.checkpointer.after_step(report.policy_version)

    async def _next_batch(self, rooms: Rooms) -> Batch | None:
        """The next batch, or None once the run is to stop."""
        if self._stop.is_set():
            return None
        waiting = asyncio.ensure_future(rooms.buffer.wait_batch())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _end(self, rooms: Rooms) -> None:
        """All steps are taken, or the run was told to stop: save what is to be saved. Guarded, as at any
        other time.
        """
        if self._signal is not None:
            self._end_tasks(all_but=GUARDS)
            self.reporter.tell("writing a checkpoint")
            await rooms.checkpointer.make_last(rooms.trainer.policy_version)
            return
        self._is_training = False  # a signal cuts what comes now: there is no step to wait for
        self._end_tasks(all_but=GUARDS if rooms.evaluation is None else GUARDS + EVALUATING)
        await rooms.turns.to_trainer()
        await self._save(rooms)
        await rooms.checkpointer.make_last(rooms.trainer.policy_version)
        if rooms.evaluation is not None:
            self.reporter.tell("evaluating the last weights")
            await rooms.evaluation.wait_last()

    async def _save(self, rooms: Rooms) -> None:
        self.reporter.tell("saving the weights")
        await rooms.trainer.save(self.run_dir / "final")
        if self.config.trainer.lora is not None:
            await rooms.trainer.save(self.run_dir / "adapter", merged=False)

    def _spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task in the run's TaskGroup: if it raises, the run ends."""
        assert self._group is not None, "rooms start tasks only while the TaskGroup is open"
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_tasks(self, *, all_but: tuple[str, ...] = ()) -> None:
        """Cancel the tasks of the group, those aside whose names start with one of `all_but`."""
        for task in self._tasks:
            if not task.get_name().startswith(all_but):
                task.cancel()

    async def _report_status(self, rooms: Rooms, watchdog: Watchdog) -> None:
        is_short = False
        while True:
            try:
                self.reporter.status(rooms, watchdog.look())
                is_short = False
            except OSError as error:
                if error.errno not in OURS:
                    raise
                if not is_short:  # the next one replaces it anyway
                    logger.warning("%s", out_of("no status is written for now", error.errno))
                is_short = True
            await asyncio.sleep(STATUS_PERIOD_S)

    async def _reap(self, rooms: Rooms, errors: BaseExceptionGroup[BaseException]) -> None:
        """A call that broke may mean that its process just died: give the kernel a moment to say so."""
        await note_deaths(rooms.servers, timeout_s=1.0 if isinstance(first_cause(errors), RoomError) else 0.0)

    def _fail(self, error: BaseException) -> AsyncrlError:
        """The error to show: a process that died comes before the call that broke because of it."""
        if isinstance(error, OSError):
            error = refused_by_system(error, self.run_dir)
        elif not isinstance(error, AsyncrlError):
            logger.error("internal error", exc_info=error)
            error = RoomError(
                "controller",
                f"internal error {type(error).__name__}: {error}",
                way_out=f"the traceback is in {self.run_dir / 'logs' / 'controller.log'}; please report it.",
            )
        for server in self._servers:
            if server.child.died is not None:
                error = server.child.died
                break
        logger.error("the run failed: %s", error, exc_info=error)
        with contextlib.suppress(RoomError):  # the first error is the one to tell
            self._finish("failed", str(error), can_go_on=not isinstance(error, ConfigError))
        return error

    def _finish(self, state: str, why: str = "", *, can_go_on: bool = True) -> None:
        """Write how the run ended. Raises RoomError if that cannot be written."""
        try:
            self.reporter.finish(state, why, can_go_on=can_go_on)
        except OSError as error:
            raise refused_by_system(error, self.run_dir) from error

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        if self._signal is not None:  # the second one: end at once
            for server in filter(None, (*self._servers, self._eval_server)):
                server.child.kill_nowait()
            clear_own_staging()
            os._exit(128 + number)
        self._signal = number
        self.reporter.tell("stopping after this step (once more to end at once)")
        if self._is_training:
            self._stop.set()
        else:
            main.cancel()
