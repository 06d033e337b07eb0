"""Evaluations of a run, on a separate engine or the rollout engines."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar, Literal

from asyncrl.base.errors import ComponentError, PublishError, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.waits import Signal, clock, note_span, waiting, within
from asyncrl.config import EvalConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.records import (
    GroupId,
    Prompt,
    Rollout,
    num_sampled,
    versions_of,
)
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.rollouts.rollout import (
    FailedRollout,
    Generator,
    RolloutAttempt,
    RolloutRunner,
    Slots,
    score_group,
)
from asyncrl.tasks.scorer import Scorers


def add_reported(
    values: Mapping[str, list[float]], rollout: Rollout, parts: str
) -> None:
    """Add a rollout's own metrics as task/NAME, and parts of its reward as PARTS/NAME."""
    for name, value in rollout[0].metrics.items():
        values[f"task/{name}"].append(value)
    for name, value in rollout[0].part_values.items():
        values[f"{parts}/{name}"].append(value)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scored samples at `version`, with their prompt ids; others are set aside, counted
    by kind in `failures`. `num_retried`: attempts that failures of the infrastructure
    repeated.

    `seconds`: from the publish to the last score. `num_skipped`, `num_abandoned`: due
    evaluations that did not begin, or did not end.
    """

    version: int
    samples: Sequence[tuple[str, Rollout]]
    failures: Mapping[FailureKind, int] = field(default_factory=dict)
    num_retried: int = 0
    last_failure: str = ""
    seconds: float = 0.0
    num_skipped: int = 0
    num_abandoned: int = 0
    name: str = ""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def metrics(self) -> dict[str, float]:
        """Return values by metric name. Reward: the mean of the prompts' means; other
        means are over samples. Failed samples are in none.
        """
        metrics: dict[str, float] = {
            "eval/version": self.version,
            "eval/failed": self.num_failed,
            "eval/retried": self.num_retried,
            "eval/seconds": self.seconds,
            "eval/skipped": self.num_skipped,
            "eval/abandoned": self.num_abandoned,
        }
        metrics |= {f"eval/failure/{kind}": num for kind, num in self.failures.items()}
        if self.samples:
            rewards = defaultdict[str, list[float]](list)
            found = defaultdict[str, list[float]](list)
            for prompt_id, rollout in self.samples:
                rewards[prompt_id].append(rollout[0].reward)
                found["length_mean"].append(num_sampled(rollout))
                found["truncated_fraction"].append(
                    any(branch.is_truncated for branch in rollout)
                )
                add_reported(found, rollout, "part")
            # Samples of a prompt are not independent, so the standard error counts
            # prompts: more samples of the same prompts do not make it small.
            means = [fmean(of_prompt) for of_prompt in rewards.values()]
            metrics |= {"eval/reward_mean": fmean(means)}
            metrics |= {f"eval/{name}": fmean(values) for name, values in found.items()}
            if len(means) > 1:
                metrics["eval/standard_error"] = stdev(means) / math.sqrt(len(means))
        return metrics


@dataclass(eq=False, kw_only=True)
class HeldOut:
    """Each prompt is sampled config.samples times, at most config.slots rollouts at
    once. Only failures of the infrastructure are retried, with the same seeds.

    Evaluated versions: the first at or after each multiple of config.every (0 included
    with config.at_start), and the last. `evaluated`: newest version evaluated before a
    resume. `broken`: engine errors that reached a harness; with one, a failed rollout
    is not data.

    Every token was sampled at its version. Seeds depend only on prompt and sample, so
    that two evaluations differ only by weights.
    """

    generator: Generator
    scorers: Scorers
    prompts: Sequence[Prompt]
    config: EvalConfig
    name: str = ""
    last: int = 0
    rollout_timeout_s: float | None = None
    retries: int = 0
    broken: list[ComponentError] = field(default_factory=list)
    evaluated: int | None = None

    def __post_init__(self) -> None:
        self.newest = (
            (-1 if self.config.at_start else 0)
            if self.evaluated is None
            else self.evaluated
        )
        """Version evaluated last, or due."""

    def is_next(self, version: int) -> bool:
        """Return whether `version` is due.

        Example: every 10 with at_start, and the versions 0, 4, 11, 12 and 20 are
        published, since pushes skip versions: 0, 11 and 20 are due.
        """
        every = self.config.every
        is_due = version >= self.last or version // every > self.newest // every
        return is_due and self.newest < self.last

    def is_due_nowait(self, version: int) -> bool:
        """Call once per version, in order."""
        is_due = self.is_next(version)
        if is_due:
            self.newest = version
        return is_due

    async def evaluate(
        self, version: int, on_sampled: Callable[[], None] = lambda: None
    ) -> EvalResult:
        """Return all samples, in prompt order. Raises ComponentError if the engine is
        lost. `on_sampled` is called after each.
        """
        self.broken.clear()
        runner = RolloutRunner(
            self.generator,
            timeout_s=self.rollout_timeout_s,
            retries=self.retries,
            retries_policy=False,
        )
        slots = Slots(self.config.slots)
        attempts = [
            RolloutAttempt(
                f"eval-v{version}/{prompt.prompt_id}/s{index}",
                GroupId(-1 - number),  # below ids of training groups
                prompt,
                index,
            )
            for number, prompt in enumerate(self.prompts)
            for index in range(self.config.samples)
        ]

        async def run(place: int, attempt: RolloutAttempt) -> Rollout | FailedRollout:
            try:
                return await runner.run(attempt, slots=slots, order=(place,))
            finally:
                on_sampled()

        runs = itertools.starmap(run, enumerate(attempts))
        # return_exceptions: all rollouts have ended before an error is raised.
        # Otherwise the others would sample on.
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        # The agent saw an error of the engine, and its rollout failed or got a low
        # reward. Neither measures the policy.
        if self.broken:
            raise self.broken[0]
        ended = list[Rollout | RolloutFailure]()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            ended.append(
                outcome.failure if isinstance(outcome, FailedRollout) else outcome
            )
        size = self.config.samples
        groups = [ended[at : at + size] for at in range(0, len(ended), size)]
        scored = await asyncio.gather(*map(self._score_group, self.prompts, groups))
        samples = list[tuple[str, Rollout]]()
        failures = Counter[FailureKind]()
        last_failure = ""
        for attempt, rollout in zip(attempts, itertools.chain(*scored), strict=True):
            if isinstance(rollout, RolloutFailure):
                failures[rollout.kind] += 1
                last_failure = str(rollout)
                continue
            versions = {*versions_of(rollout)}
            assert versions == {version}, (
                f"an evaluation of policy_version {version} has tokens of {versions}"
            )
            samples.append((attempt.prompt.prompt_id, rollout))
        return EvalResult(
            version, tuple(samples), failures, runner.num_retried, last_failure
        )

    async def _score_group(
        self, prompt: Prompt, outcomes: Sequence[Rollout | RolloutFailure]
    ) -> Sequence[Rollout | RolloutFailure]:
        """Return the prompt's outcomes, after its reward if the task scores whole
        groups.
        """
        rollouts = {
            index: outcome
            for index, outcome in enumerate(outcomes)
            if not isinstance(outcome, RolloutFailure)
        }
        if all(rollout[0].unscored is None for rollout in rollouts.values()):
            return outcomes
        scorer = self.scorers.of(prompt)
        scored = await score_group(scorer, prompt, rollouts, len(outcomes))
        rewarded = {**dict(enumerate(outcomes)), **scored}
        return [*rewarded.values()]


@dataclass(slots=True)
class EvaluationStats:
    state: Literal["idle", "loading", "sampling", "off"] = "idle"
    version: int = 0
    finished: int = 0
    skipped: int = 0
    abandoned: int = 0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DueVersion:
    """`weights`: the kept export; None: the engines serve it."""

    version: int
    weights: ExportResponse | None
    due: Sequence[HeldOut]


@dataclass(eq=False)
class Evaluation:
    """Evaluate published versions, on an eval engine in parallel with training, or on
    the rollout engines.

    Life: idle -> a due version is published -> loading (eval engine) -> sampling ->
    idle. Off once the eval engine is lost or the run stops.

    Waits: run waits for a due version, then at most timeout_s per evaluation. On the
    rollout engines the next push and the trainer wait in wait_released.

    Invariant: all tokens of an evaluation have one version. Versions due during an
    evaluation on an eval engine are skipped, except the last.
    """

    name: ClassVar[str] = "evaluation"

    held_out: Sequence[HeldOut]
    target: EngineClient | None
    """The eval engine; None: the rollout engines."""
    folder: Path
    on_result: Callable[[EvalResult], None]
    on_trouble: Callable[[str], None]
    is_fetched: bool = False
    """Published files are on the eval engine's node."""
    stats: EvaluationStats = field(default_factory=EvaluationStats, init=False)
    _pending: DueVersion | None = field(default=None, init=False)
    _changed: Signal = field(default_factory=Signal, init=False)
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    def gauges(self) -> dict[str, float]:
        stats = self.stats
        return {
            "evaluation/ended": stats.finished + stats.skipped + stats.abandoned,
            "evaluation/held_s": stats.held_s,
        }

    @property
    def is_off(self) -> bool:
        return self.stats.state == "off"

    @property
    def is_over(self) -> bool:
        is_busy = self._pending is not None or self.stats.state in (
            "loading",
            "sampling",
        )
        return not is_busy and all(each.newest >= each.last for each in self.held_out)

    def wants(self, version: int) -> bool:
        is_open = self.target is not None and not self.is_off
        return is_open and any(each.is_next(version) for each in self.held_out)

    def is_last(self, version: int) -> bool:
        return all(version >= each.last for each in self.held_out)

    def on_served_nowait(self, version: int) -> None:
        if due := self._due_nowait(version):
            self._keep(DueVersion(version, None, due))

    def _due_nowait(self, version: int) -> list[HeldOut]:
        return (
            []
            if self.is_off
            else [each for each in self.held_out if each.is_due_nowait(version)]
        )

    def on_published_nowait(self, manifest: ExportResponse) -> None:
        """Keep a due version's weights as a hard link, before the next export deletes
        them.
        """
        version = manifest.version
        due = self._due_nowait(version)
        if not due:
            return
        is_last = version >= due[0].last
        # One version may wait. A version that comes during an evaluation is skipped, so
        # that the delay does not grow. Only the last one is kept, in place of the one
        # that waits.
        if self._pending is not None or (self.stats.state != "idle" and not is_last):
            self.stats.skipped += len(
                self._pending.due if self._pending is not None and is_last else due
            )
            if not is_last:  # it replaces a waiting version
                return
        if not self.is_fetched:
            # A hard link costs no copy and outlives the export. The trainer deletes all
            # but its two newest files v*.safetensors, so the name must not match.
            path = self.folder / f"eval-{version}.safetensors"
            try:
                os.link(manifest.path, path)
            except OSError as error:
                what = f"cannot keep the weights as {path}: {error.strerror}"
                way_out = "choose a disk with hard links for weight_sync.disk_dir."
                self.give_up(ComponentError("evaluation", what, way_out=way_out))
                return
            manifest = manifest.model_copy(update={"path": str(path)})
        self._keep(DueVersion(version, manifest, due))

    async def run(self) -> None:
        try:
            if self.target is not None:  # it starts with the initial weights
                self.on_served_nowait(0)
            while not self.is_over:
                with waiting("a published version that is due", on="publisher"):
                    await self._changed.wait_for(lambda: self._pending is not None)
                pending = self._pending
                assert pending is not None
                # Nothing is awaited before _evaluate sets the state, so wait_released
                # sees the evaluation at every moment.
                self._pending = None
                await self._evaluate(pending)
                self._changed.notify()
        finally:
            # The link keeps a whole export in memory or on the disk.
            self._drop()

    def is_holding(self) -> bool:
        """Return whether it needs the weights of the rollout engines."""
        # An eval engine keeps its weights and delays no push.
        is_due = self._pending is not None or self.stats.state == "sampling"
        return is_due and self.target is None

    async def wait_released(self) -> None:
        if not self.is_holding():
            return
        start_s = clock()
        with waiting("the evaluation of the version that is served", on="evaluation"):
            await self._changed.wait_for(lambda: not self.is_holding())
        self.stats.held_s += clock() - start_s
        note_span(
            "weight sync",
            "held for an evaluation",
            start_s,
            clock(),
            self.stats.version,
        )

    async def wait_last(self) -> None:
        with waiting("the evaluation of the last version", on="evaluation"):
            await self._changed.wait_for(lambda: self.is_over or self.is_off)

    def give_up(self, error: ComponentError) -> None:
        """End evaluation, not the run."""
        if not self.is_off:
            self.stop_nowait()
            self.on_trouble(f"the run continues without evaluation: {error}")

    def stop_nowait(self) -> None:
        # First: _sample reports no late evaluation while the state is off.
        self.stats.state = "off"
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(clock())
        self._drop()

    async def _evaluate(self, pending: DueVersion) -> None:
        start_s = clock()
        self.stats.version = pending.version
        try:
            if pending.weights is not None:
                self.stats.state = "loading"
                await self._load(pending.weights, pending.due[0].config.timeout_s)
            for held_out in pending.due:
                await self._sample(held_out, pending.version, start_s)
                start_s = clock()
        except ComponentError as error:
            # Training needs the rollout engines. An eval engine costs only evaluations.
            if self.target is None:
                raise
            self.give_up(error)
        if not self.is_off:
            self.stats.state = "idle"

    async def _sample(self, held_out: HeldOut, version: int, start_s: float) -> None:
        """Evaluate until the time limit or a stop."""
        if self.is_off:
            return
        stats = self.stats
        stats.state = "sampling"
        engines = "the rollout engines" if self.target is None else self.target.name
        limit = self._limit = asyncio.timeout(held_out.config.timeout_s)
        try:
            with waiting(
                f"the samples of policy_version {version}",
                on=f"{engines}, the reward function",
            ):
                async with limit:
                    result = await held_out.evaluate(version)
        except TimeoutError:
            if not limit.expired():
                raise
            if not self.is_off:
                stats.abandoned += 1
                self.on_trouble(
                    f"evaluation {held_out.name} of policy_version {version} did not end within "
                    f"eval.timeout_s={held_out.config.timeout_s}; raise it, or lower eval.num_prompts"
                )
            return
        finally:
            self._limit = None
        stats.finished += 1
        self.on_result(
            replace(
                result,
                name=held_out.name,
                seconds=clock() - start_s,
                num_skipped=stats.skipped,
                num_abandoned=stats.abandoned,
            )
        )

    async def _load(self, manifest: ExportResponse, timeout_s: float) -> None:
        assert self.target is not None, "only an eval engine loads weights here"
        late = f"{self.target.name} did not load the weights within eval.timeout_s={timeout_s}"
        sent = (manifest.version, manifest.digest)
        try:
            with waiting(
                f"policy_version {manifest.version} in it", on=self.target.name
            ):
                async with within(timeout_s, partial(PublishError, self.name, late)):
                    loaded = (manifest.version, await self.target.prepare(manifest))
                    # As in a push: other bytes than the trainer's are never committed.
                    if loaded == sent:
                        report = await self.target.commit(*sent, "abort")
                        loaded = (report.version, report.digest)
        finally:
            self._unlink(manifest)
        if loaded != sent:
            raise PublishError(
                self.name,
                f"{self.target.name} has (policy_version, digest) {loaded}; the trainer sent {sent}",
                way_out=f"read {self.target.name}'s log.",
            )

    def _keep(self, pending: DueVersion) -> None:
        self._drop()
        self._pending = pending
        self._changed.notify()

    def _drop(self) -> None:
        if self._pending is not None and self._pending.weights is not None:
            self._unlink(self._pending.weights)
        self._pending = None
        self._changed.notify()

    def _unlink(self, kept: ExportResponse) -> None:
        if not self.is_fetched:
            Path(kept.path).unlink(missing_ok=True)
