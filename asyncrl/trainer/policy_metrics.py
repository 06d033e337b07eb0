"""Numbers of a step: how far engines and trainer are apart on tokens that both have from the same weights,
engine by engine; distances between policies; the learning rate. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.config import TrainerConfig

Float32M = npt.NDArray[np.float32]
Int16M = npt.NDArray[np.int16]

GAP_WARNING = 0.05
"""Nats of mean logprob gap on fresh tokens from which the log warns."""
MIN_ENGINE_TOKENS = 64
"""Fresh tokens of one engine from which its own mean is judged: of fewer, one unlikely token can be most of
it.
"""
GAP_ADVICE = (
    "check that engine and trainer use the same model.dtype, temperature and weights, and read the log of an "
    "engine that is off alone; weight_sync.interrupt=keep_kv raises the gap"
)


@dataclass(frozen=True, slots=True)
class Gap:
    """|current - behaviour| in nats over `num_tokens` >= 1 fresh tokens of engine number `engine`; None: of
    all together.
    """

    engine: int | None
    num_tokens: int
    mean: float
    max: float

    def __str__(self) -> str:
        who = "all engines" if self.engine is None else f"engine-{self.engine}"
        return f"{who} by {self.mean:.4g} nats on {self.num_tokens} fresh tokens"


def measure_gaps(current_M: Float32M, behaviour_M: Float32M, engine_M: Int16M) -> list[Gap]:
    """That of all M fresh tokens, then of each engine that sampled some (-1: not known, and in the first
    alone); [] if M is 0.
    """
    if len(current_M) == 0:
        return []
    gap_M = np.abs(current_M.astype(np.float64) - behaviour_M.astype(np.float64))
    parts: list[tuple[int | None, npt.NDArray[np.bool_]]] = [(None, np.ones(len(gap_M), np.bool_))]
    parts += [(int(engine), engine_M == engine) for engine in np.unique(engine_M) if engine >= 0]
    return [
        Gap(engine, int(of.sum()), float(gap_M[of].mean()), float(gap_M[of].max())) for engine, of in parts
    ]


def gap_metrics(gaps: Sequence[Gap]) -> dict[str, float]:
    """policy/logprob_gap_max and _mean, and both /engine-K."""
    metrics: dict[str, float] = {}
    for gap in gaps:
        suffix = "" if gap.engine is None else f"/engine-{gap.engine}"
        metrics |= {f"policy/logprob_gap_max{suffix}": gap.max, f"policy/logprob_gap_mean{suffix}": gap.mean}
    return metrics


def gap_fault(gaps: Sequence[Gap], limit: float) -> str:
    """Whose mean is above `limit`, the largest first; '' if none is. NaN is above nothing."""
    above = [
        gap
        for gap in gaps
        if gap.mean > limit and (gap.engine is None or gap.num_tokens >= MIN_ENGINE_TOKENS)
    ]
    above.sort(key=lambda gap: (-gap.mean, gap.engine is None))
    return f"engines and trainer disagree: {', '.join(map(str, above[:4]))}" if above else ""


def policy_metrics(current_M: Float32M, behaviour_M: Float32M, entropy_M: Float32M) -> dict[str, float]:
    """Entropy, distance and effective sample size of M >= 1 loss tokens, before the update; logprobs and
    entropy in nats.

    kl_behaviour estimates KL(behaviour || current) by the mean of w - 1 - log w, w = exp(current -
    behaviour), which is unbiased and never negative (http://joschu.net/blog/kl-approx.html). ess is the
    effective sample size of the weights w as a fraction of M, (sum w)^2 / (M sum w^2): 1 on-policy.
    """
    log_weight_M = current_M.astype(np.float64) - behaviour_M.astype(np.float64)
    weight_M: npt.NDArray[np.float64] = np.exp(log_weight_M)
    return {
        "policy/entropy": float(entropy_M.mean(dtype=np.float64)),
        "policy/kl_behaviour": float((weight_M - 1.0 - log_weight_M).mean()),
        "policy/ess": float(weight_M.sum() ** 2 / (len(weight_M) * np.square(weight_M).sum())),
    }


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run.

    Warm-up rises linearly and reaches the peak in its last step, number warmup_steps - 1; then the rate stays
    (constant) or falls to 0 one step after the last of num_steps * mini_batches * epochs.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    length = max(config.num_steps * config.mini_batches * config.epochs - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / length, 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
