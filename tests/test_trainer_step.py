"""One optimizer step in this process: the right gradient, the same bits, and nothing changed by what is
refused.
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
from trainer_cases import changed, make_batch, make_spec
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, unpack_batch
from asyncrl.trainer.model import parts as loading
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = tiny_model_dir, **values: Any) -> TrainStep:
        return TrainStep(make_spec(model_dir, tmp_path, **values))

    return make


def accumulate(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> Any:
    """The sums of forward and backward over the whole batch; the gradients lie in the weights."""
    return step._accumulate(step._numbers(header, arrays, arrays.loss_mask), arrays.loss_mask)


def gradients(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> dict[str, torch.Tensor]:
    """Gradients of one optimizer step, taken before the optimizer sees them."""
    accumulate(step, header, arrays)
    result = {
        name: master.grad.clone() for name, master in step._masters.named.items() if master.grad is not None
    }
    step._optimizer.zero_grad()
    return result


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in step._masters.named.items()}


def logprobs(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> np.ndarray:
    """float32 [N] by the step's present weights, 0 where no loss is carried."""
    return step._forward(step.policy, header, arrays, arrays.loss_mask)


def naive_gradients(model: Any, header: BatchHeader, arrays: BatchArrays) -> dict[str, torch.Tensor]:
    """PPO's clipped loss over one plain forward a sequence, full logits, autograd alone; clip range 0.2."""
    rewards = torch.tensor([entry.reward for entry in header.trajectories], dtype=torch.float64).view(2, 3)
    advantages = (
        (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    ).flatten()
    total = torch.zeros(())
    for entry, advantage in zip(header.trajectories, advantages.tolist(), strict=True):
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        current = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[
            :, 0
        ]
        sampled = torch.from_numpy(arrays.loss_mask[entry.start + 1 : entry.end])
        ratio = (current - torch.from_numpy(arrays.behaviour_logprobs[entry.start + 1 : entry.end]))[
            sampled
        ].exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    (total / int(arrays.loss_mask.sum())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_that_of_a_plain_full_softmax_implementation(
    make_step: MakeStep, tiny_model_dir: Path
) -> None:
    header, arrays = make_batch()
    expected = naive_gradients(AutoModelForCausalLM.from_pretrained(tiny_model_dir), header, arrays)
    actual = gradients(make_step(), header, arrays)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 60, 100])
def test_any_cut_into_micro_batches_gives_the_same_gradient(
    make_step: MakeStep, micro_batch_tokens: int
) -> None:
    header, arrays = make_batch(num_groups=3, group_size=4)
    whole = gradients(make_step(), header, arrays)
    cut = gradients(make_step(trainer={"micro_batch_tokens": micro_batch_tokens}), header, arrays)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-6)


def test_two_fresh_runs_give_the_same_weights_bit_for_bit(make_step: MakeStep) -> None:
    digests = []
    for _ in range(2):
        step = make_step(trainer={"micro_batch_tokens": 60})
        for version in range(3):
            step.train(*make_batch(version=version, seed=version))
        digests.append(step.weights_digest())
    assert step.policy_version == 3
    assert digests[0] == digests[1]


def test_masked_old_tokens_have_no_influence_but_stay_as_context(make_step: MakeStep) -> None:
    header, arrays = make_batch(version=0)
    old = arrays.loss_mask & (np.arange(len(arrays.loss_mask)) % 3 == 0)
    aged = changed(arrays, versions=np.where(old, 4, np.where(arrays.loss_mask, 5, -1)).astype(np.int32))
    by_age, by_hand = make_step(), make_step()
    by_age.policy_version = by_hand.policy_version = 5
    header = header.model_copy(update={"version": 5, "min_version": 5, "mask_older": True})
    noise = np.where(old, -1.0, arrays.behaviour_logprobs).astype(np.float32)
    metrics = by_age.train(header, changed(aged, behaviour_logprobs=noise))
    by_hand.train(header, changed(aged, loss_mask=arrays.loss_mask & ~old))
    assert by_age.weights_digest() == by_hand.weights_digest()
    assert metrics["sample/masked_fraction"] == pytest.approx(old.sum() / arrays.loss_mask.sum())
    assert metrics["tokens/trained"] == (arrays.loss_mask & ~old).sum()


def test_a_token_past_the_bound_is_refused_and_changes_nothing(make_step: MakeStep) -> None:
    step = make_step()
    header, arrays = make_batch(version=0)
    step.policy_version = 2
    before = weights(step)
    with pytest.raises(Refused, match="was sampled at version 0"):
        step.train(header.model_copy(update={"version": 2, "min_version": 1}), arrays)
    assert step.policy_version == 2
    assert all(torch.equal(before[name], weight) for name, weight in weights(step).items())


def infinite_loss(current_M: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return current_M * torch.inf, {}


def nan_gradient(current_M: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (current_M - current_M.detach()).abs().sqrt(), {}


def nan_statistic(current_M: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return current_M * 1.0, {"my_fraction": torch.tensor(torch.nan)}


@pytest.mark.parametrize("loss", ["infinite_loss", "nan_gradient"])
def test_a_step_without_a_finite_gradient_is_skipped_saved_and_counted_and_the_third_in_a_row_is_refused(
    make_step: MakeStep, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(algorithm={"loss": f"test_trainer_step:{loss}"}, trainer={"max_skipped_steps": 3})
    before = weights(step)
    for version in range(2):
        header, arrays = make_batch(version=version)
        metrics = step.train(header, arrays)
        assert metrics["trainer/skipped_steps"] == 1
        assert np.isnan(metrics["policy/loss"])
        assert np.isnan(metrics["policy/grad_norm"])
        assert f"batch {version} (groups 10, 11): step skipped, loss" in caplog.text
        saved_header, saved_arrays = unpack_batch(
            (step.spec.failed_dir / f"step_{version}.safetensors").read_bytes()
        )
        assert saved_header == header
        assert all(np.array_equal(value, getattr(saved_arrays, name)) for name, value in dict(arrays).items())
    assert all(torch.equal(before[name], weight) for name, weight in weights(step).items())
    assert [json.loads(line)["loss"] for line in step.spec.record_path.read_text().splitlines()] == [
        None,
        None,
    ]
    with pytest.raises(Refused, match=r"batch 2 \(groups 10, 11\) gave .* policy_version stays 2") as caught:
        step.train(*make_batch(version=2))
    assert "trainer.max_skipped_steps=3" in caught.value.body.rule
    assert "step_2.safetensors" in caught.value.body.error
    assert all(weight.grad is None for weight in step._masters.named.values())


def test_a_loss_whose_statistics_are_not_finite_is_refused_with_the_batch_saved_and_the_weights_untouched(
    make_step: MakeStep,
) -> None:
    step = make_step(algorithm={"loss": "test_trainer_step:nan_statistic"})
    before = weights(step)
    with pytest.raises(Refused, match="my_fraction"):
        step.train(*make_batch())
    assert (step.spec.failed_dir / "step_0.safetensors").exists()
    assert step.policy_version == 0
    assert all(torch.equal(before[name], weight) for name, weight in weights(step).items())
    assert not step.spec.record_path.exists()


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_before_it_is_allocated(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STATE_BYTES", 2**50)
    with pytest.raises(
        ConfigError,
        match=r"needs \d+.\d GiB for gradients and optimizer state of 0 M parameters, and \d+.\d GiB are "
        r"free",
    ):
        make_step()


def test_the_gradient_is_clipped_and_the_norm_reported_is_that_before(make_step: MakeStep) -> None:
    header, arrays = make_batch()
    norm = (
        torch.stack([gradient.norm() for gradient in gradients(make_step(), header, arrays).values()])
        .norm()
        .item()
    )
    assert make_step(trainer={"max_grad_norm": 1e-3}).train(header, arrays)[
        "policy/grad_norm"
    ] == pytest.approx(norm, rel=1e-4)


def test_metrics_have_the_fixed_names(make_step: MakeStep) -> None:
    metrics = make_step(trainer={"warmup_steps": 2}).train(*make_batch())
    assert set(metrics) == {
        "policy/loss",
        "policy/grad_norm",
        "policy/entropy",
        "policy/kl_behaviour",
        "policy/ess",
        "policy/clip_fraction",
        "policy/logprob_gap_max",
        "policy/logprob_gap_mean",
        "sample/masked_fraction",
        "tokens/trained",
        "trainer/learning_rate",
        "trainer/optimizer_steps",
        "trainer/skipped_steps",
        "perf/train_s",
    }
    assert metrics["trainer/learning_rate"] == pytest.approx(0.005)
    assert 0 < metrics["policy/ess"] < 1
    assert 0 < metrics["policy/entropy"] < np.log(52)


def test_the_record_says_which_tokens_carried_loss_at_which_version(make_step: MakeStep) -> None:
    step = make_step()
    header, arrays = make_batch(version=0)
    first = header.trajectories[0]
    versions = np.where(arrays.loss_mask, 6, -1).astype(np.int32)
    versions[first.start + 5] = 3
    versions[first.start + 6 : first.start + 8] = 5
    step.policy_version = 6
    metrics = step.train(
        header.model_copy(update={"version": 6, "min_version": 5, "mask_older": True}),
        changed(arrays, versions=versions),
    )
    lines = [json.loads(line) for line in step.spec.record_path.read_text().splitlines()]
    assert lines.pop(0)["lost"] == [0, 5], "of batches that this record has never seen"
    assert len(lines) == 1
    assert (lines[0]["version"], lines[0]["min_version"], lines[0]["loss"]) == (6, 5, metrics["policy/loss"])
    entry = lines[0]["trajectories"][0]
    length = first.end - first.start
    assert entry["spans"] == [[6, 8, 5], [8, length, 6]]
    assert (entry["num_tokens"], entry["num_loss_tokens"]) == (length, length - 6)
    assert entry["tokens_sha"] == hashlib.sha256(arrays.token_ids[: first.end].tobytes()).hexdigest()[:16]
    assert (entry["group_id"], entry["sample_index"], entry["prompt_id"], entry["reward"]) == (
        10,
        0,
        "p0",
        first.reward,
    )


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
    assert step.export(tmp_path / "w.safetensors").num_bytes == 2 * sum(
        p.numel() for p in step.policy.model.parameters()
    )


@pytest.mark.gpu
def test_cuda_in_bfloat16_agrees_with_the_cpu(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=4, group_size=8)
    exact = logprobs(make_step(), header, arrays)
    step = make_step(device="cuda")
    assert step.dtype == torch.bfloat16
    losses = [
        step.train(
            header.model_copy(update={"version": v, "min_version": 0}),
            changed(arrays, behaviour_logprobs=exact),
        )
        for v in range(3)
    ]
    assert losses[0]["policy/logprob_gap_mean"] < 0.1


@pytest.mark.parametrize(("mini_batches", "epochs"), [(2, 1), (1, 3), (2, 2)])
def test_a_batch_of_several_optimizer_steps_makes_one_version_and_clips_from_the_weights_before_it(
    make_step: MakeStep, mini_batches: int, epochs: int
) -> None:
    header, arrays = make_batch(num_groups=4)
    exact = changed(arrays, behaviour_logprobs=logprobs(make_step(), header, arrays))
    loop = {"mini_batches": mini_batches, "epochs": epochs, "schedule": "linear", "num_steps": 10}
    step = make_step(trainer=loop, algorithm={"loss": "decoupled_ppo"})
    metrics = step.train(header, exact)
    assert step.policy_version == 1
    assert metrics["trainer/optimizer_steps"] == mini_batches * epochs
    last = mini_batches * epochs - 1
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2 * (1 - last / (10 * mini_batches * epochs)))
    assert metrics["policy/clip_fraction"] > 0, (
        "with a learning rate of 0.01 the later steps leave the clip range"
    )
    assert metrics["policy/logprob_gap_max"] < 2e-5, "measured before the first step alone"
    assert metrics["tokens/trained"] == arrays.loss_mask.sum()
    assert len(step.spec.record_path.read_text().splitlines()) == 1


def test_mini_batches_are_optimizer_steps_on_their_groups_one_after_the_other(
    make_step: MakeStep, tmp_path: Path
) -> None:
    header, arrays = make_batch(num_groups=2)
    together = make_step(trainer={"mini_batches": 2})
    together.train(header, arrays)
    apart = make_step()
    half = next(entry.start for entry in header.trajectories if entry.group_index == 1)
    for version, part in enumerate([slice(0, half), slice(half, None)]):
        entries = [
            entry.model_copy(
                update={
                    "group_index": 0,
                    "start": entry.start - (part.start or 0),
                    "end": entry.end - (part.start or 0),
                }
            )
            for entry in header.trajectories
            if entry.group_index == version
        ]
        apart.train(
            header.model_copy(update={"version": version, "min_version": 0, "trajectories": entries}),
            BatchArrays(**{name: value[part] for name, value in dict(arrays).items()}),
        )
    assert together.weights_digest() == apart.weights_digest()


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


def test_m2po_weighs_the_tokens_of_the_whole_step_whatever_the_micro_batches(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=3, group_size=4)
    whole = gradients(make_step(algorithm={"loss": "m2po"}), header, arrays)
    cut = gradients(make_step(algorithm={"loss": "m2po"}, trainer={"micro_batch_tokens": 30}), header, arrays)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-6)
