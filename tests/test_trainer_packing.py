"""Micro-batches hold every loss token once and cost all ranks about the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TINY_ARCHITECTURE
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import Rows, batch_of, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.messages.tokens import ROUTING, Tokens
from asyncrl.trainer.attention import tree
from asyncrl.trainer.attention.tree import TokenRange, places_of
from asyncrl.trainer.loss.packing import (
    Costs,
    PackRules,
    assign,
    costs_of,
    micro_batches,
    token_ranges,
)
from asyncrl.trainer.ranks.ranks import ONE_RANK


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 120), st.sampled_from([-math.inf, 0, 8, 20]))
def test_every_loss_token_is_packed_once(
    groups: Rows, max_tokens: int, min_shared: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MIN_SHARED_TOKENS", min_shared)
        header, arrays = batch_of(groups)
        given_costs = (ONE_RANK, Costs(0.0, 0.0))
        device = torch.device("cpu")
        made = micro_batches(
            header,
            arrays,
            arrays.is_sampled,
            PackRules(max_tokens),
            device,
            *given_costs,
        )
    micros = [micro for micro, _ in made]
    source = [place for micro in micros for place in micro.source_M.tolist()]
    assert sorted(source) == np.flatnonzero(arrays.is_sampled).tolist()
    for micro in micros:
        layout = micro.layout
        assert layout.num_tokens <= max_tokens or len(layout.rows) == 1
        assert len(layout.passes) <= 1 + math.log2(layout.num_tokens)
        pairs = torch.stack([micro.predict_U, micro.target_U])
        assert len(np.unique(pairs, axis=1)[0]) == len(micro.predict_U)
        ends = (
            (runs, end)
            for runs in layout.rows
            for end in range(sum(n for _, n in runs))
        )
        texts = {
            tuple(micro.token_ids_N[places_of(runs)[: end + 1]].tolist())
            for runs, end in ends
        }
        if min_shared == -math.inf and len(micros) == 1:
            assert len(texts) == layout.num_tokens, "no node of the tree is there twice"


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_texts_share_no_token_that_other_experts_read(
    groups: Rows, seed: int, num_kinds: int
) -> None:
    """Weights of two versions may read one prompt by other experts. Each text is
    replayed with its own.
    """
    header, arrays = batch_of(groups)
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, num_kinds, (len(arrays), 3)).astype(np.uint16)
    arrays = arrays.with_columns({ROUTING: experts})
    made = micro_batches(
        header,
        arrays,
        arrays.is_sampled,
        PackRules(10**9),
        torch.device("cpu"),
        ONE_RANK,
        Costs(0.0, 0.0),
    )
    packed = []
    for micro, _ in made:
        assert micro.routing_N is not None
        for runs in micro.layout.rows:
            places = places_of(runs)
            read_by = micro.routing_N[places].tolist()
            packed.append((micro.token_ids_N[places].tolist(), read_by))
    recorded = []
    for one in token_ranges(header, arrays.is_sampled):
        end = one.start + one.length
        # The next token's entry names the experts that read this one.
        following = experts[one.start + 1 : end + 1].tolist()
        recorded.append((arrays.ids[one.start : end].tolist(), following))
    assert sorted(packed) == sorted(recorded)


COSTS = Costs(key=0.01, loss_token=0.2)


def tree_cost(sequences: list[TokenRange], arrays: Tokens) -> float:
    """Return the cost of one micro-batch with every shared token once."""
    nodes = {
        tuple(arrays.ids[one.start : one.start + end].tolist())
        for one in sequences
        for end in range(1, one.length + 1)
    }
    loss = COSTS.loss_token * sum(one.num_loss for one in sequences)
    return sum(1 + COSTS.key * len(node) for node in nodes) + loss


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(2, 8))
def test_no_rank_is_a_sequence_above_the_mean(
    lengths: list[int], num_ranks: int
) -> None:
    """Graham's bound, for sequences that share nothing."""
    header, arrays = batch_of(random_groups([[length] for length in lengths], prompt=2))
    sequences = token_ranges(header, arrays.is_sampled)
    steps = assign(sequences, arrays.ids, COSTS, 10**9, num_ranks)
    loads = [tree_cost(share, arrays) for share in steps[0]]
    longest = max(tree_cost([one], arrays) for one in sequences)
    assert len(steps) == 1
    assert max(loads) <= np.mean(loads) + longest * (1 - 1 / num_ranks) + 1e-9


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize("trains", ["all", "nothing but the embedding"])
def test_model_flops_match_those_of_torch(trains: str) -> None:
    """Of a plain pass: whole logits, and attention that computes all T x T scores."""
    shape = {**TINY_ARCHITECTURE, **MOE, "vocab_size": 52, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.requires_grad_(trains == "all").get_input_embeddings().requires_grad_(True)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(2, 32)[None]).logits.sum().backward()
    expected = costs_of(model).flops(
        30, num_pairs=30 * 30, num_targets=30, has_backward=True
    )
    # Some versions of transformers make the angles of rotary embeddings by a matrix
    # product.
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_sharded_models_get_a_micro_batch_as_it_is() -> None:
    """FSDP2 rounds each tensor in the tuples that a forward pass gets, also the
    teacher's logprobs.
    """
    header, arrays = batch_of(random_groups([[3, 5]]))
    given = (header, arrays, arrays.is_sampled, PackRules(100), torch.device("cpu"))
    micro, _ = next(iter(micro_batches(*given, ONE_RANK, Costs(0.0, 0.0))))
    (leaf,) = tree_leaves(micro)
    assert leaf is micro
