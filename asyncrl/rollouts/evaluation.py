"""The evaluations of a run, one after the other, on an engine of their own or on the rollout engines: when,
with which weights, and the results.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Literal

from asyncrl.engines.engine import EngineClient
from asyncrl.errors import EngineError, PublishError, RoomError
from asyncrl.messages.calls import ExportResponse
from asyncrl.messages.records import GroupId, Prompt, Rollout
from asyncrl.rollouts.rollout import FailedRollout, Generator, RolloutRunner, Slots
from asyncrl.spans import note_span
from asyncrl.waits import waiting


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored rollout: `length` in sampled tokens, of all its turns; `metrics` as task and harness say."""

    prompt_id: str
    reward: float
    length: int
    is_truncated: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All scored samples of one evaluation at `version`; `num_failed` others have no reward, the last for
    `last_failure`. `name`: of the evaluation, '' of the only one.

    `seconds` from the time the version was published until all was scored. `num_skipped` and `num_abandoned`:
    evaluations so far that were due and did not begin, or did not end. `num_abandoned_calls`: of the eval
    task's reward function, so far, that did not end when they were cancelled.
    """

    version: int
    samples: Sequence[Sample]
    num_failed: int = 0
    last_failure: str = ""
    seconds: float = 0.0
    num_skipped: int = 0
    num_abandoned: int = 0
    num_abandoned_calls: int = 0
    name: str = ""

    def metrics(self) -> dict[str, float]:
        """By metric name. What needs a sample, or two prompts, is left out where there are none.

        eval/reward_mean, eval/reward_std: over prompts, each the mean of its samples (population standard
        deviation); eval/standard_error: of reward_mean (samples of one prompt are not independent, prompts
        are); eval/length_mean: sampled tokens; eval/truncated_fraction: rollouts that ran into
        rollout.max_tokens; eval/task/NAME: over the samples that have it; eval/failed: samples without a
        reward, which are in none of the means.
        """
        metrics: dict[str, float] = {
            "eval/version": self.version,
            "eval/failed": self.num_failed,
            "eval/seconds": self.seconds,
            "eval/skipped": self.num_skipped,
            "eval/abandoned": self.num_abandoned,
            "eval/abandoned_calls": self.num_abandoned_calls,
        }
        if self.samples:
            rewards: defaultdict[str, list[float]] = defaultdict(list)
            for sample in self.samples:
                rewards[sample.prompt_id].append(sample.reward)
            means = [fmean(found) for found in rewards.values()]
            metrics |= {
                "eval/reward_mean": fmean(means),
                "eval/reward_std": pstdev(means),
                "eval/length_mean": fmean(sample.length for sample in self.samples),
                "eval/truncated_fraction": fmean(sample.is_truncated for sample in self.samples),
            }
            for name in dict.fromkeys(name for sample in self.samples for name in sample.metrics):
                reported = (sample.metrics[name] for sample in self.samples if name in sample.metrics)
                metrics[f"eval/task/{name}"] = fmean(reported)
            if len(means) > 1:
                metrics["eval/standard_error"] = stdev(means) / math.sqrt(len(means))
        return metrics


@dataclass(frozen=True, slots=True)
class Evaluator:
    """`samples` rollouts of each prompt, at most `slots` of them sampled at once, without retries.

    `broken`: errors of the engine that reached a harness and not the generator; while there is one, a failed
    rollout is no data.

    Waits: evaluate sleeps in the generator; a rollout takes at most timeout_s (None: no limit).
    Invariant: every token of a result was sampled at its version: any other raises. Seeds depend on prompt
        and sample alone, so that two evaluations differ by the weights and by nothing else.
    """

    generator: Generator
    prompts: Sequence[Prompt]
    samples: int
    slots: int
    timeout_s: float | None = None
    broken: list[RoomError] = field(default_factory=list)

    async def evaluate(self, version: int) -> EvalResult:
        """All samples, in the order of prompts. Raises RoomError if the engine is gone, or serves another
        version.
        """
        self.broken.clear()
        runner, slots = RolloutRunner(self.generator, timeout_s=self.timeout_s, retries=0), Slots(self.slots)
        places = [(number, index) for number in range(len(self.prompts)) for index in range(self.samples)]

        async def run(number: int, index: int) -> Rollout | FailedRollout:
            group_id, prompt = GroupId(-1 - number), self.prompts[number]  # below those of training
            name = f"eval-v{version}/{prompt.prompt_id}/s{index}"
            return await runner.run(group_id, prompt, index, slots=slots, order=(number, index), name=name)

        outcomes = await asyncio.gather(*(run(*place) for place in places), return_exceptions=True)
        if self.broken:
            raise self.broken[0]
        samples, failures = list[Sample](), list[FailedRollout]()
        for (number, _), outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome, FailedRollout):
                failures.append(outcome)
            else:
                samples.append(_sample(self.prompts[number].prompt_id, outcome, version))
        last_failure = str(failures[-1].failure) if failures else ""
        return EvalResult(version, tuple(samples), len(failures), last_failure)


def _sample(prompt_id: str, rollout: Rollout, version: int) -> Sample:
    versions = sorted({span.version for branch in rollout for span in branch.version_spans})
    if versions != [version]:
        what = f"a rollout of prompt {prompt_id} has tokens of policy_version {', '.join(map(str, versions))}"
        rule = f"every token of this evaluation is sampled at policy_version {version}"
        way_out = "make sure that nothing else pushes weights to the engines, then start again."
        raise EngineError("evaluation", what, rule=rule, way_out=way_out)
    length = sum(branch.num_sampled for branch in rollout)
    is_truncated = any(branch.is_truncated for branch in rollout)
    return Sample(prompt_id, rollout[0].reward, length, is_truncated, rollout[0].metrics)


class Schedule:
    """Which versions are evaluated: the first one at or after each multiple of `every`, and the last version.
    `at_start`: 0 is such a multiple.

    Life: is_due_nowait(v) is asked once for each version, in order: for 0 where the engine starts with it,
        then for each published version. A version stands for those that a push skipped, once.
    """

    def __init__(self, *, every: int, last: int, at_start: bool, evaluated: int | None = None) -> None:
        """`evaluated`: the newest version that was evaluated before the run was resumed."""
        self.every, self.last = every, last
        self.is_over = evaluated is not None and evaluated >= last
        """The last version was evaluated."""
        before = -1 if at_start else 0
        self._next = ((before if evaluated is None else evaluated) // every + 1) * every

    def is_next(self, version: int) -> bool:
        """Whether this version is due, without any change of state."""
        return not self.is_over and version >= min(self._next, self.last)

    def is_due_nowait(self, version: int) -> bool:
        """Whether `version` is to be evaluated; the next one is due at the following multiple then."""
        if is_due := self.is_next(version):
            self._next = (version // self.every + 1) * self.every
        return is_due


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One of the evaluations of a run; `name` '' is the only one."""

    name: str
    evaluator: Evaluator
    schedule: Schedule
    timeout_s: float


@dataclass(slots=True)
class EvaluationStats:
    """Totals: `skipped` were due while another ran, `abandoned` began and did not end. `version`: the one at
    work, or the last. `held_s`: seconds in which a push or the trainer's turn waited for an evaluation.
    """

    state: Literal["idle", "loading", "sampling", "off"] = "idle"
    version: int = 0
    finished: int = 0
    skipped: int = 0
    abandoned: int = 0
    held_s: float = 0.0


class Evaluation:
    """Evaluates published versions, on an eval engine in parallel with training, or on the rollout engines.

    Life: idle -> a version that is due is published -> with an eval engine: loading (prepare, commit) of its
        weights, which were kept -> sampling, for what is due at it, one after the other -> idle. Off for good
        once the eval engine is gone (the run continues without), or once the run is stopped.
    Waits: run sleeps until a version is due, then at most timeout_s of each from loading to the last reward;
        the run's end sleeps in wait_last. On the rollout engines the next push and the trainer's turn sleep
        in wait_released. All else returns at once: with an eval engine neither weight sync nor trainer waits.
    Invariant: all tokens of one evaluation are of one version. An eval engine gets weights in run only,
        between two evaluations; a version that is due while one runs is skipped and counted, except the last
        one, which waits. The rollout engines get none until wait_released returns, so nothing is skipped.

    An exported file is kept by a second name (hard link) in `folder`, on the same file system: the trainer
    deletes its own old exports by their names, the bytes stay as long as any name is left.
    """

    name = "evaluation"

    def __init__(
        self,
        held_out: Sequence[HeldOut],
        target: EngineClient | None,
        folder: Path,
        *,
        on_result: Callable[[EvalResult], None],
        on_trouble: Callable[[str], None],
        is_fetched: bool = False,
    ) -> None:
        """`held_out`: in their order. `target`: the eval engine; None: the rollout engines sample.

        `is_fetched`: published files are on the eval engine's node, kept there by its launcher.
        """
        self._held_out, self._target, self._folder = held_out, target, folder
        self._is_fetched = is_fetched
        self._on_result, self._on_trouble = on_result, on_trouble
        self._pending: tuple[int, ExportResponse | None, Sequence[HeldOut]] | None = None
        """A version, its weights if they are kept (None: the engines have them), and what is due at it."""
        self._changed = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        self._stats = EvaluationStats()

    def stats(self) -> EvaluationStats:
        return self._stats

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py; those of eval.jsonl come with each result."""
        stats = self._stats
        num_ended = stats.finished + stats.skipped + stats.abandoned
        return {
            "evaluation/version": stats.version,
            "evaluation/ended": num_ended,
            "evaluation/held_s": stats.held_s,
        }

    @property
    def is_off(self) -> bool:
        """The eval engine is gone, or the run is stopped."""
        return self._stats.state == "off"

    @property
    def is_over(self) -> bool:
        """The last version was evaluated."""
        return all(one.schedule.is_over for one in self._held_out)

    def wants(self, version: int) -> bool:
        """Whether published_nowait would keep this version's weights, without any change of state."""
        is_open = self._target is not None and not self.is_off
        return is_open and any(one.schedule.is_next(version) for one in self._held_out)

    def served_nowait(self, version: int) -> None:
        """The engines that sample serve this version: evaluate it if it is due."""
        if due := self._due_nowait(version):
            self._keep(version, None, due)

    def _due_nowait(self, version: int) -> list[HeldOut]:
        return [] if self.is_off else [one for one in self._held_out if one.schedule.is_due_nowait(version)]

    def published_nowait(self, manifest: ExportResponse) -> None:
        """With an eval engine, called while the exported file is the newest one: keep it if this version is
        due.
        """
        version, stats = manifest.version, self._stats
        due = self._due_nowait(version)
        if not due:
            return
        is_last = version >= due[0].schedule.last
        if self._pending is not None or (stats.state != "idle" and not is_last):
            stats.skipped += len(self._pending[2] if self._pending is not None and is_last else due)
            if not is_last:  # else it takes the place of the one that waits
                return
        if self._is_fetched:
            self._keep(version, manifest, due)
            return
        path = self._folder / f"eval-{version}.safetensors"
        try:
            os.link(manifest.path, path)
        except OSError as error:
            what = f"the weights of policy_version {version} cannot be kept for the eval engine: {error}"
            self.give_up(RoomError(self.name, what, way_out="stage weights where hard links can be made."))
            return
        self._keep(version, manifest.model_copy(update={"path": str(path)}), due)

    async def run(self) -> None:
        """Evaluate version after version, until the last one or cancelled."""
        try:
            if self._target is not None:  # it starts with the initial weights
                self.served_nowait(0)
            while not self.is_over:
                with waiting("a published version that is due", on="publisher"):
                    while self._pending is None:
                        await self._changed.wait()
                (version, manifest, due), self._pending = self._pending, None
                await self._evaluate(version, manifest, due)
                for one in due:
                    one.schedule.is_over = version >= one.schedule.last
                self._wake()
        finally:
            self._drop()

    async def wait_released(self) -> None:
        """Return once no evaluation needs the version that the rollout engines serve."""
        clock, stats = asyncio.get_running_loop().time, self._stats
        if self._target is not None or (self._pending is None and stats.state != "sampling"):
            return
        start_s = clock()
        with waiting("the evaluation of the version that is served", on="evaluation"):
            while self._pending is not None or stats.state == "sampling":
                await self._changed.wait()
        stats.held_s += clock() - start_s
        note_span("weight sync", "held for an evaluation", start_s, clock(), stats.version)

    async def wait_last(self) -> None:
        """Return once the last version is evaluated, or its evaluation was given up."""
        with waiting("the evaluation of the last version", on="evaluation"):
            while not self.is_over and not self.is_off:
                await self._changed.wait()

    def give_up(self, error: RoomError) -> None:
        """The eval engine is gone: no evaluation from here on. Ends the one that runs; idempotent."""
        if not self.is_off:
            self.stop_nowait()
            self._on_trouble(f"the run goes on without evaluation: {error}")

    def stop_nowait(self) -> None:
        """Start no evaluation any more, and end the one that runs, without a result. Idempotent."""
        self._stats.state = "off"
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
        self._drop()

    async def guard(self, watching: Awaitable[None]) -> None:
        """Watch over the eval engine: where `watching` raises RoomError, evaluation ends and the run does
        not.
        """
        try:
            await watching
        except RoomError as error:
            self.give_up(error)

    async def _evaluate(self, version: int, manifest: ExportResponse | None, due: Sequence[HeldOut]) -> None:
        """What is due at these weights; `manifest` is None where the engines have them."""
        stats, is_loaded = self._stats, manifest is None
        for number, one in enumerate(due):
            if self.is_off:
                return
            stats.state, stats.version = "sampling" if is_loaded else "loading", version
            is_loaded = await self._evaluate_one(one, version, None if is_loaded else manifest)
            if not is_loaded:  # and the file is gone
                stats.abandoned += len(due) - number - 1
                break
        if not self.is_off:
            stats.state = "idle"

    async def _evaluate_one(self, one: HeldOut, version: int, manifest: ExportResponse | None) -> bool:
        """Whether the engine has the weights at its end."""
        clock, stats = asyncio.get_running_loop().time, self._stats
        started_s, is_loaded = clock(), manifest is None
        self._limit = limit = asyncio.timeout(one.timeout_s)
        result: EvalResult | None = None
        why = f"did not end within eval.timeout_s={one.timeout_s}; raise it, or lower eval.num_prompts"
        try:
            async with limit:
                if manifest is not None:
                    await self._load(manifest)
                stats.state, is_loaded = "sampling", True
                engines = "the rollout engines" if self._target is None else "engine-eval"
                samples = f"the samples of policy_version {version}"
                with waiting(samples, on=f"{engines}, the reward function"):
                    result = await one.evaluator.evaluate(version)
        except TimeoutError:
            if not limit.expired():
                raise
        except RoomError as error:
            if self._target is None:
                raise
            self._limit = None
            self.give_up(error)  # the one place where a broken part does not end the run
        finally:
            self._limit = None
        if result is not None:
            stats.finished += 1
            result = replace(result, name=one.name, seconds=clock() - started_s)
            self._on_result(replace(result, num_skipped=stats.skipped, num_abandoned=stats.abandoned))
        else:
            stats.abandoned += 1
            if not self.is_off:
                what = f"the evaluation{one.name and f' {one.name}'} of policy_version {version}"
                self._on_trouble(f"{what} is given up: {why}")
        return is_loaded

    async def _load(self, manifest: ExportResponse) -> None:
        """Both phases of a push, to an eval engine on which nothing runs."""
        assert self._target is not None, "only an eval engine loads weights here"
        sent = (manifest.version, manifest.digest)
        try:
            with waiting(f"policy_version {manifest.version} in it", on=self._target.name):
                found = (manifest.version, await self._target.prepare(manifest))
                if found == sent:
                    report = await self._target.commit(*sent, "abort")
                    found = (report.version, report.digest)
        finally:
            self._unlink(manifest)
        if found != sent:
            what = f"{self._target.name} has (policy_version, digest) {found}; the trainer sent {sent}"
            raise PublishError(self.name, what, way_out=f"read {self._target.name}'s log.")

    def _keep(self, version: int, manifest: ExportResponse | None, due: Sequence[HeldOut]) -> None:
        """Have `run` evaluate this version, in place of one that waits."""
        self._drop()
        self._pending = version, manifest, due
        self._wake()

    def _drop(self) -> None:
        """Evaluate nothing of what waits."""
        if self._pending is not None and self._pending[1] is not None:
            self._unlink(self._pending[1])
        self._pending = None
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _unlink(self, kept: ExportResponse) -> None:
        if not self._is_fetched:
            Path(kept.path).unlink(missing_ok=True)
