"""Work items and their workers, and the queue of items by the labels that they ask for."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from asyncrl.base.errors import RolloutFailure
from asyncrl.messages import worker_api as wire
from asyncrl.messages.records import Outcome

log = logging.getLogger(__name__)

Labels = frozenset[str]


@dataclass(eq=False, slots=True)
class QueuedItem:
    """An attempt of a rollout, until its outcome. `started` may be called repeatedly."""

    item: wire.WorkItem
    started: Callable[[], None]
    done: asyncio.Future[Outcome | RolloutFailure]
    labels: Labels = frozenset()
    place: int = 0
    """Of the item in the whole queue, set by it."""
    worker: WorkerRecord | None = None
    posted: Outcome = field(default_factory=Outcome)

    @property
    def item_id(self) -> str:
        return self.item.item_id

    def post(self, outcome: Outcome) -> None:
        if self.posted not in (Outcome(), outcome):
            log.warning(
                "%s: the newest posted outcome counts, %s, instead of %s",
                self.item.rollout_id,
                outcome,
                self.posted,
            )
        self.posted = outcome


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """A worker process: its newest request for work, its items, and the timer that ends
    its lease. `busy`: why it takes no work.
    """

    last_number: int = -1
    labels: Labels = frozenset()
    busy: str = ""
    held: dict[str, QueuedItem] = field(default_factory=dict)
    silence: asyncio.TimerHandle | None = None


class LabelledQueue:
    """A worker takes the oldest item whose labels it all has.

    Items with equal labels share a line, so a take costs a look at the head of each
    line, however many items wait.

    Example: items a {gpu}, b {}, c {gpu, docker}. A worker with {gpu} takes a, then b.
    """

    def __init__(self) -> None:
        self._lines: dict[Labels, OrderedDict[str, QueuedItem]] = defaultdict(
            OrderedDict
        )
        self._last = itertools.count(1)
        self._first = itertools.count(0, -1)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, item: QueuedItem) -> None:
        item.place = next(self._last)
        self._lines[item.labels][item.item_id] = item

    def give_back(self, item: QueuedItem) -> None:
        """Put an item that was taken before all others."""
        item.place = next(self._first)
        line = self._lines[item.labels]
        line[item.item_id] = item
        line.move_to_end(item.item_id, last=False)

    def remove(self, item: QueuedItem) -> None:
        """Remove an item. Idempotent."""
        line = self._lines[item.labels]
        line.pop(item.item_id, None)
        if not line:
            del self._lines[item.labels]

    def take(self, labels: Labels) -> QueuedItem | None:
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
