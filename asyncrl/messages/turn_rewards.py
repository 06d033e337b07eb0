"""Rewards of completions and of agents within a rollout."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import replace

from asyncrl.base.errors import OutcomeUnusable
from asyncrl.messages.records import (
    MAIN_AGENT,
    Credit,
    Outcome,
    Reward,
    Rollout,
    Trajectory,
)


def above(agent: str) -> Iterator[str]:
    """Yield an agent and those above it, but main."""
    while agent:
        yield agent
        agent = agent.rpartition("/")[0]


def by_completion(
    outcome: Outcome, agents: Mapping[str, str], *, by_turn: bool
) -> Outcome:
    """Return an outcome whose rewards of agents are rewards of their completions, with
    the roles of these. `agents`: of each completion. Raises RolloutFailure.
    """
    rewards = outcome.earned
    # A client sets the header: the name of a completion is never an agent's.
    known = {MAIN_AGENT}.union(*map(above, agents.values()))
    paid = (rewards.keys() & known) - agents.keys()
    if not paid:
        return replace(outcome, roles={})
    if unknown := rewards.keys() - paid - agents.keys():
        raise OutcomeUnusable(
            f"its rewards name {sorted(unknown)[:5]}, which made no call; its agents are "
            f"{sorted(known)[:5]}",
            rule="turn_rewards name agents that called the model, and completions",
            way_out="leave out agents without a call.",
        )
    # A turn earns what follows it, and what follows may be another agent's.
    if by_turn:
        raise OutcomeUnusable(
            f"its rewards are of agents: {', '.join(sorted(paid)[:5])}",
            rule="algorithm.turn_discount adds the rewards of one agent's turns",
            way_out="name completions in turn_rewards, or remove the setting.",
        )
    found = {
        name: rewards.get(name, _reward_of(agent, rewards, paid))
        for name, agent in agents.items()
    }
    roles = dict[str, str]()
    if outcome.roles:
        for name, agent in agents.items():
            own = agent or MAIN_AGENT
            roles[name] = outcome.roles.get(own, own)
    earned = {name: reward for name, reward in found.items() if reward is not None}
    return replace(outcome, turn_rewards=earned, roles=roles)


def _reward_of(
    agent: str, rewards: Mapping[str, Reward], paid: Set[str]
) -> Reward | None:
    """Return an agent's reward: its own, or that of the nearest agent above it.

    Example: the rewards are of main and searcher.
        >>> rewards = {"main": 1.0, "searcher": 0.5}
        >>> [
        ...     _reward_of(agent, rewards, rewards.keys())
        ...     for agent in ("", "searcher/reader", "writer")
        ... ]
        [1.0, 0.5, 1.0]
    """
    for one in above(agent):
        if one in paid:
            return rewards[one]
    return rewards.get(MAIN_AGENT)


def check_names(
    rewards: Mapping[str, Reward], trained: Set[str], known: Collection[str]
) -> None:
    """Raise RolloutFailure unless every trained completion has a reward, and every name
    exists. A missing or misspelled name would silently change the advantages.
    """
    if not trained <= rewards.keys() <= set(known):
        raise OutcomeUnusable(
            f"its rewards name {sorted(rewards)[:5]}; this rollout has {sorted(known)[:5]}",
            rule="turn_rewards names every completion",
            way_out="name every answer by its `id`; 0.0 is a reward too.",
        )


def with_turn_rewards(rollout: Rollout, outcome: Outcome) -> Rollout:
    """Return a rollout that has ended, and whose completions or agents earn
    `turn_rewards` now: equal to the rollout of a harness that returned them. Raises
    RolloutFailure.
    """
    untrained = dict(rollout[0].untrained)
    calls = [call for branch in rollout for call in branch.calls]
    agents = {call.name: call.agent for call in calls} | untrained
    # Without turn_discount a rollout has credits only with turn_rewards.
    by_turn = any(branch.credits for branch in rollout)
    outcome = by_completion(outcome, agents, by_turn=by_turn)
    rewards = outcome.earned
    check_names(rewards, agents.keys() - untrained.keys(), agents)
    found = list[Trajectory]()
    units = itertools.count()
    for branch in rollout:
        trained = [call for call in branch.calls if call.name not in untrained]
        names = [call.name for call in trained]
        credits = list(branch.credits)
        if not by_turn:
            for call in trained:
                role = outcome.roles.get(call.name, "")
                credits.append(Credit(call.start, call.end, 0.0, next(units), role))
        elif branch.branch == 0:  # it has the untrained turns
            names += untrained
        paid = [
            credit.paid(rewards.get(name, 0.0))
            for credit, name in zip(credits, names, strict=True)
        ]
        found.append(replace(branch, credits=tuple(paid)))
    return tuple(found)
