"""How far each engine is from the trainer: metrics by engine, and a limit that no engine hides from; learning
rates worked out by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import changed, make_batch, make_spec, naive_logprobs

from asyncrl.config import TrainerConfig
from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.policy_metrics import (
    MIN_ENGINE_TOKENS,
    Gap,
    gap_fault,
    gap_metrics,
    learning_rate_at,
    measure_gaps,
)
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]


def test_the_metrics_are_those_computed_by_hand() -> None:
    current = np.array([-1.0, -2.0, -3.0, -4.0, -5.0], np.float32)
    behaviour = np.array([-1.5, -2.0, -2.0, -4.25, -7.0], np.float32)
    assert gap_metrics(measure_gaps(current, behaviour, np.array([0, 0, 2, 2, -1], np.int16))) == {
        "policy/logprob_gap_mean": 0.75,
        "policy/logprob_gap_max": 2.0,
        "policy/logprob_gap_mean/engine-0": 0.25,
        "policy/logprob_gap_max/engine-0": 0.5,
        "policy/logprob_gap_mean/engine-2": 0.625,
        "policy/logprob_gap_max/engine-2": 1.0,
    }


FEW = MIN_ENGINE_TOKENS - 1
OFF = "engines and trainer disagree: "
NAN = float("nan")


@pytest.mark.parametrize(
    ("gaps", "limit", "fault"),
    [
        (
            [Gap(None, 1000, 0.03, 0.9), Gap(0, 900, 0.001, 0.1), Gap(1, 100, 0.29, 0.9)],
            0.05,
            OFF + "engine-1 by 0.29 nats on 100 fresh tokens",
        ),
        ([Gap(None, 1000, 0.03, 0.9), Gap(1, 100, 0.29, 0.9)], 0.3, ""),
        ([Gap(None, 500, 0.01, 2.0), Gap(1, FEW, 0.08, 2.0)], 0.05, ""),
        (
            [Gap(None, 500, 0.01, 2.0), Gap(1, FEW, 0.08, 2.0)],
            0.005,
            OFF + "all engines by 0.01 nats on 500 fresh tokens",
        ),
        ([Gap(None, 100, NAN, NAN), Gap(0, 100, NAN, NAN)], 0.01, ""),
    ],
    ids=["one of many", "none", "too few to judge", "few in the mean of all", "NaN is skipped anyway"],
)
def test_the_engine_that_is_off_is_found(gaps: list[Gap], limit: float, fault: str) -> None:
    assert gap_fault(gaps, limit) == fault


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    return lambda **trainer: TrainStep(make_spec(tiny_model_dir, tmp_path, trainer=trainer))


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
    metrics = step.train(header, arrays)
    assert metrics["policy/logprob_gap_max/engine-0"] < 2e-5
    assert metrics["policy/logprob_gap_mean/engine-1"] == pytest.approx(0.02, abs=1e-5)
    share = float((arrays.engines[arrays.loss_mask] == 1).mean())
    assert metrics["policy/logprob_gap_mean"] == pytest.approx(0.02 * share, abs=1e-5)
    versions = np.where(arrays.engines == 1, 0, np.where(arrays.loss_mask, 1, -1)).astype(np.int32)
    header = header.model_copy(update={"version": 1, "min_version": 0})
    again = step.train(header, changed(arrays, versions=versions))
    assert "policy/logprob_gap_mean/engine-0" in again
    assert "policy/logprob_gap_mean/engine-1" not in again, "none of its tokens is fresh"


def test_past_the_limit_the_engine_that_is_off_is_named_and_nothing_is_trained(make_step: MakeStep) -> None:
    step = make_step(logprob_gap_limit=0.15)
    before = step.weights_digest()
    header, arrays = sampled_by_two(step, 0.2)
    num_off = int((arrays.engines == 1).sum())
    with pytest.raises(Refused) as caught:
        step.train(header, arrays)
    assert f"engines and trainer disagree: engine-1 by 0.2 nats on {num_off} fresh" in str(caught.value)
    assert "trainer.logprob_gap_limit=0.15" in caught.value.body.rule
    assert (step.policy_version, step.weights_digest()) == (0, before)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "num_steps", "rates"),
    [
        ("constant", 4, 100, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        ("linear", 0, 4, {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0, 9: 0.0}),
        ("linear", 2, 6, {1: 1.0, 2: 1.0, 4: 0.5}),
        ("cosine", 0, 8, {0: 1.0, 2: 0.853553, 4: 0.5, 8: 0.0}),
        ("cosine", 3, 3, {0: 1 / 3, 1: 2 / 3, 2: 1.0}),
    ],
)
def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_zero_after_the_last_step(
    schedule: Any, warmup_steps: int, num_steps: int, rates: dict[int, float]
) -> None:
    config = TrainerConfig(
        learning_rate=1.0, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps
    )
    found = {step: learning_rate_at(config, step) for step in rates}
    assert found == pytest.approx(rates, abs=1e-6)
