"""Work items for harness workers, and the HTTP routes of the workers, which long-poll."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from asyncrl.agents.endpoint.gateway import is_connected, read_body, shown_key
from asyncrl.agents.endpoint.newest import Newest
from asyncrl.agents.endpoint.requests import NO_RETRY, ApiError, invalid
from asyncrl.agents.endpoint.sessions import MAX_EXPIRED, no_session
from asyncrl.agents.harness import OUTCOME, first_fault
from asyncrl.base.errors import PromptUnusable, RolloutFailure
from asyncrl.base.http import Refused
from asyncrl.base.message import Message
from asyncrl.base.waits import waiting
from asyncrl.config import Outcomes
from asyncrl.messages import work as wire
from asyncrl.messages.records import Outcome, Work

FromWorker = TypeVar("FromWorker", bound=wire.WorkerMessage)
Handler = Callable[[Request], Awaitable[Message]]
WorkerId = tuple[str, str]
"""(name, random text of the process)."""
CHECKS_PER_LEASE = 20
LATE_S = 1.0
"""A check this late means that this process was stopped."""


@dataclass(eq=False, slots=True)
class QueuedItem:
    """`started` may be called repeatedly, `ended` once."""

    item: wire.WorkItem
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
    last_number: int = -1
    held: dict[str, QueuedItem] = field(default_factory=dict)


class WorkItems:
    """Work items between run() and their end. Pure: no HTTP, no clock.

    Life: queued -> held -> ended, by a result, by its worker's silence, or withdrawn.

    Invariant: every item ends once, in _end.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self._items: dict[str, QueuedItem] = {}
        self._by_key: dict[str, QueuedItem] = {}
        self._queue: OrderedDict[str, QueuedItem] = OrderedDict()
        self._ended = Newest[str, str](3 * MAX_EXPIRED)  # by item, and by both keys
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

    def take(self, worker_id: WorkerId, max_items: int) -> list[wire.WorkItem]:
        taken: list[QueuedItem] = []
        while self._queue and len(taken) < max_items:
            item_id, item = self._queue.popitem(last=False)
            item.worker = worker_id
            self.workers[worker_id].held[item_id] = item
            taken.append(item)
        for item in taken:
            item.started()
        return [item.item for item in taken]

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
            raise no_session(self._ended.get(key, ""))
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
        item_id = item.item.item_id
        del self._items[item_id]
        if item.worker is None:
            del self._queue[item_id]
        elif item.worker in self.workers:
            del self.workers[item.worker].held[item_id]
        for key in item.keys:
            del self._by_key[key]
        for name in (item_id, *item.keys):
            self._ended[name] = why
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
        return self._ended.get(item_id) or "this run never gave it out, or it ended long ago"


def outcome_refused(outcomes: Outcomes) -> ApiError:
    why = f"This key samples and sets no reward: generator.outcomes={outcomes} says where rewards come from."
    return ApiError(403, why, code="outcome_refused", headers=NO_RETRY)


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutQueue:
    """WorkQueue for harness workers.

    Waits: run waits for a result, or until its worker has been silent for lease_timeout_s of running event
    loop. A /work/take poll waits for work, MAX_WAIT_S at most.

    Invariant: each run() ends once, by its worker's one accepted result or by a RolloutFailure.
    """

    worker_key: str
    model: str
    lease_timeout_s: float
    task_seed: Callable[[Work], int]
    outcomes: Outcomes = "returned"
    give_answer: bool = False

    def __post_init__(self) -> None:
        self._items = WorkItems(self.outcomes)
        self._takers: dict[str, Callable[[Outcome], None] | None] = {}
        self._run_id = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._silence: asyncio.TimerHandle | None = None
        self._clock = asyncio.get_running_loop().time
        self._last_seen_s = self._clock()
        self._is_closed = False
        self.is_over = False
        """Workers are dismissed. Set before aclose."""
        self._num_given = 0
        self._num_lost = 0

    def gauges(self) -> dict[str, float]:
        return {
            "harness/queued": self._items.num_queued,
            "harness/workers": len(self._items.workers),
            "harness/unseen_s": self._clock() - self._last_seen_s,
            "harness/leases": self._num_given,
            "harness/lost": self._num_lost,
        }

    def _what_runs(self) -> str:
        queued, held, workers = self._items.num_queued, self._items.num_held, len(self._items.workers)
        return f"harnesses ({queued} wait for a worker, {held} run on {workers} workers)"

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        item = self._make_item(work)
        done: asyncio.Future[Outcome | RolloutFailure] = asyncio.get_running_loop().create_future()

        def ended(result: Outcome | RolloutFailure) -> None:
            if not done.done():
                done.set_result(result)

        self._items.add(QueuedItem(item, started, ended))
        self._wake()
        try:
            with waiting(self._what_runs, on="a worker's result"):
                result = await done
        finally:
            why = "the rollout ran past rollout.timeout_s, its group was requeued, or the run ends"
            self._items.withdraw(item.item_id, why)
        if isinstance(result, RolloutFailure):
            raise result
        return result

    def worker_gone_nowait(self, name: str, why: str) -> None:
        for worker_id in list(self._items.workers):
            if worker_id[0] == name:
                self._drop(worker_id, f"is gone: {why}", way_out="read that worker's log.")

    def on_outcome(self, key: str, take: Callable[[Outcome], None], *, sampling_key: str) -> None:
        """Pass outcomes posted with this key to `take`; its RolloutFailure becomes a 400. `sampling_key` may
        not post.
        """
        self._takers |= {key: take, sampling_key: None}

    async def aclose(self) -> None:
        """Answer waiting polls, and give out no more work."""
        self._is_closed = True
        self._wake()
        if self._silence is not None:
            self._silence.cancel()

    async def wait_no_workers(self) -> None:
        while self._items.workers:
            await self._changed.wait()

    # ---- routes

    def routes(self) -> list[APIRoute]:
        paths = {
            "/work/take": self._for_workers(self._take),
            "/work/alive": self._for_workers(self._alive),
            "/work/result": self._for_workers(self._result),
            "/v1/outcome": self._outcome,
            "/s/{key}/v1/outcome": self._outcome,
        }
        return [
            APIRoute(path, handler, response_model=None, include_in_schema=False, methods=["POST"])
            for path, handler in paths.items()
        ]

    def _for_workers(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = shown_key(request).encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self.worker_key.encode()):
                way_out = "start the worker with the key that the run prints."
                raise Refused(401, "wrong or missing worker key", way_out=way_out)
            return _as_response(await handler(request))

        return answer

    async def _take(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.TakeRequest)
        if self._is_closed and not self.is_over:  # it would ask again at once
            raise Refused(503, "the run ends", way_out="wait until it is started again.")
        items = list[wire.WorkItem]()
        if self._items.ask(worker_id, message.number, message.holding):
            items = await self._wait_items(request, message, worker_id)
        self._num_given += len(items)
        return wire.TakeAnswer(
            items=items,
            model=self.model,
            lease_timeout_s=self.lease_timeout_s,
            is_over=self._is_closed and self.is_over,
        )

    async def _wait_items(
        self, request: Request, message: wire.TakeRequest, worker_id: WorkerId
    ) -> list[wire.WorkItem]:
        worker = self._items.workers[worker_id]
        wait_s = min(message.wait_s, wire.MAX_WAIT_S, self.lease_timeout_s / 2)
        until_s = self._clock() + wait_s
        self._wake()  # ends this worker's older poll
        while True:
            is_known = self._items.workers.get(worker_id) is worker and worker.last_number == message.number
            if self._is_closed or not is_connected(request) or not is_known:
                return []
            if items := self._items.take(worker_id, message.max_items):
                return items
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                return []

    async def _alive(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.AliveRequest)
        lost = self._items.lost(worker_id, message.holding)
        if message.is_leaving:
            self._drop(worker_id, "was ended", way_out="its log says why, unless it was ended on purpose.")
        return wire.AliveAnswer(cancel=lost)

    async def _result(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.ResultRequest)
        result: Outcome | RolloutFailure = message.outcome or Outcome()
        if (failure := message.failure) is not None:
            result = RolloutFailure(failure.error, rule=failure.rule, way_out=failure.way_out)
        why = self._items.result(worker_id, message.item_id, result)
        if why is not None:
            raise Refused(410, f"work item {message.item_id} is not this worker's: {why}")
        return wire.Accepted()

    async def _outcome(self, request: Request) -> Response:
        key = shown_key(request)
        take = self._takers.get(key)
        if take is None and key in self._takers:
            raise outcome_refused("posted")
        if take is None:
            self._items.find_postable(key)
        body = await read_body(request, wire.MAX_OUTCOME_BYTES)
        try:
            outcome = OUTCOME.validate_json(body)
            if take is not None:
                take(outcome)
            else:
                self._items.find_postable(key).posted = outcome  # the item may have ended since
        except (ValidationError, RolloutFailure) as error:
            raise invalid(f"The outcome is refused: {first_fault(error)}") from None
        return _as_response(wire.Accepted())

    # ---- inside

    async def _heard(self, request: Request, shape: type[FromWorker]) -> tuple[FromWorker, WorkerId]:
        body = await read_body(request, wire.MAX_MESSAGE_BYTES)
        try:
            message = shape.model_validate_json(body)
        except ValidationError as error:
            way_out = "run worker and trainer with the same asyncrl."
            raise Refused(422, first_fault(error), way_out=way_out) from error
        worker_id = (message.worker, message.instance)
        self._last_seen_s = self._clock()
        self._items.seen(worker_id, self._last_seen_s)
        if self._silence is None and not self._is_closed:
            self._check_silence(self._last_seen_s)
        return message, worker_id

    def _check_silence(self, due_s: float) -> None:
        now_s = self._clock()
        if now_s - due_s < LATE_S:
            for worker_id, worker in list(self._items.workers.items()):
                silent_s = now_s - worker.last_seen_s
                if silent_s > self.lease_timeout_s:
                    rule = f"gateway.lease_timeout_s={self.lease_timeout_s} is the limit"
                    way_out = "read its log; run blocking calls in asyncio.to_thread, or raise it."
                    what = f"gave no sign of life for {silent_s:.1f} s"
                    self._drop(worker_id, what, rule=rule, way_out=way_out)
        self._silence = None
        if self._items.workers:
            due_s = now_s + self.lease_timeout_s / CHECKS_PER_LEASE
            self._silence = asyncio.get_running_loop().call_at(due_s, self._check_silence, due_s)

    def _drop(
        self, worker_id: WorkerId, what: str, *, rule: str = "a rollout ends with its worker", way_out: str
    ) -> None:
        self._num_lost += self._items.drop_worker(worker_id, what, rule=rule, way_out=way_out)
        self._wake()

    def _make_item(self, work: Work) -> wire.WorkItem:
        prompt = work.prompt
        try:
            item = wire.WorkItem(
                item_id=f"{self._run_id}-{next(self._numbers)}",
                rollout_id=work.rollout_id,
                prompt_id=prompt.prompt_id,
                messages=[dict(each) for each in prompt.messages],
                info=dict(prompt.info),
                answer=prompt.answer if self.give_answer else None,
                has_answer=self.give_answer,
                sample_index=work.sample_index,
                attempt=work.attempt,
                seed=self.task_seed(work),
                key=work.key,
                outcome_key=secrets.token_hex(24) if self.outcomes == "posted" else None,
                timeout_s=work.timeout_s,
            )
            item.model_dump_json()
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's errors are ValueErrors
            what = f"{work.rollout_id}: prompt {prompt.prompt_id} cannot be sent to a worker: {error!s:.300}"
            raise PromptUnusable(what, rule="its `answer` and `info` must be JSON values") from error
        return item

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


def _as_response(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
