"""Section `buffer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeInt, Tag

from asyncrl.config.fields import FrozenConfig

OnOverdue = Literal["wait", "mask", "drop"]


class PartFilter(FrozenConfig):
    """Groups that are kept because they differ in a part of the reward."""

    part: str = Field(min_length=1)
    """Replace groups in which this part of the reward is equal for all rollouts."""


class BufferConfig(FrozenConfig):
    """The staleness bound, and how far generation runs ahead."""

    max_staleness: NonNegativeInt = 1
    """Hard bound, in policy versions, on the age of every token with a loss weight (0 =
    on-policy).
    """
    look_ahead: Literal["auto"] | NonNegativeInt = "auto"
    """Batches that generation may run ahead, at most max_staleness (auto = the fewest
    that keep the trainer busy).
    """
    on_overdue: OnOverdue = "mask"
    """Overdue stragglers: train and mask old tokens, wait, or drop and regenerate."""
    filter: Annotated[
        Annotated[Literal["none", "equal_rewards"], Tag("[word]")]
        | Annotated[PartFilter, Tag("[part]")],
        Discriminator(lambda given: "[word]" if isinstance(given, str) else "[part]"),
    ] = "none"
    """equal_rewards: replace groups whose rewards are all equal (DAPO's dynamic
    sampling). {part: NAME}: those in which this part of the reward is.
    """

    @property
    def filter_part(self) -> str | None:
        return self.filter.part if isinstance(self.filter, PartFilter) else None

    def conflicts(self) -> Iterator[str]:
        # A group that starts look_ahead batches early is look_ahead versions old when
        # its turn comes, even if nothing is late. Beyond the bound, it could never be
        # trained on whole.
        if self.look_ahead != "auto" and self.look_ahead > self.max_staleness:
            yield (
                f".look_ahead={self.look_ahead} is above .max_staleness={self.max_staleness}; set "
                f".look_ahead=auto or {self.max_staleness}"
            )
