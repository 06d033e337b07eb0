"""The policy gives the logprobs and gradients of one plain forward pass per sequence."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from model_zoo import FIRST_ID, make_config, random_model
from policy_cases import assert_same, run, run_plain
from tiny_model import TINY_ARCHITECTURE
from torch import Tensor
from torch.nn import functional
from trainer_cases import Rows, assert_all_close, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.models.low_rank import LowRank
from asyncrl.trainer.attention import banded_attention, tree
from asyncrl.trainer.attention.forward_plan import find_plan, probe_model
from asyncrl.trainer.loss.packing import AllowedRows, pack_texts
from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.policy import (
    BalanceLoss,
    ForwardPlan,
    HeadUse,
    HeadWeights,
    Policy,
    head_scores,
)

GROUPS = random_groups([[5, 60, 1, 9], [40], [3, 3, 30]])
COMMON: dict[str, Any] = {
    **TINY_ARCHITECTURE,
    "vocab_size": 52,
    "initializer_range": 0.1,
}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
del COMMON["model_type"], COMMON["tie_word_embeddings"]
PACKED: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "deepseek_v3": {  # queries and keys of 12, values of 8; without experts
        **{
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 9,
        },
        **{
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 8,
        },
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
ALONE: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
}


def make_model(
    kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON, **PACKED.get(kind, ALONE.get(kind, {})), **changes}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Every dtype has the same weights; buffers stay unchanged.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("kind", PACKED)
def test_usual_architectures_run_packed(kind: str) -> None:
    # the kernel of the experts knows no float64
    model = make_model(kind, torch.float32 if kind == "qwen3_moe" else torch.float64)
    expected = run_plain(model, GROUPS, 0.7)
    policy = Policy(model, find_plan(model))
    assert policy.plan.is_packed, policy.plan.reason
    assert policy.plan.has_plain_head == (kind != "gemma2")
    assert_same(run(policy, GROUPS, temperature=0.7), expected, 1e-6)


def test_soft_cap_is_found_whatever_the_logits() -> None:
    model = make_model(
        "gemma2", hidden_size=64, initializer_range=0.0, final_logit_softcapping=30.0
    )
    assert not find_plan(model).has_plain_head


@pytest.mark.parametrize("kind", ALONE)
def test_other_architectures_run_alone(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(kind)
    expected = run_plain(model, GROUPS)
    with caplog.at_level(logging.WARNING, "asyncrl.trainer"):
        policy = Policy(model, find_plan(model))
    assert not policy.plan.is_packed
    assert policy.plan.reason in caplog.text
    assert_same(run(policy, GROUPS), expected, 1e-4)


BLOCKS = st.sampled_from([0, 2, 8, banded_attention.BLOCK])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trees(), st.sampled_from([1, 40, 10**6]), st.integers(1, 3), st.booleans(), BLOCKS
)
def test_any_tree_cut_and_ranks_give_plain_gradients(
    groups: Rows, max_tokens: int, num_ranks: int, shares_all: bool, block: int
) -> None:
    """Each token has its weight in each sequence, also a shared token."""
    assume(any(any(mask) for rows in groups for _, mask in rows))
    model = make_model(dtype=torch.float64)
    expected = run_plain(model, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(banded_attention, "BLOCK", block)
        if shares_all:
            patch.setattr(tree, "MIN_SHARED_TOKENS", -math.inf)
        policy = Policy(model, ForwardPlan(True, True))
        assert_same(
            run(policy, groups, max_tokens, num_ranks=num_ranks), expected, 1e-6
        )


MANY_LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {}),
    ("gpt_oss", {}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 6},
    ),
]


@pytest.mark.parametrize(("kind", "changes"), MANY_LAYERS)
def test_small_random_model_has_the_plan_of_the_whole(
    kind: str, changes: dict[str, Any]
) -> None:
    whole = make_model(kind, **{"num_hidden_layers": 9, "vocab_size": 3000} | changes)
    state = torch.get_rng_state()
    small = probe_model(whole.config, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert small.config.num_hidden_layers == 2
    whole_plan = find_plan(whole)._replace(reason="")
    assert find_plan(small)._replace(reason="") == whole_plan


# ---- the sliced head


def whole(
    head: Sequence[Tensor | None], target_M: Tensor, is_allowed_MV: Tensor
) -> tuple[Tensor, ...]:
    """`head`: hidden states, weight, bias, and the A and B of an adapter."""
    hidden_MD, weight_VD, bias_V, lora_A, lora_B = head
    assert hidden_MD is not None
    assert weight_VD is not None
    if lora_A is not None and lora_B is not None:
        weight_VD = weight_VD + 0.5 * lora_B @ lora_A
    logits_MV = functional.linear(hidden_MD, weight_VD, bias_V) / 0.7
    logprob_MV = torch.log_softmax(
        logits_MV.masked_fill(~is_allowed_MV, -torch.inf), dim=-1
    )
    entropy_M = torch.special.entr(logprob_MV.exp()).sum(-1)
    return (
        logprob_MV.gather(-1, target_M[:, None])[:, 0],
        entropy_M,
        logprob_MV.amax(-1),
    )


@pytest.mark.parametrize(
    ("has_grammar", "has_adapter"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize(
    ("dtype", "limit", "gradient_limit"),
    [
        (torch.float64, 1e-10, 1e-10),
        (torch.float32, 1e-5, 1e-5),
        (torch.bfloat16, 2e-5, 0.01),
    ],
)
def test_sliced_head_is_a_log_softmax(
    monkeypatch: pytest.MonkeyPatch,
    has_grammar: bool,
    has_adapter: bool,
    dtype: torch.dtype,
    limit: float,
    gradient_limit: float,
) -> None:
    """In slices of 128 vocabulary entries; bfloat16 loses nothing in the forward pass
    without an adapter, whose narrow side is rounded.
    """
    if has_adapter and dtype == torch.bfloat16:
        limit = 0.05
    monkeypatch.setitem(policy_module.MOST_LOGITS, "cpu", 70 * 128)
    monkeypatch.setattr(policy_module, "MIN_SLICE", 1)
    random = torch.Generator().manual_seed(1)
    shapes = [(70, 24), (600, 24)] + [(600,)] * has_grammar
    shapes += [(3, 24), (600, 3)] * has_adapter
    narrow = [
        torch.randn(shape, generator=random).to(dtype).requires_grad_()
        for shape in shapes
    ]
    target_M, grad_M = (
        torch.randint(0, 600, (70,), generator=random),
        torch.randn(70, generator=random),
    )
    is_allowed = torch.ones(70, 600, dtype=torch.bool)
    rows = None
    if has_grammar:  # the second half of rows has one set, with nothing in some slices
        set_V = (torch.arange(600) % 7 == 0) & (torch.arange(600) < 300)
        target_M[35:] = 7 * (target_M[35:] // 14)
        is_allowed[35:] = set_V
        bits = np.packbits(set_V.numpy()[None], axis=1, bitorder="little")
        rows = AllowedRows.of(bits, np.repeat([-1, 0], 35), torch.device("cpu"))
    wide = [
        part.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for part in narrow
    ]
    found, expected = ([*some, None, None, None][:5] for some in (narrow, wide))
    hidden_MD, weight_VD, bias_V, *low_rank = found
    head = HeadWeights(hidden_MD, weight_VD, bias_V)
    if has_adapter:
        added = LowRank(*low_rank, 0.5)
        head = head._replace(narrow_MR=added.narrow(hidden_MD), up_VR=added.up)
    scores = (
        head_scores(head, target_M, HeadUse(0.7, rows))[:3],
        whole(expected, target_M, is_allowed),
    )
    assert_all_close(scores[0], scores[1], limit)
    gradients = [
        torch.autograd.grad(of_side[0], inputs, grad_M.to(of_side[0].dtype))
        for of_side, inputs in zip(scores, (narrow, wide), strict=True)
    ]
    for gradient, wide_gradient in zip(*gradients, strict=True):
        assert gradient.dtype == dtype
        assert (
            float((gradient - wide_gradient).norm() / wide_gradient.norm())
            < gradient_limit
        )


@torch.no_grad()
def own_balance(model: Any, texts: Sequence[npt.NDArray[np.int64]]) -> float:
    """Return the balance loss of transformers' forward over padded rows."""
    most = max(map(len, texts))
    ids_BT = torch.tensor([[*text, *[0] * (most - len(text))] for text in texts])
    lengths_B = torch.tensor([len(text) for text in texts])
    mask_BT = (torch.arange(most) < lengths_B[:, None]).long()
    output = model(ids_BT, attention_mask=mask_BT, output_router_logits=True)
    return float(output.aux_loss)


BALANCED = (
    "ernie4_5_moe flex_olmo gpt_oss granitemoe jamba minimax_m2 mixtral olmoe phimoe "
    "qwen2_moe qwen3_5_moe qwen3_moe qwen3_next"
).split()
UNBALANCED = ["qwen3", "deepseek_v3", "llama4_text", "doge", "granitemoehybrid dense"]


@pytest.mark.parametrize("name", BALANCED)
def test_routers_have_transformers_balance_loss(name: str) -> None:
    """Packed texts that share a beginning, and one by one if they cannot be packed."""
    model = random_model(make_config(name))
    head = np.arange(20) + FIRST_ID
    texts = [np.array([*head, *rest]) for rest in ([5, 6, 7], [9, 8, 7, 5, 6], [4])]
    plan = find_plan(probe_model(model.config, torch.device("cpu")))
    texts = texts if plan.is_packed else texts[:1]
    read = [text[:-1] for text in texts]
    expected = own_balance(model, read)
    policy = Policy(model, plan)
    policy.balance = BalanceLoss(model, "auto")
    assert policy.balance.weight == model.config.get_text_config().router_aux_loss_coef
    found = policy(pack_texts(texts, torch.device("cpu"))).balance
    assert found is not None
    assert float(found.detach()) / sum(map(len, read)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("name", UNBALANCED)
def test_balance_loss_is_off_or_refused_without_routers_that_have_one(
    name: str,
) -> None:
    model = random_model(make_config(name))
    assert BalanceLoss(model, "auto").weight == BalanceLoss(model, 0.0).weight == 0
    with pytest.raises(ConfigError, match=f"0.1 for a {type(model).__name__}"):
        BalanceLoss(model, 0.1)
