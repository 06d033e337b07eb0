"""HTTP routes for harness workers, which long-poll."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from asyncrl.agents.endpoint.gateway import is_connected, read_body, shown_key
from asyncrl.agents.endpoint.requests import ApiError, invalid
from asyncrl.agents.endpoint.work_queue import QueuedItem, WorkerId, WorkItems, outcome_refused
from asyncrl.agents.harness import OUTCOME, first_fault
from asyncrl.base.errors import PromptUnusable, RolloutFailure
from asyncrl.base.http import Refused
from asyncrl.base.message import Message
from asyncrl.base.waits import waiting
from asyncrl.config import Outcomes
from asyncrl.messages import work as wire
from asyncrl.messages.records import Outcome, Work

Read = TypeVar("Read")
FromWorker = TypeVar("FromWorker", bound=wire.WorkerMessage)
Handler = Callable[[Request], Awaitable[Message]]
CHECKS_PER_LEASE = 20
LATE_S = 1.0
"""A check this late means that this process was stopped."""

_WITHDRAWN = "the rollout ran past rollout.timeout_s, its group was requeued, or the run ends"


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
        workers = self._items.workers.values()
        return {
            "harness/queued": self._items.num_queued,
            "harness/workers": len(workers),
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
            self._items.withdraw(item.item_id, _WITHDRAWN)
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
        handlers: dict[str, Handler] = {"take": self._take, "alive": self._alive, "result": self._result}
        paths = {f"/work/{name}": self._for_workers(handler) for name, handler in handlers.items()}
        paths |= {"/v1/outcome": self._outcome, "/s/{key}/v1/outcome": self._outcome}
        shape: Any = {"response_model": None, "include_in_schema": False, "methods": ["POST"]}
        return [APIRoute(path, handler, **shape) for path, handler in paths.items()]

    def _for_workers(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = shown_key(request).encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self.worker_key.encode()):
                way_out = "start the worker with the key that the run prints."
                raise Refused(401, "wrong or missing worker key", way_out=way_out)
            answered = await handler(request)
            return Response(answered.model_dump_json(), media_type="application/json")

        return answer

    async def _take(self, request: Request) -> Message:
        message, worker_id = await self._heard(request, wire.TakeRequest)
        if self._is_closed and not self.is_over:  # it would ask again at once
            raise Refused(503, "the run ends", way_out="wait until it is started again.")
        self._items.workers[worker_id].slots = message.slots
        is_new = self._items.ask(worker_id, message.number, message.holding)
        items = await self._wait_items(request, message, worker_id) if is_new else []
        self._num_given += len(items)
        return wire.TakeAnswer(
            items=[item.item for item in items],
            model=self.model,
            lease_timeout_s=self.lease_timeout_s,
            is_over=self._is_closed and self.is_over,
        )

    async def _wait_items(
        self, request: Request, message: wire.TakeRequest, worker_id: WorkerId
    ) -> list[QueuedItem]:
        worker = self._items.workers[worker_id]
        wait_s = min(message.wait_s, wire.MAX_WAIT_S, self.lease_timeout_s / 2)
        until_s = asyncio.get_running_loop().time() + wait_s
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
        try:
            outcome = await _read(request, OUTCOME.validate_json, wire.MAX_OUTCOME_BYTES)
            if take is not None:
                take(outcome)
            else:
                self._items.find_postable(key).posted = outcome  # the item may have ended since
        except (Refused, RolloutFailure) as why:
            raise invalid(f"The outcome is refused: {why}") from None
        return Response(wire.Accepted().model_dump_json(), media_type="application/json")

    # ---- inside

    async def _heard(self, request: Request, shape: type[FromWorker]) -> tuple[FromWorker, WorkerId]:
        message = await _read(request, shape.model_validate_json, wire.MAX_MESSAGE_BYTES)
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
        self._changed = asyncio.Event()


async def _read(request: Request, parse: Callable[[bytes], Read], max_bytes: int) -> Read:
    """Raises Refused: 413 if too large, 422 with the first wrong field."""
    try:
        return parse(await read_body(request, max_bytes))
    except ApiError as error:
        if error.status != 413:
            raise
        raise Refused(413, f"the message is larger than {max_bytes} bytes") from None
    except ValidationError as error:
        way_out = "run worker and trainer with the same asyncrl."
        raise Refused(422, first_fault(error), way_out=way_out) from error
