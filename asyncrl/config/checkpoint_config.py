"""Section `checkpoint`."""

from __future__ import annotations

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
    keep_best: bool = False
    """Also keep the checkpoint with the best eval/reward_mean of the first evaluation
    (needs `eval` with the same `every` or a multiple of it).
    """

    callback: Annotated[str | None, NotWith("every", (None,))] = None
    """A function `module:name` that is called after each checkpoint, in a process of its
    own, with a folder of the exported model and the policy_version. The folder is removed
    after the call. A failure is a warning.
    """
