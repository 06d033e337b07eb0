"""Section `observe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from asyncrl.base.extensions import rows
from asyncrl.config.extended import extended
from asyncrl.config.fields import FrozenConfig

TRACKERS = ("tensorboard", *rows("trackers"))


@extended("observe")
class ObserveConfig(FrozenConfig):
    """Output of the run: files, trackers, console, status port."""

    free_keys: ClassVar = "*"

    console: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a table that updates; plain: a line every few seconds; auto = live on a
    terminal, else plain. A full pipe loses lines.
    """
    trackers: list[str] = ["tensorboard"]
    """Trackers: tensorboard (RUN_DIR/tensorboard), wandb, mlflow, trackio (each with
    the extra of its name), or `module:Class` (docs/monitoring.md) ([] = none).
    """
    tracker_args: dict[str, dict[str, object]] = {}
    """Keyword arguments of each tracker by its name, such as {wandb: {project:
    letters}} (docs/monitoring.md).
    """
    status_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics, for Prometheus, and /status (none = off; 0 = any free one, in
    status.json). RUN_DIR/status.key has the bearer token.
    """
    status_host: str = "127.0.0.1"
    """Address of the status port (0.0.0.0 = all of this machine, without TLS)."""
    samples_per_step: int = Field(default=3, ge=0, le=100)
    """Rollouts per batch in samples.jsonl: the best, the worst, and random ones (0 =
    none). Long files lose their oldest parts.
    """
    readable_by: Literal["owner", "group", "all"] = "owner"
    """Readers of the run directory, which contains the config, the logs and every
    conversation.
    """
    heartbeat_s: PositiveFloat = 60.0
    """Timeout without a heartbeat, in seconds, until an engine, trainer or worker is
    restarted. Without the eval engine the run continues.
    """

    def conflicts(self) -> Iterator[str]:
        for name in self.trackers:
            if name not in TRACKERS and ":" not in name:
                yield f".trackers has {name!r}; there are {', '.join(TRACKERS)}, and module:Class"
        for name in self.tracker_args:
            if name not in self.trackers:
                yield f".tracker_args.{name} is for a tracker that .trackers lacks; add it, or remove it"

    @property
    def dir_mode(self) -> int:
        return {"owner": 0o700, "group": 0o750, "all": 0o755}[self.readable_by]
