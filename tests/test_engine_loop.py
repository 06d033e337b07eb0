"""The embedded engine in process: draws, swaps, ends and crashes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_in_process import (
    answered,
    make_qwen3,
    make_request,
    make_spec,
    running_engine,
    stage_file,
)
from engine_replies import ask
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages.engine_api import CommitRequest
from asyncrl.messages.sampling import DRAW_PARAMETERS, SamplingParameters
from asyncrl.messages.tokens import SUPPORT
from asyncrl_servers.embedded.decoder import Drawn, sample
from asyncrl_servers.embedded.embedded_engine import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("loop") / "model", num_hidden_layers=2)


def test_stop_string_in_a_thought_does_not_end_it(tiny_model_dir: Path) -> None:
    with running_engine(tiny_model_dir) as engine:
        tokenizer = engine.runner.loaded.tokenizer
        assert tokenizer is not None
        whole = answered(engine, max_tokens=60, seed=3)
        text = tokenizer.decode(whole.token_ids)
        closing = "<|assistant|>"
        end = text.index(closing) + len(closing)
        stop = next(letter for letter in text[end:] if letter in text[:end])
        asked = {"seed": 3, "stop": (stop,), "thinking": ("", closing)}
        stopped = answered(engine, max_tokens=60, **asked)
        assert tokenizer.decode(stopped.token_ids) == text[: text.index(stop, end) + 1]
        for cut in (5, len(stopped.token_ids) - 1):
            prompt = (1, 2, 3, *whole.token_ids[:cut])
            rest = answered(
                engine, prompt_ids=prompt, num_resumed=cut, max_tokens=60 - cut, **asked
            )
            assert (rest.token_ids, rest.finish_reason) == (
                stopped.token_ids[cut:],
                "stop",
            )
        no_thought = answered(
            engine, max_tokens=60, **asked | {"thinking": ("<think>", "</think>")}
        )
        assert tokenizer.decode(no_thought.token_ids) == text[: text.index(stop) + 1]


def test_nonfinite_weights_end_the_engine(folder: Path, tmp_path: Path) -> None:
    crashes: list[BaseException] = []
    engine = build_engine(make_spec(folder, slots=1), crashes.append)
    broken = {
        name: torch.full_like(one, torch.nan)
        for name, one in engine.weights._parameters.items()
    }
    staged = engine.weights.prepare(stage_file(broken, 1, tmp_path))
    (future,) = ask(engine, [make_request(max_tokens=200)])
    engine.commit(CommitRequest(version=1, digest=staged.digest, interrupt="keep"))
    engine.start()
    engine._thread.join()
    assert isinstance(crashes[0], FloatingPointError)
    assert "policy_version 1" in str(crashes[0])
    assert not future.done(), (
        "the process ends with on_crash: nothing is answered from broken weights"
    )


def draw(
    logits: torch.Tensor,
    position: int = 0,
    **parameters: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A token a row, of seeds 0, 1, ..."""
    return drawn_by(logits, position, **parameters)[:2]


def drawn_by(logits: torch.Tensor, position: int = 0, **parameters: Any) -> Drawn:
    values = SamplingParameters(**parameters).draw
    sampling = np.array(
        [values] * len(logits), [(name, float) for name in DRAW_PARAMETERS]
    )
    seeds, positions = (
        np.arange(len(logits), dtype=np.uint64),
        np.full(len(logits), position),
    )
    return sample(logits, sampling, seeds, positions)


def test_tokens_come_as_often_as_the_tempered_distribution_says() -> None:
    many = 40_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, float("-inf"), -3.0])
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = draw(logits.expand(many, -1), temperature=temperature)
        expected = torch.softmax(logits.double() / temperature, -1).numpy()
        shares = np.bincount(tokens, minlength=6) / many
        assert np.abs(shares - expected).max() < 0.0125, "5 standard deviations"
        assert shares[4] == 0.0
        assert np.allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


CUTS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "top_p": st.sampled_from([0.01, 0.5, 0.8, 0.95, 1.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 299, 300, 5000]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    },
)


def kept_by(
    logits_V: torch.Tensor, parameters: dict[str, float], slack: float
) -> set[int]:
    """The ids that vLLM's filters keep, one after the other, with ties at the end of
    each; of limits that rounding moves by `slack`.
    """
    asked = SamplingParameters(**parameters)  # type: ignore[arg-type]
    logits = (logits_V / asked.temperature).tolist()
    kept = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = [
        token
        for token in kept
        if math.exp(logits[token] - logits[kept[0]])
        >= min(1.0, asked.min_p * (1 - slack))
    ]
    if asked.top_k:
        last = logits[kept[min(asked.top_k, len(kept)) - 1]]
        kept = [token for token in kept if logits[token] >= last]
    total = sum(math.exp(logits[token]) for token in kept)
    before, nucleus = 0.0, list[int]()
    for token in kept:
        is_tie = bool(nucleus) and logits[token] == logits[nucleus[-1]]
        if before < asked.top_p + slack or asked.top_p == 1 or is_tie:
            nucleus.append(token)
        before += math.exp(logits[token]) / total
    return set(nucleus)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([3, 300, 1300]),
    st.integers(0, 10**6),
    st.booleans(),
    st.lists(CUTS, min_size=1, max_size=4),
)
def test_support_is_the_set_that_is_sampled_from(
    size: int, seed: int, has_ties: bool, rows: list[dict[str, float]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), size, generator=generator) * 3
    if has_ties:
        logits = logits.round()
    for row, parameters in enumerate(rows):
        alone = drawn_by(logits[row : row + 1].repeat(50, 1), **parameters)
        asked = SamplingParameters(**parameters)  # type: ignore[arg-type]
        assert set(alone.lists[SUPPORT]) == (set(range(50)) if asked.is_cut else set())
        support = alone.lists[SUPPORT].get(0, np.zeros(0, np.int32)).tolist()
        kept = support or [*range(size)]
        least, most = (
            kept_by(logits[row], parameters, slack) for slack in (-1e-6, 1e-6)
        )
        assert least <= set(kept) <= most
        assert set(alone.ids.tolist()) <= set(kept)
        whole = torch.log_softmax(
            (logits[row, kept] / asked.temperature).double(), -1
        ).tolist()
        of_token = dict(zip(kept, whole, strict=True))
        wanted = [of_token[token] for token in alone.ids.tolist()]
        assert np.abs(alone.logprobs - wanted).max() < 5e-6


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.lists(CUTS, min_size=2, max_size=4))
def test_rows_are_cut_as_if_they_were_alone(
    seed: int, rows: list[dict[str, Any]]
) -> None:
    """Also if another row needs more than the MOST_LIKELY logits."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([[0.01], [4.0], [1.0], [2.0]])
    logits = torch.randn(4, 3000, generator=generator) * spread
    logits = logits[: len(rows)]
    sampling = np.array(
        [SamplingParameters(**one).draw for one in rows],
        [(name, float) for name in DRAW_PARAMETERS],
    )
    seeds, positions = np.arange(len(rows), dtype=np.uint64), np.arange(len(rows))
    together = sample(logits, sampling, seeds, positions)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone = sample(logits[one], sampling[one], seeds[one], positions[one])
        assert alone.ids[0] == together.ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert (row in together.lists[SUPPORT]) == (0 in alone.lists[SUPPORT])
        if row in together.lists[SUPPORT]:
            assert np.array_equal(alone.lists[SUPPORT][0], together.lists[SUPPORT][row])


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]])
    for cut in (
        {"top_k": 2},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 3, "top_p": 0.9},
    ):
        assert drawn_by(logits, **cut).lists[SUPPORT][0].tolist() == [0, 1, 2, 3]
    one = drawn_by(logits, top_k=1)
    assert (one.lists[SUPPORT][0].tolist(), one.logprobs[0]) == ([1], 0.0)
    # More than there are is all.
    assert drawn_by(logits, top_k=6).lists[SUPPORT][0].tolist() == []
    assert drawn_by(logits, temperature=0.0, top_k=2).lists[SUPPORT] == {}


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 10_000))
def test_a_token_of_probability_zero_is_never_drawn(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, size, generator=generator) * 60
    is_out = torch.rand(64, size, generator=generator) < 0.5
    is_out[torch.arange(64), torch.randint(size, (64,), generator=generator)] = False
    tokens, logprobs = draw(logits.masked_fill(is_out, float("-inf")), position=seed)
    assert not is_out[torch.arange(64), torch.from_numpy(tokens)].any()
    assert np.isfinite(logprobs).all()
