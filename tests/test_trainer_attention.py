"""Packed attention is ordinary attention of each sequence by itself: output and gradients, whatever is
shared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from trainer_cases import Rows, batch_of, random_groups, trees

from asyncrl.trainer.model import attention as attention_kernels
from asyncrl.trainer.model.attention import packed_attention, plain_attention
from asyncrl.trainer.model.packing import KernelPass, Layout, pack

SHARED = random_groups([[30, 70, 1, 9], [40], [5, 60]], prompt=25)


def layout_of(groups: Rows) -> Layout | None:
    header, arrays = batch_of(groups)
    micros = pack(header, arrays, arrays.loss_mask, 10**6, torch.device("cpu"))
    return micros[0].layout if micros else None


LAYOUT = layout_of(SHARED)
assert LAYOUT is not None


def tensors(
    layout: Layout, dtype: torch.dtype, heads: int = 6, key_heads: int = 2, width: int = 16
) -> list[Tensor]:
    """Query, key, value as a model makes them, and a gradient of the output."""
    random = torch.Generator().manual_seed(0)
    sizes = (heads, key_heads, key_heads, heads)
    made = [
        torch.randn(1, layout.num_tokens, size, width, generator=random).to(dtype).transpose(1, 2)
        for size in sizes
    ]
    return [tensor.requires_grad_(index < 3) for index, tensor in enumerate(made)]


def row_by_row(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Each sequence's tokens gathered and attended to with the whole matrix of scores; a shared token's row
    is taken once.
    """
    output = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for prefix_start, prefix, own_start, own in layout.rows:
        places = [*range(prefix_start, prefix_start + prefix), *range(own_start, own_start + own)]
        keys, values = (tensor[0, :, places].repeat_interleave(group, 0) for tensor in (key, value))
        future = torch.ones(len(places), len(places), dtype=torch.bool).triu(1)
        scores = (query[0, :, places] @ keys.mT * scale).masked_fill(future, -torch.inf)
        output = output.index_put(
            (torch.tensor(0), torch.arange(query.shape[1])[:, None], torch.tensor(places)),
            scores.softmax(-1) @ values,
        )
    return output


def results(function: Any, made: list[Tensor], layout: Layout, scale: float = 0.3) -> list[Tensor]:
    query, key, value, grad = made
    output = function(query, key, value, layout, scale)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]


@settings(max_examples=25, deadline=None)
@given(trees())
def test_any_tree_gives_the_outputs_and_gradients_of_separate_sequences(groups: Rows) -> None:
    layout = layout_of(groups)
    if layout is None:
        return
    made = tensors(layout, torch.float64)
    for found, expected in zip(
        results(packed_attention, made, layout), results(row_by_row, made, layout), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "limit"),
    [(torch.float32, 1, 1e-6), (torch.float32, 6, 1e-6), (torch.bfloat16, 2, 0.01), (torch.float16, 2, 0.01)],
)
def test_in_any_dtype_and_number_of_key_heads_it_agrees_with_the_whole_matrix_in_float32(
    dtype: torch.dtype, key_heads: int, limit: float
) -> None:
    made = tensors(LAYOUT, dtype, key_heads=key_heads)
    wide = [tensor.detach().float().requires_grad_(index < 3) for index, tensor in enumerate(made)]
    expected = results(row_by_row, wide, LAYOUT)
    for function in (packed_attention, plain_attention):
        for one, other in zip(results(function, made, LAYOUT), expected, strict=True):
            assert one.dtype == dtype
            assert float((one.float() - other).norm() / other.norm()) < limit


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(0, 1)[None] for tensor in tensors)


def part_of(ends: tuple[Tensor, Tensor], options: tuple[Any, ...]) -> KernelPass:
    """What the CUDA operators are told."""
    queries, keys = (tuple(one.diff().tolist()) for one in ends)
    assert options[:3] == (max(queries), max(keys), 0.0)
    return KernelPass(slice(0, sum(queries)), slice(0, sum(keys)), queries, keys, options[3])


def test_the_layout_of_the_cuda_kernel_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA operators cannot run here: others stand in for them, and what they are called with is what is
    tested.
    """
    forward, backward = attention_kernels._forward_cpu, attention_kernels._backward_cpu

    def varlen(*given: Any, scale: float) -> tuple[Tensor, Tensor]:
        output, logsum = forward(heads_first(*given[:3]), part_of(given[3:5], given[5:]), scale)
        return output[0].transpose(0, 1), logsum[0]

    def varlen_backward(*given: Any, scale: float) -> list[Tensor]:
        part = part_of(given[6:8], given[8:])
        made = backward(heads_first(*given[:5]), given[5][None], part, scale)
        return [tensor[0].transpose(0, 1) for tensor in made]

    made = tensors(LAYOUT, torch.float64)
    expected = results(packed_attention, made, LAYOUT)
    monkeypatch.setattr(attention_kernels, "_varlen", varlen)
    monkeypatch.setattr(attention_kernels, "_varlen_backward", varlen_backward)
    monkeypatch.setattr(attention_kernels, "_forward_cpu", attention_kernels._forward_cuda)
    monkeypatch.setattr(attention_kernels, "_backward_cpu", attention_kernels._backward_cuda)
    for found, other in zip(results(packed_attention, made, LAYOUT), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda_it_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    layout = LAYOUT
    made = tensors(layout, dtype, width=64)
    there = [tensor.detach().cuda().requires_grad_(index < 3) for index, tensor in enumerate(made)]
    for found, expected in zip(
        results(packed_attention, there, layout), results(packed_attention, made, layout), strict=True
    ):
        assert float((found.cpu().float() - expected.float()).norm() / expected.float().norm()) < 0.02
