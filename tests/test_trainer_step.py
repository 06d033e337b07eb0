"""One optimizer step in this process: the right gradient, the same bits, and nothing changed by what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import make_tiny_model
from trainer_cases import changed, make_batch, make_spec, naive_logprobs
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.serving import Refused
from asyncrl.trainer import loading
from asyncrl.trainer import logprobs as logprobs_module
from asyncrl.trainer.step import TrainStep
from asyncrl.wire import BatchArrays, BatchHeader, unpack_batch

MakeStep = Callable[..., TrainStep]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = tiny_model_dir, **values: Any) -> TrainStep:
        return TrainStep(make_spec(model_dir, tmp_path, **values))

    return make


def gradients(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> dict[str, torch.Tensor]:
    """Gradients of one mini-batch, taken before the optimizer sees them."""
    step._accumulate(header, arrays, arrays.loss_mask)
    result = {name: parameter.grad.clone() for name, parameter in step.model.named_parameters()}
    step.model.zero_grad()
    return result


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}


def naive_gradients(model: Any, header: BatchHeader, arrays: BatchArrays) -> dict[str, torch.Tensor]:
    """PPO's clipped loss over one plain forward a sequence, full logits, autograd alone; clip range 0.2."""
    rewards = torch.tensor([entry.reward for entry in header.trajectories], dtype=torch.float64).view(2, 3)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)).flatten()
    total = torch.zeros(())
    for entry, advantage in zip(header.trajectories, advantages.tolist(), strict=True):
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        current = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        sampled = torch.from_numpy(arrays.loss_mask[entry.start + 1 : entry.end])
        ratio = (current - torch.from_numpy(arrays.behaviour_logprobs[entry.start + 1 : entry.end]))[sampled].exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    (total / int(arrays.loss_mask.sum())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_that_of_a_plain_full_softmax_implementation(make_step: MakeStep, tiny_model_dir: Path) -> None:
    header, arrays = make_batch()
    expected = naive_gradients(AutoModelForCausalLM.from_pretrained(tiny_model_dir), header, arrays)
    actual = gradients(make_step(), header, arrays)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 60, 100])
def test_any_cut_into_micro_batches_gives_the_same_gradient(make_step: MakeStep, micro_batch_tokens: int) -> None:
    header, arrays = make_batch(num_groups=3, group_size=4)
    whole = gradients(make_step(), header, arrays)
    cut = gradients(make_step(trainer={"micro_batch_tokens": micro_batch_tokens}), header, arrays)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-6)


def test_any_cut_of_the_vocabulary_work_into_chunks_gives_the_same_gradient(make_step: MakeStep, monkeypatch: pytest.MonkeyPatch) -> None:
    header, arrays = make_batch()
    whole = gradients(make_step(), header, arrays)
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", 52 * 5)
    for name, gradient in gradients(make_step(), header, arrays).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution(make_step: MakeStep, tiny_model_dir: Path, temperature: float) -> None:
    header, arrays = make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    expected = np.where(arrays.loss_mask, naive_logprobs(model, header, arrays, temperature), 0).astype(np.float32)
    step = make_step(temperature=temperature)
    sums = step._accumulate(header, arrays, arrays.loss_mask)
    np.testing.assert_allclose(sums.logprobs, expected, atol=2e-5)
    metrics = make_step(temperature=temperature).train(header, changed(arrays, behaviour_logprobs=expected))
    assert metrics["policy/logprob_gap_max"] < 2e-5
    assert metrics["policy/kl_behaviour"] < 1e-8
    assert metrics["policy/ess"] == pytest.approx(1.0)
    assert metrics["policy/clip_fraction"] == 0


def test_a_model_that_caps_its_logits_gets_its_own_logprobs(tmp_path: Path, make_step: MakeStep) -> None:
    folder = make_tiny_model(
        tmp_path / "gemma", model_type="gemma2", final_logit_softcapping=2.0, query_pre_attn_scalar=8, attn_logit_softcapping=None
    )
    header, arrays = make_batch()
    step = make_step(folder)
    assert not step._has_plain_head
    expected = naive_logprobs(AutoModelForCausalLM.from_pretrained(folder), header, arrays, 1.0)
    actual = step._accumulate(header, arrays, arrays.loss_mask).logprobs
    np.testing.assert_allclose(actual[arrays.loss_mask], expected[arrays.loss_mask], atol=2e-5)


def test_two_fresh_runs_give_the_same_weights_bit_for_bit(make_step: MakeStep) -> None:
    digests = []
    for _ in range(2):
        step = make_step(trainer={"micro_batch_tokens": 60})
        for version in range(3):
            step.train(*make_batch(version=version, seed=version))
        digests.append(step.weights_digest())
    assert step.policy_version == 3
    assert digests[0] == digests[1]


def test_one_token_more_or_less_changes_the_weights(make_step: MakeStep) -> None:
    header, arrays = make_batch()
    ids = arrays.token_ids.copy()
    ids[-1] = 6 if ids[-1] != 6 else 7
    one, other = make_step(), make_step()
    one.train(header, arrays)
    other.train(header, changed(arrays, token_ids=ids))
    assert one.weights_digest() != other.weights_digest()


def test_steps_on_the_same_batch_make_the_good_answers_likelier(make_step: MakeStep) -> None:
    header, arrays = make_batch()
    best, worst = header.trajectories[2], header.trajectories[0]

    def advance(logprobs: np.ndarray) -> float:
        parts = (slice(entry.start + 5, entry.end) for entry in (best, worst))
        return float(np.subtract(*(logprobs[part].mean() for part in parts)))

    step = make_step(trainer={"learning_rate": 1e-3})
    exact = step._accumulate(header, arrays, arrays.loss_mask).logprobs
    step.model.zero_grad()
    for version in range(5):
        step.train(header.model_copy(update={"version": version, "min_version": 0}), changed(arrays, behaviour_logprobs=exact))
    assert advance(step._accumulate(header, arrays, arrays.loss_mask).logprobs) > advance(exact) + 0.05


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
    assert all(torch.equal(before[name], parameter) for name, parameter in step.model.named_parameters())


def infinite_loss(current_BT: torch.Tensor, *_: torch.Tensor, **__: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return current_BT.sum() * torch.inf, {}


def nan_gradient(current_BT: torch.Tensor, *_: torch.Tensor, **__: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (current_BT.sum() - current_BT.sum().detach()).abs().sqrt(), {}


def no_loss(*_: torch.Tensor, **__: float) -> float:
    return 0.0


def nan_statistic(current_BT: torch.Tensor, *_: torch.Tensor, **__: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return current_BT.sum(), {"my_fraction": torch.tensor(torch.nan)}


@pytest.mark.parametrize("loss", ["infinite_loss", "nan_gradient", "nan_statistic"])
def test_nan_is_refused_with_the_batch_saved_and_the_weights_untouched(make_step: MakeStep, loss: str) -> None:
    step = make_step(loss=f"test_trainer_step:{loss}")
    before = weights(step)
    header, arrays = make_batch()
    with pytest.raises(Refused) as caught:
        step.train(header, arrays)
    path = step.spec.failed_dir / "step_0.safetensors"
    assert str(path) in caught.value.body.error
    assert caught.value.body.way_out
    saved_header, saved_arrays = unpack_batch(path.read_bytes())
    assert saved_header == header
    assert all(np.array_equal(value, getattr(saved_arrays, name)) for name, value in dict(arrays).items())
    assert step.policy_version == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in step.model.named_parameters())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not step.spec.record_path.exists()


def test_a_loss_function_that_returns_something_else_is_refused_by_name(make_step: MakeStep) -> None:
    with pytest.raises(Refused, match="algorithm.loss=test_trainer_step:no_loss returned 0.0"):
        make_step(loss="test_trainer_step:no_loss").train(*make_batch())


@pytest.mark.parametrize("name", ["no_such_module:f", "asyncrl.algorithms.losses:no_such", "asyncrl.trainer.step:GAP_WARNING"])
def test_a_function_that_is_not_there_ends_the_start_with_its_key(make_step: MakeStep, name: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss={name}"):
        make_step(loss=name)


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_before_it_is_allocated(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STATE_BYTES", 2**50)
    with pytest.raises(ConfigError, match=r"needs \d+.\d GiB for gradients and optimizer state of 0 M parameters, and \d+.\d GiB are free"):
        make_step()


def test_a_gap_past_the_limit_is_refused_with_advice(make_step: MakeStep) -> None:
    step = make_step(trainer={"logprob_gap_limit": 0.01})
    with pytest.raises(Refused) as caught:
        step.train(*make_batch())
    assert "disagree by" in caught.value.body.error
    assert "logprob_gap_limit=0.01" in caught.value.body.rule
    assert "model.dtype" in caught.value.body.way_out
    assert step.policy_version == 0


def test_the_gap_is_measured_on_fresh_tokens_alone_and_left_out_where_there_are_none(make_step: MakeStep) -> None:
    header, arrays = make_batch(version=0)
    step = make_step(trainer={"logprob_gap_limit": 1e-6})
    step.policy_version = 1
    metrics = step.train(header.model_copy(update={"version": 1, "min_version": 0}), arrays)
    assert "policy/logprob_gap_mean" not in metrics
    assert "policy/logprob_gap_max" not in metrics


def test_the_gradient_is_clipped_and_the_norm_reported_is_that_before(make_step: MakeStep) -> None:
    header, arrays = make_batch()
    norm = torch.stack([gradient.norm() for gradient in gradients(make_step(), header, arrays).values()]).norm().item()
    assert make_step(trainer={"max_grad_norm": 1e-3}).train(header, arrays)["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_metrics_have_the_fixed_names(make_step: MakeStep) -> None:
    metrics = make_step(trainer={"warmup_steps": 2}).train(*make_batch())
    assert set(metrics) == {
        "policy/loss", "policy/grad_norm", "policy/entropy", "policy/kl_behaviour", "policy/ess", "policy/clip_fraction",
        "policy/logprob_gap_max", "policy/logprob_gap_mean", "sample/masked_fraction", "tokens/trained", "trainer/learning_rate",
        "perf/train_s",
    }  # fmt: skip
    assert metrics["trainer/learning_rate"] == pytest.approx(0.005)
    assert 0 < metrics["policy/ess"] < 1
    assert 0 < metrics["policy/entropy"] < np.log(52)


def test_the_record_says_which_tokens_carried_loss_at_which_version(make_step: MakeStep) -> None:
    step = make_step(record_digest=True)
    header, arrays = make_batch(version=0)
    first = header.trajectories[0]
    versions = np.where(arrays.loss_mask, 6, -1).astype(np.int32)
    versions[first.start + 5] = 3
    versions[first.start + 6 : first.start + 8] = 5
    step.policy_version = 6
    metrics = step.train(header.model_copy(update={"version": 6, "min_version": 5, "mask_older": True}), changed(arrays, versions=versions))
    lines = [json.loads(line) for line in step.spec.record_path.read_text().splitlines()]
    assert len(lines) == 1
    assert (lines[0]["version"], lines[0]["min_version"], lines[0]["loss"]) == (6, 5, metrics["policy/loss"])
    assert lines[0]["weights_digest"] == step.weights_digest()
    entry = lines[0]["trajectories"][0]
    length = first.end - first.start
    assert entry["spans"] == [[6, 8, 5], [8, length, 6]]
    assert (entry["num_tokens"], entry["num_loss_tokens"]) == (length, length - 6)
    assert entry["tokens_sha"] == hashlib.sha256(arrays.token_ids[: first.end].tobytes()).hexdigest()[:16]
    assert (entry["group_id"], entry["sample_index"], entry["prompt_id"], entry["reward"]) == (10, 0, "p0", first.reward)


def test_bfloat16_trains_float32_masters_under_autocast(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step(dtype="bfloat16", trainer={"learning_rate": 1e-6})
    header, arrays = make_batch()
    exact = make_step()._accumulate(header, arrays, arrays.loss_mask).logprobs
    before = weights(step)
    metrics = step.train(header, changed(arrays, behaviour_logprobs=exact))
    assert 0 < metrics["policy/logprob_gap_mean"] < 0.1
    changes = [(parameter - before[name]).abs().max().item() for name, parameter in step.model.named_parameters()]
    assert max(changes) < 2e-6, "a step of 1e-6 would be lost or far larger in bfloat16"
    assert min(changes) > 0
    assert step.export(tmp_path / "w.safetensors").num_bytes == 2 * sum(p.numel() for p in step.model.parameters())


@pytest.mark.gpu
def test_cuda_in_bfloat16_agrees_with_the_cpu(make_step: MakeStep) -> None:
    header, arrays = make_batch(num_groups=4, group_size=8)
    exact = make_step()._accumulate(header, arrays, arrays.loss_mask).logprobs
    step = make_step(device="cuda")
    assert step.dtype == torch.bfloat16
    losses = [
        step.train(header.model_copy(update={"version": v, "min_version": 0}), changed(arrays, behaviour_logprobs=exact)) for v in range(3)
    ]
    assert losses[0]["policy/logprob_gap_mean"] < 0.1
