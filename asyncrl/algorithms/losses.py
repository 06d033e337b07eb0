"""Policy losses: sums over tokens, each with its paper. Knows no model, no optimizer, no age of a token.

Every loss takes logprobs of the same tokens three times, float32 [B, T] in nats: `current_BT` with gradient,
`proximal_BT` by the trainer's weights before the step, `behaviour_BT` as reported by the engine; `advantages_BT`
float32; `mask_BT` bool, true on tokens that carry loss. It returns the sum of the loss over masked tokens, a scalar,
and sums of statistics by metric name. Sums, not means: the caller divides by the mini-batch's number of loss tokens,
so micro-batches add up. ValueError if shapes or dtypes are others. What lies outside the mask has no influence.

One optimizer step is taken a mini-batch, so the caller may pass current_BT.detach() as proximal_BT: before the only
step they are the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

LossSum = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(
    current_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> LossSum:
    """PPO's clipped surrogate a token, the ratio taken to the behaviour policy. proximal_BT and importance_cap are not used.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - behaviour); statistic clip_fraction: tokens whose
    gradient the clip removed. https://arxiv.org/abs/1707.06347, equation 7; unequal clips: https://arxiv.org/abs/2503.14476.
    """
    del importance_cap
    _check(current_BT, proximal_BT, behaviour_BT, advantages_BT, mask_BT)
    ratio_BT = _ratio(current_BT, behaviour_BT, mask_BT)
    surrogate_BT, is_clipped_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    return _masked_sum(-surrogate_BT, mask_BT), {"clip_fraction": _masked_sum(is_clipped_BT, mask_BT)}


def decoupled_ppo(
    current_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> LossSum:
    """PPO clipped around the proximal policy, corrected for the behaviour policy by a capped weight.

    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - proximal) and w = min(exp(proximal - behaviour),
    importance_cap), no gradient through w. Statistics: clip_fraction, capped_fraction. Batch size-invariance for policy
    optimization, https://arxiv.org/abs/2110.00641, equation 3; for asynchronous language models https://arxiv.org/abs/2505.24298.
    """
    _check(current_BT, proximal_BT, behaviour_BT, advantages_BT, mask_BT)
    proximal_BT = proximal_BT.detach()
    weight_BT = _ratio(proximal_BT, behaviour_BT, mask_BT)
    ratio_BT = _ratio(current_BT, proximal_BT, mask_BT)
    surrogate_BT, is_clipped_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    stats = {
        "clip_fraction": _masked_sum(is_clipped_BT, mask_BT),
        "capped_fraction": _masked_sum(weight_BT > importance_cap, mask_BT),
    }
    return _masked_sum(-weight_BT.clamp(max=importance_cap) * surrogate_BT, mask_BT), stats


def tis(
    current_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> LossSum:
    """Policy gradient with truncated importance sampling. proximal_BT and the clip range are not used.

    -w A current with w = min(exp(current - behaviour), importance_cap), no gradient through w; statistic clip_fraction: tokens
    whose weight was truncated. Truncation: Ionides 2008, https://doi.org/10.1198/106186008X320456; a token:
    IMPALA, https://arxiv.org/abs/1802.01561.
    """
    del clip_low, clip_high
    _check(current_BT, proximal_BT, behaviour_BT, advantages_BT, mask_BT)
    weight_BT = _ratio(current_BT.detach(), behaviour_BT, mask_BT)
    loss_BT = -weight_BT.clamp(max=importance_cap) * advantages_BT * current_BT
    return _masked_sum(loss_BT, mask_BT), {"clip_fraction": _masked_sum(weight_BT > importance_cap, mask_BT)}


def _check(current_BT: Tensor, proximal_BT: Tensor, behaviour_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> None:
    named = {"current_BT": current_BT, "proximal_BT": proximal_BT, "behaviour_BT": behaviour_BT, "advantages_BT": advantages_BT}
    for name, tensor in {**named, "mask_BT": mask_BT}.items():
        expected = torch.bool if name == "mask_BT" else torch.float32
        if tensor.shape != current_BT.shape or tensor.dtype != expected:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but must be {expected} "
                f"of the shape of current_BT, {tuple(current_BT.shape)}"
            )


def _ratio(above_BT: Tensor, below_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(above - below), 1 outside the mask, so that padding can neither overflow nor send gradients."""
    return torch.where(mask_BT, above_BT - below_BT, 0.0).exp()


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(the surrogate that is maximised, where the clip is what was chosen)."""
    plain_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_BT
    return torch.minimum(plain_BT, clipped_BT), clipped_BT.detach() < plain_BT.detach()


def _masked_sum(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, value_BT, torch.zeros_like(value_BT)).sum()
