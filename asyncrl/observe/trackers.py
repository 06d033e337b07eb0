"""Trackers of a run: interface, names, and the calling thread."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.base.errors import CallbackError, ConfigError, install_extra
from asyncrl.base.user_code import check_call, load_object
from asyncrl.config.run_config import ObserveConfig
from asyncrl.observe.run_dir import read_object
from asyncrl.observe.samples import ShownRollout

MAX_WAITING = 256
"""Queued calls; a full queue drops its oldest call."""
POLL_S = 0.05
SOON_S = 1.0
"""Seconds until the console names trackers that are still sending."""
LEFT: list[str] = []
"""Trackers whose clients may block the process's exit, so that the command exits at once."""
METHODS = ("start", "step", "evaluation", "samples", "weights", "close")
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """`config`: plain values of config.yaml; `run_id`: the same over resumes; `warn`: from any thread."""

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any]
    warn: Callable[[str], None] = print


class Tracker:
    """Base class of trackers.

    start() -> step(), evaluation(), samples(), weights() in any order -> close(), all from one thread. A
    tracker that raises is turned off with a warning.
    """

    def start(self, run: TrackedRun) -> str | None:
        """Return an id of the tracker's place; while it stays the same over resumes, no number repeats."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Show the finite metrics of a step (docs/metrics.md), without eval/*."""

    def evaluation(self, version: int, metrics: Metrics) -> None:
        """Show the eval/* metrics of policy `version`."""

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Show the samples of a step."""

    def weights(self, version: int, digest: str) -> None:
        """Note that all engines serve policy `version`."""

    def close(self, state: str) -> None:
        """End the run: done, failed or interrupted."""


@dataclass(frozen=True, slots=True)
class Callbacks(Tracker):
    """An exception ends the run as CallbackError. Raises ConfigError for a coroutine function or for
    other parameters.
    """

    on_step: Callable[[int, Metrics], None] | None = None
    on_evaluation: Callable[[int, Metrics], None] | None = None
    on_sample: Callable[[ShownRollout], None] | None = None
    on_weights: Callable[[int, str], None] | None = None

    def __post_init__(self) -> None:
        parameters_of = {
            "on_step": ("step", "metrics"),
            "on_evaluation": ("policy_version", "metrics"),
            "on_sample": ("sample",),
            "on_weights": ("policy_version", "digest"),
        }
        for name, parameters in parameters_of.items():
            if (function := getattr(self, name)) is None:
                continue
            usage = f"{name}({', '.join(parameters)})"
            check_call(function, parameters, {}, said=f"{name} of asyncrl.run", usage=usage)
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                what = f"{name} of asyncrl.run is a coroutine function"
                raise ConfigError(what, rule=f"it is called as {usage}", way_out="give a plain function.")

    def step(self, step: int, metrics: Metrics) -> None:
        _call("on_step", self.on_step, step, dict(metrics))

    def evaluation(self, version: int, metrics: Metrics) -> None:
        _call("on_evaluation", self.on_evaluation, version, dict(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        for sample in samples:
            _call("on_sample", self.on_sample, sample)

    def weights(self, version: int, digest: str) -> None:
        _call("on_weights", self.on_weights, version, digest)


def _call(name: str, function: Callable[..., None] | None, *arguments: Any) -> None:
    if function is None:
        return
    try:
        function(*arguments)
    except Exception as error:
        what = f"{name} of asyncrl.run raised {type(error).__name__}: {error}"
        failure = CallbackError(what, way_out="fix the callback, then resume with the same run_dir.")
        failure.error = error
        raise failure from error


# ---- by their names in observe.trackers


def check_trackers(observe: ObserveConfig) -> None:
    """Raise ConfigError for a missing client or an unusable user's class; ModuleNotFoundError for a
    client of the extra `train`.
    """
    for name in observe.trackers:
        args = observe.tracker_args.get(name, {})
        usage = "Tracker(**observe.tracker_args[name])"
        check_call(class_of(name), (), args, said=f"observe.trackers={name}", usage=usage)
        if ":" not in name and find_spec(name) is None:
            if name == "tensorboard":
                raise ModuleNotFoundError(f"observe.trackers has {name}", name=name)
            what = f"observe.trackers has {name}, and the package {name} is not installed"
            raise ConfigError(what, way_out=f"{install_extra(name)}; or leave it out.")


def make_trackers(
    observe: ObserveConfig, warn: Callable[[str], None], callbacks: Sequence[Tracker] = ()
) -> Background:
    """The thread makes the trackers later."""
    args = observe.tracker_args
    makers = {name: partial(class_of(name), **args.get(name, {})) for name in observe.trackers}
    return Background(makers, warn, callbacks)


def class_of(name: str) -> Callable[..., Tracker]:
    """Return a client, or a user's `module:Class`."""
    if ":" not in name:
        from asyncrl.observe.tracker_clients import CLIENTS

        return CLIENTS[name]
    kind: Callable[..., Tracker] = load_object(name, "observe.trackers")
    if missing := [method for method in METHODS if not callable(getattr(kind, method, None))]:
        raise ConfigError(
            f"observe.trackers={name} has no {', '.join(missing)}",
            rule=f"a tracker has {', '.join(METHODS)}",
            way_out="define them, or inherit asyncrl.observe.trackers.Tracker.",
        )
    return kind


# ---- the thread


class Background:
    """Calls trackers in one daemon thread, so that no client delays or ends the run.

    Life: made -> start() -> tell() -> tell("close", state) -> wait_closed(). Only `callbacks` are called
        directly, and may raise.

    RUN_DIR/trackers/NAME.json has each tracker's id and the last number of each method, so that no number
    repeats after a resume.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        warn: Callable[[str], None],
        callbacks: Sequence[Tracker] = (),
    ) -> None:
        self.makers = makers
        self.warn = warn
        self.callbacks = callbacks
        self.num_dropped = 0
        self._calls = queue.Queue[tuple[str, tuple[Any, ...]]](MAX_WAITING)
        self._warnings = deque[str]()
        self._live: dict[str, Tracker] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._folder = Path()
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun) -> None:
        run = replace(run, warn=self._warnings.append)
        self._thread = threading.Thread(target=self._work, args=(run,), name="trackers", daemon=True)
        self._thread.start()

    def tell(self, method: str, *arguments: Any) -> None:
        """Queue a call of every tracker."""
        for callback in self.callbacks:
            getattr(callback, method)(*arguments)
        self._show_warnings()
        if self._calls.full():
            with contextlib.suppress(queue.Empty):
                self._calls.get_nowait()
            if self.num_dropped == 0:
                slow = ", ".join(self._live)
                self.warn(f"slow trackers ({slow}): dropping the oldest of {MAX_WAITING} calls")
            self.num_dropped += 1
        self._calls.put((method, arguments))

    async def wait_closed(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Wait until the queue is sent, `limit_s` at most; name late trackers."""
        waited_s = 0.0
        is_said = False
        try:
            while self._is_sending() and waited_s < limit_s:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
                if not is_said and waited_s >= SOON_S:
                    is_said = True
                    say(f"waiting up to {limit_s:g} s for {', '.join(self._live)} (Ctrl-C: stop waiting)")
        finally:
            self._show_warnings()
            if self._is_sending():
                LEFT.extend(self._live)
                late = ", ".join(self._live)
                self.warn(f"trackers not done within {limit_s:g} s: {late}")
            if self.num_dropped:
                self.warn(f"slow trackers: {self.num_dropped} calls dropped; metrics.jsonl has all steps")

    def _is_sending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _show_warnings(self) -> None:
        while self._warnings:
            self.warn(self._warnings.popleft())

    def _work(self, run: TrackedRun) -> None:
        for name in self.makers:
            self._try(name, "start", run)
        method = ""
        while self._live and method != "close":
            method, arguments = self._calls.get()
            for name in [*self._live]:
                self._try(name, method, *arguments)

    def _try(self, name: str, method: str, *arguments: Any) -> None:
        try:
            if method == "start":
                self._open(name, *arguments)
            elif method not in ("step", "evaluation", "samples"):
                getattr(self._live[name], method)(*arguments)
            elif arguments[0] > self._kept[name].get(method, -1):
                getattr(self._live[name], method)(*arguments)
                self._keep(name, {**self._kept[name], method: arguments[0]})
        except BaseException as error:  # a client's or the user's own, SystemExit included
            self._live.pop(name, None)
            LEFT.append(name)
            raised = f"{method}() raised {type(error).__name__}: {error!s:.500}"
            self._warnings.append(f"tracker {name} is turned off, the run continues: {raised}")

    def _open(self, name: str, run: TrackedRun) -> None:
        self._folder = run.run_dir / "trackers"
        self._folder.mkdir(exist_ok=True)
        kept = read_object(self._folder / f"{name}.json", [])
        self._live[name] = tracker = self.makers[name]()
        place = tracker.start(run) or name
        self._keep(name, kept if place == kept.get("id") else {"id": place})

    def _keep(self, name: str, kept: dict[str, Any]) -> None:
        unfinished = self._folder / f".{name}.new"
        unfinished.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        unfinished.replace(self._folder / f"{name}.json")
        self._kept[name] = kept
