"""Work items for harness workers, and the HTTP routes of the workers, which long-poll."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.agents.endpoint.gateway import is_connected, read_body, shown_key
from asyncrl.agents.endpoint.requests import ApiError, invalid
from asyncrl.agents.harness import OUTCOME
from asyncrl.base.errors import Message, PromptUnusable, RolloutFailure, first_fault
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import Refused
from asyncrl.base.waits import Signal, waiting
from asyncrl.config import GeneratorConfig
from asyncrl.messages import worker_api as wire
from asyncrl.messages.records import Outcome, Work

log = logging.getLogger(__name__)

FromWorker = TypeVar("FromWorker", bound=wire.WorkerMessage)
Handler = Callable[[Request], Awaitable[Message]]
WorkerId = tuple[str, str]
"""(name, random text of the process)."""
# Timers of a process that stood still (SIGSTOP, a blocked loop) fire late. Its workers
# may have sent heartbeats in that time, still unread.
LATE_S = 1.0
"""A timer this late means that this process was stopped."""


@dataclass(eq=False, slots=True)
class QueuedItem:
    """An attempt of a rollout, until its outcome. `started` may be called repeatedly."""

    item: wire.WorkItem
    started: Callable[[], None]
    done: asyncio.Future[Outcome | RolloutFailure]
    worker: WorkerRecord | None = None
    posted: Outcome = field(default_factory=Outcome)

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
    busy: str = ""
    held: dict[str, QueuedItem] = field(default_factory=dict)
    silence: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.silence is not None:
            self.silence.cancel()


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutQueue:
    """WorkQueue for harness workers.

    Life of an item: queued -> held by a worker -> ended, by a result, by its worker's
    silence, or withdrawn.

    Waits: run waits for a result, or until its worker has been silent for
    lease_timeout_s of running event loop. A /work/take poll waits for work, MAX_WAIT_S
    at most.

    Invariant: each run() ends once, by its worker's one accepted result or by a
        RolloutFailure.
    """

    worker_key: str
    model: str
    lease_timeout_s: float
    task_seed: Callable[[Work], int]
    harnesses: Sequence[GeneratorConfig] = (GeneratorConfig(),)
    """By Work.harness: the source of their rewards, and whether they get answers."""
    late: wire.LateOutcomes | None = None
    """Takes all posted outcomes, with outcomes="later"."""
    roles: tuple[str, ...] = ()
    """Of trainer.roles."""

    def __post_init__(self) -> None:
        self._queue = OrderedDict[str, QueuedItem]()
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self._takers: dict[str, Callable[[Outcome], None]] = {}
        """Receivers of posted outcomes, by key."""
        self._run_id = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._changed = Signal()
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

    def what_runs(self) -> str:
        """Say what runs, what waits, and why, for waits and the watchdog."""
        num_held = sum(len(worker.held) for worker in self._workers.values())
        num_workers = len(self._workers)
        text = f"{len(self._queue)} wait for a worker, {num_held} run on {num_workers} workers"
        for name, worker in self._workers.items():
            if worker.busy:
                text += f", worker {name[0]} takes none: {worker.busy}"
        return f"harnesses ({text})"

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        item = QueuedItem(self._make_item(work), started, self._loop.create_future())
        self._queue[item.item.item_id] = item
        is_posted = self.harnesses[work.harness].outcomes == "posted"
        if is_posted and item.item.outcome_key is not None:
            self._takers[item.item.outcome_key] = item.post
        self._changed.notify()
        try:
            with waiting(self.what_runs, on="a worker's result"):
                result = await item.done
        finally:
            self._end(item)
        if isinstance(result, RolloutFailure):
            raise result
        return result

    def worker_gone_nowait(self, name: str, why: str) -> None:
        for worker_id in list(self._workers):
            if worker_id[0] == name:
                self._drop(worker_id, f"is gone: {why}", "read that worker's log.")

    def on_outcome(self, key: str, take: Callable[[Outcome], None]) -> None:
        """Pass outcomes posted with this key to `take`; its RolloutFailure becomes a
        400.
        """
        self._takers[key] = take

    async def aclose(self) -> None:
        """Answer waiting polls, and give out no more work."""
        self._is_closed = True
        for worker in self._workers.values():
            worker.stop_timer()
        self._changed.notify()

    async def wait_no_workers(self) -> None:
        await self._changed.wait_for(lambda: not self._workers)

    # ---- routes

    def routes(self) -> list[Route]:
        paths = {
            "/work/take": self._for_workers(self._take),
            "/work/result": self._for_workers(self._result),
            "/v1/outcome": self._outcome,
            "/s/{key}/v1/outcome": self._outcome,
        }
        return [
            Route(path, handler, methods=["POST"]) for path, handler in paths.items()
        ]

    def _for_workers(
        self, handler: Handler
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            # As bytes: compare_digest raises TypeError for a str that is not ASCII.
            given = shown_key(request).encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self.worker_key.encode()):
                raise Refused(
                    401,
                    "wrong or missing worker key",
                    way_out="start the worker with the key that the run prints.",
                )
            return _as_response(await handler(request))

        return answer

    async def _take(self, request: Request) -> Message:
        """Give work to a worker, or hear its heartbeat.

        Example: w asks with number 1 and gets g0/r0, but the answer is lost. It asks
        again, with number 2 and an empty `holding`. So g0/r0 returns to the front of
        the queue, and is in this answer. A poll with number 1 that still waits ends
        without work.
        """
        message, worker_id = await self._receive(request, wire.TakeRequest)
        worker = self._workers[worker_id]
        # Items that were withdrawn, or that belong to an ended lease or an earlier
        # gateway. The worker cancels their harnesses.
        gone = [item_id for item_id in message.holding if item_id not in worker.held]
        items = list[wire.WorkItem]()
        if message.is_leaving:
            self._drop(
                worker_id,
                "was ended",
                "its log says why, unless it was ended on purpose.",
            )
        # Heartbeats (max_items=0) say nothing about lost items: they overtake the
        # answer that brings them. An old number is a request that its worker has given
        # up.
        elif message.max_items and message.number > worker.last_number:
            worker.last_number = message.number
            lost = worker.held.keys() - message.holding  # in transit
            # To the front, in their order: they have waited longest, and their clocks
            # run.
            for item_id in filter(lost.__contains__, [*reversed(worker.held)]):
                item = worker.held.pop(item_id)
                item.worker = None
                self._queue[item_id] = item
                self._queue.move_to_end(item_id, last=False)
            self._changed.notify()  # ends its older poll
            items = await self._wait_items(request, message, worker)
        self._num_given += len(items)
        return wire.TakeAnswer(
            items=items,
            cancel=gone,
            model=self.model,
            lease_timeout_s=self.lease_timeout_s,
            roles=self.roles,
            is_over=self._is_closed and self.is_over,
        )

    async def _wait_items(
        self, request: Request, message: wire.TakeRequest, worker: WorkerRecord
    ) -> list[wire.WorkItem]:
        wait_s = min(message.wait_s, wire.MAX_WAIT_S, self.lease_timeout_s / 2)
        until_s = self._loop.time() + wait_s
        while (
            not self._is_closed
            and is_connected(request)
            and worker.last_number == message.number
        ):
            items = list[wire.WorkItem]()
            while self._queue and len(items) < message.max_items:
                _, item = self._queue.popitem(last=False)
                # Held from here on, although the answer may be lost on its way: then
                # the next take does not list it, and it returns to the queue.
                item.worker = worker
                worker.held[item.item.item_id] = item
                item.started()
                items.append(item.item)
            if items:
                return items
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        return []

    async def _result(self, request: Request) -> Message:
        message, worker_id = await self._receive(request, wire.ResultRequest)
        item = self._workers[worker_id].held.get(message.item_id)
        if item is None:
            why = "its rollout has ended, ran past rollout.timeout_s, was requeued, or another worker has it"
            raise Refused(
                410, f"work item {message.item_id} is not this worker's: {why}"
            )
        result: Outcome | RolloutFailure = self._counted(
            item, message.outcome or Outcome()
        )
        if (failure := message.failure) is not None:
            result = RolloutFailure(
                failure.error,
                rule=failure.rule,
                way_out=failure.way_out,
                kind=failure.kind,
            )
        # After this the worker may forget the item. If its answer is lost, it posts
        # again, gets 410, and drops a result that already counts.
        self._end(item, result)
        return wire.Accepted()

    async def _outcome(self, request: Request) -> Response:
        key = shown_key(request)
        if self.late is None:
            self._taker_of(key)
        else:
            await self.late.check(key)
        body = await read_body(request, wire.MAX_OUTCOME_BYTES)
        try:
            outcome = OUTCOME.validate_json(body)
            if self.late is None:
                self._taker_of(key)(outcome)  # the item may have ended
            else:
                _check_late(outcome)
                await self.late.post(key, outcome)
        except (ValidationError, RolloutFailure) as error:
            raise invalid(f"The outcome is refused: {first_fault(error)}") from None
        return _as_response(wire.Accepted())

    # ---- inside

    async def _receive(
        self, request: Request, shape: type[FromWorker]
    ) -> tuple[FromWorker, WorkerId]:
        body = await read_body(request, wire.MAX_MESSAGE_BYTES)
        try:
            message = shape.model_validate_json(body)
        except ValidationError as error:
            raise Refused(
                422,
                first_fault(error),
                way_out="run worker and trainer with the same asyncrl.",
            ) from error
        worker_id = (message.worker, message.instance)
        self._last_seen_s = self._loop.time()
        worker = self._workers.setdefault(worker_id, WorkerRecord())
        if isinstance(message, wire.TakeRequest):
            worker.busy = message.busy
        self._await_sign(worker_id, worker)
        return message, worker_id

    def _await_sign(self, worker_id: WorkerId, worker: WorkerRecord) -> None:
        worker.stop_timer()
        if not self._is_closed:
            due_s = self._loop.time() + self.lease_timeout_s
            worker.silence = self._loop.call_at(
                due_s, self._silent, worker_id, worker, due_s
            )

    def _silent(self, worker_id: WorkerId, worker: WorkerRecord, due_s: float) -> None:
        # The worker gets its whole lease again: messages that came while this process
        # stood still are read after this timer.
        if self._loop.time() - due_s >= LATE_S:
            self._await_sign(worker_id, worker)
            return
        what = f"sent no heartbeat for gateway.lease_timeout_s={self.lease_timeout_s}"
        self._drop(
            worker_id,
            what,
            "read its log; run blocking calls in asyncio.to_thread, or raise it.",
        )

    def _drop(self, worker_id: WorkerId, what: str, way_out: str) -> None:
        worker = self._workers.pop(worker_id)
        worker.last_number = -1  # ends its poll
        worker.stop_timer()
        self._num_lost += len(worker.held)
        for item in list(worker.held.values()):
            why = f"{item.item.rollout_id}: worker {worker_id[0]} {what}"
            lost = RolloutFailure(why, way_out=way_out, kind=FailureKind.HOST_LOST)
            self._end(item, lost)
        self._changed.notify()

    def _end(
        self, item: QueuedItem, result: Outcome | RolloutFailure | None = None
    ) -> None:
        """Forget an item; `result`, if given, ends its run(). Idempotent."""
        self._queue.pop(item.item.item_id, None)
        if item.worker is not None:
            item.worker.held.pop(item.item.item_id, None)
        self._takers.pop(item.item.outcome_key or "", None)
        if result is not None and not item.done.done():
            item.done.set_result(result)

    def _counted(self, item: QueuedItem, returned: Outcome) -> Outcome:
        if self.harnesses[item.item.harness].outcomes == "returned":
            return returned
        posted = item.posted
        return replace(
            posted,
            metrics={**posted.metrics, **returned.metrics},
            # They are not rewards, so their source does not matter.
            turn_states=posted.turn_states or returned.turn_states,
            roles=posted.roles or returned.roles,
            untrained=returned.untrained,
            timed_out=returned.timed_out,
        )

    def _taker_of(self, key: str) -> Callable[[Outcome], None]:
        """Return the receiver of outcomes posted with a key. Raises ApiError (401)."""
        if (take := self._takers.get(key)) is None:
            why = "This key sets no reward: it is unknown, its rollout has ended, or it only samples"
            sources = dict.fromkeys(each.outcomes for each in self.harnesses)
            source = f"generator.outcomes={' or '.join(sources)} says where rewards come from"
            raise ApiError(401, f"{why} ({source}).", code="invalid_api_key")
        return take

    def _make_item(self, work: Work) -> wire.WorkItem:
        prompt = work.prompt
        harness = self.harnesses[work.harness]
        try:
            item = wire.WorkItem(
                item_id=f"{self._run_id}-{next(self._numbers)}",
                rollout_id=work.rollout_id,
                prompt_id=prompt.prompt_id,
                messages=[dict(each) for each in prompt.messages],
                info=dict(prompt.info),
                answer=prompt.answer if harness.give_answer else None,
                has_answer=harness.give_answer,
                sample_index=work.sample_index,
                attempt=work.attempt,
                seed=self.task_seed(work) if work.seed is None else work.seed,
                key=work.key,
                outcome_key=secrets.token_hex(24)
                if harness.outcomes == "posted"
                else work.outcome_key,
                timeout_s=work.timeout_s,
                harness=work.harness,
            )
            # Here a wrong value fails its own prompt. In a worker's answer it would
            # fail the other items, too.
            item.model_dump_json()
        except (ValueError, TypeError, RecursionError) as error:
            # pydantic's errors are ValueErrors
            raise PromptUnusable(
                f"{work.rollout_id}: prompt {prompt.prompt_id} cannot be sent to a worker: {error!s:.300}",
                rule="its `answer` and `info` must be JSON values",
            ) from error
        return item


def _check_late(outcome: Outcome) -> None:
    if outcome.reward is None and not outcome.turn_rewards:
        raise invalid(
            "The outcome is refused: with generator.outcomes=later it has a `reward` or `turn_rewards`"
        )
    # A state is known before its turn.
    if outcome.turn_states or outcome.untrained or outcome.timed_out:
        raise invalid(
            "The outcome is refused: with generator.outcomes=later the program returns `turn_states`, "
            "`untrained` and `timed_out`"
        )


def _as_response(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
