"""Work items and their workers. Pure: no HTTP, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrl.agents.endpoint.requests import NO_RETRY, ApiError
from asyncrl.agents.endpoint.sessions import MAX_EXPIRED, Expired
from asyncrl.base.errors import RolloutFailure
from asyncrl.config import Outcomes
from asyncrl.messages.records import Outcome
from asyncrl.messages.work import WorkItem

WorkerId = tuple[str, str]
"""(name, random text of the process)."""


def outcome_refused(outcomes: Outcomes) -> ApiError:
    why = f"This key samples and sets no reward: generator.outcomes={outcomes} says where rewards come from."
    return ApiError(403, why, code="outcome_refused", headers=NO_RETRY)


@dataclass(eq=False, slots=True)
class QueuedItem:
    """`started` may be called repeatedly, `ended` once."""

    item: WorkItem
    started: Callable[[], None]
    ended: Callable[[Outcome | RolloutFailure], None]
    worker: WorkerId | None = None
    posted: Outcome = field(default_factory=Outcome)

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.item.key, self.item.outcome_key) if key is not None]


@dataclass(eq=False, slots=True)
class WorkerRecord:
    last_seen_s: float = 0.0
    slots: int = 0
    last_number: int = -1
    held: dict[str, QueuedItem] = field(default_factory=dict)


class WorkItems:
    """Work items between run() and their end.

    Life: queued -> held -> ended, by a result, by its worker's silence, or withdrawn.

    Invariant: every item ends once, in _end.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self._items: dict[str, QueuedItem] = {}
        self._by_key: dict[str, QueuedItem] = {}
        self._queue: OrderedDict[str, QueuedItem] = OrderedDict()
        self._ended = Expired(3 * MAX_EXPIRED)  # by item, and by both keys
        self.workers: dict[WorkerId, WorkerRecord] = {}

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        return len(self._items) - len(self._queue)

    def add(self, item: QueuedItem) -> None:
        self._items[item.item.item_id] = item
        self._by_key |= dict.fromkeys(item.keys, item)
        self._queue[item.item.item_id] = item

    def seen(self, worker_id: WorkerId, now_s: float) -> None:
        self.workers.setdefault(worker_id, WorkerRecord()).last_seen_s = now_s

    def ask(self, worker_id: WorkerId, number: int, holding: Collection[str]) -> bool:
        """Return false for an old request. Requeue items lost in transit."""
        worker = self.workers[worker_id]
        if number <= worker.last_number:
            return False
        worker.last_number = number
        kept = set(holding)
        for item_id in [item_id for item_id in worker.held if item_id not in kept][::-1]:
            item = worker.held.pop(item_id)
            item.worker = None
            self._queue[item_id] = item
            self._queue.move_to_end(item_id, last=False)
        return True

    def take(self, worker_id: WorkerId, max_items: int) -> list[QueuedItem]:
        taken: list[QueuedItem] = []
        while self._queue and len(taken) < max_items:
            item_id, item = self._queue.popitem(last=False)
            item.worker = worker_id
            self.workers[worker_id].held[item_id] = item
            taken.append(item)
        for item in taken:
            item.started()
        return taken

    def lost(self, worker_id: WorkerId, holding: Collection[str]) -> dict[str, str]:
        held = self.workers[worker_id].held
        return {item_id: self._why(item_id) for item_id in holding if item_id not in held}

    def result(self, worker_id: WorkerId, item_id: str, result: Outcome | RolloutFailure) -> str | None:
        """Accept a worker's result, or return the reason for a refusal."""
        item = self._items.get(item_id)
        if item is None or item.worker != worker_id:
            return self._why(item_id)
        if isinstance(result, Outcome):
            result = self._counted(item, result)
        self._end(item, result, "its result was already accepted")
        return None

    def find_postable(self, key: str) -> QueuedItem:
        """Raises ApiError: 401 for an unknown key, 403 for a session's key, 410 for an ended item."""
        item = self._by_key.get(key)
        if item is None:
            raise self._ended.error(key)
        if key != item.item.outcome_key:
            raise outcome_refused(self.outcomes)
        return item

    def withdraw(self, item_id: str, why: str) -> None:
        if (item := self._items.get(item_id)) is not None:
            self._end(item, None, why)

    def drop_worker(self, worker_id: WorkerId, what: str, *, rule: str, way_out: str) -> int:
        worker = self.workers.pop(worker_id)
        why = f"worker {worker_id[0]} {what}"
        for item in list(worker.held.values()):
            self._end(item, RolloutFailure(f"{item.item.rollout_id}: {why}", rule=rule, way_out=way_out), why)
        return len(worker.held)

    def _end(self, item: QueuedItem, result: Outcome | RolloutFailure | None, why: str) -> None:
        del self._items[item.item.item_id]
        if item.worker is None:
            del self._queue[item.item.item_id]
        elif item.worker in self.workers:
            del self.workers[item.worker].held[item.item.item_id]
        self._ended.add(item.item.item_id, why)
        for key in item.keys:
            del self._by_key[key]
            self._ended.add(key, why)
        if result is not None:
            item.ended(result)

    def _counted(self, item: QueuedItem, returned: Outcome) -> Outcome | RolloutFailure:
        posted = item.posted
        metrics = {**posted.metrics, **returned.metrics}
        if self.outcomes == "none":
            return Outcome(metrics=metrics)
        if self.outcomes == "returned":
            return returned
        if returned.reward is not None or returned.turn_rewards or returned.branch_rewards:
            rule = "with generator.outcomes=posted, only posted rewards count"
            return RolloutFailure(f"{item.item.rollout_id}: the harness returned a reward", rule=rule)
        return Outcome(posted.reward, metrics, posted.turn_rewards, posted.branch_rewards)

    def _why(self, item_id: str) -> str:
        if item_id in self._items:
            return "it was given to another worker"
        return self._ended.why(item_id) or "this run never gave it out, or it ended long ago"
