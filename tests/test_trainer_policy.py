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
from torch.nn import functional
from trainer_cases import Rows, batch_of, naive, random_groups, trees
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.packing import MicroBatch, pack
from asyncrl.trainer.model.policy import ForwardPlan, Policy, find_plan, head_scores

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
    "llama": {},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
ALONE: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "use_mambapy": False},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 1000},
}


def make_model(kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON, **PACKED.get(kind, ALONE.get(kind, {})), **changes}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # The same weights whatever the dtype; buffers, as a rotary embedding's frequencies, stay as they are.
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
    named = model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], limit: float
) -> None:
    """Logprobs to 10 * limit, in nats; each parameter's gradient to 10 * limit, relative."""
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0, atol=10 * limit)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).norm()) <= 10 * limit * float(gradient.norm()) + 1e-9, name


@pytest.mark.parametrize("kind", PACKED)
def test_usual_architectures_run_packed_and_give_plain_gradients(kind: str) -> None:
    # the kernel of the experts knows no float64
    model = make_model(kind, torch.float32 if kind == "qwen3_moe" else torch.float64)
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
    assert_same(run(Policy(model, ForwardPlan(True, True)), groups, max_tokens), expected, 1e-6)


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
    assert policy.plan == ForwardPlan(is_packed=True, has_plain_head=True, window=32)
    for groups, result in zip((short, long), expected, strict=True):
        assert_same(run(policy, groups), result, 1e-5)


@pytest.mark.parametrize("plan", [None, ForwardPlan(False, True, reason="asked for")])
def test_gradient_checkpointing_computes_layers_twice_and_gives_the_same_gradient(
    plan: ForwardPlan | None,
) -> None:
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


# ---- the sliced head gives the logprobs, entropies and gradients of a whole log-softmax


def case(dtype: torch.dtype, *, has_bias: bool = False) -> list[Any]:
    """Hidden states, head weights, bias or None, targets, and a gradient of the logprobs."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(70, 24, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(600, 24, generator=random).to(dtype) * 0.5).requires_grad_()
    bias = torch.randn(600, generator=random).to(dtype).requires_grad_() if has_bias else None
    target = torch.randint(0, 600, (70,), generator=random)
    return [hidden, weight, bias, target, torch.randn(70, generator=random)]


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    logprob_MV = torch.log_softmax(functional.linear(hidden, weight, bias) / temperature, dim=-1)
    entropy_M = torch.special.entr(logprob_MV.exp()).sum(-1)
    return logprob_MV.gather(-1, target[:, None])[:, 0], entropy_M, logprob_MV.amax(-1)


def scores_of(function: Any, made: list[Any], temperature: float) -> list[Tensor]:
    hidden, weight, bias, target, grad = made
    scores = function(hidden, weight, bias, target, temperature)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    gradients = torch.autograd.grad(scores[0], inputs, grad.to(scores[0].dtype))
    return [*(score.detach() for score in scores), *gradients]


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 vocabulary entries, the last one shorter."""
    monkeypatch.setitem(policy_module.MOST_LOGITS, "cpu", 70 * 128)
    monkeypatch.setattr(policy_module, "MIN_SLICE", 1)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "temperature", "limit"), [(torch.float64, 0.7, 1e-10), (torch.float32, 1.0, 1e-5)]
)
def test_it_is_a_log_softmax(has_bias: bool, dtype: torch.dtype, temperature: float, limit: float) -> None:
    made = case(dtype, has_bias=has_bias)
    for found, expected in zip(
        scores_of(head_scores, made, temperature), scores_of(whole, made, temperature), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.usefixtures("slices")
def test_bfloat16_weights_lose_nothing_in_the_forward_pass() -> None:
    hidden, weight, bias, *rest = case(torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    found = scores_of(head_scores, [hidden, weight, bias, *rest], 0.8)
    expected = scores_of(whole, [*wide, bias, *rest], 0.8)
    for score, wide_score in zip(found[:3], expected[:3], strict=True):
        assert score.dtype == torch.float32
        torch.testing.assert_close(score, wide_score, rtol=2e-5, atol=2e-5)
    for gradient, wide_gradient in zip(found[3:], expected[3:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert float((gradient.float() - wide_gradient).norm() / wide_gradient.norm()) < 0.01


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[1.0], [-1.0], [0.0]]).requires_grad_()
    weight = torch.linspace(-300.0, 300.0, 601)[:, None].requires_grad_()
    made = [hidden, weight, None, torch.tensor([0, 0, 5]), torch.ones(3)]
    for found, expected in zip(scores_of(head_scores, made, 1.0), scores_of(whole, made, 1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
