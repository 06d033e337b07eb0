"""One optimizer step: the same bits, and no change by a refused batch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import (
    MakeStep,
    changed,
    make_batch,
    naive_logprobs,
    weights_digest,
)

from asyncrl.algorithms.losses import LossTokens
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.config import TrainerConfig
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.loss.objective import BatchNumbers
from asyncrl.trainer.ranks.optimizer import learning_rate_at
from asyncrl.trainer.ranks.rank import TrainerRank

Answer = tuple[torch.Tensor, dict[str, Any]]


def weights(step: TrainerRank) -> dict[str, torch.Tensor]:
    return {
        name: master.detach().clone() for name, master in step.masters.named.items()
    }


def gradients(step: TrainerRank) -> list[torch.Tensor]:
    found = [master.grad for master in step.masters.named.values()]
    return [gradient.clone() for gradient in found if gradient is not None]


def logprobs(step: TrainerRank, header: BatchHeader, arrays: Tokens) -> np.ndarray:
    """Return float32 [N] by the step's present weights, 0 without loss."""
    return step._forward(step.policy, BatchNumbers(header, arrays, arrays.is_sampled))[
        0
    ]


def test_masked_old_tokens_stay_as_context_alone(make_step: MakeStep) -> None:
    header, arrays = make_batch(version=0)
    old = arrays.is_sampled & (np.arange(len(arrays.is_sampled)) % 3 == 0)
    aged = changed(
        arrays,
        versions=np.where(old, 4, np.where(arrays.is_sampled, 5, -1)).astype(np.int32),
    )
    by_age, by_hand = make_step(), make_step()
    by_age.policy_version = by_hand.policy_version = 5
    before = weights_digest(by_hand)
    header = header.model_copy(
        update={"version": 5, "min_version": 5, "mask_older": True}
    )
    with pytest.raises(Refused, match="was sampled at version 4"):
        by_hand.train(header.model_copy(update={"mask_older": False}), aged)
    assert (by_hand.policy_version, weights_digest(by_hand)) == (5, before)
    noise = np.where(old, -1.0, arrays.behaviour_logprobs).astype(np.float32)
    metrics = by_age.train(header, changed(aged, behaviour_logprobs=noise))
    by_hand.train(header, changed(aged, versions=np.where(old, -1, aged.versions)))
    assert weights_digest(by_age) == weights_digest(by_hand)
    assert metrics["sample/masked_fraction"] == pytest.approx(
        old.sum() / arrays.is_sampled.sum()
    )
    assert metrics["tokens/trained"] == (arrays.is_sampled & ~old).sum()


def infinite_loss(tokens: LossTokens, _: Any) -> Answer:
    return tokens.current_M * torch.inf, {}


def nan_gradient(tokens: LossTokens, _: Any) -> Answer:
    return (tokens.current_M - tokens.current_M.detach()).abs().sqrt(), {}


def mean_loss(tokens: LossTokens, _: Any) -> Answer:
    return tokens.current_M.mean(), {}


@pytest.mark.parametrize("loss", ["infinite_loss", "nan_gradient"])
def test_third_skipped_step_in_a_row_is_refused(
    make_step: MakeStep, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(algorithm={"loss": f"test_trainer_step:{loss}"})
    before = weights_digest(step)
    for version in range(2):
        metrics = step.train(*make_batch(version=version))
        assert metrics["trainer/skipped_steps"] == 1
        assert np.isnan([metrics["policy/loss"], metrics["policy/grad_norm"]]).all()
        assert f"step {version + 1} (groups 10, 11): step skipped, loss" in caplog.text
    lines = step.spec.record_path.read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [None, None]
    with pytest.raises(
        Refused, match=r"step 3 \(groups 10, 11\) gave .* stays 2"
    ) as caught:
        step.train(*make_batch(version=2))
    assert "after 3 skipped steps in a row" in caught.value.body.rule
    assert weights_digest(step) == before
    assert all(weight.grad is None for weight in step.masters.named.values())


def test_refused_loss_of_the_user_changes_nothing(make_step: MakeStep) -> None:
    step = make_step(algorithm={"loss": "test_trainer_step:mean_loss"})
    before = weights_digest(step)
    with pytest.raises(
        ConfigError, match="algorithm.loss=test_trainer_step:mean_loss returned"
    ):
        step.train(*make_batch())
    assert (step.policy_version, weights_digest(step)) == (0, before)
    assert not step.spec.record_path.exists()


@pytest.mark.parametrize("algorithm", [{"loss": "m2po"}, {"kl_coefficient": 0.1}])
def test_nan_logprobs_skip_the_step_and_training_continues(
    make_step: MakeStep, algorithm: Any
) -> None:
    step = make_step(algorithm=algorithm)
    weight = next(iter(step.masters.named.values()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight[10] = torch.nan
    metrics = step.train(*make_batch(version=0))
    assert metrics["trainer/skipped_steps"] == 1
    not_finite = {name for name, value in metrics.items() if not np.isfinite(value)}
    assert {"policy/loss", "policy/grad_norm"} <= not_finite, "0.0 would be a lie"
    with torch.no_grad():
        weight.copy_(before)
    metrics = step.train(*make_batch(version=1))
    assert metrics["trainer/skipped_steps"] == 0
    assert (step.policy_version, step.skipped_in_a_row) == (2, {})
    assert not torch.equal(weight, before)


def test_record_says_which_tokens_carried_loss_at_which_version(
    make_step: MakeStep,
) -> None:
    step = make_step()
    header, arrays = make_batch(version=0)
    first = header.trajectories[0]
    versions = np.where(arrays.is_sampled, 6, -1).astype(np.int32)
    versions[first.start + 5] = 3
    versions[first.start + 6 : first.start + 8] = 5
    step.policy_version = 6
    header = header.model_copy(
        update={"version": 6, "min_version": 5, "mask_older": True}
    )
    metrics = step.train(header, changed(arrays, versions=versions))
    line = json.loads(step.spec.record_path.read_text())
    assert (line["version"], line["min_version"], line["loss"]) == (
        6,
        5,
        metrics["policy/loss"],
    )
    length = first.end - first.start
    same = first.model_dump(
        include={"group_id", "prompt_id", "sample_index", "branch", "reward"}
    )
    assert line["trajectories"][0] == same | {
        "num_tokens": length,
        "num_sampled": int(arrays.is_sampled[: first.end].sum()),
        "num_loss_tokens": length - 6,
        "tokens_sha": hashlib.sha256(arrays.ids[: first.end].tobytes()).hexdigest()[
            :16
        ],
        "spans": [[6, 8, 5], [8, length, 6]],
    }


def test_bfloat16_trains_float32_masters_that_the_model_rounds(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step(dtype="bfloat16", trainer={"learning_rate": 1e-6})
    header, arrays = make_batch()
    exact = logprobs(make_step(), header, arrays)
    before = weights(step)
    metrics = step.train(header, changed(arrays, behaviour_logprobs=exact))
    assert 0 < metrics["policy/logprob_gap_mean"] < 0.1
    changes = [
        (weight - before[name]).abs().max().item()
        for name, weight in weights(step).items()
    ]
    assert max(changes) < 2e-6, "a step of 1e-6 would be lost or far larger in bfloat16"
    assert min(changes) > 0
    for name, parameter in step.policy.model.named_parameters():
        assert torch.equal(parameter, weights(step)[name].bfloat16())
    num_parameters = sum(
        parameter.numel() for parameter in step.policy.model.parameters()
    )
    assert (
        step.begin_export(tmp_path / "w.safetensors")().num_bytes == 2 * num_parameters
    )


@pytest.mark.gpu
def test_cuda_in_bfloat16_agrees_with_the_cpu(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=4, group_size=8)
    exact = logprobs(make_step(), header, arrays)
    step = make_step(device="cuda")
    assert step.dtype == torch.bfloat16
    metrics = step.train(header, changed(arrays, behaviour_logprobs=exact))
    assert metrics["policy/logprob_gap_mean"] < 0.1


def test_many_optimizer_steps_make_one_version(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=4)
    exact = changed(arrays, behaviour_logprobs=logprobs(make_step(), header, arrays))
    loop = {"mini_batches": 2, "epochs": 2, "schedule": "linear", "num_steps": 10}
    step = make_step(trainer=loop, algorithm={"loss": "decoupled_ppo"})
    metrics = step.train(header, exact)
    assert step.policy_version == 1
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - 3 / 40))
    assert metrics["policy/clip_fraction"] > 0, (
        "with so high a learning rate the later steps leave the range"
    )
    assert metrics["policy/logprob_gap_max"] < 2e-5, (
        "measured only before the first step"
    )
    assert len(step.spec.record_path.read_text().splitlines()) == 1


def test_masked_out_mini_batch_keeps_the_schedule(make_step: MakeStep) -> None:
    header, arrays = make_batch(version=3, min_version=2, mask_older=True, num_groups=2)
    half = next(entry.start for entry in header.trajectories if entry.group_index == 1)
    is_late = np.arange(len(arrays.versions)) >= half
    versions = np.where(is_late, np.minimum(arrays.versions, 0), arrays.versions)
    step = make_step(
        trainer={"mini_batches": 2, "epochs": 3, "num_steps": 10, "schedule": "linear"}
    )
    step.policy_version = 3
    metrics = step.train(header, changed(arrays, versions=versions))
    assert metrics["tokens/trained"] == arrays.is_sampled[:half].sum()
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - 22 / 60))
    assert metrics["policy/grad_norm"] > 0


# ---- learning rates, and the gap of each engine


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "num_steps", "rates"),
    [
        ("constant", 4, 100, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        ("linear", 2, 6, {1: 1.0, 2: 1.0, 4: 0.5}),
        ("cosine", 0, 8, {0: 1.0, 2: 0.853553, 4: 0.5, 8: 0.0}),
    ],
)
def test_learning_rate_by_hand(
    schedule: Any, warmup_steps: int, num_steps: int, rates: Any
) -> None:
    steps = {"warmup_steps": warmup_steps, "num_steps": num_steps}
    config = TrainerConfig(learning_rate=1.0, schedule=schedule, **steps)
    found = {step: learning_rate_at(config, step) for step in rates}
    assert found == pytest.approx(rates, abs=1e-6)


def sampled_by_two(step: TrainerRank, offset: float) -> tuple[BatchHeader, Tokens]:
    """Trajectories of engine-0, engine-1 and an unknown one; engine-1's logprobs are
    off by `offset`.
    """
    header, arrays = make_batch(num_groups=6, group_size=4)
    exact = naive_logprobs(step.policy.model, header, arrays, 1.0)
    engines = np.full(len(exact), -1, np.int16)
    for index, entry in enumerate(header.trajectories):
        engines[entry.start + 5 : entry.end] = (index + 1) % 3 - 1
    behaviour = np.where(
        arrays.is_sampled, exact - np.where(engines == 1, offset, 0), 0
    ).astype(np.float32)
    return header, changed(arrays, behaviour_logprobs=behaviour, engines=engines)


def test_step_measures_the_gap_of_each_engine(make_step: MakeStep) -> None:
    step = make_step()
    header, arrays = sampled_by_two(step, 0.02)
    metrics = step.train(header, arrays)
    of_engines = {
        name.split("/")[-1]
        for name in metrics
        if name.startswith("policy/logprob_gap_mean/")
    }
    assert of_engines == {"engine-0", "engine-1"}
    assert metrics["policy/logprob_gap_max/engine-0"] < 2e-5
    assert metrics["policy/logprob_gap_mean/engine-1"] == pytest.approx(0.02, abs=1e-5)
    share = float((arrays.engines[arrays.is_sampled] == 1).mean())
    assert metrics["policy/logprob_gap_mean"] == pytest.approx(0.02 * share, abs=1e-5)
    assert max(gap for *_, gap in step.rollout_gaps) == pytest.approx(0.02, abs=2e-5)
    assert sum(advantage for *_, advantage in step.rollout_advantages) == pytest.approx(
        0.0, abs=1e-5
    )
    assert [entry[:2] for entry in step.rollout_advantages] == [
        entry[:2] for entry in step.rollout_gaps
    ]
    versions = np.where(
        arrays.engines == 1, 0, np.where(arrays.is_sampled, 1, -1)
    ).astype(np.int32)
    header = header.model_copy(update={"version": 1, "min_version": 0})
    again = step.train(header, changed(arrays, versions=versions))
    assert "policy/logprob_gap_mean/engine-0" in again
    assert "policy/logprob_gap_mean/engine-1" not in again, "all its tokens are stale"


def test_engine_past_the_gap_limit_is_named(make_step: MakeStep) -> None:
    step = make_step(trainer={"logprob_gap_limit": 0.15})
    before = weights_digest(step)
    header, arrays = sampled_by_two(step, 0.2)
    with pytest.raises(
        Refused, match=f"engine-1 by 0.2 nats on {(arrays.engines == 1).sum()} fr"
    ) as caught:
        step.train(header, arrays)
    assert "trainer.logprob_gap_limit=0.15" in caught.value.body.rule
    assert (step.policy_version, weights_digest(step)) == (0, before)


def test_large_gap_gives_a_warning(
    make_step: MakeStep, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step()
    step.train(*sampled_by_two(step, 0.2))
    assert "engines and trainer disagree: engine-1 by 0.2 nats" in caplog.text


# ---- the canary of an export

NUM_TOKENS = 160


def test_weights_that_give_nan_are_not_published(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step(canary_tokens=NUM_TOKENS)
    with torch.no_grad():
        step.policy.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Refused, match="canary that are not finite") as refused:
        step.begin_export(tmp_path / "v0.safetensors")()
    assert "weight_sync.canary_limit=none" in refused.value.body.way_out
