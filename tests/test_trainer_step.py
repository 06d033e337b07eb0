"""One optimizer step in this process: the right gradient, the same bits, and nothing changed by what is
refused or not finite.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branch_cases import plain_advantages, plain_loss
from trainer_cases import changed, make_batch, make_spec
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, unpack_batch
from asyncrl.trainer.model import parts as loading
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]
Answer = tuple[torch.Tensor, dict[str, Any]]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    return lambda **values: TrainStep(make_spec(tiny_model_dir, tmp_path, **values))


def gradients(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> dict[str, torch.Tensor]:
    """Of one optimizer step, taken before the optimizer sees them."""
    step._accumulate(step._numbers(header, arrays, arrays.loss_mask), arrays.loss_mask)
    return {name: master.grad for name, master in step._masters.named.items() if master.grad is not None}


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in step._masters.named.items()}


def logprobs(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> np.ndarray:
    """float32 [N] by the step's present weights, 0 where no loss is carried."""
    return step._forward(step.policy, header, arrays, arrays.loss_mask)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 100, 10**6])
def test_the_gradient_is_that_of_a_plain_full_softmax_implementation_whatever_the_micro_batches(
    make_step: MakeStep, tiny_model_dir: Path, micro_batch_tokens: int
) -> None:
    header, arrays = make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    advantages = plain_advantages(header, len(arrays.token_ids))
    plain_loss(model, header, arrays, advantages, aggregate="token").backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = gradients(make_step(trainer={"micro_batch_tokens": micro_batch_tokens}), header, arrays)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm().item()
    metrics = make_step(trainer={"max_grad_norm": 1e-3}).train(header, arrays)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4), "that before it is clipped"


def test_masked_old_tokens_have_no_influence_but_stay_as_context(make_step: MakeStep) -> None:
    header, arrays = make_batch(version=0)
    old = arrays.loss_mask & (np.arange(len(arrays.loss_mask)) % 3 == 0)
    aged = changed(arrays, versions=np.where(old, 4, np.where(arrays.loss_mask, 5, -1)).astype(np.int32))
    by_age, by_hand, refusing = make_step(), make_step(), make_step()
    by_age.policy_version = by_hand.policy_version = refusing.policy_version = 5
    header = header.model_copy(update={"version": 5, "min_version": 5, "mask_older": True})
    noise = np.where(old, -1.0, arrays.behaviour_logprobs).astype(np.float32)
    metrics = by_age.train(header, changed(aged, behaviour_logprobs=noise))
    by_hand.train(header, changed(aged, loss_mask=arrays.loss_mask & ~old))
    assert by_age.weights_digest() == by_hand.weights_digest()
    assert metrics["sample/masked_fraction"] == pytest.approx(old.sum() / arrays.loss_mask.sum())
    assert metrics["tokens/trained"] == (arrays.loss_mask & ~old).sum()
    before = refusing.weights_digest()
    with pytest.raises(Refused, match="was sampled at version 4"):
        refusing.train(header.model_copy(update={"mask_older": False}), aged)
    assert (refusing.policy_version, refusing.weights_digest()) == (5, before)


def infinite_loss(current_M: torch.Tensor, *_: Any) -> Answer:
    return current_M * torch.inf, {}


def nan_gradient(current_M: torch.Tensor, *_: Any) -> Answer:
    return (current_M - current_M.detach()).abs().sqrt(), {}


def nan_statistic(current_M: torch.Tensor, *_: Any) -> Answer:
    return current_M * 1.0, {"my_fraction": torch.tensor(torch.nan)}


def loss_with_words(current_M: torch.Tensor, *_: Any) -> Answer:
    return current_M * 1.0, {"mine": "high"}


@pytest.mark.parametrize("loss", ["infinite_loss", "nan_gradient"])
def test_a_step_without_a_finite_gradient_is_skipped_saved_and_counted_and_the_third_in_a_row_is_refused(
    make_step: MakeStep, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(algorithm={"loss": f"test_trainer_step:{loss}"}, trainer={"max_skipped_steps": 3})
    before = step.weights_digest()
    for version in range(2):
        header, arrays = make_batch(version=version)
        metrics = step.train(header, arrays)
        assert metrics["trainer/skipped_steps"] == 1
        assert np.isnan([metrics["policy/loss"], metrics["policy/grad_norm"]]).all()
        assert f"batch {version} (groups 10, 11): step skipped, loss" in caplog.text
        saved = unpack_batch((step.spec.failed_dir / f"step_{version}.safetensors").read_bytes())
        assert saved[0] == header
        assert np.array_equal(saved[1].token_ids, arrays.token_ids)
    lines = step.spec.record_path.read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [None, None]
    with pytest.raises(Refused, match=r"batch 2 \(groups 10, 11\) gave .* stays 2.*step_2") as caught:
        step.train(*make_batch(version=2))
    assert "trainer.max_skipped_steps=3" in caught.value.body.rule
    assert step.weights_digest() == before
    assert all(weight.grad is None for weight in step._masters.named.values())


def test_what_a_loss_of_ones_own_may_not_return_is_refused_and_changes_nothing(make_step: MakeStep) -> None:
    for name, error, words in (
        ("nan_statistic", Refused, "my_fraction"),
        ("loss_with_words", ConfigError, "algorithm.loss=test_trainer_step:loss_with_words returned"),
    ):
        step = make_step(algorithm={"loss": f"test_trainer_step:{name}"})
        before = step.weights_digest()
        with pytest.raises(error, match=words):
            step.train(*make_batch())
        assert (step.policy_version, step.weights_digest()) == (0, before)
        assert not step.spec.record_path.exists()


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
    not_finite = {name for name, value in metrics.items() if not np.isfinite(value)}
    assert {"policy/loss", "policy/grad_norm"} <= not_finite, "0.0 would be a lie"
    assert all(name.startswith("policy/") for name in not_finite)
    with torch.no_grad():
        weight.copy_(before)
    metrics = step.train(*make_batch(version=1))
    assert metrics["trainer/skipped_steps"] == 0
    assert (step.policy_version, step.num_skipped_in_a_row) == (2, 0)
    assert not torch.equal(weight, before)


def test_a_kl_penalty_that_is_nan_is_not_blamed_on_the_advantage(make_step: MakeStep) -> None:
    step = make_step(algorithm={"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    with torch.no_grad():
        next(iter(step._masters.named.values()))[10] = torch.nan
    with pytest.raises(Refused, match="KL penalties of its rollouts"):
        step.train(*make_batch())


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_before_it_is_allocated(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STATE_BYTES", 2**50)
    words = r"needs \d+.\d GiB for gradients and optimizer state of 0 M parameters, and \d+.\d GiB are free"
    with pytest.raises(ConfigError, match=words):
        make_step()


def test_the_record_says_which_tokens_carried_loss_at_which_version(make_step: MakeStep) -> None:
    step = make_step()
    header, arrays = make_batch(version=0)
    first = header.trajectories[0]
    versions = np.where(arrays.loss_mask, 6, -1).astype(np.int32)
    versions[first.start + 5] = 3
    versions[first.start + 6 : first.start + 8] = 5
    step.policy_version = 6
    header = header.model_copy(update={"version": 6, "min_version": 5, "mask_older": True})
    metrics = step.train(header, changed(arrays, versions=versions))
    lost, line = (json.loads(line) for line in step.spec.record_path.read_text().splitlines())
    assert lost["lost"] == [0, 5], "of batches that this record has never seen"
    assert (line["version"], line["min_version"], line["loss"]) == (6, 5, metrics["policy/loss"])
    length = first.end - first.start
    assert line["trajectories"][0] == {
        "group_id": 10,
        "prompt_id": "p0",
        "sample_index": 0,
        "branch": 0,
        "reward": first.reward,
        "num_tokens": length,
        "num_loss_tokens": length - 6,
        "tokens_sha": hashlib.sha256(arrays.token_ids[: first.end].tobytes()).hexdigest()[:16],
        "spans": [[6, 8, 5], [8, length, 6]],
    }


def test_bfloat16_trains_float32_masters_and_the_model_gets_them_rounded(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step(dtype="bfloat16", trainer={"learning_rate": 1e-6})
    header, arrays = make_batch()
    exact = logprobs(make_step(), header, arrays)
    before = weights(step)
    metrics = step.train(header, changed(arrays, behaviour_logprobs=exact))
    assert 0 < metrics["policy/logprob_gap_mean"] < 0.1
    changes = [(weight - before[name]).abs().max().item() for name, weight in weights(step).items()]
    assert max(changes) < 2e-6, "a step of 1e-6 would be lost or far larger in bfloat16"
    assert min(changes) > 0
    for name, parameter in step.policy.model.named_parameters():
        assert torch.equal(parameter, weights(step)[name].bfloat16())
    num_parameters = sum(parameter.numel() for parameter in step.policy.model.parameters())
    assert step.export(tmp_path / "w.safetensors").num_bytes == 2 * num_parameters


@pytest.mark.gpu
def test_cuda_in_bfloat16_agrees_with_the_cpu(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=4, group_size=8)
    exact = logprobs(make_step(), header, arrays)
    step = make_step(device="cuda")
    assert step.dtype == torch.bfloat16
    metrics = step.train(header, changed(arrays, behaviour_logprobs=exact))
    assert metrics["policy/logprob_gap_mean"] < 0.1


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 3), (2, 2)])
def test_a_batch_of_several_optimizer_steps_makes_one_version_and_clips_from_the_weights_before_it(
    make_step: MakeStep, mini_batches: int, epochs: int
) -> None:
    header, arrays = make_batch(num_groups=4)
    exact = changed(arrays, behaviour_logprobs=logprobs(make_step(), header, arrays))
    loop = {"mini_batches": mini_batches, "epochs": epochs, "schedule": "linear", "num_steps": 10}
    step = make_step(trainer=loop, algorithm={"loss": "decoupled_ppo"})
    metrics = step.train(header, exact)
    assert (step.policy_version, metrics["trainer/optimizer_steps"]) == (1, mini_batches * epochs)
    last = mini_batches * epochs - 1
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - last / (10 * mini_batches * epochs)))
    assert metrics["policy/clip_fraction"] > 0, "with so high a learning rate the later steps leave the range"
    assert metrics["policy/logprob_gap_max"] < 2e-5, "measured before the first step alone"
    assert len(step.spec.record_path.read_text().splitlines()) == 1


def test_mini_batches_are_optimizer_steps_on_their_groups_one_after_the_other(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=2)
    together, apart = make_step(trainer={"mini_batches": 2}), make_step()
    together.train(header, arrays)
    half = next(entry.start for entry in header.trajectories if entry.group_index == 1)
    for version, (start, end) in enumerate([(0, half), (half, len(arrays.token_ids))]):
        entries = [
            entry.model_copy(
                update={"group_index": 0, "start": entry.start - start, "end": entry.end - start}
            )
            for entry in header.trajectories
            if entry.group_index == version
        ]
        part = {"version": version, "min_version": 0, "trajectories": entries}
        of_part = {name: value[start:end] for name, value in dict(arrays).items()}
        apart.train(header.model_copy(update=part), BatchArrays(**of_part))
    assert together.weights_digest() == apart.weights_digest()


def test_a_mini_batch_that_is_masked_out_is_left_out_and_the_schedule_goes_on_all_the_same(
    make_step: MakeStep,
) -> None:
    header, arrays = make_batch(version=3, min_version=2, mask_older=True, num_groups=2)
    half = next(entry.start for entry in header.trajectories if entry.group_index == 1)
    is_late = np.arange(len(arrays.versions)) >= half
    versions = np.where(is_late, np.minimum(arrays.versions, 0), arrays.versions)
    step = make_step(trainer={"mini_batches": 2, "epochs": 3, "num_steps": 10, "schedule": "linear"})
    step.policy_version, step.num_optimizer_steps = 3, 18
    metrics = step.train(header, changed(arrays, versions=versions))
    assert metrics["tokens/trained"] == arrays.loss_mask[:half].sum()
    assert metrics["trainer/optimizer_steps"] == 24
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - 22 / 60))
    assert metrics["policy/grad_norm"] > 0


def test_the_kl_to_the_initial_weights_is_zero_at_first_and_holds_the_policy_back_later(
    make_step: MakeStep,
) -> None:
    free, held = make_step(), make_step(algorithm={"kl_coefficient": 10.0})
    distance = []
    for step in (free, held):
        header, arrays = make_batch()
        before = logprobs(step, header, arrays)
        for version in range(6):
            metrics = step.train(header.model_copy(update={"version": version, "min_version": 0}), arrays)
            if step is held and version == 0:
                assert metrics["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
        distance.append(np.abs(logprobs(step, header, arrays) - before)[arrays.loss_mask].mean())
    assert metrics["policy/kl_reference"] > 0
    assert distance[1] < distance[0]
