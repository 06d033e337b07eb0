"""Random histories of work leases, and silent workers on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_cases import in_virtual_time
from harness_gateway import make_work
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.requests import Request

from asyncrl.agents.endpoint.requests import ApiError
from asyncrl.agents.endpoint.work_queue import QueuedItem, RolloutQueue, WorkerId, WorkItems
from asyncrl.base.errors import RolloutFailure
from asyncrl.base.http import Refused
from asyncrl.config import Outcomes
from asyncrl.messages import work as shapes
from asyncrl.messages.records import Outcome
from asyncrl.testing.virtual_time import all_blocked, stand_still

WORKERS = st.sampled_from([("a", "1"), ("a", "2"), ("b", "1")])


def make_item(number: int, item_id: str) -> shapes.WorkItem:
    work = make_work(number)
    return shapes.WorkItem(
        item_id=item_id,
        rollout_id=work.rollout_id,
        prompt_id=work.prompt.prompt_id,
        messages=[],
        sample_index=0,
        attempt=0,
        seed=0,
        key=work.key,
        outcome_key=f"outcome-{item_id}",
        timeout_s=None,
    )


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
        self.posted: dict[str, Outcome] = {}
        self.number = 0

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            item_id = f"l{len(self.ends)}"
            item = make_item(len(self.ends), item_id)
            self.book.add(QueuedItem(item, lambda: None, self.ends.setdefault(item_id, []).append))
            self.queued.append(item_id)

    @rule(worker=WORKERS, data=st.data(), max_items=st.integers(1, 3))
    def ask(self, worker: WorkerId, data: st.DataObject, max_items: int) -> None:
        self.book.seen(worker, 0)
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
        self.book.seen(worker, 0)
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
        if owner is not None:  # its worker is told at its next sign of life
            assert self.book.lost(owner, [item_id]) == {item_id: "taken back"}
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

    @invariant()
    def a_leased_work_is_with_one_worker_and_a_queued_one_with_none(self) -> None:
        held = [(item_id, worker) for worker, record in self.book.workers.items() for item_id in record.held]
        assert sorted(held) == sorted(self.held.items())
        assert (self.book.num_queued, self.book.num_held) == (len(self.queued), len(self.held))

    @invariant()
    def every_work_ends_once(self) -> None:
        assert all(len(ends) <= 1 for ends in self.ends.values())
        live = set(self.queued) | set(self.held)
        assert set(self.ends) - self.over == live
        assert not any(self.ends[item_id] for item_id in live)


TestQueueHistory = QueueHistory.TestCase
TestQueueHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ended_with(outcomes: Outcomes, said: Outcome, posted: Outcome | None = None) -> Outcome | RolloutFailure:
    """What a work comes to whose harness has posted and said this."""
    book, ends = WorkItems(outcomes), list[Outcome | RolloutFailure]()
    book.add(QueuedItem(make_item(0, "l0"), lambda: None, ends.append))
    book.seen(("w", "1"), 0.0)
    book.take(("w", "1"), 1)
    if posted is not None:
        book.find_postable("outcome-l0").posted = posted
    book.result(("w", "1"), "l0", said)
    (end,) = ends
    return end


def test_rewards_come_only_from_the_configured_source() -> None:
    said, parts = Outcome(1.0, {"b": 2.0}), Outcome(turn_rewards={"chatcmpl-0": 1.0})
    assert [ended_with("returned", each) for each in (said, parts)] == [said, parts]
    assert [ended_with("none", each) for each in (said, parts)] == [Outcome(metrics={"b": 2.0}), Outcome()]
    posted = Outcome(0.5, {"a": 1.0, "b": 1.0})
    assert ended_with("posted", Outcome(metrics={"b": 2.0}), posted) == Outcome(0.5, {"a": 1.0, "b": 2.0})
    assert ended_with("posted", Outcome()) == Outcome(), "nothing was posted: the task's own reward scores it"
    failure = ended_with("posted", said, posted)
    assert "the harness returned a reward; with generator.outcomes=posted" in str(failure)


# ---- the routes, without a socket: a virtual clock knows none


class Line(asyncio.Transport):
    """What a connection to a client is, for the routes."""

    is_cut = False

    def is_closing(self) -> bool:
        return self.is_cut


TAKE: dict[str, Any] = {"instance": "1", "max_items": 1, "slots": 1, "holding": []}


class Desk:
    """A queue, and workers and programs that call it by hand."""

    def __init__(self, **settings: Any) -> None:
        more: Any = {"model": "m", "lease_timeout_s": 60.0, "task_seed": lambda work: 7, **settings}
        self.queue, self.number = RolloutQueue(worker_key="k", **more), 0

    async def call(self, path: str, body: bytes, key: str = "k", line: Line | None = None) -> tuple[int, Any]:
        """(status, JSON)."""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope: Any = {"type": "http", "path_params": {}, "app": None}
        scope["headers"] = [(b"authorization", f"Bearer {key}".encode("latin-1"))]
        scope["connection"] = SimpleNamespace(transport=line or Line())
        (handler,) = (route.endpoint for route in self.queue.routes() if route.path == path)
        try:
            response = await handler(Request(scope, receive))
        except ApiError as error:  # which the gateway answers
            return error.status, error.error
        except Refused as refusal:
            return refusal.status, refusal.body
        return response.status_code, json.loads(response.body)

    async def post(self, outcome: Any, key: str) -> tuple[int, Any]:
        status, answer = await self.call("/v1/outcome", json.dumps(outcome).encode(), key)
        return status, answer.get("code")

    def run(self, number: int = 0, **work: Any) -> asyncio.Task[Outcome]:
        return asyncio.create_task(self.queue.run(make_work(number, **work), started=lambda: None))

    async def take(self, worker: str = "w", line: Line | None = None) -> list[shapes.WorkItem]:
        self.number += 1
        request = shapes.TakeRequest(worker=worker, number=self.number, wait_s=1000.0, **TAKE)
        _, answer = await self.call("/work/take", request.model_dump_json().encode(), line=line)
        return [shapes.WorkItem.model_validate(item) for item in answer["items"]]

    async def alive(self, item: shapes.WorkItem, worker: str = "w") -> dict[str, str]:
        request = shapes.AliveRequest(worker=worker, instance="1", holding=[item.item_id])
        _, answer = await self.call("/work/alive", request.model_dump_json().encode())
        return answer["cancel"]  # type: ignore[no-any-return]

    async def result(self, item: shapes.WorkItem, worker: str = "w", **said: Any) -> tuple[int, Any]:
        request = shapes.ResultRequest(worker=worker, instance="1", item_id=item.item_id, **said)
        return await self.call("/work/result", request.model_dump_json().encode())


@in_virtual_time
async def test_silent_worker_loses_its_items() -> None:
    desk = Desk()
    await asyncio.sleep(7.0)
    assert desk.queue.gauges()["harness/unseen_s"] == 7.0
    silent, lively = desk.run(0), desk.run(1)
    await desk.take("silent")
    (item,) = await desk.take("lively")
    for number in range(30):
        await asyncio.sleep(50.0)
        assert await desk.alive(item, "lively") == {}
        assert silent.done() == (number > 0)
    with pytest.raises(RolloutFailure, match=r"silent gave no sign of life for 6[0-3]\.\d s"):
        await silent
    assert [desk.queue.gauges()[f"harness/{name}"] for name in ("workers", "lost", "unseen_s")] == [1, 1, 0.0]
    assert await desk.result(item, "lively", outcome=Outcome(1.0)) == (200, {})
    assert await lively == Outcome(1.0)
    await desk.queue.aclose()


@in_virtual_time
async def test_stopped_gateway_keeps_the_leases() -> None:
    desk = Desk()
    running = desk.run()
    (item,) = await desk.take()
    for before_s in (30.0, 59.5):
        await asyncio.sleep(before_s)
        stand_still(3600.0)
        await asyncio.sleep(0.3)  # what came meanwhile is read
        assert await desk.alive(item) == {}
    with pytest.raises(RolloutFailure, match=r"worker w gave no sign of life for 6[0-3]\.\d s"):
        await running
    await desk.queue.aclose()


@in_virtual_time
async def test_poll_ends_with_its_time_client_worker_or_queue() -> None:
    desk, line = Desk(), Line()
    assert await desk.take() == []
    assert asyncio.get_running_loop().time() == 20.0
    polls = [asyncio.create_task(desk.take(*each)) for each in (("w",), ("w",), ("cut", line), ("dropped",))]
    await all_blocked()
    assert [poll.done() for poll in polls] == [True, False, False, False], "that of the newer one goes on"
    line.is_cut = True
    desk.queue.worker_gone_nowait("dropped", "exited with code 1")
    running = desk.run()
    assert [[item.rollout_id for item in await poll] for poll in polls] == [[], ["g0/r0"], [], []]
    running.cancel()
    last = asyncio.create_task(desk.take())
    await all_blocked()
    await desk.queue.aclose()
    assert await last == []
    assert (await desk.call("/work/take", b'{"worker": "w"}'))[0] == 422
    request = json.dumps({"worker": "w", "number": 99, **TAKE}).encode()
    assert (await desk.call("/work/take", request))[0] == 503, "no empty answer: it would ask again at once"


@in_virtual_time
async def test_withdrawn_item_is_cancelled_and_its_result_refused() -> None:
    desk = Desk()
    running = desk.run(info={"deep": [1, {"x": None}], "nan": math.nan}, answer="SECRET", timeout_s=9.0)
    (item,) = await desk.take()
    assert (item.rollout_id, item.key, item.seed, item.timeout_s) == ("g0/r0", "key-0", 7, 9.0)
    assert (item.info["deep"], item.answer) == ([1, {"x": None}], None), "an answer is given on demand alone"
    assert math.isnan(item.info["nan"]), "a number that is none is not turned into null"
    running.cancel()
    await all_blocked()
    assert "rollout.timeout_s" in (await desk.alive(item))[item.item_id]
    assert (await desk.result(item, outcome=Outcome(1.0)))[0] == 410
    for key in ("", "\xff", "key-0"):
        assert (await desk.call("/work/take", b"{}", key))[0] == 401
    for value in (object(), "\ud800"):
        with pytest.raises(RolloutFailure, match="prompt p0 cannot be sent to a worker"):
            await desk.run(info={"x": value})
    await desk.queue.aclose()


@in_virtual_time
async def test_last_posted_outcome_counts() -> None:
    desk = Desk(outcomes="posted")
    running = desk.run(3)
    (item,) = await desk.take()
    key = item.outcome_key or ""
    assert len(key) > 20
    assert await desk.post({"reward": 0.25}, key) == (200, None)
    assert await desk.post({"reward": 0.5, "metrics": {"turns": 3}}, key) == (200, None)
    parts = {"turn_rewards": {"a": 1}, "branch_rewards": {"a": 1}}
    for wrong in ({"reward": math.nan}, {"rewrd": 1}, 1, parts, {"metrics": {"x" * 2**18: 1}}):
        assert (await desk.post(wrong, key))[0] in (400, 413)
    assert await desk.post({"reward": 1}, "key-3") == (403, "outcome_refused")
    assert await desk.post({"reward": 1}, "k") == (401, "invalid_api_key")
    await desk.result(item)
    assert await running == Outcome(0.5, {"turns": 3.0})
    for old in (key, "key-3"):
        assert await desk.post({"reward": 1}, old) == (410, "session_ended")
    await desk.queue.aclose()
