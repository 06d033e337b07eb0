"""Learning rates worked out by hand."""

from __future__ import annotations

import pytest

from asyncrl.config import TrainerConfig
from asyncrl.trainer.learner import learning_rate_at


def rates(schedule: str, warmup_steps: int, num_steps: int, steps: list[int]) -> list[float]:
    config = TrainerConfig.model_validate(
        {"learning_rate": 1.0, "schedule": schedule, "warmup_steps": warmup_steps, "num_steps": num_steps}
    )
    return [learning_rate_at(config, step) for step in steps]


def test_warm_up_rises_linearly_to_the_peak_in_its_last_step() -> None:
    assert rates("constant", 4, 100, [0, 1, 2, 3, 4, 99]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_one_step_after_the_last() -> None:
    assert rates("linear", 0, 4, [0, 1, 2, 3, 4, 9]) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates("linear", 2, 6, [1, 2, 4]) == [1.0, 1.0, 0.5]


def test_cosine_is_half_way_down_at_half_time() -> None:
    assert rates("cosine", 0, 8, [0, 4, 8]) == pytest.approx([1.0, 0.5, 0.0])
    assert rates("cosine", 0, 8, [2])[0] == pytest.approx(0.853553, abs=1e-6)


def test_a_warm_up_as_long_as_the_run_is_no_division_by_zero() -> None:
    assert rates("cosine", 3, 3, [0, 1, 2]) == pytest.approx([1 / 3, 2 / 3, 1.0])
