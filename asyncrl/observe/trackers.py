"""Trackers of a run: interface, the calling thread, and TensorBoard's client."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import queue
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from asyncrl.base.errors import (
    CallbackError,
    ConfigError,
    RolloutFailure,
    install_extra,
)
from asyncrl.base.extensions import load_place, rows
from asyncrl.base.user_code import check_call, load_object
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.messages.records import GroupId, Rollout
from asyncrl.observe.run_dir import read_object, replace_text
from asyncrl.observe.samples import ShownRollout, sample_text

MAX_WAITING = 256
"""Queued calls; a full queue drops its oldest call."""
SOON_S = 1.0
"""Seconds until the console names trackers that are still sending."""
LEFT: list[str] = []
"""Trackers whose clients may block the process's exit, so that the command exits at
once.
"""
MAX_CHARS = 2000
CLIENTS: Mapping[str, str] = {
    "tensorboard": "asyncrl.observe.trackers:TensorBoard",
    **rows("trackers"),
}
"""Places of classes by their names in observe.trackers."""
SENT_FILE = "trackers.json"
"""Last number of each tracker's step, evaluation and samples."""
Metrics = Mapping[str, float]


class TrackedRun(NamedTuple):
    """`config`: plain values of config.yaml; `run_id`: the same over resumes; `warn`:
    from any thread; `model`: name of the policy.
    """

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, object]
    warn: Callable[[str], None] = print
    model: str = "policy"


class Tracker:
    """Base class of trackers.

    start() -> step(), evaluation(), samples(), weights() in any order -> close(), all
    from one thread. A tracker that raises is turned off with a warning. `package`: the
    package that it imports, and the extra of asyncrl that installs it ('' = none).
    """

    package: ClassVar[str] = ""

    def start(self, run: TrackedRun) -> None:
        """Open the run, or continue it after a resume."""

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


class RolloutListener(Protocol):
    """Gets the rollouts of training. A setting of `observe` chooses it.

    All calls come from the run's event loop: only wait_closed() may wait. The class takes
    a function for warnings, and raises ConfigError if it lacks a package.
    """

    def start(self, run: TrackedRun) -> None: ...

    def rollout(
        self,
        group_id: GroupId,
        prompt_id: str,
        sample_index: int,
        rollout: Rollout,
        failure: RolloutFailure | None,
    ) -> None:
        """Take a rollout that has ended; after a `failure`, its sampled part."""

    def gauges(self) -> dict[str, float]:
        """Return metrics."""

    async def wait_closed(self) -> None:
        """Send the remaining rollouts, and end."""


CALLBACKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "step": ("on_step", ("step", "metrics")),
    "evaluation": ("on_evaluation", ("policy_version", "metrics")),
    "samples": ("on_sample", ("sample",)),
    "weights": ("on_weights", ("policy_version", "digest")),
}
"""Names and parameters of functions given to asyncrl.run, by method of Tracker."""


class Callbacks:
    """Functions given to asyncrl.run, by name. An exception ends the run as
    CallbackError. Raises ConfigError for a coroutine function or for other parameters.
    """

    def __init__(self, functions: Mapping[str, Callable[..., None] | None]) -> None:
        self._functions = functions
        for name, parameters in CALLBACKS.values():
            if (function := functions.get(name)) is None:
                continue
            usage = f"{name}({', '.join(parameters)})"
            check_call(
                function, parameters, {}, said=f"{name} of asyncrl.run", usage=usage
            )
            # The call would return a coroutine that nobody awaits, so nothing would
            # happen.
            if inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"{name} of asyncrl.run is a coroutine function",
                    rule=f"it is called as {usage}",
                    way_out="give a plain function.",
                )

    def tell(self, method: str, *arguments: Any) -> None:
        name, _ = CALLBACKS.get(method, ("", ()))
        # `close` and the methods that nobody gave a function for.
        if (function := self._functions.get(name)) is None:
            return
        try:
            for call in (
                [(sample,) for sample in arguments[1]]
                if method == "samples"
                else [arguments]
            ):
                function(*call)
        except Exception as error:
            what = f"{name} of asyncrl.run raised {type(error).__name__}: {error}"
            failure = CallbackError(
                what, way_out="fix the callback, then resume with the same run_dir."
            )
            failure.error = error
            raise failure from error


# ---- by their names in observe.trackers


def check_trackers(observe: ObserveConfig) -> None:
    """Raise ConfigError for a missing client or an unusable user's class;
    ModuleNotFoundError for a client of the extra `train`.
    """
    listeners_of(observe, print)
    for name in observe.trackers:
        args = observe.tracker_args.get(name, {})
        usage = "Tracker(**observe.tracker_args[name])"
        tracker = class_of(name)
        check_call(tracker, (), args, said=f"observe.trackers={name}", usage=usage)
        package = getattr(tracker, "package", "")
        if package and find_spec(package) is None:
            if package == TensorBoard.package:
                raise ModuleNotFoundError(f"observe.trackers has {name}", name=name)
            raise ConfigError(
                f"observe.trackers has {name}, and the package {package} is not installed",
                way_out=f"{install_extra(package)}; or leave it out.",
            )


def class_of(name: str) -> Callable[..., Tracker]:
    """Return a client, or a user's `module:Class`."""
    tracker: Callable[..., Tracker] = (
        load_place(CLIENTS[name])
        if name in CLIENTS
        else load_object(name, "observe.trackers")
    )
    return tracker


def listeners_of(
    observe: ObserveConfig, warn: Callable[[str], None]
) -> list[RolloutListener]:
    """Make the listeners that are set. Raises ConfigError for a missing package."""
    return [
        load_place(place)(warn)
        for name, place in rows("listeners").items()
        if getattr(observe, name) is not None
    ]


# ---- the thread


@dataclass(eq=False)
class Background:
    """Calls trackers in one daemon thread, so that no client delays or ends the run.

    Life: made -> start() -> tell() -> tell("close", state) -> wait_closed(). Only
        `callbacks` are called directly, and may raise.

    SENT_FILE has the last number of each method, so that no number repeats after a
    resume.
    """

    observe: ObserveConfig
    warn: Callable[[str], None]
    """May be called from the thread."""
    callbacks: Callbacks | None = None
    num_dropped = 0

    def __post_init__(self) -> None:
        self._calls = queue.Queue[tuple[str, tuple[Any, ...]]](MAX_WAITING)
        self._live: dict[str, Tracker] = {}
        self._thread = threading.Thread()

    def start(self, run: TrackedRun) -> None:
        self._thread = threading.Thread(
            target=self._work, args=(run,), name="trackers", daemon=True
        )
        self._thread.start()

    def tell(self, method: str, *arguments: object) -> None:
        """Queue a call of every tracker."""
        if self.callbacks is not None:
            # Here, in the run's own loop, so that an exception ends the run. The thread
            # below is for clients of others, which must not.
            self.callbacks.tell(method, *arguments)
        if not self._thread.is_alive():
            return
        # The oldest call goes, not this one: `close`, the last, must arrive. Only the
        # event loop puts calls, so after this put() never blocks it.
        if self._calls.full():
            with contextlib.suppress(queue.Empty):
                self._calls.get_nowait()
            if self.num_dropped == 0:
                slow = f"slow trackers ({', '.join(self._live)})"
                self.warn(
                    f"{slow}: dropping the oldest of {MAX_WAITING} calls; metrics.jsonl has all steps"
                )
            self.num_dropped += 1
        self._calls.put((method, arguments))

    async def wait_closed(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Wait until the queue is sent, `limit_s` at most; name late trackers."""
        thread = self._thread
        try:
            if thread.is_alive():
                await asyncio.to_thread(thread.join, SOON_S)
            if thread.is_alive():
                say(
                    f"waiting up to {limit_s:g} s for {', '.join(self._live)} (Ctrl-C: stop waiting)"
                )
                await asyncio.to_thread(thread.join, limit_s - SOON_S)
        finally:
            if thread.is_alive():
                # Python waits for the threads of such a client at its exit; the command
                # then calls os._exit.
                LEFT.extend(self._live)
                self.warn(
                    f"trackers not done within {limit_s:g} s: {', '.join(self._live)}"
                )

    def _work(self, run: TrackedRun) -> None:
        path = run.run_dir / SENT_FILE
        earlier = read_object(path, [])
        # `earlier` does not change: several evaluations of a version, and failed and
        # other samples of a step, share a number, and all of them are sent.
        sent = dict(earlier)
        for name in self.observe.trackers:
            with self._turned_off(name, "start"):
                tracker = class_of(name)(**self.observe.tracker_args.get(name, {}))
                tracker.start(run)
                self._live[name] = tracker
        method = ""
        while self._live and method != "close":
            method, arguments = self._calls.get()
            for name, tracker in [*self._live.items()]:
                with self._turned_off(name, method):
                    # Most trackers show no weights, and need no number of them.
                    if getattr(type(tracker), method, None) is getattr(Tracker, method):
                        continue
                    key = f"{name} {method}"
                    if method == "close" or arguments[0] > earlier.get(key, -1):
                        getattr(tracker, method)(*arguments)
                        sent[key] = arguments[0]
                        # After the call: if the process dies between both, the number
                        # is sent twice, which is better than never. So is a number
                        # that a full disk cannot note: the tracker works.
                        with contextlib.suppress(OSError):
                            replace_text(path, json.dumps(sent))

    @contextlib.contextmanager
    def _turned_off(self, name: str, method: str) -> Iterator[None]:
        """Turn the tracker off if it raises."""
        try:
            yield
        # The run must not end by code that only shows it.
        except BaseException as error:
            # a client's or the user's own, SystemExit included
            self._live.pop(name, None)
            LEFT.append(name)
            raised = f"{method}() raised {type(error).__name__}: {error!s:.500}"
            self.warn(f"tracker {name} is turned off, the run continues: {raised}")


# ---- TensorBoard


class ByStep(Tracker):
    """Evaluations have the policy_version as their step."""

    def evaluation(self, version: int, metrics: Metrics) -> None:
        self.step(version, metrics)


class TensorBoard(ByStep):
    """TensorBoard: scalars by step, evaluations by policy_version, samples as text."""

    package: ClassVar = "tensorboard"

    _writer: Any

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=5)

    def step(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        self._add(Summary(value=values), step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Add about a hundred texts per power of ten; indented, so that Markdown shows
        them verbatim.

        Example: each of the steps 1 to 99, then 100, 110, 120 ..., then 1000, 1100 ...
        """
        from tensorboard.plugins.text.summary_v2 import text_pb

        if step % 10 ** max(0, len(str(step)) - 2) == 0:
            texts = "\n\n".join(
                sample_text(sample, most=MAX_CHARS) for sample in samples
            )
            self._add(
                text_pb("samples", textwrap.indent(texts, "    ", lambda line: True)),
                step,
            )

    def close(self, state: str) -> None:
        self._writer.close()

    def _add(self, summary: object, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
