"""What functions of the user's own may return, logprobs that are not finite, and the temperature of a real
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import make_request, running_engine
from trainer_cases import changed, make_batch, make_spec

from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, TrajectoryHeader
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]
Answer = tuple[torch.Tensor, dict[str, Any]]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    return lambda **values: TrainStep(make_spec(tiny_model_dir, tmp_path, **values))


def loss_with_statistics_a_token(current_M: torch.Tensor, *_: Any) -> Answer:
    return current_M * 1.0, {"mine": current_M.detach()}


def loss_with_words(current_M: torch.Tensor, *_: Any) -> Answer:
    return current_M * 1.0, {"mine": "high"}


@pytest.mark.parametrize("name", ["loss_with_statistics_a_token", "loss_with_words"])
def test_statistics_that_are_no_numbers_are_refused_by_the_name_of_the_loss(
    make_step: MakeStep, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss=test_trainer_objective:{name} returned") as caught:
        make_step(algorithm={"loss": f"test_trainer_objective:{name}"}).train(*make_batch())
    assert "one number each" in caught.value.rule


@pytest.mark.parametrize(
    "algorithm", [{"loss": "decoupled_ppo"}, {"loss": "tis"}, {"loss": "m2po"}, {"kl_coefficient": 0.1}]
)
def test_logprobs_that_are_nan_skip_the_step_whatever_else_is_made_of_them_and_training_goes_on_after(
    make_step: MakeStep, algorithm: dict[str, Any]
) -> None:
    step = make_step(algorithm=algorithm)
    weight = next(iter(step._masters.named.values()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight[10] = torch.nan
    metrics = step.train(*make_batch(version=0))
    assert metrics["trainer/skipped_steps"] == 1
    assert {"policy/loss", "policy/grad_norm"} <= {
        name for name, value in metrics.items() if np.isnan(value)
    }, "0.0 would be a lie"
    assert all(np.isfinite(value) for name, value in metrics.items() if not name.startswith("policy/"))
    assert (step.spec.failed_dir / "step_0.safetensors").exists()
    with torch.no_grad():
        weight.copy_(before)
    metrics = step.train(*make_batch(version=1))
    assert metrics["trainer/skipped_steps"] == 0
    assert metrics["policy/grad_norm"] > 0
    assert (step.policy_version, step.num_skipped_in_a_row) == (2, 0)
    assert not torch.equal(weight, before)


def test_a_kl_penalty_that_is_nan_is_not_blamed_on_the_advantage(make_step: MakeStep) -> None:
    step = make_step(algorithm={"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    with torch.no_grad():
        next(iter(step._masters.named.values()))[10] = torch.nan
    with pytest.raises(Refused, match="KL penalties of its rollouts"):
        step.train(*make_batch())


def sampled_batch(model_dir: Path, temperature: float) -> tuple[BatchHeader, BatchArrays]:
    """Four prompts, completed by a real engine at `temperature`: its tokens and its logprobs."""
    headers, columns = list[TrajectoryHeader](), list[tuple[int, bool, float, int]]()
    with running_engine(model_dir) as engine:
        for group in range(4):
            prompt = tuple(range(6 + group, 12 + group))
            answer = engine.submit(
                make_request(f"r{group}", prompt, seed=group, temperature=temperature)
            ).result(timeout=60)
            start = len(columns)
            columns += [(token, False, 0.0, -1) for token in prompt]
            columns += [
                (token, True, logprob, 0)
                for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            headers.append(
                TrajectoryHeader(
                    group_index=group // 2,
                    group_id=group // 2,
                    sample_index=group % 2,
                    prompt_id="p",
                    start=start,
                    end=len(columns),
                    reward=float(group % 2),
                )
            )
    token_ids, loss_mask, logprobs, versions = zip(*columns, strict=True)
    return BatchHeader(version=0, min_version=0, mask_older=False, trajectories=headers), BatchArrays(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.array(loss_mask),
        behaviour_logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
    )


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_trainers_logprobs_are_those_that_the_engine_sampled_with_at_its_temperature(
    make_step: MakeStep, tiny_model_dir: Path, temperature: float, lora: dict[str, Any] | None
) -> None:
    header, arrays = sampled_batch(tiny_model_dir, temperature)
    metrics = make_step(temperature=temperature, trainer={"lora": lora}).train(header, arrays)
    assert metrics["policy/logprob_gap_max"] < 2e-5
    assert metrics["policy/ess"] == pytest.approx(1.0)
    another = make_step(temperature=1.0, trainer={"lora": lora}).train(header, arrays)
    assert another["policy/logprob_gap_max"] > 0.05, "another temperature would be seen"


def test_a_mini_batch_that_is_masked_out_is_left_out_and_the_schedule_goes_on_all_the_same(
    make_step: MakeStep,
) -> None:
    header, arrays = make_batch(version=3, min_version=2, mask_older=True, num_groups=2)
    half = next(entry.start for entry in header.trajectories if entry.group_index == 1)
    versions = np.where(
        np.arange(len(arrays.versions)) >= half, np.minimum(arrays.versions, 0), arrays.versions
    )
    step = make_step(trainer={"mini_batches": 2, "epochs": 3, "num_steps": 10, "schedule": "linear"})
    step.policy_version, step.num_optimizer_steps = 3, 18
    metrics = step.train(header, changed(arrays, versions=versions))
    assert metrics["tokens/trained"] == arrays.loss_mask[:half].sum()
    assert metrics["trainer/optimizer_steps"] == 24
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - 22 / 60))
    assert metrics["policy/grad_norm"] > 0
