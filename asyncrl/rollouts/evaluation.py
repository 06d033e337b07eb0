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


class Schedule:
    """Which published versions are evaluated: the first one at or after each multiple of `every`, and the
    last version.

    Life:   is_due_nowait(v) is asked once for each published version, in order. Versions that a push skipped
            over cost nothing: what comes next stands for them, once.
    """

    def __init__(self, *, every: int, last: int, at_start: bool, evaluated: int | None = None) -> None:
        """`evaluated`: the newest version that was evaluated before the run was resumed."""
        self.every, self.last, self.at_start = every, last, at_start and evaluated is None
        self.is_over = evaluated is not None and evaluated >= last
        """The last version was evaluated before."""
        self._next = every if evaluated is None else (evaluated // every + 1) * every

    def is_due_nowait(self, version: int) -> bool:
        """Whether `version` is to be evaluated; the next one is due at the following multiple then."""
        if not self.is_next(version):
            return False
        self._next = (version // self.every + 1) * self.every
        return True

    def is_next(self, version: int) -> bool:
        """What is_due_nowait would say of this version; nothing changes."""
        return not self.is_over and version >= min(self._next, self.last)


class FileHold:
    """Keeps an exported weights file while the eval engine has still to read it: by a second name (hard
    link) under `folder`, on the same file system.

    The trainer deletes its own old exports by their names; the bytes stay as long as any name is left. No
    byte is copied, so that keeping takes no time; shared memory holds one export more while a file is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, manifest: ExportResponse) -> ExportResponse:
        """The same weights under a name of ours. Raises RoomError if the file is gone, or cannot be
        linked.
        """
        path = self._folder / f"eval-{manifest.version}.safetensors"
        try:
            os.link(manifest.path, path)
        except OSError as error:
            raise RoomError(
                "evaluation",
                f"the weights of policy_version {manifest.version} cannot be kept for the eval "
                f"engine: {error}",
                rule="the staging folder is on a file system with hard links",
                way_out="use /dev/shm, or a POSIX file system as TMPDIR.",
            ) from error
        return manifest.model_copy(update={"path": str(path)})

    def release(self, manifest: ExportResponse) -> None:
        """Give up what keep() returned; idempotent."""
        Path(manifest.path).unlink(missing_ok=True)


log = logging.getLogger(__name__)
State = Literal["idle", "loading", "sampling", "off"]


@dataclass(slots=True)
class EvaluationStats:
    """Totals: `skipped` were due while another ran, `abandoned` began and did not end. `version`: the one at
    work, or the last.
    """

    state: State = "idle"
    version: int = 0
    finished: int = 0
    skipped: int = 0
    abandoned: int = 0


class Evaluation:
    """Evaluates published versions on one eval engine, beside training.

    Life:       idle -> a version that is due is published: its weights are kept -> loading (prepare, commit)
                -> sampling -> idle. Off for good once the eval engine is gone: the run goes on without.
    Waits:      run sleeps until a version is due, then at most timeout_s from loading to the last reward; the
                run's end sleeps in wait_last. published_nowait and give_up return at once: neither weight
                sync nor trainer ever waits here.
    Invariant:  all tokens of one evaluation are of one version: weights are swapped in run alone, between two
                evaluations. A version that is due while one runs is skipped and counted, the last one aside,
                which waits.
    """

    name = "evaluation"

    def __init__(
        self,
        evaluator: Evaluator,
        target: EngineClient,
        schedule: Schedule,
        hold: FileHold,
        *,
        timeout_s: float,
        on_result: Callable[[EvalResult], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._evaluator, self._target, self._schedule, self._hold = evaluator, target, schedule, hold
        self.timeout_s = timeout_s
        self._on_result, self._on_trouble = on_result, on_trouble
        self._pending: ExportResponse | None = None
        self._is_busy = schedule.at_start
        self._has_ended = schedule.is_over
        self._changed = asyncio.Event()
        self._limit: TimeLimit | None = None
        self._lost: RoomError | None = None
        self._stats = EvaluationStats()

    def stats(self) -> EvaluationStats:
        """Totals so far."""
        return self._stats

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py; those of eval.jsonl come with each result."""
        stats = self._stats
        return {
            "evaluation/version": stats.version,
            "evaluation/ended": stats.finished + stats.skipped + stats.abandoned,
        }

    def wants(self, version: int) -> bool:
        """Whether published_nowait would have a use for this version; nothing changes."""
        return self._lost is None and self._schedule.is_next(version)

    def published_nowait(self, manifest: ExportResponse) -> None:
        """Called while the exported file is the newest one: keep it if this version is due."""
        if self._lost is not None or not self._schedule.is_due_nowait(manifest.version):
            return
        is_last = manifest.version >= self._schedule.last
        if (self._is_busy or self._pending is not None) and not is_last:
            self._stats.skipped += 1
            log.warning(
                "policy_version %d is not evaluated: the evaluation of %d still runs",
                manifest.version,
                self._stats.version,
            )
            return
        if self._pending is not None:  # due, not begun, and the last one is here
            self._drop_pending()
            self._stats.skipped += 1
        try:
            self._pending = self._hold.keep(manifest)
        except RoomError as error:
            self.give_up(error)
            return
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
                self._is_busy = True
                try:
                    await self._evaluate(manifest.version, manifest)
                finally:
                    self._hold.release(manifest)
                if manifest.version >= self._schedule.last:
                    self._has_ended = True
                    self._wake()
        finally:
            self._drop_pending()

    async def wait_last(self) -> None:
        """Return once the last version is evaluated, or its evaluation was given up."""
        with waiting("the evaluation of the last version", on="evaluation"):
            while not self._has_ended and self._lost is None:
                await self._changed.wait()

    def give_up(self, error: RoomError) -> None:
        """The eval engine is gone: no evaluation from here on. Ends the one that runs; idempotent."""
        if self._lost is not None:
            return
        self._lost = error
        self._stats.state = "off"
        self._drop_pending()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
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
        if self._lost is not None:
            return
        clock = asyncio.get_running_loop().time
        started_s = clock()
        self._stats.state, self._stats.version = "loading", version
        self._limit = TimeLimit(self.timeout_s)
        result: EvalResult | None = None
        why = f"did not end within eval.timeout_s={self.timeout_s} and is given up; raise it, or lower "
        why += "eval.num_prompts"
        try:
            async with self._limit:
                if manifest is not None:
                    with waiting(f"policy_version {version} in it", on=self._target.name):
                        await self._load(manifest)
                self._stats.state = "sampling"
                what = f"the samples of policy_version {version}"
                with waiting(what, on="engine-eval, the reward function"):
                    result = await self._evaluator.evaluate(version)
        except TimeoutError:
            if not self._limit.expired():
                raise
        except ConnectionShortage as error:  # for this once: the engine may be well
            why = f"is given up: {error}"
        except RoomError as error:  # the one place where a broken part does not end the run
            self._limit = None
            self.give_up(error)
        finally:
            self._limit, self._is_busy = None, False
        if result is None:
            self._stats.abandoned += 1
            if self._lost is None:
                self._stats.state = "idle"
                self._on_trouble(f"the evaluation of policy_version {version} {why}")
            return
        self._stats.finished += 1
        stats = self._stats
        seconds = clock() - started_s
        self._on_result(
            replace(result, seconds=seconds, num_skipped=stats.skipped, num_abandoned=stats.abandoned)
        )
        if self._lost is None:
            self._stats.state = "idle"

    async def _load(self, manifest: ExportResponse) -> None:
        """Both phases of a push, to an engine on which nothing runs."""
        loaded = await self._target.prepare(manifest)
        report = (
            await self._target.commit(manifest.version, loaded, "abort")
            if loaded == manifest.digest
            else None
        )
        if report is None or (report.version, report.digest) != (manifest.version, manifest.digest):
            serves = (
                f"loaded digest {loaded}"
                if report is None
                else f"serves policy_version {report.version}, digest {report.digest}"
            )
            raise PublishError(
                self.name,
                f"{self._target.name} {serves}; the trainer sent policy_version "
                f"{manifest.version}, digest {manifest.digest}",
                rule="only weights that arrived as they were sent are evaluated",
                way_out=f"read {self._target.name}'s log.",
            )

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._hold.release(self._pending)
            self._pending = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
