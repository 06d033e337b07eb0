"""Metrics of one step from the logprobs of its loss tokens, all measured before the update. Knows numbers alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32M = npt.NDArray[np.float32]


def policy_metrics(current_M: Float32M, behaviour_M: Float32M, entropy_M: Float32M) -> dict[str, float]:
    """Entropy, distance and effective sample size of M >= 1 loss tokens; logprobs and entropy in nats.

    kl_behaviour estimates KL(behaviour || current) by the mean of w - 1 - log w, w = exp(current - behaviour), which is
    unbiased and never negative (http://joschu.net/blog/kl-approx.html). ess is the effective sample size of the weights w
    as a fraction of M, (sum w)^2 / (M sum w^2): 1 on-policy.
    """
    log_weight_M = current_M.astype(np.float64) - behaviour_M.astype(np.float64)
    weight_M = np.exp(log_weight_M)
    return {
        "policy/entropy": float(entropy_M.mean(dtype=np.float64)),
        "policy/kl_behaviour": float((weight_M - 1.0 - log_weight_M).mean()),
        "policy/ess": float(weight_M.sum() ** 2 / (len(weight_M) * np.square(weight_M).sum())),
    }
