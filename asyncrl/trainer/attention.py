"""Attention over packed tokens: no padding, and a prefix that sequences share is there once. Knows layouts; knows no model.

Own tokens of a family attend to two sets of keys: causally to those of their own sequence, and to all of the prefix. The two
results are merged by their log-sum-exps, which is exact. In the backward pass each part's flash kernel is given the merged
output and the merged log-sum-exp: softmax probabilities and the row sums of grad * output are then those of the whole, so
that the parts' gradients add up to the exact one.

Registered with transformers as ATTENTION; a model's layers reach it with the keyword `packed_layout`. Kernels: flash attention
on the CPU and, for bfloat16 and float16, on CUDA (attention_kernels.py); elsewhere plain SDPA, sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.trainer.attention_kernels import CpuKernel, CudaKernel
from asyncrl.trainer.packing import Layout

ATTENTION = "asyncrl_packed"
"""Name in transformers' AttentionInterface."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keywords of attention variants that have no packed form here: such a model is trained on padded rows."""


class CannotPackError(Exception):
    """A model's attention has no packed form; the policy falls back to padded rows."""


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: [1, heads, N, head_dim] -> [1, N, heads, head_dim]. Without a layout it is plain SDPA."""
    layout: Layout | None = options.pop("packed_layout", None)
    windows: set[int] | None = options.pop("windows_seen", None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if present := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise CannotPackError(f"its attention has {present[0]}")
    if len(query) != 1 or query.shape[2] != layout.num_tokens or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise CannotPackError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}")
    if windows is not None and options.get("sliding_window") is not None:
        windows.add(int(options["sliding_window"]))
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return packed_attention(query, key, value, layout, scale).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Query [1, H, N, D], key and value [1, K, N, D], K divides H -> output [1, H, N, D]."""
    if query.device.type == "cpu":
        return _Merged.apply(query, key, value, layout, scale, CpuKernel)  # type: ignore[no-any-return, no-untyped-call]
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        return _Merged.apply(query, key, value, layout, scale, CudaKernel)  # type: ignore[no-any-return, no-untyped-call]
    return plain_attention(query, key, value, layout, scale)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same by SDPA and autograd, each sequence with its own copy of the prefix's keys. For any device and dtype."""
    parts = dict[int, Tensor]()
    for prefix_start, prefix, own_start, own in layout.rows:
        front, back = slice(prefix_start, prefix_start + prefix), slice(own_start, own_start + own)
        if prefix and prefix_start not in parts:
            parts[prefix_start] = functional.scaled_dot_product_attention(
                query[:, :, front], key[:, :, front], value[:, :, front], is_causal=True, scale=scale, enable_gqa=True
            )
        if own:
            mask = torch.ones((own, prefix + own), dtype=torch.bool, device=query.device).tril_(diagonal=prefix)
            keys, values = (torch.cat([tensor[:, :, front], tensor[:, :, back]], dim=2) for tensor in (key, value))
            parts[own_start] = functional.scaled_dot_product_attention(
                query[:, :, back], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
    output: Tensor = torch.cat([parts[start] for start in sorted(parts)], dim=2)
    return output


class _Merged(torch.autograd.Function):
    """Two passes of a kernel, merged. A kernel is made for one call, holds the layout and runs all segments or all families."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernel_type: Any) -> Tensor:
        kernel: CpuKernel | CudaKernel = kernel_type(layout, scale)
        output, logsum = kernel.forward_segments(query, key, value)
        if layout.num_family_tokens:  # none if all sequences of all families are the same
            own = slice(layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_family_tokens)
            wide, wide_logsum = kernel.forward_families(query, key, value)
            weight = torch.sigmoid(wide_logsum - logsum[:, :, own])[..., None]
            output[:, :, own] = torch.lerp(output[:, :, own].to(weight.dtype), wide.to(weight.dtype), weight)
            logsum[:, :, own] = torch.logaddexp(logsum[:, :, own], wide_logsum)
        ctx.save_for_backward(query, key, value, output, logsum)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_query, grad_key, grad_value = ctx.kernel.backward(grads[0], *ctx.saved_tensors)
        return grad_query, grad_key, grad_value, None, None, None
