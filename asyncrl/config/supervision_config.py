"""Section `supervision`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from asyncrl.config.fields import Fraction, FrozenConfig


class SupervisionConfig(FrozenConfig):
    """Restarts of processes, and reports of hangs."""

    free_keys: ClassVar = "*"

    max_restarts: NonNegativeInt = 3
    """Restarts of each engine, trainer or worker within an hour of work (0 = the run
    ends at once).
    """
    backoff_s: NonNegativeFloat = 1.0
    """Delay of a process's first restart, in seconds; doubled each time, 30 at most."""
    start_timeout_s: PositiveFloat = 300.0
    """Timeout for a process's first answer, in seconds, after reading its model (vLLM:
    three times longer).
    """
    max_infrastructure_failures: Fraction = 0.5
    """Share of the newest 100 attempts of rollouts that infrastructure may fail, then
    the run ends when a rollout has no retry left (1 = never; docs/failures.md).
    """
    watchdog_s: PositiveFloat = 900.0
    """Seconds without progress until the run reports who waits for whom, with stacks in
    the log.
    """
    on_stuck: Literal["warn", "restart", "fail"] = "warn"
    """Reaction to that: keep waiting, restart the engines, or end the run (which can be
    resumed).
    """
