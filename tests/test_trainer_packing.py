"""How a batch is cut into micro-batches: every loss token once, shared prefixes once, nothing that cannot
matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import Rows, assert_all_close, batch_of, random_groups, trees

from asyncrl.messages.calls import BatchArrays, BatchHeader
from asyncrl.trainer.model import attention as attention_kernels
from asyncrl.trainer.model import packing
from asyncrl.trainer.model.attention import packed_attention, plain_attention
from asyncrl.trainer.model.packing import KernelPass, Layout, MicroBatch, pack

CPU = torch.device("cpu")
MAIN, FORK = random_groups([[6, 7]], prompt=17)[0]


def packed(groups: Rows, max_tokens: int = 10**6) -> tuple[BatchHeader, BatchArrays, list[MicroBatch]]:
    header, arrays = batch_of(groups)
    return header, arrays, pack(header, arrays, arrays.loss_mask, max_tokens, CPU)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 120))
def test_every_loss_token_is_there_once_in_a_layout_without_gaps(groups: Rows, max_tokens: int) -> None:
    header, arrays, micros = packed(groups, max_tokens)
    source = np.concatenate([micro.source_M for micro in micros]) if micros else np.array([], np.int64)
    assert source.tolist() == np.flatnonzero(arrays.loss_mask).tolist(), "in the batch's order, each once"
    for micro in micros:
        sequence_M, predict_M = micro.sequence_M.numpy(), micro.predict_M.numpy()
        assert np.unique(sequence_M).tolist() == list(range(len(micro.trajectory_S)))
        assert (np.diff(sequence_M) >= 0).all()
        assert micro.target_M.tolist() == arrays.token_ids[micro.source_M].tolist()
        for index, (prefix_start, prefix, own_start, own) in enumerate(micro.layout.rows):
            entry = header.trajectories[micro.trajectory_S[index]]
            places = [*range(prefix_start, prefix_start + prefix), *range(own_start, own_start + own)]
            ids = arrays.token_ids[entry.start : entry.start + prefix + own]
            assert micro.token_ids_N[places].tolist() == ids.tolist()
            assert micro.position_N[places].tolist() == list(range(prefix + own))
            offset = micro.source_M[sequence_M == index] - entry.start
            assert [places[before] for before in offset - 1] == predict_M[sequence_M == index].tolist()
            assert prefix + own == offset[-1], "read up to the last loss token and no further"
        layout = micro.layout
        assert layout.num_tokens == len(micro.token_ids_N) == len(micro.position_N)
        for part in layout.passes:
            for place, lengths in ((part.queries, part.query_lengths), (part.keys, part.key_lengths)):
                assert place.stop - place.start == sum(lengths)
                assert min(lengths) > 0, "a kernel may break on a sequence of none"
        assert layout.longest == max(prefix + own for _, prefix, _, own in layout.rows)
        assert layout.num_tokens <= max_tokens or len(micro.trajectory_S) == 1


@pytest.mark.parametrize(
    ("groups", "max_tokens", "num_tokens", "families"),
    [
        (random_groups([[5, 9, 3, 7]], prompt=30), 10**6, [30 + 4 + 8 + 2 + 6], [[(30, 20)]]),
        (random_groups([[11] * 5], prompt=20), 40, [40, 40, 30], [[(20, 20)], [(20, 20)], []]),
        (random_groups([[50, 3], [3]], prompt=20), 30, [69, 22, 22], [[], [], []]),
        ([[(MAIN[0], [False] * 12 + [True] * 11), FORK]], 99, [17 + 5 + 6], [[(17, 11)]]),
    ],
    ids=["shared once", "cut in two", "longer than the limit", "loss in one and context in the other"],
)
def test_a_prompt_is_there_once_in_each_micro_batch_that_has_several_of_its_group(
    groups: Rows, max_tokens: int, num_tokens: list[int], families: list[list[tuple[int, int]]]
) -> None:
    layouts = [micro.layout for micro in packed(groups, max_tokens)[2]]
    assert [layout.num_tokens for layout in layouts] == num_tokens
    for layout, expected in zip(layouts, families, strict=True):
        lengths = [(part.key_lengths, part.query_lengths) for part in layout.passes[1:]]
        assert lengths == [((prefix,), (own,)) for prefix, own in expected]


def test_on_a_cpu_a_micro_batch_is_no_larger_than_its_caches_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing.MOST_TOKENS, "cpu", 30)
    micros = packed(random_groups([[9], [9], [9]], prompt=7))[2]
    assert [micro.layout.num_tokens for micro in micros] == [30, 15]


# ---- packed attention is ordinary attention of each sequence by itself, whatever is shared

LAYOUT = packed(random_groups([[30, 70, 1, 9], [40], [5, 60]], prompt=25))[2][0].layout


def tensors(layout: Layout, dtype: torch.dtype, key_heads: int = 2, width: int = 16) -> list[Tensor]:
    """Query, key, value as a model makes them, and a gradient of the output."""
    random = torch.Generator().manual_seed(0)
    made = [
        torch.randn(1, layout.num_tokens, heads, width, generator=random).to(dtype).transpose(1, 2)
        for heads in (6, key_heads, key_heads, 6)
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
    micros = packed(groups)[2]
    assume(micros)
    layout = micros[0].layout
    made = tensors(layout, torch.float64)
    assert_all_close(results(packed_attention, made, layout), results(row_by_row, made, layout), 1e-9)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "limit"),
    [(torch.float32, 1, 1e-6), (torch.float32, 6, 1e-6), (torch.bfloat16, 2, 0.01), (torch.float16, 2, 0.01)],
)
def test_any_dtype_agrees_with_the_whole_matrix(dtype: torch.dtype, key_heads: int, limit: float) -> None:
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
    assert_all_close(results(packed_attention, made, LAYOUT), expected, 1e-9)


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
