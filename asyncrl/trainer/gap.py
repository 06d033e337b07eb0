"""How far engines and trainer are apart on tokens that both have from the same weights, engine by engine.
Knows numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32M = npt.NDArray[np.float32]
Int16M = npt.NDArray[np.int16]

GAP_WARNING = 0.05
"""Nats of mean logprob gap on fresh tokens from which the log warns."""
MIN_ENGINE_TOKENS = 64
"""Fresh tokens of one engine from which its own mean is judged: of fewer, one unlikely token can be most of
it.
"""
MOST_NAMED = 4
"""Engines that a message names beside the one that it is about."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|current - behaviour| in nats over `num_tokens` >= 1 fresh tokens of engine number `engine`; None: of
    all together.
    """

    engine: int | None
    num_tokens: int
    mean: float
    max: float

    @property
    def can_be_judged(self) -> bool:
        """Whether there are tokens enough for a limit on the mean."""
        return self.engine is None or self.num_tokens >= MIN_ENGINE_TOKENS


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


def worst_gap(gaps: Sequence[Gap], limit: float) -> Gap | None:
    """The largest mean that is above `limit`, one engine's rather than that of all where both are the same.
    NaN is above nothing.
    """
    above = [gap for gap in gaps if gap.can_be_judged and gap.mean > limit]
    return max(above, key=lambda gap: (gap.mean, gap.engine is not None), default=None)


def gap_words(worst: Gap, gaps: Sequence[Gap]) -> str:
    """Which engine is off by how much, and how it is with the others."""
    engines = sorted(
        (gap for gap in gaps if gap.engine is not None and gap is not worst), key=lambda gap: -gap.mean
    )
    if (
        len(engines) == 1 and engines[0].num_tokens == worst.num_tokens
    ):  # all tokens are those of the only engine
        worst, engines = engines[0], []
    all_of_them = "the engines" if engines else "engine"
    who = all_of_them if worst.engine is None else f"engine-{worst.engine}"
    others = ", ".join(
        f"engine-{gap.engine} by {gap.mean:.4g} on {gap.num_tokens}" for gap in engines[:MOST_NAMED]
    )
    if len(engines) > MOST_NAMED:
        others += f", {len(engines) - MOST_NAMED} others by less"
    words = (
        f"{who} and trainer disagree by {worst.mean:.4g} nats on average on {worst.num_tokens} fresh tokens"
    )
    return f"{words} ({others})" if others else words


def gap_advice(worst: Gap, gaps: Sequence[Gap]) -> str:
    """What to look at, and what to change."""
    advice = (
        "check that engine and trainer use the same model.dtype, temperature and weights; "
        "weight_sync.interrupt=keep_kv raises the gap"
    )
    if worst.engine is not None and sum(gap.engine is not None for gap in gaps) > 1:
        own = f"what engine-{worst.engine} alone has is its weights, its settings or its device: read its log"
        return f"{own}; else {advice}"
    return advice
