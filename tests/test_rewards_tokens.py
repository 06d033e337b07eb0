"""Rewards of single tokens: from the function to the advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine
from producer_cases import FakeHost, run_harness
from rollout_cases import one_token, single_turn, virtual
from scorer_cases import PROMPT, make_scorer, sampled

from asyncrl.base.errors import RewardFailure
from asyncrl.base.failures import FailureKind
from asyncrl.buffer.buffer import rewards_of
from asyncrl.job.check.reward_trial import try_reward
from asyncrl.messages.records import Batch, Completion, Credit, Group, GroupId, Outcome
from asyncrl.observe.samples import shown
from asyncrl.rollouts.rollout import (
    FailedRollout,
    RolloutAttempt,
    RolloutRunner,
    Slots,
    with_credits,
)
from asyncrl.tasks.rewards import MAX_SPANS
from asyncrl.trainer.loss.objective import find_units
from asyncrl.trainer.trainer_client import pack_groups


class Scored:
    """A scorer in place of Scorers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.scorer = make_scorer(function)

    def of(self, prompt: Any) -> Any:
        return self.scorer


async def rollout_of(function: Callable[..., Any]) -> Any:
    """The outcome of a rollout of 4 tokens after a prompt of 5."""
    generator = single_turn(FakeEngine(), Scored(function))
    runner = RolloutRunner(generator, timeout_s=None, retries=0)
    attempt = RolloutAttempt("g0/r0", GroupId(0), PROMPT, 0)
    return await runner.run(attempt, slots=Slots(1), order=())


KINDS: list[Any] = [list, tuple, np.array]


@pytest.mark.parametrize("kind", KINDS)
@virtual
async def test_equal_rewards_in_a_row_become_a_credit(kind: Any) -> None:
    (branch,) = await rollout_of(lambda *_: kind([0.0, 0.0, 1.0, 0.0]))
    assert branch.credits == (
        Credit(5, 7, 0.0, 0),
        Credit(7, 8, 1.0, 1),
        Credit(8, 9, 0.0, 2),
    )
    assert branch.reward == 0.25
    sample = shown(PROMPT, (branch,), lambda ids, **_: "z" * len(ids), step=1)
    (part,) = (part for part in sample["parts"] if part["is_sampled"])
    assert part["reward"] == 0.25


@virtual
async def test_each_span_is_a_sample_of_the_advantage() -> None:
    def reward(prompt: Any, text: str, *, sampled: Completion) -> list[float]:
        return [0.5, 0.5, -1.0, -1.0]

    (first,) = await rollout_of(reward)
    (second,) = await rollout_of(lambda *_: 2.0)
    group = Group(GroupId(0), PROMPT, (first, replace(second, sample_index=1)))
    assert rewards_of(group) == {"": {0.5, -1.0, 2.0}}
    header, tokens = pack_groups(Batch(0, (group,), 0))
    units, unit_N = find_units(header, len(tokens))
    assert [unit[:2] for unit in units] == [(0.5, 0), (-1.0, 0), (2.0, 0)]
    trained = unit_N[np.flatnonzero(tokens.is_sampled)].tolist()
    assert trained == [0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "returned 1 rewards for 4 sampled tokens"),
        ([], "returned 0 rewards for 4 sampled tokens"),
        ([1.0, 2.0, None, 4.0], "returned None .NoneType., not a number"),
        (np.array([1.0, 2.0, np.nan, 4.0]), "returned nan"),
        (np.zeros((4, 2)), "returned array"),
    ],
)
@virtual
async def test_wrong_rewards_of_tokens_fail_the_rollout(value: Any, words: str) -> None:
    outcome = await rollout_of(lambda *_: value)
    assert isinstance(outcome, FailedRollout)
    assert outcome.failure.kind == FailureKind.CORRUPT_RESULT
    with pytest.raises(RewardFailure, match=words):
        raise outcome.failure


@pytest.mark.asyncio
async def test_rewards_of_tokens_need_one_for_each() -> None:
    def alternates(prompt: Any, text: str, *, sampled: Completion) -> list[float]:
        return [float(index % 2) for index in range(len(sampled.token_ids))]

    scorer = make_scorer(alternates)
    found = await scorer.score(PROMPT, sampled(MAX_SPANS * "x"))
    assert found == [0.0, 1.0] * (MAX_SPANS // 2)
    with pytest.raises(RewardFailure, match="returned 1025 spans of equal rewards"):
        await scorer.score(PROMPT, sampled((MAX_SPANS + 1) * "x"))
    assert try_reward(scorer_task(alternates), PROMPT, ["a", ""]) == [[], []]


def scorer_task(function: Callable[..., Any]) -> Any:
    class Task:
        score = staticmethod(function)

    return Task()


def test_agent_with_several_turns_cannot_have_rewards_of_tokens() -> None:
    host = FakeHost(Outcome(), text="two")

    async def score(prompt: Any, sampled: Completion) -> list[float]:
        return [1.0, 0.0, 0.0]

    host.score = score  # type: ignore[method-assign]
    outcome = run_harness(host)
    assert isinstance(outcome, FailedRollout)
    assert "rewards per token need rollouts of one" in str(outcome.failure)
    branch = one_token(0)
    with pytest.raises(RewardFailure, match="rollouts of one trained completion"):
        with_credits((branch, branch), sampled("z"), [1.0])
