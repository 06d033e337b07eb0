"""How a batch is cut into micro-batches: every loss token once, shared prefixes once, nothing that cannot
matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
from asyncrl.trainer.model import kernel_calls, packing, tree
from asyncrl.trainer.model.attention import packed_attention, plain_attention
from asyncrl.trainer.model.packing import MicroBatch, pack
from asyncrl.trainer.model.tree import Layout, places_of

CPU = torch.device("cpu")
MAIN, FORK = random_groups([[6, 7]], prompt=17)[0]
HISTORY = [5, 6, 7, 8, 9] * 20


def turn(number: int) -> tuple[list[int], list[bool]]:
    """What an agent samples after 30, 50 and 70 tokens of one history, none of which is in the next turn."""
    start = 30 + 20 * number
    thought = list(range(10 * number + 10, 10 * number + 30))
    return HISTORY[:start] + thought, [False] * start + [True] * len(thought)


THOUGHT = turn(1)[0]
FORKED = THOUGHT[:-6] + [4] * 9, [False] * (len(THOUGHT) - 6) + [True] * 9
"""Leaves a thought, which leaves the history."""


def packed(groups: Rows, max_tokens: int = 10**6) -> tuple[BatchHeader, BatchArrays, list[MicroBatch]]:
    header, arrays = batch_of(groups)
    return header, arrays, pack(header, arrays, arrays.loss_mask, max_tokens, CPU)


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 120), st.integers(0, 20))
def test_every_loss_token_is_there_once_in_trees_whose_queries_see_their_ancestors_alone(
    groups: Rows, max_tokens: int, min_shared: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MIN_SHARED_TOKENS", min_shared)
        header, arrays, micros = packed(groups, max_tokens)
    source = np.concatenate([micro.source_M for micro in micros]) if micros else np.array([], np.int64)
    assert sorted(source.tolist()) == np.flatnonzero(arrays.loss_mask).tolist(), "each once"
    for micro in micros:
        layout, sequence_M = micro.layout, micro.sequence_M.numpy()
        assert layout.num_tokens == len(micro.token_ids_N) == len(micro.position_N)
        assert layout.num_tokens <= max_tokens or len(micro.trajectory_S) == 1
        assert np.unique(sequence_M).tolist() == list(range(len(micro.trajectory_S)))
        assert (np.diff(sequence_M) >= 0).all()
        predict_M, target_M = micro.predict_U[micro.pair_M].numpy(), micro.target_U[micro.pair_M].tolist()
        assert target_M == arrays.token_ids[micro.source_M].tolist()
        assert len(np.unique(torch.stack([micro.predict_U, micro.target_U]), axis=1)[0]) == len(
            micro.predict_U
        )
        seen = seen_keys(layout)
        for index, runs in enumerate(layout.rows):
            entry, places = header.trajectories[micro.trajectory_S[index]], places_of(runs)
            ids = arrays.token_ids[entry.start : entry.start + len(places)]
            assert micro.token_ids_N[places].tolist() == ids.tolist()
            assert micro.position_N[places].tolist() == list(range(len(places)))
            offset = micro.source_M[sequence_M == index] - entry.start
            assert places[offset - 1].tolist() == predict_M[sequence_M == index].tolist()
            assert len(places) == offset[-1], "read up to the last loss token and no further"
            for end, place in enumerate(places):
                assert sorted(seen[place]) == sorted(places[: end + 1]), "each of its ancestors once"
        assert layout.longest == max(len(places_of(runs)) for runs in layout.rows)
        assert all(
            min(piece.num_queries, piece.num_keys) > 0 for part in layout.passes for piece in part.pieces
        )


def seen_keys(layout: Layout) -> list[list[int]]:
    """The keys of each token's query, by the calls of the kernel."""
    seen: list[list[int]] = [[] for _ in range(layout.num_tokens)]
    for part in layout.passes:
        for piece in part.pieces:
            for query in range(piece.num_queries):
                num_keys = query + 1 if part.is_causal else piece.num_keys
                seen[piece.query + query] += range(piece.key, piece.key + num_keys)
    return seen


@settings(max_examples=40, deadline=None)
@given(trees())
def test_with_all_that_can_be_shared_no_node_is_there_twice(groups: Rows) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MIN_SHARED_TOKENS", -math.inf)
        _, _, micros = packed(groups)
    for micro in micros:
        ids = micro.token_ids_N.numpy()
        texts = {
            tuple(ids[places_of(runs)[: end + 1]])
            for runs in micro.layout.rows
            for end in range(sum(n for _, n in runs))
        }
        assert len(texts) == micro.layout.num_tokens
        assert len(micro.layout.passes) <= 1 + math.log2(micro.layout.num_tokens)


@pytest.mark.parametrize(
    ("groups", "max_tokens", "num_tokens", "left"),
    [
        (random_groups([[5, 9, 3, 7]], prompt=30), 10**6, [30 + 4 + 8 + 2 + 6], [[(30, 12)]]),
        (random_groups([[11] * 5], prompt=20), 40, [40, 40, 30], [[(20, 10)], [(20, 10)], []]),
        (random_groups([[50, 3], [3]], prompt=20), 30, [69, 22, 22], [[], [], []]),
        ([[(MAIN[0], [False] * 12 + [True] * 11), FORK]], 99, [17 + 5 + 6], [[(17, 5)]]),
        ([[turn(0), turn(1), turn(2), turn(2)], [turn(1)]], 999, [70 + 3 * 19], [[(30, 19), (50, 19)]]),
    ],
    ids=[
        "shared once",
        "cut in two",
        "longer than the limit",
        "loss in one and context in the other",
        "turns",
    ],
)
def test_what_leaves_a_path_has_its_first_keys(
    groups: Rows, max_tokens: int, num_tokens: list[int], left: list[list[tuple[int, int]]]
) -> None:
    layouts = [micro.layout for micro in packed(groups, max_tokens)[2]]
    assert [layout.num_tokens for layout in layouts] == num_tokens
    for layout, expected in zip(layouts, left, strict=True):
        pieces = [piece for part in layout.passes[1:] for piece in part.pieces]
        assert [(piece.num_keys, piece.num_queries) for piece in pieces] == expected


def test_on_a_cpu_a_micro_batch_is_no_larger_than_its_caches_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing.MOST_TOKENS, "cpu", 30)
    micros = packed(random_groups([[9], [9], [9]], prompt=7))[2]
    assert [micro.layout.num_tokens for micro in micros] == [30, 15]


# ---- packed attention is ordinary attention of each sequence by itself, whatever is shared

PLAIN = random_groups([[30, 70, 1, 9], [40], [5, 60]], prompt=25)
LAYOUT = packed([*PLAIN, [turn(0), turn(1), turn(2), FORKED]])[2][0].layout


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
    for runs in layout.rows:
        places = places_of(runs).tolist()
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


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([(), (2,), (4, 8), kernel_calls.TILE_SIZES]))
def test_any_tree_gives_the_outputs_and_gradients_of_separate_sequences(
    groups: Rows, tile_sizes: tuple[int, ...]
) -> None:
    """Whatever is short enough to share the rows of a call."""
    micros = packed(groups)[2]
    assume(micros)
    layout = micros[0].layout
    made = tensors(layout, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_calls, "TILE_SIZES", tile_sizes)
        found = results(packed_attention, made, layout)
    assert_all_close(found, results(row_by_row, made, layout), 1e-9)


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


def test_the_layout_of_the_cuda_kernel_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA operators cannot run here: others stand in for them, and what they are called with is what is
    tested.
    """
    forward, backward = attention_kernels._flash, attention_kernels._flash_backward
    num_launches = 0

    def cut(tensors: Iterable[Tensor], kinds: str, ends: tuple[Tensor, ...], *options: Any) -> Iterator[Any]:
        """Heads first, sequence by sequence of the queries or the keys."""
        lengths = {kind: one.diff().tolist() for kind, one in zip("qk", ends, strict=True)}
        assert options == (max(lengths["q"]), max(lengths["k"]), 0.0)
        cuts = [tensor.split(lengths[kind]) for tensor, kind in zip(tensors, kinds, strict=True)]
        return (heads_first(*pieces) for pieces in zip(*cuts, strict=True))

    def varlen(*given: Any, scale: float) -> tuple[Tensor, Tensor]:
        nonlocal num_launches
        num_launches += 1
        pieces = cut(given[:3], "qkk", given[3:5], *given[5:8])
        found = zip(*(forward(*piece, 0.0, given[8], scale=scale) for piece in pieces), strict=True)
        output, logsum = (torch.cat(parts, 2)[0] for parts in found)
        return output.transpose(0, 1), logsum

    def varlen_backward(*given: Any, scale: float) -> list[Tensor]:
        logsums = given[5].split(given[6].diff().tolist(), 1)
        pieces = zip(cut(given[:5], "qqkkq", given[6:8], *given[8:11]), logsums, strict=True)
        found = (backward(*piece, one[None], 0.0, given[11], scale=scale) for piece, one in pieces)
        return [torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*found, strict=True)]

    made = tensors(LAYOUT, torch.float64)
    expected = results(packed_attention, made, LAYOUT)
    monkeypatch.setattr(attention_kernels, "_varlen", varlen)
    monkeypatch.setattr(attention_kernels, "_varlen_backward", varlen_backward)
    monkeypatch.setattr(attention_kernels, "calls_of", kernel_calls.calls_by_pass)
    monkeypatch.setattr(attention_kernels, "_forward_cpu", attention_kernels._forward_cuda)
    monkeypatch.setattr(attention_kernels, "_backward_cpu", attention_kernels._backward_cuda)
    assert_all_close(results(packed_attention, made, LAYOUT), expected, 1e-9)
    assert num_launches == len(LAYOUT.passes) == 3, "one for each pass"


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
