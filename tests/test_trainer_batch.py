"""What the trainer refuses and what it masks; rollouts of several turns and branches, and credits, against a
computation in plain words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branch_cases import make_branch_batch, plain_advantages, plain_loss, plain_units
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import MakeStep, changed, make_batch, naive
from transformers import AutoModelForCausalLM

from asyncrl.messages.calls import BatchArrays, BatchHeader
from asyncrl.serving import Refused
from asyncrl.trainer.model import tree
from asyncrl.trainer.model.dealing import Costs
from asyncrl.trainer.model.packing import mini_batches, rank_micro_batches
from asyncrl.trainer.model.policy import ForwardPlan
from asyncrl.trainer.objective import check_batch, find_units, loss_tokens
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.step import TrainStep

CREDITS = {"no credits": ("none",), "turns": ("turn",), "all kinds": ("none", "turn", "branch")}


def at(array: np.ndarray, index: int, value: object) -> np.ndarray:
    result = array.copy()
    result[index] = value
    return result


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 5}, "batch 0 came while the trainer is at policy_version 5"),
        ({"token_ids": lambda a: at(a.token_ids, 7, 52)}, "id 52 with"),
        ({"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 7, np.nan)}, "with logprob nan of"),
        ({"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 7, 0.5)}, "with logprob 0.5 of"),
        ({"versions": lambda a: at(a.versions, 7, 1)}, "of version 1 at g10/r0/b0, position 7"),
        ({"loss_mask": lambda a: at(a.loss_mask, 0, True)}, "of version -1 at g10/r0/b0, position 0"),
    ],
)
def test_a_wrong_batch_is_refused_with_the_place_and_the_value(values: dict[str, Any], message: str) -> None:
    header, arrays = make_batch()
    check_batch(header, arrays, 0, vocab_size=52)
    arrays = changed(arrays, **{name: change(arrays) for name, change in values.items() if callable(change)})
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        check_batch(header, arrays, values.get("version", 0), vocab_size=52)
    assert caught.value.status == (409 if "version" in values else 422)


def test_an_old_token_is_refused_with_the_worst_ones_values_unless_it_may_be_masked() -> None:
    header, arrays = make_batch(version=7, min_version=5)
    second = header.trajectories[1].start + 5
    arrays = changed(arrays, versions=at(at(arrays.versions, 5, 4), second, 2))
    words = "g10/r1/b0, position 5 was sampled at version 2, and 2 are older than min_version 5 in batch 7"
    with pytest.raises(Refused, match=words) as caught:
        loss_tokens(header, arrays)
    assert caught.value.status == 409
    kept = loss_tokens(header.model_copy(update={"mask_older": True}), arrays)
    assert np.flatnonzero(arrays.loss_mask & ~kept).tolist() == [5, second]
    all_old = changed(arrays, versions=np.where(arrays.loss_mask, 1, -1).astype(np.int32))
    with pytest.raises(Refused, match="no token that carries loss"):
        loss_tokens(header.model_copy(update={"mask_older": True}), all_old)


# ---- branches and credits


Found = tuple[float, dict[str, torch.Tensor]]
"""The loss of one optimizer step, and the gradients before the optimizer sees them."""


def loss_and_gradients(step: TrainStep, header: BatchHeader, arrays: BatchArrays) -> Found:
    check_batch(header, arrays, step.policy_version, 52)
    sums = step._accumulate(step._numbers(header, arrays, arrays.loss_mask), arrays.loss_mask)
    return sums.loss, {name: master.grad for name, master in step._masters.named.items()}


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("credits", CREDITS)
def test_loss_and_gradient_are_those_of_a_plain_computation_branch_by_branch(
    make_step: MakeStep,
    tiny_model_dir: Path,
    credits: str,
    aggregate: str,
    is_packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "MIN_SHARED_TOKENS", 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    header, arrays = make_branch_batch(3, credits=CREDITS[credits])
    assert max(entry.branch for entry in header.trajectories) == 2
    advantages = plain_advantages(header, len(arrays.token_ids))
    loss = plain_loss(model, header, arrays, advantages, aggregate=aggregate)
    loss.backward()
    expected = float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}
    trainer = {"micro_batch_tokens": 150, "max_grad_norm": 1e-3}
    step, again = (make_step(algorithm={"aggregate": aggregate}, trainer=trainer) for _ in range(2))
    step.policy.plan = ForwardPlan(is_packed, True, reason="asked for")
    assert_same(loss_and_gradients(step, header, arrays), expected)
    norm = torch.stack([gradient.norm() for gradient in expected[1].values()]).norm().item()
    metrics = again.train(header, arrays)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4), "that before it is clipped"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([*CREDITS.values()]), st.integers(1, 4), st.integers(20, 200))
def test_every_sampled_token_is_in_one_unit_one_step_one_rank_and_one_micro_batch(
    seed: int, credits: tuple[str, ...], count: int, max_tokens: int
) -> None:
    header, arrays = make_branch_batch(seed, credits=credits)
    check_batch(header, arrays, 0, 52)
    sampled, expected = arrays.loss_mask, plain_units(header)
    units = find_units(header, len(sampled))
    assert units.rewards == [reward for reward, _ in expected.values()]
    assert units.groups == [key[0] - 10 for key in expected]
    for number, (_, places) in enumerate(expected.values()):
        assert (units.unit_N[places] == number).all()
    assert (units.unit_N[sampled] >= 0).all()
    steps = mini_batches(header, sampled, count)
    assert np.array_equal(np.sum(steps, axis=0), sampled)
    for chosen in steps:
        found, num_micros = list[int](), set[int]()
        for rank in range(count):
            ranks, cpu = Ranks(rank, count), torch.device("cpu")
            micros = rank_micro_batches(header, arrays, chosen, max_tokens, cpu, ranks, Costs(0.01, 0.1))
            num_micros.add(len(micros))
            found += [place for micro, counts in micros if counts for place in micro.source_M.tolist()]
            assert all(len(micro.source_M) == 1 for micro, counts in micros if not counts)
        assert sorted(found) == np.flatnonzero(chosen).tolist()
        assert len(num_micros) == 1, "or FSDP's collectives would not match"


def test_advantages_of_units_follow_the_tokens_and_not_the_order_of_turns(make_step: MakeStep) -> None:
    header, arrays = make_branch_batch(5, credits=("turn",))
    sampled = arrays.loss_mask.copy()
    first = header.trajectories[0].credits[0]
    sampled[first.start : first.end] = False  # too old, and in its group's mean all the same
    turned = [entry.model_copy(update={"credits": entry.credits[::-1]}) for entry in header.trajectories]
    expected = plain_advantages(header, len(sampled))[sampled]
    for entries in (header.trajectories, turned):
        numbers = make_step()._numbers(header.model_copy(update={"trajectories": entries}), arrays, sampled)
        np.testing.assert_allclose(numbers.advantage_N[sampled], expected, atol=1e-5)


def test_the_overlong_penalty_is_for_all_sampled_tokens_of_a_unit(make_step: MakeStep) -> None:
    header, arrays = make_branch_batch(3)
    step = make_step(algorithm={"overlong_tokens": 8}, max_tokens=14)

    def penalty(places: list[int]) -> float:
        return float(np.clip((arrays.loss_mask[places].sum() - 6) / 8, 0, 1))

    expected = plain_advantages(header, len(arrays.token_ids), penalty)
    assert {penalty(places) for _, places in plain_units(header).values()} >= {0.0, 1.0}
    advantage_N = step._numbers(header, arrays, arrays.loss_mask).advantage_N
    np.testing.assert_allclose(advantage_N[arrays.loss_mask], expected[arrays.loss_mask], atol=1e-5)


def test_the_top_entropy_mask_takes_the_entropies_of_the_weights_and_leaves_the_divisor(
    make_step: MakeStep, tiny_model_dir: Path
) -> None:
    header, arrays = make_batch(num_groups=3)
    step = make_step(algorithm={"loss": "reinforce", "top_entropy": 0.3}, trainer={"micro_batch_tokens": 40})
    model, entropies = AutoModelForCausalLM.from_pretrained(tiny_model_dir), []
    for entry in header.trajectories:
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        logprobs_TV = model(input_ids=ids[None]).logits[0, :-1].detach().log_softmax(-1)
        mask_T = torch.from_numpy(arrays.loss_mask[entry.start + 1 : entry.end])
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1)[mask_T])
    entropy_M = torch.cat(entropies)
    kept_M = entropy_M >= entropy_M.quantile(0.7)
    assert 0.2 < kept_M.float().mean() < 0.4
    advantage_N = plain_advantages(header, len(arrays.token_ids))
    advantage_M = torch.from_numpy(advantage_N[arrays.loss_mask]).float()
    loss = -(naive(model, header, arrays) * advantage_M * kept_M).sum() / len(kept_M)
    loss.backward()
    expected = float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}
    assert_same(loss_and_gradients(step, header, arrays), expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"loss": loss} for loss in ("gspo", "m2po", "decoupled_ppo", "icepop", "cispo", "luspo", "vespo")),
        {"loss": "decoupled_ppo", "correction": "tis_sequence"},
        {"loss": "decoupled_ppo", "correction": "mis_sequence"},
        {"loss": "vespo", "ratio": "proximal", "correction": "tis"},
        {"top_entropy": 0.3, "off_policy_mask": 0.1, "clip_delta": 1.5},
        {"loss": "decoupled_ppo", "kl_coefficient": 0.1},
    ],
)
def test_any_micro_batches_give_the_same_gradient(make_step: MakeStep, algorithm: dict[str, Any]) -> None:
    header, arrays = make_branch_batch(6)
    limits = [{"micro_batch_tokens": tokens} for tokens in (10**6, 1, 40)]
    steps = (make_step(algorithm=algorithm, trainer=limit) for limit in limits)
    whole, *cut = (loss_and_gradients(step, header, arrays) for step in steps)
    for found in cut:
        assert_same(found, whole)
