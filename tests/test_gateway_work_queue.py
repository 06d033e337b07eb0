"""Random histories of the lease book, each invariant a line of its docstring; and silence, on a virtual
clock.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from gateway_cases import in_virtual_time
from harness_gateway import make_work
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.agents.endpoint.openai_form import ApiError
from asyncrl.agents.endpoint.work_queue import QueuedItem, WorkerId, WorkItems
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.config import Outcomes
from asyncrl.errors import RolloutFailure
from asyncrl.messages.base import Message
from asyncrl.messages.records import Outcome
from asyncrl.messages.work import Accepted, AliveAnswer, AliveRequest, ResultRequest, TakeAnswer, TakeRequest
from asyncrl.testing.virtual_time import all_blocked, stand_still

Answer = TypeVar("Answer", bound=Message)

WORKERS = st.sampled_from([("a", "1"), ("a", "2"), ("b", "1")])


class QueueHistory(RuleBasedStateMachine):
    """Workers ask, lose answers on the way, finish, repeat themselves, finish others' work, leave; runs are
    taken back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = WorkItems("posted")
        self.queued: list[str] = []
        self.held: dict[str, WorkerId] = {}
        self.over: set[str] = set()
        self.ends: dict[str, list[Outcome | RolloutFailure]] = {}
        self.starts: dict[str, int] = {}
        self.posted: dict[str, Outcome] = {}
        self.number = self.now_s = 0

    def started(self, item_id: str) -> None:
        self.starts[item_id] += 1

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            item_id = f"l{len(self.ends)}"
            work = make_work(len(self.ends))
            self.ends[item_id], self.starts[item_id] = [], 0
            start, end = functools.partial(self.started, item_id), self.ends[item_id].append
            self.book.add(QueuedItem(item_id, work, b"", start, end, f"outcome-{item_id}"))
            self.queued.append(item_id)

    @rule(worker=WORKERS, data=st.data(), max_items=st.integers(1, 3))
    def ask(self, worker: WorkerId, data: st.DataObject, max_items: int) -> None:
        self.book.seen(worker, self.now_s)
        mine = [item_id for item_id, owner in self.held.items() if owner == worker]
        holding = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        self.number += 1
        assert self.book.ask(worker, self.number, holding)
        lost = [item_id for item_id in mine if item_id not in holding]
        for item_id in lost:
            del self.held[item_id]
        self.queued = lost + self.queued
        assert not self.book.ask(worker, self.number, ()), "an old request changes nothing"
        taken = [item.item_id for item in self.book.take(worker, max_items)]
        assert taken == self.queued[:max_items], "first in, first out"
        del self.queued[:max_items]
        self.held |= dict.fromkeys(taken, worker)

    @precondition(lambda self: self.ends)
    @rule(worker=WORKERS, data=st.data(), fails=st.booleans())
    def result(self, worker: WorkerId, data: st.DataObject, fails: bool) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.ends)))
        self.book.seen(worker, self.now_s)
        result = RolloutFailure("no") if fails else Outcome(metrics={"turns": 2.0})
        if self.held.get(item_id) != worker:
            assert self.book.result(worker, item_id, result), "it is told why"
            return
        assert self.book.result(worker, item_id, result) is None
        del self.held[item_id]
        self.over.add(item_id)
        if isinstance(result, RolloutFailure):
            assert self.ends[item_id] == [result]
        else:
            posted = self.posted.get(item_id, Outcome())
            assert self.ends[item_id] == [Outcome(posted.reward, {**posted.metrics, "turns": 2.0})]

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), value=st.integers(0, 3))
    def post(self, data: st.DataObject, value: int) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.ends)))
        outcome = Outcome(float(value), {"posted": float(value)})
        is_live = item_id in self.queued or item_id in self.held
        with pytest.raises(ApiError) as refused:
            self.book.find_postable(f"key-{item_id[1:]}")
        assert refused.value.status == (403 if is_live else 410)
        if is_live:
            self.book.find_postable(f"outcome-{item_id}").posted = outcome
            self.posted[item_id] = outcome
        else:
            with pytest.raises(ApiError, match="has ended"):
                self.book.find_postable(f"outcome-{item_id}")

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.ends)))
        self.book.withdraw(item_id, "taken back")
        if item_id in self.queued:
            self.queued.remove(item_id)
        owner = self.held.pop(item_id, None)
        if owner is not None:
            assert self.book.lost(owner, [item_id]) == {item_id: "taken back"}, (
                "its worker is told at its next sign of life"
            )
        self.over.add(item_id)

    @precondition(lambda self: self.book.workers)
    @rule(data=st.data())
    def worker_is_gone(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.book.workers)))
        mine = [item_id for item_id, owner in self.held.items() if owner == worker]
        assert self.book.drop_worker(worker, "is gone", rule="", way_out="") == len(mine)
        for item_id in mine:
            del self.held[item_id]
            self.over.add(item_id)
            assert isinstance(self.ends[item_id][-1], RolloutFailure)
            assert "worker" in str(self.ends[item_id][-1])

    @invariant()
    def a_leased_work_is_with_one_worker_and_a_queued_one_with_none(self) -> None:
        held = [(item_id, worker) for worker, record in self.book.workers.items() for item_id in record.held]
        assert sorted(held) == sorted(self.held.items())
        assert self.book.num_queued == len(self.queued)
        assert self.book.num_held == len(self.held)

    @invariant()
    def every_work_ends_once(self) -> None:
        assert all(len(ends) <= 1 for ends in self.ends.values())
        live = set(self.queued) | set(self.held)
        assert live | self.over == set(self.ends)
        assert not live & self.over
        assert not any(self.ends[item_id] for item_id in live)


TestQueueHistory = QueueHistory.TestCase
TestQueueHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ended_with(outcomes: Outcomes, said: Outcome, posted: Outcome | None = None) -> Outcome | RolloutFailure:
    """What a work comes to whose harness has posted and said this."""
    book, ends = WorkItems(outcomes), list[Outcome | RolloutFailure]()
    key = "outcome-0" if outcomes == "posted" else None
    book.add(QueuedItem("l0", make_work(0), b"", lambda: None, ends.append, key))
    book.seen(("w", "1"), 0.0)
    book.take(("w", "1"), 1)
    if posted is not None:
        book.find_postable("outcome-0").posted = posted
    book.result(("w", "1"), "l0", said)
    (end,) = ends
    return end


def test_rewards_come_from_where_the_config_says_and_from_nowhere_else() -> None:
    said, parts = Outcome(1.0, {"b": 2.0}), Outcome(turn_rewards={"chatcmpl-0": 1.0})
    assert [ended_with("returned", each) for each in (said, parts, Outcome())] == [said, parts, Outcome()]
    assert [ended_with("none", each) for each in (said, parts)] == [Outcome(metrics={"b": 2.0}), Outcome()]
    posted = Outcome(0.5, {"a": 1.0, "b": 1.0})
    assert ended_with("posted", Outcome(metrics={"b": 2.0}), posted) == Outcome(0.5, {"a": 1.0, "b": 2.0})
    assert ended_with("posted", Outcome(), parts) == parts
    assert ended_with("posted", Outcome()) == Outcome(), "nothing was posted: the task's own reward scores it"
    failure = ended_with("posted", said, posted)
    assert "the harness returned a reward; generator.outcomes=posted takes" in str(failure)


class Line:
    """What a connection to a worker is, for the routes."""

    def __init__(self) -> None:
        self.is_cut = False

    def is_closing(self) -> bool:
        return self.is_cut

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def ask(
    queue: RolloutQueue, path: str, message: Message, answer: type[Answer], line: Line | None = None
) -> Answer:
    """Call a route without a socket: a virtual clock knows none."""
    loop = asyncio.get_running_loop()
    body = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
    body.feed_data(message.model_dump_json().encode())
    body.feed_eof()
    settings = {"headers": {"Authorization": "Bearer k"}, "payload": body, "app": web.Application()}
    request = make_mocked_request("POST", path, transport=line or Line(), **settings)
    (handler,) = (route.handler for route in queue.routes() if route.path == path)
    response: Any = await handler(request)
    assert response.status == 200, response.body
    return answer.model_validate_json(response.body)


def take_request(worker: str, number: int, **more: Any) -> TakeRequest:
    fields = {"worker": worker, "instance": "1", "max_items": 1, "slots": 1, "number": number, "holding": []}
    return TakeRequest(**fields | more)


def make_queue(lease_timeout_s: float = 60.0) -> RolloutQueue:
    return RolloutQueue(worker_key="k", model="m", lease_timeout_s=lease_timeout_s, task_seed=lambda work: 0)


@in_virtual_time
async def test_a_silent_worker_loses_its_items_after_its_time_and_a_lively_one_never() -> None:
    queue, loop = make_queue(lease_timeout_s=60.0), asyncio.get_running_loop()
    assert queue.gauges()["harness/unseen_s"] == 0.0
    await asyncio.sleep(7.0)
    assert queue.gauges()["harness/unseen_s"] == 7.0
    silent = asyncio.create_task(queue.run(make_work(0), started=lambda: None))
    lively = asyncio.create_task(queue.run(make_work(1), started=lambda: None))
    await all_blocked()
    await ask(queue, "/work/take", take_request("silent", 0), TakeAnswer)
    item_id = (await ask(queue, "/work/take", take_request("lively", 0), TakeAnswer)).items[0].item_id
    begun_s = loop.time()
    sign = AliveRequest(worker="lively", instance="1", holding=[item_id])
    for _ in range(30):
        await asyncio.sleep(50.0)
        assert (await ask(queue, "/work/alive", sign, AliveAnswer)).cancel == {}
        assert silent.done() == (loop.time() - begun_s >= 60.0)
    with pytest.raises(
        RolloutFailure, match=r"silent gave no sign of life for 60\.0 s; gateway\.lease_timeout_s"
    ):
        await silent
    assert [queue.gauges()[f"harness/{name}"] for name in ("workers", "lost", "unseen_s")] == [1, 1, 0.0]
    result = ResultRequest(worker="lively", instance="1", item_id=item_id, outcome=Outcome(reward=1.0))
    await ask(queue, "/work/result", result, Accepted)
    assert await lively == Outcome(1.0)
    await queue.aclose()


@in_virtual_time
async def test_a_worker_whose_signs_of_life_we_could_not_hear_ourselves_keeps_its_leases() -> None:
    queue = make_queue(lease_timeout_s=60.0)
    running = asyncio.create_task(queue.run(make_work(0), started=lambda: None))
    await all_blocked()
    item_id = (await ask(queue, "/work/take", take_request("w", 0), TakeAnswer)).items[0].item_id
    sign = AliveRequest(worker="w", instance="1", holding=[item_id])
    for before_s in (30.0, 59.5):
        await asyncio.sleep(before_s)
        stand_still(3600.0)
        await asyncio.sleep(0.3)  # what came meanwhile is read
        assert (await ask(queue, "/work/alive", sign, AliveAnswer)).cancel == {}
    with pytest.raises(RolloutFailure, match=r"worker w gave no sign of life for 60\.0 s"):
        await running
    await queue.aclose()


@in_virtual_time
async def test_a_poll_ends_after_its_time_or_for_a_newer_one_of_the_same_worker() -> None:
    queue, loop = make_queue(), asyncio.get_running_loop()
    assert (await ask(queue, "/work/take", take_request("w", 0, wait_s=1000.0), TakeAnswer)).items == []
    assert loop.time() == 20.0
    older = asyncio.create_task(ask(queue, "/work/take", take_request("w", 1), TakeAnswer))
    await all_blocked()
    newer = asyncio.create_task(ask(queue, "/work/take", take_request("w", 2), TakeAnswer))
    await all_blocked()
    assert older.done()
    assert older.result().items == []
    running = asyncio.create_task(queue.run(make_work(0), started=lambda: None))
    assert (await newer).items[0].rollout_id == "g0/r0"
    running.cancel()
    await queue.aclose()


@in_virtual_time
async def test_a_poll_of_a_client_that_is_gone_or_of_a_dropped_worker_takes_no_work() -> None:
    queue, line = make_queue(), Line()
    cut = asyncio.create_task(ask(queue, "/work/take", take_request("cut", 0), TakeAnswer, line))
    dropped = asyncio.create_task(ask(queue, "/work/take", take_request("dropped", 0), TakeAnswer))
    await all_blocked()
    line.is_cut = True
    queue.worker_gone_nowait("dropped", "exited with code 1")
    running = asyncio.create_task(queue.run(make_work(0), started=lambda: None))
    assert (await cut).items == (await dropped).items == []
    assert queue.gauges()["harness/queued"] == 1
    running.cancel()
    await queue.aclose()
