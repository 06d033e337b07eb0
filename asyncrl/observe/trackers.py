"""Trackers of a run: interface, the calling thread, and clients of TensorBoard, Weights & Biases, MLflow and
Trackio, each imported when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import queue
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from asyncrl.base.errors import CallbackError, ConfigError, install_extra
from asyncrl.base.user_code import check_call, load_object
from asyncrl.config.run_config import ObserveConfig
from asyncrl.observe.run_dir import read_object
from asyncrl.observe.samples import ShownRollout, sample_text

MAX_WAITING = 256
"""Queued calls; a full queue drops its oldest call."""
POLL_S = 0.05
SOON_S = 1.0
"""Seconds until the console names trackers that are still sending."""
LEFT: list[str] = []
"""Trackers whose clients may block the process's exit, so that the command exits at once."""
MAX_CHARS = 2000
REACH_S = 10.0
"""Seconds for wandb's server to answer; otherwise the run is kept in RUN_DIR/wandb."""
RUN_TAG = "asyncrl.run_id"
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
        self._call("on_step", step, dict(metrics))

    def evaluation(self, version: int, metrics: Metrics) -> None:
        self._call("on_evaluation", version, dict(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        for sample in samples:
            self._call("on_sample", sample)

    def weights(self, version: int, digest: str) -> None:
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
    if name in CLIENTS:
        return CLIENTS[name]
    kind: Callable[..., Tracker] = load_object(name, "observe.trackers")
    if not isinstance(kind, type) or not issubclass(kind, Tracker):
        what = f"observe.trackers={name} is not a subclass of Tracker"
        raise ConfigError(what, way_out="inherit asyncrl.observe.trackers.Tracker.")
    return kind


# ---- the thread


@dataclass
class Background:
    """Calls trackers in one daemon thread, so that no client delays or ends the run.

    Life: made -> start() -> tell() -> tell("close", state) -> wait_closed(). Only `callbacks` are called
        directly, and may raise.

    RUN_DIR/trackers/NAME.json has each tracker's id and the last number of each method, so that no number
    repeats after a resume.
    """

    makers: Mapping[str, Callable[[], Tracker]]
    warn: Callable[[str], None]
    callbacks: Sequence[Tracker] = ()
    num_dropped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._calls = queue.Queue[tuple[str, tuple[Any, ...]]](MAX_WAITING)
        self._warnings = deque[str]()
        self._live: dict[str, Tracker] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._folder = Path()
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun) -> None:
        self._folder = run.run_dir / "trackers"
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
        try:
            for poll in range(round(limit_s / POLL_S)):
                if not self._is_sending():
                    break
                if poll == round(SOON_S / POLL_S):
                    say(f"waiting up to {limit_s:g} s for {', '.join(self._live)} (Ctrl-C: stop waiting)")
                await asyncio.sleep(POLL_S)
        finally:
            self._show_warnings()
            if self._is_sending():
                LEFT.extend(self._live)
                self.warn(f"trackers not done within {limit_s:g} s: {', '.join(self._live)}")
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
                self._live[name] = tracker = self.makers[name]()
                kept = read_object(self._folder / f"{name}.json", [])
                place = tracker.start(*arguments) or name
                self._keep(name, kept if place == kept.get("id") else {"id": place})
            elif method in ("weights", "close"):
                getattr(self._live[name], method)(*arguments)
            elif arguments[0] > self._kept[name].get(method, -1):
                getattr(self._live[name], method)(*arguments)
                self._keep(name, {**self._kept[name], method: arguments[0]})
        except BaseException as error:  # a client's or the user's own, SystemExit included
            self._live.pop(name, None)
            LEFT.append(name)
            raised = f"{method}() raised {type(error).__name__}: {error!s:.500}"
            self._warnings.append(f"tracker {name} is turned off, the run continues: {raised}")

    def _keep(self, name: str, kept: dict[str, Any]) -> None:
        self._folder.mkdir(exist_ok=True)
        unfinished = self._folder / f".{name}.new"
        unfinished.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        unfinished.replace(self._folder / f"{name}.json")
        self._kept[name] = kept


# ---- clients


COLUMNS = (
    *("step", "kind", "group_id", "sample_index", "prompt", "completion", "reward", "staleness"),
    *("logprob_gap", "is_truncated", "num_interruptions", "error"),
)


def sample_table(samples: Sequence[ShownRollout]) -> dict[str, list[Any]]:
    """Return `columns`, and in `data` a row per sample."""
    rows = []
    for sample in samples:
        messages = [f"{message.get('role')}: {message.get('content')}" for message in sample["messages"]]
        completion = [part["text"] for part in sample["parts"] if part["is_sampled"]]
        shown = {**sample, "prompt": "\n".join(messages), "completion": "\n\n".join(completion)}
        rows.append([shown[name] for name in COLUMNS])
    return {"columns": [*COLUMNS], "data": rows}


class _ByStep(Tracker):
    """Evaluations have the policy_version as their step."""

    def evaluation(self, version: int, metrics: Metrics) -> None:
        self.step(version, metrics)


class TensorBoard(_ByStep):
    """TensorBoard: scalars by step, evaluations by policy_version, samples as text."""

    _writer: Any

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=5)

    def step(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add([Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()], step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Add text by kind; indented, so that Markdown shows it verbatim."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        if step % 10 ** max(0, len(str(step)) - 2):
            return
        texts = dict[str, list[str]]()
        for sample in samples:
            lines = sample_text(sample, most=MAX_CHARS).split("\n")
            texts.setdefault(sample["kind"], []).append("".join(f"    {line}\n" for line in lines))
        for kind, found in texts.items():
            self._add(text_pb(f"samples/{kind}", "\n---\n\n".join(found)).value, step)

    def close(self, state: str) -> None:
        self._writer.close()

    def _add(self, values: Sequence[Any], step: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))


@dataclass
class Wandb(Tracker):
    """Weights & Biases: metrics by `step`, evaluations by `policy_version`."""

    project: str = "asyncrl"
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None
    """None: WANDB_MODE, else online."""
    _run: Any = field(init=False)

    def start(self, run: TrackedRun) -> str:
        """Open the run; offline without a key or a server."""
        import wandb

        settings = wandb.setup().settings
        mode: Any = self.mode or settings.mode
        if mode == "online" and (why := _why_offline(str(settings.base_url))):
            run.warn(f"wandb is offline: {why}; upload later: `wandb sync {run.run_dir}/wandb/offline-run-*`")
            mode = "offline"
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=[*self.tags],
            id=run.run_id,
            name=run.name,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            resume="allow" if mode == "online" else None,
            allow_val_change=True,
            settings=wandb.Settings(quiet=True, console="off", reinit="create_new"),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="policy_version")
        return f"{self.entity or ''}/{self.project}/{run.run_id}"

    def step(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def evaluation(self, version: int, metrics: Metrics) -> None:
        self._run.log({"policy_version": version, **metrics})

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from wandb import Table

        table = Table(**sample_table(samples), allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


def _why_offline(base_url: str) -> str:
    """Return why wandb would wait for a key or for an answer."""
    import wandb

    try:
        urllib.request.urlopen(base_url, timeout=REACH_S).close()
    except OSError as error:
        has_answered = isinstance(error, urllib.error.HTTPError)
        if not has_answered and not isinstance(getattr(error, "reason", None), ssl.SSLError):
            return f"{base_url} cannot be reached ({error})"
    is_known = wandb.login(prompt=False, verify=False)
    return "" if is_known else f"no key for {base_url} (`wandb login`, or WANDB_API_KEY)"


@dataclass
class Mlflow(_ByStep):
    """MLflow: metrics by step, evaluations by policy_version, and samples as a table artifact per step."""

    uri: str | None = None
    """Tracking server or database; None: MLFLOW_TRACKING_URI, else ./mlflow.db."""
    experiment: str = "asyncrl"
    _client: Any = field(init=False)
    _id: str = field(init=False)

    def start(self, run: TrackedRun) -> str:
        """Continue the run with this run_id, or create it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self.uri)
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment)
        if found := self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._client.set_tag(self._id, RUN_TAG, run.run_id)
            settings = {
                f"{name}.{key}".rstrip("."): value if isinstance(value, str) else json.dumps(value)
                for name, section in run.config.items()
                for key, value in (section if isinstance(section, Mapping) else {"": section}).items()
            }
            params = [Param(name, value[:5000]) for name, value in settings.items()]
            self._client.log_batch(self._id, params=params)  # only once: a param cannot change
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        return self._id

    def step(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        names = {name: re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name) for name in metrics}  # what MLflow accepts
        batch = [Metric(names[name], value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        self._client.log_dict(self._id, sample_table(samples), f"samples/step_{step:06d}.json")

    def close(self, state: str) -> None:
        states = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, states[state])


@dataclass
class Trackio(_ByStep):
    """Trackio: metrics by step, evaluations by policy_version."""

    project: str = "asyncrl"
    space_id: str | None = None
    """A Hugging Face Space such as user/name; None: this machine, or TRACKIO_SPACE_ID."""
    _run: Any = field(init=False)

    def start(self, run: TrackedRun) -> str:
        import trackio

        name = f"{run.name}-{run.run_id[:8]}"
        more: dict[str, Any] = {"config": dict(run.config), "resume": "allow", "embed": False}
        self._run = trackio.init(self.project, name, space_id=self.space_id, **more)
        return f"{self.space_id or ''}/{self.project}/{name}"

    def step(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from trackio import Table

        self._run.log({"samples": Table(**sample_table(samples))}, step=step)

    def close(self, state: str) -> None:
        self._run.finish()


CLIENTS: Mapping[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
