"""A critic on its own ranks: the numbers of a critic on the policy's ranks, refusals
that leave no rank behind, and one checkpoint for both layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
from crash_fuzz import Crashes, differences, fuzz_config, never_killed, new_seed
from rank_processes import Group, running, save_state
from test_trainer_critic import (
    PPO,
    assert_equal,
    critic_of,
    critic_weights,
    run_config,
)
from trainer_cases import changed, halves_of, learned, make_batch, make_spec

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import CallRefused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.trainer_api import (
    OffloadRequest,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    pack_batch,
)
from asyncrl.trainer.rank import TrainerRank


def test_critic_apart_gives_the_same_bits(tiny_model_dir: Path, tmp_path: Path) -> None:
    steps = {"mini_batches": 2, "epochs": 2, "micro_batch_tokens": 64}
    critic = PPO["critic"] | {"warmup_steps": 1, "value_clip": 0.5}
    values: dict[str, Any] = {**PPO, "critic": critic, "trainer": steps}
    for name in ("alone", "state"):
        (tmp_path / name).mkdir()
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    with running(
        tiny_model_dir, tmp_path / "group", 1, critic_ranks=1, **values
    ) as group:
        for version in range(3):
            batch = make_batch(version=version, seed=version, num_groups=4)
            expected = alone.train(*batch)
            found = group.train(*batch).metrics
            assert learned(found) == learned(expected)
            assert found["perf/critic_s"] > 0
        header, arrays = make_batch(version=3, num_groups=5, seed=3)
        for half in halves_of(header, arrays):
            alone.forward_backward(*half)
            group.forward_backward(*half)
        assert learned(group.optimizer_step().metrics) == learned(
            alone.optimizer_step()
        )
        evaluated = make_batch(version=4, seed=8)
        of_group = group.post("/evaluate", pack_batch(*evaluated), TrainResponse)
        assert of_group.metrics == alone.evaluate(*evaluated)
        mine = critic_weights(alone)
        digest = alone.weights_digest()
        save_state(group, tmp_path / "state" / "apart")
        alone.train(*make_batch(version=4, seed=4))
        alone.load_state(tmp_path / "state" / "apart")
        assert_equal(critic_weights(alone), mine)
        assert alone.weights_digest() == digest
        # And the other way: the group goes back to a state of a trainer with both.
        alone.begin_save_state(tmp_path / "state" / "both").result()
        group.train(*make_batch(version=4, seed=5))
        path = StateRequest(path=tmp_path / "state" / "both")
        assert group.post("/load_state", path, TrainerHealth).policy_version == 4
        batch = make_batch(version=4, seed=4)
        assert learned(group.train(*batch).metrics) == learned(alone.train(*batch))
        save_state(group, tmp_path / "state" / "last")
        mine = critic_weights(alone)
        alone.load_state(tmp_path / "state" / "last")
        assert_equal(critic_weights(alone), mine)


def test_refusals_leave_policy_and_critic_together(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    values = {**PPO, "trainer": {"logprob_gap_limit": 10.0, "timeout_s": 20.0}}
    with running(
        tiny_model_dir, tmp_path / "group", 1, critic_ranks=1, **values
    ) as group:
        good = make_batch()
        with pytest.raises(CallRefused, match="no gradient"):
            group.optimizer_step()
        with pytest.raises(CallRefused, match="batch"):
            group.train(*make_batch(version=3))
        # The gap is measured after the passes, and only by the policy's ranks.
        header, arrays = good
        wrong = np.where(arrays.is_sampled, np.float32(-50), np.float32(0))
        far = changed(arrays, behaviour_logprobs=wrong)
        with pytest.raises(CallRefused, match="disagree"):
            group.train(header, far)
        group.forward_backward(*good)
        with pytest.raises(CallRefused, match="waits for its step"):
            group.train(*good)
        with pytest.raises(CallRefused, match="disagree"):
            group.forward_backward(header, far)
        with pytest.raises(CallRefused, match="no gradient"):
            group.optimizer_step()
        parts = OffloadRequest(parts=["weights", "optimizer"])
        assert group.post("/offload", parts, TransferStats).num_bytes > 0
        path = StateRequest(path=tmp_path / "nothing")
        with pytest.raises(CallRefused, match="offloaded"):
            group.post("/load_state", path, TrainerHealth)
        with pytest.raises(CallRefused, match="offloaded"):
            group.train(*good)
        group.post("/onload", parts, TransferStats)
        assert_trains_as_new(group, tiny_model_dir, tmp_path / "alone", values)


def assert_trains_as_new(
    group: Group, model_dir: Path, folder: Path, values: dict[str, Any]
) -> None:
    folder.mkdir()
    alone = TrainerRank(make_spec(model_dir, folder, **values))
    for version in range(2):
        batch = make_batch(version=version, seed=version)
        assert learned(group.train(*batch).metrics) == learned(alone.train(*batch))


def test_a_critic_that_is_not_finite_stops_the_policy(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The critic's gradient is infinite, the policy's is not: no model takes a step."""
    values = {**PPO, "trainer": {"timeout_s": 20.0}}
    header, arrays = make_batch()
    rewards = [
        entry.model_copy(update={"reward": 1e30 * (1 + index)})
        for index, entry in enumerate(header.trajectories)
    ]
    header = header.model_copy(update={"trajectories": rewards})
    (tmp_path / "alone").mkdir()
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    with running(
        tiny_model_dir, tmp_path / "group", 1, critic_ranks=1, **values
    ) as group:
        for version in range(2):
            again = header.model_copy(update={"version": version})
            versions = np.full(len(arrays), version, np.int32)
            versions[~arrays.is_sampled] = -1
            batch = again, changed(arrays, versions=versions)
            answer = group.train(*batch)
            assert answer.metrics["trainer/skipped_steps"] == 1
            assert alone.train(*batch)["trainer/skipped_steps"] == 1
            assert "policy/loss" in answer.not_finite, "no step was taken"
        last = header.model_copy(update={"version": 2})
        versions[arrays.is_sampled] = 2
        with pytest.raises(
            CallRefused, match="critic's loss inf and its gradient norm inf"
        ):
            group.train(last, changed(arrays, versions=versions))
        good = make_batch(version=2, seed=2)
        assert learned(group.train(*good).metrics) == learned(alone.train(*good))


def test_two_ranks_of_each_model_train_as_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {**PPO, "trainer": {"micro_batch_tokens": 48}}
    for name in ("one", "state"):
        (tmp_path / name).mkdir()
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "one", **values))
    with running(
        tiny_model_dir, tmp_path / "group", 2, critic_ranks=2, **values
    ) as group:
        for version in range(2):
            batch = make_batch(version=version, seed=version, num_groups=3)
            expected, found = alone.train(*batch), group.train(*batch).metrics
            assert learned(found) == pytest.approx(
                learned(expected), rel=1e-3, abs=1e-4
            )
        save_state(group, tmp_path / "state" / "of_four")
    with running(
        tiny_model_dir, tmp_path / "other", 2, critic_ranks=1, **values
    ) as other:
        path = StateRequest(path=tmp_path / "state" / "of_four")
        assert other.post("/load_state", path, TrainerHealth).policy_version == 2
        batch = make_batch(version=2, seed=2)
        expected, found = alone.train(*batch), other.train(*batch).metrics
        assert learned(found) == pytest.approx(learned(expected), rel=1e-3, abs=1e-4)


# ---- settings


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"critic": None, "algorithm": {}}, "placement.critic=cpu is for a critic, and"),
        ({"placement": {"critic": "gpu0"}}, "give auto, cpu, a device number"),
        ({"placement": {"critic": "all"}}, "give auto, cpu, a device number"),
        ({"placement": {}, "critic": {"world_size": 2}}, "which is auto: the trainer's"),
        ({"critic": {"world_size": 99}}, "critic.world_size=99 is above the"),
    ],
)  # fmt: skip
def test_placement_without_its_critic_is_refused(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_config(**{"placement": {"critic": "cpu"}, **sections})


# ---- runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_run_ends_with_the_same_critic_apart(tmp_path: Path) -> None:
    configs = {}
    for where in ("auto", "cpu"):
        (tmp_path / where).mkdir()
        configs[where] = fuzz_config(
            tmp_path / where,
            # Their number decides the order of sums, and the critic's processes leave
            # the trainer fewer cores.
            trainer={"num_steps": 12, "mini_batches": 2, "threads": 1},
            algorithm={"advantage": "gae"},
            critic={"learning_rate": 0.003, "warmup_steps": 2, "value_clip": 0.5},
            placement={"critic": where},
        )
    both = never_killed(configs["auto"], tmp_path / "auto" / "whole")
    whole = never_killed(configs["cpu"], tmp_path / "cpu" / "whole")
    assert differences(both, whole) == []
    assert_equal(critic_of(both), critic_of(whole))
    crashes = Crashes(
        configs["cpu"],
        tmp_path / "cpu" / "run",
        seed=new_seed(),
        victims=["critic", "policy", "controller", "critic"],
    )
    kills = crashes.live()
    assert kills["critic"] > 0
    assert differences(whole, tmp_path / "cpu" / "run") == []
    assert_equal(critic_of(tmp_path / "cpu" / "run"), critic_of(whole))
    steps = job_runs.read_lines(whole / "metrics.jsonl")
    assert steps[-1]["critic/value_mean"] > 0, "it has learned of rewards"
