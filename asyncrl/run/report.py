"""Turns what the rooms report into step metrics, status and the end-of-run summary; observe/ shows and writes
them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.buffer.buffer import BufferStats
from asyncrl.checkpoints.folder import sync_records
from asyncrl.config import RunConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.files import LOST, write_whole
from asyncrl.journal.read import Counted
from asyncrl.messages.engine_calls import EngineHealth
from asyncrl.messages.records import Batch, StepReport
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.console import Console
from asyncrl.observe.known_waits import Wait
from asyncrl.observe.plot import write_reward_plot
from asyncrl.observe.recorder import METRICS_FILE, Recorder
from asyncrl.observe.run_files import lines_of, read_evaluations, read_steps, steps_are_missing
from asyncrl.observe.run_numbers import OverdueNumbers, total
from asyncrl.observe.step_metrics import Totals, batch_metrics
from asyncrl.observe.text import duration, evaluation_text, several, skipped_text
from asyncrl.observe.verdict import judge, summary_panel
from asyncrl.rollouts.evaluator import EvalResult
from asyncrl.run.agents import Harnessing
from asyncrl.run.build import Rooms
from asyncrl.run.colocate import TurnStats
from asyncrl.run.life import run_again
from asyncrl.trainer.gap import GAP_WARNING

logger = logging.getLogger("asyncrl.run.report")

MOST_WARNINGS = 100
"""That status.json and the summary name."""


class Reporter:
    """All that a run shows and writes of itself. Life: start() -> step() and status() -> finish() and
    close(), in any order.

    A run that `goes_on` leaves what the killed one wrote as it is until resumes(): its start may be refused.
    """

    def __init__(self, config: RunConfig, run_dir: Path, name: str, *, goes_on: bool = False) -> None:
        self.config, self.run_dir, self.name = config, run_dir, name
        self._recorder = Recorder(run_dir, tensorboard=config.observe.tensorboard)
        self._console = Console(
            config.observe.console,
            run_name=name,
            num_steps=config.trainer.num_steps,
            max_staleness=config.buffer.max_staleness,
        )
        self._last: Mapping[str, Any] = {}
        """Metrics of the last step; those of all steps are in metrics.jsonl alone."""
        self._overdue: OverdueNumbers | None = None
        self._opened_s = self._trained_since_s = time.monotonic()
        self._activity = ""
        self._evaluations: list[Mapping[str, Any]] = []
        self._new_evaluation: dict[str, float] = {}
        self._totals = Totals()
        self._before: dict[int, dict[str, float]] = {}
        """Totals by step, of steps that were reported and are about to be taken again."""
        self._warnings: list[str] = []
        self._num_warnings = 0
        self._is_without_workers = False
        self._is_gap_told = False
        self._is_to_resume = goes_on
        self._is_given_up_told = False
        self._is_skip_told = False
        self._num_skipped = 0
        self._is_resumed = False
        """The buffer has counted since then alone: the verdict of all steps takes what their metrics say."""

    def start(self) -> None:
        """Begin to show."""
        self._recorder.write_status({"state": "starting"})
        self._console.say(
            f"{self.name}: {self.config.trainer.num_steps} steps, everything goes to {self.run_dir}"
        )
        self._console.start()

    def tell(self, text: str) -> None:
        """What the run does right now, in words."""
        self._activity = text
        self._console.show_activity(text)

    def say(self, text: str) -> None:
        """One line that stays on the console and in the log."""
        logger.info("%s", text)
        self._console.say(text)

    def say_secret(self, text: str) -> None:
        """One line with a key in it: on the console, and in no file of ours."""
        self._console.say(text)

    def resumes(self, version: int, counted: Sequence[Counted] = (Counted(),)) -> None:
        """The run goes on from the weights of `version`: the steps before stay, those after are about to be
        reported again.

        `counted`: what the journal says that was counted by the end of each step from `version` on, and last
        of all now.
        """
        self._is_to_resume, self._is_resumed = False, True
        replayed = range(version, version + len(counted) - 1)
        lines = (
            line for _, line, _ in lines_of(self.run_dir / METRICS_FILE, []) if line.get("step") in replayed
        )
        self._before = {int(line["step"]): totals_in(line) for line in lines}
        self._last = self._recorder.keep_steps_below(version)
        if (first := int(self._last.get("step", -1)) + 1) < version:
            self.warn(f"{steps_are_missing(first, version - 1)} in metrics.jsonl ({LOST})")
        steps, _ = read_steps(self.run_dir, [])
        self._console.goes_on(steps)
        self._num_skipped = int(total(steps, "trainer/skipped_steps"))
        self._evaluations = [*read_evaluations(self.run_dir, [])]
        for line in (self._last, *self._evaluations[-1:]):
            self._totals.starts_from(totals_in(line))
        is_sampled = (
            self.config.task.replay is None
        )  # recorded rollouts are in the journal, and no engine has generated them
        journaled = {
            step: journal_totals(found, is_sampled=is_sampled)
            for step, found in enumerate(counted, start=version)
        }
        self._before = journaled | self._before
        self._count_on()
        self._console.say(f"goes on from policy_version {version}")

    def training_starts(self) -> None:
        """All processes answer: time_s counts from here, set-up is said beside it."""
        self._count_on()
        for totals in self._before.values():
            self._totals.starts_from(totals)
        self._console.say(f"ready after {duration(time.monotonic() - self._opened_s)}; training")
        self.tell("training")

    def step(self, rooms: Rooms, batch: Batch, report: StepReport, *, step_s: float) -> None:
        """One optimizer step is done: its metrics go to metrics.jsonl, TensorBoard and the console."""
        self._totals.starts_from(self._before.get(batch.version, {}))
        metrics = self._step_metrics(rooms, batch, report, step_s) | self._new_evaluation
        self._new_evaluation = {}
        if not self._is_resumed:
            self._overdue = _overdue_numbers(rooms.buffer.stats())
        self._last = metrics
        self._num_skipped += int(metrics.get("trainer/skipped_steps", 0))
        self._recorder.record_step(metrics | dict.fromkeys(report.not_finite, math.nan))
        self._console.show_step(metrics)
        self._warn_of_gap(metrics)
        self._warn_of_given_up(metrics)
        self._warn_of_skipped(metrics, batch)

    def evaluated(self, result: EvalResult) -> None:
        """An evaluation is done: a line of eval.jsonl, TensorBoard and the console, and part of the next
        step's metrics.
        """
        metrics = result.metrics()
        metrics |= self._totals.add({name: metrics[name] for name in EVAL_TOTALS})
        line: dict[str, Any] = {
            "policy_version": result.version,
            "time_s": time.monotonic() - self._trained_since_s,
            **metrics,
        }
        if result.last_failure:
            line["last_failure"] = result.last_failure
        self._evaluations.append(line)
        self._new_evaluation = metrics
        self._recorder.record_evaluation(line)
        self._console.say(f"eval {evaluation_text(metrics)}")
        if not result.samples:
            self.warn(
                f"no sample of the evaluation of policy_version {result.version} has a reward, the last "
                f"failure: {result.last_failure}"
            )

    def _warn_of_gap(self, metrics: Mapping[str, float]) -> None:
        """Once a run: the trainer's log has the advice, and says it again each time."""
        gap = metrics.get("policy/logprob_gap_mean", 0.0)
        if gap > GAP_WARNING and not self._is_gap_told:
            self._is_gap_told = True
            self.warn(
                f"engines and trainer disagree by {gap:.3g} nats on average on the fresh tokens of step "
                f"{metrics['step']:.0f} "
                f"(policy/logprob_gap_mean, {GAP_WARNING} is much): "
                f"{self.run_dir / 'logs' / 'trainer-0.log'} says what it may be"
            )

    def _warn_of_given_up(self, metrics: Mapping[str, float]) -> None:
        """Of the first one alone: the summary has their number, the controller's log each of them."""
        if metrics.get("rollout/given_up") and not self._is_given_up_told:
            self._is_given_up_told = True
            self.warn(
                f"a prompt failed or became too old "
                f"{several(self.config.rollout.max_hand_backs + 1, 'time')} (rollout.max_hand_backs), "
                "or can never be sampled, and is given up; logs/controller.log names it and says why, "
                "rollout/given_up counts them"
            )

    def _warn_of_skipped(self, metrics: Mapping[str, float], batch: Batch) -> None:
        """Each in the log, with its groups; the first one on the console and in the summary too, whose
        verdict counts them all.
        """
        if not (skipped := skipped_text(metrics)):
            return
        groups = ("group " if len(batch.groups) == 1 else "groups ") + ", ".join(
            str(group.group_id) for group in batch.groups
        )
        text = (
            f"{skipped}, {groups}: loss or gradient was NaN or infinite, so the "
            f"weights stay as they were; {self.run_dir / 'logs' / 'trainer-0.log'} has the values, the batch "
            f"is saved in "
            f"{self.run_dir / 'failed_batches' / f'step_{batch.version}.safetensors'}; "
            f"trainer.max_skipped_steps={self.config.trainer.max_skipped_steps} in a row end the run"
        )
        if self._is_skip_told:
            logger.warning("%s", text)
        else:
            self._is_skip_told = True
            self.warn(text)

    def warn(self, text: str) -> None:
        """What went wrong and does not end the run: it stays on the console, in the log and in the
        summary.
        """
        self._num_warnings += 1
        if self._num_warnings <= MOST_WARNINGS:
            self._warnings.append(text)
        else:
            self._warnings[MOST_WARNINGS:] = [
                f"and {self._num_warnings - MOST_WARNINGS} more; logs/controller.log has all of them"
            ]
        logger.warning("%s", text)
        self._console.say(f"WARNING: {text}")

    def status(self, rooms: Rooms, waits: Sequence[Wait]) -> None:
        """Replace status.json, for `asyncrl status` from another terminal. `waits`: who waits for whom right
        now.
        """
        producers, buffer, publisher = rooms.producers.stats(), rooms.buffer.stats(), rooms.publisher.stats()
        totals = self._totals.add(counters(rooms))
        self._warn_without_workers(rooms.harnessing)
        self._recorder.write_status(
            {
                "state": "running",
                "activity": self._activity,
                "step": rooms.trainer.policy_version,
                "num_steps": self.config.trainer.num_steps,
                "buffer": {
                    "ready": buffer.ready,
                    "running": buffer.running,
                    "look_ahead": buffer.look_ahead,
                    "served": buffer.served,
                },
                "rollouts": {
                    "inflight": producers.inflight,
                    "failed": totals["rollout/failed"],
                    "retried": totals["rollout/retried"],
                    "given_up_prompts": totals["rollout/given_up"],
                    "filtered_groups": totals["rollout/filtered"],
                },
                **({"skipped_steps": self._num_skipped} if self._num_skipped else {}),
                "publisher": {"version": publisher.version, "skipped": totals["publish/skipped"]},
                "engines": _engine_states(rooms.engines),
                **({"turns": asdict(turns)} if (turns := rooms.turns.stats()) is not None else {}),
                **({"evaluation": asdict(rooms.evaluation.stats())} if rooms.evaluation is not None else {}),
                **({"warnings": self._warnings} if self._warnings else {}),
                "waits": [wait.as_dict() for wait in waits],
                "oldest_rollouts": [list(entry) for entry in producers.oldest],
                "last_failure": producers.last_failure,
            }
        )

    def finish(self, state: str, why: str = "", *, can_go_on: bool = True) -> None:
        """Say how the run ended: verdict, plot and summary.json, as far as there are steps to speak of.

        Not `can_go_on`: the same command would end in the same way, so it is not offered.
        """
        self.close_console()
        status = {"state": state, "num_steps": self.config.trainer.num_steps, "why": why}
        self._recorder.write_status(
            status if self._is_to_resume else {**status, "step": int(self._last.get("step", -1)) + 1}
        )
        summary: dict[str, Any] = {"state": state, "why": why, "warnings": self._warnings}
        if self._evaluations:
            summary["evaluation"] = self._evaluations[-1]
        if not self._is_to_resume and (steps := read_steps(self.run_dir, [])[0]).values("reward/mean"):
            verdict = judge(steps, self.config, self._overdue)
            summary |= verdict.as_dict()
            plot = write_reward_plot(self.run_dir, steps, title=self.name, evaluations=self._evaluations)
            self._console.show(summary_panel(verdict, title=f"{self.name}: {state}"))
            for line in self._evaluations[-1:]:
                self._console.say(f"last evaluation: {evaluation_text(line)}")
            self._console.say(f"reward plot: {plot}")
            if state == "done" and (final := self.run_dir / "final").is_dir():
                self._console.say(f"weights: {final}")
        if state != "done" and can_go_on:
            self._console.say(f"go on with: {run_again(self.run_dir)}")
        if not self._is_to_resume:
            sync_records(self.run_dir)
            write_whole(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        self._recorder.close()

    def _warn_without_workers(self, harnessing: Harnessing | None) -> None:
        """Once for each time that there is none."""
        missing = harnessing.missing_workers() if harnessing is not None else None
        if missing is not None and not self._is_without_workers:
            self.warn(missing)
        self._is_without_workers = missing is not None

    def close_console(self) -> None:
        """Stop repainting; idempotent."""
        self._console.close()

    def _count_on(self) -> None:
        """time_s goes on from the last step: a resumed run's time does not go back, and set-up is no part of
        it.
        """
        self._trained_since_s = time.monotonic() - self._last.get("time_s", 0.0)

    def _step_metrics(
        self, rooms: Rooms, batch: Batch, report: StepReport, step_s: float
    ) -> dict[str, float]:
        wait, buffer, producers, publisher = (
            rooms.buffer.last_wait,
            rooms.buffer.stats(),
            rooms.producers.stats(),
            rooms.publisher.stats(),
        )
        sampled = sum(trajectory.num_sampled for group in batch.groups for trajectory in group.trajectories)
        metrics: dict[str, float] = {
            "step": batch.version,
            "policy_version": report.policy_version,
            "time_s": time.monotonic() - self._trained_since_s,
        }
        metrics |= batch_metrics(batch)
        metrics |= report.metrics
        metrics |= {
            "tokens/sampled": sampled,
            "perf/step_s": step_s,
            "perf/wait_s": wait.total_s,
            "perf/wait_generation_s": wait.generation_s,
            "perf/wait_stragglers_s": wait.stragglers_s,
            "perf/wait_publishing_s": wait.publishing_s,
            "perf/publish_s": publisher.publish_s,
            "perf/publish_pause_s": publisher.pause_s,
            "perf/tokens_per_s": metrics["tokens/trained"] / step_s if step_s > 0 else 0.0,
            "buffer/ready": buffer.ready,
            "buffer/running": buffer.running,
            "buffer/look_ahead": buffer.look_ahead,
            "rollout/inflight": producers.inflight,
        }
        metrics |= self._totals.add(counters(rooms))
        if len(rooms.engines.servers) > 1:
            metrics |= {
                f"engine/policy_version/{server.name}": server.policy_version
                for server in rooms.engines.servers
            }
        if rooms.harnessing is not None:
            metrics |= gateway_metrics(rooms.harnessing)
        if (turns := rooms.turns.stats()) is not None:
            metrics |= turn_metrics(turns)
        return metrics


def _engine_states(engines: EnginePool) -> dict[str, str]:
    """Version by engine: in a rolling publish they differ for a while."""
    down = engines.stats().down
    return {
        server.name: "down" if server.name in down else f"policy_version {server.policy_version}"
        for server in engines.servers
    }


def _overdue_numbers(stats: BufferStats) -> OverdueNumbers:
    """What the buffer counted of overdue groups, for the verdict."""
    return OverdueNumbers(
        straggler_s=stats.straggler_s,
        num_straggler_waits=stats.num_straggler_waits,
        num_waited_groups=stats.waited_groups,
        waited_fraction=stats.waited_tokens / stats.consumed_tokens if stats.consumed_tokens else 0.0,
        num_masked_groups=stats.masked_groups,
        masked_fraction=stats.masked_tokens / stats.consumed_tokens if stats.consumed_tokens else 0.0,
        num_handed_back=stats.dropped + stats.all_masked,
        num_groups=stats.consumed,
    )


# The numbers of a step that the parts of a run count themselves, as metrics. Knows the run's parts; writes
# nothing.


TOTALS = (
    "tokens/generated",
    "publish/skipped",
    "engine/decode_s",
    "engine/restarts",
    "rollout/failed",
    "rollout/retried",
    "rollout/interrupted",
    "rollout/dropped",
    "rollout/failed_groups",
    "rollout/given_up",
    "rollout/abandoned",
    "rollout/filtered",
    "rollout/filtered_tokens",
    "gateway/calls",
    "gateway/extended",
    "gateway/realigned",
    "gateway/forked",
    "gateway/refused",
    "harness/lost",
    "harness/abandoned",
    "harness/restarts",
)
"""Metrics that count over the whole run: a resumed one goes on with them."""
EVAL_TOTALS = ("eval/skipped", "eval/abandoned", "eval/abandoned_calls")


def counters(rooms: Rooms) -> dict[str, float | Mapping[str, float]]:
    """What was counted since this process, or the engine of that name, began."""
    engines, producers, buffer = rooms.engines.stats(), rooms.producers.stats(), rooms.buffer.stats()
    counters: dict[str, float | Mapping[str, float]] = {
        "tokens/generated": engines.tokens,
        "publish/skipped": rooms.publisher.stats().skipped,
        "engine/decode_s": {
            server.child.name: server.health.decode_s
            for server in rooms.servers
            if isinstance(server.health, EngineHealth)
        },
        "engine/restarts": sum(supervisor.num_restarts for supervisor in rooms.supervisors),
        "rollout/failed": producers.failed,
        "rollout/retried": producers.retried,
        "rollout/interrupted": engines.interrupted,
        "rollout/dropped": producers.dropped,
        "rollout/failed_groups": producers.failed_groups,
        "rollout/given_up": producers.given_up,
        "rollout/abandoned": rooms.scorer.num_abandoned,
        "rollout/filtered": buffer.filtered,
        "rollout/filtered_tokens": buffer.filtered_tokens,
    }
    if rooms.harnessing is not None:
        calls, work = rooms.harnessing.gateway.stats(), rooms.harnessing.queue.gauges()
        counters |= {
            "gateway/calls": calls.calls,
            "gateway/extended": calls.extended,
            "gateway/realigned": calls.realigned,
            "gateway/forked": calls.forked,
            "gateway/refused": sum(calls.refused.values()),
            "harness/lost": work["lost"],
            "harness/abandoned": {
                worker.name: worker.health.num_abandoned
                for worker in rooms.harnessing.workers
                if isinstance(worker.health, WorkerHealth)
            },
            "harness/restarts": sum(supervisor.num_restarts for supervisor in rooms.harnessing.supervisors),
        }
    return counters


def totals_in(line: Mapping[str, Any]) -> dict[str, float]:
    """The totals of the whole run that a line of metrics.jsonl or eval.jsonl holds."""
    return {name: line[name] for name in (*TOTALS, *EVAL_TOTALS) if isinstance(line.get(name), int | float)}


def journal_totals(counted: Counted, *, is_sampled: bool) -> dict[str, float]:
    """The same of what the journal has counted."""
    totals: dict[str, float] = {
        "rollout/failed": counted.failed,
        "rollout/failed_groups": counted.failed_groups,
        "rollout/dropped": counted.dropped,
        "rollout/given_up": counted.given_up,
        "rollout/filtered": counted.filtered,
        "rollout/filtered_tokens": counted.filtered_tokens,
    }
    return {"tokens/generated": counted.generated, **totals} if is_sampled else totals


def turn_metrics(turns: TurnStats) -> dict[str, float]:
    """Of the two handovers around a step; after the last step the trainer keeps the devices. Bytes freed,
    taken and moved in all phases.
    """
    return {
        "perf/handover_s": turns.to_trainer_s + turns.to_engines_s,
        "perf/to_trainer_s": turns.to_trainer_s,
        "perf/to_engines_s": turns.to_engines_s,
        "perf/handover_bytes": turns.num_bytes,
    }


def gateway_metrics(harnessing: Harnessing) -> dict[str, float]:
    """Of now."""
    work = harnessing.queue.gauges()
    return {
        "harness/queued": work["queued"],
        "harness/leased": work["leased"],
        "harness/workers": work["workers"],
    }
