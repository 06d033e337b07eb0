"""Sections `checkpoint`, `journal` and `supervision`: what survives, and what happens when a part dies or hangs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from asyncrl.config.base import FrozenConfig


class CheckpointConfig(FrozenConfig):
    """What is kept so that a killed run can go on."""

    every: PositiveInt | None = 50
    """Batches between two checkpoints (none = none; a resumed run then trains the journaled batches again from the start)."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of so many batches stay for ever (none = off)."""
    keep_best: bool = False
    """The checkpoint with the best eval/reward_mean stays too (needs the section `eval`, with the same `every` or a multiple of it)."""

    @model_validator(mode="after")
    def _multiples_exist(self) -> Self:
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is not a multiple of checkpoint.every={self.every}, so there would be no such "
                "checkpoint; set it to a multiple, or to none"
            )
        return self


class JournalConfig(FrozenConfig):
    """What journal.sqlite remembers."""

    keep: Literal["checkpoint", "all"] = "checkpoint"
    """Tokens of trained batches: as long as a checkpoint before them, or always."""


class SupervisionConfig(FrozenConfig):
    """What happens when a process dies or nothing moves."""

    max_restarts: int = Field(default=3, ge=0)
    """Times within restart_window_s that each engine, the trainer and each worker of the run is started again after it died or stopped
    answering (0 = the run ends at once)."""
    restart_window_s: float | None = Field(default=3600.0, gt=0)
    """Seconds of work after which a restart counts towards max_restarts no more; the time in which the process is down or comes up is
    no work. none: never."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first restart of a process; doubled each time, 30 at most."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Seconds without any progress after which the run says who waits for whom, and dumps its stacks into the log."""
    on_stuck: Literal["warn", "restart", "fail"] = "warn"
    """Then: go on waiting, restart the engines, or end the run (which can be resumed)."""
