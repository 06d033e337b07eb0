"""Which trackers a run has, by their names in observe.trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncrl.errors import ConfigError
from asyncrl.observe.trackers.tensorboard import TensorBoard
from asyncrl.observe.trackers.tracker import Tracker

TRACKERS: Mapping[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """One of each. Raises ConfigError for a name that is none."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"observe.trackers has {name!r}, which is none",
                rule=f"trackers are {', '.join(TRACKERS)}",
                way_out="take one of them, or [] for none",
            )
    return [TRACKERS[name]() for name in names]
