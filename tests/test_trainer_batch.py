"""What the trainer refuses and what it masks; rollouts of several turns and branches, and credits, against a
computation in plain words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branch_cases import VOCAB, Branch, make_branch_batch, plain_advantages, plain_loss, plain_units
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import batch_of, changed, make_batch, make_spec, naive_logprobs
from transformers import AutoModelForCausalLM

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.batch_checks import check_batch, find_units, loss_tokens
from asyncrl.trainer.model import packing
from asyncrl.trainer.model.packing import mini_batches, pack, split_tokens
from asyncrl.trainer.model.policy import ForwardPlan
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]
CREDITS = {"no credits": ("none",), "turns": ("turn",), "all kinds": ("none", "turn", "branch")}


def at(array: np.ndarray, index: int, value: object) -> np.ndarray:
    result = array.copy()
    result[index] = value
    return result


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"version": 5}, 409, "batch 0 came while the trainer is at policy_version 5"),
        ({"token_ids": lambda a: at(a.token_ids, 7, 52)}, 422, "52 at g10/r0, position 7"),
        ({"versions": lambda a: a.versions[:-1]}, 422, "versions is int32"),
        (
            {"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 6, np.nan)},
            422,
            "not finite: nan at g10",
        ),
        ({"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 5, 0.5)}, 422, "above 0: 0.5 at g10/r0"),
        ({"versions": lambda a: at(a.versions, 5, 1)}, 422, "not in 0 to 0: 1 at g10/r0, position 5"),
        ({"loss_mask": lambda a: at(a.loss_mask, 0, True)}, 422, "-1 at g10/r0, position 0"),
        ({"start": 3}, 422, "trajectories do not follow each other"),
        ({"group_index": 2}, 422, "group indices [0, 2, 0, 1, 1, 1] do not follow"),
    ],
)
def test_a_wrong_batch_is_refused_with_the_place_and_the_value(
    values: dict[str, Any], status: int, message: str
) -> None:
    header, arrays = make_batch()
    check_batch(header, arrays, 0, vocab_size=52)
    entries = list(header.trajectories)
    entries[1] = entries[1].model_copy(update=values)
    header = header.model_copy(update={"trajectories": entries})
    arrays = changed(arrays, **{name: change(arrays) for name, change in values.items() if callable(change)})
    with pytest.raises(Refused) as caught:
        check_batch(header, arrays, values.get("version", 0), vocab_size=52)
    assert caught.value.status == status
    assert message in caught.value.body.error


def test_credits_that_leave_a_sampled_token_out_are_refused() -> None:
    header, arrays = make_branch_batch(3, credits=("turn",))
    entries = list(header.trajectories)
    index = next(number for number, entry in enumerate(entries) if len(entry.credits) > 1)
    entries[index] = entries[index].model_copy(update={"credits": entries[index].credits[1:]})
    with pytest.raises(Refused, match="credits do not cover every loss token"):
        check_batch(header.model_copy(update={"trajectories": entries}), arrays, 0, 52)


def test_an_old_token_is_refused_with_the_worst_ones_values_unless_it_may_be_masked() -> None:
    header, arrays = make_batch(version=7, min_version=5)
    second = header.trajectories[1].start + 5
    arrays = changed(arrays, versions=at(at(arrays.versions, 5, 4), second, 2))
    with pytest.raises(Refused) as caught:
        loss_tokens(header, arrays)
    assert caught.value.status == 409
    words = "g10/r1, position 5 was sampled at version 2, and 2 are older than min_version 5 in batch 7"
    assert words in caught.value.body.error
    kept = loss_tokens(header.model_copy(update={"mask_older": True}), arrays)
    assert np.flatnonzero(arrays.loss_mask & ~kept).tolist() == [5, second]
    all_old = changed(arrays, versions=np.where(arrays.loss_mask, 1, -1).astype(np.int32))
    with pytest.raises(Refused, match="no token that carries loss"):
        loss_tokens(header.model_copy(update={"mask_older": True}), all_old)


# ---- branches and credits


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    return lambda **values: TrainStep(make_spec(tiny_model_dir, tmp_path, **values))


def loss_and_gradients(
    step: TrainStep, header: BatchHeader, arrays: BatchArrays
) -> tuple[float, dict[str, torch.Tensor]]:
    check_batch(header, arrays, step.policy_version, 52)
    sums = step._accumulate(step._numbers(header, arrays, arrays.loss_mask), arrays.loss_mask)
    return sums.loss, {name: master.grad for name, master in step._masters.named.items()}


def assert_same(
    found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
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
    monkeypatch.setattr(packing, "MIN_SHARED_TOKENS", 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    header, arrays = make_branch_batch(3, credits=CREDITS[credits])
    assert max(entry.branch for entry in header.trajectories) == 2
    advantages = plain_advantages(header, len(arrays.token_ids))
    loss = plain_loss(model, header, arrays, advantages, aggregate=aggregate)
    loss.backward()
    expected = float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}
    step = make_step(algorithm={"aggregate": aggregate}, trainer={"micro_batch_tokens": 150})
    step.policy.plan = ForwardPlan(is_packed, True, reason="asked for")
    assert_same(loss_and_gradients(step, header, arrays), expected)


def test_a_shared_prefix_may_hold_tokens_that_carry_loss_in_one_branch_and_are_context_in_another(
    make_step: MakeStep, tiny_model_dir: Path
) -> None:
    rng = np.random.default_rng(0)
    main = Branch(rng.choice(VOCAB, 12).tolist(), [False] * 12)
    main.turn(rng, 0, 5)
    fork = main.fork(17)
    main.turn(rng, 2, 4)
    fork.turn(rng, 3, 4)
    header, arrays = batch_of([[(branch.token_ids, branch.mask) for branch in (main, fork)]])
    (micro,) = pack(header, arrays, arrays.loss_mask, 10**6, torch.device("cpu"))
    assert micro.layout.passes[1].key_lengths == (17,), "the first turn is computed once"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    step = make_step()
    found = step._forward(step.policy, header, arrays, arrays.loss_mask)
    expected = np.where(arrays.loss_mask, naive_logprobs(model, header, arrays, 1.0), 0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([*CREDITS.values()]), st.integers(1, 4), st.integers(20, 200))
def test_every_sampled_token_is_in_one_unit_one_step_one_rank_and_one_micro_batch(
    seed: int, credits: tuple[str, ...], count: int, max_tokens: int
) -> None:
    header, arrays = make_branch_batch(seed, credits=credits)
    check_batch(header, arrays, 0, 52)
    units, expected, sampled = (
        find_units(header, len(arrays.token_ids)),
        plain_units(header),
        arrays.loss_mask,
    )
    assert units.rewards == [reward for reward, _ in expected.values()]
    assert units.groups == [key[0] - 10 for key in expected]
    for number, (_, places) in enumerate(expected.values()):
        assert (units.unit_N[places] == number).all()
    assert units.count(sampled).sum() == sampled.sum()
    steps = mini_batches(header, sampled, count)
    assert np.array_equal(np.sum(steps, axis=0), sampled)
    assert np.array_equal(np.sum(split_tokens(header, sampled, count), axis=0), sampled)
    for chosen in steps:
        micros = pack(header, arrays, chosen, max_tokens, torch.device("cpu"))
        sources = np.concatenate([micro.source_M for micro in micros])
        assert sources.tolist() == np.flatnonzero(chosen).tolist()


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


@pytest.mark.parametrize("loss", ["gspo", "m2po", "decoupled_ppo", "cispo"])
def test_any_cut_into_micro_batches_gives_the_same_gradient(make_step: MakeStep, loss: str) -> None:
    header, arrays = make_branch_batch(6)
    whole, *cut = (
        loss_and_gradients(
            make_step(algorithm={"loss": loss}, trainer={"micro_batch_tokens": tokens}), header, arrays
        )
        for tokens in (10**6, 1, 40)
    )
    for found in cut:
        assert_same(found, whole)
