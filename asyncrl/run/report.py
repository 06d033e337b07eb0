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

from asyncrl.checkpoints.folder import sync_records
from asyncrl.config import RunConfig
from asyncrl.files import LOST, write_whole
from asyncrl.journal.read import Counted
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.observe.console import Console
from asyncrl.observe.gauges import TOTALS, Totals, batch_metrics, gauge_of
from asyncrl.observe.recorder import METRICS_FILE, Recorder, write_reward_plot
from asyncrl.observe.run_files import lines_of, read_evaluations, read_steps, steps_are_missing
from asyncrl.observe.run_numbers import duration, evaluation_text, several, skipped_text
from asyncrl.observe.verdict import judge, summary_panel
from asyncrl.observe.watchdog import Wait
from asyncrl.rollouts.evaluator import EvalResult
from asyncrl.run.build import Rooms
from asyncrl.run.life import run_again
from asyncrl.run.watch import gauges
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
        self._told = set[str]()
        """What is said once a run."""
        self._is_to_resume = goes_on
        self._num_skipped = 0

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
        self._is_to_resume = False
        replayed = range(version, version + len(counted) - 1)
        lines = (
            line for _, line in lines_of(self.run_dir / METRICS_FILE, []) if line.get("step") in replayed
        )
        self._before = {int(line["step"]): totals_in(line) for line in lines}
        self._last = self._recorder.keep_steps_below(version)
        if (first := int(self._last.get("step", -1)) + 1) < version:
            self.warn(f"{steps_are_missing(first, version - 1)} in metrics.jsonl ({LOST})")
        steps, _ = read_steps(self.run_dir, [])
        self._console.goes_on(steps)
        self._num_skipped = int(steps.total("trainer/skipped_steps"))
        self._evaluations = [*read_evaluations(self.run_dir, [])]
        for line in (self._last, *self._evaluations[-1:]):
            self._totals.starts_from(totals_in(line))
        is_sampled = self.config.task.replay is None  # else no engine has generated what is in the journal
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

    def step(self, rooms: Rooms, batch: Batch, report: TrainResponse, *, step_s: float) -> None:
        """One optimizer step is done: its metrics go to metrics.jsonl, TensorBoard and the console."""
        self._totals.starts_from(self._before.get(batch.version, {}))
        metrics = self._step_metrics(rooms, batch, report, step_s) | self._new_evaluation
        self._new_evaluation = {}
        self._last = metrics
        self._num_skipped += int(metrics.get("trainer/skipped_steps", 0))
        self._recorder.record_step(metrics | dict.fromkeys(report.not_finite, math.nan))
        self._console.show_step(metrics)
        self._warn_of(metrics, batch)

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

    def _warn_of(self, metrics: Mapping[str, float], batch: Batch) -> None:
        """What a step shows that goes wrong: told once a run; each skipped step is in the log."""
        gap, logs = metrics.get("policy/logprob_gap_mean", 0.0), self.run_dir / "logs" / "trainer-0.log"
        if gap > GAP_WARNING:
            self._warn_once(
                "gap",
                f"engines and trainer disagree by {gap:.3g} nats on average on the fresh tokens of step "
                f"{metrics['step']:.0f} (policy/logprob_gap_mean, {GAP_WARNING} is much): {logs} says "
                f"what it may be",
            )
        if metrics.get("rollout/given_up"):
            tries = several(self.config.rollout.max_hand_backs + 1, "time")
            self._warn_once(
                "given up",
                f"a prompt failed or became too old {tries} (rollout.max_hand_backs), or can never be "
                "sampled, and is given up; logs/controller.log names it and says why, rollout/given_up "
                "counts them",
            )
        if skipped := skipped_text(metrics):
            groups = ", ".join(str(group.group_id) for group in batch.groups)
            saved = self.run_dir / "failed_batches" / f"step_{batch.version}.safetensors"
            text = (
                f"{skipped}, group{'s' * (len(batch.groups) > 1)} {groups}: loss or gradient was NaN or "
                f"infinite, so the weights stay as they were; {logs} has the values, the batch is saved in "
                f"{saved}; trainer.max_skipped_steps={self.config.trainer.max_skipped_steps} in a row end "
                "the run"
            )
            if "skipped" in self._told:
                logger.warning("%s", text)
            self._warn_once("skipped", text)

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
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
        found, producers, turns = gauges(rooms), rooms.producers, rooms.turns.stats()
        now = {**found, **self._totals.add(totals_of(found))}
        missing = rooms.harnessing.missing_workers() if rooms.harnessing is not None else None
        if missing is not None and not self._is_without_workers:  # once for each time that there is none
            self.warn(missing)
        self._is_without_workers = missing is not None
        down = rooms.engines.stats().down
        optional = {
            "skipped_steps": self._num_skipped,
            "turns": None if turns is None else asdict(turns),
            "evaluation": None if rooms.evaluation is None else asdict(rooms.evaluation.stats()),
            "warnings": self._warnings,
        }
        self._recorder.write_status(
            {
                "state": "running",
                "activity": self._activity,
                "step": rooms.trainer.policy_version,
                "num_steps": self.config.trainer.num_steps,
                "buffer": {
                    name: now[f"buffer/{name}"] for name in ("ready", "running", "look_ahead", "served")
                },
                "rollouts": {
                    "inflight": now["rollout/inflight"],
                    "failed": now["rollout/failed"],
                    "retried": now["rollout/retried"],
                    "given_up_prompts": now["rollout/given_up"],
                    "filtered_groups": now["rollout/filtered"],
                },
                "weight_sync": {"version": now["publish/version"], "skipped": now["weight_sync/skipped"]},
                "engines": {
                    server.name: "down" if server.name in down else f"policy_version {server.policy_version}"
                    for server in rooms.engines.servers
                },
                **{name: value for name, value in optional.items() if value},
                "waits": [wait.as_dict() for wait in waits],
                "oldest_rollouts": [list(entry) for entry in producers.oldest()],
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
            verdict = judge(steps, self.config)
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

    def close_console(self) -> None:
        """Stop repainting; idempotent."""
        self._console.close()

    def _count_on(self) -> None:
        """time_s goes on from the last step: a resumed run's time does not go back, and set-up is no part of
        it.
        """
        self._trained_since_s = time.monotonic() - self._last.get("time_s", 0.0)

    def _step_metrics(
        self, rooms: Rooms, batch: Batch, report: TrainResponse, step_s: float
    ) -> dict[str, float]:
        metrics: dict[str, float] = {
            "step": batch.version,
            "policy_version": report.policy_version,
            "time_s": time.monotonic() - self._trained_since_s,
        }
        metrics |= {**batch_metrics(batch), **report.metrics}
        metrics["perf/step_s"] = step_s
        metrics["perf/tokens_per_s"] = metrics["tokens/trained"] / step_s if step_s > 0 else 0.0
        found = gauges(rooms)
        metrics |= {
            name: value
            for name, value in found.items()
            if not isinstance(value, Mapping)
            and name not in metrics
            and (gauge := gauge_of(name)) is not None
            and gauge.kind in ("step", "now")
        }
        return metrics | self._totals.add(totals_of(found))


EVAL_TOTALS = ("eval/skipped", "eval/abandoned", "eval/abandoned_calls")


def totals_of(found: Mapping[str, float | Mapping[str, float]]) -> dict[str, float | Mapping[str, float]]:
    """Those of the gauges that count over the whole run."""
    return {name: value for name, value in found.items() if name in TOTALS}


def totals_in(line: Mapping[str, Any]) -> dict[str, float]:
    """The totals of the whole run that a line of metrics.jsonl or eval.jsonl holds."""
    return {name: line[name] for name in TOTALS & line.keys() if isinstance(line[name], int | float)}


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
