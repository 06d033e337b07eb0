"""The policy gives the logprobs and gradients of one plain forward pass a sequence, with any model and any
cut.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import Rows, batch_of, naive, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.packing import MicroBatch, pack
from asyncrl.trainer.model.policy import Plan, Policy, find_plan

GROUPS = random_groups([[5, 60, 1, 9], [40], [3, 3, 30]])
COMMON = {
    "vocab_size": 52,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PACKED: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 1000,
    },
    "olmo2": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
ALONE: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "use_mambapy": False},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 1000},
}


def make_model(kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON, **PACKED.get(kind, ALONE.get(kind, {})), **changes}
    # The same weights whatever the dtype; buffers, such as a rotary embedding's frequencies, stay as they are
    # made.
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings), dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def run(
    policy: Policy, groups: Rows, max_tokens: int = 10**6, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs in the batch's order, and gradients of their sum weighted by 1, 2, 3, ...: one backward pass a
    micro-batch.
    """
    header, arrays = batch_of(groups)
    policy.zero_grad()
    places = np.cumsum(arrays.loss_mask)
    found = []
    for micro in pack(header, arrays, arrays.loss_mask, max_tokens, torch.device("cpu")):
        logprob_M, *_ = policy(micro, temperature)
        (logprob_M * torch.from_numpy(places[micro.source_M])).sum().backward()
        found.append(logprob_M.detach())
    return torch.cat(found), gradients(policy.model)


def run_plain(model: Any, groups: Rows, temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    header, arrays = batch_of(groups)
    model.zero_grad()
    logprob_M = naive(model, header, arrays, temperature)
    (logprob_M * torch.arange(1, len(logprob_M) + 1)).sum().backward()
    return logprob_M.detach(), gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], limit: float
) -> None:
    """Logprobs to 10 * limit, in nats; the whole gradient to `limit`, relative, and each parameter's to 10 *
    limit.
    """
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0, atol=10 * limit)
    assert found[1].keys() == expected[1].keys()
    distance = size = 0.0
    for name, gradient in expected[1].items():
        one, whole = float((found[1][name] - gradient).norm()), float(gradient.norm())
        assert one <= 10 * limit * whole + 1e-9, name
        distance, size = distance + one**2, size + whole**2
    assert distance**0.5 <= limit * size**0.5


@pytest.mark.parametrize("kind", PACKED)
def test_usual_architectures_run_packed_and_give_plain_gradients(kind: str) -> None:
    model = make_model(
        kind, torch.float32 if kind == "qwen3_moe" else torch.float64
    )  # its experts' kernel knows no float64
    expected = run_plain(model, GROUPS, 0.7)
    policy = Policy(model)
    assert policy.plan.is_packed, policy.plan.reason
    assert policy.plan.has_plain_head == (kind not in {"gemma2", "granite"})
    assert_same(run(policy, GROUPS, temperature=0.7), expected, 1e-6)


@pytest.mark.parametrize(
    ("kind", "cap"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("recurrent_gemma", {"logits_soft_cap": 30.0, "lru_width": 64, "num_hidden_layers": 3}),
    ],
)
def test_a_soft_cap_that_small_logits_do_not_feel_is_found_and_computed_once_they_have_grown(
    kind: str, cap: dict[str, Any]
) -> None:
    model = make_model(kind, hidden_size=64, initializer_range=0.0, **cap)
    policy = Policy(model)
    assert not policy.plan.has_plain_head
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.4)
    assert_same(run(policy, GROUPS), run_plain(model, GROUPS), 1e-4)


@pytest.mark.parametrize("kind", ALONE)
def test_others_are_found_out_told_in_the_log_and_run_alone(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(kind)
    expected = run_plain(model, GROUPS)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, "asyncrl.trainer"):
        policy = Policy(model)
    assert not policy.plan.is_packed
    assert policy.plan.reason in caplog.text
    assert model.config._attn_implementation == before
    assert_same(run(policy, GROUPS), expected, 1e-4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.sampled_from([1, 40, 10**6]))
def test_any_tree_and_any_cut_give_plain_gradients(groups: Rows, max_tokens: int) -> None:
    if not any(any(mask) for rows in groups for _, mask in rows):
        return
    model = make_model(dtype=torch.float64)
    expected = run_plain(model, groups)
    assert_same(run(Policy(model, Plan(True, True)), groups, max_tokens), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_whose_sequences_are_all_the_same_has_no_own_tokens_and_still_trains(
    dtype: torch.dtype,
) -> None:
    (row,) = random_groups([[6]])[0]
    header, arrays = batch_of([[row] * 4, [row]])
    policy = Policy(make_model().to(dtype))
    (micro,) = pack(header, arrays, arrays.loss_mask, 1000, torch.device("cpu"))
    logprob_M = policy(micro).logprob_M
    logprob_M.sum().backward()
    assert torch.equal(logprob_M[:24], logprob_M[24:].repeat(4))


def test_a_window_shorter_than_a_sequence_makes_its_micro_batch_run_alone() -> None:
    model = make_model("mistral", sliding_window=32)
    short, long = random_groups([[5, 9]], prompt=20), random_groups([[5, 60]], prompt=20)
    expected = [run_plain(model, groups) for groups in (short, long)]
    policy = Policy(model)
    assert policy.plan == Plan(is_packed=True, has_plain_head=True, window=32)
    for groups, result in zip((short, long), expected, strict=True):
        assert_same(run(policy, groups), result, 1e-5)


@pytest.mark.parametrize("plan", [None, Plan(False, True, reason="asked for")])
def test_gradient_checkpointing_computes_layers_twice_and_gives_the_same_gradient(plan: Plan | None) -> None:
    policy = Policy(make_model(), plan)
    expected = run(policy, GROUPS)
    calls: list[int] = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    run(policy, random_groups([[5]]))
    num_plain = len(calls)
    policy.enable_gradient_checkpointing()
    assert_same(run(policy, GROUPS), expected, 1e-7)
    calls.clear()
    run(policy, random_groups([[5]]))
    assert len(calls) == 2 * num_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_check_sees_a_model_whose_sequences_see_each_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that takes packed tokens for one long sequence is the mistake that it is there for."""
    real = policy_module.packed_inputs

    def without_layout(micro: MicroBatch) -> dict[str, Any]:
        mask = torch.zeros(2 * (micro.layout.num_tokens,)).fill_(-torch.inf).triu_(1).to(dtype)
        return {**real(micro), "packed_layout": None, "attention_mask": mask[None, None]}

    monkeypatch.setattr(policy_module, "packed_inputs", without_layout)
    plan = find_plan(make_model(dtype=dtype))
    assert not plan.is_packed
    assert "away from the plain ones" in plan.reason
