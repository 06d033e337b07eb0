"""What a run looks like that does not move, for people and as plain values. Knows waits; knows no rooms, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.observe.stacks import Place
from asyncrl.observe.waits import ChildState, Reported, Wait, known_function, place_of


@dataclass(frozen=True, slots=True)
class StuckReport:
    """What a run looks like that has not moved for `seconds`."""

    seconds: float
    waits: tuple[Wait, ...]
    oldest: tuple[tuple[str, float, str], ...]
    """(rollout, seconds since its start, where it waits)."""
    children: tuple[ChildState, ...] = ()
    marks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, seconds: float, waits: tuple[Wait, ...], reported: Reported, children: tuple[ChildState, ...]) -> StuckReport:
        """With the places of the oldest rollouts looked up."""
        oldest = []
        for rollout, age_s in reported.oldest:
            place = place_of(rollout, reported.places)
            oldest.append((rollout, age_s, "a place unknown" if place is None else _where(place)))
        return cls(seconds, waits, tuple(oldest), children, reported.marks)

    @property
    def blame(self) -> str:
        """The processes that are not well, or who waits for whom if all of them are."""
        ill = [str(child) for child in self.children if not child.is_well]
        return "; ".join(ill or map(str, self.waits)) or "no room waits in a function that is known"

    def text(self) -> str:
        """For people: a line each wait, rollout and process."""
        lines = [f"nothing has moved for {self.seconds:.0f} s"]
        lines += [f"  {wait}" for wait in self.waits]
        lines += [f"  rollout {rollout} runs for {age_s:.0f} s, in {where}" for rollout, age_s, where in self.oldest]
        lines += [f"  {child}" for child in self.children]
        lines.append("  at: " + ", ".join(f"{name} {value:.0f}" for name, value in self.marks.items()))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {
            "seconds": round(self.seconds, 1),
            "waits": [wait.as_dict() for wait in self.waits],
            "oldest": [[rollout, round(age_s, 1), where] for rollout, age_s, where in self.oldest],
            "children": [str(child) for child in self.children],
        }


def _where(place: Place) -> str:
    """EnginePool.generate on engine-1, turn 0."""
    function = known_function(place)
    server = place.name_below(function)
    turn = next((part[1:] for part in place.request.split("/") if part[:1] == "t" and part[1:].isdigit()), "")
    return function + (f" on {server}" if server else "") + (f", turn {turn}" if turn else "")
