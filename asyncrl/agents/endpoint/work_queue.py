"""Work items for harness workers, and the HTTP routes of the workers, which long-poll."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
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
LATE_S = 1.0
"""A timer this late means that this process was stopped."""


@dataclass(eq=False, slots=True)
class QueuedItem:
    """`started` may be called repeatedly."""

    item: wire.WorkItem
    started: Callable[[], None]
    done: asyncio.Future[Outcome | RolloutFailure]
    worker: WorkerRecord | None = None
    posted: Outcome = field(default_factory=Outcome)

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.item.key, self.item.outcome_key) if key is not None]


@dataclass(eq=False, slots=True)
class WorkerRecord:
    last_number: int = -1
    held: dict[str, QueuedItem] = field(default_factory=dict)
    silence: asyncio.TimerHandle | None = None


def outcome_refused(outcomes: Outcomes) -> ApiError:
    why = f"This key samples and sets no reward: generator.outcomes={outcomes} says where rewards come from."
    return ApiError(403, why, code="outcome_refused", headers=NO_RETRY)


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutQueue:
    """WorkQueue for harness workers.

    Life of an item: queued -> held by a worker -> ended, by a result, by its worker's silence, or withdrawn.

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
        self._queue: OrderedDict[str, QueuedItem] = OrderedDict()
        self._by_key: dict[str, QueuedItem] = {}
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self._ended = Newest[str, str](3 * MAX_EXPIRED)  # by item, and by both keys
        self._takers: dict[str, Callable[[Outcome], None] | None] = {}
        self._run_id = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last_seen_s = self._loop.time()
        self._is_closed = False
        self.is_over = False
        """Workers are dismissed. Set before aclose."""
        self._num_given = 0
        self._num_lost = 0

    def gauges(self) -> dict[str, float]:
        return {
            "harness/queued": len(self._queue),
            "harness/workers": len(self._workers),
            "harness/unseen_s": self._loop.time() - self._last_seen_s,
            "harness/leases": self._num_given,
            "harness/lost": self._num_lost,
        }

    def _what_runs(self) -> str:
        num_held = sum(len(worker.held) for worker in self._workers.values())
        queued, workers = len(self._queue), len(self._workers)
        return f"harnesses ({queued} wait for a worker, {num_held} run on {workers} workers)"

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        item = QueuedItem(self._make_item(work), started, self._loop.create_future())
        self._queue[item.item.item_id] = item
        self._by_key |= dict.fromkeys(item.keys, item)
        self._wake()
        try:
            with waiting(self._what_runs, on="a worker's result"):
                result = await item.done
        finally:
            self._end(item, "the rollout ran past rollout.timeout_s, its group was requeued, or the run ends")
        if isinstance(result, RolloutFailure):
            raise result
        return result

    def worker_gone_nowait(self, name: str, why: str) -> None:
        for worker_id in list(self._workers):
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
        for worker in self._workers.values():
            if worker.silence is not None:
                worker.silence.cancel()
        self._wake()

    async def wait_no_workers(self) -> None:
        while self._workers:
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
        worker = self._workers[worker_id]
        items = list[wire.WorkItem]()
        if message.number > worker.last_number:
            worker.last_number = message.number
            lost = worker.held.keys() - message.holding  # in transit
            for item_id in [item_id for item_id in reversed(worker.held) if item_id in lost]:
                item = self._queue[item_id] = worker.held.pop(item_id)
                item.worker = None
                self._queue.move_to_end(item_id, last=False)
            items = await self._wait_items(request, message, worker)
        self._num_given += len(items)
        return wire.TakeAnswer(
            items=items,
            model=self.model,
            lease_timeout_s=self.lease_timeout_s,
            is_over=self._is_closed and self.is_over,
        )

    async def _wait_items(
        self, request: Request, message: wire.TakeRequest, worker: WorkerRecord
    ) -> list[wire.WorkItem]:
        wait_s = min(message.wait_s, wire.MAX_WAIT_S, self.lease_timeout_s / 2)
        until_s = self._loop.time() + wait_s
        self._wake()  # ends this worker's older poll
        while not self._is_closed and is_connected(request) and worker.last_number == message.number:
            num_taken = min(message.max_items, len(self._queue))
            taken = [self._queue.popitem(last=False)[1] for _ in range(num_taken)]
            for item in taken:
                item.worker = worker
                worker.held[item.item.item_id] = item
                item.started()
            if taken:
                return [item.item for item in taken]
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        return []

    async def _alive(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.AliveRequest)
        held = self._workers[worker_id].held
        gone = {item_id: self._why_gone(item_id) for item_id in message.holding if item_id not in held}
        if message.is_leaving:
            self._drop(worker_id, "was ended", way_out="its log says why, unless it was ended on purpose.")
        return wire.AliveAnswer(cancel=gone)

    async def _result(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.ResultRequest)
        item = self._workers[worker_id].held.get(message.item_id)
        if item is None:
            why = self._why_gone(message.item_id)
            raise Refused(410, f"work item {message.item_id} is not this worker's: {why}")
        result = self._counted(item, message.outcome or Outcome())
        if (failure := message.failure) is not None:
            result = RolloutFailure(failure.error, rule=failure.rule, way_out=failure.way_out)
        self._end(item, "its result was already accepted", result)
        return wire.Accepted()

    async def _outcome(self, request: Request) -> Response:
        key = shown_key(request)
        take = self._takers.get(key)
        if take is None:
            self._find_postable(key)
        body = await read_body(request, wire.MAX_OUTCOME_BYTES)
        try:
            outcome = OUTCOME.validate_json(body)
            if take is not None:
                take(outcome)
            else:
                self._find_postable(key).posted = outcome  # the item may have ended since
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
        self._last_seen_s = self._loop.time()
        self._await_sign(worker_id, self._workers.setdefault(worker_id, WorkerRecord()))
        return message, worker_id

    def _await_sign(self, worker_id: WorkerId, worker: WorkerRecord) -> None:
        if worker.silence is not None:
            worker.silence.cancel()
        if not self._is_closed:
            due_s = self._loop.time() + self.lease_timeout_s
            worker.silence = self._loop.call_at(due_s, self._silent, worker_id, worker, due_s)

    def _silent(self, worker_id: WorkerId, worker: WorkerRecord, due_s: float) -> None:
        if self._loop.time() - due_s >= LATE_S:
            self._await_sign(worker_id, worker)
            return
        rule = f"gateway.lease_timeout_s={self.lease_timeout_s} is the limit"
        way_out = "read its log; run blocking calls in asyncio.to_thread, or raise it."
        self._drop(worker_id, "gave no sign of life", rule=rule, way_out=way_out)

    def _drop(
        self, worker_id: WorkerId, what: str, *, rule: str = "a rollout ends with its worker", way_out: str
    ) -> None:
        worker = self._workers.pop(worker_id)
        worker.last_number = -1  # ends its poll
        if worker.silence is not None:
            worker.silence.cancel()
        self._num_lost += len(worker.held)
        why = f"worker {worker_id[0]} {what}"
        for item in list(worker.held.values()):
            failure = RolloutFailure(f"{item.item.rollout_id}: {why}", rule=rule, way_out=way_out)
            self._end(item, why, failure)
        self._wake()

    def _end(self, item: QueuedItem, why: str, result: Outcome | RolloutFailure | None = None) -> None:
        """Idempotent."""
        item_id = item.item.item_id
        if self._by_key.get(item.item.key) is not item:
            return
        self._queue.pop(item_id, None)
        if item.worker is not None:
            item.worker.held.pop(item_id, None)
        for key in item.keys:
            del self._by_key[key]
        for name in (item_id, *item.keys):
            self._ended[name] = why
        if result is not None and not item.done.done():
            item.done.set_result(result)

    def _counted(self, item: QueuedItem, returned: Outcome) -> Outcome | RolloutFailure:
        posted = item.posted
        metrics = {**posted.metrics, **returned.metrics}
        if self.outcomes == "none":
            return Outcome(metrics=metrics)
        if self.outcomes == "returned":
            return returned
        if returned.reward is not None or returned.turn_rewards:
            rule = "with generator.outcomes=posted, only posted rewards count"
            return RolloutFailure(f"{item.item.rollout_id}: the harness returned a reward", rule=rule)
        return replace(posted, metrics=metrics)

    def _why_gone(self, item_id: str) -> str:
        return self._ended.get(item_id) or "it was given to another worker, or this run never gave it out"

    def _find_postable(self, key: str) -> QueuedItem:
        """Raises ApiError: 401 for an unknown key, 403 for one that samples, 410 for an ended item."""
        item = self._by_key.get(key)
        if key in self._takers or (item is not None and key != item.item.outcome_key):
            raise outcome_refused("posted" if item is None else self.outcomes)
        if item is None:
            raise no_session(self._ended.get(key, ""))
        return item

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
