"""Attention over packed tokens without padding; shared prefixes are computed once (tree.py).

Partial results are merged by their log-sum-exps; each flash kernel's backward pass gets the merged output
and log-sum-exp, so the gradients add up exactly.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from asyncrl.trainer.tree import Layout, Piece, to_device

log = logging.getLogger("asyncrl.trainer")

HOPPER = (9, 0)
"""Compute capability of FlashAttention 3."""

Places = slice | Tensor
TILE_SIZES = (32, 64)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Short paths, one per row of Q queries and K keys; `mask` [B, 1, Q, K] is added to the scores."""

    num_rows: int
    query_R: Tensor
    real_queries: Tensor
    no_queries: Tensor
    mask: Tensor


@dataclass(frozen=True)
class KernelCall:
    queries: Places
    keys: Places
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    tiles: Tiles | None = None


@lru_cache(maxsize=16)
def calls_of(layout: Layout, device: torch.device) -> tuple[KernelCall, ...]:
    """Return the calls: on CUDA one per pass; on CPU tiles, then remaining pieces."""
    if device.type != "cpu":
        passes = layout.passes
        return tuple(_call(list(part.pieces), device, is_causal=part.is_causal) for part in passes)
    paths, *later = layout.passes
    pieces = [piece for part in later for piece in part.pieces]
    left = {
        path: [one for one in pieces if 0 <= path.query - one.query < one.num_queries]
        for path in paths.pieces
    }
    calls, is_short_N = [], np.zeros(layout.num_tokens, np.bool_)
    for smallest, size in zip((0, *TILE_SIZES), TILE_SIZES, strict=False):
        short = [path for path in left if smallest < path.num_queries <= size >= _num_keys(left[path])]
        if len(short) > 1:
            calls.append(_tiled_call({path: left[path] for path in short}))
            for path in short:
                is_short_N[path.query : path.query + path.num_queries] = True
    for part in layout.passes:
        for piece in part.pieces:
            calls += [_call([one], device, is_causal=part.is_causal) for one in _without(piece, is_short_N)]
    return tuple(calls)


def _without(piece: Piece, is_short_N: npt.NDArray[np.bool_]) -> Iterator[Piece]:
    is_long = ~is_short_N[piece.query : piece.query + piece.num_queries]
    if not is_long.any():
        return
    edges = np.flatnonzero(np.diff(is_long, prepend=False, append=False)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield replace(piece, query=piece.query + start, num_queries=end - start)


def _num_keys(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_keys for piece in pieces)


def _tiled_call(left: dict[Piece, list[Piece]]) -> KernelCall:
    """Attend from each path to itself and to the keys of the pieces `left` of it."""
    num_queries = np.array([path.num_queries for path in left])
    num_left = np.array([_num_keys(pieces) for pieces in left.values()])
    width = num_queries.max()
    key_BK = np.zeros((len(left), width + num_left.max()), np.int64)
    for row_K, (path, pieces) in zip(key_BK, left.items(), strict=True):
        row_K[: path.num_queries] = np.arange(path.query, path.query + path.num_queries)
        keys = [np.arange(piece.key, piece.key + piece.num_keys) for piece in pieces]
        row_K[width : width + _num_keys(pieces)] = np.concatenate([np.empty(0, np.int64), *keys])
    seen_BQK = np.zeros((len(left), width, key_BK.shape[1]), np.bool_)
    seen_BQK[:, :, :width] = np.tri(width, dtype=np.bool_)
    seen_BQK[:, :, width:] = (np.arange(num_left.max()) < num_left[:, None])[:, None]
    query_R = torch.from_numpy(key_BK[:, :width].flatten())
    is_query_R = torch.from_numpy((np.arange(width) < num_queries[:, None]).flatten())
    tiles = Tiles(
        num_rows=len(left),
        query_R=query_R,
        real_queries=is_query_R.nonzero()[:, 0],
        no_queries=is_query_R.logical_not().nonzero()[:, 0],
        mask=torch.where(torch.from_numpy(seen_BQK)[:, None], 0.0, -torch.inf),
    )
    key_R = torch.from_numpy(key_BK.flatten())
    return KernelCall(query_R[is_query_R], key_R, (), (), is_causal=True, tiles=tiles)


def _call(pieces: list[Piece], device: torch.device, *, is_causal: bool) -> KernelCall:
    queries = [slice(piece.query, piece.query + piece.num_queries) for piece in pieces]
    keys = [slice(piece.key, piece.key + piece.num_keys) for piece in pieces]
    query_lengths, key_lengths = zip(*((one.num_queries, one.num_keys) for one in pieces), strict=True)
    return KernelCall(
        _gathered(queries, device), _gathered(keys, device), query_lengths, key_lengths, is_causal
    )


def _gathered(places: list[slice], device: torch.device) -> Places:
    if all(one.stop == other.start for one, other in zip(places, places[1:], strict=False)):
        return slice(places[0].start, places[-1].stop)
    return to_device(torch.cat([torch.arange(place.start, place.stop) for place in places]), device)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward

ATTENTION = "asyncrl_packed"


_layouts: WeakValueDictionary[int, Layout] = WeakValueDictionary()
_numbers = itertools.count()


class CannotPackError(Exception):
    pass


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers: [1, heads, N, head_dim] -> [1, N, heads, head_dim].

    `packed_layout`: number_of() the layout. `windows_seen`: check the attention, and add its window.
    """
    number: Tensor | None = options.pop("packed_layout", None)
    windows: set[int] | None = options.pop("windows_seen", None)
    if number is None:
        raise CannotPackError("packed attention needs a layout of its tokens")
    scale = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    size = value.shape[3]
    if size < query.shape[3]:  # kernels support one head size; zero columns change nothing
        value = functional.pad(value, (0, query.shape[3] - size))
    if windows is not None:
        for name in ("softcap", "s_aux", "position_bias"):
            if options.get(name) is not None:
                raise CannotPackError(f"its attention has {name}")
        is_whole = query.shape[::2] == (1, _layouts[int(number)].num_tokens)
        if not is_whole or key.shape != value.shape or query.shape[3] != key.shape[3]:
            shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape[:3], size]}"
            raise CannotPackError(shapes)
        if options.get("sliding_window") is not None:
            windows.add(int(options["sliding_window"]))
    output = _attend(query, key, value, number, scale)[0]
    return output if size == output.shape[3] else output[..., :size], None


AttentionInterface.register(ATTENTION, attention)


def _merged(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [1, H, N, D] and float32 log-sum-exp [1, H, N]."""
    run = _forward_cuda if query.is_cuda else _forward_cpu
    output = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    logsum = query.new_empty((1, query.shape[2], query.shape[1]), dtype=wide).transpose(1, 2)
    for call in calls_of(layout, query.device):
        own = call.queries
        found, found_logsum = run((query, key, value), call, scale)
        if not call.is_causal:
            before, before_logsum = _at(output, own), _at(logsum, own)
            weight = torch.sigmoid(found_logsum - before_logsum)[..., None]
            found = torch.lerp(before.to(wide), found.to(wide), weight).to(output.dtype)
            found_logsum = torch.logaddexp(before_logsum, found_logsum)
        for total, more in ((output, found), (logsum, found_logsum)):
            if isinstance(own, slice):
                total[:, :, own] = more
            else:
                total.index_copy_(2, own, more)
    return output, logsum


def _merged_backward(
    tensors: tuple[Tensor, ...], logsum: Tensor, layout: Layout, scale: float
) -> list[Tensor]:
    """Return gradients. `tensors`: output gradient, query, key, value, output."""
    _, *inputs, _ = tensors
    query = inputs[0]
    run = _backward_cuda if query.is_cuda else _backward_cpu
    # Shared tokens sum many gradients, in float32.
    is_sum = len(layout.passes) > 1
    wide = torch.promote_types(query.dtype, torch.float32) if is_sum else query.dtype
    totals = [torch.zeros_like(tensor, dtype=wide) for tensor in inputs]
    for call in calls_of(layout, query.device):
        found = run(tensors, logsum, call, scale)
        for total, more, place in zip(totals, found, (call.queries, call.keys, call.keys), strict=True):
            if isinstance(place, slice):
                total[:, :, place] += more
            else:
                total.transpose(1, 2)[0].index_add_(0, place, more.transpose(1, 2)[0].to(wide))
    return [total.to(query.dtype) for total in totals]


def number_of(layout: Layout) -> Tensor:
    """Return a number for the layout; keep the layout until the backward pass."""
    number = next(_numbers)
    _layouts[number] = layout
    return torch.tensor(number)


@torch.library.custom_op("asyncrl::packed_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [1, N, H, D] and log-sum-exp [1, N, H]."""
    # Contiguous heads per token gather faster.
    query, key, value = (_by_token(tensor) for tensor in (query, key, value))
    output, logsum = _merged(query, key, value, _layouts[int(number)], scale)
    return output.transpose(1, 2).contiguous(), logsum.transpose(1, 2).contiguous()


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_by_token(tensor) for tensor in (query, key, value))
    grad, output, logsum = (tensor.contiguous().transpose(1, 2) for tensor in (grad, output, logsum))
    found = _merged_backward((grad, query, key, value, output), logsum, _layouts[int(number)], scale)
    grad_query, grad_key, grad_value = (one.transpose(1, 2).contiguous() for one in found)
    return grad_query, grad_key, grad_value


@_attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    like = (one.new_empty((1, one.shape[2], one.shape[1], one.shape[3])) for one in (query, key, value))
    grad_query, grad_key, grad_value = like
    return grad_query, grad_key, grad_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, number, output, logsum = ctx.saved_tensors
    found = _attend_backward(grad, query, key, value, output, logsum, number, ctx.scale)
    return *(one.transpose(1, 2) for one in found), None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def choose_flash(capability: tuple[int, int]) -> int:
    """Activate FlashAttention 3 (https://arxiv.org/abs/2407.08608) on Hopper. Return the version in use."""
    if capability != HOPPER:
        return 2
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or importlib.util.find_spec("flash_attn_interface") is None:
        log.warning("attention runs FlashAttention 2, at 1.1 to 1.6 times 3's time: install flash-attn-3")
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
    """Return whether the installed FlashAttention 3 can train: a build for inference fails in backward."""
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


def _forward_cpu(tensors: tuple[Tensor, ...], call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [1, H, Q, D] and log-sum-exp [1, H, Q]."""
    query, key, value = tensors
    tiles = call.tiles
    if tiles is None:
        query, key, value = _at(query, call.queries), _at(key, call.keys), _at(value, call.keys)
        return _flash(query, key, value, 0.0, call.is_causal, scale=scale)  # type: ignore[no-any-return]
    query = _at(query, tiles.query_R, tiles.num_rows)
    key, value = (_at(tensor, call.keys, tiles.num_rows) for tensor in (key, value))
    found = _flash(query, key, value, 0.0, False, attn_mask=tiles.mask.to(query.dtype), scale=scale)
    output, logsum = (_by_place(rows).index_select(2, tiles.real_queries) for rows in found)
    return output, logsum


def _backward_cpu(
    tensors: tuple[Tensor, ...], logsum: Tensor, call: KernelCall, scale: float
) -> tuple[Tensor, ...]:
    tiles = call.tiles
    own = call.queries if tiles is None else tiles.query_R
    num_rows = 1 if tiles is None else tiles.num_rows
    places = zip(tensors, (own, own, call.keys, call.keys, own), strict=True)
    chosen = [_at(tensor, place, num_rows) for tensor, place in places]
    if tiles is None:
        return _flash_backward(*chosen, _at(logsum, own), 0.0, call.is_causal, scale=scale)  # type: ignore[no-any-return]
    # exp(score - logsum) and the gradient are 0 for missing queries.
    logsum_R = logsum[0].t().index_select(0, tiles.query_R).index_fill_(0, tiles.no_queries, torch.inf)
    mask = tiles.mask.to(chosen[1].dtype)
    found = _flash_backward(*chosen, _by_row(logsum_R, num_rows), 0.0, False, attn_mask=mask, scale=scale)
    query, key, value = (_by_place(rows) for rows in found)
    return query.index_select(2, tiles.real_queries), key, value


def _by_place(rows: Tensor) -> Tensor:
    """Return [1, H, B * T, ...] of [B, H, T, ...]."""
    return rows.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _forward_cuda(tensors: tuple[Tensor, ...], call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    places = zip(tensors, (call.queries, call.keys, call.keys), strict=True)
    rows = (_at(tensor, place)[0].transpose(0, 1).contiguous() for tensor, place in places)
    output, logsum, *_ = _varlen(*rows, *_lengths(call, tensors[0].device), False, scale=scale)
    return output.transpose(0, 1)[None], logsum[None]


def _backward_cuda(
    tensors: tuple[Tensor, ...], logsum: Tensor, call: KernelCall, scale: float
) -> tuple[Tensor, ...]:
    own, keys, device = call.queries, call.keys, logsum.device
    places = zip(tensors, (own, own, keys, keys, own), strict=True)
    rows = (_at(tensor, place)[0].transpose(0, 1).contiguous() for tensor, place in places)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    logsum, lengths = _at(logsum, own)[0].contiguous(), _lengths(call, device)
    gradients = _varlen_backward(*rows, logsum, *lengths, *no_dropout, scale=scale)
    return tuple(gradient.transpose(0, 1)[None] for gradient in gradients)


def _lengths(call: KernelCall, device: torch.device) -> tuple[Any, ...]:
    queries, keys = call.query_lengths, call.key_lengths
    return _ends(queries, device), _ends(keys, device), max(queries), max(keys), 0.0, call.is_causal


@lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)
