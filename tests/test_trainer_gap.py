"""How far each engine is from the trainer: metrics by engine, a limit that no engine hides from, words that
name it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import changed, make_batch, make_spec, naive_logprobs

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.gap import (
    MIN_ENGINE_TOKENS,
    Gap,
    gap_advice,
    gap_metrics,
    gap_words,
    measure_gaps,
    worst_gap,
)
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]


def numbers(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_the_metrics_are_those_computed_by_hand() -> None:
    current, behaviour = numbers(-1.0, -2.0, -3.0, -4.0, -5.0), numbers(-1.5, -2.0, -2.0, -4.25, -7.0)
    gaps = measure_gaps(current, behaviour, np.array([0, 0, 2, 2, -1], np.int16))
    assert gap_metrics(gaps) == {
        "policy/logprob_gap_mean": 0.75,
        "policy/logprob_gap_max": 2.0,
        "policy/logprob_gap_mean/engine-0": 0.25,
        "policy/logprob_gap_max/engine-0": 0.5,
        "policy/logprob_gap_mean/engine-2": 0.625,
        "policy/logprob_gap_max/engine-2": 1.0,
    }


def test_one_engine_of_many_that_is_off_is_found_though_the_mean_of_all_is_small() -> None:
    gaps = [Gap(None, 1000, 0.03, 0.9), Gap(0, 900, 0.001, 0.1), Gap(1, 100, 0.29, 0.9)]
    worst = worst_gap(gaps, 0.05)
    assert worst is gaps[2]
    assert gap_words(worst, gaps) == (
        "engine-1 and trainer disagree by 0.29 nats on average on 100 fresh tokens (engine-0 by 0.001 on 900)"
    )
    assert gap_advice(worst, gaps).startswith(
        "what engine-1 alone has is its weights, its settings or its device: read its log; else check"
    )
    assert worst_gap(gaps, 0.3) is None


def test_an_engine_with_few_tokens_is_not_judged_alone_but_is_named() -> None:
    few = MIN_ENGINE_TOKENS - 1
    gaps = [Gap(None, 500 + few, 0.01, 2.0), Gap(0, 500, 0.001, 0.1), Gap(1, few, 0.08, 2.0)]
    assert worst_gap(gaps, 0.05) is None
    worst = worst_gap(gaps, 0.005)
    assert worst is gaps[0]
    assert gap_words(worst, gaps) == (
        "the engines and trainer disagree by 0.01 nats on average on 563 fresh tokens (engine-1 by 0.08 on "
        "63, engine-0 by 0.001 on 500)"
    )
    assert gap_advice(worst, gaps).startswith("check that")


def test_a_gap_that_is_not_finite_is_above_no_limit_for_its_step_is_skipped_anyway() -> None:
    assert (
        worst_gap([Gap(None, 100, float("nan"), float("nan")), Gap(0, 100, float("nan"), float("nan"))], 0.01)
        is None
    )


# ---- with a real model


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(**trainer: Any) -> TrainStep:
        return TrainStep(make_spec(tiny_model_dir, tmp_path, trainer=trainer))

    return make


def sampled_by_two(step: TrainStep, offset: float) -> tuple[BatchHeader, BatchArrays]:
    """Trajectories by engine-0 and engine-1 in turn; engine-1's logprobs are off by `offset`, those of
    engine-0 right.
    """
    header, arrays = make_batch(num_groups=6, group_size=4)
    exact = naive_logprobs(step.policy.model, header, arrays, 1.0)
    engines = np.full(len(exact), -1, np.int16)
    for index, entry in enumerate(header.trajectories):
        engines[entry.start + 5 : entry.end] = index % 2
    behaviour = np.where(arrays.loss_mask, exact - np.where(engines == 1, offset, 0), 0).astype(np.float32)
    return header, changed(arrays, behaviour_logprobs=behaviour, engines=engines)


def test_a_step_reports_the_gap_of_each_engine_with_fresh_tokens(make_step: MakeStep) -> None:
    step = make_step()
    header, arrays = sampled_by_two(step, 0.02)
    share = float((arrays.engines[arrays.loss_mask] == 1).mean())
    metrics = step.train(header, arrays)
    assert metrics["policy/logprob_gap_mean/engine-0"] < 1e-5
    assert metrics["policy/logprob_gap_max/engine-0"] < 2e-5
    assert metrics["policy/logprob_gap_mean/engine-1"] == pytest.approx(0.02, abs=1e-5)
    assert metrics["policy/logprob_gap_max/engine-1"] == pytest.approx(0.02, abs=2e-5)
    assert metrics["policy/logprob_gap_mean"] == pytest.approx(0.02 * share, abs=1e-5)
    stale = changed(
        arrays, versions=np.where(arrays.engines == 1, 0, np.where(arrays.loss_mask, 1, -1)).astype(np.int32)
    )
    again = step.train(header.model_copy(update={"version": 1, "min_version": 0}), stale)
    assert "policy/logprob_gap_mean/engine-0" in again
    assert "policy/logprob_gap_mean/engine-1" not in again, "none of its tokens is fresh"


def test_past_the_limit_the_engine_that_is_off_is_named_and_nothing_is_trained(make_step: MakeStep) -> None:
    step = make_step(logprob_gap_limit=0.15)
    before = step.weights_digest()
    header, arrays = sampled_by_two(step, 0.2)
    num_off = int((arrays.engines == 1).sum())
    assert num_off >= MIN_ENGINE_TOKENS
    with pytest.raises(Refused) as caught:
        step.train(header, arrays)
    body = caught.value.body
    assert (
        f"engine-1 and trainer disagree by 0.2 nats on average on {num_off} fresh tokens (engine-0 by "
        in body.error
    )
    assert (
        body.rule == "trainer.logprob_gap_limit=0.15, for the mean of all fresh tokens and for each engine's"
    )
    assert body.way_out.startswith("what engine-1 alone has")
    assert body.way_out.endswith("or raise trainer.logprob_gap_limit.")
    assert (step.policy_version, step.weights_digest()) == (0, before)
