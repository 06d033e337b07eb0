"""The recipes against TRL's own code on the same logprobs and rewards, to 1e-5.

TRL's trainer is made without its constructor. The test replaces three methods: sampled
completions, their rewards, and the logprobs of the weights. TRL computes advantages,
importance weights, KL and loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_cases import batch_of, changed, make_spec

from asyncrl.algorithms.advantages import overlong_penalty
from asyncrl.messages.records import (
    RewardPart,
    total,
)
from asyncrl.messages.tokens import Tokens
from asyncrl.trainer.loss.objective import BatchNumbers, Objective
from asyncrl.trainer.loss.packing import Costs, PackRules, micro_batches
from asyncrl.trainer.ranks.ranks import ONE_RANK

pytestmark = pytest.mark.xdist_group("trl")  # its import costs seconds: one process
MAX_TOKENS = 8
GROUP_SIZE = 3
DAPO = {"loss_type": "dapo"}
GSPO = {
    "importance_sampling_level": "sequence",
    "epsilon_low": 3e-4,
    "epsilon_high": 4e-4,
}
VESPO = {"loss_type": "vespo"}
CLIPS = {"clip_low": 3e-4, "clip_high": 4e-4}


def weighted(mode: str, **more: Any) -> dict[str, Any]:
    """TRL's importance weights."""
    return {**DAPO, "use_vllm": True, "vllm_importance_sampling_mode": mode, **more}


OPTIONS = ("clip_delta", "off_policy_mask", "top_entropy", "kl_weighted")
AROUND_BEHAVIOUR = {
    "PPO-clip": ({}, {"loss_type": "bnpo"}),
    "CISPO": ({"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "GSPO": ({"loss": "gspo", **CLIPS}, GSPO),
    "LUSPO": ({"loss": "luspo", **CLIPS}, {**GSPO, "loss_type": "luspo"}),
    "VESPO": ({"loss": "vespo"}, VESPO),
    "two-sided clip": ({"clip_delta": 1.5}, {"loss_type": "bnpo", "delta": 1.5}),
    "OPSM": (
        {"off_policy_mask": 0.1},
        {"loss_type": "bnpo", "off_policy_mask_threshold": 0.1},
    ),
    "top entropy": (
        {"top_entropy": 0.4},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.4},
    ),
    "KL of stale data": ({"kl_coefficient": 0.3}, {"loss_type": "bnpo", "beta": 0.3}),
    "SAPO": (
        {"loss": "test_algorithms_functions:sapo", "aggregate": "sequence"},
        {"loss_type": "sapo"},
    ),
}
"""An algorithm with the names of both sides; TRL's old policy is the sampling policy
here.
"""
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **AROUND_BEHAVIOUR,
    "GRPO": (
        {"ratio": "proximal", "aggregate": "sequence", "advantage": "grpo_sample"},
        {"scale_rewards": "group"},
    ),
    "DAPO": (
        {"loss": "dapo", "ratio": "proximal", "advantage": "grpo_sample"},
        {**DAPO, "scale_rewards": "group"},
    ),
    "GRPO with KL": (
        {"ratio": "proximal", "aggregate": "sequence", "kl_coefficient": 0.3},
        {"beta": 0.3},
    ),
    "Dr. GRPO": (
        {"ratio": "proximal", "aggregate": "constant"},
        {"loss_type": "dr_grpo"},
    ),
    "DAPO with plain KL": (
        {
            "loss": "dapo",
            "ratio": "proximal",
            "kl_coefficient": 0.3,
            "kl_weighted": False,
        },
        {**DAPO, "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "GSPO over tokens": (
        {"loss": "gspo", "ratio": "proximal", "aggregate": "token", **CLIPS},
        DAPO | GSPO,
    ),
    "decoupled PPO": ({"loss": "decoupled_ppo"}, weighted("token_truncate")),
    "MIS": ({"loss": "decoupled_ppo", "correction": "mis"}, weighted("token_mask")),
    "TIS by sequence": (
        {"loss": "decoupled_ppo", "correction": "tis_sequence"},
        weighted("sequence_truncate"),
    ),
    "MIS by sequence": (
        {"loss": "decoupled_ppo", "correction": "mis_sequence"},
        weighted("sequence_mask"),
    ),
    "IcePop": (
        {"loss": "icepop", "importance_cap": 2.0},
        weighted("token_mask", vllm_importance_sampling_clip_min=0.5),
    ),
}


@dataclass(frozen=True)
class Sampled:
    """Completions of the given lengths, one after another, [M]; groups of GROUP_SIZE;
    rewards [B].
    """

    lengths: list[int]
    reward_B: Tensor
    current_M: Tensor
    proximal_M: Tensor
    behaviour_M: Tensor
    reference_M: Tensor
    entropy_M: Tensor


Answer = tuple[Tensor, dict[str, float], Tensor]
"""Loss of one optimizer step with gradient, statistics or metrics, advantages [B]."""


def over_batch(value_M: Tensor, arrays: Tokens) -> Any:
    value_N = torch.zeros(len(arrays.is_sampled))
    value_N[torch.from_numpy(arrays.is_sampled)] = value_M
    return value_N.numpy()


def sample(seed: int) -> Sampled:
    """Two groups whose logprobs differ enough that clips, caps and floors all bite."""
    torch.manual_seed(seed)
    lengths = [3, 5, 1, 8, 2, 6]
    count = sum(lengths)
    behaviour_M = -3 * torch.rand(count)
    proximal_M = behaviour_M + 0.6 * torch.randn(count)
    return Sampled(
        lengths=lengths,
        reward_B=torch.randint(0, 4, (len(lengths),)).float()
        + torch.rand(len(lengths)),
        current_M=(proximal_M + 0.3 * torch.randn(count)).requires_grad_(),
        proximal_M=proximal_M,
        behaviour_M=behaviour_M,
        reference_M=behaviour_M + torch.randn(count),
        entropy_M=3 * torch.rand(count),
    )


def our_loss(
    sampled: Sampled,
    *,
    age_M: Sequence[int] = (),
    parts: Sequence[dict[str, RewardPart]] = (),
    **algorithm: Any,
) -> Answer:
    rows = [
        ([0] * (1 + length), [False] + [True] * length) for length in sampled.lengths
    ]
    header, arrays = batch_of([rows[:GROUP_SIZE], rows[GROUP_SIZE:]])
    scored = zip(header.trajectories, sampled.reward_B.tolist(), strict=True)
    entries = [entry.model_copy(update={"reward": reward}) for entry, reward in scored]
    if parts:
        given = zip(entries, parts, strict=True)
        entries = [entry.model_copy(update={"parts": own}) for entry, own in given]
    header = header.model_copy(update={"trajectories": entries})
    arrays = changed(arrays, behaviour_logprobs=over_batch(sampled.behaviour_M, arrays))
    mask = arrays.is_sampled
    if age_M:
        header = header.model_copy(update={"version": max(age_M)})
        age_N = over_batch(torch.tensor(age_M).float(), arrays).astype(np.int32)
        arrays = changed(arrays, versions=np.where(mask, header.version - age_N, -1))
    settings = {"advantage": "dr_grpo", "clip_high": 0.28, **algorithm}
    objective = Objective(
        make_spec(Path(), Path(), algorithm=settings, max_tokens=MAX_TOKENS)
    )
    known = (sampled.proximal_M, sampled.reference_M, sampled.entropy_M)
    batch = BatchNumbers(
        header, arrays, mask, *(over_batch(value_M, arrays) for value_M in known)
    )
    batch.advantage_N = objective.advantages(batch)
    cpu = torch.device("cpu")
    ((micro, _),) = micro_batches(
        header, arrays, mask, PackRules(1000), cpu, ONE_RANK, Costs(0.0, 0.0)
    )
    numbers = objective.step_numbers(batch, mask)
    loss, stats = objective.micro_loss(micro, sampled.current_M, batch, numbers)
    advantage_B = batch.advantage_N[[entry.end - 1 for entry in header.trajectories]]
    return (
        loss,
        {name: float(value) for name, value in stats.items()},
        torch.from_numpy(advantage_B),
    )


def trl_loss(sampled: Sampled, *, is_rloo: bool = False, **changes: Any) -> Answer:
    """Compute the loss of TRL's trainer with these attributes changed."""
    from accelerate import Accelerator
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    lists = [[1] * length for length in sampled.lengths]
    texts = ["c"] * len(sampled.lengths)
    behaviour = [part.tolist() for part in sampled.behaviour_M.split(sampled.lengths)]
    generated: Any = (lists, lists, None, texts, behaviour, {}, None, None)
    if is_rloo:
        generated = (lists, lists, texts)
    logprob_M = sampled.proximal_M

    def logps_and_entropies(
        model: Any, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        of_model_M = sampled.reference_M if model == "reference" else logprob_M
        parts = (
            value_M.split(sampled.lengths)
            for value_M in (of_model_M, sampled.entropy_M)
        )
        values = (
            torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True)
            for part in parts
        )
        return *values, None

    defaults = {
        field.name: field.default
        for config in (RLOOConfig, GRPOConfig)
        for field in fields(config)
    }
    of_run = {"steps_per_generation": 1, "per_device_train_batch_size": len(lists)}
    made: Any = object.__new__(RLOOTrainer if is_rloo else GRPOTrainer)
    vars(made).update(defaults)
    vars(made).update(
        args=SimpleNamespace(**{**defaults, **of_run, **changes}),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model="reference",
        accelerator=Accelerator(cpu=True),
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        vllm_importance_sampling_clip_max=2.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        num_iterations=2,
        num_generations=GROUP_SIZE,
        scale_rewards="none",
        reward_weights=torch.ones(1),
        reward_func_names=["given"],
        environment_factories=None,
        environments=None,
        tools=[],
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        log_multimodal=False,
        _pending_metrics={},
        _pending_extra_logs={},
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: sampled.reward_B[:, None],
        _get_per_token_logps_and_entropies=logps_and_entropies,
    )
    vars(made).update(changes)
    inputs = made._generate_and_score_completions([{"prompt": "p"}] * len(lists))
    logprob_M = sampled.current_M
    loss = made._compute_loss(made.model, inputs)
    last = {
        name: values[-1] for name, values in made._metrics["train"].items() if values
    }
    return (
        loss,
        {name: value for name, value in last.items() if math.isfinite(value)},
        inputs["advantages"],
    )


def assert_close(ours: Tensor, theirs: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)


def gradient(loss: Tensor, sampled: Sampled) -> Tensor:
    return torch.autograd.grad(loss, sampled.current_M)[0]


@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_match_trl(name: str) -> None:
    (ours_says, theirs_says), sampled = SAME[name], sample(1)
    ours, stats, _ = our_loss(sampled, **ours_says)
    old_M = sampled.behaviour_M if name in AROUND_BEHAVIOUR else sampled.proximal_M
    theirs, metrics, _ = trl_loss(replace(sampled, proximal_M=old_M), **theirs_says)
    assert_close(ours, theirs)
    assert_close(gradient(ours, sampled), gradient(theirs, sampled))
    without = {key: value for key, value in ours_says.items() if key not in OPTIONS}
    if without != ours_says:
        assert not torch.allclose(our_loss(sampled, **without)[0], ours), (
            "the option changes nothing here"
        )
    if "clip_fraction" in stats:
        assert stats["clip_fraction"] > 0, (
            "no token is clipped: the comparison proves little"
        )
        # TRL counts clips differently for these
        if (
            ours_says.get("loss") not in ("cispo", "gspo", "luspo")
            and "clip_delta" not in ours_says
        ):
            clip_fraction = stats["clip_fraction"] / sum(sampled.lengths)
            assert clip_fraction == pytest.approx(metrics["clip_ratio/region_mean"])


def test_age_clip_gives_older_tokens_more_room() -> None:
    """Each token's gradient by a loop over plain numbers. One optimizer step: the
    proximal policy is the current one.
    """
    sampled = sample(2)
    count = sum(sampled.lengths)
    sampled = replace(sampled, proximal_M=sampled.current_M.detach())
    age_M = [token % 5 * 2 for token in range(count)]
    ours, stats, advantage_B = our_loss(
        sampled,
        age_M=age_M,
        loss="age_clip",
        clip_high=0.1,
        kl_coefficient=0.3,
        kl_estimator="k2",
    )
    expected, num_kept = [], 0
    for token in range(count):
        sequence = sum(
            token >= sum(sampled.lengths[: n + 1]) for n in range(len(sampled.lengths))
        )
        advantage = float(advantage_B[sequence])
        current = float(sampled.proximal_M[token])
        ratio = math.exp(current - float(sampled.behaviour_M[token]))
        steps = 1 + age_M[token] / 2
        moved_too_far = (
            ratio > 1.1**steps if advantage > 0 else ratio < 0.8**steps
        ) and advantage != 0
        num_kept += not moved_too_far
        kl = 0.3 * min(ratio, 1.0) * (current - float(sampled.reference_M[token]))
        expected.append((kl - advantage * (not moved_too_far)) / count)
    assert_close(gradient(ours, sampled), torch.tensor(expected))
    assert stats["importance_weight"] == num_kept
    fresh = our_loss(sampled, loss="age_clip", clip_high=0.1)[1]["importance_weight"]
    assert fresh < num_kept < count


def test_age_clip_is_ppo_clip_on_policy() -> None:
    sampled = sample(3)
    same_M = sampled.current_M.detach()
    sampled = replace(sampled, proximal_M=same_M, behaviour_M=same_M)
    gradients = [
        gradient(our_loss(sampled, loss=loss, kl_coefficient=0.3)[0], sampled)
        for loss in ("age_clip", "ppo_clip")
    ]
    assert torch.equal(*gradients)


def test_advantages_match_trl() -> None:
    sampled = sample(0)
    for ours, theirs in (
        ({}, {}),
        (
            {"kl_coefficient": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
            {"beta": 0.3},
        ),
    ):
        _, _, ours_B = our_loss(sampled, advantage="rloo", **ours)
        _, _, theirs_B = trl_loss(sampled, is_rloo=True, **{"beta": 0.0, **theirs})
        assert_close(ours_B, theirs_B)
    for name, scale_rewards in (
        ("grpo_sample", "group"),
        ("lite_ppo", "batch"),
        ("dr_grpo", "none"),
    ):
        _, _, ours_B = our_loss(sampled, advantage=name)
        _, _, theirs_B = trl_loss(sampled, scale_rewards=scale_rewards)
        assert_close(ours_B, theirs_B)
    # grpo divides by the deviation of the population, grpo_sample and TRL by the
    # deviation of a sample.
    ratio_B = (
        our_loss(sampled, advantage="grpo_sample")[2]
        / our_loss(sampled, advantage="grpo")[2]
    )
    assert_close(
        ratio_B, torch.full_like(ratio_B, ((GROUP_SIZE - 1) / GROUP_SIZE) ** 0.5), 1e-3
    )


@pytest.mark.parametrize("seed", range(8))
def test_several_rewards_match_trl(seed: int) -> None:
    """Both aggregations of TRL. None is NaN there, and a part that does not
    apply here.
    """
    sampled = sample(seed)
    names, weights = ["exact", "form", "short"], [1.0, 0.2, -0.5]
    value_BK = torch.randint(0, 3, (len(sampled.lengths), 3)).float()
    value_BK[:, 2] = torch.rand(len(value_BK))
    value_BK[seed % 6, seed % 3] = torch.nan
    parts = [
        {
            name: RewardPart(None if math.isnan(value) else value, weight)
            for name, value, weight in zip(names, row, weights, strict=True)
        }
        for row in value_BK.tolist()
    ]
    shared: dict[str, Any] = {
        "reward_weights": torch.tensor(weights),
        "reward_func_names": names,
        "reward_funcs": names,
        "_calculate_rewards": lambda *_: value_BK,
    }
    reward_B = torch.tensor([total(each) for each in parts])
    sampled = replace(sampled, reward_B=reward_B)
    grpo = SAME["GRPO"][0]
    by_sum = our_loss(sampled, parts=parts, **grpo)
    theirs = trl_loss(sampled, **shared, scale_rewards="group")
    assert_close(by_sum[2], theirs[2], 1e-6)
    aggregation = "normalize_then_sum"
    decoupled = our_loss(sampled, parts=parts, rewards=aggregation, **grpo)
    theirs = trl_loss(sampled, **shared, multi_objective_aggregation=aggregation)
    assert_close(decoupled[2], theirs[2], 1e-6)
    assert_close(decoupled[0], theirs[0])
    assert not torch.allclose(by_sum[2], decoupled[2], atol=0.01)


def test_length_penalty_matches_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    for overlong_tokens in (1, 20):
        theirs = get_soft_overlong_punishment(100, overlong_tokens)(
            [[0] * length for length in lengths]
        )
        assert_close(
            overlong_penalty(torch.tensor(lengths), 100, overlong_tokens),
            torch.tensor(theirs),
        )
