"""Turns what the rooms report into step metrics, status and the end-of-run summary; observe/ shows and writes them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.buffer.stats import BufferStats
from asyncrl.config import RunConfig
from asyncrl.engines import EnginePool
from asyncrl.evaluation import EvalResult
from asyncrl.observe.console import Console
from asyncrl.observe.plot import write_reward_plot
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_files import read_evaluations
from asyncrl.observe.run_numbers import OverdueNumbers
from asyncrl.observe.step_metrics import batch_metrics
from asyncrl.observe.summary import summary_panel
from asyncrl.observe.text import duration, evaluation_text
from asyncrl.observe.verdict import judge
from asyncrl.observe.waits import Wait
from asyncrl.running.harnessing import Harnessing
from asyncrl.running.turns import TurnStats
from asyncrl.running.wiring import Rooms
from asyncrl.trainer.gap import GAP_WARNING
from asyncrl.types import Batch, StepReport
from asyncrl.wire import EngineHealth

logger = logging.getLogger("asyncrl.running.reporting")


class Reporter:
    """All that a run shows and writes of itself. Life: start() -> step() and status() -> finish() and close(), in any order."""

    def __init__(self, config: RunConfig, run_dir: Path, name: str) -> None:
        self.config, self.run_dir, self.name = config, run_dir, name
        self._recorder = Recorder(run_dir, tensorboard=config.observe.tensorboard)
        self._console = Console(
            config.observe.console, run_name=name, num_steps=config.trainer.num_steps, max_staleness=config.buffer.max_staleness
        )
        self._steps: list[Mapping[str, float]] = []
        self._overdue: OverdueNumbers | None = None
        self._opened_s = self._trained_since_s = time.monotonic()
        self._activity = ""
        self._evaluations: list[Mapping[str, Any]] = []
        self._new_evaluation: dict[str, float] = {}
        self._warnings: list[str] = []
        self._is_without_workers = False
        self._is_gap_told = False
        self._is_resumed = False
        """The buffer has counted since then alone: the verdict of all steps takes what their metrics say."""

    def start(self) -> None:
        """Begin to show."""
        self._recorder.write_status({"state": "starting"})
        self._console.say(f"{self.name}: {self.config.trainer.num_steps} steps, everything goes to {self.run_dir}")
        self._console.start()

    def tell(self, text: str) -> None:
        """What the run does right now, in words."""
        self._activity = text
        self._console.show_activity(text)

    def say(self, text: str) -> None:
        """One line that stays on the console and in the log."""
        logger.info("%s", text)
        self._console.say(text)

    def resumes(self, version: int, told: Sequence[str]) -> None:
        """The run goes on from the weights of `version`: the steps before stay, those after are about to be reported again."""
        self._is_resumed = True
        self._steps = self._recorder.keep_steps_below(version)
        self._evaluations = [*read_evaluations(self.run_dir, [])]
        self._count_on()
        for text in told:
            self.warn(text)
        self._console.say(f"goes on from policy_version {version}")

    def training_starts(self) -> None:
        """All processes answer: time_s counts from here, set-up is said beside it."""
        self._count_on()
        self._console.say(f"ready after {duration(time.monotonic() - self._opened_s)}; training")
        self.tell("training")

    def step(self, rooms: Rooms, batch: Batch, report: StepReport, *, step_s: float) -> None:
        """One optimizer step is done: its metrics go to metrics.jsonl, TensorBoard and the console."""
        metrics = self._step_metrics(rooms, batch, report, step_s) | self._new_evaluation
        self._new_evaluation = {}
        if not self._is_resumed:
            self._overdue = _overdue_numbers(rooms.buffer.stats())
        self._steps.append(metrics)
        self._recorder.record_step(metrics)
        self._console.show_step(metrics)
        self._warn_of_gap(metrics)

    def evaluated(self, result: EvalResult) -> None:
        """An evaluation is done: a line of eval.jsonl, TensorBoard and the console, and part of the next step's metrics."""
        metrics = result.metrics()
        line: dict[str, Any] = {"policy_version": result.version, "time_s": time.monotonic() - self._trained_since_s, **metrics}
        if result.last_failure:
            line["last_failure"] = result.last_failure
        self._evaluations.append(line)
        self._new_evaluation = metrics
        self._recorder.record_evaluation(line)
        self._console.say(f"eval {evaluation_text(metrics)}")
        if not result.samples:
            self.warn(
                f"no sample of the evaluation of policy_version {result.version} has a reward, the last failure: {result.last_failure}"
            )

    def _warn_of_gap(self, metrics: Mapping[str, float]) -> None:
        """Once a run: the trainer's log has the advice, and says it again each time."""
        gap = metrics.get("policy/logprob_gap_mean", 0.0)
        if gap > GAP_WARNING and not self._is_gap_told:
            self._is_gap_told = True
            self.warn(
                f"engines and trainer disagree by {gap:.3g} nats on average on the fresh tokens of step {metrics['step']:.0f} "
                f"(policy/logprob_gap_mean, {GAP_WARNING} is much): {self.run_dir / 'logs' / 'trainer-0.log'} says what it may be"
            )

    def warn(self, text: str) -> None:
        """What went wrong and does not end the run: it stays on the console, in the log and in the summary."""
        self._warnings.append(text)
        logger.warning("%s", text)
        self._console.say(f"WARNING: {text}")

    def status(self, rooms: Rooms, waits: Sequence[Wait]) -> None:
        """Replace status.json, for `asyncrl status` from another terminal. `waits`: who waits for whom right now."""
        producers, buffer, publisher = rooms.producers.stats(), rooms.buffer.stats(), rooms.publisher.stats()
        self._warn_without_workers(rooms.harnessing)
        self._recorder.write_status(
            {
                "state": "running",
                "activity": self._activity,
                "step": rooms.trainer.policy_version,
                "num_steps": self.config.trainer.num_steps,
                "buffer": {"ready": buffer.ready, "running": buffer.running, "look_ahead": buffer.look_ahead, "served": buffer.served},
                "rollouts": {
                    "inflight": producers.inflight,
                    "failed": producers.failed,
                    "retried": producers.retried,
                    "filtered_groups": buffer.filtered,
                },
                "publisher": {"version": publisher.version, "skipped": publisher.skipped},
                "engines": _engine_states(rooms.engines),
                **({"turns": asdict(turns)} if (turns := rooms.turns.stats()) is not None else {}),
                **({"evaluation": asdict(rooms.evaluation.stats())} if rooms.evaluation is not None else {}),
                **({"warnings": self._warnings} if self._warnings else {}),
                "waits": [wait.as_dict() for wait in waits],
                "oldest_rollouts": [list(entry) for entry in producers.oldest],
                "last_failure": producers.last_failure,
            }
        )

    def finish(self, state: str, why: str = "") -> None:
        """Say how the run ended: verdict, plot and summary.json, as far as there are steps to speak of."""
        self.close_console()
        self._recorder.write_status({"state": state, "step": len(self._steps), "num_steps": self.config.trainer.num_steps, "why": why})
        summary: dict[str, Any] = {"state": state, "why": why, "warnings": self._warnings}
        if self._evaluations:
            summary["evaluation"] = self._evaluations[-1]
        if self._steps:
            verdict = judge(self._steps, self.config, self._overdue)
            summary |= verdict.as_dict()
            plot = write_reward_plot(self.run_dir, self._steps, title=self.name, evaluations=self._evaluations)
            self._console.show(summary_panel(verdict, title=f"{self.name}: {state}"))
            for line in self._evaluations[-1:]:
                self._console.say(f"last evaluation: {evaluation_text(line)}")
            self._console.say(f"reward plot: {plot}")
            if (final := self.run_dir / "final").is_dir():
                self._console.say(f"weights: {final}")
        if state != "done":
            self._console.say(f"go on with: asyncrl run {self.run_dir / 'config.yaml'} --run-dir {self.run_dir}")
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
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
        """time_s goes on from the last step: a resumed run's time does not go back, and set-up is no part of it."""
        self._trained_since_s = time.monotonic() - (self._steps[-1]["time_s"] if self._steps else 0.0)

    def _step_metrics(self, rooms: Rooms, batch: Batch, report: StepReport, step_s: float) -> dict[str, float]:
        wait, buffer, producers = rooms.buffer.last_wait, rooms.buffer.stats(), rooms.producers.stats()
        engines, publisher = rooms.engines.stats(), rooms.publisher.stats()
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
            "tokens/generated": engines.tokens,
            "perf/step_s": step_s,
            "perf/wait_s": wait.total_s,
            "perf/wait_generation_s": wait.generation_s,
            "perf/wait_stragglers_s": wait.stragglers_s,
            "perf/wait_publishing_s": wait.publishing_s,
            "perf/publish_s": publisher.publish_s,
            "perf/publish_pause_s": publisher.pause_s,
            "perf/tokens_per_s": metrics["tokens/trained"] / step_s if step_s > 0 else 0.0,
            "publish/skipped": publisher.skipped,
            "engine/decode_s": sum(server.health.decode_s for server in rooms.servers if isinstance(server.health, EngineHealth)),
            "engine/restarts": sum(supervisor.stats().restarts for supervisor in rooms.supervisors),
            "buffer/ready": buffer.ready,
            "buffer/running": buffer.running,
            "buffer/look_ahead": buffer.look_ahead,
            "rollout/inflight": producers.inflight,
            "rollout/failed": producers.failed,
            "rollout/retried": producers.retried,
            "rollout/interrupted": engines.interrupted,
            "rollout/dropped": producers.dropped,
            "rollout/filtered": buffer.filtered,
            "rollout/filtered_tokens": buffer.filtered_tokens,
        }
        if len(rooms.engines.servers) > 1:
            metrics |= {f"engine/policy_version/{server.name}": server.policy_version for server in rooms.engines.servers}
        if rooms.harnessing is not None:
            metrics |= _gateway_metrics(rooms.harnessing)
        if (turns := rooms.turns.stats()) is not None:
            metrics |= _turn_metrics(turns)
        return metrics


def _turn_metrics(turns: TurnStats) -> dict[str, float]:
    """Of the two handovers around a step; after the last step the trainer keeps the devices. Bytes freed, taken and moved in all phases."""
    return {
        "perf/handover_s": turns.to_trainer_s + turns.to_engines_s,
        "perf/to_trainer_s": turns.to_trainer_s,
        "perf/to_engines_s": turns.to_engines_s,
        "perf/handover_bytes": turns.num_bytes,
    }


def _gateway_metrics(harnessing: Harnessing) -> dict[str, float]:
    """Totals so far of the gateway's calls and of the work that harnesses were given; queued, leased and workers of now."""
    calls, work = harnessing.gateway.stats(), harnessing.leases.stats()
    return {
        "gateway/calls": calls.calls,
        "gateway/extended": calls.extended,
        "gateway/realigned": calls.realigned,
        "gateway/forked": calls.forked,
        "gateway/refused": sum(calls.refused.values()),
        "harness/queued": work.queued,
        "harness/leased": work.leased,
        "harness/workers": work.workers,
        "harness/lost": work.num_lost,
        "harness/restarts": sum(supervisor.num_restarts for supervisor in harnessing.supervisors),
    }


def _engine_states(engines: EnginePool) -> dict[str, str]:
    """Version by engine: in a rolling publish they differ for a while."""
    down = engines.stats().down
    return {server.name: "down" if server.name in down else f"policy_version {server.policy_version}" for server in engines.servers}


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
