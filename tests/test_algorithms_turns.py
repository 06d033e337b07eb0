"""Credit of turns against policy gradients that are known in closed form.

A small decision process is enumerated: every episode, and every group of episodes, with
its probability. So the mean of an estimator is a sum, and no test has a tolerance for
noise.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_cases import batch_of, make_spec

from asyncrl.algorithms.advantages import EPSILON
from asyncrl.config import AlgorithmConfig
from asyncrl.messages.records import Credit
from asyncrl.trainer.loss.objective import BatchNumbers, Compare, Objective, Unit


class Turn(NamedTuple):
    state: str
    action: int
    reward: float


class Episode(NamedTuple):
    """`chance`: of the environment alone, without the policy."""

    turns: tuple[Turn, ...]
    chance: float


Outcomes = list[tuple[float, float, str | None]]
"""(chance, reward, next state; None: the end) of an action."""
START = "door"
# One to three turns, and rollouts reach "attic" at different turns.
PROCESS: dict[str, list[Outcomes]] = {
    "door": [
        [(1.0, 0.5, None)],
        [(0.7, -0.25, "cellar"), (0.3, 1.0, "attic")],
        [(1.0, 0.0, "attic")],
    ],
    "cellar": [[(1.0, 1.5, None)], [(1.0, 0.75, "attic")]],
    "attic": [[(1.0, 0.0, None)], [(0.4, 3.0, None), (0.6, -1.0, None)]],
}
LOGITS = {"door": [0.3, -0.2, 0.1], "cellar": [-0.5, 0.4], "attic": [0.2, 0.6]}


def episodes(state: str = START) -> list[Episode]:
    found = list[Episode]()
    for action, outcomes in enumerate(PROCESS[state]):
        for chance, reward, after in outcomes:
            turn = Turn(state, action, reward)
            rests = [Episode((), 1.0)] if after is None else episodes(after)
            found += [
                Episode((turn, *rest.turns), chance * rest.chance) for rest in rests
            ]
    return found


Policy = dict[str, Tensor]


def make_policy() -> Policy:
    return {
        state: torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        for state, logits in LOGITS.items()
    }


def logprob(policy: Policy, turn: Turn) -> Tensor:
    return policy[turn.state].log_softmax(0)[turn.action]


def probability(policy: Policy, episode: Episode) -> Tensor:
    logprobs = [logprob(policy, turn) for turn in episode.turns]
    return episode.chance * torch.stack(logprobs).sum().exp()


def gradient(value: Tensor, policy: Policy) -> Tensor:
    return torch.cat(torch.autograd.grad(value, [*policy.values()]))


def exact_gradient(discount: float) -> Tensor:
    """Return the sum over turns of E[grad log pi * Q], with the discounted action value
    Q of each turn. At discount 1 it is the gradient of the mean sum of rewards.
    """
    policy = make_policy()
    total = torch.zeros((), dtype=torch.float64)
    for episode in episodes():
        chance = chance_of(episode, policy)
        for place, turn in enumerate(episode.turns):
            to_go = sum(
                discount**later * after.reward
                for later, after in enumerate(episode.turns[place:])
            )
            total = total + chance * logprob(policy, turn) * to_go
    return gradient(total, policy)


def advantages(
    groups: list[tuple[Episode, ...]], *, is_edited: bool = False, **algorithm: Any
) -> list[list[list[float]]]:
    """Return the trainer's advantage of each turn, by group and rollout.

    `is_edited`: each turn is a branch of its own, the last one first, as in harnesses
    that rewrite the history.
    """
    rows: Any = []
    entries = list[dict[str, Any]]()
    for group in groups:
        rows.append([])
        for sample, episode in enumerate(group):
            turns = [*enumerate(episode.turns)]
            parts = [[turn] for turn in reversed(turns)] if is_edited else [turns]
            for branch, part in enumerate(parts):
                # A token that the turn reads, and the one that it samples.
                rows[-1].append(([0, 1] * len(part), [False, True] * len(part)))
                credits = [
                    Credit(2 * at + 1, 2 * at + 2, turn.reward, unit, turn.state)
                    for at, (unit, turn) in enumerate(part)
                ]
                entries.append(
                    {"sample_index": sample, "branch": branch, "credits": credits}
                )
    header, arrays = batch_of(rows)
    pairs = zip(header.trajectories, entries, strict=True)
    header = header.model_copy(
        update={"trajectories": [one.model_copy(update=more) for one, more in pairs]}
    )
    objective = Objective(make_spec(Path(), Path(), algorithm=algorithm))
    batch = BatchNumbers(header, arrays, arrays.is_sampled)
    advantage_N = objective.advantages(batch)
    found = [[[math.nan] * len(episode.turns) for episode in group] for group in groups]
    for entry in header.trajectories:
        for credit in entry.credits:
            value = float(advantage_N[entry.start + credit.start])
            found[entry.group_index][entry.sample_index][credit.unit] = value
    return found


def chance_of(episode: Episode, policy: Policy) -> float:
    return float(probability(policy, episode).detach())


def mean_gradient(size: int, **algorithm: Any) -> Tensor:
    """Return the mean of the estimator over all groups of `size` rollouts."""
    policy = make_policy()
    groups = [*itertools.product(episodes(), repeat=size)]
    chances = {episode: chance_of(episode, policy) for episode in episodes()}
    # The estimator is linear in grad log pi, so its factors are added first.
    factors: dict[tuple[str, int], float] = {}
    for group, of_group in zip(groups, advantages(groups, **algorithm), strict=True):
        chance = math.prod(chances[episode] for episode in group) / size
        for episode, of_rollout in zip(group, of_group, strict=True):
            for turn, advantage in zip(episode.turns, of_rollout, strict=True):
                key = (turn.state, turn.action)
                factors[key] = factors.get(key, 0.0) + chance * advantage
    terms = [
        policy[state].log_softmax(0)[action] * factor
        for (state, action), factor in factors.items()
    ]
    return gradient(torch.stack(terms).sum(), policy)


# ---- against the exact gradient


def test_sum_over_episodes_is_the_gradient_of_the_mean_reward() -> None:
    policy = make_policy()
    means = [
        probability(policy, episode) * sum(turn.reward for turn in episode.turns)
        for episode in episodes()
    ]
    expected = gradient(torch.stack(means).sum(), policy)
    torch.testing.assert_close(exact_gradient(1.0), expected)
    assert expected.abs().min() > 0.01
    chances = [chance_of(episode, policy) for episode in episodes()]
    assert math.fsum(chances) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("size", "discount", "is_edited"),
    [(2, 1.0, False), (2, 0.0, True), (3, 0.9, False), (3, 1.0, True)],
)
def test_turns_against_other_rollouts_have_the_exact_gradient_as_mean(
    size: int, discount: float, is_edited: bool
) -> None:
    found = mean_gradient(
        size, advantage="rloo", turn_discount=discount, is_edited=is_edited
    )
    # Advantages are float32.
    torch.testing.assert_close(found, exact_gradient(discount), rtol=0, atol=1e-6)


# ---- by hand


def episode(*turns: tuple[str, float]) -> Episode:
    return Episode(tuple(Turn(state, 0, reward) for state, reward in turns), 1.0)


def test_rewards_to_go_by_hand() -> None:
    long = episode(("a", 1.0), ("b", 0.0), ("c", 4.0))
    short = episode(("a", 2.0))
    other = episode(("a", 0.0), ("b", 1.0))
    # To go at discount 0.5: 2, 2, 4; 2; 0.5, 1. The short rollout counts with its last
    # turn where it has none.
    found = advantages([(long, short, other)], advantage="rloo", turn_discount=0.5)
    assert found == [[[0.75, 0.5, 2.5], [0.75], [-1.5, -1.0]]]


def grpo_by_hand(values: list[float]) -> list[float]:
    return ((np.array(values) - np.mean(values)) / (np.std(values) + EPSILON)).tolist()


def test_gigpo_by_hand() -> None:
    first = episode(("hall", 0.0), ("kitchen", 0.0), ("hall", 2.0))
    second = episode(("hall", 0.0), ("", 1.0))
    third = episode(("kitchen", 0.5), ("", 0.0))
    # The states of another group are others.
    other = (episode(("hall", 7.0)), episode(("hall", 9.0)))
    found = advantages(
        [(first, second, third), other],
        advantage="gigpo",
        turn_discount=0.5,
    )
    sums = grpo_by_hand([2.0, 1.0, 0.5])
    hall = grpo_by_hand([0.5, 2.0, 0.5])
    kitchen = grpo_by_hand([1.0, 0.5])
    expected = [
        [
            sums[0] + hall[0],
            sums[0] + kitchen[0],
            sums[0] + hall[1],
        ],
        [sums[1] + hall[2], sums[1]],
        [sums[2] + kitchen[1], sums[2]],
    ]
    for of_rollout, by_hand in zip(found[0], expected, strict=True):
        assert of_rollout == pytest.approx(by_hand, abs=1e-5)
    assert found[1][1][0] == pytest.approx(2.0, abs=1e-3)


# ---- settings


def test_samples_are_compared_by_role_if_all_of_their_group_have_one() -> None:
    rewards = [1.0, 3.0, 10.0, 30.0]

    def advantages(*states: str) -> list[float]:
        units = [
            Unit(rewards[index], 0, index % 2, index // 2, state, "")
            for index, state in enumerate(states)
        ]
        compare = Compare(AlgorithmConfig(advantage="rloo"))
        return compare(units, torch.tensor(rewards)).tolist()

    assert advantages("main", "main", "searcher", "searcher") == [-2, 2, -20, 20]
    means = [(sum(rewards) - reward) / 3 for reward in rewards]
    whole = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    assert advantages("main", "", "searcher", "searcher") == pytest.approx(whole)
    assert advantages("", "", "", "") == pytest.approx(whole)
