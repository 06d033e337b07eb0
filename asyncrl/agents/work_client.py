"""Takes work items from a gateway, runs them, and posts their results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from asyncrl.agents.harness import (
    OUTCOME,
    AnyTask,
    Harness,
    Session,
    Task,
    first_fault,
    make_http_client,
)
from asyncrl.errors import AsyncrlError, ConfigError, ConnectionShortage, RolloutFailure, RolloutTimeout
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody
from asyncrl.messages.records import Outcome
from asyncrl.messages.work import (
    MAX_OUTCOME_BYTES,
    MAX_WAIT_S,
    Accepted,
    AliveAnswer,
    AliveRequest,
    ResultRequest,
    TakeAnswer,
    TakeRequest,
    WorkerHealth,
    WorkItem,
)
from asyncrl.waits import TimeLimit

log = logging.getLogger("asyncrl.worker")

Answer = TypeVar("Answer", bound=BaseModel)

CALL_TIMEOUT_S = 15.0
MAX_SIGN_PERIOD_S = 5.0
"""Seconds between two signs of life; a quarter of lease_timeout_s if that is less. A worker learns of a
rollout that was taken back at most this much later.
"""
MAX_BACKOFF_S = 30.0
TICK_S = 1.0
GOODBYE_TIMEOUT_S = 1.0
_MAX_WORDS = 4000


class Worker:
    """Runs as many rollouts at once as it has slots.

    Life: run() until it is cancelled: then every harness is cancelled, and the gateway hears that this worker
        leaves.
    Waits: it sleeps until a slot is free, then until there is work; each attempt sleeps in its harness. When
        the gateway does not answer, all of them ask again, MAX_BACKOFF_S apart at most, for ever: it may be
        started again.
    Invariant: an item is in `holding` from the answer that gave it until its result has been answered, or it
        was cancelled. Signs of life come from the event loop that the harnesses run on: a harness that blocks
        it for lease_timeout_s loses its worker all items.
    """

    def __init__(self, harness: Harness, caller: Caller, *, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self._harness, self._caller = harness, caller
        self._who = {"worker": name, "instance": secrets.token_hex(8)}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._freed, self._is_known = asyncio.Event(), asyncio.Event()
        self._number = 0
        self._http: Any = None
        self._lease_timeout_s = 4 * MAX_SIGN_PERIOD_S
        self._lost_since_s: float | None = None
        self._ticked_s = asyncio.get_running_loop().time()

    @property
    def holding(self) -> list[str]:
        """The items that are not given back."""
        return list(self._running)

    def health(self, now_s: float) -> WorkerHealth:
        """State of the worker; another thread may ask, so a blocked event loop does not delay the answer.
        `now_s`: of the loop's clock.
        """
        lost_s = self._lost_since_s
        return WorkerHealth(
            name=self.name,
            slots=self.slots,
            num_running=len(self._running),
            loop_lag_s=max(0.0, now_s - self._ticked_s - TICK_S),
            gateway_lost_s=None if lost_s is None else now_s - lost_s,
            num_abandoned=getattr(self._harness, "num_abandoned", 0),
        )

    async def run(self) -> None:
        """Work until cancelled. Raises ConfigError if the gateway does not take this worker, or the harness
        cannot be run at all.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick(), name="tick")
                tasks.create_task(self._give_signs(), name="signs of life")
                await self._take_for_ever(tasks)
        except BaseExceptionGroup as several:
            wrong = next((error for error in several.exceptions if isinstance(error, ConfigError)), None)
            raise wrong or several from None
        finally:
            leaving = AliveRequest(**self._who, holding=self.holding, is_leaving=True)
            with contextlib.suppress(CallLost, CallRefused, ConnectionShortage):
                await self._caller.post("/work/alive", leaving, AliveAnswer, timeout_s=GOODBYE_TIMEOUT_S)
            if self._http is not None:
                await self._http.aclose()

    async def _take_for_ever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while len(self._running) >= self.slots:
                self._freed.clear()
                await self._freed.wait()
            timeout_s = MAX_WAIT_S + CALL_TIMEOUT_S
            answer = await self._ask("/work/take", self._take_request, TakeAnswer, timeout_s)
            self._lease_timeout_s = answer.lease_timeout_s
            self._is_known.set()
            for item in answer.items:
                name = f"{item.rollout_id} attempt {item.attempt}"
                running = tasks.create_task(self._run_item(item, answer.model), name=name)
                self._running[item.item_id] = running

    def _take_request(self) -> TakeRequest:
        """A new one for each try: what is held changes meanwhile."""
        self._number += 1
        free, holding = self.slots - len(self._running), self.holding
        return TakeRequest(
            **self._who, max_items=free, slots=self.slots, number=self._number, holding=holding
        )

    async def _run_item(self, item: WorkItem, model: str) -> None:
        try:
            said = await self._run_harness(item, model)
            result = ResultRequest(**self._who, item_id=item.item_id, **said)
            await self._ask("/work/result", lambda: result, Accepted, CALL_TIMEOUT_S)
        except CallRefused as refused:
            log.info("%s: its result was dropped: %s", item.rollout_id, refused.body.error)
        except asyncio.CancelledError:
            self._free(item)
            raise
        self._free(item)  # any other error ends the worker, which holds the item until it has said so

    def _free(self, item: WorkItem) -> None:
        del self._running[item.item_id]
        self._freed.set()

    async def _run_harness(self, item: WorkItem, model: str) -> dict[str, Any]:
        """`outcome` or `failure` of a ResultRequest. What goes wrong in a harness is data; ConfigError
        passes.
        """
        session = Session(
            f"{self._caller.url}/v1",
            item.key,
            model,
            outcome_key=item.outcome_key,
            http_client=self._http_client,
        )
        given = (item.prompt_id, tuple(item.messages), item.info, item.seed, item.sample_index, item.attempt)
        task: AnyTask = Task(*given, answer=item.answer) if item.has_answer else AnyTask(*given)
        limit = TimeLimit(item.timeout_s)
        try:
            async with limit:
                outcome = await self._harness.run(task, session)
            return {} if outcome == Outcome() else {"outcome": _checked(outcome)}
        except asyncio.CancelledError as error:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            return {"failure": _failure(item, error)}  # the harness cancelled itself
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                error = RolloutTimeout(
                    f"{item.rollout_id} (prompt {item.prompt_id}) is not finished {item.timeout_s} s after "
                    f"worker {self.name} began it",
                    rule="that is what was left of rollout.timeout_s, the limit of all attempts together",
                )
            elif not isinstance(error, RolloutFailure):
                log.warning("%s attempt %d failed", item.rollout_id, item.attempt, exc_info=True)
            return {"failure": _failure(item, error)}

    def _http_client(self) -> Any:
        """The one of all sessions; made in the worker's event loop by the first that asks."""
        if self._http is None:
            self._http = make_http_client()
        return self._http

    async def _give_signs(self) -> None:
        await self._is_known.wait()  # how often, and for what, is known from the first answer on
        while True:
            await asyncio.sleep(min(MAX_SIGN_PERIOD_S, self._lease_timeout_s / 4))
            answer = await self._ask(
                "/work/alive",
                lambda: AliveRequest(**self._who, holding=self.holding),
                AliveAnswer,
                min(CALL_TIMEOUT_S, self._lease_timeout_s / 3),
            )
            for item_id, why in answer.cancel.items():
                if (running := self._running.get(item_id)) is not None:
                    log.info("%s is given up: %s", running.get_name(), why)
                    running.cancel()  # also while its result is on its way: it is not taken

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ticked_s = loop.time()
            await asyncio.sleep(TICK_S)

    async def _ask(
        self, path: str, make: Callable[[], BaseModel], answer: type[Answer], timeout_s: float
    ) -> Answer:
        """Post what `make` makes until there is an answer.

        Raises CallRefused for 410, ConfigError if the gateway does not know this worker's key or its
        messages.
        """
        backoff_s, now_s = 0.5, asyncio.get_running_loop().time
        while True:
            try:
                found = await self._caller.post(path, make(), answer, timeout_s=timeout_s)
            except (CallRefused, CallLost, ConnectionShortage) as error:
                if isinstance(error, CallRefused) and error.status == 410:
                    raise
                if isinstance(error, CallRefused) and error.status in (401, 422):
                    what = f"the gateway at {self._caller.url} refused worker {self.name}: {error.body.error}"
                    raise ConfigError(what, rule=error.body.rule, way_out=error.body.way_out) from error
                if self._lost_since_s is None:
                    self._lost_since_s = now_s()
                    log.warning("worker %s: %s. It asks again, for ever; Ctrl-C ends it.", self.name, error)
            else:
                if self._lost_since_s is not None:
                    lost_s, self._lost_since_s = now_s() - self._lost_since_s, None
                    log.warning("worker %s: the gateway answers again, after %.0f s", self.name, lost_s)
                return found
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S, self._lease_timeout_s / 4)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # many workers do not come back at once


def _checked(outcome: Outcome) -> Outcome:
    try:
        checked = OUTCOME.validate_python(outcome)
    except ValueError as error:
        raise RolloutFailure(f"the outcome is wrong: {first_fault(error)}") from error
    if (size := len(OUTCOME.dump_json(checked))) > MAX_OUTCOME_BYTES:
        rule = f"{MAX_OUTCOME_BYTES} is the limit"
        raise RolloutFailure(f"the outcome has {size} bytes", rule=rule, way_out="give fewer metrics.")
    return checked


def _failure(item: WorkItem, error: BaseException) -> ErrorBody:
    """Fit for JSON, whatever a harness has put into its exception."""
    rule, way_out = "", "the worker's log has the traceback."
    what = f"{item.rollout_id} (prompt {item.prompt_id}): its harness raised {type(error).__name__}: {error}"
    if isinstance(error, AsyncrlError):
        what, rule, way_out = error.what, error.rule, error.way_out
    words = [text[:_MAX_WORDS].encode("utf-8", errors="replace").decode() for text in (what, rule, way_out)]
    return ErrorBody(error=words[0], rule=words[1], way_out=words[2])
