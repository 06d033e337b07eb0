"""Commits of VllmServer against all that happens meanwhile, on a scripted vLLM and the virtual clock: each
race and fault in turn.
"""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import DECODE_S, TRANSIT_S, FakeVllm
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_commit_cases import (
    MODES,
    PROMPT,
    SLOTS,
    check_logprobs,
    lost,
    manifest,
    publish,
    request,
    server_over,
)

from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineError, EngineLost
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import GenerateChunk
from asyncrl.messages.records import Completion, SamplingRequest
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.testing.virtual_time import all_blocked, run_virtual


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("interrupt", MODES)
def test_a_request_that_reaches_vllm_after_the_pause_has_tokens_of_the_new_weights_alone(
    interrupt: Interrupt, is_streamed: bool
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        await server.generate_segment(request())  # its prompt is in the cache of version 0 from here on
        fake.transit_s = 0.5
        async with asyncio.TaskGroup() as tasks:
            told: list[GenerateChunk] = []
            late = tasks.create_task(
                server.generate_segment(
                    request("late", max_tokens=30), on_chunk=told.append if is_streamed else None
                )
            )
            await all_blocked()
            fake.transit_s = TRANSIT_S
            # With abort the commit waits until it can end it; else it goes on in vLLM, sent under the old
            # version and begun under the new.
            await publish(server, 1, interrupt)
        answer = late.result()
        assert not told, "nobody knew yet whose they were"
        if interrupt == "abort" or is_streamed:
            assert (answer.token_ids, answer.finish_reason) == ([], "abort")
        elif interrupt == "keep_kv":
            assert (answer.token_ids, answer.finish_reason) == ([], "abort"), (
                "it began over blocks of the old weights"
            )
        else:
            assert [span.version for span in answer.version_spans] == [1]
            assert len(answer.token_ids) == 30
        check_logprobs(answer)

    run_virtual(story())


@pytest.mark.parametrize("interrupt", MODES)
def test_requests_that_come_during_a_commit_are_sent_after_it(interrupt: Interrupt) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(server.generate_segment(request(max_tokens=50)))
            await asyncio.sleep(10 * DECODE_S)
            commit = tasks.create_task(publish(server, 1, interrupt))
            await all_blocked()
            queued = tasks.create_task(server.generate_segment(request("q")))
            aborted = tasks.create_task(server.generate_segment(request("r")))
            await all_blocked()
            assert await server.abort(["r"]) == ["r"]
            assert (await server.health()).num_queued >= 1
        assert aborted.result().token_ids == []
        assert [span.version for span in queued.result().version_spans] == [1]
        assert commit.result().num_interrupted == (0 if interrupt == "wait" else 1)
        assert [span.version for span in running.result().version_spans] == (
            [0, 1] if interrupt.startswith("keep") else [0]
        )

    run_virtual(story())


@pytest.mark.parametrize("interrupt", MODES)
def test_tokens_of_weights_whose_canary_fails_never_leave_and_the_load_is_repeated(
    interrupt: Interrupt,
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        warnings: list[str] = []
        server = server_over(fake, warnings=warnings)
        await server.ready(10.0)
        pool = EnginePool([server], slots=SLOTS)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(pool.generate(SamplingRequest(f"{i}", PROMPT, 60, 1.0, seed=i)))
                for i in range(SLOTS)
            ]
            await asyncio.sleep(10 * DECODE_S)
            fake.wrong_loads = [33.0]
            await publish(server, 1, interrupt)
        assert len(warnings) == 1
        assert "the next token has logprob -0.340000, the trainer says -0.020000" in warnings[0]
        assert "loading them again, 1 of 1" in warnings[0]
        assert (server.policy_version, fake.label, fake.weights) == (1, "1#1", 1.0)
        for task in running:
            assert len(task.result().token_ids) == 60
            check_logprobs(task.result())

    run_virtual(story())


@pytest.mark.parametrize("interrupt", ["keep", "keep_kv"])
def test_streams_are_told_what_is_certain_and_resumed_by_the_pool_where_requests_are_kept(
    interrupt: Interrupt,
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        pool = EnginePool([server], slots=SLOTS)
        told: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(
                pool.generate(SamplingRequest("s", PROMPT, 60, 1.0), on_tokens=told.extend)
            )
            kept = tasks.create_task(pool.generate(SamplingRequest("k", PROMPT, 60, 1.0, seed=1)))
            await asyncio.sleep(20 * DECODE_S)
            assert 15 <= len(told) <= 20
            await publish(server, 1, interrupt)
        assert tuple(told) == streamed.result().token_ids
        assert [span.version for span in streamed.result().version_spans] == [0, 1]
        check_logprobs(streamed.result())
        assert (streamed.result().num_interruptions, kept.result().num_interruptions) == (1, 0)

    run_virtual(story())


@pytest.mark.parametrize("interrupt", MODES)
def test_the_canary_has_a_slot_though_all_are_taken_and_more_wait(interrupt: Interrupt) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        pool = EnginePool([server], slots=2 * SLOTS)
        async with asyncio.TaskGroup() as tasks:
            max_tokens = 20 if interrupt == "wait" else 900
            running = [
                tasks.create_task(pool.generate(SamplingRequest(f"{i}", PROMPT, max_tokens, 1.0)))
                for i in range(2 * SLOTS)
            ]
            await asyncio.sleep(10 * DECODE_S)
            started = asyncio.get_running_loop().time()
            await publish(server, 1, interrupt)
            assert asyncio.get_running_loop().time() - started < 1.0
        assert fake.max_running == SLOTS
        for task in running:
            assert len(task.result().token_ids) == max_tokens

    run_virtual(story())


def test_a_push_in_chunks_into_a_sleeping_engine_is_checked_when_it_wakes() -> None:
    def chunk(version: int, index: int, *, is_last: bool = False) -> ExportChunkResponse:
        return ExportChunkResponse(
            version=version,
            index=index,
            path="/dev/shm/c",
            digest=f"d{index}",
            num_tensors=1,
            num_bytes=8,
            is_last=is_last,
            whole_digest="whole" if is_last else "",
            canary=manifest(version).canary if is_last else None,
        )

    async def turn(server: VllmServer, version: int) -> None:
        await server.sleep(["kv", "weights"])
        await server.wake(["weights"])
        assert [
            await server.load_chunk(chunk(version, 0)),
            await server.load_chunk(chunk(version, 1, is_last=True)),
        ] == ["d0", "d1"]
        assert (await server.commit(version, "whole", "abort")).version == version
        assert (await server.health()).asleep == ["kv"]
        await server.wake(["kv"])

    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        with pytest.raises(EngineError, match="over weights that are served"):
            await server.load_chunk(chunk(1, 0))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(server.generate_segment(request(max_tokens=500)))
            await asyncio.sleep(5 * DECODE_S)
            slept = tasks.create_task(server.sleep(["weights", "kv"]))
            await all_blocked()
            waits = tasks.create_task(server.generate_segment(request("w")))
            await slept
            assert running.result().finish_reason == "abort"
            await turn(server, 1)
        assert [span.version for span in waits.result().version_spans] == [1]
        check_logprobs(waits.result())
        await publish(server, 2)
        assert (await server.sleep([])).seconds == 0.0
        fake.wrong_loads = [7.0]
        with pytest.raises(EngineError, match="does not compute with the weights of policy_version 3"):
            await turn(server, 3)
        assert isinstance(await lost(server.generate_segment(request())), EngineLost)

    run_virtual(story())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_when_every_token_is_of_the_version_that_it_says(data: st.DataObject) -> None:
    modes: list[Interrupt] = data.draw(
        st.lists(st.sampled_from(["abort", "keep", "wait"]), min_size=1, max_size=4)
    )
    starts = data.draw(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=10)
    )
    waits = data.draw(st.lists(st.integers(0, 30), min_size=len(modes), max_size=len(modes)))
    wrong = data.draw(st.lists(st.booleans(), min_size=len(modes), max_size=len(modes)))
    aborts = data.draw(st.lists(st.integers(0, 90), max_size=4))

    async def story() -> None:
        fake = FakeVllm(slots=3)
        fake.transit_s = data.draw(st.sampled_from([0.0, 0.004, 0.03]))
        server = server_over(fake)
        await server.ready(10.0)
        pool = EnginePool([server], slots=6)
        told: dict[int, list[int]] = {index: [] for index in range(len(starts))}

        async def one(index: int, start: int, max_tokens: int, is_streamed: bool) -> Completion:
            await asyncio.sleep(start * DECODE_S)
            asked = SamplingRequest(f"{index}", PROMPT, max_tokens, 1.0, seed=index)
            return await pool.generate(asked, on_tokens=told[index].extend if is_streamed else None)

        async def abort_at(step: int) -> None:
            await asyncio.sleep(step * DECODE_S)
            await server.abort(None)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(index, *how)) for index, how in enumerate(starts)]
            for step in aborts:
                tasks.create_task(abort_at(step))
            for version, (mode, wait, is_wrong) in enumerate(zip(modes, waits, wrong, strict=True), start=1):
                await asyncio.sleep(wait * DECODE_S)
                fake.wrong_loads = [77.0] if is_wrong else []
                await publish(server, version, mode)
        for index, (task, (_, max_tokens, is_streamed)) in enumerate(zip(running, starts, strict=True)):
            completion = task.result()
            assert len(completion.token_ids) == max_tokens
            assert completion.token_ids == tuple((len(PROMPT) + at) % 50 for at in range(max_tokens)), (
                "none twice, none left out"
            )
            assert not is_streamed or tuple(told[index]) == completion.token_ids
            check_logprobs(completion)
        assert fake.pause is None
        assert not fake.runs

    run_virtual(story())
