"""Part 1: the trainer's attention kernels, at its shapes and through its own operator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.trainer.attention.packed_attention import _attend, number_of
from asyncrl.trainer.attention.tree import (
    KernelPass,
    Layout,
    Piece,
    TokenRange,
    lay_out,
    places_of,
)
from gpu.correct import ROUNDED, distance
from gpu.rows import Bench

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
SHAPES = (
    ("0.6B", 16, 8, [16_384]),
    ("0.6B", 16, 8, [512] * 32),
    ("4B", 32, 8, [16_384]),
)
"""Model shape, query heads, key heads, lengths of the packed sequences."""
WARM_UP, REPETITIONS = 2, 4
Call = Callable[[], object]


def attention(bench: Bench) -> None:
    """Time FlashAttention 2, 3 and cuDNN, and compare gradients through a prefix tree
    with float32.
    """
    kernels = ["CPU"] if bench.device == "cpu" else ["FA2"]
    if bench.device == "cuda" and importlib.util.find_spec("flash_attn_interface"):
        kernels.append("FA3")
    if torch.nn.attention.current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    for kernel in kernels:
        if kernel == "FA3":
            activate_flash_attention_impl("FA3")
        for label, heads, kv_heads, lengths in SHAPES:
            sizes = [16, 16] if bench.is_tiny else lengths
            forward, backward = _packed(bench.device, heads, kv_heads, sizes)
            _tell_times(bench, f"{kernel}, {label}", heads, sizes, forward, backward)
        _check_tree(bench, kernel, "prefix tree")
        _check_tree(bench, kernel, "prefix tree with a window", num_parts=3)
        if kernel == "FA3":
            restore_flash_attention_impl()
    if bench.device == "cuda":
        for label, heads, _, lengths in SHAPES:
            if len(lengths) == 1:
                forward, backward = _cudnn(heads, lengths[0])
                _tell_times(bench, f"cuDNN, {label}", heads, lengths, forward, backward)


def _packed(
    device: str, heads: int, kv_heads: int, lengths: list[int]
) -> tuple[Call, Call]:
    """Return the trainer's forward and backward passes over sequences without a shared
    prefix.
    """
    starts = np.cumsum([0, *lengths]).tolist()
    pieces = tuple(
        Piece(start, size, start, size)
        for start, size in zip(starts, lengths, strict=False)
    )
    rows = tuple(((start, size),) for start, size in zip(starts, lengths, strict=False))
    layout = Layout(starts[-1], rows, (KernelPass(pieces, is_causal=True),))
    number = number_of(layout)
    inputs = [_random(device, one, starts[-1]) for one in (heads, kv_heads, kv_heads)]
    output, _ = _attend(*inputs, None, number, SCALE, None, None, None)
    grad = torch.randn_like(output)

    def forward() -> object:
        assert layout.num_tokens  # the operator keeps only a weak reference
        return _attend(*inputs, None, number, SCALE, None, None, None)

    def backward() -> object:
        return torch.autograd.grad(output, inputs, grad, retain_graph=True)

    return forward, backward


def _random(device: str, heads: int, num_tokens: int) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(
        1, heads, num_tokens, HEAD_DIM, device=device, dtype=dtype, requires_grad=True
    )


def _cudnn(heads: int, length: int) -> tuple[Call, Call]:
    """Return cuDNN's forward and backward passes over one sequence, with repeated key
    heads.
    """
    inputs = [_random("cuda", heads, length) for _ in range(3)]
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def forward() -> Tensor:
        output: Tensor = attend(*inputs, None, True, 0.0, True, False, scale=SCALE)[0]
        return output

    output = forward()
    grad = torch.randn_like(output)
    return forward, lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def _tell_times(
    bench: Bench,
    name: str,
    heads: int,
    lengths: list[int],
    forward: Call,
    backward: Call,
) -> None:
    # A causal pass reads half of the pairs: 2 products, 2 operations each. A backward
    # pass has 5 products.
    operations = sum(2 * length**2 * heads * HEAD_DIM for length in lengths)
    what = f"{name}, {len(lengths)} x {lengths[0]}"
    for direction, call, work in (
        ("forward", forward, operations),
        ("backward", backward, 2.5 * operations),
    ):
        seconds = bench.timed(call, WARM_UP, REPETITIONS)
        bench.tell(
            f"{what}, {direction}, ms",
            f"{1e3 * seconds:.2f}",
            against=f"{work / seconds / 1e12:.0f} TFLOP/s",
        )


def _check_tree(bench: Bench, kernel: str, label: str, num_parts: int = 99) -> None:
    """Compare output and gradients of a prefix tree with dense float32 attention of
    each sequence.

    The window has `num_parts` times the size of the tree's smallest part.
    """
    size = 8 if bench.is_tiny else 100
    window = num_parts * size
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 5 * size)
    stems = [prompt] + [
        np.concatenate([prompt, rng.integers(0, 1000, 3 * size)]) for _ in range(2)
    ]
    ends = [rng.integers(0, 1000, 2 * size + index) for index in range(9)]
    texts = [
        np.concatenate([stems[index % len(stems)], end])
        for index, end in enumerate(ends)
    ]
    starts = np.cumsum([0, *map(len, texts)]).tolist()
    ranges = [
        TokenRange(index, start, len(text), group=0, first=0, num_loss=len(text))
        for index, (start, text) in enumerate(zip(starts, texts, strict=False))
    ]
    layout, _, _ = lay_out(ranges, np.concatenate(texts).astype(np.int32), 10**6)
    assert len(layout.passes) > 2, "the tree has no branch of a branch"
    torch.manual_seed(0)
    inputs = [_random(bench.device, heads, layout.num_tokens) for heads in (16, 8, 8)]
    output, _ = _attend(*inputs, None, number_of(layout), SCALE, window, None, None)
    weight = torch.randn_like(output)
    found = [output, *torch.autograd.grad(output, inputs, weight)]
    exact_inputs = [one.detach().float().requires_grad_() for one in inputs]
    exact_output = torch.zeros_like(output, dtype=torch.float32)
    for runs in layout.rows:
        places = torch.from_numpy(places_of(runs)).to(bench.device)
        query, key, value = (one[:, :, places] for one in exact_inputs)
        is_near_TT = (
            torch.ones(len(places), len(places), device=bench.device)
            .tril()
            .triu(1 - window)
            .bool()
        )
        own = scaled_dot_product_attention(
            query, key, value, attn_mask=is_near_TT, scale=SCALE, enable_gqa=True
        ).transpose(1, 2)
        exact_output = exact_output.index_copy(1, places, own)
    exact = [
        exact_output,
        *torch.autograd.grad(exact_output, exact_inputs, weight.float()),
    ]
    for what, one, other in zip(
        ("output", "query", "key", "value"), found, exact, strict=True
    ):
        name = what if what == "output" else f"gradient of {what}"
        bench.check(
            f"{kernel}, {label}: {name}, distance", distance(one, other), ROUNDED
        )
