"""Functions of the program that has started a run, as a tracker."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import CallbackError, ConfigError
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import TrackedRun
from asyncrl.user_code import check_call

SLOW_S = 30.0
"""Seconds after which a call that has not returned is told."""
USAGE = {
    "on_step": ("step", "metrics"),
    "on_evaluation": ("policy_version", "metrics"),
    "on_sample": ("sample",),
    "on_weights": ("policy_version", "digest"),
}
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Calls what is given of them. What one raises comes out as CallbackError: the program is not to go on as
    if it had been told. One that does not return holds up the run, and is told on stderr.

    Raises ConfigError, when made, for one that cannot be called so.
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
                what = (
                    f"{name} of asyncrl.run is a coroutine function, and nothing would await what it returns"
                )
                raise ConfigError(what, rule=f"it is called as {usage}", way_out="give a plain function.")

    def start(self, run: TrackedRun) -> None:
        """Nothing is called."""

    def step(self, step: int, metrics: Metrics) -> None:
        """on_step."""
        self._call("on_step", step, dict(metrics))

    def evaluation(self, version: int, metrics: Metrics) -> None:
        """on_evaluation."""
        self._call("on_evaluation", version, dict(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """on_sample, for each."""
        for sample in samples:
            self._call("on_sample", sample)

    def weights(self, version: int, digest: str) -> None:
        """on_weights."""
        self._call("on_weights", version, digest)

    def picture(self, name: str, path: Path) -> None:
        """Nothing is called."""

    def close(self, state: str) -> None:
        """Nothing is called."""

    def _call(self, name: str, *arguments: Any) -> None:
        if (function := getattr(self, name)) is None:
            return
        late = threading.Timer(SLOW_S, _tell_late, (name,))  # the loop itself cannot: the call blocks it
        late.daemon = True
        late.start()
        try:
            function(*arguments)
        except Exception as error:
            what = f"{name} of asyncrl.run raised {type(error).__name__}: {error}"
            failure = CallbackError(what, way_out="mend it; with the same run_dir the run goes on.")
            failure.error = error
            raise failure from error
        finally:
            late.cancel()


def _tell_late(name: str) -> None:
    what = (
        f"{name} of asyncrl.run has not returned for {SLOW_S:g} s: the run waits for it, and so does Ctrl-C"
    )
    print(f"{what}; `kill -9 {os.getpid()}` ends the run, which can be resumed", file=sys.stderr, flush=True)
