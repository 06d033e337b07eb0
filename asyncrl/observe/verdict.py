"""Judge a run from its step metrics, and plot its reward. Imports no torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from asyncrl.base.failures import WAYS_OUT, FailureKind
from asyncrl.config import RunConfig
from asyncrl.observe import run_numbers as numbers
from asyncrl.observe.pace import Pace
from asyncrl.observe.run_numbers import (
    Steps,
    recent,
    several,
    standard_error,
    time_shares,
)
from asyncrl.observe.timeline import Mark
from asyncrl.trainer.step_metrics import GAP_WARNING, NOT_FINITE_ADVICE

MIN_STEPS = 20
"""A shorter run is not said to get worse."""
MIN_STEPS_GAIN = 50
"""A shorter run is not said to learn: an early rise may be luck, or only a format."""
MIN_STEPS_REASONS = 50
"""Reasons for a missing gain are looked for from here on."""
ALL = 0.95
FAILED = 0.05
"""Share of failed attempts from which the verdict names their kinds."""
SIGMAS = 3.0
"""Standard errors from which a change of the reward counts."""


@dataclass(frozen=True, slots=True)
class Reward:
    """`first`: mean of the first 5 steps (below 10 steps: of the first half); `last`:
    recent mean (run_numbers.recent), with standard error `noise`; `best`: highest such
    mean, ending at `best_step`; `margin`: smaller changes are noise; `step_noise`:
    standard deviation of a step around the trend.
    """

    first: float
    last: float
    best: float
    best_step: int
    noise: float
    margin: float
    step_noise: float

    @property
    def was_lost(self) -> bool:
        """True if more than half of a rise is gone."""
        return (
            # `best` is the largest of many means, so noise lifts it even without a
            # rise; hence twice the margin.
            self.best - self.first > 2 * self.margin
            and self.last < (self.best + self.first) / 2
        )

    @property
    def has_risen(self) -> bool:
        return self.last - self.first > self.margin and not self.was_lost

    @property
    def has_fallen(self) -> bool:
        return self.first - self.last > self.margin


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgment of a run, in whole sentences.

    `headline`: did it learn? If not, the likeliest reasons. `health`: problems.
    `speed`: bottleneck, losses, and in a healthy run the setting to change.
    `bottleneck`: training, generation, rewards, stragglers, publishing, handovers,
    other or unknown.
    """

    num_steps: int
    wall_s: float
    headline: str
    health: tuple[str, ...]
    speed: tuple[str, ...]
    reward: Reward | None
    shares: Mapping[str, float]
    bottleneck: str

    @property
    def pace(self) -> str:
        """Format as `in 3.0 s, 1.00 s each`."""
        step_s = self.wall_s / self.num_steps
        return f"in {numbers.duration(self.wall_s)}, {step_s:.2f} s each"


def judge(
    steps: Steps, config: RunConfig, run_dir: Path, *, has_failed: bool = False
) -> Verdict:
    """The run has at least one step."""
    pace = Pace(steps, config, time_shares(steps.total))
    reward = _reward_of(steps)
    has_risen = reward is not None and reward.has_risen
    findings = [
        *_gradient_findings(steps, config, run_dir, has_risen),
        *_answer_findings(steps, config, run_dir, has_risen),
        *_failure_findings(steps),
    ]
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", steps.total("perf/step_s"))),
        headline=_headline(reward, steps, config, findings),
        health=tuple(map(str, findings)),
        speed=tuple(
            pace.sentences(
                # Next to a health alarm a slow part is a symptom (docs/decisions/0030).
                has_cures=not has_failed and not any(one.is_alarm for one in findings)
            )
        ),
        reward=reward,
        shares=pace.shares,
        bottleneck=pace.bottleneck,
    )


# ---- did it learn?


def _reward_of(steps: Steps) -> Reward | None:
    """Return None if no step has a reward."""
    both = [pair for pair in steps.by_step("reward/mean") if pair[1] == pair[1]]
    if not both:
        return None
    rewards = [value for _, value in both]
    num = len(rewards)
    size = len(rewards[recent(num)])
    size_first = max(1, min(5, num // 2))
    noise = standard_error(rewards, size)
    # Windows as long as the recent one, each shifted by half its length.
    ends = [*range(size, num, max(1, size // 2)), num]
    best, end = max((fmean(rewards[end - size : end]), end) for end in ends)
    return Reward(
        first=fmean(rewards[:size_first]),
        last=fmean(rewards[-size:]),
        best=best,
        best_step=int(both[end - 1][0]),
        noise=noise,
        margin=SIGMAS * math.hypot(noise, standard_error(rewards, size_first)),
        step_noise=standard_error(rewards, 1),
    )


def _headline(
    reward: Reward | None, steps: Steps, config: RunConfig, findings: Sequence[_Finding]
) -> str:
    if reward is None:
        losses = steps.values("policy/loss")
        if not losses:
            return "No step has a reward yet."
        return f"The loss went from {losses[0]:.4f} to {fmean(losses[recent(len(losses))]):.4f}."
    first = f"{reward.first:.3f}"
    last = f"{reward.last:.3f} ± {reward.noise:.3f}"
    ends = f"reward {first} at the start, {last} at the end"
    num = len(steps)
    if reward.has_risen:
        rise = f"reward rose from {first} to {last}"
        if num >= MIN_STEPS_GAIN:
            return f"Learned: {rise}."
        few = f"in fewer than {MIN_STEPS_GAIN} steps ({num})"
        return f"No clear gain yet: {rise}, but {few}."
    is_certain = any(finding.is_certain for finding in findings)
    reasons = [finding.clause for finding in findings]
    # These reasons are guesses that fit any run. A short run gets no guess, unless
    # something certain is wrong.
    if is_certain or num >= MIN_STEPS_REASONS:
        reasons += _reasons(reward, steps, config)
    why = f" Likeliest reasons: {'; '.join(reasons[:2])}." if reasons else ""
    if is_certain or num >= MIN_STEPS:
        if reward.was_lost:
            peak = f"{reward.best:.3f} around step {reward.best_step}"
            return f"Learned and lost it again: reward {first} at the start, {peak}, {last} at the end.{why}"
        if reward.has_fallen:
            return f"Got worse: reward fell from {first} to {last}.{why}"
    result = "Learned nothing" if is_certain else "No clear gain yet"
    return f"{result}: {ends} ({several(num, 'step')}).{why}"


def _reasons(reward: Reward, steps: Steps, config: RunConfig) -> Iterator[str]:
    """Likeliest first."""
    learning_rate = f"trainer.learning_rate={config.trainer.learning_rate:g}"
    entropies = steps.values("policy/entropy")
    if entropies and abs(entropies[-1] - entropies[0]) < 0.02 * abs(entropies[0]):
        yield f"{learning_rate} hardly moved the model (entropy {entropies[0]:.3g}, then {entropies[-1]:.3g})"
    elif reward.was_lost or reward.has_fallen:
        yield f"{learning_rate} may be too large"
    yield f"a step's reward varies by ± {reward.step_noise:.2g}, which hides smaller gains"


# ---- is it healthy?


class _Finding(NamedTuple):
    """`is_certain`: nothing can be learned while it lasts. `is_alarm`: advice on speed
    would be premature.
    """

    clause: str
    advice: str
    is_certain: bool = False
    is_alarm: bool = False

    def __str__(self) -> str:
        return f"{self.clause[0].upper()}{self.clause[1:]}: {self.advice}."


def _gradient_findings(
    steps: Steps, config: RunConfig, run_dir: Path, has_risen: bool
) -> Iterator[_Finding]:
    """Find steps that cannot move the weights, most serious first."""
    part = recent(len(steps))
    means = steps.values("reward/mean")
    # Without the metric nothing is proved, so the default is a spread above 0.
    is_constant = not any(steps.values("reward/std") or [1.0]) and len(set(means)) == 1
    equal = steps.mean("reward/equal_fraction", part) or 0.0
    has_gradient = any(steps.values("policy/grad_norm", part) or [1.0])
    entropies = steps.values("policy/entropy")
    last = set(entropies[part])
    if (
        not has_gradient
        and not has_risen
        and len(last) == 1
        and entropies[0] not in last
    ):
        clause = f"the model is probably destroyed by trainer.learning_rate={config.trainer.learning_rate:g}"
        clause += f" (entropy stays at exactly {entropies[-1]:.3g})"
        yield _Finding(
            clause, "start again with a lower one", is_certain=True, is_alarm=True
        )
    if is_constant:
        yield _Finding(
            f"every answer earned {means[0]:.3g}, so no answer was better than another",
            f"check the reward function on a right answer, and read {_samples_of(run_dir)}",
            is_certain=True,
            is_alarm=True,
        )
    # A run that has learned its task also ends with equal rewards.
    elif equal >= 0.8 and not has_risen:
        yield _Finding(
            f"in {equal:.0%} of the groups all answers earned the same reward",
            "such groups teach nothing; use prompts neither too hard nor too easy",
        )
    if not has_gradient and not is_constant and equal < 1:
        gradients = steps.by_step("policy/grad_norm")
        # NaN, of a step without a gradient, is not above 0
        moved = [step for step, gradient in gradients if abs(gradient) > 0]
        yield _Finding(
            f"the gradient is 0 since step {max(moved, default=0) + 1:.0f} although rewards differ",
            "no step since then has changed the weights",
            is_certain=True,
            is_alarm=True,
        )
    updates = steps.by_step("trainer/skipped_steps")
    if skipped := [step for step, num in updates if num > 0]:
        num = several(steps.total("trainer/skipped_steps"), "update")
        where = f"first step {skipped[0]:.0f}, last step {skipped[-1]:.0f}"
        yield _Finding(
            f"{num} skipped because loss or gradient was not finite ({where})",
            f"{NOT_FINITE_ADVICE}; {run_dir / 'logs/trainer-0.log'} has the values",
            is_certain=len(skipped) == len(steps),
            is_alarm=True,
        )


def _samples_of(run_dir: Path) -> str:
    return f"its samples (asyncrl inspect {shlex.quote(str(run_dir))} --samples)"


def _answer_findings(
    steps: Steps, config: RunConfig, run_dir: Path, has_risen: bool
) -> Iterator[_Finding]:
    part = recent(len(steps))

    def mean(name: str) -> float:
        return steps.mean(name, part) or 0.0

    if (truncated := mean("sample/truncated_fraction")) > 0.5:
        limit = f"rollout.max_tokens={config.rollout.max_tokens}"
        if config.trains_agent:
            limit += " of a call, or a limit of the conversation"
        # an agent continues after a cut call
        is_alarm = truncated >= ALL and not config.trains_agent
        yield _Finding(
            f"{truncated:.0%} of the answers were cut off at a limit ({limit})",
            "raise the limit, or have the reward punish answers that do not end",
            is_alarm=is_alarm,
        )
    elif (unfinished := mean("sample/unfinished_fraction")) > 0.5:
        yield _Finding(
            f"{unfinished:.0%} of the answers do not end",
            "have the reward punish such answers",
        )
    if (special := mean("sample/special_fraction")) > 0.05:
        yield _Finding(
            f"{special:.0%} of the answers contain special tokens such as <|system|>",
            f"the reward may have a hole; read {_samples_of(run_dir)}",
        )
    entropies = steps.values("policy/entropy")
    first = fmean(entropies[:5] or [0.0])
    # Without rewards the model imitates, and a low entropy is what it should reach.
    has_rewards = bool(steps.values("reward/mean"))
    if (
        has_rewards
        and len(entropies) >= MIN_STEPS
        and not has_risen
        and (last := fmean(entropies[part])) < 0.02 * first
    ):
        yield _Finding(
            f"entropy fell from {first:.2g} to {last:.2g}: the model says nearly the same every time",
            "lower trainer.learning_rate, or raise algorithm.kl_coefficient",
        )
    if (gap := mean("policy/logprob_gap_mean")) > GAP_WARNING:
        yield _Finding(
            f"engines and trainer disagree by {gap:.2g} nats on fresh tokens (limit {GAP_WARNING})",
            "check model.dtype and the engine's version",
        )


def _failure_findings(steps: Steps) -> Iterator[_Finding]:
    part = recent(len(steps))
    shares = {kind: steps.mean(f"failure/{kind}", part) or 0.0 for kind in FailureKind}
    if sum(shares.values()) < FAILED:
        return
    largest = sorted(shares, key=shares.__getitem__, reverse=True)
    named = [f"{kind} {shares[kind]:.0%}" for kind in largest if shares[kind] >= 0.01]
    total = f"{sum(shares.values()):.0%} of the attempts of rollouts failed"
    yield _Finding(
        f"{total} ({', '.join(named)})", WAYS_OUT[largest[0]].removesuffix(".")
    )


# ---- table and plot


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Draw the verdict and the shares of time. Fits 80 columns."""
    rows = [
        *verdict_rows(verdict),
        ("steps", f"{verdict.num_steps} {verdict.pace}"),
        ("time", numbers.shares_text(verdict.shares)),
    ]
    return numbers.boxed(rows, title)


def verdict_rows(verdict: Verdict) -> list[tuple[str, RenderableType]]:
    health = Text(
        "\n".join(verdict.health) or "nothing unusual",
        "red" if verdict.health else "green",
    )
    speed = Text("\n".join(verdict.speed))
    return [
        ("learning", Text(verdict.headline, "bold")),
        ("health", health),
        ("speed", speed),
    ]


def write_reward_plot(
    path: Path, steps: Steps, *, title: str, marks: Sequence[Mark] = ()
) -> None:
    """Plot reward/mean, its running mean, and a dotted line at each mark."""
    from matplotlib.figure import Figure

    window = -recent(len(steps)).start
    parts = (slice(max(0, end - window), end) for end in range(1, len(steps) + 1))
    means: list[Any] = [steps.mean("reward/mean", part) for part in parts]
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(
        steps.column("step"), steps.column("reward/mean"), alpha=0.4, label="each step"
    )
    axes.plot(
        steps.column("step"), means, label=f"mean of the last {several(window, 'step')}"
    )
    for step, text in marks[-6:]:  # more would hide the curve
        # our own words: a dollar sign would begin a formula
        what = text.partition(":")[0]
        axes.axvline(step, color="gray", linestyle=":", label=f"step {step}: {what}")
    axes.set(xlabel="optimizer step", ylabel="reward/mean", title=title)
    axes.legend()
    figure.savefig(path)
