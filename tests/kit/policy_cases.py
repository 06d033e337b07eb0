"""The trainer's policy and the plain model on the same sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainer_cases import Rows, batch_of, naive

from asyncrl.trainer.loss.packing import micro_batches
from asyncrl.trainer.model.policy import (
    Policy,
)
from asyncrl.trainer.ranks.ranks import Ranks

Found = tuple[Tensor, dict[str, Tensor]]


def run(
    policy: Policy,
    groups: Rows,
    max_tokens: int = 10**6,
    temperature: float = 1.0,
    num_ranks: int = 1,
) -> Found:
    """Logprobs in the batch's order, and gradients of their sum weighted by 1, 2, 3,
    ...
    """
    header, arrays = batch_of(groups)
    policy.zero_grad()
    places = np.cumsum(arrays.is_sampled)
    found_N = torch.zeros(len(places), dtype=torch.float64)
    given = (
        header,
        arrays,
        arrays.is_sampled,
        policy.plan.rules(max_tokens),
        torch.device("cpu"),
    )
    ranks = [Ranks(rank, num_ranks) for rank in range(num_ranks)]
    for micro, counts in (
        one for rank in ranks for one in micro_batches(*given, rank, policy.costs)
    ):
        logprob_M, *_ = policy(micro, temperature)
        if not counts:
            continue
        (logprob_M * torch.from_numpy(places[micro.source_M])).sum().backward()
        found_N[micro.source_M] = logprob_M.detach().double()
    return found_N[arrays.is_sampled], gradients(policy.model)


def run_plain(model: Any, groups: Rows, temperature: float = 1.0) -> Found:
    header, arrays = batch_of(groups)
    model.zero_grad()
    logprob_M = naive(model, header, arrays, temperature)
    (logprob_M * torch.arange(1, len(logprob_M) + 1)).sum().backward()
    return logprob_M.detach(), gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: each.grad.clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def assert_same(found: Found, expected: Found, limit: float) -> None:
    """Logprobs to 10 * limit, in nats; each parameter's gradient to 10 * limit,
    relative.
    """
    torch.testing.assert_close(
        found[0].double(), expected[0].double(), rtol=0, atol=10 * limit
    )
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (
            float((found[1][name] - gradient).norm())
            <= 10 * limit * float(gradient.norm()) + 1e-9
        ), name
