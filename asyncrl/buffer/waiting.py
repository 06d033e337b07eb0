"""Splits the trainer's waiting into its causes. Is told the time, reads no clock."""

from __future__ import annotations

from asyncrl.buffer.rule import WaitCause
from asyncrl.types import WaitReport


class WaitMeter:
    """Seconds waited so far, by cause. Whoever changes the rule's state calls `change` with the time and what is waited for now.

    Life: opened with the time and the cause at the start of a wait; each change closes a stretch of one cause; None is no wait.
    """

    def __init__(self, now_s: float, cause: WaitCause | None) -> None:
        self._since_s, self._cause = now_s, cause
        self._seconds: dict[WaitCause, float] = {"generation": 0.0, "stragglers": 0.0, "publishing": 0.0}

    def change(self, now_s: float, cause: WaitCause | None) -> None:
        """From `now_s` on the wait is for `cause`."""
        if self._cause is not None:
            self._seconds[self._cause] += now_s - self._since_s
        self._since_s, self._cause = now_s, cause

    def report(self) -> WaitReport:
        """The stretches closed so far."""
        seconds = self._seconds
        return WaitReport(generation_s=seconds["generation"], stragglers_s=seconds["stragglers"], publishing_s=seconds["publishing"])
