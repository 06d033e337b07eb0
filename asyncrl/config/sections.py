"""Sections `checkpoint`, `journal` and `supervision`: what survives, and what happens when a part dies or
hangs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

# The base of all config sections.


class FrozenConfig(BaseModel):
    """Frozen, and refuses keys it does not know. Validators reject; they never repair."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_off_word(cls, values: Any) -> Any:
        """`none` is null wherever null is allowed, in the file as in a key=value; elsewhere it is a text like
        any other.
        """
        if not isinstance(values, dict):
            return values
        return {
            key: None if value == "none" and cls._may_be_null(key) else value for key, value in values.items()
        }

    @classmethod
    def _may_be_null(cls, key: Any) -> bool:
        return key in cls.model_fields and type(None) in get_args(cls.model_fields[key].annotation)


Device = Literal["auto", "cpu", "cuda"]
"""auto = CUDA where there is a device, else CPU."""

DType = Literal["auto", "float32", "bfloat16"]
"""What auto is in a run: placement/dtype.py. A process that is started alone takes bfloat16 on CUDA, float32
on CPU.
"""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""


class CheckpointConfig(FrozenConfig):
    """What is kept so that a killed run can go on."""

    every: PositiveInt | None = 50
    """Batches between two checkpoints (none = none; a resumed run then trains the journaled batches again
    from the start).
    """
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of so many batches stay for ever (none = off)."""
    keep_best: bool = False
    """The checkpoint with the best eval/reward_mean stays too (needs the section `eval`, with the same
    `every` or a multiple of it).
    """

    @model_validator(mode="after")
    def _multiples_exist(self) -> Self:
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is not a multiple of "
                f"checkpoint.every={self.every}, so there would be no such "
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
    """Times within restart_window_s that each engine, the trainer and each worker of the run is started again
    after it died or stopped answering (0 = the run ends at once)."""
    restart_window_s: float | None = Field(default=3600.0, gt=0)
    """Seconds of work after which a restart counts towards max_restarts no more; the time in which the
    process is down or comes up is no work. none: never."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first restart of a process; doubled each time, 30 at most."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Seconds without any progress after which the run says who waits for whom, and dumps its stacks into the
    log.
    """
    on_stuck: Literal["warn", "restart", "fail"] = "warn"
    """Then: go on waiting, restart the engines, or end the run (which can be resumed)."""
