"""The share of each kind of failure among the newest attempts of rollouts."""

from __future__ import annotations

from collections import Counter, deque

from asyncrl.base.errors import RolloutFailure, TaskError
from asyncrl.base.failures import WAYS_OUT, FailureKind

WINDOW = 100
"""Newest attempts that the shares are of."""


class RecentFailures:
    """Count how the newest attempts ended, and end a run whose infrastructure fails.

    Example: limit 0.5. A worker with 200 rollouts dies: all 100 attempts are
    host_lost. The run continues, because their retries succeed. With a full disk the
    retries fail, too: the first rollout without an attempt left ends the run.
    """

    def __init__(self, limit: float = 1.0) -> None:
        """`limit`: supervision.max_infrastructure_failures."""
        self._limit = limit
        self._ends = deque[FailureKind | None](maxlen=WINDOW)
        """None: the attempt succeeded."""
        self._newest: dict[FailureKind, RolloutFailure] = {}

    def ended_nowait(self, failure: RolloutFailure | None) -> None:
        self._ends.append(None if failure is None else failure.kind)
        if failure is not None:
            self._newest[failure.kind] = failure

    def gauges(self) -> dict[str, float]:
        """Return failure/KIND of each kind seen so far, and their sum over the
        infrastructure, in 0..1.
        """
        num = max(1, len(self._ends))
        counts = Counter(self._ends)
        shares = {f"failure/{kind}": counts[kind] / num for kind in self._newest}
        shares["failure/infrastructure"] = sum(self._of_infrastructure().values()) / num
        return shares

    def _of_infrastructure(self) -> Counter[FailureKind]:
        kinds = (kind for kind in self._ends if kind is not None)
        return Counter(kind for kind in kinds if kind.is_infrastructure)

    def check(self, component: str) -> None:
        """Raise TaskError above the limit. Called when a rollout has no retry left: a
        burst whose retries succeed must not end the run.
        """
        counts = self._of_infrastructure()
        share = sum(counts.values()) / WINDOW
        if len(self._ends) < WINDOW or share <= self._limit:
            return
        ((kind, num),) = counts.most_common(1)
        newest = self._newest[kind]
        what = f"{share:.0%} of the newest {WINDOW} attempts of rollouts failed because of infrastructure"
        raise TaskError(
            component,
            f"{what}, most often {kind} ({num}), the newest: {newest.what}",
            rule=f"supervision.max_infrastructure_failures={self._limit:g} is the limit",
            way_out=f"{WAYS_OUT[kind]} Then resume the run.",
        )
