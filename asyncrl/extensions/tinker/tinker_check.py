"""Check a config of `asyncrl serve tinker`: load everything except weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.extensions.tinker.tinker_config import TinkerConfig
from asyncrl.job.check.config_check import check_model, check_plan
from asyncrl.launch.machine import Node
from asyncrl.launch.plan import resolve_auto


def check_tinker(config: TinkerConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the lines of `asyncrl check`. Raises ConfigError."""
    run, resolved = resolve_auto(config.as_run(), nodes)
    lines, _ = check_model(run, nodes)
    yield from (*lines, *resolved)
    yield from check_plan(run, nodes)
