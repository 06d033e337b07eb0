"""The critic: GAE and its loss against their formulas, exact values of packed
tokens, steps in lockstep with the policy, and state that is never fresh by mistake.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
import torch
from costly_cases import slow
from crash_fuzz import Crashes, differences, fuzz_config, never_killed, new_seed
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import running, save_state
from safetensors.torch import load_file
from scoring_cases import make_decoder
from tiny_model import make_tiny_model
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from trainer_cases import (
    MakeStep,
    changed,
    learned,
    make_batch,
    make_branch_batch,
    make_spec,
    mesh_of_one,
    plain_attention,
    train_versions,
    weights_digest,
)

from asyncrl.algorithms.advantages import gae, whitened
from asyncrl.algorithms.losses import value_loss
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import CallRefused, Refused
from asyncrl.config import RunConfig
from asyncrl.config.load import checked
from asyncrl.job.check.model_check import find_models
from asyncrl.launch.memory import rank_memory, saved_bytes
from asyncrl.launch.model_sizes import model_shape
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader, StateRequest, TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.loss.objective import BatchNumbers
from asyncrl.trainer.ranks.offload import local_of
from asyncrl.trainer.ranks.rank import TrainerRank

GAE: dict[str, Any] = {"advantage": "gae", "gae_lambda": 0.9, "discount": 0.97}
CRITIC: dict[str, Any] = {"learning_rate": 1e-2}
PPO: dict[str, Any] = {"algorithm": GAE, "critic": CRITIC}

# ---- formulas


def plain_gae(
    rewards: list[float], values: list[float], discount: float, lam: float
) -> list[float]:
    """Sum the discounted errors of each token, as in the paper's equation 16."""
    errors = [
        reward + discount * after - value
        for reward, value, after in zip(
            rewards, values, [*values[1:], 0.0][: len(values)], strict=True
        )
    ]
    return [
        sum(
            (discount * lam) ** (later - start) * errors[later]
            for later in range(start, len(errors))
        )
        for start in range(len(errors))
    ]


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_equals_the_plain_sum_of_errors(
    seed: int, discount: float, lam: float
) -> None:
    rng = np.random.default_rng(seed)
    # all sequences but the first may have no token
    length_B = torch.from_numpy(rng.integers(0, 30, rng.integers(1, 6)))
    length_B[0] += 1
    num_tokens = int(length_B.sum())
    value_M, reward_M = torch.from_numpy(rng.normal(size=(2, num_tokens))).float()
    advantage_M, return_M = gae(reward_M, value_M, length_B, discount, lam)
    lengths = length_B.tolist()
    expected = list[float]()
    for rewards, values in zip(
        reward_M.split(lengths), value_M.split(lengths), strict=True
    ):
        expected += plain_gae(rewards.tolist(), values.tolist(), discount, lam)
    assert advantage_M.tolist() == pytest.approx(expected, abs=1e-9)
    expected_returns = (advantage_M + value_M).tolist()
    assert return_M.tolist() == pytest.approx(expected_returns, abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.none() | st.floats(0.01, 2))
def test_value_loss_equals_trl(seed: int, value_clip: float | None) -> None:
    rng = np.random.default_rng(seed)
    value_M, old_M, return_M = torch.from_numpy(rng.normal(size=(3, 40))).float()
    loss_M, is_clipped_M = value_loss(value_M, old_M, return_M, value_clip)
    # TRL: 0.5 * mean(max(square(vpred - R), square(clamp(vpred, v - c, v + c) - R)))
    limit = np.inf if value_clip is None else value_clip
    expected = [
        max((new - goal) ** 2, (min(max(new, old - limit), old + limit) - goal) ** 2)
        for new, old, goal in zip(
            value_M.tolist(), old_M.tolist(), return_M.tolist(), strict=True
        )
    ]
    assert loss_M.mean().item() == pytest.approx(0.5 * np.mean(expected), abs=1e-5)
    if value_clip is None:
        assert not is_clipped_M.any()


# ---- one rank


def estimates(
    step: TrainerRank, header: BatchHeader, arrays: Tokens
) -> tuple[BatchNumbers, np.ndarray]:
    """Return a batch with its numbers, and the places of its sampled tokens."""
    batch = step.begin(header, arrays)
    return batch, np.flatnonzero(arrays.is_sampled)


def plain_values(step: TrainerRank, header: BatchHeader, arrays: Tokens) -> Tensor:
    """Return the values of all sampled tokens, by a plain pass for each sequence."""
    assert step.critic is not None
    model = step.critic.model.model
    parts = []
    with plain_attention(model):
        for entry in header.trajectories:
            ids = torch.from_numpy(arrays.ids[entry.start : entry.end].astype(np.int64))
            mask = torch.from_numpy(arrays.is_sampled[entry.start + 1 : entry.end])
            # The new head returns the values where logits were.
            parts.append(model(input_ids=ids[None]).logits[0, :-1, 0].float()[mask])
    return torch.cat(parts)


@pytest.mark.parametrize("seed", range(2))
def test_packed_values_and_their_gradient_equal_those_of_single_sequences(
    make_step: MakeStep, seed: int
) -> None:
    step = make_step(**PPO, trainer={"micro_batch_tokens": 64})
    for version in range(2):  # a head of zeros would hide everything
        step.train(*make_branch_batch(seed, version=version))
    header, arrays = make_branch_batch(seed + 10, version=2)
    batch, places = estimates(step, header, arrays)
    assert batch.value_N is not None
    assert batch.return_N is not None
    value_M = plain_values(step, header, arrays)
    assert value_M.std() > 1e-3
    torch.testing.assert_close(
        torch.from_numpy(batch.value_N[places]), value_M, rtol=1e-4, atol=1e-5
    )
    assert step.critic is not None
    return_M = torch.from_numpy(batch.return_N[places])
    loss = 0.5 * (value_M - return_M).square().mean()
    named = step.critic.trained.masters.named
    expected = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    sums = step.forward_backward(batch, batch.has_loss)
    for master, grad in zip(named.values(), expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(master.grad, grad, rtol=1e-3, atol=1e-5)
    step.optimizer_step(batch, sums, 0)
    metrics = step.critic.metrics(batch)
    assert metrics["critic/loss"] == pytest.approx(loss.item(), abs=1e-5)
    returns = batch.return_N[places].astype(np.float64)
    explained = 1 - (returns - batch.value_N[places]).var() / returns.var()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_rewards_come_with_the_last_token_of_their_part(
    make_step: MakeStep, seed: int
) -> None:
    """Rollouts with several branches and turns, and tokens that are too old."""
    values = PPO | {"algorithm": GAE | {"whiten_advantages": False}}
    step = make_step(**values)
    step.train(*make_branch_batch(9))
    header, arrays = make_branch_batch(seed, version=1)
    # Each fifth token is too old for a loss, and still a state on the way.
    is_old = np.arange(len(arrays)) % 5 == 0
    header = header.model_copy(update={"mask_older": True})
    versions = np.where(is_old & arrays.is_sampled, 0, arrays.versions)
    arrays = changed(arrays, versions=versions)
    batch, sampled = estimates(step, header, arrays)
    assert batch.value_N is not None
    assert batch.return_N is not None
    torch.testing.assert_close(
        torch.from_numpy(batch.value_N[sampled]),
        plain_values(step, header, arrays),
        rtol=1e-4,
        atol=1e-5,
    )
    assert (batch.has_loss != arrays.is_sampled).sum() > 0
    for entry in header.trajectories:
        places = [
            place for place in range(entry.start, entry.end) if arrays.is_sampled[place]
        ]
        rewards = dict.fromkeys(places, 0.0)
        if not entry.credits and places:
            rewards[places[-1]] = entry.reward
        for unit in {credit.unit for credit in entry.credits}:
            credits = [one for one in entry.credits if one.unit == unit]
            inside = [
                place
                for place in places
                for one in credits
                if one.start <= place - entry.start < one.end
            ]
            rewards[max(inside)] += credits[0].reward
        of_values = batch.value_N[places].tolist()
        expected = plain_gae([*rewards.values()], of_values, 0.97, 0.9)
        assert batch.advantage_N[places].tolist() == pytest.approx(expected, abs=1e-5)
        expected_returns = np.add(expected, of_values).tolist()
        assert batch.return_N[places].tolist() == pytest.approx(
            expected_returns, abs=1e-5
        )


def test_advantages_are_whitened_over_loss_tokens(make_step: MakeStep) -> None:
    batch, places = estimates(make_step(**PPO), *make_batch())
    advantage_M = batch.advantage_N[places]
    assert advantage_M.mean() == pytest.approx(0, abs=1e-6)
    assert advantage_M.std(ddof=1) == pytest.approx(1, abs=1e-5)


def critic_weights(step: TrainerRank) -> dict[str, Tensor]:
    assert step.critic is not None
    named = step.critic.trained.masters.named
    return {name: weight.detach().clone() for name, weight in named.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


def test_critic_begins_as_a_copy_of_the_policy_or_of_its_own_model(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step(**PPO)
    copied = critic_weights(step)
    policy = step.masters.named
    assert not copied.pop("lm_head.weight").any()
    for name, weight in copied.items():
        assert torch.equal(weight, policy[name]), name
    other = make_tiny_model(tmp_path / "other", seed=5, num_hidden_layers=3)
    of_path = critic_weights(make_step(**PPO, critic_path=str(other)))
    assert len(of_path) > len(copied) + 1
    assert len(policy) == len(copied), "its head is tied"
    rewarding = make_decoder(tmp_path / "rewarding", "end")
    of_rewards = critic_weights(make_step(**PPO, critic_path=str(rewarding)))
    assert not of_rewards.pop("lm_head.weight").any(), "the scoring head is replaced"
    stored = load_file(rewarding / "model.safetensors")
    assert of_rewards.keys() == stored.keys() - {"score.weight"}
    for name, weight in of_rewards.items():
        assert torch.equal(weight, stored[name].float()), name


def test_policy_takes_no_step_while_the_critic_warms_up(make_step: MakeStep) -> None:
    step = make_step(algorithm=GAE, critic=CRITIC | {"warmup_steps": 2})
    policies, critics = [weights_digest(step)], [critic_weights(step)]
    for version in range(3):
        metrics = step.train(*make_batch(version=version))
        policies.append(weights_digest(step))
        critics.append(critic_weights(step))
        assert metrics["critic/grad_norm"] > 0
    assert policies[0] == policies[1] == policies[2] != policies[3]
    heads = [one["lm_head.weight"] for one in critics]
    assert all(not torch.equal(heads[i], heads[i + 1]) for i in range(3))
    assert step.policy_version == 3
    # Warm-up does not change the optimizer, so the first step is as without one.
    counts = {int(one["step"]) for one in step.trained.optimizer.state.values()}
    assert counts == {1}


def test_values_are_clipped_around_those_before_the_batch(make_step: MakeStep) -> None:
    clip = CRITIC | {"value_clip": 1e-3}
    several = {"epochs": 3, "mini_batches": 2}
    step = make_step(algorithm=GAE, critic=clip, trainer=several)
    metrics = step.train(*make_batch(num_groups=4))
    assert 0 < metrics["critic/clip_fraction"] <= 1
    step = make_step(**PPO, trainer=several)
    assert step.train(*make_batch(num_groups=4))["critic/clip_fraction"] == 0
    assert step.critic is not None
    states = step.critic.trained.optimizer.state.values()
    assert {int(state["step"]) for state in states} == {6}


def test_neither_model_takes_a_step_that_is_not_finite(make_step: MakeStep) -> None:
    step = make_step(**PPO)
    step.train(*make_batch())
    policy, critic = weights_digest(step), critic_weights(step)
    header, arrays = make_batch(version=1)
    rewards = [
        entry.model_copy(update={"reward": 1e30}) for entry in header.trajectories
    ]
    header = header.model_copy(update={"trajectories": rewards})
    metrics = step.train(header, arrays)
    assert metrics["trainer/skipped_steps"] == 1
    assert weights_digest(step) == policy
    assert_equal(critic_weights(step), critic)


def test_adapters_leave_the_critic_all_its_weights(make_step: MakeStep) -> None:
    step = make_step(**PPO, trainer={"lora": {"rank": 4, "alpha": 8.0}})
    before = critic_weights(step)
    step.train(*make_batch())
    after = critic_weights(step)
    assert len(step.masters.named) == 2 * 14
    assert "model.embed_tokens.weight" in after
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


# ---- state


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_loaded_critic_continues_to_the_same_bits(
    make_step: MakeStep, tmp_path: Path, dtype: str
) -> None:
    values = {**PPO, "dtype": dtype, "trainer": {"mini_batches": 2}}
    whole = make_step(**values)
    train_versions(whole, 0, 3)
    whole.offload(("weights", "optimizer"))
    assert {tensor.untyped_storage().nbytes() for tensor in big(whole)} == {0}
    whole.begin_save_state(tmp_path / "state").result()
    whole.onload(("weights", "optimizer"))
    train_versions(whole, 3, 5)
    step = make_step(**values)
    step.load_state(tmp_path / "state")
    train_versions(step, 3, 5)
    assert weights_digest(step) == weights_digest(whole)
    assert_equal(critic_weights(step), critic_weights(whole))
    never_moved = make_step(**values)
    train_versions(never_moved, 0, 5)
    assert_equal(critic_weights(never_moved), critic_weights(whole))


def big(step: TrainerRank) -> Iterator[Tensor]:
    """Yield the critic's tensors that an offload frees."""
    assert step.critic is not None
    yield from step.critic.model.parameters()
    for state in step.critic.trained.optimizer.state.values():
        yield from (tensor for tensor in state.values() if tensor.ndim)


def test_state_with_other_models_is_refused(
    make_step: MakeStep, tmp_path: Path
) -> None:
    with_critic, without = make_step(**PPO), make_step()
    train_versions(with_critic, 0, 1)
    train_versions(without, 0, 1)
    with_critic.begin_save_state(tmp_path / "with").result()
    without.begin_save_state(tmp_path / "without").result()
    before = critic_weights(with_critic)
    for step, other in ((with_critic, "without"), (without, "with")):
        with pytest.raises(Refused, match=r"another model.*critic\.weights"):
            step.load_state(tmp_path / other)
    assert_equal(critic_weights(with_critic), before)


def test_equal_advantages_are_no_step_of_rounding() -> None:
    for value in (0.9, 0.7, 0.3):
        assert not whitened(torch.full((37,), value)).any()


# ---- several ranks


@pytest.mark.slow
def test_two_ranks_train_the_critic_of_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {**PPO, "trainer": {"micro_batch_tokens": 48}}
    for name in ("one", "two", "state"):
        (tmp_path / name).mkdir()
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "one", **values))
    with running(tiny_model_dir, tmp_path / "two", **values) as group:
        for version in range(3):
            # One group in the last: a rank without sequences runs an empty pass.
            batch = make_batch(
                version=version,
                seed=version,
                num_groups=3 - version,
                group_size=1 + (version < 2),
            )
            expected, found = alone.train(*batch), group.train(*batch).metrics
            assert learned(found) == pytest.approx(
                learned(expected), rel=1e-3, abs=1e-4
            )
            assert found["critic/grad_norm"] > 0
        save_state(group, tmp_path / "state" / "of_two")
        mine = critic_weights(alone)
        train_versions(alone, 3, 4)
        alone.load_state(tmp_path / "state" / "of_two")
        for name, weight in critic_weights(alone).items():
            torch.testing.assert_close(weight, mine[name], rtol=1e-3, atol=1e-4)
        alone.begin_save_state(tmp_path / "state" / "of_one").result()
        path = StateRequest(path=tmp_path / "state" / "of_one")
        health = group.post("/load_state", path, TrainerHealth)
        assert health.policy_version == 3
        without = TrainerRank(make_spec(tiny_model_dir, tmp_path / "one"))
        without.begin_save_state(tmp_path / "state" / "without").result()
        path = StateRequest(path=tmp_path / "state" / "without")
        with pytest.raises(CallRefused, match="state of another model"):
            group.post("/load_state", path, TrainerHealth)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_shards_of_one_rank_give_the_same_critic(
    tiny_model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    """As on one CUDA device, where the weights are shards too."""
    (tmp_path / "alone").mkdir()
    values = {**PPO, "dtype": dtype}
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    with mesh_of_one(tmp_path) as ranks:
        sharded = TrainerRank(make_spec(tiny_model_dir, tmp_path, **values), ranks)
        limit = 1e-4 if dtype == "float32" else 0.05
        for version in range(3):
            batch = make_batch(version=version, seed=version)
            expected, found = alone.train(*batch), sharded.train(*batch)
            for name in ("critic/loss", "critic/value_mean", "policy/loss"):
                assert found[name] == pytest.approx(expected[name], abs=limit)
        head = local_of(critic_weights(sharded)["lm_head.weight"])
        assert head.dtype == torch.float32
        assert head.any()


# ---- settings


def run_config(**sections: Any) -> RunConfig:
    given_sections = {
        "algorithm": {"advantage": "gae"},
        "critic": {},
        **sections,
    }
    return checked(RunConfig, {**job_runs.CONFIG, **given_sections})


def test_critic_of_other_tokens_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = {"path": str(tiny_model_dir)}
    config = run_config(model=model, critic={"path": str(other)})
    with pytest.raises(
        ConfigError, match=r"critic.path=.*: id \d+ is 'b' in the critic, 'a' in"
    ):
        find_models(config, HFChatTokenizer(tiny_model_dir))
    config = run_config(model=model, critic={"path": str(tiny_model_dir)})
    found = find_models(config, HFChatTokenizer(tiny_model_dir))
    assert found == {"critic": tiny_model_dir}


def test_memory_plan_counts_the_critic() -> None:
    with_critic = run_config()
    without = run_config(critic=None, algorithm={})
    shape = model_shape(without.model)
    sizes = [
        rank_memory(one, shape, "cpu").peak(one.offload_rules)
        for one in (without, with_critic)
    ]
    # The model is tied, so its critic has the same number of weights, up to the new head.
    assert sizes[1].parameters == 2 * sizes[0].parameters
    assert sizes[1].optimizer == 2 * sizes[0].optimizer
    assert sizes[1].micro_batch == sizes[0].micro_batch
    assert saved_bytes(with_critic, shape) == 2 * saved_bytes(without, shape)


# ---- runs


def critic_of(run_dir: Path) -> dict[str, Tensor]:
    """Return the critic's weights and optimizer state in the newest checkpoint."""
    folders = (run_dir / "checkpoints").glob("step_*")
    newest = max(folders, key=lambda folder: int(folder.name.removeprefix("step_")))
    reader = FileSystemReader(newest / "trainer")
    known = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in known.items()
        if name.startswith("critic.")
    }
    with warnings.catch_warnings():  # DCP says that there is no process group
        warnings.simplefilter("ignore", UserWarning)
        dcp_load(found, storage_reader=reader, no_dist=True)
    assert found
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_run_ends_with_the_same_policy_and_critic(tmp_path: Path) -> None:
    config = fuzz_config(
        tmp_path,
        trainer={"num_steps": 16, "mini_batches": 2},
        algorithm={"advantage": "gae"},
        critic={"learning_rate": 0.003, "warmup_steps": 2, "value_clip": 0.5},
    )
    whole = never_killed(config, tmp_path / "whole")
    victims = ["trainer", "controller", "tree", "trainer"]
    crashes = Crashes(config, tmp_path / "run", seed=new_seed(), victims=victims)
    assert crashes.live()["trainer"] > 0
    assert differences(whole, tmp_path / "run") == []
    assert_equal(critic_of(tmp_path / "run"), critic_of(whole))
    steps = job_runs.read_lines(whole / "metrics.jsonl")
    assert steps[0]["critic/value_mean"] == 0, "it begins with a head of zeros"
    assert steps[-1]["critic/value_mean"] > 0, "it has learned of rewards"
