"""Samples and scores the held-out prompts once, at one version."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

from asyncrl.errors import EngineError, RoomError
from asyncrl.messages.records import GroupId, Prompt, Rollout
from asyncrl.rollouts.rollout import FailedRollout, Generator, RolloutRunner, Slots


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored rollout: `length` in sampled tokens, of all its turns."""

    prompt_id: str
    reward: float
    length: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All scored samples of one evaluation at `version`; `num_failed` others have no reward, the last for
    `last_failure`.

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

    def metrics(self) -> dict[str, float]:
        """By metric name. What needs a sample, or two prompts, is left out where there are none.

        eval/reward_mean, eval/reward_std: over prompts, each the mean of its samples (population standard
        deviation); eval/standard_error: of reward_mean (samples of one prompt are not independent, prompts
        are); eval/length_mean: sampled tokens; eval/truncated_fraction: rollouts that ran into
        rollout.max_tokens; eval/failed: samples without a reward, which are in none of the means.
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
            if len(means) > 1:
                metrics["eval/standard_error"] = stdev(means) / math.sqrt(len(means))
        return metrics


class Evaluator:
    """`samples` rollouts of each prompt, at most `slots` of them sampled at once, without retries.

    Waits: evaluate sleeps in the generator; a rollout takes at most timeout_s (None: no limit).
    Invariant: every token of a result was sampled at its version: any other raises. Seeds depend on prompt
        and sample alone, so that two evaluations differ by the weights and by nothing else.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        slots: int,
        timeout_s: float | None = None,
        broken: list[RoomError] | None = None,
    ) -> None:
        """`broken`: errors of the eval engine that reached a harness and not the generator; while there is
        one, a failed rollout is no data.
        """
        self._runner = RolloutRunner(generator, timeout_s=timeout_s, retries=0)
        self.prompts, self.samples, self.slots = tuple(prompts), samples, slots
        self._broken = [] if broken is None else broken

    async def evaluate(self, version: int) -> EvalResult:
        """All samples, in the order of prompts. Raises RoomError if the engine is gone, or serves another
        version.
        """
        self._broken.clear()
        slots = Slots(self.slots)
        rollouts = []
        for number, prompt in enumerate(self.prompts):
            for index in range(self.samples):
                name = f"eval-v{version}/{prompt.prompt_id}/s{index}"
                order, group_id = (number, index), GroupId(number)
                rollouts.append(
                    self._runner.run(group_id, prompt, index, slots=slots, order=order, name=name)
                )
        outcomes = await asyncio.gather(*rollouts, return_exceptions=True)
        if self._broken:
            raise self._broken[0]
        samples, failures = list[Sample](), list[FailedRollout]()
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome, FailedRollout):
                failures.append(outcome)
            else:
                samples.append(_sample(self.prompts[place // self.samples].prompt_id, outcome, version))
        last_failure = str(failures[-1].failure) if failures else ""
        return EvalResult(version, tuple(samples), len(failures), last_failure)


def _sample(prompt_id: str, rollout: Rollout, version: int) -> Sample:
    versions = sorted({span.version for branch in rollout for span in branch.version_spans})
    if versions != [version]:
        raise EngineError(
            "engine-eval",
            f"a rollout of prompt {prompt_id} has tokens of policy_version {', '.join(map(str, versions))}",
            rule=f"every token of this evaluation is sampled at policy_version {version}",
            way_out="make sure that nothing else pushes weights to the eval engine, then start again.",
        )
    length = sum(branch.num_sampled for branch in rollout)
    return Sample(prompt_id, rollout[0].reward, length, any(branch.is_truncated for branch in rollout))
