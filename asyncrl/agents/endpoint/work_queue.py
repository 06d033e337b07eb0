"""Which work is queued, and which worker holds which. Pure: knows no HTTP, no clock of its own, no model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from asyncrl.config import Outcomes
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Work

WorkerId = tuple[str, str]
"""Name, and what its process has drawn: two processes of one name are two workers."""

MAX_REMEMBERED = 10_000
"""Ended works whose end can still be told to a worker or harness that comes too late."""

MAX_BYTES = 2**22
"""Of works that are given out at once, the last one aside."""


class Gone(Exception):  # noqa: N818  an answer to whoever comes too late
    """That work is not, or no longer, there for who asks; the text says why."""


class NotForOutcomes(Exception):  # noqa: N818  an answer, too
    """The key is a session's: it samples, and sets no reward."""


@dataclass(eq=False, slots=True)
class Entry:
    """One work. `body`: what the worker gets. `started` is called whenever a worker takes it, `ended` once,
    with what came of it.

    `outcome_key` (None: there is none) is what its outcome is posted with.
    """

    lease_id: str
    work: Work
    body: bytes
    started: Callable[[], None]
    ended: Callable[[Outcome | RolloutFailure], None]
    outcome_key: str | None = None
    worker: WorkerId | None = None
    posted: Outcome | None = None


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """One worker that gives signs of life."""

    name: str
    last_seen_s: float
    slots: int = 0
    last_number: int = -1
    """Of its lease requests."""
    leases: dict[str, Entry] = field(default_factory=dict)


class LeaseBook:
    """Works between run() and their end.

    Life:       add -> queued -> lease -> leased -> ended, by a result, by silence of its worker, or
    withdrawn. A lease that never
                reached its worker goes back to the queue's front.
    Waits:      none.
    Invariant:  every work ends once, in _end; a leased work is in the `leases` of one worker, a queued one in
    none. Rewards come
                from where `outcomes` says and from nowhere else (_counted).
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self._entries: dict[str, Entry] = {}
        self._by_key: dict[str, Entry] = {}
        self._queue: OrderedDict[str, Entry] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.workers: dict[WorkerId, WorkerRecord] = {}

    def __repr__(self) -> str:
        return f"<LeaseBook {self.num_queued} queued, {self.num_leased} leased, {len(self.workers)} workers>"

    @property
    def num_queued(self) -> int:
        """Works that no worker has."""
        return len(self._queue)

    @property
    def num_leased(self) -> int:
        """Works that a worker has."""
        return len(self._entries) - len(self._queue)

    def add(self, entry: Entry) -> None:
        """Put a new work at the queue's end."""
        self._entries[entry.lease_id] = entry
        self._by_key |= dict.fromkeys(_keys(entry), entry)
        self._queue[entry.lease_id] = entry

    def seen(self, worker_id: WorkerId, now_s: float) -> WorkerRecord:
        """A sign of life."""
        worker = self.workers.setdefault(worker_id, WorkerRecord(worker_id[0], now_s))
        worker.last_seen_s = now_s
        return worker

    def ask(self, worker_id: WorkerId, number: int, holding: Collection[str]) -> bool:
        """A worker begins to ask for work; false if this is an old request. What it was given and does not
        hold is queued again.
        """
        worker = self.workers[worker_id]
        if number <= worker.last_number:
            return False
        worker.last_number = number
        held = set(holding)
        for entry in [entry for lease_id, entry in worker.leases.items() if lease_id not in held][::-1]:
            del worker.leases[entry.lease_id]
            entry.worker = None
            self._queue[entry.lease_id] = entry
            self._queue.move_to_end(entry.lease_id, last=False)
        return True

    def lease(self, worker_id: WorkerId, max_items: int) -> list[Entry]:
        """The first of the queue, for this worker: `max_items` at most, and no more once they have MAX_BYTES.
        It may ask again at once.
        """
        worker = self.workers[worker_id]
        taken: list[Entry] = []
        while self._queue and len(taken) < max_items and sum(len(entry.body) for entry in taken) < MAX_BYTES:
            _, entry = self._queue.popitem(last=False)
            entry.worker = worker_id
            worker.leases[entry.lease_id] = entry
            taken.append(entry)
        for entry in taken:
            entry.started()
        return taken

    def lost(self, worker_id: WorkerId, holding: Collection[str]) -> dict[str, str]:
        """Those of `holding` that are not this worker's, and why."""
        leases = self.workers[worker_id].leases
        return {lease_id: self._why(lease_id) for lease_id in holding if lease_id not in leases}

    def result(self, worker_id: WorkerId, lease_id: str, result: Outcome | RolloutFailure) -> None:
        """What a worker says of a lease; of an outcome, what counts. Raises Gone if it is not this
        worker's.
        """
        entry = self._entries.get(lease_id)
        if entry is None or entry.worker != worker_id:
            raise Gone(self._why(lease_id))
        if isinstance(result, Outcome):
            result = self._counted(entry, result)
        self._end(entry, result, "its result was accepted before")

    def check_post(self, key: str) -> None:
        """Raise Gone, NotForOutcomes, or KeyError (no such key) if nothing may be posted with it."""
        self._postable(key)

    def post(self, key: str, outcome: Outcome) -> None:
        """What a harness says itself, with its outcome key; the last one before the end stands. Raises as
        check_post().
        """
        self._postable(key).posted = outcome

    def withdraw(self, lease_id: str, why: str) -> None:
        """Nobody waits for this work any more; nothing happens if it has ended."""
        entry = self._entries.get(lease_id)
        if entry is not None:
            self._end(entry, None, why)

    def drop_worker(self, worker_id: WorkerId, what: str, *, rule: str, way_out: str) -> int:
        """The worker is gone; what it held fails as data. Returns how much that was."""
        worker = self.workers.pop(worker_id)
        for entry in list(worker.leases.values()):
            failure = RolloutFailure(
                f"{entry.work.rollout_id}: worker {worker.name} {what}", rule=rule, way_out=way_out
            )
            self._end(entry, failure, f"worker {worker.name} {what}")
        return len(worker.leases)

    def all_leases(self) -> Iterator[tuple[WorkerId, str]]:
        """(worker, lease) of all that is leased."""
        return (
            (worker_id, lease_id) for worker_id, worker in self.workers.items() for lease_id in worker.leases
        )

    def _end(self, entry: Entry, result: Outcome | RolloutFailure | None, why: str) -> None:
        del self._entries[entry.lease_id]
        if entry.worker is None:
            del self._queue[entry.lease_id]
        elif entry.worker in self.workers:
            self.workers[entry.worker].leases.pop(entry.lease_id)
        for key in _keys(entry):
            del self._by_key[key]
        for name in (entry.lease_id, *_keys(entry)):
            self._ended[name] = why
        while len(self._ended) > 3 * MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if result is not None:
            entry.ended(result)

    def _postable(self, key: str) -> Entry:
        entry = self._by_key.get(key)
        if entry is None:
            if key in self._ended:
                raise Gone(self._ended[key])
            raise KeyError("unknown key")
        if key != entry.outcome_key:
            raise NotForOutcomes
        return entry

    def _counted(self, entry: Entry, said: Outcome) -> Outcome | RolloutFailure:
        """Metrics of what was said at the end and of what was posted; rewards of one of them, or of
        neither.
        """
        posted = entry.posted or Outcome()
        metrics = {**posted.metrics, **said.metrics}
        if self.outcomes == "none":
            return Outcome(metrics=metrics)
        if self.outcomes == "returned":
            return said
        if said.reward is not None or said.turn_rewards or said.branch_rewards:
            return RolloutFailure(
                f"{entry.work.rollout_id}: the harness returned a reward",
                rule="generator.outcomes=posted takes rewards that are posted, and no others",
                way_out="set generator.outcomes=returned, or return nothing.",
            )
        return Outcome(posted.reward, metrics, posted.turn_rewards, posted.branch_rewards)

    def _why(self, lease_id: str) -> str:
        if lease_id in self._entries:
            return "it was given to another worker"
        return self._ended.get(
            lease_id, "this run has not given it out (was it started again?), or it ended long ago"
        )


def _keys(entry: Entry) -> list[str]:
    return [entry.work.key] if entry.outcome_key is None else [entry.work.key, entry.outcome_key]
