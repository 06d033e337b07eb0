"""How batches are packed, what the trainer refuses, and credits against a plain
computation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_cases import masked_tokens
from trainer_cases import (
    MakeStep,
    batch_of,
    changed,
    gradient_of,
    make_batch,
    make_branch_batch,
    plain_advantages,
    plain_loss,
    plain_units,
)
from transformers import AutoModelForCausalLM

from asyncrl.base.http import Refused
from asyncrl.messages.records import (
    Batch,
    CallSpan,
    Credit,
    Group,
    GroupId,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.token_grammars import GrammarError
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader, pack_batch, unpack_batch
from asyncrl.trainer.attention import tree
from asyncrl.trainer.loss.objective import (
    check_any_loss,
    check_batch,
    find_units,
    loss_tokens,
)
from asyncrl.trainer.loss.packing import (
    Costs,
    PackRules,
    find_allowed,
    micro_batches,
    mini_batches,
)
from asyncrl.trainer.model import build_model
from asyncrl.trainer.model.policy import ForwardPlan
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.trainer_client import pack_groups

CREDITS = {
    "no credits": ("none",),
    "turns": ("turn",),
    "all kinds": ("none", "turn", "branch"),
}


def at(array: np.ndarray, index: int, value: object) -> np.ndarray:
    result = array.copy()
    result[index] = value
    return result


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", 52, "example id 52 with"),
        ("behaviour_logprobs", np.nan, "with logprob nan of"),
        ("versions", 1, "of version 1"),
    ],
)
def test_token_that_the_model_cannot_have_sampled_is_refused(
    name: str, value: float, message: str
) -> None:
    header, arrays = make_batch()
    check_batch(header, arrays, 0, vocab_size=52)
    with pytest.raises(Refused, match=message) as caught:
        check_batch(
            header,
            changed(arrays, **{name: at(getattr(arrays, name), 7, value)}),
            0,
            vocab_size=52,
        )
    assert caught.value.status == 422
    with pytest.raises(Refused, match="no token that carries loss"):
        check_any_loss(header, arrays, arrays.is_sampled & False)


def test_old_token_is_refused_unless_it_may_be_masked() -> None:
    header, arrays = make_batch(version=7, min_version=5)
    second = header.trajectories[1].start + 5
    arrays = changed(arrays, versions=at(at(arrays.versions, 5, 4), second, 2))
    words = "g10/r1/b0, position 5 was sampled at version 2, and 2 are older than min_version 5 in batch 7"
    with pytest.raises(Refused, match=words) as caught:
        loss_tokens(header, arrays)
    assert caught.value.status == 409
    kept = loss_tokens(header.model_copy(update={"mask_older": True}), arrays)
    assert np.flatnonzero(arrays.is_sampled & ~kept).tolist() == [5, second]


class OddTokens:
    """The grammar of odd ids."""

    def begin(self, _: str) -> OddTokens:
        return self

    def allowed_bits(self) -> bytes:
        return b"\xaa"

    def take(self, token_id: int) -> None:
        if token_id % 2 == 0:
            raise GrammarError(f"{token_id} is even")


def test_token_that_its_grammar_forbids_is_not_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine with another llguidance may have sampled the token."""
    loss = [False, True, True, True, True]
    header, arrays = batch_of([[([5, 7, 7, 6, 7], loss), ([5, 6, 6, 6, 6], loss)]])
    first = header.trajectories[0]
    arrays = replace(arrays, calls=(CallSpan(first.start + 1, first.start + 5, "odd"),))
    has_loss = arrays.is_sampled.copy()
    allowed = find_allowed(arrays, has_loss, OddTokens)
    assert has_loss.tolist() == [False, True, True, False, False, *loss]
    assert allowed.set_N.tolist() == [-1, 0, 0, -1, -1] + [-1] * 5
    assert allowed.bits_KB.tolist() == [[0xAA]]
    assert (
        "2 tokens are not trained: their grammar does not allow them here (6 is even)"
        in caplog.text
    )


# ---- branches and credits


Found = tuple[float, dict[str, torch.Tensor]]
"""The loss of one optimizer step, and the gradients before the optimizer sees them."""


def loss_and_gradients(step: TrainerRank, header: BatchHeader, arrays: Tokens) -> Found:
    loss = gradient_of(step, header, arrays).loss
    return loss, {name: master.grad for name, master in step.masters.named.items()}


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("credits", "aggregate", "is_packed"),
    [
        ("no credits", "token", True),
        ("turns", "sequence", False),
        ("all kinds", "token", True),
    ],
)
def test_loss_and_gradient_match_a_plain_computation(
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
    advantages = plain_advantages(header, len(arrays.ids))
    loss = plain_loss(model, header, arrays, advantages, aggregate=aggregate)
    loss.backward()
    expected = (
        float(loss.detach()),
        {name: one.grad for name, one in model.named_parameters()},
    )
    trainer = {"micro_batch_tokens": 150, "max_grad_norm": 1e-3}
    plan = ForwardPlan(is_packed, True, reason="asked for")
    monkeypatch.setattr(build_model, "plan_of", lambda *_: plan)
    step = make_step(algorithm={"aggregate": aggregate}, trainer=trainer)
    assert step.policy.plan is plan
    assert_same(loss_and_gradients(step, header, arrays), expected)
    norm = (
        torch.stack([gradient.norm() for gradient in expected[1].values()])
        .norm()
        .item()
    )
    other = make_step(algorithm={"aggregate": aggregate}, trainer=trainer)
    metrics = other.train(header, arrays)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4), (
        "that before it is clipped"
    )


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([*CREDITS.values()]),
    st.integers(1, 4),
    st.integers(20, 200),
)
def test_every_sampled_token_is_in_one_unit_and_step(
    seed: int, credits: tuple[str, ...], count: int, max_tokens: int
) -> None:
    header, arrays = make_branch_batch(seed, credits=credits)
    sampled, expected = arrays.is_sampled, plain_units(header)
    units, unit_N = find_units(header, len(sampled))
    found_units = [(unit.reward, unit.group) for unit in units]
    assert found_units == [
        (reward, key[0] - 10) for key, (reward, _) in expected.items()
    ]
    for number, (_, places) in enumerate(expected.values()):
        assert (unit_N[places] == number).all()
    assert (unit_N[sampled] >= 0).all()
    steps = mini_batches(header, sampled, count)
    assert np.array_equal(np.sum(steps, axis=0), sampled)
    for chosen in steps:
        found, num_micros = list[int](), set[int]()
        for rank in range(count):
            ranks, cpu = Ranks(rank, count), torch.device("cpu")
            micros = micro_batches(
                header,
                arrays,
                chosen,
                PackRules(max_tokens),
                cpu,
                ranks,
                Costs(0.01, 0.1),
            )
            num_micros.add(len(micros))
            found += [
                place
                for micro, counts in micros
                if counts
                for place in micro.source_M.tolist()
            ]
            assert all(
                len(micro.source_M) == 1 for micro, counts in micros if not counts
            )
        assert sorted(found) == np.flatnonzero(chosen).tolist()
        assert len(num_micros) == 1, "or FSDP's collectives would not match"


def make_trajectory(sample_index: int) -> Trajectory:
    mask = [False, False, True, True, True]
    spans = (VersionSpan(2, 4, 3, 1), VersionSpan(4, 5, 4))
    tokens = masked_tokens(
        np.arange(10, 15) + sample_index, mask, [0, 0, -1, -2, -3], spans
    )
    return Trajectory(sample_index, tokens, reward=0.5 + sample_index)


def make_types_batch() -> Batch:
    main = replace(
        make_trajectory(0), credits=(Credit(2, 4, 1.0, 0), Credit(4, 5, 0.25, 1))
    )
    fork = replace(main, branch=1, credits=(Credit(0, 5, 0.25, 1),))
    groups = (
        Group(GroupId(7), Prompt("0-7", ()), (main, fork, make_trajectory(2))),
        Group(GroupId(9), Prompt("0-9", ()), (make_trajectory(0),)),
    )
    return Batch(version=4, groups=groups, min_version=3, mask_older=True)


def test_groups_are_packed_with_version_and_engine_per_token() -> None:
    batch = make_types_batch()
    header, arrays = unpack_batch(pack_batch(*pack_groups(batch)))
    assert (header.version, header.min_version, header.mask_older) == (4, 3, True)
    assert [
        (
            t.group_index,
            t.group_id,
            t.prompt_id,
            t.sample_index,
            t.branch,
            t.start,
            t.end,
            t.reward,
        )
        for t in header.trajectories
    ] == [
        (0, 7, "0-7", 0, 0, 0, 5, 0.5),
        (0, 7, "0-7", 0, 1, 5, 10, 0.5),
        (0, 7, "0-7", 2, 0, 10, 15, 2.5),
        (1, 9, "0-9", 0, 0, 15, 20, 0.5),
    ]
    rollouts = [
        trajectory for group in batch.groups for trajectory in group.trajectories
    ]
    assert [tuple(t.credits) for t in header.trajectories] == [
        rollout.credits for rollout in rollouts
    ]
    assert arrays.ids[8:].tolist() == [13, 14, 12, 13, 14, 15, 16, 10, 11, 12, 13, 14]
    assert (arrays.versions.tolist(), arrays.versions.dtype) == (
        [-1, -1, 3, 3, 4] * 4,
        np.int32,
    )
    assert (arrays.engines.tolist(), arrays.engines.dtype) == (
        [-1, -1, 1, 1, -1] * 4,
        np.int16,
    )
