"""Which work items are queued, and which worker holds which. Pure: no HTTP, no clock of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrl.agents.endpoint.answers import NO_RETRY, ApiError
from asyncrl.agents.endpoint.sessions import MAX_EXPIRED, Expired
from asyncrl.config import Outcomes
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Work

WorkerId = tuple[str, str]
"""The worker's name, and a random text of its process: two processes of one name are two workers."""

MAX_BYTES = 2**22
"""Most bytes of the items of one answer, the last item not counted."""


def outcome_refused(outcomes: Outcomes) -> ApiError:
    """403: a session's key sets no reward."""
    why = f"This key samples and sets no reward: generator.outcomes={outcomes} says where rewards come from."
    return ApiError(403, why, code="outcome_refused", headers=NO_RETRY)


@dataclass(eq=False, slots=True)
class QueuedItem:
    """One work item. `body`: what the worker gets. `started` is called whenever a worker takes it, `ended`
    once, with what came of it. `outcome_key` (None: there is none) is what its outcome is posted with.
    """

    item_id: str
    work: Work
    body: bytes
    started: Callable[[], None]
    ended: Callable[[Outcome | RolloutFailure], None]
    outcome_key: str | None = None
    worker: WorkerId | None = None
    posted: Outcome = field(default_factory=Outcome)

    @property
    def keys(self) -> list[str]:
        """What harnesses may show."""
        return [key for key in (self.work.key, self.outcome_key) if key is not None]


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """One worker that gives signs of life."""

    last_seen_s: float = 0.0
    slots: int = 0
    last_number: int = -1
    """Of its requests for work."""
    held: dict[str, QueuedItem] = field(default_factory=dict)


class WorkItems:
    """Work items between run() and their end.

    Life: add -> queued -> take -> held -> ended, by a result, by silence of its worker, or withdrawn. An item
        that never reached its worker goes back to the queue's front.
    Invariant: every item ends once, in _end; a held one is in `held` of one worker, a queued one in none.
        Rewards come from where `outcomes` says and from nowhere else (_counted).
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self._items: dict[str, QueuedItem] = {}
        self._by_key: dict[str, QueuedItem] = {}
        self._queue: OrderedDict[str, QueuedItem] = OrderedDict()
        self._ended = Expired(3 * MAX_EXPIRED)  # by the item, and by its two keys
        self.workers: dict[WorkerId, WorkerRecord] = {}

    @property
    def num_queued(self) -> int:
        """Items that no worker has."""
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """Items that a worker has."""
        return len(self._items) - len(self._queue)

    def add(self, item: QueuedItem) -> None:
        """Put a new item at the queue's end."""
        self._items[item.item_id] = item
        self._by_key |= dict.fromkeys(item.keys, item)
        self._queue[item.item_id] = item

    def seen(self, worker_id: WorkerId, now_s: float) -> None:
        """A sign of life."""
        self.workers.setdefault(worker_id, WorkerRecord()).last_seen_s = now_s

    def ask(self, worker_id: WorkerId, number: int, holding: Collection[str]) -> bool:
        """A worker begins to ask for work; false if this is an old request. What it was given and does not
        hold is queued again.
        """
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
        """The first of the queue, for this worker: `max_items` at most, and no more once they have MAX_BYTES.
        It may ask again at once.
        """
        taken: list[QueuedItem] = []
        while self._queue and len(taken) < max_items and sum(len(item.body) for item in taken) < MAX_BYTES:
            _, item = self._queue.popitem(last=False)
            item.worker = worker_id
            self.workers[worker_id].held[item.item_id] = item
            taken.append(item)
        for item in taken:
            item.started()
        return taken

    def lost(self, worker_id: WorkerId, holding: Collection[str]) -> dict[str, str]:
        """Those of `holding` that are not this worker's, and why."""
        held = self.workers[worker_id].held
        return {item_id: self._why(item_id) for item_id in holding if item_id not in held}

    def result(self, worker_id: WorkerId, item_id: str, result: Outcome | RolloutFailure) -> str | None:
        """Take a worker's result of an item; of an outcome, only the parts that `outcomes` allows. Returns
        why it is refused, if the item is not this worker's.
        """
        item = self._items.get(item_id)
        if item is None or item.worker != worker_id:
            return self._why(item_id)
        if isinstance(result, Outcome):
            result = self._counted(item, result)
        self._end(item, result, "its result was accepted before")
        return None

    def find_postable(self, key: str) -> QueuedItem:
        """The item whose outcome is posted with this key; the last one before its end stands. Raises
        ApiError: 401 for an unknown key, 403 for a session's, 410 for one that has ended.
        """
        item = self._by_key.get(key)
        if item is None:
            raise self._ended.error(key)
        if key != item.outcome_key:
            raise outcome_refused(self.outcomes)
        return item

    def withdraw(self, item_id: str, why: str) -> None:
        """Take the item back; nothing happens if it has ended."""
        if (item := self._items.get(item_id)) is not None:
            self._end(item, None, why)

    def drop_worker(self, worker_id: WorkerId, what: str, *, rule: str, way_out: str) -> int:
        """The worker is gone; what it held fails as data. Returns how much that was."""
        worker, why = self.workers.pop(worker_id), f"worker {worker_id[0]} {what}"
        for item in list(worker.held.values()):
            self._end(item, RolloutFailure(f"{item.work.rollout_id}: {why}", rule=rule, way_out=way_out), why)
        return len(worker.held)

    def _end(self, item: QueuedItem, result: Outcome | RolloutFailure | None, why: str) -> None:
        del self._items[item.item_id]
        if item.worker is None:
            del self._queue[item.item_id]
        elif item.worker in self.workers:
            del self.workers[item.worker].held[item.item_id]
        self._ended.add(item.item_id, why)
        for key in item.keys:
            del self._by_key[key]
            self._ended.add(key, why)
        if result is not None:
            item.ended(result)

    def _counted(self, item: QueuedItem, returned: Outcome) -> Outcome | RolloutFailure:
        """Metrics of what was returned and of what was posted; rewards of one of them, or of neither."""
        posted = item.posted
        metrics = {**posted.metrics, **returned.metrics}
        if self.outcomes == "none":
            return Outcome(metrics=metrics)
        if self.outcomes == "returned":
            return returned
        if returned.reward is not None or returned.turn_rewards or returned.branch_rewards:
            rule = "generator.outcomes=posted takes rewards that are posted, and no others"
            return RolloutFailure(f"{item.work.rollout_id}: the harness returned a reward", rule=rule)
        return Outcome(posted.reward, metrics, posted.turn_rewards, posted.branch_rewards)

    def _why(self, item_id: str) -> str:
        if item_id in self._items:
            return "it was given to another worker"
        return self._ended.why(item_id) or "this run has not given it to a worker, or it ended long ago"
