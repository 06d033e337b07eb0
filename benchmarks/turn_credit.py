"""Ways to credit turns, against a policy gradient that is known in closed form.

    python benchmarks/turn_credit.py [--write]

A policy walks down a corridor: in each place it goes on or stays, with equal chances, and
earns 1 at the end if it arrives in time. All episodes, and all groups of two of them, are
enumerated with their probabilities, so nothing is sampled. Shown for each way: the cosine
between the mean of its updates and the policy gradient, and the share of the mean square
of an update that points along the gradient. The inverse of the share is the number of
groups that an update needs to be half signal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from common import plain_options, reported
from torch import Tensor

from asyncrl.algorithms.advantages import (
    Turns,
    gigpo,
    grpo,
    rewards_to_go,
    turn_rloo,
)

LENGTHS = ((3, 5), (4, 6))
"""(places, turns at most)"""
GROUP = 2
Advantage = Callable[[Tensor, Turns], Tensor]


class Episode(NamedTuple):
    """`steps`: (place, whether the policy goes on) of each turn."""

    steps: tuple[tuple[int, bool], ...]
    reward: float

    @property
    def chance(self) -> float:
        return 0.5 ** len(self.steps)


def episodes(num_places: int, left: int, place: int = 0) -> list[Episode]:
    if place == num_places or left == 0:
        return [Episode((), float(place == num_places))]
    return [
        Episode(((place, moves), *rest.steps), rest.reward)
        for moves in (False, True)
        for rest in episodes(num_places, left - 1, place + moves)
    ]


def of_rollout(rewards: Tensor, turns: Turns) -> Tensor:
    """GRPO: all turns of a rollout share the advantage of its reward."""
    sums = turns.table(rewards).sum(1).float()
    return grpo(sums, turns.group_R)[turns.rollout_B]


def from_states(discount: float) -> Advantage:
    def advantage(rewards: Tensor, turns: Turns) -> Tensor:
        to_gos = rewards_to_go(rewards, turns, discount)
        return gigpo(rewards, to_gos, turns)

    return advantage


def to_go(rewards: Tensor, turns: Turns) -> Tensor:
    return turn_rloo(rewards_to_go(rewards, turns, 1.0), turns)


WAYS: dict[str, Advantage] = {
    "grpo": of_rollout,
    "rloo, turn_discount 1": to_go,
    "gigpo, turn_discount 1": from_states(1.0),
    "gigpo, turn_discount 0.95": from_states(0.95),
    "gigpo, turn_discount 0.8": from_states(0.8),
}


def measure(num_places: int, most: int, way: Advantage) -> tuple[float, float]:
    """Return the cosine of the mean update, and the share of its mean square."""
    found = episodes(num_places, most)
    groups = [*itertools.product(found, repeat=GROUP)]
    turns = [
        (number, member, at, place)
        for number, group in enumerate(groups)
        for member, episode in enumerate(group)
        for at, (place, _) in enumerate(episode.steps)
    ]
    numbers, members, at_turns, places = torch.tensor(turns).T
    rewards = [
        episode.reward if at == len(episode.steps) - 1 else 0.0
        for group in groups
        for episode in group
        for at in range(len(episode.steps))
    ]
    shape = Turns(
        rollout_B=numbers * GROUP + members,
        turn_B=at_turns,
        group_R=torch.arange(len(groups)).repeat_interleave(GROUP),
        state_B=numbers * num_places + places,
    )
    advantages = way(torch.tensor(rewards), shape).double().numpy()
    # With equal chances, grad log pi of going on is 1/2, of staying -1/2.
    moves = [step[1] for group in groups for one in group for step in one.steps]
    signeds = advantages * np.where(moves, 0.5, -0.5)
    updates = np.zeros((len(groups), num_places))
    np.add.at(updates, (numbers.numpy(), places.numpy()), signeds)
    chances = np.array(
        [math.prod(episode.chance for episode in group) for group in groups]
    )
    exact = exact_gradient(found, num_places)
    mean = chances @ updates
    along = float(mean @ exact) / np.linalg.norm(exact)
    square = float(chances @ (updates**2).sum(1))
    return along / np.linalg.norm(mean), along**2 / square


def exact_gradient(found: list[Episode], num_places: int) -> npt.NDArray[np.float64]:
    exact = np.zeros(num_places)
    for episode in found:
        for place, moves in episode.steps:
            exact[place] += episode.chance * episode.reward * (0.5 if moves else -0.5)
    return exact


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--write", action="store_true", help="keep the output")
    with reported("turn_credit", is_kept=parser.parse_args().write):
        for num_places, most in LENGTHS:
            print(f"{num_places} places, {most} turns, groups of {GROUP}")
            shares = dict[str, float]()
            for name, way in WAYS.items():
                cosine, shares[name] = measure(num_places, most, way)
                print(f"  {name:28} cosine {cosine:.4f}   share {shares[name]:.3f}")
        best = shares["gigpo, turn_discount 0.95"] / shares["grpo"]
        print(f"ratio: {best:.2f}")


if __name__ == "__main__":
    main()
