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
from asyncrl.trainer.loss.step_metrics import GAP_WARNING, NOT_FINITE_ADVICE

MIN_STEPS = 20
"""A shorter run is not said to get worse."""
MIN_STEPS_GAIN = 50
"""A shorter run is not said to learn: an early rise may be luck, or only a format."""
MIN_STEPS_REASONS = 50
"""Reasons for a missing gain are looked for from here on."""
FIRST = 5
"""Steps at the start whose mean later steps are compared with. A shorter run has no
headline.
"""
ALL = 0.95
NEARLY_ALL = 0.9
"""Share of cut answers in the first steps from which the limit is too low. An untrained
model of the quickstart begins at 0.6.
"""
GROWN = 0.2
"""Growth of a share of the answers that is named; batches of the quickstart differ by 0.1."""
MOSTLY_EQUAL = 0.8
"""Share of groups of equal rewards that is named."""
FAILED = 0.05
"""Share of failed attempts from which the verdict names their kinds."""
SIGMAS = 3.0
"""Standard errors from which a change counts."""
ROUNDING = 1e-9
"""Relative difference of means that rounding explains."""
UNMOVED = COLLAPSED = 0.02
"""Relative change of the entropy, and KL, below which the model has hardly moved; rest
of the entropy below which it has collapsed.
"""
MIN_ESS = 0.3
"""Effective sample size that only too large updates leave. In the quickstart it is 0.7 at
the shipped learning rate, and 0.08 at 25 times this rate, which learns nothing.
"""
LARGEST_RATE = 1e-3
"""Larger learning rates are not advised: the quickstart's model of 0.1 million
parameters learns at this one.
"""
HELD = 0.25
"""Force of the KL term, relative to the reward's, that keeps the reward flat. In the
quickstart it is 0.35 for kl_coefficient=1, 9 for 50, and below 0.1 for the shipped 0.1.
"""
UNSCALED = ("dr_grpo", "rloo", "leave_one_out")
"""Advantages in the reward's unit; the others have deviation 1."""
MANY_EPOCHS = 20
"""Passes over the prompts from which a rise may be memory."""


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
    findings = [*_findings(_Evidence(steps, config, run_dir, has_risen))]
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
    size_first = max(1, min(FIRST, num // 2))
    noise = standard_error(rewards, size)
    # Means of equal rewards differ in their last bits.
    rounding = ROUNDING * max(map(abs, rewards))
    # Windows as long as the recent one, each shifted by half its length.
    ends = [*range(size, num, max(1, size // 2)), num]
    best, end = max((fmean(rewards[end - size : end]), end) for end in ends)
    return Reward(
        first=fmean(rewards[:size_first]),
        last=fmean(rewards[-size:]),
        best=best,
        best_step=int(both[end - 1][0]),
        noise=noise,
        margin=rounding
        + SIGMAS * math.hypot(noise, standard_error(rewards, size_first)),
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
    # A change shows in the decimals.
    digits = 6 if reward.margin < abs(reward.last - reward.first) < 0.002 else 3
    first = f"{reward.first:.{digits}f}"
    last = f"{reward.last:.{digits}f} ± {reward.noise:.{digits}f}"
    ends = f"reward {first} at the start, {last} at the end"
    num = len(steps)
    if num < FIRST:
        return f"Too short to judge learning: {FIRST} steps are needed, {num} were trained."
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
        reasons += _reasons(reward, config)
    why = f" Likeliest reasons: {'; '.join(reasons[:2])}." if reasons else ""
    if is_certain or num >= MIN_STEPS:
        if reward.was_lost:
            peak = f"{reward.best:.{digits}f} around step {reward.best_step}"
            return f"Learned and lost it again: reward {first} at the start, {peak}, {last} at the end.{why}"
        if reward.has_fallen:
            return f"Got worse: reward fell from {first} to {last}.{why}"
    result = "Learned nothing" if is_certain else "No clear gain yet"
    return f"{result}: {ends} ({several(num, 'step')}).{why}"


def _reasons(reward: Reward, config: RunConfig) -> Iterator[str]:
    """Likeliest first."""
    if reward.was_lost or reward.has_fallen:
        yield f"trainer.learning_rate={config.trainer.learning_rate:g} may be too large"
    if reward.step_noise:
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


class _Evidence(NamedTuple):
    steps: Steps
    config: RunConfig
    run_dir: Path
    has_risen: bool

    def first(self, name: str) -> float:
        return self.steps.mean(name, slice(FIRST)) or 0.0

    def late(self, name: str) -> float:
        return self.steps.mean(name, recent(len(self.steps))) or 0.0

    def ends(self, name: str) -> tuple[float, float]:
        return self.first(name), self.late(name)

    @property
    def is_constant(self) -> bool:
        """Return whether all answers of the run earned the same."""
        means = self.steps.values("reward/mean")
        # Without the metric nothing is proved, so the default is a spread above 0.
        spreads = self.steps.values("reward/std") or [1.0]
        return max(*spreads, max(means) - min(means)) <= ROUNDING * max(map(abs, means))

    @property
    def has_gradient(self) -> bool:
        part = recent(len(self.steps))
        return any(self.steps.values("policy/grad_norm", part) or [1.0])

    @property
    def samples(self) -> str:
        folder = shlex.quote(str(self.run_dir))
        return f"its samples (asyncrl inspect {folder} --samples)"


def _findings(evidence: _Evidence) -> Iterator[_Finding]:
    """Yield the faults of a run, causes before symptoms."""
    yield from _not_finite(evidence)
    yield from _gap(evidence)
    # Without rewards the model imitates, and reaches a low entropy.
    if evidence.steps.values("reward/mean"):
        broken = [*_broken_by_rate(evidence)] or [*_held_by_kl(evidence)]
        yield from broken or _symptoms(evidence)
    yield from _failures(evidence.steps)


def _symptoms(evidence: _Evidence) -> Iterator[_Finding]:
    """Yield the faults in answers and rewards of a model that is not broken."""
    # Cut answers leave equal rewards.
    yield from _cut_answers(evidence)
    yield from _no_signal(evidence)
    yield from _special_tokens(evidence)
    yield from _repeated_prompts(evidence)


def _not_finite(evidence: _Evidence) -> Iterator[_Finding]:
    updates = evidence.steps.by_step("trainer/skipped_steps")
    skipped = [step for step, num in updates if num > 0]
    if not skipped:
        return
    num = several(evidence.steps.total("trainer/skipped_steps"), "update")
    where = f"first step {skipped[0]:.0f}, last step {skipped[-1]:.0f}"
    algorithm = evidence.config.algorithm
    own = [name for name in (algorithm.loss, algorithm.advantage) if ":" in name]
    advice = f"correct {' and '.join(own)}" if own else NOT_FINITE_ADVICE
    yield _Finding(
        f"{num} skipped because loss or gradient was not finite ({where})",
        f"{advice}; {evidence.run_dir / 'logs/trainer-0.log'} has the values",
        is_certain=len(skipped) == len(evidence.steps),
        is_alarm=True,
    )


def _gap(evidence: _Evidence) -> Iterator[_Finding]:
    gap = evidence.late("policy/logprob_gap_mean")
    if gap > GAP_WARNING:
        yield _Finding(
            f"engines and trainer disagree by {gap:.2g} nats on fresh tokens (limit {GAP_WARNING})",
            "check model.dtype and the engine's version (with float32 rounding goes, a fault stays)",
        )


def _broken_by_rate(evidence: _Evidence) -> Iterator[_Finding]:
    if evidence.has_risen or evidence.is_constant:
        return
    entropies = evidence.steps.values("policy/entropy")
    first, late = evidence.ends("policy/entropy")
    newest = {*entropies[-FIRST:]}
    is_frozen = len(newest) == 1 and late != first and not evidence.has_gradient
    ess = min(evidence.steps.values("policy/ess"), default=1.0)
    is_broken = late < COLLAPSED * first or ess < MIN_ESS
    if is_frozen or (is_broken and len(entropies) >= MIN_STEPS):
        rate = evidence.config.trainer.learning_rate
        yield _Finding(
            f"the model was probably broken by trainer.learning_rate={rate:g} "
            f"(entropy {first:.2g} at first, then {late:.2g}; policy/ess down to {ess:.2g})",
            f"start again with trainer.learning_rate={min(rate / 10, LARGEST_RATE):g}",
            is_certain=is_frozen,
            is_alarm=True,
        )


def _held_by_kl(evidence: _Evidence) -> Iterator[_Finding]:
    """Compare gradients of a token: of the KL term, coefficient * log ratio, where the
    mean square of the log ratio is twice the KL; of the reward, the advantage.
    """
    algorithm = evidence.config.algorithm
    weight = algorithm.kl_coefficient
    kl = evidence.late("policy/kl_reference")
    is_scaled = algorithm.advantage in UNSCALED or algorithm.kl_in == "reward"
    push = (evidence.late("reward/std") if is_scaled else 1.0) or 1.0
    ratio = weight * math.sqrt(2 * max(0.0, kl)) / push
    if evidence.has_risen or len(evidence.steps) < MIN_STEPS or ratio < HELD:
        return
    yield _Finding(
        f"the model is held at its initial weights by algorithm.kl_coefficient={weight:g} (KL {kl:.2g})",
        f"set algorithm.kl_coefficient={weight / (10 * ratio):.1g}",
        is_alarm=True,
    )


def _no_signal(evidence: _Evidence) -> Iterator[_Finding]:
    """Find rewards without differences, and weights that stay."""
    steps = evidence.steps
    equal = evidence.late("reward/equal_fraction")
    first, late = evidence.ends("policy/entropy")
    if evidence.is_constant:
        yield _Finding(
            f"every answer earned {evidence.late('reward/mean'):.3g}, so no answer was better than another",
            f"check the reward function on a right and a wrong answer, and read {evidence.samples}",
            is_certain=True,
            is_alarm=True,
        )
    # A run that has learned its task also ends with equal rewards.
    elif evidence.has_risen:
        return
    elif equal >= MOSTLY_EQUAL:
        yield _Finding(
            f"in {equal:.0%} of the groups all answers earned the same reward",
            "such groups teach nothing; use prompts neither too hard nor too easy",
        )
    elif not evidence.has_gradient:
        yield _Finding(
            "the gradient is 0 in the newest steps although rewards differ",
            "check that the loss has tokens, and depends on the model's logprobs",
            is_certain=True,
            is_alarm=True,
        )
    elif (
        len(steps) >= MIN_STEPS_REASONS
        and abs(late - first) < UNMOVED * first
        and evidence.late("policy/kl_reference") < UNMOVED
    ):
        yield _Finding(
            f"the model hardly moved at trainer.learning_rate={evidence.config.trainer.learning_rate:g} "
            f"(entropy {first:.3g}, then {late:.3g})",
            "raise it tenfold, and again while the entropy stays",
        )


def _cut_answers(evidence: _Evidence) -> Iterator[_Finding]:
    """Find answers that are cut. An untrained model begins so, and learns to end."""
    config = evidence.config
    metric = "sample/truncated_fraction"
    first, late = evidence.ends(metric)
    # Longer answers would earn the same.
    is_pointless = evidence.is_constant and evidence.late("reward/mean") != 0
    if late <= 0.5 or is_pointless:
        return
    if first >= NEARLY_ALL:
        advice = "raise the limit"
    elif late - first < GROWN:
        return
    else:
        advice = "have the reward punish answers that do not end"
        if not evidence.has_risen:
            advice = f"raise the limit, or {advice}"
    limit = f"rollout.max_tokens={config.rollout.max_tokens}"
    if config.trains_agent:
        limit += " of a call, or a limit of the conversation"
    yield _Finding(
        f"{late:.0%} of the answers were cut off at a limit ({limit}), {first:.0%} at first",
        advice,
        # an agent continues after a cut call
        is_alarm=late >= ALL and not config.trains_agent,
    )


def _special_tokens(evidence: _Evidence) -> Iterator[_Finding]:
    metric = "sample/special_fraction"
    first, late = evidence.ends(metric)
    if evidence.has_risen and late - first >= GROWN:
        yield _Finding(
            f"{late:.0%} of the answers contain special tokens such as <|system|>, {first:.0%} at first",
            f"the reward may have a hole; read {evidence.samples}",
        )


def _repeated_prompts(evidence: _Evidence) -> Iterator[_Finding]:
    epochs = evidence.late("sample/epoch")
    if epochs >= MANY_EPOCHS and evidence.has_risen and not evidence.config.evals:
        yield _Finding(
            f"each prompt was trained on {epochs:.0f} times, and no evaluation covers other prompts",
            "evaluate on other prompts (section eval), or add prompts",
        )


def _failures(steps: Steps) -> Iterator[_Finding]:
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
