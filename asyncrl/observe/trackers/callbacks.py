"""Callbacks of asyncrl.run, as a tracker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.base.errors import CallbackError, ConfigError
from asyncrl.base.user_code import check_call
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import Tracker

USAGE = {
    "on_step": ("step", "metrics"),
    "on_evaluation": ("policy_version", "metrics"),
    "on_sample": ("sample",),
    "on_weights": ("policy_version", "digest"),
}
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Callbacks(Tracker):
    """Call the given functions. An exception of one ends the run as CallbackError. Raises ConfigError, when
    made, for a function with other parameters.
    """

    on_step: Callable[[int, Metrics], None] | None = None
    on_evaluation: Callable[[int, Metrics], None] | None = None
    on_sample: Callable[[ShownRollout], None] | None = None
    on_weights: Callable[[int, str], None] | None = None

    def __post_init__(self) -> None:
        for name, parameters in USAGE.items():
            if (function := getattr(self, name)) is None:
                continue
            usage = f"{name}({', '.join(parameters)})"
            check_call(function, parameters, {}, said=f"{name} of asyncrl.run", usage=usage)
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                what = f"{name} of asyncrl.run is a coroutine function"
                raise ConfigError(what, rule=f"it is called as {usage}", way_out="give a plain function.")

    def step(self, step: int, metrics: Metrics) -> None:
        """Call on_step."""
        self._call("on_step", step, dict(metrics))

    def evaluation(self, version: int, metrics: Metrics) -> None:
        """Call on_evaluation."""
        self._call("on_evaluation", version, dict(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Call on_sample for each sample."""
        for sample in samples:
            self._call("on_sample", sample)

    def weights(self, version: int, digest: str) -> None:
        """Call on_weights."""
        self._call("on_weights", version, digest)

    def _call(self, name: str, *arguments: Any) -> None:
        if (function := getattr(self, name)) is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            what = f"{name} of asyncrl.run raised {type(error).__name__}: {error}"
            failure = CallbackError(what, way_out="fix the callback, then resume with the same run_dir.")
            failure.error = error
            raise failure from error
