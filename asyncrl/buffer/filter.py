"""Which finished groups teach nothing and give their place to another (buffer.filter). Knows rewards; knows
no version, no rule.

Dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476, section 3.2): where every rollout of a prompt
earns the same, each advantage against the group's mean is 0, and a batch of such groups has no gradient. They
are replaced, so that every batch has num_groups that teach.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from asyncrl.buffer.staleness import all_filtered
from asyncrl.messages.records import Group

FilterKind = Literal["none", "equal_rewards"]


def is_filtered(group: Group, kind: FilterKind) -> bool:
    """Whether the group is to be replaced. Rewards are compared as they are, without tolerance: as the task
    gave them.
    """
    return kind == "equal_rewards" and len(_rewards(group)) == 1


def _rewards(group: Group) -> set[float]:
    """Of all its samples: what its rollouts earned, or, where they have credits, what each part of them
    did.
    """
    rewards = set[float]()
    for trajectory in group.trajectories:
        rewards.update(
            (credit.reward for credit in trajectory.credits) if trajectory.credits else (trajectory.reward,)
        )
    return rewards


class GroupFilter:
    """is_filtered with a memory: so many filtered groups in a row end the run, or it would sample for ever
    and never train.
    """

    def __init__(self, kind: FilterKind, *, max_in_a_row: int) -> None:
        self.kind, self.max_in_a_row = kind, max_in_a_row
        self._rewards: Counter[float] = Counter()  # of the groups filtered since the last one that was not

    def __repr__(self) -> str:
        return f"<GroupFilter {self.kind}, {self._rewards.total()} in a row of {self.max_in_a_row}>"

    def takes_nowait(self, group: Group) -> bool:
        """Whether this group, the next one to finish, is to be replaced. Raises TaskError with the last of
        max_in_a_row in a row.
        """
        if not is_filtered(group, self.kind):
            self._rewards.clear()
            return False
        self._rewards[_rewards(group).pop()] += 1
        if self._rewards.total() >= self.max_in_a_row:
            raise all_filtered(self._rewards, group.group_id, group.prompt.prompt_id)
        return True
