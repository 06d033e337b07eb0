"""The sliced head gives the logprobs, entropies and gradients of a whole log-softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.trainer.model import policy
from asyncrl.trainer.model.policy import head_scores


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


def results(function: Any, made: list[Any], temperature: float) -> list[Tensor]:
    hidden, weight, bias, target, grad = made
    scores = function(hidden, weight, bias, target, temperature)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    gradients = torch.autograd.grad(scores[0], inputs, grad.to(scores[0].dtype))
    return [*(score.detach() for score in scores), *gradients]


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 vocabulary entries, the last one shorter."""
    monkeypatch.setitem(policy.MOST_LOGITS, "cpu", 70 * 128)
    monkeypatch.setattr(policy, "MIN_SLICE", 1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "temperature", "limit"), [(torch.float64, 0.7, 1e-10), (torch.float32, 1.0, 1e-5)]
)
def test_it_is_a_log_softmax(has_bias: bool, dtype: torch.dtype, temperature: float, limit: float) -> None:
    made = case(dtype, has_bias=has_bias)
    for found, expected in zip(
        results(head_scores, made, temperature), results(whole, made, temperature), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def test_bfloat16_weights_lose_nothing_in_the_forward_pass() -> None:
    hidden, weight, bias, *rest = case(torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    found = results(head_scores, [hidden, weight, bias, *rest], 0.8)
    expected = results(whole, [*wide, bias, *rest], 0.8)
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
    for found, expected in zip(results(head_scores, made, 1.0), results(whole, made, 1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
