"""Attention over packed tokens: no padding, and a prefix that sequences share is there once.

Own tokens of a family attend to two sets of keys: causally to those of their own sequence, and to all of the
prefix. The two results are merged by their log-sum-exps, which is exact. In the backward pass each part's
flash kernel is given the merged output and the merged log-sum-exp: softmax probabilities and the row sums of
grad * output are then those of the whole, so that the parts' gradients add up to the exact one.

The kernels are flash attention on the CPU and, for bfloat16 and float16, on CUDA; elsewhere plain SDPA runs
sequence by sequence. Grouped-query heads (K < H) are never expanded. Registered with transformers as
ATTENTION; a model's layers reach it with the keyword `packed_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.trainer.model.packing import KernelPass, Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward

ATTENTION = "asyncrl_packed"
"""Name in transformers' AttentionInterface."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keywords of attention variants that have no packed form here."""


class CannotPackError(Exception):
    """A model's attention has no packed form; the policy runs sequence by sequence."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [1, heads, N, head_dim] -> [1, N, heads, head_dim]. Without a layout it is
    plain SDPA.
    """
    layout: Layout | None = options.pop("packed_layout", None)
    windows: set[int] | None = options.pop("windows_seen", None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if present := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise CannotPackError(f"its attention has {present[0]}")
    is_whole = query.shape[::2] == (1, layout.num_tokens)
    if not is_whole or key.shape != value.shape or query.shape[3] != key.shape[3]:
        raise CannotPackError(f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape]}")
    if windows is not None and options.get("sliding_window") is not None:
        windows.add(int(options["sliding_window"]))
    scale = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    return packed_attention(query, key, value, layout, scale).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Query [1, H, N, D], key and value [1, K, N, D], K divides H -> output [1, H, N, D]."""
    if query.is_cpu or (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)):
        return _Packed.apply(query, key, value, layout, scale)  # type: ignore[no-any-return, no-untyped-call]
    return plain_attention(query, key, value, layout, scale)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same by SDPA and autograd, each sequence with its own copy of the prefix's keys. For any device and
    dtype.
    """
    output = torch.empty_like(query)
    for prefix_start, prefix, own_start, own in layout.rows:
        places = [*range(prefix_start, prefix_start + prefix), *range(own_start, own_start + own)]
        here, keys, values = (tensor[:, :, places] for tensor in (query, key, value))
        output[:, :, places] = functional.scaled_dot_product_attention(
            here, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return output


class _Packed(torch.autograd.Function):
    """The layout's passes of a flash kernel, merged."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        run = _forward_cuda if query.is_cuda else _forward_cpu
        segments, *families = layout.passes
        output, logsum = run((query, key, value), segments, scale)
        for part in families:
            own, keys = part.queries, part.keys
            wide, wide_logsum = run((query[:, :, own], key[:, :, keys], value[:, :, keys]), part, scale)
            weight = torch.sigmoid(wide_logsum - logsum[:, :, own])[..., None]
            output[:, :, own] = torch.lerp(output[:, :, own].to(weight.dtype), wide.to(weight.dtype), weight)
            logsum[:, :, own] = torch.logaddexp(logsum[:, :, own], wide_logsum)
        ctx.save_for_backward(query, key, value, output, logsum)
        ctx.passes, ctx.scale = layout.passes, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsum = ctx.saved_tensors
        run = _backward_cuda if query.is_cuda else _backward_cpu
        segments, *families = ctx.passes
        totals = run((grads[0], query, key, value, output), logsum, segments, ctx.scale)
        for part in families:
            own, keys = part.queries, part.keys
            places = (own, own, keys, keys, own)
            pairs = zip((grads[0], query, key, value, output), places, strict=True)
            tensors = tuple(tensor[:, :, place] for tensor, place in pairs)
            found = run(tensors, logsum[:, :, own], part, ctx.scale)
            for total, more, place in zip(totals, found, (own, keys, keys), strict=True):
                total[:, :, place] += more
        return *totals, None, None


def _forward_cpu(tensors: tuple[Tensor, ...], part: KernelPass, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, H, N, D] and log-sum-exp [1, H, N] of query, key, value: one sequence after the other."""
    queries, keys = part.query_lengths, part.key_lengths
    pieces = _pieces(tensors, (queries, keys, keys))
    outputs, logsums = zip(*(_flash(*one, 0.0, part.is_causal, scale=scale) for one in pieces), strict=True)
    return torch.cat(outputs, 2), torch.cat(logsums, 2)


def _backward_cpu(
    tensors: tuple[Tensor, ...], logsum: Tensor, part: KernelPass, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; tensors are the output's gradient, query, key, value, output."""
    queries, keys = part.query_lengths, part.key_lengths
    pieces = _pieces((*tensors, logsum), (queries, queries, keys, keys, queries, queries))
    found = (_flash_backward(*one, 0.0, part.is_causal, scale=scale) for one in pieces)
    return tuple(torch.cat(gradients, 2) for gradients in zip(*found, strict=True))


def _pieces(tensors: tuple[Tensor, ...], lengths: tuple[Sequence[int], ...]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors sequence by sequence, each cut into its own lengths."""
    cut = (torch.split(tensor, list(sizes), 2) for tensor, sizes in zip(tensors, lengths, strict=True))
    return zip(*cut, strict=True)


def _forward_cuda(tensors: tuple[Tensor, ...], part: KernelPass, scale: float) -> tuple[Tensor, Tensor]:
    """As _forward_cpu, all sequences in one launch."""
    rows = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors)
    output, logsum, *_ = _varlen(*rows, *_lengths(part, tensors[0].device), False, scale=scale)
    return output.transpose(0, 1)[None], logsum[None]


def _backward_cuda(
    tensors: tuple[Tensor, ...], logsum: Tensor, part: KernelPass, scale: float
) -> tuple[Tensor, ...]:
    """As _backward_cpu, all sequences in one launch."""
    rows, device = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors), logsum.device
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    logsum, lengths = logsum[0].contiguous(), _lengths(part, device)
    gradients = _varlen_backward(*rows, logsum, *lengths, *no_dropout, scale=scale)
    return tuple(gradient.transpose(0, 1)[None] for gradient in gradients)


def _lengths(part: KernelPass, device: torch.device) -> tuple[Any, ...]:
    """Ends of the sequences, the longest ones, dropout, and whether attention is causal."""
    queries, keys = part.query_lengths, part.key_lengths
    return _ends(queries, device), _ends(keys, device), max(queries), max(keys), 0.0, part.is_causal


@lru_cache(maxsize=64)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [len + 1] on the device: made once for all layers."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
