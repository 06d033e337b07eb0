"""TRL's own loss code, run on given logprobs and rewards: its trainers without a model, a tokenizer or a
generation.

The trainer is made without its constructor, and three methods are replaced by what the test gives: the
completions that were sampled, their rewards, and the logprobs of the weights. All between them is TRL's:
advantages, importance weights, KL and loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

MAX_TOKENS = 8
GROUP_SIZE = 3


@dataclass(frozen=True)
class Sampled:
    """Completions of the given lengths, one after another, [M]; groups of GROUP_SIZE; rewards [B]."""

    lengths: list[int]
    reward_B: Tensor
    current_M: Tensor
    proximal_M: Tensor
    behaviour_M: Tensor
    reference_M: Tensor

    def padded(self, value_M: Tensor) -> Tensor:
        """[B, T], 0 beyond the ends."""
        return torch.nn.utils.rnn.pad_sequence(list(value_M.split(self.lengths)), batch_first=True)


def trl_loss(
    sampled: Sampled, *, trainer: Any = GRPOTrainer, more_args: dict[str, Any] | None = None, **changes: Any
) -> tuple[Tensor, dict[str, float], Tensor]:
    """(loss with gradient, metrics, advantages [B]) of TRL's GRPOTrainer or RLOOTrainer with these attributes
    changed.
    """
    made = _make(trainer, sampled, changes)
    vars(made.args).update(more_args or {})
    inputs = made._generate_and_score_completions([{"prompt": "p"}] * len(sampled.lengths))
    made._get_per_token_logps_and_entropies = _answers(sampled, sampled.current_M)
    loss = made._compute_loss(made.model, inputs)
    metrics = {
        name: values[-1]
        for name, values in made._metrics["train"].items()
        if values and math.isfinite(values[-1])
    }
    return loss, metrics, inputs["advantages"]


def _answers(sampled: Sampled, value_M: Tensor) -> Any:
    def per_token_logps_and_entropies(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        value_BT = sampled.padded(sampled.reference_M if model == "reference" else value_M)
        return value_BT, torch.zeros_like(value_BT), None

    return per_token_logps_and_entropies


def _make(trainer: Any, sampled: Sampled, changes: dict[str, Any]) -> Any:
    lists, texts = [[1] * length for length in sampled.lengths], ["c"] * len(sampled.lengths)
    behaviour = [part.tolist() for part in sampled.behaviour_M.split(sampled.lengths)]
    generated = (
        (lists, lists, texts)
        if trainer is RLOOTrainer
        else (lists, lists, None, texts, behaviour, {}, None, None)
    )
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=len(lists),
        gradient_checkpointing_kwargs=None,
    )
    attributes: dict[str, Any] = {
        "args": args,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "ref_model": "reference",
        "accelerator": Accelerator(cpu=True),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
        "vllm_importance_sampling_clip_min": None,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "num_iterations": 2,
        "num_generations": GROUP_SIZE,
        "scale_rewards": "none",
        "normalize_advantages": False,
        "reward_clip_range": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1),
        "reward_func_names": ["given"],
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "log_multimodal": False,
        "_pending_metrics": {},
        "_pending_extra_logs": {},
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_generate": lambda _: generated,
        "_calculate_rewards": lambda *_: sampled.reward_B[:, None],
        "_get_per_token_logps_and_entropies": _answers(sampled, sampled.proximal_M),
    }
    made = object.__new__(trainer)
    for name, value in {**attributes, **changes}.items():
        setattr(made, name, value)
    return made
