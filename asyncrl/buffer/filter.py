"""buffer.filter: which finished groups teach nothing and give their place to another.

Dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476, section 3.2): where every rollout of a prompt
earns the same, each advantage against the group's mean is 0, and a batch of such groups has no gradient. They
are replaced, so that every batch has num_groups that teach.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from asyncrl.errors import TaskError
from asyncrl.messages.records import Group

FilterKind = Literal["none", "equal_rewards"]


def is_filtered(group: Group, kind: FilterKind) -> bool:
    """Whether the group is to be replaced. Rewards are compared as the task gave them, without tolerance."""
    return kind == "equal_rewards" and len(_rewards(group)) == 1


def _rewards(group: Group) -> set[float]:
    """Of all its samples: what its rollouts earned, or, where they have credits, what each part did."""
    rewards = set[float]()
    for trajectory in group.trajectories:
        rewards.update([credit.reward for credit in trajectory.credits] or [trajectory.reward])
    return rewards


class GroupFilter:
    """is_filtered with a memory: max_in_a_row filtered groups in a row end the run, which would otherwise
    sample for ever and never train.
    """

    def __init__(self, kind: FilterKind, *, max_in_a_row: int) -> None:
        self.kind, self.max_in_a_row = kind, max_in_a_row
        self._rewards: Counter[float] = Counter()  # of the groups filtered since the last one that was not

    def takes_nowait(self, group: Group) -> bool:
        """Whether this group, the next one to finish, is to be replaced. Raises TaskError with the last of
        max_in_a_row in a row.
        """
        if not is_filtered(group, self.kind):
            self._rewards.clear()
            return False
        self._rewards[_rewards(group).pop()] += 1
        if self._rewards.total() >= self.max_in_a_row:
            raise self._all_filtered(group)
        return True

    def _all_filtered(self, last: Group) -> TaskError:
        total, common = self._rewards.total(), self._rewards.most_common(4)
        shown = ", ".join(f"{reward:g} in {count}" for reward, count in common)
        others = total - sum(count for _, count in common)
        more = f", another in {others}" if others else ""
        return TaskError(
            "buffer",
            f"{total} groups in a row had the same reward for all their rollouts ({shown}{more}; the last "
            f"was group {last.group_id}, prompt {last.prompt.prompt_id})",
            rule="buffer.filter=equal_rewards replaces such groups, and "
            f"buffer.max_filtered_groups={total} in a row end the run",
            way_out="if that is the lowest reward, give easier prompts, pay parts of an answer, raise "
            "rollout.group_size or correct the reward function; if it is the highest, the task is learnt: "
            "take fewer trainer.num_steps or harder prompts. buffer.filter=none trains on such groups too.",
        )
