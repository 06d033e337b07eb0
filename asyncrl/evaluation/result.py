"""What one evaluation comes to: means over prompts, with their standard error. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion, or rollout of an agent: `length` in sampled tokens, of all its turns."""

    prompt_id: str
    reward: float
    length: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All scored samples of one evaluation at `version`; `num_failed` others have no reward, the last for `last_failure`.

    `seconds` from the time the version was published until all was scored. `num_skipped` and `num_abandoned`: evaluations
    so far that were due and did not begin, or did not end. `num_abandoned_calls`: of the eval task's reward function, so far,
    that did not end when they were cancelled.
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

        eval/reward_mean, eval/reward_std   over prompts, each the mean of its samples (population standard deviation)
        eval/standard_error                 of reward_mean: samples of one prompt are not independent, prompts are
        eval/length_mean                    sampled tokens of a completion
        eval/truncated_fraction             completions that ran into rollout.max_tokens
        eval/failed                         samples without a reward; they are in none of the means
        eval/version, eval/seconds, eval/skipped, eval/abandoned, eval/abandoned_calls
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
            means = self._prompt_means()
            metrics |= {
                "eval/reward_mean": fmean(means),
                "eval/reward_std": pstdev(means),
                "eval/length_mean": fmean(sample.length for sample in self.samples),
                "eval/truncated_fraction": fmean(sample.is_truncated for sample in self.samples),
            }
            if len(means) > 1:
                metrics["eval/standard_error"] = stdev(means) / math.sqrt(len(means))
        return metrics

    def _prompt_means(self) -> list[float]:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for sample in self.samples:
            rewards[sample.prompt_id].append(sample.reward)
        return [fmean(found) for found in rewards.values()]
