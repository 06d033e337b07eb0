"""The evaluations of a run, one after the other on an engine of their own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from asyncrl.engines.engine import EngineClient
from asyncrl.errors import ConnectionShortage, PublishError, RoomError
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.rollouts.evaluator import EvalResult, Evaluator
from asyncrl.waits import TimeLimit, waiting

log = logging.getLogger(__name__)


class Schedule:
    """Which published versions are evaluated: the first one at or after each multiple of `every`, and the
    last version.

    Life: is_due_nowait(v) is asked once for each published version, in order. Versions that a push skipped
        over cost nothing: what comes next stands for them, once.
    """

    def __init__(self, *, every: int, last: int, at_start: bool, evaluated: int | None = None) -> None:
        """`evaluated`: the newest version that was evaluated before the run was resumed."""
        self.every, self.last, self.at_start = every, last, at_start and evaluated is None
        self.is_over = evaluated is not None and evaluated >= last
        """The last version was evaluated."""
        self._next = every if evaluated is None else (evaluated // every + 1) * every

    def is_next(self, version: int) -> bool:
        """Whether this version is due, without any change of state."""
        return not self.is_over and version >= min(self._next, self.last)

    def is_due_nowait(self, version: int) -> bool:
        """Whether `version` is to be evaluated; the next one is due at the following multiple then."""
        is_due = self.is_next(version)
        if is_due:
            self._next = (version // self.every + 1) * self.every
        return is_due


@dataclass(slots=True)
class EvaluationStats:
    """Totals: `skipped` were due while another ran, `abandoned` began and did not end. `version`: the one at
    work, or the last.
    """

    state: Literal["idle", "loading", "sampling", "off"] = "idle"
    version: int = 0
    finished: int = 0
    skipped: int = 0
    abandoned: int = 0


class Evaluation:
    """Evaluates published versions on one eval engine, beside training.

    Life: idle -> a version that is due is published: its weights are kept -> loading (prepare, commit) ->
        sampling -> idle. Off for good once the eval engine is gone: the run goes on without.
    Waits: run sleeps until a version is due, then at most timeout_s from loading to the last reward; the
        run's end sleeps in wait_last. published_nowait and give_up return at once: neither weight sync nor
        trainer ever waits here.
    Invariant: all tokens of one evaluation are of one version: weights are swapped in run alone, between two
        evaluations. A version that is due while one runs is skipped and counted, the last one aside, which
        waits.

    An exported file is kept by a second name (hard link) in `folder`, on the same file system: the trainer
    deletes its own old exports by their names, the bytes stay as long as any name is left.
    """

    name = "evaluation"

    def __init__(
        self,
        evaluator: Evaluator,
        target: EngineClient,
        schedule: Schedule,
        folder: Path,
        *,
        timeout_s: float,
        on_result: Callable[[EvalResult], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._evaluator, self._target, self._schedule, self._folder = evaluator, target, schedule, folder
        self.timeout_s = timeout_s
        self._on_result, self._on_trouble = on_result, on_trouble
        self._pending: ExportResponse | None = None
        self._changed = asyncio.Event()
        self._limit: TimeLimit | None = None
        self._stats = EvaluationStats("loading" if schedule.at_start else "idle")

    def stats(self) -> EvaluationStats:
        return self._stats

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py; those of eval.jsonl come with each result."""
        stats = self._stats
        return {
            "evaluation/version": stats.version,
            "evaluation/ended": stats.finished + stats.skipped + stats.abandoned,
        }

    @property
    def is_off(self) -> bool:
        """The eval engine is gone."""
        return self._stats.state == "off"

    def wants(self, version: int) -> bool:
        """Whether published_nowait would keep this version, without any change of state."""
        return not self.is_off and self._schedule.is_next(version)

    def published_nowait(self, manifest: ExportResponse) -> None:
        """Called while the exported file is the newest one: keep it if this version is due."""
        version, stats = manifest.version, self._stats
        if self.is_off or not self._schedule.is_due_nowait(version):
            return
        if (stats.state != "idle" or self._pending is not None) and version < self._schedule.last:
            stats.skipped += 1
            log.warning("policy_version %d is not evaluated: that of %d still runs", version, stats.version)
            return
        if self._pending is not None:  # due, not begun, and the last one is here
            self._drop_pending()
            stats.skipped += 1
        path = self._folder / f"eval-{version}.safetensors"
        try:
            os.link(manifest.path, path)
        except OSError as error:
            what = f"the weights of policy_version {version} cannot be kept for the eval engine: {error}"
            self.give_up(RoomError(self.name, what, way_out="stage weights where hard links can be made."))
            return
        self._pending = manifest.model_copy(update={"path": str(path)})
        self._wake()

    async def run(self) -> None:
        """Evaluate version after version until cancelled."""
        try:
            if self._schedule.at_start:
                await self._evaluate(0, None)
            while True:
                with waiting("a published version that is due", on="publisher"):
                    while self._pending is None:
                        await self._changed.wait()
                manifest, self._pending = self._pending, None
                try:
                    await self._evaluate(manifest.version, manifest)
                finally:
                    _unlink(manifest)
                if manifest.version >= self._schedule.last:
                    self._schedule.is_over = True
                    self._wake()
        finally:
            self._drop_pending()

    async def wait_last(self) -> None:
        """Return once the last version is evaluated, or its evaluation was given up."""
        with waiting("the evaluation of the last version", on="evaluation"):
            while not self._schedule.is_over and not self.is_off:
                await self._changed.wait()

    def give_up(self, error: RoomError) -> None:
        """The eval engine is gone: no evaluation from here on. Ends the one that runs; idempotent."""
        if self.is_off:
            return
        self._stats.state = "off"
        self._drop_pending()
        if self._limit is not None and not self._limit.expired():
            self._limit.restart(0.0)
        self._on_trouble(f"the run goes on without evaluation: {error}")
        self._wake()

    async def guard(self, watching: Awaitable[None]) -> None:
        """Watch over the eval engine: where `watching` raises RoomError, evaluation ends and the run does
        not.
        """
        try:
            await watching
        except RoomError as error:
            self.give_up(error)

    async def _evaluate(self, version: int, manifest: ExportResponse | None) -> None:
        """One evaluation and what it comes to; `manifest` is None where the engine has those weights from its
        start.
        """
        if self.is_off:
            return
        clock, stats = asyncio.get_running_loop().time, self._stats
        started_s = clock()
        stats.state, stats.version = "loading", version
        self._limit = limit = TimeLimit(self.timeout_s)
        result: EvalResult | None = None
        why = f"did not end within eval.timeout_s={self.timeout_s}; raise it, or lower eval.num_prompts"
        try:
            async with limit:
                if manifest is not None:
                    with waiting(f"policy_version {version} in it", on=self._target.name):
                        await self._load(manifest)
                stats.state = "sampling"
                what = f"the samples of policy_version {version}"
                with waiting(what, on="engine-eval, the reward function"):
                    result = await self._evaluator.evaluate(version)
        except TimeoutError:
            if not limit.expired():
                raise
        except ConnectionShortage as error:  # only this evaluation is lost: the engine may be well
            why = str(error)
        except RoomError as error:  # the one place where a broken part does not end the run
            self._limit = None
            self.give_up(error)
        finally:
            self._limit = None
        if result is not None:
            stats.finished += 1
            seconds, skipped, abandoned = clock() - started_s, stats.skipped, stats.abandoned
            self._on_result(replace(result, seconds=seconds, num_skipped=skipped, num_abandoned=abandoned))
        else:
            stats.abandoned += 1
        if not self.is_off:
            stats.state = "idle"
            if result is None:
                self._on_trouble(f"the evaluation of policy_version {version} is given up: {why}")

    async def _load(self, manifest: ExportResponse) -> None:
        """Both phases of a push, to an engine on which nothing runs."""
        sent = (manifest.version, manifest.digest)
        found = (manifest.version, await self._target.prepare(manifest))
        if found == sent:
            report = await self._target.commit(manifest.version, manifest.digest, "abort")
            found = (report.version, report.digest)
        if found != sent:
            raise PublishError(
                self.name,
                f"{self._target.name} has (policy_version, digest) {found}; the trainer sent {sent}",
                rule="only weights that arrived as they were sent are evaluated",
                way_out=f"read {self._target.name}'s log.",
            )

    def _drop_pending(self) -> None:
        if self._pending is not None:
            _unlink(self._pending)
            self._pending = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _unlink(kept: ExportResponse) -> None:
    Path(kept.path).unlink(missing_ok=True)
