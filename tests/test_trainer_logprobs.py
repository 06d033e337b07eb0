"""The chunked head gives the logprobs, entropies and gradients of a whole log-softmax, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.trainer.model import policy as logprobs
from asyncrl.trainer.model.policy import head_logprobs, highest_logprob


def case(
    dtype: torch.dtype, *, tokens: int = 70, vocab: int = 600, width: int = 24, has_bias: bool = False
) -> list[Tensor | None]:
    """Hidden states, head weights, bias or None, targets, and a gradient of the logprobs."""
    random = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(tokens, width, generator=random).to(dtype),
        torch.randn(vocab, width, generator=random).to(dtype) * 0.5,
    )
    bias = torch.randn(vocab, generator=random).to(dtype).requires_grad_() if has_bias else None
    target = torch.randint(0, vocab, (tokens,), generator=random)
    return [
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias,
        target,
        torch.randn(tokens, generator=random),
    ]


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprob_MV = torch.log_softmax(functional.linear(hidden, weight, bias) / temperature, dim=-1)
    return logprob_MV.gather(-1, target[:, None])[:, 0], torch.special.entr(logprob_MV.exp()).sum(-1)


def results(function: Any, made: list[Any], temperature: float = 0.8) -> list[Tensor]:
    hidden, weight, bias, target, grad = made
    logprob, entropy = function(hidden, weight, bias, target, temperature)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    return [logprob.detach(), entropy.detach(), *torch.autograd.grad(logprob, inputs, grad.to(logprob.dtype))]


@pytest.fixture(params=["all kept", "some kept", "none kept"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 128 vocabulary entries, the last one shorter, with exponentials kept or computed again."""
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cpu", 70 * 128)
    monkeypatch.setattr(logprobs, "MIN_CHUNK", 1)
    monkeypatch.setattr(
        logprobs,
        "SAVED_BYTES",
        {"all kept": 2**30, "some kept": 70 * 128 * 8 * 2, "none kept": 0}[request.param],
    )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_it_is_a_log_softmax(has_bias: bool, temperature: float) -> None:
    made = case(torch.float64, has_bias=has_bias)
    for found, expected in zip(
        results(head_logprobs, made, temperature), results(whole, made, temperature), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_highest_logprob_is_that_of_the_whole_softmax(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cpu", 128)
    hidden, weight, bias, *_ = case(dtype, has_bias=has_bias)
    assert hidden is not None
    assert weight is not None
    for hidden_D in hidden[:5]:
        found = highest_logprob(hidden_D, weight, bias)
        logits_V = functional.linear(
            hidden_D.double(), weight.double(), None if bias is None else bias.double()
        )
        expected, entry = torch.log_softmax(logits_V, -1).max(0)
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5
        )
        of_the_head, _ = head_logprobs(hidden_D[None], weight, bias, entry[None], 1.0)
        torch.testing.assert_close(
            found, of_the_head[0], rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5
        )
        assert not found.requires_grad


@pytest.mark.usefixtures("chunks")
def test_float32_logprobs_agree_to_one_in_a_hundred_thousand() -> None:
    made = case(torch.float32)
    for found, expected in zip(results(head_logprobs, made), results(whole, made), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("chunks")
def test_bfloat16_weights_lose_nothing_in_the_forward_pass() -> None:
    made = case(torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in made[:2] if tensor is not None] + [
        None,
        *made[3:],
    ]
    found, expected = results(head_logprobs, made), results(whole, wide)
    for index in (0, 1):
        assert found[index].dtype == torch.float32
        torch.testing.assert_close(found[index], expected[index], rtol=2e-5, atol=2e-5)
    for index in (2, 3):
        assert found[index].dtype == torch.bfloat16
        assert float((found[index].float() - expected[index]).norm() / expected[index].norm()) < 0.01


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[1.0], [-1.0], [0.0]]).requires_grad_()
    weight = torch.linspace(-300.0, 300.0, 601)[:, None].requires_grad_()
    made = [hidden, weight, None, torch.tensor([0, 0, 5]), torch.ones(3)]
    for found, expected in zip(results(head_logprobs, made, 1.0), results(whole, made, 1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


PEAK = """
import sys, torch
from asyncrl.trainer import logprobs
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
logprobs.SAVED_BYTES //= 16
tokens, vocab, width = 32768 // 4, 151936 // 4, 128
hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
weight = torch.randn(vocab, width).bfloat16().requires_grad_()
torch.mm(hidden.detach()[:64], weight.detach()[:64].t())
before = peak()
logprob, _ = logprobs.head_logprobs(hidden, weight, None, torch.randint(0, vocab, (tokens,)), 1.0)
logprob.sum().backward()
print(peak() - before)
"""
