"""Aggregation, KL and the length penalty against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_cases import Case, for_any_case, numbered, tokens

from asyncrl.algorithms.advantages import overlong_penalty
from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.losses import kl

AGGREGATES = ["token", "sequence", "constant"]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", (1 + 2 + 3 + 10) / 4),
        ("sequence", ((1 + 2 + 3) / 3 + 10) / 2),
        ("constant", (1 + 2 + 3 + 10) / (2 * 8)),
    ],
)
def test_the_sum_of_weighted_losses_is_the_mean_that_the_name_says(aggregate: str, expected: float) -> None:
    weight_S = token_weights(
        aggregate, torch.tensor([3, 1]), num_sequences=2, num_loss_tokens=4, max_tokens=8
    )
    assert weight_S.dtype == torch.float32
    assert (tokens(1, 2, 3, 10) * weight_S[numbered(3, 1)]).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@for_any_case(min_sequences=2)
def test_micro_batches_of_whole_sequences_add_up_to_the_loss_of_all(aggregate: str, case: Case) -> None:
    count, num_tokens = case.num_sequences, len(case.sequence_M)

    def loss(part: Case) -> float:
        weight_S = token_weights(aggregate, torch.bincount(part.sequence_M), count, num_tokens, 8)
        return (part.current_M * weight_S[part.sequence_M]).double().sum().item()

    parts = [case.part(index, index + 1) for index in range(count)]
    assert sum(loss(part) for part in parts) == pytest.approx(loss(case), abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [math.log(2), -math.log(2)], [1, 1]),
        ("k2", [math.log(2) ** 2 / 2] * 2, [math.log(2), -math.log(2)]),
        ("k3", [0.5 + math.log(2) - 1, 2 - math.log(2) - 1], [0.5, -1]),
    ],
)
def test_the_kl_estimators_where_the_current_policy_is_twice_and_half_as_sure(
    estimator: str, values: list[float], gradients: list[float]
) -> None:
    current_M, reference_M = (
        tokens(-1, -1).requires_grad_(),
        tokens(-1 - math.log(2), -1 + math.log(2)).requires_grad_(),
    )
    kl_M = kl(current_M, reference_M, estimator)
    torch.testing.assert_close(kl_M.detach(), tokens(*values))
    kl_M.sum().backward()
    torch.testing.assert_close(current_M.grad, tokens(*gradients))
    assert reference_M.grad is None


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    """Over all tokens of a vocabulary, each as often as it is sampled: the claim in the docstring."""
    logits_V, reference_V = tokens(1, 0.5, -1).requires_grad_(), tokens(0, 1, 0).log_softmax(0)
    logprob_V = logits_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad(
        (logprob_V.exp() * (logprob_V - reference_V)).sum(), logits_V, retain_graph=True
    )
    (gradient_V,) = torch.autograd.grad(
        (logprob_V.exp().detach() * kl(logprob_V, reference_V, "k2")).sum(), logits_V
    )
    torch.testing.assert_close(gradient_V, exact_V)
    logprob_V = logits_V.log_softmax(0)
    (nothing_V,) = torch.autograd.grad(
        (logprob_V.exp().detach() * kl(logprob_V, reference_V, "k1")).sum(), logits_V
    )
    torch.testing.assert_close(nothing_V, torch.zeros(3))


def test_a_kl_beyond_float32_stays_finite() -> None:
    current_M = tokens(-1000).requires_grad_()
    kl(current_M, tokens(-0.1), "k3").sum().backward()
    assert current_M.grad is not None
    assert torch.isfinite(current_M.grad).all()


@pytest.mark.parametrize("length", [0, 100, 500])
def test_the_length_penalty_is_off_at_zero(length: int) -> None:
    assert overlong_penalty(torch.tensor([length]), max_tokens=100, overlong_tokens=0).tolist() == [0.0]


def test_a_length_penalty_longer_than_the_completion_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_tokens=101 must be from 0 to max_tokens=100"):
        overlong_penalty(torch.tensor([1]), max_tokens=100, overlong_tokens=101)
