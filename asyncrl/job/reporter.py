"""Turn component numbers into step metrics, status, the watchdog's input and the
summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

from asyncrl.base.errors import RolloutFailure
from asyncrl.base.files import write_whole
from asyncrl.base.waits import TimedSpan, listen_to_spans, note_span
from asyncrl.config import JobConfig, RunConfig
from asyncrl.engines.role_client import RoleClient
from asyncrl.job.agent_runtime import model_name
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.components import Components
from asyncrl.job.lifecycle import run_again, run_id
from asyncrl.job.scale import EngineState
from asyncrl.job.slots_by_pressure import healths_of
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.journal.checkpoint_folders import sync_records
from asyncrl.launch.supervise import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Rollout
from asyncrl.messages.trainer_api import TrainerHealth, TrainResponse
from asyncrl.messages.worker_api import WorkerHealth
from asyncrl.observe.console import TRAINING, Console, RunLog
from asyncrl.observe.metrics import PROGRESS, Totals, gauge_of, is_total, rollouts_of
from asyncrl.observe.run_dir import (
    METRICS_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    Recorder,
    cut_steps,
    evaluation_metrics,
    read_evaluations,
    read_metrics,
    read_status,
)
from asyncrl.observe.run_numbers import (
    Steps,
    by_evaluation,
    duration,
    evaluation_text,
    several,
)
from asyncrl.observe.samples import SampleWriter, ShownRollout
from asyncrl.observe.timeline import TimelineWriter, read_marks, write_trace
from asyncrl.observe.trackers import (
    Background,
    Callbacks,
    TrackedRun,
    listeners_of,
)
from asyncrl.observe.verdict import judge, summary_panel, write_reward_plot
from asyncrl.observe.watchdog import Reported
from asyncrl.rollouts.evaluation import EvalResult
from asyncrl.rollouts.rollout import FailedRollout
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import asked_gauges
from asyncrl.trainer.loss.step_metrics import GAP_WARNING

if TYPE_CHECKING:
    from asyncrl.observe.web import WebServer

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.reporter")

TRACKER_CLOSE_S = 30.0
OF_BEHAVIOUR = (
    "policy/kl_behaviour",
    "policy/ess",
    "policy/clip_fraction",
    "sample/masked_fraction",
)
"""Metrics of steps that compare with the policy that sampled the tokens."""
EVAL_TOTALS = ("eval/skipped", "eval/abandoned")


class StepEnd(NamedTuple):
    """The numbers of a step that the next one changes: when it ended on the monotonic
    clock, its seconds by kind of span, and what the components counted until then.

    The next step may begin, and even end, before the record of this step is made.
    """

    at_s: float
    spent_s: defaultdict[str, float]
    counted: Mapping[str, float]


class Reporter:
    """Reports of a run. Life: start() -> step() and status() -> finish(). A resumed run
    (`is_resume`) keeps the killed run's files until resume_at().
    """

    def __init__(
        self,
        settings: JobConfig,
        run_dir: Path,
        name: str,
        callbacks: Callbacks | None = None,
        *,
        is_resume: bool = False,
    ) -> None:
        self._settings = settings
        self.config = config = settings.as_run()
        self.run_dir = run_dir
        self.name = name
        self._console = Console(
            config.observe.console,
            run_name=name,
            num_steps=config.trainer.num_steps,
            max_staleness=config.buffer.max_staleness,
            health_of=lambda steps: judge(steps, self.config, run_dir).health,
        )
        self.log = RunLog(self._console.say, self._console.show_activity)
        self._trackers = Background(config.observe, self.log.warn, callbacks)
        self._listeners = listeners_of(config.observe, self.log.warn)
        self._recorder = Recorder(run_dir, self._trackers)
        self._timeline = TimelineWriter(run_dir)
        self._samples = SampleWriter(
            run_dir, seed=config.seed, per_step=config.observe.samples_per_step
        )
        self._last: Mapping[str, Any] = {}
        self._opened_s = self._trained_since_s = time.monotonic()
        self._now: Mapping[str, object] = {}
        self._status_url = ""
        self._evaluations: list[dict[str, Any]] = []
        self._new_evaluations: dict[str, float] = {}
        self._evaluated: dict[float, dict[str, float]] = {}
        """Evaluations before a resume, by the step whose line has them."""
        self._totals = Totals()
        self._before: dict[int, dict[str, float]] = {}
        """Totals by step, for steps about to be repeated."""
        self._journaled: dict[str, float] = {}
        self._slots_at: tuple[float, float] | None = None
        self._is_to_resume = is_resume
        self._spent_s = defaultdict[str, float](float)
        """Seconds of the train loop by kind of span, since the last step ended."""

    def settle(self, config: RunConfig) -> None:
        """Take the config of a job whose data give the number of steps, before start()."""
        self.config = config
        self._console.num_steps = config.trainer.num_steps

    def start(self) -> None:
        plain = json.loads(self._settings.model_dump_json())
        shown_as = self.run_dir.resolve().name
        run = TrackedRun(
            self.run_dir,
            shown_as,
            run_id(self.run_dir),
            plain,
            model=model_name(self.config),
        )
        self._trackers.start(run)
        for listener in self._listeners:
            listener.start(run)
        self._recorder.write_status({"state": "starting"})
        psutil.cpu_percent()  # the first call has no earlier one
        listen_to_spans(self._note_span)
        if not self._is_to_resume:
            self._timeline.open()
        num_steps = self.config.trainer.num_steps
        self._console.say(
            f"{self.name}: {num_steps} steps, everything goes to {self.run_dir}"
        )
        self._console.start()

    def status_server(self) -> WebServer | None:
        """Return the server of /metrics and /status, not started; None: not wanted.
        Raises ConfigError if its port is unavailable.
        """
        observe = self.config.observe
        if observe.status_port is None:
            return None
        from asyncrl.observe.web import KEY_FILE, status_server

        server = status_server(self.run_dir, observe, self._numbers)
        self._status_url = server.url
        self._console.say(
            f"{self._status_url}/metrics and /status; the key: {self.run_dir / KEY_FILE}"
        )
        return server

    def _numbers(self) -> dict[str, object]:
        evaluation = self._evaluations[-1] if self._evaluations else {}
        return {**self._last, **evaluation, **self._now}

    def on_published(self, version: int, digest: str) -> None:
        self._trackers.tell("weights", version, digest)

    def resume_at(
        self, version: int, counted: Mapping[str, float], spent_s: float = 0.0
    ) -> None:
        """Keep steps up to `version`; later ones are reported again. `counted`: the
        journal's totals; `spent_s`: how long the first of them was trained.
        """
        self._is_to_resume = False
        self._timeline.open()
        steps = Steps()
        lines = [*read_metrics(self.run_dir, [])]
        for line in lines:
            if line["step"] <= version:
                steps.add(line)
            else:
                self._before[int(line["step"])] = totals_in(line)
        self._last = cut_steps(self.run_dir / METRICS_FILE, version)
        self._samples.resume_at(version + 1)
        if (first := int(self._last.get("step", 0)) + 1) <= version:
            self.log.warn(
                f"steps {first}..{version} are missing in metrics.jsonl, lost before a sync"
            )
        self._console.resume_from(steps)
        self._evaluations = read_evaluations(self.run_dir, [])
        # Evaluations are not repeated, unlike the steps that report them.
        for evaluation in self._evaluations:
            metrics = evaluation_metrics(evaluation)
            held_by = [
                line["step"] for line in lines if metrics.items() <= line.items()
            ]
            step = max(held_by, default=max(evaluation["policy_version"], version) + 1)
            self._evaluated[step] = self._evaluated.get(step, {}) | metrics
        for before in (self._last, *self._evaluations[-1:]):
            self._totals.starts_from(totals_in(before))
        self._journaled = dict(counted)
        self._count_on(spent_s)
        self._console.say(f"resuming from policy_version {version}")

    def on_training(self) -> None:
        # time_s continues from the last step's line: time spent down, loading, or
        # catching up is not training time.
        self._count_on()
        note_span("restarts", "start", self._opened_s, time.monotonic())
        for totals in (*self._before.values(), self._journaled):
            self._totals.starts_from(totals)
        self._console.say(
            f"ready after {duration(time.monotonic() - self._opened_s)}; training"
        )
        self._console.training_starts()
        self.log.activity(TRAINING)

    def counted_before_publish(self, run: Components, batch: Batch) -> dict[str, float]:
        """Return the sampled tokens before engines sample for the next batch
        (reproducible at max_staleness 0).
        """
        self._count_from(batch)
        name = "tokens/generated"
        counted = self._counted({name: run.engines.gauges()[name]})
        return {name: counted[name]}

    def end_step(self, run: Components, batch: Batch) -> StepEnd:
        """Return the end of the step. Later spans and counts are of the next one."""
        self._count_from(batch)
        now_s = time.monotonic()
        counted = {
            name: value
            for name, value in self._gauges(run).items()
            if (gauge := gauge_of(name)) is not None and gauge.kind != "eval"
        }
        busy_s = sum(run.engines.busy_s(now_s).values())
        if self._slots_at is not None and now_s > self._slots_at[0]:
            seconds = now_s - self._slots_at[0]
            counted["engine/busy_slots"] = (busy_s - self._slots_at[1]) / seconds
        self._slots_at = now_s, busy_s
        counted["perf/cores_fraction"] = psutil.cpu_percent() / 100  # since last time
        ended = StepEnd(now_s, self._spent_s, counted)
        self._spent_s = defaultdict(float)
        return ended

    def _count_from(self, batch: Batch) -> None:
        self._totals.starts_from(self._before.get(batch.version + 1, self._journaled))

    def step(
        self,
        run: Components,
        batch: Batch,
        report: TrainResponse,
        found: Mapping[str, float],
        ended: StepEnd,
    ) -> None:
        # A step that is repeated after a resume gets the evaluations that its line had.
        evaluated = self._evaluated.get(batch.version + 1, {})
        metrics = self._metrics(report, found, ended) | evaluated
        self._record(metrics, report)
        self._warn_of(metrics, batch)
        gaps = {(group, index): gap for group, index, gap in report.rollout_gaps}
        advantages = {
            (group, index): round(value, 6)
            for group, index, value in report.rollout_advantages
        }
        self._show_samples(
            self._samples.step(batch, gaps, advantages, run.tokenizer.decode)
        )

    def _record(self, metrics: Mapping[str, float], report: TrainResponse) -> None:
        self._last = metrics = {**metrics, **self._new_evaluations}
        self._new_evaluations = {}
        # The trainer's answer has no nan, it names these metrics instead. Their line
        # has nan again, so that a skipped step is not taken for a step without them.
        missing = dict.fromkeys(report.not_finite, math.nan)
        self._recorder.record_step({**metrics, **missing})
        self._console.show_step(metrics)

    def step_alone(
        self,
        trainer: SupervisedTrainer,
        checkpointer: Checkpointer,
        report: TrainResponse,
    ) -> None:
        """Report a step of a job without engines, whose tokens no policy sampled."""
        given = {
            name: value
            for name, value in report.metrics.items()
            if name not in OF_BEHAVIOUR
        }
        metrics = self._timed(report, given, time.monotonic())
        metrics |= self._counted({**trainer.gauges(), **checkpointer.gauges()})
        self._record(metrics, report)
        if metrics["trainer/skipped_steps"]:
            text = f"an update was skipped in step {report.policy_version}: loss or gradient was not finite"
            self.log.warn_once("skipped", text)

    def report_loss(self, version: int, loss: float, num_tokens: float) -> None:
        """Report the loss of held-out texts, a mean over their tokens."""
        line = {
            "step": version,
            "policy_version": version,
            "time_s": time.monotonic() - self._trained_since_s,
            "eval/version": version,
            "eval/loss": loss,
            "eval/tokens": num_tokens,
        }
        self._record_evaluation(line)

    def _record_evaluation(self, line: dict[str, Any]) -> None:
        self._evaluations.append(line)
        self._new_evaluations |= evaluation_metrics(line)
        self._recorder.record_evaluation(line)
        self._console.say(f"eval {evaluation_text(line)}")

    def on_rollout_failed(
        self,
        tokenizer: HFChatTokenizer,
        group_id: GroupId,
        prompt: Prompt,
        failed: FailedRollout,
    ) -> None:
        rollout: Rollout = ()
        with contextlib.suppress(RolloutFailure):  # nothing was sampled
            rollout = failed.seen()
        index = failed.sample_index
        for listener in self._listeners:
            listener.rollout(group_id, prompt.prompt_id, index, rollout, failed.failure)
        self._show_samples(
            self._samples.add_failed(
                group_id, prompt, failed, rollout, tokenizer.decode
            )
        )

    def on_group_finished(self, group: Group) -> None:
        for rollout in rollouts_of(group):
            index = rollout[0].sample_index
            prompt_id = group.prompt.prompt_id
            for listener in self._listeners:
                listener.rollout(group.group_id, prompt_id, index, rollout, None)

    def _show_samples(self, samples: list[ShownRollout]) -> None:
        if samples:
            self._trackers.tell("samples", samples[0]["step"], samples)
            self._console.show_samples(samples)

    def on_evaluated(self, result: EvalResult) -> None:
        metrics = result.metrics()
        metrics |= self._totals.add({name: metrics[name] for name in EVAL_TOTALS})
        now_s = time.monotonic()
        note_span(
            "evaluations", "evaluation", now_s - result.seconds, now_s, result.version
        )
        time_s = now_s - self._trained_since_s
        line: dict[str, Any] = {
            "policy_version": result.version,
            "time_s": time_s,
            **metrics,
        }
        line |= {"name": result.name} if result.name else {}
        line |= {"last_failure": result.last_failure} if result.last_failure else {}
        self._record_evaluation(line)

    def _warn_of(self, metrics: Mapping[str, float], batch: Batch) -> None:
        logs = self.run_dir / "logs"
        gap = metrics.get("policy/logprob_gap_mean", 0.0)
        if gap > GAP_WARNING:
            self.log.warn_once(
                "gap",
                f"engines and trainer disagree by {gap:.3g} nats on average on fresh tokens of step "
                f"{metrics['step']:.0f} (policy/logprob_gap_mean, {GAP_WARNING} is much): "
                f"{logs / 'trainer-0.log'} says why",
            )
        if num_skipped := metrics.get("trainer/skipped_steps", 0.0):
            groups = ", ".join(str(group.group_id) for group in batch.groups)
            skipped = (
                f"{several(num_skipped, 'update')} skipped in step {batch.version + 1}"
            )
            text = f"{skipped}, groups {groups}: loss or gradient was not finite"
            logger.warning("%s", text)
            self.log.warn_once("skipped", text)

    def status(self, run: Components, waits: Mapping[str, float]) -> None:
        now = self._now = self._gauges(run)
        missing = None if run.agents is None else run.agents.missing_workers()
        if missing is not None:
            self.log.warn_once("workers", missing)
        # the first batch fills, or a later one lacks rewards of people
        is_filling = self._slots_at is None
        if run.late.num_awaited and run.buffer.rule.waits_for is not None:
            is_filling = True
        if is_filling and self.log.current_activity == TRAINING:
            self._console.show_filling(run.producers.filling())
        self.write_status(run.trainer.policy_version, waits, status_of(run, now))

    def write_status(
        self,
        step: int,
        waits: Mapping[str, float],
        parts: Mapping[str, object] | None = None,
    ) -> None:
        """Write status.json. `parts`: sections of a run with engines."""
        self._timeline.flush()
        status = {
            "state": "running",
            "activity": self.log.current_activity,
            "status_url": self._status_url or None,
            "step": step,
            "num_steps": self.config.trainer.num_steps,
            "warnings": self.log.warnings or None,
            "waits": waits,
            **(parts or {}),
        }
        try:
            self._recorder.write_status(status)
        # Nothing of the run depends on the file, and the next second writes it again.
        except OSError as error:
            text = f"{STATUS_FILE} is out of date: {error.strerror}"
            self.log.warn_once("status", text)

    def finish(self, state: str, why: str = "", is_resumable: bool = True) -> None:
        """Write verdict and summary.json. `state`: done, interrupted or failed. Raises
        OSError.
        """
        try:
            self._finish(state, why)
            if state != "done" and is_resumable:
                again = run_again(self.run_dir, command=self._settings.command)
                self._console.say(f"resume with: {again}")
        finally:
            self._trackers.tell("close", state)

    async def aclose(self) -> None:
        await asyncio.gather(
            self._trackers.wait_closed(TRACKER_CLOSE_S, self._console.say),
            *(listener.wait_closed() for listener in self._listeners),
        )

    def _finish(self, state: str, why: str) -> None:
        self.close_console()
        status = {
            "state": state,
            "num_steps": self.config.trainer.num_steps,
            "why": why,
        }
        # The resume was refused or failed. Summary, plot and timeline still describe
        # the run before it.
        if self._is_to_resume:
            # A run that is done stays done if it is started again by mistake.
            if read_status(self.run_dir, []).get("state") != "done":
                self._recorder.write_status(status)
            return
        self._timeline.flush()
        self._recorder.write_status(status | {"step": int(self._last.get("step", 0))})
        summary: dict[str, object] = {
            "state": state,
            "why": why,
            "warnings": self.log.warnings,
        }
        if state == "done":
            # The version of final/. Lines of metrics.jsonl may be lost, so their number
            # is not a version.
            summary["policy_version"] = self.config.trainer.num_steps
        newest = [lines[-1] for lines in by_evaluation(self._evaluations).values()]
        if newest:
            summary |= (
                {"evaluation": newest[0]}
                if len(newest) == 1
                else {"evaluations": newest}
            )
        if steps := Steps(read_metrics(self.run_dir, [])):
            verdict = judge(
                steps, self.config, self.run_dir, has_failed=state == "failed"
            )
            summary |= asdict(verdict)
            self._console.show(summary_panel(verdict, title=f"{self.name}: {state}"))
            for line in newest:
                self._console.say(f"last evaluation: {evaluation_text(line)}")
            plot = self.run_dir / "reward.png"
            # one point is not a curve, and matplotlib takes half a second
            if len(steps.values("reward/mean")) > 1:
                write_reward_plot(
                    plot, steps, title=self.name, marks=read_marks(self.run_dir)
                )
                self._console.say(f"reward plot: {plot}")
            folder = shlex.quote(str(self.run_dir))
            self._console.say(f"all of it as a page: asyncrl report {folder}")
            if state == "done" and (final := self.run_dir / "final").is_dir():
                whose = "" if self.config.trainer.roles is None else " --role NAME"
                self._console.say(
                    f"weights: {final}; with a model card: asyncrl export {folder} OUT{whose}"
                )
        # The summary is written last: readers take its state `done` to mean that all
        # records, and final/, are complete.
        sync_records(self.run_dir)
        write_trace(self.run_dir)
        write_whole(self.run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")

    def close_console(self) -> None:
        self._console.close()

    def _count_on(self, spent_s: float = 0.0) -> None:
        trained_s = self._last.get("time_s", 0.0) + spent_s
        self._trained_since_s = time.monotonic() - trained_s

    def _metrics(
        self,
        report: TrainResponse,
        found: Mapping[str, float],
        ended: StepEnd,
    ) -> dict[str, float]:
        given = _without_early({**found, **report.metrics})
        metrics = {**ended.counted, **self._timed(report, given, ended.at_s)}
        spent_s = ended.spent_s
        return metrics | {
            "perf/journal_s": spent_s["journal"],
            "perf/request_s": max(
                0.0,
                spent_s["pack"]
                + spent_s["train"]
                - metrics.get("perf/train_s", 0.0)
                + metrics.get("perf/early_s", 0.0),
            ),
            "perf/export_s": max(
                0.0, spent_s["to engines"] - metrics.get("perf/to_engines_s", 0.0)
            ),
            "perf/record_s": spent_s["record"],
        }

    def _timed(
        self, report: TrainResponse, found: Mapping[str, float], ended_s: float
    ) -> dict[str, float]:
        """Return the metrics of a step with its number, time and speed."""
        time_s = ended_s - self._trained_since_s
        step_s = time_s - self._last.get("time_s", 0.0)
        return {
            "step": report.policy_version,
            "policy_version": report.policy_version,
            "time_s": time_s,
            **found,
            "perf/step_s": step_s,
            "perf/tokens_per_s": found["tokens/trained"] / step_s
            if step_s > 0
            else 0.0,
        }

    def _note_span(self, span: TimedSpan) -> None:
        self._timeline.note(span)
        if span.lane == "trainer":
            self._spent_s[span.kind] += span.end_s - span.start_s

    def _gauges(self, run: Components) -> dict[str, Any]:
        found = gauges(run)
        for listener in self._listeners:
            found |= listener.gauges()
        return self._counted(found)

    def added_totals(self) -> dict[str, float]:
        return dict(self._totals.added)

    def _counted(self, found: Mapping[str, Any]) -> dict[str, Any]:
        counted = {name: value for name, value in found.items() if is_total(name)}
        return {**found, **self._totals.add(counted)}


def processes(run: Components) -> tuple[Server, ...]:
    workers = () if run.agents is None else run.agents.workers
    servers = (*run.fleet.servers, *run.fleet.side_servers)
    return (
        *(
            server
            # A parked engine has no process to ask, and the watchdog must not call it
            # ill.
            for server in servers
            if run.scale.states.get(server.name) != EngineState.PARKED
        ),
        *workers,
    )


def _healths(servers: Sequence[Server], kind: type[T]) -> dict[str, T]:
    """Return the last answers of this kind, by the server's name."""
    return {
        server.name: server.health
        for server in servers
        if isinstance(server.health, kind)
    }


def gauges(run: Components) -> dict[str, float | Mapping[str, float]]:
    """Return all numbers by name, and by source if a new process restarts them."""
    agents = run.agents
    sources: list[Any] = [
        run.buffer,
        run.producers,
        run.engines,
        run.scheduler,
        run.scorer,
        run.trainer,
        run.late,
    ]
    sources += [run.checkpointer, run.scale, run.pressure, run.evaluation, run.fleet]
    if agents is not None:
        sources += [agents.gateway, agents.queue]
    found = dict[str, float | Mapping[str, float]]()
    for source in sources:
        found |= {} if source is None else source.gauges()
    found |= _asked_gauges(run)
    servers = processes(run)
    engines = _healths(servers, EngineHealth)
    trained_on = _healths(run.fleet.engine_servers, EngineHealth)
    # Their tokens are not of the policy.
    others = {
        name
        for name, extra in run.fleet.extra.items()
        if isinstance(extra.client, RoleClient)
    }
    healths = healths_of(run.fleet.engine_servers, run.engines)
    found |= {
        "engine/kv_fraction": max(
            (health.kv_fraction for health in healths), default=0.0
        ),
        "engine/preempted": {
            name: health.num_preempted for name, health in trained_on.items()
        },
        "engine/tokens": sum(
            engines[name].tokens_generated for name in engines.keys() - others
        ),
        "engine/decode_s": {
            name: health.decode_s for name, health in trained_on.items()
        },
        "engine/restarts": sum(engine.num_restarts for engine in run.scale.engines),
        "trainer/version": sum(
            health.policy_version
            for health in _healths(servers, TrainerHealth).values()
        ),
    }
    if agents is not None:
        found["harness/restarts"] = sum(one.num_restarts for one in agents.supervisors)
        workers = _healths(servers, WorkerHealth)
        found["harness/abandoned"] = {
            name: health.num_abandoned for name, health in workers.items()
        }
        found["harness/cpu_s"] = {
            name: health.cpu_s for name, health in workers.items()
        }
    return found


def _asked_gauges(run: Components) -> Mapping[str, float]:
    evals = () if run.evaluation is None else run.evaluation.held_out
    return asked_gauges([run.scorer, *(each.scorers for each in evals)])


def reported(run: Components) -> Reported:
    counted = PROGRESS | run.fleet.gauges().keys() | _asked_gauges(run).keys()
    marks = {
        name: value
        for name, value in gauges(run).items()
        if name in counted and not isinstance(value, Mapping)
    }
    supervisors = (run.trainer, *run.fleet.supervisors.values())
    oldest = tuple(run.producers.oldest())
    num_awaited = run.late.num_awaited
    awaited = ""
    if num_awaited and not oldest and run.buffer.rule.waits_for is not None:
        awaited = f"{several(num_awaited, 'rollout')} wait for a reward from outside (/v1/outcome)"
    return Reported(marks, oldest, any(one.is_starting for one in supervisors), awaited)


def _engine_state(run: Components, name: str, version: int) -> str:
    state = run.scale.states[name]
    if state != EngineState.WORKING:
        return state
    return "down" if name in run.engines.down else f"policy_version {version}"


def status_of(run: Components, now: Mapping[str, object]) -> dict[str, object]:
    """Return the components' section of status.json."""
    buffer = ("ready", "running", "look_ahead", "served")
    rollouts = ("inflight", "failed", "retried", "given_up", "filtered")
    engines = {
        server.name: _engine_state(run, server.name, server.policy_version)
        for server in run.engines.servers
    }
    return {
        "buffer": {name: now[f"buffer/{name}"] for name in buffer},
        "rollouts": {name: now[f"rollout/{name}"] for name in rollouts},
        "rewards_awaited": now.get("reward/awaited"),
        "weight_sync": {
            "version": now["publish/version"],
            "skipped": now["weight_sync/skipped"],
        },
        "engines": engines,
        "servers": {name: extra.state for name, extra in run.fleet.extra.items()}
        or None,
        "engines_wanted": None if run.scale.is_fixed else run.scale.wanted,
        "lease": run.scheduler.status() or None,
        "evaluation": run.evaluation and asdict(run.evaluation.stats),
        "oldest_rollouts": [list(entry) for entry in run.producers.oldest()],
        "last_failure": run.producers.last_failure,
    }


def totals_in(line: Mapping[str, object]) -> dict[str, float]:
    return {
        name: num
        for name, num in line.items()
        if is_total(name) and isinstance(num, int | float)
    }


def _without_early(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the waits for a batch less the time in which the trainer
    trained parts of it.
    """
    early_s = metrics.get("perf/early_s", 0.0)
    waited_s = metrics.get("perf/wait_s", 0.0)
    if not early_s or not waited_s:
        return dict(metrics)
    kept = max(0.0, 1.0 - early_s / waited_s)
    return {
        name: value * kept if name.startswith("perf/wait_") else value
        for name, value in metrics.items()
    }
