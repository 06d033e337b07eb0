"""Trackers of a run, by their names in observe.trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.base.user_code import check_call, load_object
from asyncrl.config.operation import ObserveConfig
from asyncrl.observe.trackers.background import Background
from asyncrl.observe.trackers.clients import CLIENTS
from asyncrl.observe.trackers.tracker import METHODS, Tracker


def check_trackers(observe: ObserveConfig) -> None:
    """Raise ConfigError for a tracker without its client, or a user's class that cannot be loaded, cannot be
    called with its arguments or lacks a method; ModuleNotFoundError for a client of the extra train.
    """
    for name in observe.trackers:
        args = observe.tracker_args.get(name, {})
        kind = _class_of(name)
        usage = "Tracker(**observe.tracker_args[name])"
        check_call(kind, (), args, said=f"observe.trackers={name}", usage=usage)
        if ":" not in name and find_spec(name) is None:
            if name == "tensorboard":
                raise ModuleNotFoundError(f"observe.trackers has {name}", name=name)
            what = f"observe.trackers has {name}, and the package {name} is not installed"
            raise ConfigError(what, way_out=f"{install_extra(name)}; or leave it out.")


def make_trackers(
    observe: ObserveConfig, warn: Callable[[str], None], callbacks: Sequence[Tracker] = ()
) -> Background:
    """Make the trackers of the config, later, in their thread. `warn` shows their problems."""
    args = observe.tracker_args
    makers = {name: partial(make_tracker, name, args.get(name, {})) for name in observe.trackers}
    return Background(makers, warn, callbacks)


def make_tracker(name: str, args: Mapping[str, Any]) -> Tracker:
    """Make one tracker: a client, or a user's `module:Class`."""
    return _class_of(name)(**args)


def _class_of(name: str) -> Callable[..., Tracker]:
    if ":" not in name:
        return CLIENTS[name]
    setting = "observe.trackers"
    kind: Callable[..., Tracker] = load_object(name, setting)
    if missing := [method for method in METHODS if not callable(getattr(kind, method, None))]:
        what = f"{setting}={name} has no {', '.join(missing)}"
        rule = f"a tracker has {', '.join(METHODS)}"
        way_out = "define them, or inherit asyncrl.observe.trackers.tracker.Tracker."
        raise ConfigError(what, rule=rule, way_out=way_out)
    return kind
