"""Judge a run from its step metrics, and plot its reward. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from asyncrl.config import RunConfig
from asyncrl.observe import run_numbers as numbers
from asyncrl.observe.run_numbers import Steps, recent, several, time_shares, waiting_share
from asyncrl.observe.timeline import Mark
from asyncrl.trainer.step_metrics import GAP_WARNING

MIN_STEPS = 20
MIN_TRAINING_S = 10.0
"""A shorter run is not judged."""
SIGMAS = 3.0
"""Standard errors from which a change of the reward counts."""
BUSY_WAIT_SHARE = 0.10
BALANCED_WAIT_SHARE = 0.25
"""Shares of waiting: training sets the pace below the first; neither side waits much below the second."""


@dataclass(frozen=True, slots=True)
class Reward:
    """`first`: mean of the first 5 steps (below 10 steps: of the first half); `last`: recent mean
    (run_numbers.recent), with standard error `noise`; `best`: highest such mean, ending at `best_step`;
    `margin`: smaller changes are noise; `step_noise`: standard deviation of a step around the trend.
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
        return self.best - self.first > 2 * self.margin and self.last < (self.best + self.first) / 2

    @property
    def has_risen(self) -> bool:
        return self.last - self.first > self.margin and not self.was_lost

    @property
    def has_fallen(self) -> bool:
        return self.first - self.last > self.margin


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgment of a run, in whole sentences.

    `headline`: did it learn? If not, the likeliest reasons. `health`: problems. `speed`: bottleneck,
    setting to change, losses. `bottleneck`: training, generation, stragglers, publishing, handovers,
    other, balanced or unknown.
    """

    num_steps: int
    wall_s: float
    headline: str
    health: tuple[str, ...]
    speed: tuple[str, ...]
    reward: Reward | None
    shares: Mapping[str, float]
    bottleneck: str


def judge(steps: Steps, config: RunConfig) -> Verdict:
    """The run has at least one step."""
    shares = time_shares(steps.total)
    reward = _reward_of(steps)
    has_risen = reward is not None and reward.has_risen
    findings = [
        *_gradient_findings(steps, config, has_risen),
        *_answer_findings(steps, config, has_risen),
    ]
    bottleneck = _bottleneck(steps, shares)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", steps.total("perf/step_s"))),
        headline=_headline(reward, steps, config, findings),
        health=tuple(map(str, findings)),
        speed=tuple(_speed(steps, config, shares, bottleneck)),
        reward=reward,
        shares=shares,
        bottleneck=bottleneck,
    )


# ---- did it learn?


def _reward_of(steps: Steps) -> Reward | None:
    """Return None if no step has a reward."""
    columns = zip(steps.column("reward/mean"), steps.column("step"), strict=True)
    both = [(value, int(step)) for value, step in columns if value == value]
    if not both:
        return None
    rewards = [value for value, _ in both]
    num = len(rewards)
    size = len(rewards[recent(num)])
    size_first = max(1, min(5, num // 2))
    changes = [(second - first) ** 2 for first, second in pairwise(rewards)]
    step_noise = math.sqrt(fmean(changes) / 2) if changes else 0.0
    ends = [*range(size, num, max(1, size // 2)), num]
    best, end = max((fmean(rewards[end - size : end]), end) for end in ends)
    return Reward(
        first=fmean(rewards[:size_first]),
        last=fmean(rewards[-size:]),
        best=best,
        best_step=both[end - 1][1],
        noise=step_noise / math.sqrt(size),
        margin=SIGMAS * step_noise * math.sqrt(1 / size + 1 / size_first),
        step_noise=step_noise,
    )


def _headline(reward: Reward | None, steps: Steps, config: RunConfig, findings: Sequence[_Finding]) -> str:
    if reward is None:
        return "No step has a reward yet."
    first = f"{reward.first:.3f}"
    last = f"{reward.last:.3f} ± {reward.noise:.3f}"
    ends = f"reward {first} at the start, {last} at the end"
    if len(steps) < MIN_STEPS and not any(finding.is_certain for finding in findings):
        return f"Too short to say whether it learns: {ends} ({several(len(steps), 'step')})."
    if reward.has_risen:
        return f"Learned: reward rose from {first} to {last}."
    reasons = [*(finding.clause for finding in findings), *_reasons(reward, steps, config)]
    why = f" Likeliest reasons: {'; '.join(reasons[:2])}."
    if reward.was_lost:
        peak = f"{reward.best:.3f} around step {reward.best_step}"
        return f"Learned and lost it again: reward {first} at the start, {peak}, {last} at the end.{why}"
    if reward.has_fallen:
        return f"Got worse: reward fell from {first} to {last}.{why}"
    return f"Learned nothing: {ends}.{why}"


def _reasons(reward: Reward, steps: Steps, config: RunConfig) -> Iterator[str]:
    """Likeliest first."""
    learning_rate = f"trainer.learning_rate={config.trainer.learning_rate:g}"
    gradients = steps.values("policy/grad_norm")
    entropies = steps.values("policy/entropy")
    if gradients and not any(gradients):
        yield "no answer stood out: prompts may be too hard or too easy, or the reward is broken"
    elif entropies and abs(entropies[-1] - entropies[0]) < 0.02 * abs(entropies[0]):
        yield f"{learning_rate} hardly moved the model (entropy {entropies[0]:.3g}, then {entropies[-1]:.3g})"
    elif reward.was_lost or reward.has_fallen:
        yield f"{learning_rate} may be too large"
    yield f"a step's reward varies by ± {reward.step_noise:.2g}, which hides smaller gains"
    yield f"{learning_rate} may be too small, or {several(len(steps), 'step')} are too few"


# ---- is it healthy?


class _Finding(NamedTuple):
    """`is_certain`: nothing can be learned while it lasts."""

    clause: str
    advice: str
    is_certain: bool = False

    def __str__(self) -> str:
        return f"{self.clause[0].upper()}{self.clause[1:]}: {self.advice}."


def _gradient_findings(steps: Steps, config: RunConfig, has_risen: bool) -> Iterator[_Finding]:
    """Find steps that cannot move the weights, most serious first."""
    part = recent(len(steps))
    means = steps.values("reward/mean")
    is_constant = not any(steps.values("reward/std") or [1.0]) and len(set(means)) == 1
    equal = steps.mean("reward/equal_fraction", part) or 0.0
    has_gradient = any(steps.values("policy/grad_norm", part) or [1.0])
    entropies = steps.values("policy/entropy")
    last = set(entropies[part])
    if not has_gradient and not has_risen and len(last) == 1 and entropies[0] not in last:
        clause = f"the model is probably destroyed by trainer.learning_rate={config.trainer.learning_rate:g}"
        clause += f" (entropy stays at exactly {entropies[-1]:.3g})"
        yield _Finding(clause, "start again with a lower one", is_certain=True)
    if is_constant:
        clause = f"every answer earned {means[0]:.3g}, so no answer was better than another"
        advice = "read `asyncrl inspect RUN_DIR --samples` and check the reward function on a right answer"
        yield _Finding(clause, advice, is_certain=True)
    elif equal >= 0.8 and not has_risen:
        clause = f"in {equal:.0%} of the groups all answers earned the same reward"
        yield _Finding(clause, "such groups teach nothing; use prompts neither too hard nor too easy")
    if not has_gradient and not is_constant and equal < 1:
        both = zip(steps.column("step"), steps.column("policy/grad_norm"), strict=True)
        moved = [step for step, gradient in both if gradient != 0]
        clause = f"the gradient is 0 since step {max(moved, default=0) + 1:.0f} although rewards differ"
        yield _Finding(clause, "no step since then has changed the weights", is_certain=True)
    both = zip(steps.column("step"), steps.column("trainer/skipped_steps"), strict=True)
    if skipped := [step for step, num in both if num > 0]:
        num = several(steps.total("trainer/skipped_steps"), "update")
        where = f"first step {skipped[0]:.0f}, last step {skipped[-1]:.0f}"
        clause = f"{num} skipped because loss or gradient was not finite ({where})"
        advice = "logs/trainer-0.log has the values; lower trainer.learning_rate"
        yield _Finding(clause, advice, is_certain=len(skipped) == len(steps))


def _answer_findings(steps: Steps, config: RunConfig, has_risen: bool) -> Iterator[_Finding]:
    part = recent(len(steps))

    def mean(name: str) -> float:
        return steps.mean(name, part) or 0.0

    if (truncated := mean("sample/truncated_fraction")) > 0.5:
        limit = f"rollout.max_tokens={config.rollout.max_tokens}"
        clause = f"{truncated:.0%} of the answers were cut off at a limit ({limit})"
        yield _Finding(clause, "raise it, or have the reward punish answers that do not end")
    elif (unfinished := mean("sample/unfinished_fraction")) > 0.5:
        yield _Finding(f"{unfinished:.0%} of the answers do not end", "have the reward punish such answers")
    if (special := mean("sample/special_fraction")) > 0.05:
        clause = f"{special:.0%} of the answers contain special tokens such as <|system|>"
        yield _Finding(clause, "read `asyncrl inspect RUN_DIR --samples`; the reward may have a hole")
    entropies = steps.values("policy/entropy")
    first = fmean(entropies[:5] or [0.0])
    if len(entropies) >= MIN_STEPS and not has_risen and (last := fmean(entropies[part])) < 0.02 * first:
        clause = f"entropy fell from {first:.2g} to {last:.2g}: the model says nearly the same every time"
        yield _Finding(clause, "lower trainer.learning_rate, or raise algorithm.kl_coefficient")
    if (gap := mean("policy/logprob_gap_mean")) > GAP_WARNING:
        clause = f"engines and trainer disagree by {gap:.2g} nats on fresh tokens (limit {GAP_WARNING})"
        yield _Finding(clause, "check model.dtype and the engine's version")


# ---- how fast was it?


def _bottleneck(steps: Steps, shares: Mapping[str, float]) -> str:
    if len(steps) < MIN_STEPS or steps.total("perf/step_s") < MIN_TRAINING_S:
        return "unknown"
    waiting = waiting_share(shares)
    for name in ("other", "handovers"):
        if shares[name] > max(BALANCED_WAIT_SHARE, shares["training"], waiting):
            return name
    if waiting < BALANCED_WAIT_SHARE:
        return "training" if waiting < BUSY_WAIT_SHARE else "balanced"
    return max("generation", "stragglers", "publishing", key=shares.__getitem__)


def _speed(steps: Steps, config: RunConfig, shares: Mapping[str, float], bottleneck: str) -> Iterator[str]:
    if bottleneck == "unknown":
        yield f"Too short to judge speed: {MIN_STEPS} steps and {MIN_TRAINING_S:.0f} s are needed."
    elif bottleneck == "balanced":
        yield "Training and generation kept pace: more speed needs both a faster trainer and more generation."
    else:
        what = "Work between steps" if bottleneck == "other" else bottleneck.capitalize()
        yield f"{what} set the pace: {shares[bottleneck]:.0%} of the time."
        yield _advice(bottleneck, steps, config)
        if bottleneck == "training" and shares["other"] > BALANCED_WAIT_SHARE:
            yield f"Work between steps took {shares['other']:.0%}. {_advice('other', steps, config)}"
    yield from _slow_kernels(steps, config)
    yield from _losses(steps, config)


def _slow_kernels(steps: Steps, config: RunConfig) -> Iterator[str]:
    if steps.values("trainer/compiled")[-1:] == [0.0] and config.trainer.compile == "auto":
        yield "The trainer's layers ran uncompiled, at about half the speed: logs/trainer-0.log says why."
    if steps.values("trainer/flash_attention")[-1:] == [2.0]:
        yield "The trainer ran FlashAttention 2, at 1.1 to 1.6 times 3's time: install flash-attn-3."


def _advice(bottleneck: str, steps: Steps, config: RunConfig) -> str:
    bound = f"buffer.max_staleness (now {config.buffer.max_staleness})"
    if config.buffer.max_staleness == 0 and bottleneck in ("generation", "publishing"):
        return f"Raise {bound}: with 0, trainer and engines wait for each other."
    if bottleneck == "generation":
        return _generation_advice(steps, config)
    larger = f"Raise trainer.num_groups (now {config.trainer.num_groups}): larger batches cost fewer"
    return {
        "stragglers": f"Set buffer.on_overdue=mask, which never waits for a straggler, or raise {bound}.",
        "publishing": f"Raise {bound}: a push takes {steps.mean('perf/weight_sync_s') or 0.0:.2g} s.",
        "training": f"A faster trainer would help (placement.trainer={config.placement.trainer}).",
        "handovers": f"{larger} handovers.",
        "other": f"{larger} pauses for the journal and samples.",
    }[bottleneck]


def _generation_advice(steps: Steps, config: RunConfig) -> str:
    """Rollouts in flight may wait for their agent or reward instead of an engine."""
    engines = steps.mean("engine/up") or config.rollout.max_engines
    slots = engines * config.rollout.slots
    busy = steps.mean("engine/busy_slots")
    held = steps.mean("rollout/inflight") or 0.0
    task = next(iter(config.tasks.values()))
    if busy is None or busy >= 0.5 * slots:
        setting = f"rollout.slots (now {config.rollout.slots}) or rollout.num_engines (now {engines:.3g})"
    elif held <= 2 * busy:
        setting = f"buffer.max_staleness (now {config.buffer.max_staleness})"
    elif config.generator.remote:
        setting = "the number of workers (`asyncrl work`)"
    elif config.generator.is_harness:
        setting = f"generator.workers (now {config.generator.workers})"
    else:
        setting = f"task.reward_workers (now {task.reward_workers}), or set task.reward_pool=thread"
    if busy is None:
        return f"Raise {setting}."
    return f"Raise {setting}: {busy:.0f} of {slots:.0f} slots were busy, {held:.0f} rollouts in flight."


def _losses(steps: Steps, config: RunConfig) -> Iterator[str]:
    choice = config.buffer.on_overdue
    again = steps.newest("rollout/dropped")
    waited_s = steps.total("perf/wait_stragglers_s")
    sampled = steps.total("tokens/sampled")
    masked = 1 - steps.total("tokens/trained") / sampled if sampled else 0.0
    if choice == "wait" and waited_s:
        yield f"buffer.on_overdue={choice} waited {waited_s:.1f} s and dropped nothing."
    elif choice != "wait" and (again or masked > 0):
        losses = f"{masked:.1%} of the tokens were masked, {several(again, 'group')} generated again"
        yield f"Too old (buffer.on_overdue={choice}, max_staleness={config.buffer.max_staleness}): {losses}."
    if filtered := steps.newest("rollout/filtered"):
        tokens = several(steps.newest("rollout/filtered_tokens"), "token")
        yield f"buffer.filter replaced {several(filtered, 'group')} of equal rewards ({tokens})."
    if given_up := steps.newest("rollout/given_up"):
        bound = f"rollout.max_requeues={config.rollout.max_requeues}"
        yield f"{several(given_up, 'prompt')} given up ({bound}); logs/controller.log names them."


# ---- table and plot


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Draw the verdict and the shares of time. Fits 80 columns."""
    pace = f"{verdict.num_steps} in {numbers.duration(verdict.wall_s)}"
    steps = f"{pace}, {verdict.wall_s / verdict.num_steps:.2f} s each"
    time = numbers.shares_text(verdict.shares)
    return numbers.boxed([*verdict_rows(verdict), ("steps", steps), ("time", time)], title)


def verdict_rows(verdict: Verdict) -> list[tuple[str, RenderableType]]:
    health = Text("\n".join(verdict.health) or "nothing unusual", "red" if verdict.health else "green")
    speed = Text("\n".join(verdict.speed))
    return [("learning", Text(verdict.headline, "bold")), ("health", health), ("speed", speed)]


def write_reward_plot(path: Path, steps: Steps, *, title: str, marks: Sequence[Mark] = ()) -> None:
    """Plot reward/mean, its running mean, and a dotted line at each mark."""
    from matplotlib.figure import Figure

    window = -recent(len(steps)).start
    parts = (slice(max(0, end - window), end) for end in range(1, len(steps) + 1))
    means: list[Any] = [steps.mean("reward/mean", part) for part in parts]
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps.column("step"), steps.column("reward/mean"), alpha=0.4, label="each step")
    axes.plot(steps.column("step"), means, label=f"mean of the last {several(window, 'step')}")
    for step, text in marks[-6:]:  # more would hide the curve
        what = text.partition(":")[0]  # our own words: a dollar sign would begin a formula
        axes.axvline(step, color="gray", linestyle=":", label=f"{what} after step {step}")
    axes.set(xlabel="optimizer step", ylabel="reward/mean", title=title)
    axes.legend()
    figure.savefig(path)
