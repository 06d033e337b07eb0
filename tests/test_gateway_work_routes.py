"""The lease routes over real HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway_cases import gateway_world, in_loop
from harness_gateway import WORKER_KEY, TestGateway, open_gateway, settled

from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.errors import RolloutFailure
from asyncrl.http import CallRefused
from asyncrl.messages.records import Outcome
from asyncrl.messages.work import (
    MAX_MESSAGE_BYTES,
    MAX_OUTCOME_BYTES,
    Accepted,
    AliveAnswer,
    AliveRequest,
    FailureMessage,
    ResultRequest,
    TakeAnswer,
    TakeRequest,
)


class Asking:
    """A worker that does by hand what Worker does by itself."""

    def __init__(self, gateway: TestGateway, name: str = "w", instance: str = "1") -> None:
        self.caller, self.who, self.number = gateway.worker(name), {"worker": name, "instance": instance}, 0

    async def lease(
        self, *, max_items: int = 1, holding: tuple[str, ...] = (), wait_s: float = 20.0
    ) -> TakeAnswer:
        self.number += 1
        request = TakeRequest(
            **self.who, max_items=max_items, slots=4, number=self.number, holding=list(holding), wait_s=wait_s
        )
        return await self.caller.post("/work/take", request, TakeAnswer, timeout_s=None)

    async def alive(self, *holding: str, is_leaving: bool = False) -> dict[str, str]:
        request = AliveRequest(**self.who, holding=list(holding), is_leaving=is_leaving)
        return (await self.caller.post("/work/alive", request, AliveAnswer, timeout_s=None)).cancel

    async def result(
        self, item_id: str, reward: float | None = 1.0, failure: FailureMessage | None = None
    ) -> None:
        outcome = None if failure or reward is None else Outcome(reward)
        request = ResultRequest(**self.who, item_id=item_id, outcome=outcome, failure=failure)
        await self.caller.post("/work/result", request, Accepted, timeout_s=None)


def play(story: Any, **settings: Any) -> None:
    """Run `story(gateway, tasks, worker)`."""

    async def body() -> None:
        async with open_gateway(**settings) as gateway:
            worker = Asking(gateway)
            try:
                async with asyncio.TaskGroup() as tasks:
                    await story(gateway, tasks, worker)
            finally:
                await worker.caller.aclose()

    asyncio.run(body())


def over_queue(**settings: Any) -> Callable[[Any], Callable[[], None]]:
    """Make a test of a story that takes a gateway, a group of tasks, and a worker."""

    def decorate(story: Any) -> Callable[[], None]:
        return lambda: play(story, **settings)

    return decorate


async def failure_of(running: Coroutine[Any, Any, Outcome]) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        await running
    return caught.value


@over_queue()
async def test_a_worker_that_waits_gets_the_work_as_soon_as_there_is_any_and_its_result_ends_the_run(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    started: list[bool] = []
    polling = tasks.create_task(worker.lease())
    await settled(lambda: gateway.queue.gauges()["harness/workers"] == 1)
    assert not started
    info = {"deep": [1, {"x": None}], "nan": math.nan}
    running = tasks.create_task(
        gateway.run(7, info=info, answer=[1, 2], timeout_s=9.0, started=lambda: started.append(True))
    )
    answer = await polling
    assert started == [True]
    (item,) = answer.items
    assert (item.rollout_id, item.prompt_id, item.key) == ("g7/r0", "p7", "key-7")
    assert (item.seed, item.timeout_s) == (1000, 9.0)
    assert (item.answer, item.info["deep"]) == ([1, 2], [1, {"x": None}])
    assert math.isnan(item.info["nan"]), "a number that is none is not turned into null"
    assert (answer.model, answer.lease_timeout_s) == ("policy", 60.0)
    gauges = gateway.queue.gauges()
    assert [gauges[f"harness/{name}"] for name in ("queued", "leased", "slots")] == [0, 1, 4]
    await worker.result(item.item_id, reward=0.5)
    assert await running == Outcome(0.5)
    with pytest.raises(CallRefused, match="its result was accepted before") as refused:
        await worker.result(item.item_id)
    assert refused.value.status == 410


@in_loop
async def test_the_largest_results_of_a_worker_are_taken_however_small_a_call_must_be() -> None:
    queue = RolloutQueue(worker_key=WORKER_KEY, model="m", lease_timeout_s=60.0, task_seed=lambda work: 0)
    async with gateway_world(extra_routes=queue.routes(), max_body_bytes=2**10) as world:
        gateway = TestGateway(queue, world.url, web.Application())
        worker = Asking(gateway)
        failing = asyncio.ensure_future(gateway.run(0))
        (item,) = (await worker.lease()).items
        long = FailureMessage(error="é" * 4000, rule="é" * 4000, way_out="é" * 4000)
        await worker.result(item.item_id, failure=long)
        assert (await failure_of(failing)).what == "é" * 4000  # type: ignore[arg-type]
        ending = asyncio.ensure_future(gateway.run(1))
        (item,) = (await worker.lease()).items
        rewards = {f"{number:0240}": 0.0 for number in range(1000)}
        result = ResultRequest(**worker.who, item_id=item.item_id, outcome=Outcome(turn_rewards=rewards))
        assert 0.9 * MAX_OUTCOME_BYTES < len(result.model_dump_json()) < MAX_OUTCOME_BYTES
        await worker.caller.post("/work/result", result, Accepted, timeout_s=None)
        assert (await ending).turn_rewards == rewards
        headers = {"Authorization": f"Bearer {WORKER_KEY}"}
        data = io.BytesIO(b" " * (MAX_MESSAGE_BYTES + 1))
        async with world.http.post(world.url + "/work/alive", data=data, headers=headers) as response:
            assert response.status == 413
        await worker.caller.aclose()
        await queue.aclose()


@over_queue()
async def test_without_the_worker_key_nothing_is_given_and_a_session_key_is_not_one(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    running = tasks.create_task(gateway.run(0))
    for key in ("", "wrong", "\xff", "key-0"):
        async with aiohttp.ClientSession() as client:
            for path in ("take", "alive", "result"):
                async with client.post(
                    f"{gateway.url}/work/{path}", headers={"Authorization": f"Bearer {key}"}, json={}
                ) as response:
                    assert response.status == 401
    running.cancel()


@over_queue()
async def test_a_run_that_is_cancelled_is_told_to_its_worker_whose_result_is_refused(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    running = tasks.create_task(gateway.run(0))
    item_id = (await worker.lease()).items[0].item_id
    assert await worker.alive(item_id) == {}
    running.cancel()
    await settled(running.done)
    assert "rollout.timeout_s" in (await worker.alive(item_id))[item_id]
    with pytest.raises(CallRefused, match="taken back"):
        await worker.result(item_id)
    assert "this run has not given it out" in (await worker.alive("of-another-run-3"))["of-another-run-3"]


@over_queue()
async def test_a_prompt_that_is_no_json_fails_its_rollout(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for answer in (object(), loop, "\ud800"):
        assert "prompt p0 cannot be sent to a worker" in str(await failure_of(gateway.run(0, answer=answer)))
    assert gateway.queue.gauges()["harness/queued"] == 0


async def post_outcome(gateway: TestGateway, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client:
        async with client.post(
            gateway.url + path, data=json.dumps(body), headers={"Authorization": f"Bearer {key}"}
        ) as response:
            return response.status, await response.json()


@over_queue(outcomes="posted")
async def test_a_program_posts_its_outcome_with_a_key_for_that_alone_and_the_last_one_counts(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    running = tasks.create_task(gateway.run(3))
    (item,) = (await worker.lease()).items
    item_id, key = item.item_id, item.outcome_key or ""
    assert len(key) > 20
    assert await post_outcome(gateway, "/v1/outcome", {"reward": 0.25}, key) == (200, {})
    last = {"reward": 0.5, "metrics": {"turns": 3}}
    assert (await post_outcome(gateway, f"/s/{key}/v1/outcome", last))[0] == 200
    for body in (
        {"reward": math.nan},
        {"rewrd": 1},
        1,
        {"turn_rewards": {"a": 1}, "branch_rewards": {"a": 1}},
        {"metrics": {"x" * 2**18: 1}},
    ):
        status, answer = await post_outcome(gateway, "/v1/outcome", body, key)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, answer = await post_outcome(gateway, "/v1/outcome", {"reward": 1}, "key-3")
    assert (status, answer["error"]["code"]) == (403, "outcome_refused")
    assert "This key samples and sets no reward" in answer["error"]["message"]
    status, answer = await post_outcome(gateway, "/v1/outcome", {"reward": 1}, "worker-key")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    await worker.result(item_id, reward=None)
    assert await running == Outcome(0.5, {"turns": 3.0})
    for old in (key, "key-3"):
        status, answer = await post_outcome(gateway, "/v1/outcome", {"reward": 1}, old)
        assert (status, answer["error"]["code"]) == (410, "session_ended")


@pytest.mark.parametrize("outcomes", ["returned", "none"])
def test_where_no_outcome_is_posted_there_is_no_key_for_it_and_a_session_key_is_told_why(
    outcomes: str,
) -> None:
    async def story(gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking) -> None:
        running = tasks.create_task(gateway.run(3))
        (item,) = (await worker.lease()).items
        assert item.outcome_key is None
        status, answer = await post_outcome(gateway, "/v1/outcome", {"reward": 1}, "key-3")
        assert (status, f"generator.outcomes={outcomes}" in answer["error"]["message"]) == (403, True)
        await worker.result(item.item_id, reward=None)
        assert await running == Outcome()

    play(story, outcomes=outcomes)


@over_queue()
async def test_polls_end_when_the_queue_is_closed(
    gateway: TestGateway, tasks: asyncio.TaskGroup, worker: Asking
) -> None:
    polling = tasks.create_task(worker.lease())
    await settled(lambda: gateway.queue.gauges()["harness/workers"] == 1)
    await gateway.queue.aclose()
    assert (await polling).items == []
    with pytest.raises(CallRefused, match="the run ends") as refused:
        await worker.lease()  # no empty answer: it would ask again at once
    assert refused.value.status == 503
