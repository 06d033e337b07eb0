"""Packed attention with windows, chunks, soft caps and sinks gives each sequence's
plain values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from costly_cases import every_third_is_quick
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import make_config, random_model
from policy_cases import assert_same, run, run_plain
from torch import Tensor, nn
from trainer_cases import random_groups

from asyncrl.models.attention_kinds import AttentionKind
from asyncrl.trainer.attention import packed_attention as attention
from asyncrl.trainer.attention.forward_plan import find_plan, probe_model
from asyncrl.trainer.attention.tree import places_of
from asyncrl.trainer.loss.packing import pack_texts
from asyncrl.trainer.model.policy import Policy

CPU = torch.device("cpu")
GROUPS = random_groups([[3, 9, 190], [70, 2, 2]], prompt=8)
"""Lengths on both sides of windows of 12, chunks of 16, and blocks of 64; with shared
prefixes.
"""
NAMES = [
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "llama4_text",
    "mistral",
    "olmo3",
    "qwen2 window",
]


@pytest.mark.parametrize("name", every_third_is_quick(zip(NAMES, strict=True)))
def test_models_with_windows_are_packed_at_any_length(name: str) -> None:
    model = random_model(make_config(name))
    expected = run_plain(model, GROUPS, 0.8)
    plan = find_plan(probe_model(model.config, CPU))
    assert plan.is_packed, plan.reason
    assert_same(run(Policy(model, plan), GROUPS, 10**6, 0.8), expected, 1e-5)


def plain(
    tensors: list[Tensor], place_T: Tensor, scale: float, kind: AttentionKind
) -> Tensor:
    """Return the output [H, T, D] of one sequence, with all its T x T scores."""
    query, key, value = (tensor[0, :, place_T] for tensor in tensors[:3])
    score_HTT = query @ key.repeat_interleave(len(query) // len(key), 0).mT * scale
    if kind.softcap is not None:
        score_HTT = kind.softcap * torch.tanh(score_HTT / kind.softcap)
    position_T = torch.arange(len(place_T))
    behind_TT = position_T[:, None] - position_T
    is_seen_TT = (behind_TT >= 0) & (behind_TT < (kind.window or len(place_T)))
    chunk_T = position_T // (kind.chunk or len(place_T))
    score_HTT = score_HTT.masked_fill(
        ~is_seen_TT | (chunk_T[:, None] != chunk_T), -torch.inf
    )
    if len(tensors) > 3:
        sink_HT1 = tensors[3][:, None, None].expand(-1, len(place_T), 1)
        score_HTT = torch.cat([score_HTT, sink_HT1], dim=-1)
    weight_HTT = score_HTT.softmax(dim=-1)[..., : len(place_T)]
    return weight_HTT @ value.repeat_interleave(len(query) // len(value), 0)


SIZES = st.none() | st.integers(1, 150)
KINDS = st.builds(AttentionKind, SIZES, SIZES, st.none() | st.floats(0.5, 5.0))
HEADS = st.sampled_from([(4, 2, 8, 8), (4, 4, 8, 4), (4, 1, 16, 16)])


@settings(max_examples=60, deadline=None)
@given(
    KINDS,
    st.booleans(),
    HEADS,
    st.lists(st.integers(2, 200), min_size=1, max_size=5),
    st.integers(0, 2**16),
)
def test_any_kind_and_layout_give_a_plain_softmax(
    kind: AttentionKind,
    has_sinks: bool,
    heads: tuple[int, ...],
    lengths: list[int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 9, length) for length in lengths]
    # each shares tokens with the one before
    for text, other in zip(texts, texts[1:], strict=False):
        num_shared = rng.integers(0, min(len(text), len(other)))
        other[:num_shared] = text[:num_shared]
    layout = pack_texts(texts, CPU).layout
    torch.manual_seed(seed)
    num_heads, num_key_heads, size, value_size = heads
    shapes = [
        (1, num_heads, layout.num_tokens, size),
        (1, num_key_heads, layout.num_tokens, size),
    ]
    shapes.append((*shapes[1][:3], value_size))
    if has_sinks:
        shapes.append((num_heads,))
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    options: dict[str, Any] = {"sliding_window": kind.window, "softcap": kind.softcap}
    options["s_aux"] = tensors[3] if has_sinks else None
    options["packed_position_N"] = torch.arange(layout.num_tokens)
    module = nn.Module()
    module.layer_idx = 0
    module.config = nn.Module()
    module.config.layer_types = ["chunked_attention"]
    module.config.attention_chunk_size = kind.chunk
    number = attention.number_of(layout)
    found, _ = attention.attention(
        module, *tensors[:3], None, packed_layout=number, scaling=0.7, **options
    )
    expected = torch.zeros_like(found)
    for runs in layout.rows:
        place_T = torch.from_numpy(places_of(runs))
        output_HTD = plain(tensors, place_T, 0.7, kind)
        expected = expected.index_copy(1, place_T, output_HTD.transpose(0, 1)[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    grad = torch.randn_like(found)
    gradients = [
        torch.autograd.grad(output, tensors, grad) for output in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_padding_costs_less_than_a_call_and_calls_are_few() -> None:
    """With 60 short texts and a few of 17 tokens, most of a single call is padding."""
    lengths = [3, 5, 7, 12] * 15 + [17] * 5
    texts = [np.full(length + 1, index) for index, length in enumerate(lengths)]
    layout = pack_texts(texts, CPU).layout
    calls = attention.calls_of(layout, CPU)
    num_padded = 0
    for call in calls:
        assert call.tiles is not None
        num_padded += len(call.tiles.query_R) * len(call.tiles.key_R) // call.num_rows
    num_needed = sum(-(-length // 8) * 8 * -(-length // 16) * 16 for length in lengths)
    assert num_padded < 1.5 * num_needed
    assert len(calls) <= 3
