"""A linear layer with an adapter that computes as an engine does: with the merged weight. Knows tensors; knows no model.

An engine merges W + scale * B A once a publish, and in bfloat16 rounds it. To add scale * B (A x) to W x would be another policy:
a weight that the adapter moves by less than half a bfloat16 step does not move in the engine. So the merged, rounded weight is
used here too, made anew in each pass, with gradients for A and B as if nothing were rounded, like those of master weights.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.nn import functional

ADAPTER = "default"
"""Peft's name of the one adapter that a layer has."""


class MergedLinear(lora.Linear):
    """Peft's layer with another forward pass. With scale 0 it is the layer below."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out]."""
        scale, base = self.scaling[ADAPTER], self.get_base_layer()
        if not scale:
            return base(x)  # type: ignore[no-any-return]
        lora_A, lora_B = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return _MergedLinear.apply(x, base.weight, base.bias, lora_A, lora_B, scale)  # type: ignore[no-any-return, no-untyped-call]


def merge(base: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """W + scale * B A, computed in float32, in the dtype of W. An engine does the same (asyncrl_servers/embedded/lora.py)."""
    return (base.float() + (lora_B.float() @ lora_A.float()) * scale).to(base.dtype)


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, bias: Tensor | None, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, base, lora_A, lora_B)
        ctx.scale = scale
        return functional.linear(x, merge(base, lora_A, lora_B, scale), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, base, lora_A, lora_B = ctx.saved_tensors
        grad_NO, x_NI = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_x = (grads[0] @ merge(base, lora_A, lora_B, ctx.scale)) if ctx.needs_input_grad[0] else None
        grad_A = ctx.scale * ((grad_NO @ lora_B).T @ x_NI)
        grad_B = ctx.scale * (grad_NO.T @ (x_NI @ lora_A.T))
        return grad_x, None, None, grad_A, grad_B, None
