"""Attention over packed tokens: no padding, and tokens that sequences share are there once.

Tokens of a path attend to several sets of keys: causally to those of their own path, and to all of the paths
before it, up to where it left them (tree.py). The results are merged by their log-sum-exps, which is exact.
In the backward pass each part's flash kernel is given the merged output and the merged log-sum-exp: softmax
probabilities and the row sums of grad * output are then those of the whole, so that the parts' gradients add
up to the exact one.

The kernels are flash attention on the CPU and, for bfloat16 and float16, on CUDA; elsewhere plain SDPA runs
sequence by sequence. Grouped-query heads (K < H) are never expanded. Registered with transformers as
ATTENTION; a model's layers reach it with the keyword `packed_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.trainer.model.tree import KernelPass, Layout

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
    """The same by SDPA and autograd: the last stretch of each sequence, with its own copy of the keys before.
    For any device and dtype.
    """
    output = torch.empty_like(query)
    for runs in layout.rows:
        own = slice(runs[-1][0], sum(runs[-1]))
        keys, values = (
            torch.cat([tensor[:, :, start : start + length] for start, length in runs], 2)
            for tensor in (key, value)
        )
        num_queries, num_keys = runs[-1][1], keys.shape[2]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        output[:, :, own] = functional.scaled_dot_product_attention(
            query[:, :, own],
            keys,
            values,
            attn_mask=seen.tril(num_keys - num_queries),
            scale=scale,
            enable_gqa=True,
        )
    return output


Places = slice | Tensor


@dataclass(frozen=True)
class KernelCall:
    """One call of a flash kernel: the tokens `queries` attend to the tokens `keys`, sequence by sequence of
    these lengths.
    """

    queries: Places
    keys: Places
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool


@lru_cache(maxsize=256)
def _calls(part: KernelPass, device: torch.device, *, is_one: bool) -> tuple[KernelCall, ...]:
    """Made once for all layers: a call for each piece, on views, or one for all of them, on tokens that are
    gathered first.
    """
    queries = [slice(piece.query, piece.query + piece.num_queries) for piece in part.pieces]
    keys = [slice(piece.key, piece.key + piece.num_keys) for piece in part.pieces]
    sizes = [(piece.num_queries, piece.num_keys) for piece in part.pieces]
    if is_one:
        query_lengths, key_lengths = zip(*sizes, strict=True)
        places = _gathered(queries, device), _gathered(keys, device)
        return (KernelCall(*places, query_lengths, key_lengths, part.is_causal),)
    made = zip(queries, keys, sizes, strict=True)
    return tuple(KernelCall(own, seen, (one,), (other,), part.is_causal) for own, seen, (one, other) in made)


def _gathered(places: list[slice], device: torch.device) -> Places:
    """Their places in order: a slice, if they lie side by side."""
    if all(one.stop == other.start for one, other in zip(places, places[1:], strict=False)):
        return slice(places[0].start, places[-1].stop)
    return torch.cat([torch.arange(place.start, place.stop) for place in places]).to(device)


class _Packed(torch.autograd.Function):
    """The layout's passes of a flash kernel, merged."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        run = _forward_cuda if query.is_cuda else _forward_cpu
        output = torch.empty_like(query)
        logsum = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for call in _calls_of(layout, query.device):
            own, keys = call.queries, call.keys
            found, found_logsum = run((query[:, :, own], key[:, :, keys], value[:, :, keys]), call, scale)
            if not call.is_causal:  # of tokens that the calls before have been at
                before, before_logsum = output[:, :, own], logsum[:, :, own]
                weight = torch.sigmoid(found_logsum - before_logsum)[..., None]
                found = torch.lerp(before.to(weight.dtype), found.to(weight.dtype), weight)
                found_logsum = torch.logaddexp(before_logsum, found_logsum)
            output[:, :, own] = found
            logsum[:, :, own] = found_logsum
        ctx.save_for_backward(query, key, value, output, logsum)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsum = ctx.saved_tensors
        run = _backward_cuda if query.is_cuda else _backward_cpu
        # What many sequences share gets many gradients: they are added up in float32.
        is_sum = len(ctx.layout.passes) > 1
        wide = torch.promote_types(query.dtype, torch.float32) if is_sum else query.dtype
        totals = [torch.empty_like(tensor, dtype=wide) for tensor in (query, key, value)]
        for call in _calls_of(ctx.layout, query.device):
            own, keys = call.queries, call.keys
            places = (own, own, keys, keys, own)
            pairs = zip((grads[0], query, key, value, output), places, strict=True)
            tensors = tuple(tensor[:, :, place] for tensor, place in pairs)
            found = run(tensors, logsum[:, :, own], call, ctx.scale)
            for total, more, place in zip(totals, found, (own, keys, keys), strict=True):
                if call.is_causal:
                    total[:, :, place] = more
                elif isinstance(place, slice):
                    total[:, :, place] += more
                else:
                    total.index_add_(2, place, more.to(wide))
        return *(total.to(query.dtype) for total in totals), None, None


def _calls_of(layout: Layout, device: torch.device) -> Iterator[KernelCall]:
    for part in layout.passes:
        yield from _calls(part, device, is_one=device.type != "cpu")


def _forward_cpu(tensors: tuple[Tensor, ...], call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, H, Q, D] and log-sum-exp [1, H, Q] of query, key, value."""
    return _flash(*tensors, 0.0, call.is_causal, scale=scale)  # type: ignore[no-any-return]


def _backward_cpu(
    tensors: tuple[Tensor, ...], logsum: Tensor, call: KernelCall, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; tensors are the output's gradient, query, key, value, output."""
    return _flash_backward(*tensors, logsum, 0.0, call.is_causal, scale=scale)  # type: ignore[no-any-return]


def _forward_cuda(tensors: tuple[Tensor, ...], call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    """As _forward_cpu, all sequences in one launch."""
    rows = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors)
    output, logsum, *_ = _varlen(*rows, *_lengths(call, tensors[0].device), False, scale=scale)
    return output.transpose(0, 1)[None], logsum[None]


def _backward_cuda(
    tensors: tuple[Tensor, ...], logsum: Tensor, call: KernelCall, scale: float
) -> tuple[Tensor, ...]:
    """As _backward_cpu, all sequences in one launch."""
    rows, device = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors), logsum.device
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    logsum, lengths = logsum[0].contiguous(), _lengths(call, device)
    gradients = _varlen_backward(*rows, logsum, *lengths, *no_dropout, scale=scale)
    return tuple(gradient.transpose(0, 1)[None] for gradient in gradients)


def _lengths(call: KernelCall, device: torch.device) -> tuple[Any, ...]:
    """Ends of the sequences, the longest ones, dropout, and whether attention is causal."""
    queries, keys = call.query_lengths, call.key_lengths
    return _ends(queries, device), _ends(keys, device), max(queries), max(keys), 0.0, call.is_causal


@lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [len + 1] on the device: made once for all layers."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
