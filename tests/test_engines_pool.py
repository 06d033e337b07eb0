"""Abort and resume, on the virtual clock: whatever interrupts, the joined answer is the uninterrupted one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import EngineError, RequestRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.records import Completion, PartialCompletion, SamplingRequest, VersionSpan
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import all_blocked, run_virtual

DECODE_S = 0.01


def make_request(
    name: str = "r0", *, max_tokens: int = 20, seed: int = 1, route_key: str = ""
) -> SamplingRequest:
    return SamplingRequest(
        name, (ord("p"), ord("q")), max_tokens, temperature=1.0, seed=seed, route_key=route_key
    )


def make_pool(fakes: Sequence[FakeEngineServer]) -> EnginePool:
    return EnginePool([EngineServer(fake) for fake in fakes], slots=fakes[0].slots)


async def publish(pool: EnginePool, version: int, digest: str, interrupt: Interrupt = "abort") -> None:
    manifest = ExportResponse(
        version=version, path=f"fake/{digest}", digest=digest, num_tensors=1, num_bytes=1
    )
    for server in pool.servers:
        assert isinstance(server, EngineServer)
        await server.prepare(manifest)
        await server.commit(version, digest, interrupt)


def check_whole(request: SamplingRequest, completion: Completion) -> None:
    """Budget, one logprob a token, spans that cover each token once, versions that do not go back."""
    num_tokens = len(completion.token_ids)
    assert num_tokens <= request.max_tokens
    assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 0)
    assert completion.finish_reason == "stop" or num_tokens == request.max_tokens
    assert len(completion.behaviour_logprobs) == num_tokens
    covered = [index for span in completion.version_spans for index in range(span.start, span.end)]
    assert covered == list(range(num_tokens))
    versions = [span.version for span in completion.version_spans]
    assert versions == sorted(set(versions)), "adjacent spans of one version are merged"


async def uninterrupted(request: SamplingRequest, end_fraction: float = 0.0) -> Completion:
    return await make_pool([FakeEngineServer(end_fraction=end_fraction, decode_s=DECODE_S)]).generate(request)


@given(
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 40),
    end_fraction=st.sampled_from([0.0, 0.1]),
    interruptions=st.lists(
        st.tuples(st.integers(1, 45), st.sampled_from(["all", "one", "abort", "keep", "keep_kv", "wait"])),
        max_size=8,
    ),
)
def test_random_interruptions_leave_the_joined_answer_as_the_uninterrupted_one(
    seed: int, max_tokens: int, end_fraction: float, interruptions: list[tuple[int, str]]
) -> None:
    request = make_request(max_tokens=max_tokens, seed=seed)

    async def story() -> None:
        pool = make_pool(
            [FakeEngineServer(slots=2, decode_s=DECODE_S, swap_s=0.003, end_fraction=end_fraction)]
        )
        server = pool.servers[0]
        assert isinstance(server, EngineServer)
        async with asyncio.TaskGroup() as tasks:
            joined = tasks.create_task(pool.generate(request), name="request")
            version = 0
            for after_steps, kind in sorted(interruptions):
                await asyncio.sleep(
                    max(0.0, after_steps * DECODE_S - 0.005 - asyncio.get_running_loop().time())
                )
                if kind in ("all", "one"):
                    await server.abort(None if kind == "all" else [request.request_id])
                else:
                    version += 1
                    await publish(pool, version, "w0", kind)  # type: ignore[arg-type]
        expected, completion = await uninterrupted(request, end_fraction), joined.result()
        check_whole(request, completion)
        assert completion.token_ids == expected.token_ids
        assert completion.behaviour_logprobs == expected.behaviour_logprobs
        assert completion.finish_reason == expected.finish_reason
        assert pool.oldest_served_version == version
        assert pool.stats().inflight == 0
        assert pool.stats().tokens == len(completion.token_ids)

    run_virtual(story())


def test_new_weights_take_over_from_the_token_after_the_publish() -> None:
    async def story() -> None:
        pool = make_pool([FakeEngineServer(decode_s=DECODE_S)])
        request = make_request(max_tokens=10)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pool.generate(request))
            await asyncio.sleep(4.5 * DECODE_S)
            await publish(pool, 1, "w1")
        old = await uninterrupted(request)
        assert running.result().token_ids[:4] == old.token_ids[:4]
        assert running.result().token_ids[4:] != old.token_ids[4:], "six letters agree by chance once in 3e8"
        assert running.result().version_spans == (VersionSpan(0, 4, 0, 0), VersionSpan(4, 10, 1, 0))

    run_virtual(story())


def test_each_token_carries_the_number_of_the_server_that_sampled_it_whichever_it_moves_to() -> None:
    async def story() -> None:
        fakes = [FakeEngineServer(f"engine-{index}", decode_s=DECODE_S) for index in range(2)]
        pool = EnginePool(
            [EngineServer(fake) for fake in fakes], slots=4, on_lost=lambda lost: pool.down_nowait(lost.room)
        )
        kept = PartialCompletion((ord("a"),), (-1.0,), (VersionSpan(0, 1, 0),))
        async with asyncio.TaskGroup() as tasks:
            moved = tasks.create_task(
                pool.generate(make_request("moved", max_tokens=10), on_tokens=lambda _: None)
            )
            other = tasks.create_task(pool.generate(make_request("other", max_tokens=10)))
            again = tasks.create_task(pool.generate(make_request("again", max_tokens=10), partial=kept))
            await asyncio.sleep(3.5 * DECODE_S)
            await publish(pool, 1, "w1")
            await asyncio.sleep(2.5 * DECODE_S)
            fakes[0].die()
        assert moved.result().version_spans == (
            VersionSpan(0, 3, 0, 0),
            VersionSpan(3, 5, 1, 0),
            VersionSpan(5, 10, 1, 1),
        )
        assert other.result().version_spans == (VersionSpan(0, 3, 0, 1), VersionSpan(3, 10, 1, 1))
        assert again.result().version_spans[0] == VersionSpan(0, 1, 0, -1), "of a process that did not say"
        check_whole(make_request(max_tokens=10), other.result())

    run_virtual(story())


def test_a_cancelled_request_frees_its_slot_at_once_and_tells_the_server() -> None:
    async def story() -> None:
        fake = FakeEngineServer(slots=1, decode_s=DECODE_S)
        pool = make_pool([fake])
        told: list[list[str] | None] = []
        server = pool.servers[0]
        tell = server.abort

        async def abort(request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
            told.append(request_ids)
            return await tell(request_ids, timeout_s=timeout_s)

        server.abort = abort  # type: ignore[method-assign]
        cancelled = asyncio.create_task(pool.generate(make_request("slow", max_tokens=1000)))
        waiting = asyncio.create_task(pool.generate(make_request("next", max_tokens=3)))
        await asyncio.sleep(10.5 * DECODE_S)
        cancelled.cancel()
        await all_blocked()
        assert told == [["slow"]]
        assert fake.num_running == 1
        assert len((await waiting).token_ids) == 3
        assert asyncio.get_running_loop().time() == pytest.approx(13.5 * DECODE_S)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert pool.stats().load == {"engine-0": 0}

    run_virtual(story())


def test_a_server_that_aborts_for_ever_is_an_error_that_names_it() -> None:
    async def story() -> None:
        fake = FakeEngineServer(decode_s=DECODE_S)
        fake.mangle = lambda answer: answer.model_copy(
            update={"token_ids": [], "logprobs": [], "version_spans": [], "finish_reason": "abort"}
        )
        with pytest.raises(
            EngineError, match=r"engine-0: aborted request r0 32 times in a row without a token"
        ) as caught:
            await make_pool([fake]).generate(make_request(max_tokens=2))
        assert "Way out" in str(caught.value)
        assert len(fake.requests) == 32

    run_virtual(story())


def test_a_queued_request_outlives_any_number_of_publishes() -> None:
    async def story() -> None:
        fake = FakeEngineServer(slots=1, decode_s=DECODE_S)
        pool = make_pool([fake])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.generate(make_request("long", max_tokens=200)))
            queued = tasks.create_task(pool.generate(make_request("queued", max_tokens=2)))
            for version in range(1, 101):
                await asyncio.sleep(DECODE_S / 2)
                await pool.servers[0].abort(["queued"])
                await publish(pool, version, "w0")
        assert len(queued.result().token_ids) == 2

    run_virtual(story())


def test_a_refused_request_is_data_and_the_others_go_on() -> None:
    async def story() -> None:
        pool = make_pool([FakeEngineServer(decode_s=DECODE_S, max_length=10)])
        async with asyncio.TaskGroup() as tasks:
            good = tasks.create_task(pool.generate(make_request("good", max_tokens=8)))
            with pytest.raises(
                RequestRefused, match=r"2 prompt tokens, max_tokens=9.*11 tokens do not fit max_length=10"
            ):
                await pool.generate(make_request("bad", max_tokens=9))
        assert len(good.result().token_ids) == 8
        assert pool.stats().inflight == 0

    run_virtual(story())


def test_a_dead_server_is_an_engine_error_with_the_way_out() -> None:
    async def story() -> None:
        fake = FakeEngineServer("engine-7", decode_s=DECODE_S)
        running = asyncio.create_task(make_pool([fake]).generate(make_request()))
        await asyncio.sleep(3.5 * DECODE_S)
        fake.die()
        with pytest.raises(EngineError, match=r"engine-7: \(fake://engine-7\) gave no answer to /generate"):
            await running
        with pytest.raises(EngineError, match="gave no answer to /health"):
            await EngineServer(fake).health()

    run_virtual(story())


def test_least_loaded_servers_come_first_and_the_pool_says_its_load() -> None:
    async def story() -> None:
        fakes = [FakeEngineServer(f"engine-{index}", slots=8, decode_s=DECODE_S) for index in range(3)]
        pool = make_pool(fakes)
        async with asyncio.TaskGroup() as tasks:
            for group in range(3):
                for sample in range(4):
                    tasks.create_task(
                        pool.generate(make_request(f"g{group}/r{sample}", route_key=f"g{group}"))
                    )
            await all_blocked()
            assert pool.stats().load == {"engine-0": 4, "engine-1": 4, "engine-2": 4}
            assert repr(pool) == "<EnginePool 3 servers, 12 in flight, v0>"
        for index, fake in enumerate(fakes):
            assert {request.request_id.split("/")[0] for request in fake.requests} == {f"g{index}"}

    run_virtual(story())


@pytest.mark.parametrize("num_engines", [1, 2, 4])
def test_each_turn_of_a_conversation_reaches_the_engine_of_the_one_before(num_engines: int) -> None:
    num_agents, num_turns = 16, 8

    async def story() -> None:
        fakes = [
            FakeEngineServer(f"engine-{index}", slots=num_agents, decode_s=DECODE_S)
            for index in range(num_engines)
        ]
        pool = make_pool(fakes)

        async def agent(number: int) -> list[VersionSpan]:
            tools, spans = Random(number), list[VersionSpan]()
            for turn in range(num_turns):
                await asyncio.sleep(tools.expovariate(1.0))
                request = make_request(
                    f"g{number}/t{turn}", seed=number * num_turns + turn, route_key=f"g{number}/r0"
                )
                completion = await pool.generate(replace(request, after=spans[-1] if spans else None))
                spans.append(completion.version_spans[-1])
            return spans

        conversations = await asyncio.gather(*(agent(number) for number in range(num_agents)))
        assert all(len({span.engine for span in spans}) == 1 for spans in conversations)
        assert {spans[0].engine for spans in conversations} == set(range(num_engines)), (
            "the least loaded takes a new conversation"
        )
        assert "0 keys" in repr(pool._router), "nothing is left of them"

    run_virtual(story())


def test_new_weights_empty_the_cache_that_a_conversation_had_and_the_least_loaded_engine_takes_it() -> None:
    async def story() -> None:
        fakes = [FakeEngineServer(f"engine-{index}", slots=4, decode_s=DECODE_S) for index in range(2)]
        pool = make_pool(fakes)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.generate(make_request("busy", max_tokens=100)))
            await all_blocked()
            assert fakes[0].num_running == 1
            turn = replace(make_request("turn"), after=VersionSpan(0, 1, version=0, engine=0))
            assert (await pool.generate(turn)).version_spans[0].engine == 0, (
                "its cache counts for more than the load"
            )
            await publish(pool, 1, "w1")
            assert (await pool.generate(turn)).version_spans[0].engine == 1

    run_virtual(story())


@pytest.mark.parametrize("interrupt", ["keep", "wait"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_queues_at_a_server_goes_to_one_that_comes_back_and_what_runs_there_stays(
    interrupt: Interrupt, is_streamed: bool
) -> None:
    async def story() -> None:
        fakes = [FakeEngineServer(f"engine-{index}", slots=3, decode_s=0.1) for index in range(3)]
        pool = make_pool(fakes)
        requests = [
            make_request(f"r{index}", max_tokens=100, seed=index, route_key=f"g{index // 4}")
            for index in range(8)
        ]
        pool.down_nowait("engine-1")
        pool.down_nowait("engine-2")
        told: list[int] = []
        running = [
            asyncio.ensure_future(pool.generate(request, on_tokens=told.extend if is_streamed else None))
            for request in requests
        ]
        await asyncio.sleep(1.05)
        pushing = asyncio.ensure_future(
            publish(pool, 1, "w0", interrupt)
        )  # `wait` grants none of those that queue a slot
        await all_blocked()
        pool.up_nowait("engine-1")
        await pool.balance()
        await all_blocked()
        assert [fake.num_running for fake in fakes] == [3, 3, 0]
        assert [request.request_id for request in fakes[1].requests] == ["r5", "r6", "r7"], "the newest"
        assert pool.stats().load == {"engine-0": 5, "engine-1": 3, "engine-2": 0}
        pool.up_nowait("engine-2")
        await pool.balance()
        await pool.balance()
        await all_blocked()
        assert [fake.num_running for fake in fakes] == [3, 3, 2]
        for request, task in zip(requests, running, strict=True):
            completion = await task
            check_whole(request, completion)
            assert completion.token_ids == (await uninterrupted(request)).token_ids
        await pushing
        assert [len(fake.requests) for fake in fakes] == [8, 3, 2], "nothing that ran was ended for it"
        assert sum(fake.tokens_generated for fake in fakes) == 800, "and nothing was sampled twice"
        assert not any(pool._sent), "nothing is kept of what is over"

    run_virtual(story())


def test_a_server_that_gives_no_answer_does_not_hold_up_the_balance() -> None:
    async def story() -> float:
        fakes = [FakeEngineServer(f"engine-{index}", slots=1) for index in range(2)]
        pool = make_pool(fakes)
        pool.down_nowait("engine-1")
        running = [asyncio.ensure_future(pool.generate(make_request(f"r{index}"))) for index in range(2)]
        await all_blocked()
        fakes[0].freeze()
        pool.up_nowait("engine-1")
        started_s = asyncio.get_running_loop().time()
        await pool.balance()
        for task in running:
            task.cancel()
        took_s = asyncio.get_running_loop().time() - started_s
        await asyncio.wait(running)
        return took_s

    assert run_virtual(story()) == 2.0, "abort_timeout_s"
