"""Commits of VllmServer against all that happens meanwhile, on a scripted vLLM and the virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import (
    DECODE_S,
    MODES,
    PROMPT,
    SLOTS,
    TRANSIT_S,
    FakeVllm,
    check_all,
    check_logprobs,
    lost,
    manifest,
    play,
    publish,
    request,
    server_over,
    some,
    versions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

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
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        await server.generate_segment(request())  # its prompt is in the cache of version 0 from here on
        fake.transit_s = 0.5
        async with asyncio.TaskGroup() as tasks:
            told: list[GenerateChunk] = []
            on_chunk = told.append if is_streamed else None
            late = tasks.create_task(
                server.generate_segment(request("late", max_tokens=30), on_chunk=on_chunk)
            )
            await all_blocked()
            fake.transit_s = TRANSIT_S
            # With abort the commit waits until it can end it; else it goes on in vLLM, sent under the old
            # version and begun under the new.
            await publish(server, 1, interrupt)
        answer = late.result()
        assert not told, "nobody knew yet whose they were"
        if (
            interrupt in ("abort", "keep_kv") or is_streamed
        ):  # with keep_kv it began over blocks of the old weights
            assert (answer.token_ids, answer.finish_reason) == ([], "abort")
        else:
            assert (versions(answer), len(answer.token_ids)) == ([1], 30)
        check_logprobs(answer)

    play(story)


@pytest.mark.parametrize("interrupt", MODES)
def test_a_commit_with_all_slots_taken_and_a_canary_that_fails_once_costs_no_token_and_repeats_the_load(
    interrupt: Interrupt,
) -> None:
    warnings: list[str] = []

    async def story(fake: FakeVllm, server: VllmServer) -> None:
        pool, max_tokens = EnginePool([server], slots=2 * SLOTS), 20 if interrupt == "wait" else 300
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            running = some(tasks, pool, 2 * SLOTS, max_tokens)
            await asyncio.sleep(10 * DECODE_S)
            fake.wrong_loads, started = [33.0], clock()
            commit = tasks.create_task(publish(server, 1, interrupt))
            await all_blocked()
            queued = tasks.create_task(server.generate_segment(request("q")))
            aborted = tasks.create_task(server.generate_segment(request("r")))
            await all_blocked()
            assert await server.abort(["r"]) == ["r"]
            assert (await server.health()).num_queued >= 1
            assert (await commit).num_interrupted >= (0 if interrupt == "wait" else SLOTS)
            assert clock() - started < 1.0, "the canary had a slot"
        again = await server.commit(1, "d1", interrupt)
        assert (again.num_interrupted, again.pause_s) == (0, 0.0), "the same again is no error"
        assert (aborted.result().token_ids, versions(queued.result())) == ([], [1])
        (warning,) = warnings
        assert "the next token has logprob -0.340000, the trainer says -0.020000" in warning
        assert "loading them again, 1 of 1" in warning
        assert (server.policy_version, fake.label, fake.weights) == (1, "1#1", 1.0)
        assert fake.max_running == SLOTS
        check_all(running, max_tokens)

    play(story, warnings=warnings)


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
        assert await server.load_chunk(chunk(version, 0)) == "d0"
        assert await server.load_chunk(chunk(version, 1, is_last=True)) == "d1"
        assert (await server.commit(version, "whole", "abort")).version == version
        assert (await server.health()).asleep == ["kv"]
        await server.wake(["kv"])

    async def story(fake: FakeVllm, server: VllmServer) -> None:
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
            await server.wake(["weights"])
            await server.load_chunk(chunk(1, 0))
            with pytest.raises(EngineError, match="staged is nothing"):
                await server.commit(1, "whole", "abort")
            with pytest.raises(
                EngineError, match="chunk 1 of policy_version 1 cannot be loaded: loaded is nothing"
            ):
                await server.load_chunk(chunk(1, 1, is_last=True))
            await turn(server, 1)
        assert versions(waits.result()) == [1]
        check_logprobs(waits.result())
        await publish(server, 2)
        assert (await server.sleep([])).seconds == 0.0
        fake.wrong_loads = [7.0]
        with pytest.raises(EngineError, match="does not compute with the weights of policy_version 3"):
            await turn(server, 3)
        assert isinstance(await lost(server.generate_segment(request())), EngineLost)

    play(story)


@settings(max_examples=60, deadline=None)
@given(
    publishes=st.lists(
        st.tuples(st.sampled_from(["abort", "keep", "wait"]), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    starts=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=10
    ),
    aborts=st.lists(st.integers(0, 90), max_size=4),
    transit_s=st.sampled_from([0.0, 0.004, 0.03]),
)
def test_whatever_happens_when_every_token_is_of_the_version_that_it_says(
    publishes: list[tuple[Interrupt, int, bool]],
    starts: list[tuple[int, int, bool]],
    aborts: list[int],
    transit_s: float,
) -> None:
    async def story() -> None:
        fake = FakeVllm(slots=3)
        fake.transit_s = transit_s
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
            for version, (mode, wait, is_wrong) in enumerate(publishes, start=1):
                await asyncio.sleep(wait * DECODE_S)
                fake.wrong_loads = [77.0] if is_wrong else []
                await publish(server, version, mode)
        for index, (task, (_, max_tokens, is_streamed)) in enumerate(zip(running, starts, strict=True)):
            completion = task.result()
            expected = tuple((len(PROMPT) + at) % 50 for at in range(max_tokens))
            assert completion.token_ids == expected, "none twice, none left out"
            assert not is_streamed or tuple(told[index]) == completion.token_ids
            check_logprobs(completion)
        assert fake.pause is None
        assert not fake.runs

    run_virtual(story())
