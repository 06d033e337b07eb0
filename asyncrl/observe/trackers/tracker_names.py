"""Which trackers a run has, by their names in observe.trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.operation import ObserveConfig, TrackerArgs
from asyncrl.errors import ConfigError, install_extra
from asyncrl.observe.trackers.background import Background
from asyncrl.observe.trackers.mlflow import Mlflow
from asyncrl.observe.trackers.tensorboard import TensorBoard
from asyncrl.observe.trackers.tracker import Tracker
from asyncrl.observe.trackers.trackio import Trackio
from asyncrl.observe.trackers.wandb import Wandb
from asyncrl.user_code import check_call, load_object

METHODS = ("start", "step", "evaluation", "samples", "weights", "picture", "close")
USAGE = "Tracker(**observe.tracker_args.own[...])"
HAS_ALL = "metrics.jsonl and samples.jsonl have everything"


@dataclass(frozen=True, slots=True)
class _Kind:
    """`package`: what it imports, of an extra of pyproject.toml. `later`: how to see what was not sent."""

    make: Callable[[TrackerArgs], Tracker]
    package: str
    extra: str
    later: str = HAS_ALL


KINDS: Mapping[str, _Kind] = {
    "tensorboard": _Kind(lambda args: TensorBoard(), "tensorboard", "train"),
    "wandb": _Kind(
        lambda args: Wandb(args.wandb), "wandb", "wandb", "`wandb sync {run_dir}/wandb/*run-*` sends the rest"
    ),
    "mlflow": _Kind(lambda args: Mlflow(args.mlflow), "mlflow", "mlflow"),
    "trackio": _Kind(lambda args: Trackio(args.trackio), "trackio", "trackio"),
}


def check_trackers(observe: ObserveConfig) -> None:
    """Raise ConfigError for a tracker whose client is not installed, or a user's tracker that cannot be
    loaded, or made with its arguments, or lacks a method. A client of the extra train raises
    ModuleNotFoundError.
    """
    for name in observe.trackers:
        if ":" in name:
            _own(name, observe.tracker_args)
        elif find_spec(KINDS[name].package) is None:
            if KINDS[name].extra == "train":
                raise ModuleNotFoundError(f"observe.trackers has {name}", name=KINDS[name].package)
            what = f"observe.trackers has {name}, and the package {KINDS[name].package} is not installed"
            raise ConfigError(what, way_out=f"{install_extra(KINDS[name].extra)}; or leave it out.")


def make_trackers(observe: ObserveConfig, run_dir: Path, warn: Callable[[str], None]) -> list[Background]:
    """One of each. `warn` is told what goes wrong with one, which never ends the run."""
    found = []
    for name in observe.trackers:
        make: Callable[[TrackerArgs], Tracker]
        if ":" in name:
            make, later = partial(_make_own, name), HAS_ALL
        else:
            make, later = KINDS[name].make, KINDS[name].later.format(run_dir=run_dir)
        found.append(Background(name, partial(make, observe.tracker_args), warn, later=later))
    return found


def _own(name: str, args: TrackerArgs) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The user's class, and its arguments."""
    setting, given = "observe.trackers", args.own.get(name, {})
    kind = load_object(name, setting)
    check_call(kind, (), given, said=f"{setting}={name}", usage=USAGE)
    if missing := [method for method in METHODS if not callable(getattr(kind, method, None))]:
        what = f"{setting}={name} has no {', '.join(missing)}"
        rule = f"a tracker has {', '.join(METHODS)} (asyncrl/observe/trackers/tracker.py)"
        raise ConfigError(what, rule=rule, way_out="define them; one with nothing to do is `...`.")
    return kind, given


def _make_own(name: str, args: TrackerArgs) -> Tracker:
    kind, given = _own(name, args)
    tracker: Tracker = kind(**given)
    return tracker
