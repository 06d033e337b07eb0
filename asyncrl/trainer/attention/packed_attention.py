"""Attention over packed tokens without padding; shared prefixes are computed once
(tree.py).

Windows, chunks and soft caps are in banded_attention.py. A head's sink is one more
logit without a value: it changes the merged output and log-sum-exp.

Partial results are merged by their log-sum-exps; each flash kernel's backward pass gets
the merged output and log-sum-exp, so the gradients add up exactly.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from asyncrl.models.attention_kinds import (
    AttentionKind,
    UnknownAttentionError,
    by_position,
    kind_of,
)
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.banded_attention import (
    BLOCK,
    Span,
    Tiles,
    dense_attention,
    dense_backward,
    mask_of,
    short_spans,
    spans_of,
    tiles_of,
)
from asyncrl.trainer.attention.tree import IntN, Layout, Piece

log = logging.getLogger("asyncrl.trainer")

HOPPER = (9, 0)
"""Compute capability of FlashAttention 3."""

Places = slice | Tensor
MOST_HEAD_SIZE = 256
"""Largest head of the flash kernels on CUDA."""
PLAIN = AttentionKind()


@dataclass(frozen=True)
class KernelCall:
    """`window`: query i of a sequence sees key j if i - j < window."""

    queries: Places
    keys: Places
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    tiles: Tiles | None = None
    window: int | None = None

    @property
    def padded_queries(self) -> Places:
        return self.queries if self.tiles is None else self.tiles.query_R

    @property
    def num_rows(self) -> int:
        return 1 if self.tiles is None else len(self.tiles.missing_B)


# All layers of a micro-batch ask with the same layout, in both passes. Layouts hash by
# identity, so a hit never compares them.
@lru_cache(maxsize=32)
def calls_of(
    layout: Layout,
    device: torch.device,
    kind: AttentionKind = PLAIN,
    *,
    is_dense: bool = False,
) -> tuple[KernelCall, ...]:
    """Return the calls: on CUDA one per pass; on CPU tiles, then remaining pieces.

    A window, a chunk or `is_dense` have tiles, or on CUDA one call.
    """
    if is_dense or (device.type == "cpu" and kind != PLAIN):
        return _tiled_calls(spans_of(layout, kind, BLOCK), kind.window, device)
    if kind != PLAIN:
        spans = [*spans_of(layout, kind)]
        return (_call(spans, device, is_causal=True, window=kind.window),)
    if device.type != "cpu":
        return tuple(
            _call(part.pieces, device, is_causal=part.is_causal)
            for part in layout.passes
        )
    # A CPU kernel call costs more than a short path's arithmetic, so short paths share
    # padded tiles with all of their keys. The pieces below leave these queries out:
    # twice computed, they would be merged twice.
    short = short_spans(layout)
    calls = [*_tiled_calls(short, None, device)]
    is_short_N = np.zeros(layout.num_tokens, np.bool_)
    for span in short:
        is_short_N[span.queries] = True
    for part in () if is_short_N.all() else layout.passes:
        for piece in part.pieces:
            calls += [
                _call([one], device, is_causal=part.is_causal)
                for one in _without(piece, is_short_N)
            ]
    return tuple(calls)


def _tiled_calls(
    spans: Iterable[Span], window: int | None, device: torch.device
) -> tuple[KernelCall, ...]:
    return tuple(
        KernelCall(
            tiles.query_R[tiles.real_queries],
            tiles.key_R,
            (),
            (),
            is_causal=True,
            tiles=tiles,
        )
        for tiles in tiles_of(spans, window, device)
    )


def _without(piece: Piece, is_short_N: npt.NDArray[np.bool_]) -> Iterator[Piece]:
    is_long = ~is_short_N[piece.queries]
    if not is_long.any():
        return
    edges = np.flatnonzero(np.diff(is_long, prepend=False, append=False)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield piece._replace(query=piece.query + start, num_queries=end - start)


def _call(
    parts: Sequence[Piece] | Sequence[Span],
    device: torch.device,
    *,
    is_causal: bool,
    window: int | None = None,
) -> KernelCall:
    """Return a call in which a part's last query is its last key, as the kernels on
    CUDA align them.
    """
    queries = [part.queries for part in parts]
    keys = [part.keys for part in parts]
    return KernelCall(
        _gathered(queries, device),
        _gathered(keys, device),
        tuple(map(len, queries)),
        tuple(map(len, keys)),
        is_causal,
        window=window,
    )


def _gathered(parts: list[IntN], device: torch.device) -> Places:
    place_N = np.concatenate(parts)
    if (np.diff(place_N) == 1).all():
        return slice(int(place_N[0]), int(place_N[-1]) + 1)
    return to_device(place_N, device)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward

ATTENTION = "asyncrl_packed"


# A custom operator takes tensors and numbers, not a Layout, so it gets a number and
# looks the layout up here. The number travels as a tensor: compiled layers then treat
# it as data, and one graph serves every layout. Weak, so that a layout ends with its
# micro-batch.
_layouts: WeakValueDictionary[int, Layout] = WeakValueDictionary()
_numbers = itertools.count()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers: [1, heads, N, head_dim] -> [1, N, heads, head_dim].

    `packed_layout`: number_of() the layout. `packed_position_N`: the tokens' positions.
    Raises UnknownAttentionError.
    """
    number: Tensor | None = options.pop("packed_layout", None)
    position_N: Tensor | None = options.pop("packed_position_N", None)
    kind = kind_of(module, attention_mask, options)
    if number is None or position_N is None:
        raise UnknownAttentionError("packed attention needs a layout of its tokens")
    query = by_position(module, query, position_N)
    scale = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    size = value.shape[3]
    # kernels support one head size; zero columns change nothing
    if size < query.shape[3]:
        value = functional.pad(value, (0, query.shape[3] - size))
    if query.shape[2:] != key.shape[2:] or key.shape != value.shape:
        shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape[:3], size]}"
        raise UnknownAttentionError(f"its attention reads {shapes}")
    sinks = options.get("s_aux")
    output, _ = _attend(query, key, value, sinks, number, scale, *kind)
    return output if size == output.shape[3] else output[..., :size], None


AttentionInterface.register(ATTENTION, attention)


def _calls(
    query: Tensor, layout: Layout, kind: AttentionKind
) -> tuple[KernelCall, ...]:
    """Return the calls of the layout. What no flash kernel can compute is computed
    densely, in tiles.
    """
    is_dense = kind.softcap is not None
    if query.is_cuda:
        is_narrow = query.dtype in (torch.bfloat16, torch.float16)
        is_dense |= not is_narrow or query.shape[3] > MOST_HEAD_SIZE
    return calls_of(
        layout, query.device, kind.within(layout.longest), is_dense=is_dense
    )


def _merged(
    tensors: tuple[Tensor, ...], layout: Layout, scale: float, kind: AttentionKind
) -> tuple[Tensor, Tensor]:
    """Return output [1, H, N, D] and float32 log-sum-exp [1, H, N]. `tensors`: query,
    key, value.
    """
    query = tensors[0]
    output = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    logsum = query.new_empty((1, query.shape[2], query.shape[1]), dtype=wide).transpose(
        1, 2
    )
    # The causal calls come first and cover every token once, so they fill the empty
    # tensors. The other calls add the keys of parent paths.
    for call in _calls(query, layout, kind):
        own = call.queries
        run = _forward_cuda if query.is_cuda and call.tiles is None else _forward_cpu
        found, found_logsum = run(tensors, call, scale, kind.softcap)
        if not call.is_causal:
            before = _at(output, own)
            before_logsum = _at(logsum, own)
            # Two softmaxes over disjoint keys merge by their masses e^a and e^b: the
            # second one's share, e^b / (e^a + e^b), is sigmoid(b - a).
            weight = torch.sigmoid(found_logsum - before_logsum)[..., None]
            found = torch.lerp(before.to(wide), found.to(wide), weight).to(output.dtype)
            found_logsum = torch.logaddexp(before_logsum, found_logsum)
        for total, more in ((output, found), (logsum, found_logsum)):
            if isinstance(own, slice):
                total[:, :, own] = more
            else:
                total.index_copy_(2, own, more.to(total.dtype))
    return output, logsum


def _merged_backward(
    tensors: tuple[Tensor, ...],
    logsum: Tensor,
    layout: Layout,
    scale: float,
    kind: AttentionKind,
) -> list[Tensor]:
    """Return gradients. `tensors`: output gradient, query, key, value, output."""
    _, *inputs, _ = tensors
    query = inputs[0]
    # Each kernel recomputes exp(score - log-sum-exp) and gradient . output. With the
    # merged values both are those of the whole softmax, so a pass over some keys gives
    # exactly their part of the gradient.
    calls = _calls(query, layout, kind)
    # Shared tokens sum many gradients, in float32.
    is_sum = (
        len(calls) > 1
        or calls[0].tiles is not None
        or isinstance(calls[0].keys, Tensor)
    )
    wide = torch.promote_types(query.dtype, torch.float32) if is_sum else query.dtype
    totals = [torch.zeros_like(tensor, dtype=wide) for tensor in inputs]
    for call in calls:
        run = _backward_cuda if query.is_cuda and call.tiles is None else _backward_cpu
        found = run(tensors, logsum, call, scale, kind.softcap)
        for total, more, place in zip(
            totals, found, (call.queries, call.keys, call.keys), strict=True
        ):
            if isinstance(place, slice):
                total[:, :, place] += more
            else:
                total.transpose(1, 2)[0].index_add_(
                    0, place, more.transpose(1, 2)[0].to(wide)
                )
    return [total.to(query.dtype) for total in totals]


def number_of(layout: Layout) -> Tensor:
    """Return a number for the layout; keep the layout until the backward pass."""
    number = next(_numbers)
    _layouts[number] = layout
    return torch.tensor(number)


@torch.library.custom_op("asyncrl::packed_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return output [1, N, H, D] and log-sum-exp [1, N, H]. `sinks`: [H]."""
    # Contiguous heads per token gather faster.
    tensors = tuple(_by_token(tensor) for tensor in (query, key, value))
    kind = AttentionKind(window, chunk, softcap)
    output, logsum = (
        one.transpose(1, 2)
        for one in _merged(tensors, _layouts[int(number)], scale, kind)
    )
    if sinks is not None:
        # The same merge with a sink, whose value is 0: the output shrinks by the sink's
        # share. The backward pass needs the log-sum-exp with the sink.
        output = (output * torch.sigmoid(logsum - sinks)[..., None]).to(output.dtype)
        logsum = torch.logaddexp(logsum, sinks.to(logsum.dtype))
    return output.contiguous(), logsum.contiguous()


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    _, num_heads, num_tokens, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty((1, num_tokens, num_heads, size))
    return output, query.new_empty((1, num_tokens, num_heads), dtype=wide)


@torch.library.custom_op("asyncrl::packed_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    number: Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_by_token(tensor) for tensor in (query, key, value))
    grad, output, logsum = (
        tensor.contiguous().transpose(1, 2) for tensor in (grad, output, logsum)
    )
    tensors = (grad, query, key, value, output)
    kind = AttentionKind(window, chunk, softcap)
    found = _merged_backward(tensors, logsum, _layouts[int(number)], scale, kind)
    grad_query, grad_key, grad_value = (
        one.transpose(1, 2).contiguous() for one in found
    )
    return grad_query, grad_key, grad_value


@_attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        one.new_empty((1, one.shape[2], one.shape[1], one.shape[3]))
        for one in (query, key, value)
    )
    return grad_query, grad_key, grad_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = inputs[:5]
    ctx.settings = inputs[5:]
    # The output and its log-sum-exp replace the scores [N, N], which the kernels
    # recompute.
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, number, output, logsum = ctx.saved_tensors
    found = _attend_backward(
        grad,
        query,
        key,
        value,
        output,
        logsum,
        number,
        *ctx.settings,
    )
    grad_sinks = None
    if sinks is not None:
        # A sink has the output 0: its gradient is -weight * (gradient . output), as in
        # softmax.
        product = (grad.to(logsum.dtype) * output).sum(dim=-1)
        grad_sinks = (
            -(torch.exp(sinks - logsum) * product).sum(dim=(0, 1)).to(sinks.dtype)
        )
    gradients = (one.transpose(1, 2) for one in found)
    # The layout's number and the settings have none.
    return *gradients, grad_sinks, *[None] * (1 + len(ctx.settings))


_attend.register_autograd(_differentiate, setup_context=_keep)


def choose_flash(capability: tuple[int, int]) -> int:
    """Activate FlashAttention 3 (https://arxiv.org/abs/2407.08608) on Hopper. Return
    the version in use.
    """
    if capability != HOPPER:
        return 2
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or importlib.util.find_spec("flash_attn_interface") is None:
        log.warning(
            "attention runs FlashAttention 2, at 1.1 to 1.6 times 3's time: install flash-attn-3"
        )
        return 2
    if not _has_backward():
        log.warning(
            "attention runs FlashAttention 2: the installed FlashAttention 3 is a build for inference, "
            "whose flash_attn_config disables the backward pass. Replace it: install flash-attn-3"
        )
        return 2
    activate("FA3")
    return 3


def _has_backward() -> bool:
    """Return whether the installed FlashAttention 3 can train: a build for inference
    fails in backward.
    """
    if importlib.util.find_spec("flash_attn_config") is None:
        return True
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return not flags.get("FLASHATTENTION_DISABLE_BACKWARD", False)


def _by_token(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _at(tensor: Tensor, places: Places, num_rows: int = 1) -> Tensor:
    if isinstance(places, slice):
        return tensor[:, :, places]
    return _by_row(tensor[0].transpose(0, 1).index_select(0, places), num_rows)


def _by_row(tokens: Tensor, num_rows: int) -> Tensor:
    return tokens.view(num_rows, -1, *tokens.shape[1:]).transpose(1, 2)


def _forward_cpu(
    tensors: tuple[Tensor, ...], call: KernelCall, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return output [1, H, Q, D] and log-sum-exp [1, H, Q]."""
    tiles = call.tiles
    places = zip(tensors, (call.padded_queries, call.keys, call.keys), strict=True)
    query, key, value = (_at(tensor, place, call.num_rows) for tensor, place in places)
    if tiles is None:
        return _flash(query, key, value, 0.0, call.is_causal, scale=scale)  # type: ignore[no-any-return]
    mask = mask_of(tiles).to(query.dtype)
    if query.is_cuda or softcap is not None:
        found = dense_attention(
            query,
            key,
            value,
            mask,
            scale,
            softcap,
        )
    else:
        found = _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    output, logsum = (
        _by_place(rows).index_select(2, tiles.real_queries) for rows in found
    )
    return output, logsum


def _backward_cpu(
    tensors: tuple[Tensor, ...],
    logsum: Tensor,
    call: KernelCall,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, ...]:
    tiles = call.tiles
    own = call.padded_queries
    num_rows = call.num_rows
    places = zip(tensors, (own, own, call.keys, call.keys, own), strict=True)
    chosen = [_at(tensor, place, num_rows) for tensor, place in places]
    if tiles is None:
        gradients: tuple[Tensor, ...] = _flash_backward(
            *chosen, _at(logsum, own), 0.0, call.is_causal, scale=scale
        )
        return gradients
    # exp(score - logsum) and the gradient are 0 for missing queries.
    logsum_R = (
        logsum[0]
        .t()
        .index_select(0, tiles.query_R)
        .index_fill_(0, tiles.no_queries, torch.inf)
    )
    logsum_B = _by_row(logsum_R, num_rows)
    mask = mask_of(tiles).to(chosen[1].dtype)
    if logsum.is_cuda or softcap is not None:
        found = dense_backward(chosen, logsum_B, mask, scale, softcap)
    else:
        found = _flash_backward(
            *chosen, logsum_B, 0.0, False, attn_mask=mask, scale=scale
        )
    query, key, value = (_by_place(rows) for rows in found)
    return query.index_select(2, tiles.real_queries), key, value


def _by_place(rows: Tensor) -> Tensor:
    """Return [1, H, B * T, ...] of [B, H, T, ...]."""
    return rows.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _forward_cuda(
    tensors: tuple[Tensor, ...], call: KernelCall, scale: float, _: float | None
) -> tuple[Tensor, Tensor]:
    rows = _rows(tensors, (call.queries, call.keys, call.keys))
    output, logsum, *_ = _varlen(
        *rows, *_lengths(call, tensors[0].device), False, scale=scale, **_window(call)
    )
    return output.transpose(0, 1)[None], logsum[None]


def _backward_cuda(
    tensors: tuple[Tensor, ...],
    logsum: Tensor,
    call: KernelCall,
    scale: float,
    _: float | None,
) -> tuple[Tensor, ...]:
    own = call.queries
    keys = call.keys
    device = logsum.device
    rows = _rows(tensors, (own, own, keys, keys, own))
    # The operator requires a random state, even without dropout.
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=device),
        torch.empty(0, device=device),
    )
    logsum = _at(logsum, own)[0].contiguous()
    lengths = _lengths(call, device)
    gradients = _varlen_backward(
        *rows,
        logsum,
        *lengths,
        *no_dropout,
        scale=scale,
        **_window(call),
    )
    return tuple(gradient.transpose(0, 1)[None] for gradient in gradients)


def _rows(tensors: tuple[Tensor, ...], places: tuple[Places, ...]) -> list[Tensor]:
    """Return the rows [tokens, heads, D] of each tensor at its places."""
    pairs = zip(tensors, places, strict=True)
    return [
        _at(tensor, place)[0].transpose(0, 1).contiguous() for tensor, place in pairs
    ]


def _window(call: KernelCall) -> dict[str, int]:
    """Return the window arguments. The kernels count the keys before the query's own."""
    if call.window is None:
        return {}
    return {"window_size_left": call.window - 1, "window_size_right": 0}


def _lengths(
    call: KernelCall, device: torch.device
) -> tuple[Tensor, Tensor, int, int, float, bool]:
    queries = call.query_lengths
    keys = call.key_lengths
    return (
        _ends(queries, device),
        _ends(keys, device),
        max(queries),
        max(keys),
        0.0,
        call.is_causal,
    )


@lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(np.cumsum([0, *lengths], dtype=np.int32), device)
