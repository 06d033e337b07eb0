"""Abort, resume and failover on the virtual clock change no answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import virtual
from token_cases import completion_of, same_tokens
from weight_cases import publish

from asyncrl.base.errors import EngineError, EngineLost, ErrorBody
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.messages import codec
from asyncrl.messages.records import Completion, VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.testing.virtual_time import all_blocked

DECODE_S = 0.01


def make_request(
    name: str = "r0", max_tokens: int = 20, *, seed: int = 1, key: str = ""
) -> SamplingRequest:
    return SamplingRequest(
        name, (112, 113), max_tokens, temperature=1.0, seed=seed, route_key=key
    )


def make_pool(
    num_fakes: int, *, leaves_lost: bool = False, **values: Any
) -> tuple[EnginePool, list[FakeEngineServer]]:
    values = {"decode_s": DECODE_S} | values
    fakes = [
        FakeEngineServer(f"engine-{index}", **values) for index in range(num_fakes)
    ]
    on_lost = (lambda lost: pool.down_nowait(lost.component)) if leaves_lost else None
    pool = EnginePool(
        [EngineServer(fake) for fake in fakes], slots=fakes[0].slots, on_lost=on_lost
    )
    return pool, fakes


async def uninterrupted(
    request: SamplingRequest, end_fraction: float = 0.0
) -> Completion:
    pool, _ = make_pool(1, end_fraction=end_fraction)
    try:
        return await pool.generate(request)
    finally:
        pool.servers[0].disconnect_nowait()  # close its link


KINDS = ["die", "up", "all", "one", "abort", "keep", "keep_kv", "wait"]


@given(
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 40),
    end_fraction=st.sampled_from([0.0, 0.1]),
    chunk_tokens=st.integers(0, 5),
    num_kept=st.integers(0, 40),
    num_others=st.integers(0, 4),
    events=st.lists(
        st.tuples(st.integers(1, 45), st.integers(0, 1), st.sampled_from(KINDS)),
        max_size=8,
    ),
)
@virtual
async def test_interrupted_completion_is_the_uninterrupted_one(
    seed: int,
    max_tokens: int,
    end_fraction: float,
    chunk_tokens: int,
    num_kept: int,
    num_others: int,
    events: list[tuple[int, int, Any]],
) -> None:
    """Stream unless chunk_tokens is 0. Resume num_kept tokens of an earlier process.
    Queue with other requests.
    """
    request, partial = make_request(max_tokens=max_tokens, seed=seed), None
    expected = await uninterrupted(request, end_fraction)
    num_kept = num_kept if num_kept < len(expected.token_ids) else 0
    if num_kept:
        ids = expected.token_ids[:num_kept]
        logprobs = expected.behaviour_logprobs[:num_kept]
        partial = completion_of(ids, logprobs, [VersionSpan(0, num_kept, 0, engine=0)])
    pool, fakes = make_pool(
        2, leaves_lost=True, slots=2, swap_s=0.003, end_fraction=end_fraction
    )
    for fake in fakes:
        fake.chunk_tokens = chunk_tokens or 1
    told, segments, version = list[int](), list[Any](), 0
    clock = asyncio.get_running_loop().time
    started = clock()

    async def bring_up(index: int) -> None:
        if fakes[index].has_ended.is_set():
            fakes[index].restart()
            pool.servers[index].reset_nowait()
            if version:
                await publish(pool.servers[index], version)
            pool.up_nowait(fakes[index].name)

    async with asyncio.TaskGroup() as tasks:
        on_tokens = told.extend if chunk_tokens else None
        joined = tasks.create_task(
            pool.generate(
                request,
                partial=partial,
                on_segment=segments.append,
                on_tokens=on_tokens,
            )
        )
        others = [
            make_request(f"other {index}", 30, seed=index)
            for index in range(num_others)
        ]
        running = [tasks.create_task(pool.generate(other)) for other in others]
        for after_steps, index, kind in sorted(events):
            await asyncio.sleep(
                max(0.0, after_steps * DECODE_S - 0.005 - (clock() - started))
            )
            if kind == "die":
                fakes[index].die()
                pool.down_nowait(fakes[index].name)
            elif kind == "up":
                await bring_up(index)
            elif kind in ("all", "one"):
                if not fakes[index].has_ended.is_set():
                    await pool.servers[index].abort(
                        None if kind == "all" else [request.request_id]
                    )
            else:
                version += 1
                for server, fake in zip(pool.servers, fakes, strict=True):
                    if not fake.has_ended.is_set():
                        await publish(server, version, interrupt=kind)
        for index in range(2):
            await bring_up(index)
    completion = joined.result()
    covered = [
        index
        for span in completion.sampled.spans
        for index in range(span.start, span.end)
    ]
    assert covered == list(range(len(expected.token_ids)))
    assert same_tokens(
        replace(completion.tokens, spans=()), replace(expected.tokens, spans=())
    )
    assert completion.finish_reason == expected.finish_reason
    assert not chunk_tokens or tuple(told) == completion.token_ids
    assert all(
        one.token_ids == completion.token_ids[: len(one.token_ids)] for one in segments
    )
    assert (
        sum(pool.load.values()),
        {server.policy_version for server in pool.servers},
    ) == (0, {version})
    num_tokens = len(completion.token_ids) - num_kept
    for other, task in zip(others, running, strict=True):
        assert (
            task.result().token_ids
            == (await uninterrupted(other, end_fraction)).token_ids
        )
        num_tokens += len(task.result().token_ids)
    assert pool.gauges()["tokens/generated"] == num_tokens
    assert not any(fake.num_running for fake in fakes)


@virtual
async def test_interrupted_requests_keep_their_slots() -> None:
    pool, fakes = make_pool(2, slots=2)
    requests = [make_request(f"r{index}", 30, seed=index) for index in range(5)]
    pool.down_nowait("engine-1")
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(pool.generate(one)) for one in requests]
        for version, sent in ((1, [5, 0]), (2, [5, 2]), (3, [5, 2])):
            await asyncio.sleep(5.5 * DECODE_S)
            if version == 2:
                pool.up_nowait("engine-1")
            for server in pool.servers:
                await publish(server, version)
            await all_blocked()
            assert [len(fake.requests) for fake in fakes] == sent, (
                "resumed ones are not sent again"
            )
            assert [fake.num_running for fake in fakes] == [2, min(2, sent[1])]
    for request, task in zip(requests, running, strict=True):
        assert task.result().token_ids == (await uninterrupted(request)).token_ids
    counts = [task.result().num_interruptions for task in running]
    assert counts == [4, 4, 1, 1, 0], (
        "r0 and r1 move to engine-1, which takes version 2 after that"
    )


@virtual
async def test_cancelled_request_frees_its_slot() -> None:
    pool, (fake,) = make_pool(1, slots=1)
    cancelled = asyncio.create_task(pool.generate(make_request("slow", 1000)))
    waiting = asyncio.create_task(pool.generate(make_request("next", 3)))
    await asyncio.sleep(10.5 * DECODE_S)
    cancelled.cancel()
    await all_blocked()
    assert (cancelled.cancelled(), fake.num_running) == (True, 1)
    assert len((await waiting).token_ids) == 3
    assert asyncio.get_running_loop().time() == pytest.approx(13.5 * DECODE_S)
    assert pool.load == {"engine-0": 0}


BROKEN = codec.refused_frame(0, 500, ErrorBody(error="no memory", way_out="lower it."))
NO_TOKENS = codec.write_frame("sampled", {})


@virtual
async def test_a_bad_answer_is_an_error_and_no_loss() -> None:
    pool, (fake,) = make_pool(1)
    for frame, says in (
        (BROKEN, r"no memory.\n  Way out: lower it."),
        (b"<html>", "invalid answer to /link: not a frame of 6 bytes"),
        (NO_TOKENS, "invalid answer to /link: 'ids'"),
    ):
        fake.scripted = frame
        with pytest.raises(EngineError, match=says) as caught:
            await pool.generate(make_request())
        assert not isinstance(caught.value, EngineLost)


@virtual
async def test_question_of_a_lost_engine_goes_to_another() -> None:
    pool, _ = make_pool(2, leaves_lost=True)
    asked = list[str]()

    async def call(server: Any) -> str:
        asked.append(server.name)
        await asyncio.sleep(1.0)
        if asked == ["engine-0", "engine-1"] and server.name == "engine-0":
            raise EngineLost("engine-0", "it died")
        return f"answer of {server.name}"

    first, second = await asyncio.gather(pool.ask("x", call), pool.ask("x", call))
    assert {first, second} == {"answer of engine-1"}
    assert asked == ["engine-0", "engine-1", "engine-1"]
    assert pool.load == {"engine-0": 0, "engine-1": 0}
    pool.down_nowait("engine-1")
    late = asyncio.ensure_future(pool.ask("x", call))
    await asyncio.sleep(5.0)
    assert not late.done()
    pool.up_nowait("engine-0")
    assert await late == "answer of engine-0"


class SilentTeacher(FakeEngineServer):
    async def _handle(self, path: str, body: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.extension("scoring")
@virtual
async def test_silent_teacher_is_lost_after_its_limit() -> None:
    from asyncrl.extensions.scoring.teacher import Teacher
    from asyncrl.extensions.scoring.teacher_config import TeacherConfig
    from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse

    fake: Any = SilentTeacher("teacher")
    teacher = Teacher(fake, TeacherConfig(path="m"))
    request = ScoreRequest(token_ids=[1, 2], start=1, temperature=1.0)
    with pytest.raises(EngineLost, match="no answer within 120.0 s"):
        await teacher.call("/score", request, ScoreResponse)
    assert asyncio.get_running_loop().time() == 120.0
