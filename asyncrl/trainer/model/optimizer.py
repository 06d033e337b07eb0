from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(weights: Iterable[Tensor], config: TrainerConfig) -> torch.optim.Optimizer:
    """Return fused AdamW with weight decay on matrices only."""
    matrices = list[Tensor]()
    others = list[Tensor]()
    for weight in weights:
        (matrices if weight.ndim >= 2 else others).append(weight)
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    groups = [group for group in (decayed, {"params": others, "weight_decay": 0.0}) if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def new_state(weight: Tensor) -> dict[str, Tensor]:
    moments = {moment: torch.zeros_like(weight).detach() for moment in MOMENTS}
    return {"step": torch.zeros((), device=weight.device), **moments}


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Warm-up reaches the peak at step warmup_steps - 1; decay reaches 0 one step after the last.
    """
    peak = config.learning_rate
    past_warmup = step - config.warmup_steps
    if past_warmup < 0:
        return peak * (step + 1) / config.warmup_steps
    length = max(config.num_steps * config.mini_batches * config.epochs - config.warmup_steps, 1)
    progress = min(past_warmup / length, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.schedule]
