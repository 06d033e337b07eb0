"""The share of each kind of failure among the newest attempts of rollouts."""

from __future__ import annotations

from collections import Counter, deque

from asyncrl.base.errors import RolloutFailure, TaskError
from asyncrl.base.failures import WAYS_OUT, FailureKind

WINDOW = 100
"""Newest attempts that the shares are of."""
MIN_PROMPTS = 3
"""Prompts whose attempts must have failed: one bad prompt fails all its rollouts at
once.
"""


class RecentFailures:
    """Count how the newest attempts ended, and end a run whose infrastructure fails.

    Example: limit 0.5. A worker with 200 rollouts dies: all 100 attempts are
    host_lost. The run continues: lost hosts are shown, and never end it. With a full
    disk the retries fail, too: the first rollout without an attempt left ends the run.
    """

    def __init__(self, limit: float = 1.0) -> None:
        """`limit`: supervision.max_infrastructure_failures."""
        self._limit = limit
        self._ends = deque[tuple[FailureKind | None, str]](maxlen=WINDOW)
        """Kind and prompt of each; None: the attempt succeeded."""
        self._newest: dict[FailureKind, RolloutFailure] = {}

    def note_end_nowait(self, failure: RolloutFailure | None, prompt_id: str) -> None:
        self._ends.append((None if failure is None else failure.kind, prompt_id))
        if failure is not None:
            self._newest[failure.kind] = failure

    def gauges(self) -> dict[str, float]:
        """Return failure/KIND of each kind seen so far, and their sum over the
        infrastructure, in 0..1.
        """
        num = max(1, len(self._ends))
        counts = Counter(kind for kind, _ in self._ends)
        shares = {f"failure/{kind}": counts[kind] / num for kind in self._newest}
        num_infrastructure = sum(
            kind is not None and kind.is_infrastructure for kind, _ in self._ends
        )
        shares["failure/infrastructure"] = num_infrastructure / num
        return shares

    def check(self, failure: RolloutFailure, component: str) -> None:
        """Raise TaskError above the limit, after a `failure` without a retry. A burst
        whose retries succeed must not end the run.
        """
        if not _ends_runs(failure.kind):
            return
        failed = [
            (kind, prompt_id)
            for kind, prompt_id in self._ends
            if kind is not None and _ends_runs(kind)
        ]
        share = len(failed) / WINDOW
        num_prompts = len({prompt_id for _, prompt_id in failed})
        is_short = len(self._ends) < WINDOW or num_prompts < MIN_PROMPTS
        if is_short or share <= self._limit:
            return
        ((kind, num),) = Counter(kind for kind, _ in failed).most_common(1)
        newest = self._newest[kind]
        what = f"{share:.0%} of the newest {WINDOW} attempts of rollouts failed because of infrastructure"
        raise TaskError(
            component,
            f"{what}, most often {kind} ({num}), the newest: {newest.what}",
            rule=f"supervision.max_infrastructure_failures={self._limit:g} is the limit",
            way_out=f"{WAYS_OUT[kind]} Then resume the run.",
        )


def _ends_runs(kind: FailureKind) -> bool:
    """Other hosts take over the rollouts of a lost one."""
    return kind.is_infrastructure and kind is not FailureKind.HOST_LOST
