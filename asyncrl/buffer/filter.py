"""buffer.filter: which finished groups have no gradient and are replaced by another.

Dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476, section 3.2): where every rollout of a prompt
earns the same, each advantage against the group's mean is 0, and a batch of such groups has no gradient. They
are replaced, so that every batch has num_groups that teach.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.errors import TaskError
from asyncrl.messages.records import Group


class GroupFilter:
    """Says which groups are replaced; max_in_a_row of them in a row end the run, which would otherwise sample
    for ever and never train.
    """

    def __init__(self, kind: Literal["none", "equal_rewards"], *, max_in_a_row: int) -> None:
        self.kind, self.max_in_a_row = kind, max_in_a_row
        self._in_a_row = 0

    def takes_nowait(self, group: Group) -> bool:
        """Whether this group, the next one to finish, is to be replaced. Raises TaskError with the last of
        max_in_a_row in a row.

        Rewards are compared as the task gave them, without tolerance: what its rollouts earned, or, where
        they have credits, what each part did.
        """
        rewards = set[float]()
        for trajectory in group.trajectories:
            rewards.update([credit.reward for credit in trajectory.credits] or [trajectory.reward])
        if self.kind == "none" or len(rewards) > 1:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row >= self.max_in_a_row:
            raise TaskError(
                "buffer",
                f"{self._in_a_row} groups in a row had the same reward for all their rollouts (in the last, "
                f"group {group.group_id}, prompt {group.prompt.prompt_id}: {rewards.pop():g})",
                rule=f"buffer.filter=equal_rewards replaces such groups, and buffer.max_filtered_groups="
                f"{self.max_in_a_row} in a row end the run",
                way_out="give easier prompts (or harder ones, if that is the highest reward), or set "
                "buffer.filter=none.",
            )
        return True
