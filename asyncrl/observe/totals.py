"""Totals that outlive the process that counts them: over an engine that is started again, and over a resume. Knows names and numbers."""

from __future__ import annotations

from collections.abc import Mapping


class Totals:
    """Counters of the whole run by metric name.

    Life:       begins at 0, or where starts_from says, then add() is told what each source has counted since it began.
    Invariant:  a total never falls. A source that says less than before began anew: all that it says was counted since.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<Totals {self._totals}>"

    def starts_from(self, totals: Mapping[str, float]) -> None:
        """What was counted before, by other processes; a total that is higher stays."""
        for name, value in totals.items():
            self._totals[name] = max(value, self._totals.get(name, value))

    def add(self, counted: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
        """The totals of these names, now that their sources (one, or several by name) have counted so far."""
        for name, value in counted.items():
            for source, now in (value if isinstance(value, Mapping) else {"": value}).items():
                before = self._seen.get((name, source), 0)
                self._totals[name] = self._totals.get(name, 0) + (now - before if now >= before else now)
                self._seen[name, source] = now
        return {name: self._totals.get(name, 0) for name in counted}
