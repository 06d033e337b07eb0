"""Hands work to harness workers over HTTP and takes their results. Knows messages and keys; knows no model,
no token, no reward.

Workers long-poll; each of their messages is a sign of life that renews all their leases. One whose event loop
is blocked gives none.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from asyncrl.agents.endpoint.connections import answer_error, belongs_to
from asyncrl.agents.endpoint.refusals import invalid, outcome_refused, session_ended, unknown_key
from asyncrl.agents.endpoint.work_queue import Entry, Gone, LeaseBook, NotForOutcomes, WorkerId
from asyncrl.config import Outcomes
from asyncrl.errors import PromptUnusable, RolloutFailure
from asyncrl.messages.base import ErrorBody, Message
from asyncrl.messages.records import Outcome, Work
from asyncrl.messages.work import (
    MAX_MESSAGE_BYTES,
    MAX_OUTCOME_BYTES,
    MAX_WAIT_S,
    Accepted,
    AliveAnswer,
    AliveRequest,
    LeaseRequest,
    OutcomeMessage,
    ResultRequest,
    WorkerMessage,
    WorkItem,
)
from asyncrl.waits import ROUNDING_S, Alarm, LoopClock, waiting

Read = TypeVar("Read", bound=Message)


class Refusal(Exception):  # noqa: N818  an answer, not a crash
    """Answer this one request with `status` and an ErrorBody."""

    def __init__(self, status: int, error: str, *, rule: str = "", way_out: str = "") -> None:
        self.status, self.body = status, ErrorBody(error=error, rule=rule, way_out=way_out)
        super().__init__(error)


async def read_message(request: web.Request, shape: type[Read]) -> Read:
    """The body. Raises Refusal: 413 if it is larger than the request may be, 422 with the first field that is
    wrong.
    """
    try:
        return shape.model_validate_json(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, f"the message is larger than {request.client_max_size} bytes") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(
            422,
            f"{where + ': ' if where else ''}{first['msg']}",
            rule="see asyncrl/messages/work.py for the message",
            way_out="run worker and trainer with the same asyncrl.",
        ) from error


def bearer(request: web.Request) -> str:
    """The token that this request shows; empty if none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def answer_message(message: Message, status: int = 200) -> web.Response:
    """A message as a response."""
    return web.Response(
        body=message.model_dump_json().encode(), status=status, content_type="application/json"
    )


Asked = TypeVar("Asked", bound=WorkerMessage)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TAKEN_BACK = (
    "the rollout was taken back: it ran past rollout.timeout_s, its group was handed back, or the run ends"
)
_SILENT = "read that worker's log; what blocks its event loop belongs into `await asyncio.to_thread(...)`, or raise gateway.lease_timeout_s."


_NOT_POSTED = {
    "returned": "generator.outcomes=returned: a rollout's reward is what its harness returns, or its "
    "command's last line. Where a program "
    "cannot print its outcome, set generator.outcomes=posted.",
    "none": "generator.outcomes=none: the task's own reward alone scores a rollout.",
    "posted": "this key samples and sets no reward. Outcomes are posted with the outcome key, which only the "
    "program itself is given.",
}
"""Why no outcome is taken from a session's key, by `generator.outcomes`."""


@dataclass(frozen=True, slots=True)
class LeasesStats:
    """`unseen_s`: seconds since any worker gave a sign of life, from the start if none ever did.

    The `num_` ones count up; `num_lost`: leases that failed because their worker was gone.
    """

    queued: int
    leased: int
    workers: int
    slots: int
    unseen_s: float
    num_leased: int
    num_lost: int


class Leases:
    """The WorkQueue that harness workers empty, on the gateway's own port.

    Life:       made inside the loop -> routes() mounted -> aclose().
    Waits:      run sleeps until its work has ended: until a result, or until its worker has been silent for
    lease_timeout_s in
                which our own loop ran. A poll of /work/lease sleeps until there is work, MAX_WAIT_S at most.
    Invariant:  each run() ends once, by its worker's one accepted result or by a RolloutFailure; see
    LeaseBook.
    """

    def __init__(
        self,
        *,
        worker_key: str,
        model: str,
        lease_timeout_s: float,
        task_seed: Callable[[Work], int],
        outcomes: Outcomes = "returned",
        give_answer: bool = False,
    ) -> None:
        """`model`: its name for calls. `task_seed`: the seed that a harness is given for its own draws.
        `outcomes`, `give_answer`: see GeneratorConfig.
        """
        self._worker_key, self._model, self._task_seed, self._give_answer = (
            worker_key,
            model,
            task_seed,
            give_answer,
        )
        self.lease_timeout_s = lease_timeout_s
        self._book = LeaseBook(outcomes)
        self._takers: dict[str, Callable[[Outcome], None]] = {}
        self._not_takers: set[str] = set()
        self._run_id, self._numbers = secrets.token_hex(4), itertools.count()
        self._changed = asyncio.Event()
        self._silence: Alarm | None = None
        self._clock = LoopClock.of(asyncio.get_running_loop())
        self._last_seen_s = self._clock.time()
        self._is_closed = False
        self._num_leased = self._num_lost = 0

    def __repr__(self) -> str:
        return f"<Leases {self._book.num_queued} queued, {self._book.num_leased} leased, {len(self._book.workers)} workers>"

    def stats(self) -> LeasesStats:
        """How much waits, how much runs, and who is there to run it."""
        book = self._book
        return LeasesStats(
            book.num_queued,
            book.num_leased,
            len(book.workers),
            sum(worker.slots for worker in book.workers.values()),
            self._clock.time() - self._last_seen_s,
            self._num_leased,
            self._num_lost,
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        return {
            "harness/queued": self._book.num_queued,
            "harness/leased": self._book.num_leased,
            "harness/workers": len(self._book.workers),
            "harness/lost": self._num_lost,
            "harness/leases": self._num_leased,
        }

    def _what_runs(self) -> str:
        book = self._book
        return (
            f"harnesses ({book.num_queued} wait for a worker, {book.num_leased} run on {len(book.workers)} "
            f"workers)"
        )

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        """Have it run by some worker; see types.WorkQueue. `started` is called again if the work was lost on
        its way to a worker.
        """
        lease_id = f"{self._run_id}-{next(self._numbers)}"
        outcome_key = secrets.token_urlsafe(24) if self._book.outcomes == "posted" else None
        body = self._body(lease_id, work, outcome_key)
        done: asyncio.Future[Outcome | RolloutFailure] = asyncio.get_running_loop().create_future()

        def ended(result: Outcome | RolloutFailure) -> None:
            if not done.done():  # else run() was cancelled in this very round of the loop
                done.set_result(result)

        self._book.add(Entry(lease_id, work, body, started, ended, outcome_key))
        self._wake()
        try:
            with waiting(self._what_runs, on="a worker's result"):
                result = await done
        finally:
            self._book.withdraw(lease_id, _TAKEN_BACK)
        if isinstance(result, RolloutFailure):
            raise result
        return result

    def worker_gone_nowait(self, name: str, why: str) -> None:
        """The process of the worker of this name has ended (whoever started it knows first): what it held
        fails now.
        """
        for worker_id in [worker_id for worker_id in self._book.workers if worker_id[0] == name]:
            self._drop(
                worker_id,
                f"is gone: {why}",
                rule="a rollout ends with its worker",
                way_out="read that worker's log.",
            )

    def on_outcome(self, key: str, take: Callable[[Outcome], None], *, sampling_key: str) -> None:
        """Outcomes that are posted with this key are those of no work: `take` has them. It may raise
        RolloutFailure, answered with 400.

        `sampling_key`: that of the calls, which posts nothing.
        """
        self._takers[key] = take
        self._not_takers.add(sampling_key)

    async def aclose(self) -> None:
        """Answer the polls that wait, with nothing, and give out nothing any more; results are taken.
        Idempotent.
        """
        self._is_closed = True
        self._wake()
        if self._silence is not None:
            self._silence.cancel()

    # ---- routes

    def routes(self) -> list[web.RouteDef]:
        """What the gateway mounts."""
        return [
            web.post("/work/lease", self._for_workers(self._lease)),
            web.post("/work/alive", self._for_workers(self._alive)),
            web.post("/work/result", self._for_workers(self._result)),
            web.post("/v1/outcome", self._outcome),
            web.post("/s/{key}/v1/outcome", self._outcome),
        ]

    def _for_workers(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                if not hmac.compare_digest(
                    bearer(request).encode(errors="surrogateescape"), self._worker_key.encode()
                ):
                    raise Refusal(
                        401,
                        "wrong or missing worker key",
                        rule="workers show the run's worker key as bearer token",
                        way_out="start the worker with the key that the run prints.",
                    )
                belongs_to(request, None)
                return await handler(request)
            except Refusal as refusal:
                return answer_message(refusal.body, refusal.status)

        return answer

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        message, worker_id = await self._heard(request, LeaseRequest)
        if self._is_closed:  # an empty answer would have it ask again at once
            raise Refusal(
                503,
                "the run ends",
                rule="nothing is given out any more",
                way_out="wait until it is started again.",
            )
        self._book.workers[worker_id].slots = message.slots
        is_new = self._book.ask(worker_id, message.number, message.holding)
        items = await self._wait_items(request, message, worker_id) if is_new else []
        self._num_leased += len(items)
        head = f'"model":{json.dumps(self._model)},"lease_timeout_s":{self.lease_timeout_s}'.encode()
        body = b'{"items":[' + b",".join(entry.body for entry in items) + b"]," + head + b"}"
        return web.Response(body=body, content_type="application/json")

    async def _wait_items(
        self, request: web.Request, message: LeaseRequest, worker_id: WorkerId
    ) -> list[Entry]:
        """Work as soon as there is any; none once the time is over, or if this worker has asked anew, or is
        gone.
        """
        worker, wait_s = (
            self._book.workers[worker_id],
            min(message.wait_s, MAX_WAIT_S, self.lease_timeout_s / 2),
        )
        until_s = asyncio.get_running_loop().time() + wait_s
        self._wake()  # what was lost on its way is queued again; an older poll of this worker ends
        while True:
            is_there = request.transport is not None and not request.transport.is_closing()
            is_known = self._book.workers.get(worker_id) is worker and worker.last_number == message.number
            if self._is_closed or not is_there or not is_known:
                return []
            if items := self._book.lease(worker_id, message.max_items):
                return items
            if not await self._wait_change(until_s):
                return []

    async def _alive(self, request: web.Request) -> web.StreamResponse:
        message, worker_id = await self._heard(request, AliveRequest)
        lost = self._book.lost(worker_id, message.holding)
        if message.is_leaving:
            self._drop(
                worker_id,
                "was ended",
                rule="a rollout ends with its worker",
                way_out="none needed, if that was wanted.",
            )
        return answer_message(AliveAnswer(cancel=lost))

    async def _result(self, request: web.Request) -> web.StreamResponse:
        message, worker_id = await self._heard(request, ResultRequest)
        failure, outcome = message.failure, _as_outcome(message.outcome or OutcomeMessage())
        failed = failure and RolloutFailure(failure.error, rule=failure.rule, way_out=failure.way_out)
        try:
            self._book.result(worker_id, message.lease_id, failed or outcome)
        except Gone as gone:
            raise Refusal(
                410,
                f"lease {message.lease_id} is not this worker's: {gone}",
                rule="a result is accepted once, from the worker that holds the lease",
                way_out="drop the result.",
            ) from None
        return answer_message(Accepted())

    async def _outcome(self, request: web.Request) -> web.StreamResponse:
        """Errors are OpenAI-shaped: it is a harness that asks. The key comes first: nobody has a body read
        without one.
        """
        key = request.match_info.get("key") or bearer(request)
        try:
            take = self._takers.get(key)
            if key in self._not_takers:
                raise NotForOutcomes
            if take is None:
                self._book.check_post(key)
            belongs_to(request, key)
            outcome = _as_outcome(
                await read_message(request.clone(client_max_size=MAX_OUTCOME_BYTES), OutcomeMessage)
            )
            if take is None:
                self._book.post(key, outcome)
            else:
                take(outcome)
        except Gone as gone:
            return answer_error(session_ended(str(gone)))
        except NotForOutcomes:
            return answer_error(
                outcome_refused(_NOT_POSTED["posted" if key in self._not_takers else self._book.outcomes])
            )
        except KeyError:
            return answer_error(unknown_key())
        except RolloutFailure as failure:
            return answer_error(invalid(str(failure)))
        except Refusal as refusal:
            return answer_error(
                invalid(f"{refusal}; an outcome is {{reward, metrics, turn_rewards, branch_rewards}}")
            )
        return answer_message(Accepted())

    # ---- inside

    async def _heard(self, request: web.Request, shape: type[Asked]) -> tuple[Asked, WorkerId]:
        message = await read_message(request.clone(client_max_size=MAX_MESSAGE_BYTES), shape)
        worker_id = (message.worker, message.instance)
        self._last_seen_s = self._clock.time()
        self._book.seen(worker_id, self._last_seen_s)
        if self._silence is None and not self._is_closed:
            self._check_silence()
        return message, worker_id

    def _check_silence(self) -> None:
        """Drop the workers whose time is over, and look again when that of the next one is."""
        now_s, workers = self._clock.time(), self._book.workers
        silent_s = {worker_id: now_s - worker.last_seen_s for worker_id, worker in workers.items()}
        for worker_id in [
            worker_id
            for worker_id, seconds in silent_s.items()
            if seconds > self.lease_timeout_s - ROUNDING_S
        ]:
            what = f"gave no sign of life for {silent_s[worker_id]:.1f} s"
            rule = f"gateway.lease_timeout_s={self.lease_timeout_s} is the limit, and a worker whose event loop is blocked gives none"
            self._drop(worker_id, what, rule=rule, way_out=_SILENT)
        self._silence = None
        if workers:
            next_s = min(worker.last_seen_s for worker in workers.values()) + self.lease_timeout_s
            self._silence = Alarm(next_s - now_s, self._check_silence)

    def _drop(self, worker_id: WorkerId, what: str, *, rule: str, way_out: str) -> None:
        self._num_lost += self._book.drop_worker(worker_id, what, rule=rule, way_out=way_out)
        self._wake()

    def _body(self, lease_id: str, work: Work, outcome_key: str | None) -> bytes:
        prompt = work.prompt
        try:
            item = WorkItem(
                lease_id=lease_id,
                rollout_id=work.rollout_id,
                prompt_id=prompt.prompt_id,
                messages=[dict(each) for each in prompt.messages],
                info=dict(prompt.info),
                answer=prompt.answer if self._give_answer else None,
                has_answer=self._give_answer,
                sample_index=work.sample_index,
                attempt=work.attempt,
                seed=self._task_seed(work),
                key=work.key,
                outcome_key=outcome_key,
                timeout_s=work.timeout_s,
            )
            return item.model_dump_json().encode()
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's own are ValueErrors
            raise PromptUnusable(
                f"{work.rollout_id}: prompt {prompt.prompt_id} cannot be sent to a worker: "
                f"{str(error)[:300]}",
                rule="`answer` and `info` of a prompt travel as JSON",
                way_out="have the task give numbers, texts, lists and dicts.",
            ) from error

    async def _wait_change(self, until_s: float) -> bool:
        """Sleep until something has changed; false once it is `until_s`."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _as_outcome(message: OutcomeMessage) -> Outcome:
    return Outcome(message.reward, message.metrics, message.turn_rewards, message.branch_rewards)
