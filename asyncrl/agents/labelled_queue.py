"""Queue of work items by the labels that they ask for."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

Labels = frozenset[str]


class Labelled(Protocol):
    labels: Labels
    place: int
    """Of the item in the whole queue, set by it."""

    @property
    def item_id(self) -> str: ...


Item = TypeVar("Item", bound=Labelled)


class LabelledQueue(Generic[Item]):
    """A worker takes the oldest item whose labels it all has.

    Items with equal labels share a line, so a take costs a look at the head of each
    line, however many items wait.

    Example: items a {gpu}, b {}, c {gpu, docker}. A worker with {gpu} takes a, then b.
    """

    def __init__(self) -> None:
        self._lines: dict[Labels, OrderedDict[str, Item]] = {}
        self._last = itertools.count(1)
        self._first = itertools.count(0, -1)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, item: Item) -> None:
        item.place = next(self._last)
        self._line(item.labels)[item.item_id] = item

    def give_back(self, item: Item) -> None:
        """Put an item that was taken before all others."""
        item.place = next(self._first)
        line = self._line(item.labels)
        line[item.item_id] = item
        line.move_to_end(item.item_id, last=False)

    def remove(self, item: Item) -> None:
        """Remove an item. Idempotent."""
        line = self._lines.get(item.labels, OrderedDict())
        line.pop(item.item_id, None)
        if not line:
            self._lines.pop(item.labels, None)

    def take(self, labels: Labels) -> Item | None:
        """Remove and return the oldest item for a worker with these labels."""
        heads = [
            next(iter(line.values()))
            for asked, line in self._lines.items()
            if asked <= labels
        ]
        if not heads:
            return None
        oldest = min(heads, key=lambda item: item.place)
        self.remove(oldest)
        return oldest

    def unmatched(self, workers: Iterable[Labels]) -> dict[Labels, int]:
        """Return the number of items for which no worker has all labels."""
        known = set(workers)
        return {
            asked: len(line)
            for asked, line in self._lines.items()
            if not any(asked <= labels for labels in known)
        }

    def _line(self, labels: Labels) -> OrderedDict[str, Item]:
        return self._lines.setdefault(labels, OrderedDict())
