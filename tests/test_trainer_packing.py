"""Micro-batches hold every loss token once and cost all ranks about the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_model import TINY_ARCHITECTURE
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import Rows, assert_all_close, batch_of, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.messages.trainer_api import BatchArrays, BatchHeader
from asyncrl.trainer import attention, tree
from asyncrl.trainer.packing import (
    Costs,
    MicroBatch,
    assign,
    costs_of,
    micro_batches,
    token_ranges,
)
from asyncrl.trainer.ranks import ONE_RANK
from asyncrl.trainer.tree import Layout, TokenRange, places_of

CPU = torch.device("cpu")
HISTORY = [5, 6, 7, 8, 9] * 20


def turn(number: int) -> tuple[list[int], list[bool]]:
    """An agent samples after 30, 50 and 70 tokens of one history; no thought is in the next turn."""
    start = 30 + 20 * number
    thought = list(range(10 * number + 10, 10 * number + 30))
    return HISTORY[:start] + thought, [False] * start + [True] * len(thought)


THOUGHT = turn(1)[0]
FORKED = THOUGHT[:-6] + [4] * 9, [False] * (len(THOUGHT) - 6) + [True] * 9
"""It forks from a thought, which forks from the history."""


def packed(groups: Rows, max_tokens: int = 10**6) -> tuple[BatchHeader, BatchArrays, list[MicroBatch]]:
    header, arrays = batch_of(groups)
    micros = micro_batches(header, arrays, arrays.loss_mask, max_tokens, CPU, ONE_RANK, Costs(0.0, 0.0))
    return header, arrays, [micro for micro, _ in micros]


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 120), st.sampled_from([-math.inf, 0, 8, 20]))
def test_every_loss_token_is_packed_once(groups: Rows, max_tokens: int, min_shared: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MIN_SHARED_TOKENS", min_shared)
        _, arrays, micros = packed(groups, max_tokens)
    source = [place for micro in micros for place in micro.source_M.tolist()]
    assert sorted(source) == np.flatnonzero(arrays.loss_mask).tolist()
    for micro in micros:
        layout = micro.layout
        assert layout.num_tokens <= max_tokens or len(micro.trajectory_S) == 1
        assert len(layout.passes) <= 1 + math.log2(layout.num_tokens)
        pairs = torch.stack([micro.predict_U, micro.target_U])
        assert len(np.unique(pairs, axis=1)[0]) == len(micro.predict_U)
        ends = ((runs, end) for runs in layout.rows for end in range(sum(n for _, n in runs)))
        texts = {tuple(micro.token_ids_N[places_of(runs)[: end + 1]].tolist()) for runs, end in ends}
        if min_shared == -math.inf and len(micros) == 1:
            assert len(texts) == layout.num_tokens, "no node of the tree is there twice"


# ---- packed attention

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
    """Attend to each sequence by itself, with the whole matrix of scores."""
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


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    return attention._attend(query, key, value, attention.number_of(layout), scale)[0].transpose(1, 2)


def results(function: Any, made: list[Tensor], layout: Layout, scale: float = 0.3) -> list[Tensor]:
    query, key, value, grad = made
    output = function(query, key, value, layout, scale)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([(), (2,), (4, 8), attention.TILE_SIZES]))
def test_any_tree_attends_like_separate_sequences(groups: Rows, tile_sizes: tuple[int, ...]) -> None:
    micros = packed(groups)[2]
    assume(micros)
    layout = micros[0].layout
    made = tensors(layout, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE_SIZES", tile_sizes)
        found = results(packed_attention, made, layout)
    assert_all_close(found, results(row_by_row, made, layout), 1e-9)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "limit"),
    [(torch.float32, 1, 1e-6), (torch.float32, 6, 1e-6), (torch.bfloat16, 2, 0.01)],
)
def test_any_dtype_agrees_with_the_whole_matrix(dtype: torch.dtype, key_heads: int, limit: float) -> None:
    made = tensors(LAYOUT, dtype, key_heads=key_heads)
    wide = [tensor.detach().float().requires_grad_(index < 3) for index, tensor in enumerate(made)]
    expected = results(row_by_row, wide, LAYOUT)
    for one, other in zip(results(packed_attention, made, LAYOUT), expected, strict=True):
        assert one.dtype == dtype
        assert float((one.float() - other).norm() / other.norm()) < limit


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu() -> None:
    layout = LAYOUT
    made = tensors(layout, torch.bfloat16, width=64)
    there = [tensor.detach().cuda().requires_grad_(index < 3) for index, tensor in enumerate(made)]
    for found, expected in zip(
        results(packed_attention, there, layout), results(packed_attention, made, layout), strict=True
    ):
        assert float((found.cpu().float() - expected.float()).norm() / expected.float().norm()) < 0.02


COSTS = Costs(key=0.01, loss_token=0.2)
Steps = list[list[list[TokenRange]]]


def dealt(groups: Rows, max_tokens: int, num_ranks: int, costs: Costs = COSTS) -> tuple[Steps, BatchArrays]:
    header, arrays = batch_of(groups)
    sequences = token_ranges(header, arrays.loss_mask)
    return assign(sequences, arrays.token_ids, costs, max_tokens, num_ranks), arrays


def tree_cost(sequences: list[TokenRange], arrays: BatchArrays, costs: Costs) -> tuple[int, float]:
    """Return (tokens, cost) of one micro-batch with every shared token once."""
    nodes = {
        tuple(arrays.token_ids[one.start : one.start + end].tolist())
        for one in sequences
        for end in range(1, one.length + 1)
    }
    loss = costs.loss_token * sum(one.num_loss for one in sequences)
    return len(nodes), sum(1 + costs.key * len(node) for node in nodes) + loss


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(2, 8))
def test_no_rank_is_a_sequence_above_the_mean(lengths: list[int], num_ranks: int) -> None:
    """Graham's bound, for sequences that share nothing."""
    steps, arrays = dealt(random_groups([[length] for length in lengths], prompt=2), 10**9, num_ranks)
    loads = [tree_cost(share, arrays, COSTS)[1] for share in steps[0]]
    longest = max(tree_cost([one], arrays, COSTS)[1] for share in steps[0] for one in share)
    assert len(steps) == 1
    assert max(loads) <= np.mean(loads) + longest * (1 - 1 / num_ranks) + 1e-9


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize("architecture", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("trains", ["all", "nothing but the embedding"])
def test_model_flops_match_those_of_torch(architecture: dict[str, object], trains: str) -> None:
    """Of a plain pass: whole logits, and attention that computes all T x T scores."""
    shape = {**TINY_ARCHITECTURE, **architecture, "vocab_size": 52, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.requires_grad_(trains == "all").get_input_embeddings().requires_grad_(True)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(2, 32)[None]).logits.sum().backward()
    expected = costs_of(model).flops(30, num_pairs=30 * 30, num_targets=30, has_backward=True)
    # Some versions of transformers make the angles of rotary embeddings by a matrix product.
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-3)
