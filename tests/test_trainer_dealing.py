"""Micro-batches of all ranks: each sequence once, none too large, those of a micro-step of one cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TINY_ARCHITECTURE
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import Rows, batch_of, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.messages.calls import BatchArrays
from asyncrl.trainer.model.dealing import Costs, PassSize, costs_of, deal
from asyncrl.trainer.model.packing import by_group, pack, token_ranges
from asyncrl.trainer.model.policy import ForwardPlan, Policy
from asyncrl.trainer.model.tree import TokenRange

COSTS = Costs(key=0.01, loss_token=0.2)
Steps = list[list[list[TokenRange]]]


def dealt(groups: Rows, max_tokens: int, num_ranks: int, costs: Costs = COSTS) -> tuple[Steps, BatchArrays]:
    header, arrays = batch_of(groups)
    sequences = by_group(token_ranges(header, arrays.loss_mask))
    return deal(sequences, arrays.token_ids, costs, max_tokens, num_ranks), arrays


def tree_cost(sequences: list[TokenRange], arrays: BatchArrays, costs: Costs) -> tuple[int, float]:
    """(tokens, cost) of one micro-batch with every shared token once, in plain words."""
    nodes = {
        tuple(arrays.token_ids[one.start : one.start + end].tolist())
        for one in sequences
        for end in range(1, one.length + 1)
    }
    loss = costs.loss_token * sum(one.num_loss for one in sequences)
    return len(nodes), sum(1 + costs.key * len(node) for node in nodes) + loss


@settings(max_examples=80, deadline=None)
@given(trees(), st.integers(1, 150), st.integers(1, 5))
def test_every_sequence_is_dealt_once_and_no_micro_batch_is_too_large(
    groups: Rows, max_tokens: int, num_ranks: int
) -> None:
    steps, arrays = dealt(groups, max_tokens, num_ranks)
    header, _ = batch_of(groups)
    found = [one.trajectory for step in steps for share in step for one in share]
    assert sorted(found) == [one.trajectory for one in token_ranges(header, arrays.loss_mask)]
    assert all(len(step) == num_ranks for step in steps)
    assert all(any(step) for step in steps)
    for share in (share for step in steps for share in step if len(share) > 1):
        assert tree_cost(share, arrays, COSTS)[0] <= max_tokens


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(2, 8))
def test_where_all_fit_into_one_micro_step_no_rank_is_a_sequence_above_the_mean(
    lengths: list[int], num_ranks: int
) -> None:
    """Graham's bound, for sequences that share nothing."""
    steps, arrays = dealt(random_groups([[length] for length in lengths], prompt=2), 10**9, num_ranks)
    loads = [tree_cost(share, arrays, COSTS)[1] for share in steps[0]]
    longest = max(tree_cost([one], arrays, COSTS)[1] for share in steps[0] for one in share)
    assert len(steps) == 1
    assert max(loads) <= np.mean(loads) + longest * (1 - 1 / num_ranks) + 1e-9


def test_long_sequences_are_dealt_by_what_attention_costs() -> None:
    groups = random_groups([[400]] + [[100]] * 8, prompt=2)
    for key, expected in ((0.0, [3, 6]), (0.1, [1, 8])):
        (step,), _ = dealt(groups, 10**6, 2, Costs(key, 0.0))
        assert sorted(map(len, step)) == expected


def test_a_group_that_shares_much_stays_together_and_one_that_shares_nothing_is_spread() -> None:
    shares_much = random_groups([[5] * 4, [5] * 4], prompt=300)
    ((first, second),), _ = dealt(shares_much, 10**6, 2)
    assert [{one.group for one in share} for share in (first, second)] in ([{0}, {1}], [{1}, {0}])
    ((first, second),), _ = dealt(random_groups([[300] * 4], prompt=2), 10**6, 2)
    assert len(first) == len(second) == 2


@pytest.mark.parametrize(("max_tokens", "num_steps"), [(100, 3), (250, 1)])
def test_micro_steps_are_as_few_as_first_fit_decreasing_finds(max_tokens: int, num_steps: int) -> None:
    groups = random_groups([[n] for n in (70, 60, 50, 40, 30, 20, 95, 90)], prompt=2)
    assert len(dealt(groups, max_tokens, 2)[0]) == num_steps


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_eight_ranks_wait_little_for_each_other_however_long_the_tail(sigma: float) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(30), sigma, (16, 8)), 2, 300).astype(int).tolist()
    steps, arrays = dealt(random_groups(lengths, prompt=10), 400, 8, Costs(1e-4, 0.1))
    loads = [[tree_cost(share, arrays, Costs(1e-4, 0.1))[1] for share in step] for step in steps]
    assert sum(map(sum, loads)) >= 0.9 * 8 * sum(map(max, loads))


def test_costs_are_the_operations_of_the_model() -> None:
    config = AutoConfig.for_model(**TINY_ARCHITECTURE, vocab_size=52)
    model = AutoModelForCausalLM.from_config(config)
    costs, heads = costs_of(model), config.num_attention_heads * config.head_dim
    linear = sum(weight.numel() for weight in model.model.layers.parameters() if weight.ndim > 1)
    assert costs.loss_token == pytest.approx(52 * config.hidden_size / linear)
    assert costs.key == pytest.approx(2 * config.num_hidden_layers * heads / linear)


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize("architecture", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("trains", ["all", "nothing but the embedding", "without gradient"])
def test_the_model_flops_are_those_that_torch_counts(architecture: dict[str, object], trains: str) -> None:
    """Of a plain pass: whole logits, and attention that computes all T x T scores."""
    shape = {**TINY_ARCHITECTURE, **architecture, "vocab_size": 52, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.requires_grad_(trains == "all").get_input_embeddings().requires_grad_(True)
    ids, has_backward = torch.arange(2, 32)[None], trains != "without gradient"
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(has_backward):
        logits = model(input_ids=ids).logits
        if has_backward:
            logits.sum().backward()
    size = PassSize(num_tokens=30, num_pairs=30 * 30, num_targets=30)
    expected = costs_of(model).flops(size, has_backward=has_backward)
    # Some versions of transformers make the angles of rotary embeddings by a matrix product.
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_a_pass_is_counted_as_it_is_computed_what_sequences_share_once() -> None:
    """Two rollouts of 60 tokens after a prompt of 20, the last of which is only predicted."""
    header, arrays = batch_of(random_groups([[60, 60]], prompt=20))
    (micro,) = pack(header, arrays, arrays.loss_mask, 1000, torch.device("cpu"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_ARCHITECTURE, vocab_size=52))
    packed, alone = Policy(model).size_of(micro), Policy(model, ForwardPlan(False, True)).size_of(micro)
    assert (packed.num_tokens, packed.num_pairs) == (79 + 59, 79 * 80 // 2 + 59 * 60 // 2 + 59 * 20)
    assert alone == PassSize(2 * 79, 2 * 79 * 80 // 2, 120)
    assert packed.num_targets == len({*zip(micro.predict_U.tolist(), micro.target_U.tolist(), strict=True)})
