"""Turns what the rooms report into step metrics, status and the end-of-run summary; observe/ shows and writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.buffer.stats import BufferStats
from asyncrl.config import RunConfig
from asyncrl.observe.console import Console
from asyncrl.observe.plot import write_reward_plot
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_numbers import OverdueNumbers
from asyncrl.observe.step_metrics import batch_metrics
from asyncrl.observe.summary import summary_panel
from asyncrl.observe.text import duration
from asyncrl.observe.verdict import judge
from asyncrl.types import Batch, StepReport
from asyncrl.wire import EngineHealth
from asyncrl.wiring import Rooms


class Reporter:
    """All that a run shows and writes of itself. Life: start() -> step() and status() -> finish() and close(), in any order."""

    def __init__(self, config: RunConfig, run_dir: Path, name: str) -> None:
        self.config, self.run_dir, self.name = config, run_dir, name
        self._recorder = Recorder(run_dir, tensorboard=config.observe.tensorboard)
        self._console = Console(
            config.observe.console, run_name=name, num_steps=config.trainer.num_steps, max_staleness=config.buffer.max_staleness
        )
        self._steps: list[Mapping[str, float]] = []
        self._overdue = OverdueNumbers()
        self._opened_s = self._trained_since_s = time.monotonic()
        self._activity = ""

    def start(self) -> None:
        """Begin to show."""
        self._recorder.write_status({"state": "starting"})
        self._console.say(f"{self.name}: {self.config.trainer.num_steps} steps, everything goes to {self.run_dir}")
        self._console.start()

    def tell(self, text: str) -> None:
        """What the run does right now, in words."""
        self._activity = text
        self._console.show_activity(text)

    def training_starts(self) -> None:
        """All processes answer: time_s counts from here, set-up is said beside it."""
        self._trained_since_s = time.monotonic()
        self._console.say(f"ready after {duration(self._trained_since_s - self._opened_s)}; training")
        self.tell("training")

    def step(self, rooms: Rooms, batch: Batch, report: StepReport, *, step_s: float) -> None:
        """One optimizer step is done: its metrics go to metrics.jsonl, TensorBoard and the console."""
        metrics = self._step_metrics(rooms, batch, report, step_s)
        self._overdue = _overdue_numbers(rooms.buffer.stats())
        self._steps.append(metrics)
        self._recorder.record_step(metrics)
        self._console.show_step(metrics)

    def status(self, rooms: Rooms) -> None:
        """Replace status.json, for `asyncrl status` from another terminal."""
        producers, buffer, publisher = rooms.producers.stats(), rooms.buffer.stats(), rooms.publisher.stats()
        self._recorder.write_status(
            {
                "state": "running",
                "activity": self._activity,
                "step": rooms.trainer.policy_version,
                "num_steps": self.config.trainer.num_steps,
                "buffer": {"ready": buffer.ready, "running": buffer.running, "look_ahead": buffer.look_ahead, "served": buffer.served},
                "rollouts": {"inflight": producers.inflight, "failed": producers.failed, "retried": producers.retried},
                "publisher": {"version": publisher.version, "skipped": publisher.skipped},
                "oldest_rollouts": [list(entry) for entry in producers.oldest],
                "last_failure": producers.last_failure,
            }
        )

    def finish(self, state: str, why: str = "") -> None:
        """Say how the run ended: verdict, plot and summary.json, as far as there are steps to speak of."""
        self.close_console()
        self._recorder.write_status({"state": state, "step": len(self._steps), "num_steps": self.config.trainer.num_steps, "why": why})
        summary: dict[str, Any] = {"state": state, "why": why}
        if self._steps:
            verdict = judge(self._steps, self.config, self._overdue)
            summary |= verdict.as_dict()
            plot = write_reward_plot(self.run_dir, self._steps, title=self.name)
            self._console.show(summary_panel(verdict, title=f"{self.name}: {state}"))
            self._console.say(f"reward plot: {plot}")
            if (final := self.run_dir / "final").is_dir():
                self._console.say(f"weights: {final}")
            elif state == "interrupted":
                self._console.say(f"the weights could not be saved; {self.run_dir / 'logs' / 'controller.log'} says why")
        elif state == "interrupted":
            self._console.say(f"{why} before the first step; there is nothing to save")
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self._recorder.close()

    def close_console(self) -> None:
        """Stop repainting; idempotent."""
        self._console.close()

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
            "buffer/ready": buffer.ready,
            "buffer/running": buffer.running,
            "buffer/look_ahead": buffer.look_ahead,
            "rollout/inflight": producers.inflight,
            "rollout/failed": producers.failed,
            "rollout/retried": producers.retried,
            "rollout/interrupted": engines.interrupted,
            "rollout/dropped": producers.dropped,
        }
        return metrics


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
