"""Section `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import PositiveInt

from asyncrl.config.fields import Count, FrozenConfig, NotWith


class CheckpointConfig(FrozenConfig):
    """Checkpoints of the run."""

    free_keys: ClassVar = "*"

    every: PositiveInt | None = 50
    """Batches between two checkpoints (none = none; a resumed run then trains the
    journaled batches again).
    """
    keep_last: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Keep checkpoints at multiples of this number of batches forever (none = off)."""
    keep_best: bool = False
    """Also keep the checkpoint with the best eval/reward_mean of the first evaluation
    (needs `eval` with the same `every` or a multiple of it).
    """

    callback: Annotated[str | None, NotWith("every", (None,))] = None
    """A function `module:name` that is called after each checkpoint, in a process of its
    own, with a folder of the exported model and the policy_version. The folder is removed
    after the call. A failure is a warning.
    """

    def conflicts(self) -> Iterator[str]:
        # Only versions that are saved can be kept: with every=50, step 75 does not
        # exist.
        if self.keep_every is not None and (
            self.every is None or self.keep_every % self.every
        ):
            yield (
                f".keep_every={self.keep_every} is not a multiple of .every={self.every}; set .every to a "
                "divisor of it, or remove it"
            )
