"""Work leases over the routes, without a socket: random histories, and silent workers
on a virtual clock.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from typing import Any

import pytest
from gateway_cases import in_virtual_time
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from late_cases import Desk, Line

from asyncrl.base.errors import RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.config import GeneratorConfig
from asyncrl.config.generator_config import Outcomes
from asyncrl.messages import worker_api as shapes
from asyncrl.messages.records import Outcome
from asyncrl.testing.virtual_time import all_blocked, stand_still

WORKERS = st.sampled_from("abc")


class QueueHistory(RuleBasedStateMachine):
    """Workers ask, lose answers on the way, finish, repeat themselves, finish others'
    work, leave; runs are withdrawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.desk = self.does(self.opened())
        self.runs: dict[str, asyncio.Task[Outcome]] = {}
        self.waiting: list[str] = []
        """Names of queued rollouts."""
        """Labels by rollout."""
        self.held: dict[str, str] = {}
        """Worker by rollout."""
        self.items: dict[str, shapes.WorkItem] = {}

    async def opened(self) -> Desk:
        return Desk()

    def does(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def teardown(self) -> None:
        self.does(self.desk.queue.aclose())
        self.does(self.cancelled(*self.runs.values()))
        self.loop.close()

    async def cancelled(self, *runs: asyncio.Task[Outcome]) -> None:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    def drawn(self, data: st.DataObject) -> tuple[str, shapes.WorkItem]:
        return data.draw(
            st.sampled_from(sorted(self.items.items(), key=lambda pair: pair[0]))
        )

    @rule()
    def add(self) -> None:
        async def begin() -> asyncio.Task[Outcome]:
            run = self.desk.run(len(self.runs))
            await asyncio.sleep(0)
            return run

        name = f"g{len(self.runs)}/r0"
        self.runs[name] = self.does(begin())
        self.waiting.append(name)

    @rule(worker=WORKERS, data=st.data(), max_items=st.integers(1, 3))
    def ask(self, worker: str, data: st.DataObject, max_items: int) -> None:
        mine = [name for name, owner in self.held.items() if owner == worker]
        holding = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        lost = [name for name in mine if name not in holding]
        for name in lost:
            del self.held[name]
        self.waiting = lost + self.waiting
        asked = {
            "max_items": max_items,
            "wait_s": 0.0,
            "holding": [self.items[name].item_id for name in holding],
        }
        taken = self.does(self.desk.take(worker, **asked))
        names = [item.rollout_id for item in taken]
        assert names == self.waiting[:max_items], "first in, first out"
        assert (
            self.does(self.desk.take(worker, **asked, number=self.desk.number)) == []
        ), "it came late"
        self.items |= {item.rollout_id: item for item in taken}
        self.waiting = [name for name in self.waiting if name not in names]
        self.held |= dict.fromkeys(names, worker)

    @precondition(lambda self: self.items)
    @rule(worker=WORKERS, data=st.data(), fails=st.booleans())
    def result(self, worker: str, data: st.DataObject, fails: bool) -> None:
        name, item = self.drawn(data)
        said = (
            {"failure": shapes.FailureBody(error="no", kind=FailureKind.DISK_FULL)}
            if fails
            else {"outcome": Outcome(metrics={"turns": 2.0})}
        )
        status, _ = self.does(self.desk.result(item.item_id, worker, **said))
        if self.held.get(name) != worker:
            assert status == 410
            return
        assert status == 200
        (end,) = self.does(asyncio.gather(self.runs[name], return_exceptions=True))
        assert str(end) == "no." if fails else end == Outcome(metrics={"turns": 2.0})
        del self.held[name]

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)))
        self.does(self.cancelled(self.runs[name]))
        self.waiting = [each for each in self.waiting if each != name]
        owner = self.held.pop(name, None)
        if owner is not None:
            item_id = self.items[name].item_id
            assert self.does(self.desk.alive(item_id, worker=owner)) == [item_id]

    @rule(worker=WORKERS)
    def worker_leaves(self, worker: str) -> None:
        self.does(self.desk.alive(worker=worker, is_leaving=True))
        for name in [name for name, owner in self.held.items() if owner == worker]:
            del self.held[name]
            (end,) = self.does(asyncio.gather(self.runs[name], return_exceptions=True))
            assert isinstance(end, RolloutFailure)

    @invariant()
    def every_rollout_is_queued_held_or_over(self) -> None:
        assert {name for name, run in self.runs.items() if not run.done()} == {
            *self.waiting,
            *self.held,
        }
        assert self.desk.queue.gauges()["harness/queued"] == len(self.waiting)


TestQueueHistory = QueueHistory.TestCase
TestQueueHistory.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None
)


@in_virtual_time
async def test_run_names_workers_without_room() -> None:
    desk = Desk()
    assert await desk.take("full", max_items=0, busy="9 MiB of disk are free") == []
    assert "worker full takes none: 9 MiB of disk are free" in desk.queue.what_runs()
    await desk.queue.aclose()


@pytest.mark.slow
@in_virtual_time
async def test_200_workers_of_64_rollouts() -> None:
    """Workers die, and their work is queued again by its caller."""
    draw = random.Random(0)
    desk = Desk(lease_timeout_s=30.0)
    loop = asyncio.get_running_loop()
    most = dict[str, int]()

    async def work(name: str, *, dies: bool) -> None:
        ends = dict[str, float]()
        until_s = draw.uniform(50.0, 100.0) if dies else math.inf
        while loop.time() < until_s:
            for item_id in [key for key, end_s in ends.items() if end_s <= loop.time()]:
                del ends[item_id]
                await desk.result(item_id, name, outcome=Outcome(1.0))
            asked = {"max_items": 64 - len(ends), "wait_s": 2.0}
            for item in await desk.take(name, holding=[*ends], **asked):
                ends[item.item_id] = loop.time() + draw.lognormvariate(3.0, 1.0)
            most[name] = max(most.get(name, 0), len(ends))
            # A full worker's request is a heartbeat, which does not wait.
            await asyncio.sleep(1.0)

    async def run(number: int) -> int:
        for tries in range(1, 20):
            ran = desk.run(number)
            (end,) = await asyncio.gather(ran, return_exceptions=True)
            if end == Outcome(1.0):
                return tries
            assert "sent no heartbeat" in str(end)
        raise AssertionError("lost 20 times")

    workers = [
        asyncio.create_task(work(f"w{number}", dies=number % 10 == 0))
        for number in range(200)
    ]
    tries = await asyncio.gather(*map(run, range(200 * 64)))
    assert max(tries) > 1
    assert sorted(most.values())[100] == 64, "the workers were full"
    gauges = desk.queue.gauges()
    assert gauges["harness/queued"] == 0
    assert gauges["harness/lost"] == sum(tries) - len(tries)
    for worker in workers:
        worker.cancel()
    await desk.queue.aclose()


@in_virtual_time
async def test_rewards_come_only_from_the_configured_source() -> None:
    said, parts = Outcome(1.0, {"b": 2.0}), Outcome(turn_rewards={"chatcmpl-0": 1.0})
    states = {"turn_states": {"chatcmpl-0": "start"}}
    sources: list[tuple[Outcomes, Outcome, Outcome]] = [
        ("returned", said, said),
        ("returned", parts, parts),
        ("none", said, Outcome(metrics={"b": 2.0})),
        ("none", parts, Outcome()),
        ("none", Outcome(1.0, **states), Outcome(**states)),
        ("posted", Outcome(roles={"a7": "a"}), Outcome(0.5, roles={"a7": "a"})),
        ("posted", said, Outcome(0.5, {"b": 2.0})),
    ]
    for outcomes, returned, counted in sources:
        desk = Desk(harnesses=[GeneratorConfig(remote=True, outcomes=outcomes)])
        running = desk.run()
        (item,) = await desk.take()
        if outcomes == "posted":
            assert await desk.post({"reward": 0.5}, item.outcome_key or "") == (
                200,
                None,
            )
        await desk.result(item.item_id, outcome=returned)
        await desk.queue.aclose()
        assert await running == counted


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
        assert await desk.alive(item.item_id, worker="lively") == []
        assert silent.done() == (number > 0)
    with pytest.raises(
        RolloutFailure,
        match=r"silent sent no heartbeat for gateway.lease_timeout_s=60.0",
    ):
        await silent
    assert [
        desk.queue.gauges()[f"harness/{name}"]
        for name in ("workers", "lost", "unseen_s")
    ] == [1, 1, 0.0]
    assert await desk.result(item.item_id, "lively", outcome=Outcome(1.0)) == (200, {})
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
        await asyncio.sleep(0.3)  # messages that came during the wait are read
        assert await desk.alive(item.item_id) == []
    with pytest.raises(RolloutFailure, match="worker w sent no heartbeat"):
        await running
    await desk.queue.aclose()


@in_virtual_time
async def test_poll_ends_with_its_time_client_worker_or_queue() -> None:
    desk, line = Desk(), Line()
    assert await desk.take() == []
    assert asyncio.get_running_loop().time() == 20.0
    polls = [
        asyncio.create_task(desk.take(*each))
        for each in (("w",), ("w",), ("cut", line), ("dropped",))
    ]
    await all_blocked()
    assert [poll.done() for poll in polls] == [True, False, False, False], (
        "the newer lease continues"
    )
    line.is_cut = True
    desk.queue.worker_gone_nowait("dropped", "exited with code 1")
    running = desk.run()
    assert [[item.rollout_id for item in await poll] for poll in polls] == [
        [],
        ["g0/r0"],
        [],
        [],
    ]
    running.cancel()
    last = asyncio.create_task(desk.take())
    await all_blocked()
    await desk.queue.aclose()
    assert await last == []
    assert (await desk.call("/work/take", b'{"worker": "w"}'))[0] == 422


@in_virtual_time
async def test_withdrawn_item_is_cancelled_and_its_result_refused() -> None:
    desk = Desk()
    running = desk.run(
        info={"deep": [1, {"x": None}], "nan": math.nan}, answer="SECRET", timeout_s=9.0
    )
    (item,) = await desk.take()
    assert (item.rollout_id, item.key, item.seed, item.timeout_s) == (
        "g0/r0",
        "key-0",
        7,
        9.0,
    )
    assert (item.info["deep"], item.answer) == ([1, {"x": None}], None), (
        "an answer is given only on demand"
    )
    assert math.isnan(item.info["nan"]), "a number that is none is not turned into null"
    running.cancel()
    await all_blocked()
    assert await desk.alive(item.item_id) == [item.item_id]
    assert (await desk.result(item.item_id, outcome=Outcome(1.0)))[0] == 410
    for key in ("", "\xff", "key-0"):
        assert (await desk.call("/work/take", b"{}", key))[0] == 401
    for value in (object(), "\ud800"):
        with pytest.raises(
            RolloutFailure, match="prompt p0 cannot be sent to a worker"
        ):
            await desk.run(info={"x": value})
    await desk.queue.aclose()


@in_virtual_time
async def test_last_posted_outcome_counts(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(harnesses=[GeneratorConfig(remote=True, outcomes="posted")])
    running = desk.run(3)
    (item,) = await desk.take()
    key = item.outcome_key or ""
    assert len(key) > 20
    for _ in range(2):
        assert await desk.post({"reward": 0.25}, key) == (200, None)
    assert not caplog.text
    assert await desk.post({"reward": 0.5, "metrics": {"turns": 3}}, key) == (200, None)
    assert re.search("newest .* counts, .*0.5.* instead of .*0.25", caplog.text)
    for wrong in ({"reward": math.nan}, {"rewrd": 1}, 1, {"metrics": {"x" * 2**18: 1}}):
        assert (await desk.post(wrong, key))[0] in (400, 413)
    assert await desk.post({"reward": 1}, "key-3") == (401, "invalid_api_key"), (
        "it only samples"
    )
    await desk.result(item.item_id)
    assert await running == Outcome(0.5, {"turns": 3.0})
    assert await desk.post({"reward": 1}, key) == (401, "invalid_api_key")
    await desk.queue.aclose()


@in_virtual_time
async def test_larger_messages_are_refused_unread() -> None:
    desk = Desk(harnesses=[GeneratorConfig(remote=True, outcomes="posted")])
    running = desk.run()
    (item,) = await desk.take()
    most = shapes.MAX_MESSAGE_BYTES
    for path, key, size in (
        ("/work/take", "k", most),
        ("/work/result", "k", most),
        ("/v1/outcome", item.outcome_key or "", shapes.MAX_OUTCOME_BYTES),
    ):
        assert (await desk.call(path, b" " * size, key))[0] in (400, 422), (
            "it is read, and is not JSON"
        )
        assert (await desk.call(path, b" " * (size + 1), key))[0] == 413
    running.cancel()
    await desk.queue.aclose()


@in_virtual_time
async def test_answer_goes_to_workers_that_may_have_it() -> None:
    for is_given, answer in ((False, None), (True, "42")):
        desk = Desk(harnesses=[GeneratorConfig(remote=True, give_answer=is_given)])
        running = desk.run()
        (item,) = await desk.take()
        assert item.answer == answer
        running.cancel()
        await desk.queue.aclose()
