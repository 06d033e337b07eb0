"""The learning rate of each optimizer step. Knows numbers alone."""

from __future__ import annotations

import math

from asyncrl.config import TrainerConfig


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run.

    Warm-up rises linearly and reaches the peak in its last step, number warmup_steps - 1; then the rate stays (constant) or
    falls to 0 one step after the last of num_steps * mini_batches * epochs.
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
