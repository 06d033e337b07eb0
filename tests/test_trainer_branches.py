"""Rollouts of several turns and branches, and credits: what is trained, against a computation in plain
words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branch_cases import VOCAB, Branch, make_branch_batch, plain_advantages, plain_loss, plain_units
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import batch_of
from trainer_cases import changed, make_spec, naive_logprobs
from transformers import AutoModelForCausalLM

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, Credit
from asyncrl.trainer.batch_checks import check_batch, find_units
from asyncrl.trainer.model import packing
from asyncrl.trainer.model.packing import pack
from asyncrl.trainer.model.plan_check import Plan
from asyncrl.trainer.shares import mini_batches, split_tokens
from asyncrl.trainer.step import TrainStep

MakeStep = Callable[..., TrainStep]
CREDITS = {
    "no credits": ("none",),
    "turns": ("turn",),
    "branches": ("branch",),
    "all kinds": ("none", "turn", "branch"),
}


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(*, is_padded: bool = False, **values: Any) -> TrainStep:
        step = TrainStep(make_spec(tiny_model_dir, tmp_path, **values))
        if is_padded:
            step.policy.plan = Plan(False, True, reason="asked for")
        return step

    return make


def loss_and_gradients(
    step: TrainStep, header: BatchHeader, arrays: BatchArrays
) -> tuple[float, dict[str, torch.Tensor]]:
    check_batch(header, arrays, step.policy_version, 52)
    sums = step._accumulate(step._numbers(header, arrays, arrays.loss_mask), arrays.loss_mask)
    found = {
        name: master.grad.clone() for name, master in step._masters.named.items() if master.grad is not None
    }
    step._optimizer.zero_grad()
    return sums.loss, found


def plain_gradients(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_same(
    found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("credits", CREDITS)
def test_loss_and_gradient_are_those_of_a_plain_computation_branch_by_branch(
    make_step: MakeStep,
    tiny_model_dir: Path,
    credits: str,
    aggregate: str,
    is_padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED_TOKENS", 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    header, arrays = make_branch_batch(3, credits=CREDITS[credits])
    assert max(entry.branch for entry in header.trajectories) == 2
    expected = plain_loss(
        model, header, arrays, plain_advantages(header, len(arrays.token_ids)), aggregate=aggregate
    )
    step = make_step(
        is_padded=is_padded, algorithm={"aggregate": aggregate}, trainer={"micro_batch_tokens": 150}
    )
    assert_same(loss_and_gradients(step, header, arrays), plain_gradients(model, expected))


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
    assert micro.layout.families == ((17, 5 + 6),), (
        "the first turn is computed once, and five of its tokens carry loss"
    )
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
    units = find_units(header, len(arrays.token_ids))
    expected = plain_units(header)
    assert (units.rewards, units.groups) == (
        [reward for reward, _ in expected.values()],
        [key[0] - 10 for key in expected],
    )
    for number, (_, places) in enumerate(expected.values()):
        assert (units.unit_N[places] == number).all()
    assert (units.unit_N[arrays.loss_mask] >= 0).all()
    assert units.count(arrays.loss_mask).sum() == arrays.loss_mask.sum()
    steps = mini_batches(header, arrays.loss_mask, count)
    assert np.array_equal(np.sum(steps, axis=0), arrays.loss_mask)
    assert np.array_equal(
        np.sum(split_tokens(header, arrays, arrays.loss_mask, count), axis=0), arrays.loss_mask
    )
    for chosen in steps:
        micros = pack(header, arrays, chosen, max_tokens, torch.device("cpu"))
        assert (
            np.concatenate([micro.source_M for micro in micros]).tolist() == np.flatnonzero(chosen).tolist()
        )


def test_advantages_of_units_follow_the_tokens_and_not_the_order_of_turns(make_step: MakeStep) -> None:
    header, arrays = make_branch_batch(5, credits=("turn",))
    step = make_step()
    before = step._numbers(header, arrays, arrays.loss_mask).advantage_N
    turned = [entry.model_copy(update={"credits": entry.credits[::-1]}) for entry in header.trajectories]
    after = step._numbers(
        header.model_copy(update={"trajectories": turned}), arrays, arrays.loss_mask
    ).advantage_N
    np.testing.assert_allclose(after, before, atol=1e-6)
    np.testing.assert_allclose(
        before[arrays.loss_mask], plain_advantages(header, len(before))[arrays.loss_mask], atol=1e-5
    )
    assert len(np.unique(before[arrays.loss_mask])) > len(header.trajectories)


def test_a_rollout_without_credits_is_one_sample_over_all_its_branches(make_step: MakeStep) -> None:
    header, arrays = make_branch_batch(3, credits=("none",))
    advantage_N = make_step()._numbers(header, arrays, arrays.loss_mask).advantage_N
    found: dict[tuple[int, int], set[float]] = {}
    for entry in header.trajectories:
        found.setdefault((entry.group_id, entry.sample_index), set()).update(
            advantage_N[entry.start : entry.end].tolist()
        )
    assert all(len(values) == 1 for values in found.values())
    for group_id in (10, 11, 12):
        values = [min(advantages) for (group, _), advantages in found.items() if group == group_id]
        assert (len(values), sum(values)) == (3, pytest.approx(0.0, abs=1e-6)), (
            "each rollout counts once in the mean"
        )


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
    whole = loss_and_gradients(make_step(algorithm={"loss": loss}), header, arrays)
    assert_same(
        loss_and_gradients(
            make_step(algorithm={"loss": loss}, trainer={"micro_batch_tokens": 40}), header, arrays
        ),
        whole,
    )


def with_entry(header: BatchHeader, index: int, **values: Any) -> BatchHeader:
    entries = list(header.trajectories)
    entries[index] = entries[index].model_copy(update=values)
    return header.model_copy(update={"trajectories": entries})


def refusal(header: BatchHeader, arrays: BatchArrays) -> str:
    with pytest.raises(Refused) as caught:
        check_batch(header, arrays, 0, 52)
    assert caught.value.status == 422
    return f"{caught.value.body.error}; {caught.value.body.rule}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda credits: credits[1:], "is in 0 credits"),
        (lambda credits: [*credits, replace(credits[-1], unit=90)], "is in 2 credits"),
        (
            lambda credits: [replace(credits[0], end=credits[0].end - 1), *credits[1:]],
            "cover every loss token once",
        ),
        (
            lambda credits: [replace(credits[0], start=-1), *credits[1:]],
            "has a credit for tokens [-1, ",
        ),
        (
            lambda credits: [*credits, Credit(start=3, end=3, reward=0.0, unit=9)],
            "has a credit for tokens [3, 3)",
        ),
        (
            lambda credits: [replace(credits[0], end=10**6), *credits[1:]],
            "has a credit for tokens [",
        ),
        (lambda credits: [replace(credits[0], unit=-1), *credits[1:]], "its unit 0 or more"),
        (
            lambda credits: [replace(credits[0], reward=float("nan")), *credits[1:]],
            "has rewards nan",
        ),
        (
            lambda credits: [replace(credits[0], unit=credits[1].unit), *credits[1:]],
            "a unit of a rollout has one reward",
        ),
        (lambda credits: [], "credits cover every loss token of a rollout, or there are none"),
    ],
)
def test_credits_that_do_not_add_up_are_refused(
    change: Callable[[list[Credit]], list[Credit]], words: str
) -> None:
    header, arrays = make_branch_batch(3, credits=("turn",))
    index = next(
        number
        for number, entry in enumerate(header.trajectories)
        if len(entry.credits) > 1 and entry.branch == 1
    )
    entry = header.trajectories[index]
    text = refusal(with_entry(header, index, credits=change(entry.credits)), arrays)
    assert words in text
    assert f"g{entry.group_id}/r{entry.sample_index}" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"branch": 2}, "/b2, branch 2, comes after sample 0, branch 0"),
        ({"branch": 0}, "branch 0, comes after sample 0, branch 0"),
        ({"sample_index": 1}, "r1/b1, branch 1, comes after sample 0, branch 0"),
    ],
)
def test_branches_out_of_order_are_refused(values: dict[str, int], words: str) -> None:
    header, arrays = make_branch_batch(3, credits=("none",))
    index = next(
        number
        for number, entry in enumerate(header.trajectories)
        if entry.branch == 1 and entry.sample_index == 0
    )
    assert words in refusal(with_entry(header, index, **values), arrays)


def test_a_unit_whose_tokens_are_all_too_old_still_counts_in_its_groups_mean(make_step: MakeStep) -> None:
    header, arrays = make_branch_batch(3, credits=("turn",), num_groups=1)
    first = header.trajectories[0].credits[0]
    has_loss = arrays.loss_mask.copy()
    has_loss[first.start : first.end] = False
    advantage_N = make_step()._numbers(header, changed(arrays), has_loss).advantage_N
    np.testing.assert_allclose(
        advantage_N[has_loss], plain_advantages(header, len(has_loss))[has_loss], atol=1e-5
    )
