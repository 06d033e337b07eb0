"""Attention over packed tokens: no padding, and a prefix that sequences share is there once. Knows layouts;
knows no model.

Own tokens of a family attend to two sets of keys: causally to those of their own sequence, and to all of the
prefix. The two results are merged by their log-sum-exps, which is exact. In the backward pass each part's
flash kernel is given the merged output and the merged log-sum-exp: softmax probabilities and the row sums of
grad * output are then those of the whole, so that the parts' gradients add up to the exact one.

A kernel runs all causal segments, or all families' own tokens against their prefixes, and gives output [1, H,
N, D] and log-sum-exp [1, H, N]: flash attention on the CPU and, for bfloat16 and float16, on CUDA; elsewhere
plain SDPA, sequence by sequence. Grouped-query heads (K < H) are never expanded. Registered with transformers
as ATTENTION; a model's layers reach it with the keyword `packed_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.trainer.model.packing import Layout

Three = tuple[Tensor, Tensor, Tensor]
Lengths = tuple[int, ...]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward


class CpuKernel:
    """Flash attention, one segment or family after the other."""

    def __init__(self, layout: Layout, scale: float) -> None:
        self._layout, self._scale = layout, scale

    def forward_segments(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Each segment causally to itself."""
        _, heads, num_tokens, head_dim = query.shape
        output = query.new_empty((1, num_tokens, heads, head_dim)).transpose(1, 2)
        logsum = query.new_empty(
            (1, heads, num_tokens), dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for start, end in self._layout.segments:
            part = slice(start, end)
            output[:, :, part], logsum[:, :, part] = _flash(
                query[:, :, part], key[:, :, part], value[:, :, part], 0.0, True, scale=self._scale
            )
        return output, logsum

    def forward_families(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All own tokens of each family to all of its prefix; results are of the families' own tokens
        alone.
        """
        outputs, logsums = [], []
        for own, prefix in _family_slices(self._layout):
            output, logsum = _flash(
                query[:, :, own], key[:, :, prefix], value[:, :, prefix], 0.0, False, scale=self._scale
            )
            outputs.append(output)
            logsums.append(logsum)
        return torch.cat(outputs, dim=2), torch.cat(logsums, dim=2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor
    ) -> Three:
        """Gradients of query, key and value."""
        grads = (
            query.new_empty(
                query.shape[:1] + query.shape[2:3] + query.shape[1:2] + query.shape[3:]
            ).transpose(1, 2),
            torch.empty_like(key),
            torch.empty_like(value),
        )
        for queries, keys, is_causal in _parts(self._layout):
            parts = _flash_backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                logsum[:, :, queries],
                0.0,
                is_causal,
                scale=self._scale,
            )
            for whole, part, place in zip(grads, parts, (queries, keys, keys), strict=True):
                if is_causal:  # segments come first and cover every token
                    whole[:, :, place] = part
                else:
                    whole[:, :, place] += part
        return grads


class CudaKernel:
    """Flash attention over variable lengths: one launch for all segments, one for all families."""

    def __init__(self, layout: Layout, scale: float) -> None:
        self._layout, self._scale = layout, scale

    def forward_segments(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Each segment causally to itself."""
        lengths = tuple(end - start for start, end in self._layout.segments)
        return self._forward(query, key, value, lengths, lengths, is_causal=True)

    def forward_families(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All own tokens of each family to all of its prefix; results are of the families' own tokens
        alone.
        """
        own, prefixes, own_lengths, prefix_lengths = self._families()
        return self._forward(
            query[:, :, own],
            key[:, :, prefixes],
            value[:, :, prefixes],
            own_lengths,
            prefix_lengths,
            is_causal=False,
        )

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor
    ) -> Three:
        """Gradients of query, key and value."""
        lengths = tuple(end - start for start, end in self._layout.segments)
        grads = self._backward((grad, query, key, value, output), logsum, lengths, lengths, is_causal=True)
        if self._layout.num_family_tokens:
            own, prefixes, own_lengths, prefix_lengths = self._families()
            tensors = (
                grad[:, :, own],
                query[:, :, own],
                key[:, :, prefixes],
                value[:, :, prefixes],
                output[:, :, own],
            )
            parts = self._backward(tensors, logsum[:, :, own], own_lengths, prefix_lengths, is_causal=False)
            for whole, part, place in zip(grads, parts, (own, prefixes, prefixes), strict=True):
                whole[:, :, place] += part
        return grads

    def _families(self) -> tuple[slice, slice, Lengths, Lengths]:
        layout = self._layout
        own = slice(layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_family_tokens)
        prefix_lengths, own_lengths = zip(*layout.families, strict=True)
        return own, slice(0, layout.num_prefix_tokens), own_lengths, prefix_lengths

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_lengths: Lengths,
        key_lengths: Lengths,
        *,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        output, logsum, *_ = _varlen(
            *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
            self._cumulative(query_lengths, query.device),
            self._cumulative(key_lengths, query.device),
            max(query_lengths),
            max(key_lengths),
            0.0,
            is_causal,
            False,
            scale=self._scale,
        )
        return output.transpose(0, 1)[None], logsum[None]

    def _backward(
        self,
        tensors: tuple[Tensor, ...],
        logsum: Tensor,
        query_lengths: Lengths,
        key_lengths: Lengths,
        *,
        is_causal: bool,
    ) -> Three:
        device = logsum.device
        grads = _varlen_backward(
            *(tensor[0].transpose(0, 1).contiguous() for tensor in tensors),
            logsum[0].contiguous(),
            self._cumulative(query_lengths, device),
            self._cumulative(key_lengths, device),
            max(query_lengths),
            max(key_lengths),
            0.0,
            is_causal,
            torch.zeros((2,), dtype=torch.uint64, device=device),  # the state of a dropout that is not there
            torch.empty(0, device=device),
            scale=self._scale,
        )
        to_query, to_key, to_value = (grad.transpose(0, 1)[None] for grad in grads)
        return to_query, to_key, to_value

    def _cumulative(self, lengths: Lengths, device: torch.device) -> Tensor:
        """int32 [len + 1] on the device, copied there once for all layers."""
        cache = self._layout.cache
        if lengths not in cache:
            cache[lengths] = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        return cache[lengths]


def _family_slices(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Where each family's own tokens and its prefix stand."""
    prefix_start, own_start = 0, layout.num_prefix_tokens
    for prefix, own in layout.families:
        if own:
            yield slice(own_start, own_start + own), slice(prefix_start, prefix_start + prefix)
        prefix_start, own_start = prefix_start + prefix, own_start + own


def _parts(layout: Layout) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether causal): all segments, then all families."""
    for start, end in layout.segments:
        yield slice(start, end), slice(start, end), True
    for own, prefix in _family_slices(layout):
        yield own, prefix, False


ATTENTION = "asyncrl_packed"
"""Name in transformers' AttentionInterface."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keywords of attention variants that have no packed form here: such a model is trained on padded rows."""


class CannotPackError(Exception):
    """A model's attention has no packed form; the policy falls back to padded rows."""


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
    if (
        len(query) != 1
        or query.shape[2] != layout.num_tokens
        or key.shape != value.shape
        or query.shape[-1] != key.shape[-1]
    ):
        raise CannotPackError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
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
    """The same by SDPA and autograd, each sequence with its own copy of the prefix's keys. For any device and
    dtype.
    """
    parts = dict[int, Tensor]()
    for prefix_start, prefix, own_start, own in layout.rows:
        front, back = slice(prefix_start, prefix_start + prefix), slice(own_start, own_start + own)
        if prefix and prefix_start not in parts:
            parts[prefix_start] = functional.scaled_dot_product_attention(
                query[:, :, front],
                key[:, :, front],
                value[:, :, front],
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
        if own:
            mask = torch.ones((own, prefix + own), dtype=torch.bool, device=query.device).tril_(
                diagonal=prefix
            )
            keys, values = (
                torch.cat([tensor[:, :, front], tensor[:, :, back]], dim=2) for tensor in (key, value)
            )
            parts[own_start] = functional.scaled_dot_product_attention(
                query[:, :, back], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
    output: Tensor = torch.cat([parts[start] for start in sorted(parts)], dim=2)
    return output


class _Merged(torch.autograd.Function):
    """Two passes of a kernel, merged. A kernel is made for one call, holds the layout and runs all segments
    or all families.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernel_type: Any
    ) -> Tensor:
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
