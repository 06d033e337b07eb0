"""Commits of VllmServer over a scripted vLLM, on the virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_vllm import (
    DECODE_S,
    PROMPT,
    check_logprobs,
    lost,
    manifest,
    publish,
    ready_server,
    request,
    versions,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import virtual

from asyncrl.base.errors import EngineError
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import ROUTING
from asyncrl.messages.trainer_api import ExportChunkResponse
from asyncrl.testing.virtual_time import all_blocked

pytestmark = pytest.mark.extension("vllm")


def chunk(version: int, index: int) -> ExportChunkResponse:
    """Of two."""
    whole = manifest(version).model_dump(
        include={"version", "path", "num_tensors", "num_bytes"}
    )
    last = (
        {"whole_digest": "whole", "canary": manifest(version).canary} if index else {}
    )
    return ExportChunkResponse(
        **whole, index=index, digest=f"d{index}", is_last=bool(index), **last
    )


async def turn(server: VllmServer, version: int) -> None:
    await server.sleep()
    await server.wake(["weights"])
    for index in range(2):
        assert await server.load_chunk(chunk(version, index)) == f"d{index}"
    assert (await server.commit(version, "whole", "abort")).version == version
    assert (await server.health()).asleep == ["kv"]
    await server.wake(["kv"])


@pytest.mark.parametrize(("stays", "route"), [(False, "/sleep"), (True, "/pause")])
@virtual
async def test_failed_sleep_is_repeated(stays: bool, route: str) -> None:
    fake, server = await ready_server()
    server.needed = replace(server.needed, stays=stays)
    fake.refused_routes[route] = (500, "planted")
    with pytest.raises(EngineError, match="planted"):
        await server.sleep()
    fake.refused_routes.clear()
    assert fake.pause is None
    await server.sleep()
    assert fake.pause is not None


@pytest.mark.parametrize("stays", [False, True])
@virtual
async def test_chunked_push_is_checked_at_wake(stays: bool) -> None:
    fake, server = await ready_server()
    server.needed = replace(server.needed, stays=stays)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.generate_segment(request(max_tokens=500)))
        await asyncio.sleep(5 * DECODE_S)
        slept = tasks.create_task(server.sleep())
        await all_blocked()
        waits = tasks.create_task(server.generate_segment(request("w")))
        await slept
        assert running.result().finish_reason == "abort"
        await turn(server, 1)
    assert versions(waits.result()) == [1]
    check_logprobs(waits.result())
    moves = {path.partition("?")[0] for path in fake.calls} & {
        "/sleep",
        "/wake_up",
        "/pause",
        "/resume",
    }
    assert moves == (
        {"/pause", "/resume"} if stays else {"/sleep", "/wake_up", "/resume"}
    )
    fake.wrong_loads = [7.0]
    with pytest.raises(EngineError, match="does not compute with policy_version 2"):
        await turn(server, 2)
    await lost(server.generate_segment(request()))


PUBLISHES = st.tuples(st.sampled_from(["abort", "keep", "wait"]), st.integers(0, 30))
STARTS = st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans())


@settings(max_examples=60)
@given(
    publishes=st.lists(PUBLISHES, min_size=1, max_size=4),
    starts=st.lists(STARTS, min_size=1, max_size=10),
    aborts=st.lists(st.integers(0, 90), max_size=4),
    transit_s=st.sampled_from([0.0, 0.004, 0.03]),
    rejects_paused=st.booleans(),
)
@virtual
async def test_every_token_has_the_version_it_says(
    publishes: list[tuple[Interrupt, int]],
    starts: list[tuple[int, int, bool]],
    aborts: list[int],
    transit_s: float,
    rejects_paused: bool,
) -> None:
    fake, server = await ready_server()
    fake.rejects_paused = rejects_paused
    fake.transit_s, pool = transit_s, EnginePool([server], slots=6)
    told: dict[int, list[int]] = {index: [] for index in range(len(starts))}

    async def one(
        index: int, start: int, max_tokens: int, is_streamed: bool
    ) -> Completion:
        await asyncio.sleep(start * DECODE_S)
        asked = SamplingRequest(f"{index}", PROMPT, max_tokens, seed=index)
        return await pool.generate(
            asked, on_tokens=told[index].extend if is_streamed else None
        )

    async def abort_at(step: int) -> None:
        await asyncio.sleep(step * DECODE_S)
        await server.abort(None)

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(one(index, *how)) for index, how in enumerate(starts)
        ]
        for step in aborts:
            tasks.create_task(abort_at(step))
        for version, (mode, wait) in enumerate(publishes, start=1):
            await asyncio.sleep(wait * DECODE_S)
            await publish(server, version, mode)
    for index, (task, (_, max_tokens, is_streamed)) in enumerate(
        zip(running, starts, strict=True)
    ):
        completion = task.result()
        expected = tuple((len(PROMPT) + at) % 50 for at in range(max_tokens))
        assert completion.token_ids == expected
        assert not is_streamed or tuple(told[index]) == completion.token_ids
        check_logprobs(completion)
        assert versions(completion) == sorted(set(versions(completion)))
    assert (fake.pause, fake.runs) == (None, {})


@pytest.mark.parametrize("interrupt", ["keep", "keep_kv"])
@virtual
async def test_requests_with_experts_are_read_again_as_new_ones(
    interrupt: Interrupt,
) -> None:
    """vLLM would report the experts of the first reading after `keep`."""
    fake, server = await ready_server()
    fake.reports_experts = True
    server.needed = replace(server.needed, returns_routing=True)
    pool = EnginePool([server], slots=6)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pool.generate(request(max_tokens=40)))
        await asyncio.sleep(8 * DECODE_S)
        await publish(server, 1, interrupt)
    completion = running.result()
    assert versions(completion) == [0, 1]
    assert completion.num_interruptions == (interrupt == "keep")
    assert (completion.tokens.columns[ROUTING][1:, 0] == range(42)).all()
