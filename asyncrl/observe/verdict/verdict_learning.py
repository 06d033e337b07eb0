"""Judge from step metrics whether a run learns and is healthy. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import Steps, recent, several
from asyncrl.trainer.step_report import GAP_WARNING

Trend = Literal["rising", "flat", "falling", "unknown"]

MIN_STEPS = 20
"""A run with fewer steps is too short to judge its trend or its speed."""
_SIGMAS = 3.0
"""A change of the reward counts from this many standard errors on."""
_SMALL_CHANGE = 0.05
"""A change at the end of the run below this part of the reward's range is flat."""
_MANY, _MOST, _SPECIAL = 0.8, 0.5, 0.05
"""Fractions from which a finding is reported: of equal groups; of answers; of answers with special tokens."""
_COLLAPSED, _UNMOVED = 0.02, 0.02
"""Last entropy over the first, and its relative change, below which it has collapsed or has not moved."""
_FEW_STEPS = 100


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a run. `first`: mean of the first 5 steps (below 10 steps: of the first half); `last`:
    mean of the recent steps; `best`: the highest mean of the same number of steps, which ends at `best_step`;
    `noise`: standard error of `last`; `margin`: changes from `first` to `last` below it are noise;
    `step_noise`: standard deviation of one step around the trend.
    """

    first: float
    last: float
    best: float
    best_step: int
    noise: float
    margin: float
    step_noise: float
    trend: Trend

    @property
    def has_risen(self) -> bool:
        """Return whether the reward rose by more than its noise, and stayed there."""
        return self.last - self.first > self.margin and not self.was_lost

    @property
    def was_lost(self) -> bool:
        """Return whether the reward had risen, and more than half of the rise is gone."""
        return self.best - self.first > 2 * self.margin and self.last < (self.best + self.first) / 2


def reward_of(steps: Steps) -> Reward | None:
    """Measure the reward at the start and at the end with its noise; None if no step has a reward."""
    columns = zip(steps.column("reward/mean"), steps.column("step"), strict=True)
    both = [(value, int(step)) for value, step in columns if value == value]
    if not both:
        return None
    rewards = [value for value, _ in both]
    num, size = len(rewards), len(rewards[recent(len(rewards))])
    changes = [(second - first) ** 2 for first, second in pairwise(rewards)]
    step_noise = math.sqrt(fmean(changes) / 2) if changes else 0.0
    ends = [*range(size, num, max(1, size // 2)), num]
    size_first = max(1, min(5, num // 2))
    best, end = max((fmean(rewards[end - size : end]), end) for end in ends)
    return Reward(
        first=fmean(rewards[:size_first]),
        last=fmean(rewards[-size:]),
        best=best,
        best_step=both[end - 1][1],
        noise=step_noise / math.sqrt(size),
        margin=_SIGMAS * step_noise * math.sqrt(1 / size + 1 / size_first),
        step_noise=step_noise,
        trend=_trend(rewards, step_noise),
    )


def _trend(rewards: list[float], step_noise: float) -> Trend:
    """Compare the last quarter of the run with the quarter before it."""
    size = len(rewards) // 4
    if len(rewards) < MIN_STEPS:
        return "unknown"
    change = fmean(rewards[-size:]) - fmean(rewards[-2 * size : -size])
    small = _SMALL_CHANGE * (max(rewards) - min(rewards))
    if abs(change) <= max(small, _SIGMAS * step_noise * math.sqrt(2 / size)):
        return "flat"
    return "rising" if change > 0 else "falling"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong in a run: a clause with its numbers, and what to do about it. `is_certain`: nothing can
    be learned as long as it lasts.
    """

    clause: str
    advice: str
    is_certain: bool = False

    def __str__(self) -> str:
        return f"{self.clause[0].upper()}{self.clause[1:]}: {self.advice}."


def findings(steps: Steps, config: RunConfig) -> list[Finding]:
    """List the faults of the run, most serious first, mostly from its recent steps."""
    found = [*_gradient(steps, config), *_answers(steps, config)]
    gap = steps.mean("policy/logprob_gap_mean", recent(len(steps))) or 0.0
    if gap > GAP_WARNING:
        clause = f"engines and trainer disagree by {gap:.2g} nats on fresh tokens ({GAP_WARNING} is much)"
        found.append(Finding(clause, "check model.dtype and the engine's version"))
    return found


def _gradient(steps: Steps, config: RunConfig) -> Iterator[Finding]:
    """Find steps that cannot move the weights."""
    part, learning_rate = recent(len(steps)), config.trainer.learning_rate
    means, stds = steps.values("reward/mean"), steps.values("reward/std")
    is_constant = bool(stds) and max(stds) == 0 and len(set(means)) == 1
    equal = steps.mean("reward/equal_fraction", part) or 0.0
    reward = reward_of(steps)
    has_risen = reward is not None and reward.has_risen
    entropies, gradients = steps.values("policy/entropy"), steps.values("policy/grad_norm", part)
    has_gradient = not gradients or max(gradients) > 0
    last = set(entropies[part])
    if not has_gradient and not has_risen and len(last) == 1 and entropies[0] not in last:
        clause = f"the model is probably destroyed by trainer.learning_rate={learning_rate:g}"
        clause += f" (entropy stays at exactly {entropies[-1]:.3g})"
        yield Finding(clause, "start again with a lower one", is_certain=True)
    if is_constant:
        clause = f"every answer earned {means[0]:.3g}, so no answer was better than another"
        advice = "read `asyncrl inspect RUN_DIR --samples` and check the reward function on a right answer"
        yield Finding(clause, advice, is_certain=True)
    elif equal >= _MANY and not has_risen:
        clause = f"in {equal:.0%} of the groups all answers earned the same reward"
        yield Finding(clause, "such groups teach nothing; use prompts that are neither too hard nor too easy")
    if not has_gradient and not is_constant and equal < 1:
        clause = f"the gradient is 0 since step {_first_without_gradient(steps)} although rewards differ"
        yield Finding(clause, "no step since then has changed the weights", is_certain=True)
    both = zip(steps.column("step"), steps.column("trainer/skipped_steps"), strict=True)
    if skipped := [int(step) for step, num in both if num > 0]:
        num = several(steps.total("trainer/skipped_steps"), "update")
        clause = f"{num} skipped because loss or gradient was not finite (step {skipped[0]}"
        clause += f" to {skipped[-1]})" if len(skipped) > 1 else ")"
        advice = "logs/trainer-0.log has the values, failed_batches/ the batches; lower trainer.learning_rate"
        yield Finding(clause, advice, is_certain=len(skipped) == len(steps))


def _first_without_gradient(steps: Steps) -> int:
    """Return the step from which on the gradient stays 0."""
    first = 0
    for step, gradient in zip(steps.column("step"), steps.column("policy/grad_norm"), strict=True):
        first = (first or int(step)) if gradient == 0 else 0
    return first


def _answers(steps: Steps, config: RunConfig) -> Iterator[Finding]:
    """Find answers that are cut off, contain special tokens or are all the same."""
    part = recent(len(steps))
    if (truncated := steps.mean("sample/truncated_fraction", part) or 0.0) > _MOST:
        limit = f"rollout.max_tokens={config.rollout.max_tokens}"
        clause = f"{truncated:.0%} of the answers were cut off at a limit ({limit})"
        yield Finding(clause, "raise it, or have the reward punish answers that do not end")
    elif (unfinished := steps.mean("sample/unfinished_fraction", part) or 0.0) > _MOST:
        yield Finding(f"{unfinished:.0%} of the answers do not end", "have the reward punish such answers")
    if (special := steps.mean("sample/special_fraction", part) or 0.0) > _SPECIAL:
        clause = f"{special:.0%} of the answers contain special tokens such as <|system|>"
        yield Finding(clause, "read `asyncrl inspect RUN_DIR --samples`; the reward may have a hole")
    entropies = steps.values("policy/entropy")
    reward = reward_of(steps)
    if len(entropies) >= MIN_STEPS and not (reward and reward.has_risen):
        first, last = fmean(entropies[:5]), fmean(entropies[part])
        if last < _COLLAPSED * first:
            clause = f"entropy fell from {first:.2g} to {last:.2g}: the model says nearly the same every time"
            yield Finding(clause, "lower trainer.learning_rate, or raise algorithm.kl_coefficient")


def headline_of(reward: Reward | None, steps: Steps, config: RunConfig, found: list[Finding]) -> str:
    """Say whether the run learned; if not, with the two likeliest reasons."""
    if reward is None:
        return "No step has a reward yet."
    first, last = f"{reward.first:.3f}", f"{reward.last:.3f} ± {reward.noise:.3f}"
    ends = f"reward {first} at the start, {last} at the end"
    if len(steps) < MIN_STEPS and not any(finding.is_certain for finding in found):
        return f"Too short to say whether it learns: {ends} ({several(len(steps), 'step')})."
    if reward.has_risen:
        words = {"rising": " and is still rising", "flat": " and is flat now", "falling": ", but falls again"}
        return f"Learned: reward rose from {first} to {last}{words.get(reward.trend, '')}."
    why = "; ".join(islice(_reasons(reward, steps, config, found), 2))
    why = f" Likeliest reasons: {why}."
    if reward.was_lost:
        peak = f"{reward.best:.3f} around step {reward.best_step}"
        return f"Learned and lost it again: reward {first} at the start, {peak}, {last} at the end.{why}"
    if reward.first - reward.last > reward.margin:
        return f"Got worse: reward fell from {first} to {last}.{why}"
    return f"Learned nothing: {ends}.{why}"


def _reasons(reward: Reward, steps: Steps, config: RunConfig, found: list[Finding]) -> Iterator[str]:
    """List reasons why the reward did not rise, likeliest first; two at least."""
    yield from (finding.clause for finding in found)
    if steps.total("policy/grad_norm") == 0 and steps.values("policy/grad_norm"):
        num = len(steps) * config.trainer.num_groups * config.rollout.group_size
        yield f"none of {num} answers stood out: prompts may be too hard or too easy, or the reward is broken"
        yield "the gradient was 0 in every step, so the weights never changed"
        return
    learning_rate = f"trainer.learning_rate={config.trainer.learning_rate:g}"
    entropies = steps.values("policy/entropy")
    if entropies and abs(entropies[-1] - entropies[0]) < _UNMOVED * abs(entropies[0]):
        yield f"{learning_rate} hardly moved the model (entropy {entropies[0]:.3g}, then {entropies[-1]:.3g})"
    elif reward.was_lost or reward.first - reward.last > reward.margin:
        yield f"{learning_rate} may be too large"
    if len(steps) < _FEW_STEPS:
        yield f"{several(len(steps), 'step')} are few"
    yield (
        f"a step's reward varies by ± {reward.step_noise:.2g}, which hides smaller gains "
        f"(trainer.num_groups={config.trainer.num_groups})"
    )
    yield f"{learning_rate} may be too small or too large"


def learning_of(reward: Reward | None, steps: Steps) -> Iterator[str]:
    """Say how the answers changed from start to end."""
    lengths = steps.values("sample/length_mean")
    entropies = steps.values("policy/entropy")
    if reward is None or len(steps) < MIN_STEPS or not lengths or not entropies:
        return
    changes = [("entropy", entropies, ".2g"), ("tokens a rollout", lengths, ".3g")]
    part = recent(len(steps))
    words = (f"{name} {fmean(row[:5]):{form}} to {fmean(row[part]):{form}}" for name, row, form in changes)
    yield f"From start to end: {', '.join(words)}."
    if reward.has_risen and (equal := steps.mean("reward/equal_fraction", part) or 0.0) >= _MANY:
        yield f"In {equal:.0%} of the groups all answers now earn the same: other prompts would teach more."
