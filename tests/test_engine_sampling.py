"""Draws of tokens: their distribution, their seeds and their logprobs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_servers.embedded.sampling import sample
from asyncrl_servers.engine_routes import uniform_draws


def drawn(
    logits: torch.Tensor, position: int = 0, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A token a row, of seeds 0, 1, ..."""
    num = len(logits)
    temperatures, top_ps = np.full(num, temperature, np.float32), np.full(num, top_p)
    seeds, positions = np.arange(num, dtype=np.uint64), np.full(num, position)
    return sample(logits, temperatures, top_ps, seeds, positions)[:2]


def test_draws_are_uniform_over_seeds_and_over_positions() -> None:
    many = 200_000
    by_seed = uniform_draws(np.arange(many, dtype=np.uint64), np.full(many, 5))
    by_position = uniform_draws(np.full(many, 5, dtype=np.uint64), np.arange(many))
    for draws in (by_seed, by_position):
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        counts = np.histogram(draws, bins=100, range=(0.0, 1.0))[0]
        chi_square = float(((counts - many / 100) ** 2 / (many / 100)).sum())
        assert chi_square < 162, "99 degrees of freedom: above 162 once in 20,000 fair generators"
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.012
    assert not np.array_equal(by_seed, by_position)


def test_tokens_come_as_often_as_the_tempered_distribution_says() -> None:
    many = 40_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, float("-inf"), -3.0])
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = drawn(logits.expand(many, -1), temperature=temperature)
        expected = torch.softmax(logits.double() / temperature, -1).numpy()
        shares = np.bincount(tokens, minlength=6) / many
        assert np.abs(shares - expected).max() < 0.0125, "5 standard deviations"
        assert shares[4] == 0.0
        assert np.allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


def test_top_p_keeps_the_fewest_tokens_and_renormalizes() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.3, 0.15])
    for top_p, kept in ((0.5, [1]), (0.6, [1, 2]), (0.79, [1, 2]), (0.9, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        tokens, logprobs = drawn(probabilities.log().expand(4000, -1), top_p=top_p)
        assert sorted(set(tokens.tolist())) == kept
        expected = probabilities.numpy()[tokens] / probabilities[kept].sum().item()
        assert np.allclose(np.exp(logprobs), expected, atol=1e-6)


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = drawn(logits, temperature=0.0, top_p=0.1)
    assert tokens[0] == 1
    assert np.isclose(logprobs[0], torch.log_softmax(logits, -1)[0, 1].item())


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 10_000))
def test_a_token_of_probability_zero_is_never_drawn(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, size, generator=generator) * 60
    is_out = torch.rand(64, size, generator=generator) < 0.5
    is_out[torch.arange(64), torch.randint(size, (64,), generator=generator)] = False
    tokens, logprobs = drawn(logits.masked_fill(is_out, float("-inf")), position=seed)
    assert not is_out[torch.arange(64), torch.from_numpy(tokens)].any()
    assert np.isfinite(logprobs).all()
