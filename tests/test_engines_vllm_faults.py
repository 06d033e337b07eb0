"""What can go wrong in a commit of VllmServer, and what is left of it: a scripted vLLM on the virtual clock,
each fault in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_vllm import DECODE_S, FakeVllm
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
from asyncrl.errors import EngineError, EngineLost, RequestRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import GenerateResponse
from asyncrl.messages.records import SamplingRequest
from asyncrl.testing.virtual_time import run_virtual

PHASES = ["/pause", "/abort_requests", "asyncrl_load", "/update_weight_version", "/resume"]


@pytest.mark.parametrize("interrupt", MODES)
def test_a_canary_that_fails_for_good_ends_the_commit_and_what_ran_is_lost_with_the_process(
    interrupt: Interrupt,
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        fake.wrong_loads = [2.0, 3.0]
        async with asyncio.TaskGroup() as tasks:
            running = (
                tasks.create_task(lost(server.generate_segment(request(max_tokens=500))))
                if interrupt.startswith("keep")
                else None
            )
            await asyncio.sleep(5 * DECODE_S)
            with pytest.raises(
                EngineError,
                match=r"engine-0: does not compute with the weights of policy_version 1 .*2 of 2 attempts",
            ) as caught:
                await publish(server, 1, interrupt)
        assert not isinstance(caught.value, EngineLost)
        assert "weight_sync.canary_limit=0.001" in str(caught.value)
        assert (server.policy_version, fake.pause) == (0, None)
        for error in [
            await lost(server.generate_segment(request())),
            *([running.result()] if running else []),
        ]:
            assert not error.is_told, "whoever supervises it learns of it"
        server.cut_nowait()
        assert (await lost(server.generate_segment(request()))).is_told
        fake.restart()
        server.renew_nowait()
        await server.ready(10.0)
        check_logprobs(await server.generate_segment(request()))

    run_virtual(story())


def plant_a_stale_cache(fake: FakeVllm) -> None:
    fake.ignores_salt = fake.keeps_cache = True
    fake.cache = {(None, prompt): kv for (_, prompt), kv in fake.cache.items()}


def plant_a_wrong_label(fake: FakeVllm) -> None:
    fake.ignored.add("/update_weight_version")


def plant_a_load_that_does_nothing(fake: FakeVllm) -> None:
    fake.wrong_loads = [fake.weights] * 2


@pytest.mark.parametrize("plant", [plant_a_stale_cache, plant_a_wrong_label, plant_a_load_that_does_nothing])
def test_what_answers_200_and_is_wrong_is_caught_and_not_announced(plant: Any) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        await publish(server, 1)
        plant(fake)
        with pytest.raises(EngineError, match="does not compute with the weights of policy_version 2"):
            await publish(server, 2)
        assert server.policy_version == 1

    run_virtual(story())


def test_without_a_canary_a_wrong_label_is_caught_with_the_next_answer() -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        plant_a_wrong_label(fake)
        await publish(server, 1, has_canary=False)
        with pytest.raises(EngineError, match="v0 .* from 1 .confirmed before. to 1"):
            await server.generate_segment(request())

    run_virtual(story())


@pytest.mark.parametrize("interrupt", MODES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancelled", "cut", "dies", "refuses"])
def test_a_commit_that_breaks_off_leaves_no_paused_engine_and_no_token_of_unknown_weights(
    interrupt: Interrupt, phase: str, how: str
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        running = [
            asyncio.ensure_future(server.generate_segment(request(f"{i}", max_tokens=40)))
            for i in range(SLOTS)
        ]
        await asyncio.sleep(5 * DECODE_S)
        what = manifest(1)
        await server.prepare(what)
        begun = asyncio.Event()

        async def hook() -> None:
            begun.set()
            if how == "cut":
                server.cut_nowait()
            if how == "dies":
                fake.die()
            if how == "refuses":
                fake.refused[phase] = (500, "planted")
            if how == "cancelled":
                await asyncio.sleep(0.001)

        fake.hooks[phase] = hook
        commit = asyncio.ensure_future(server.commit(1, what.digest, interrupt))
        await asyncio.wait([commit, asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        if not begun.is_set():
            assert phase == "/abort_requests", "with these modes there may be nothing to abort"
        if how == "cancelled" and begun.is_set():
            commit.cancel()
        await asyncio.wait([commit])
        fake.refused.clear()
        error = None if commit.cancelled() else commit.exception()
        if begun.is_set():
            assert commit.cancelled() if how == "cancelled" else isinstance(error, EngineError), f"{error!r}"
            if how in ("cut", "dies"):
                assert isinstance(error, EngineLost)
                assert error.is_told == (how == "cut")
            assert server.policy_version == 0
        is_whole = not begun.is_set() or (
            how in ("cancelled", "refuses") and phase in ("/pause", "/abort_requests")
        )
        if how != "cut" and how != "dies" and not (how == "refuses" and phase == "/resume"):
            assert fake.pause is None, "it goes on"
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(outcome, GenerateResponse):
                check_logprobs(outcome)
                assert is_whole or all(span.version == 0 for span in outcome.version_spans)
            else:
                assert isinstance(outcome, EngineLost)
                assert not is_whole
        if is_whole:
            check_logprobs(await server.generate_segment(request("after")))
        else:
            assert isinstance(await lost(server.generate_segment(request("after"))), EngineLost)
            fake.restart()
            server.renew_nowait()
            await server.ready(10.0)
            await publish(server, 1, interrupt)
            check_logprobs(await server.generate_segment(request("again")))

    run_virtual(story())


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_frozen_server_holds_a_commit_until_its_limit_or_until_it_is_given_up(is_cut: bool) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        await server.prepare(manifest(1))

        async def freeze() -> None:
            fake.freeze()

        fake.before["asyncrl_load"] = freeze
        clock = asyncio.get_running_loop().time
        started = clock()
        async with asyncio.TaskGroup() as tasks:
            if is_cut:
                task = tasks.create_task(lost(server.commit(1, "d1", "abort")))
                await asyncio.sleep(3.0)
                server.cut_nowait()
            else:
                task = tasks.create_task(timed_out(server.commit(1, "d1", "abort"), 30.0))
        assert not is_cut or task.result().is_told
        assert clock() - started < (4.0 if is_cut else 30.0 + 10.0 + 1.0), "a resume has ten seconds"
        assert (await lost(server.generate_segment(request()))).is_told == is_cut

    run_virtual(story())


async def timed_out(call: Coroutine[Any, Any, object], timeout_s: float) -> Any:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await call


def test_a_second_cancellation_does_not_cut_the_resume_short() -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        await server.prepare(manifest(1))
        resuming = asyncio.Event()

        async def slow() -> None:
            resuming.set()
            await asyncio.sleep(2.0)

        fake.before["/resume"] = slow
        commit = asyncio.ensure_future(server.commit(1, "d1", "abort"))
        await resuming.wait()
        assert fake.pause == "abort"
        for _ in range(3):
            commit.cancel()
            await asyncio.sleep(0.1)
        assert not commit.done()
        await asyncio.wait([commit])
        assert commit.cancelled()
        assert fake.pause is None

    run_virtual(story())


def test_a_request_that_breaks_is_data_while_the_engine_lives_and_a_loss_when_it_is_dead() -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        fake.refused["/inference/v1/generate"] = (500, "planted")
        with pytest.raises(RequestRefused, match="answered 500 to request a .*planted"):
            await server.generate_segment(request())
        fake.refused["/health"] = (503, "")
        assert not (await lost(server.generate_segment(request()))).is_told
        fake.refused.clear()
        fake.gives_nan = True
        with pytest.raises(EngineError, match="logprob nan"):
            await server.generate_segment(request())
        fake.die()
        assert "the connection broke" in str(await lost(server.generate_segment(request())))

    run_virtual(story())


def test_the_pool_leaves_a_server_whose_commit_broke_and_goes_on_at_another() -> None:
    async def story() -> None:
        fakes = [FakeVllm(), FakeVllm()]
        fakes[1].name = "engine-1"
        servers = [server_over(fake) for fake in fakes]
        for server in servers:
            await server.ready(10.0)
        told: list[EngineLost] = []

        def on_lost(error: EngineLost) -> None:
            if not error.is_told:
                told.append(error)
                pool.down_nowait(error.room)
                servers[int(error.room[-1])].cut_nowait()

        pool = EnginePool(servers, slots=SLOTS, on_lost=on_lost)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(pool.generate(SamplingRequest(f"{i}", PROMPT, 100, 1.0))) for i in range(6)
            ]
            await asyncio.sleep(10 * DECODE_S)
            fakes[0].wrong_loads = [5.0, 5.0]
            with pytest.raises(EngineError, match="does not compute"):
                await publish(servers[0], 1, "keep")
        assert [error.room for error in told] == ["engine-0"]
        for task in running:
            assert len(task.result().token_ids) == 100
            check_logprobs(task.result())

    run_virtual(story())


def test_tokens_of_weights_that_another_run_pushed_are_never_taken_for_a_version_of_this_one() -> None:
    async def story() -> None:
        fake = FakeVllm()
        ours, theirs = server_over(fake, mark="ours"), server_over(fake, mark="theirs", starts_fresh=False)
        await ours.ready(10.0)
        await publish(ours, 1)
        assert [span.version for span in (await ours.generate_segment(request("before"))).version_spans] == [
            1
        ]
        await theirs.ready(10.0)
        await publish(theirs, 1)
        with pytest.raises(EngineError, match="labels that this run never set.*~theirs"):
            await ours.generate_segment(request("after"))
        assert [
            span.version for span in (await theirs.generate_segment(request("theirs"))).version_spans
        ] == [1]

    run_virtual(story())


@pytest.mark.parametrize("route", ["asyncrl_drop", "asyncrl_stage", "/pause"])
def test_a_server_whose_engine_is_dead_is_lost_whatever_it_is_asked_and_one_that_is_well_only_failed(
    route: str,
) -> None:
    async def story(is_well: bool) -> EngineError:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        fake.refused[route] = (500, "EngineCore encountered an issue.")
        if not is_well:
            fake.refused["/health"] = (503, "the engine is dead")
        with pytest.raises(EngineError, match=f"answered 500 to .*{route}") as caught:
            await publish(server, 1, "wait")
        assert server.policy_version == 0
        return caught.value

    assert isinstance(run_virtual(story(is_well=False)), EngineLost)
    assert not isinstance(run_virtual(story(is_well=True)), EngineLost)


@pytest.mark.parametrize("on_chunk", [None, lambda _: None])
@pytest.mark.parametrize("wait_s", [0.0, DECODE_S / 2, 5 * DECODE_S])
def test_a_request_whose_caller_is_gone_is_aborted_by_its_name(on_chunk: Any, wait_s: float) -> None:
    async def story() -> None:
        fake = FakeVllm()
        server = server_over(fake)
        await server.ready(10.0)
        running = asyncio.create_task(
            server.generate_segment(request("left", max_tokens=100), on_chunk=on_chunk)
        )
        await asyncio.sleep(wait_s)
        running.cancel()
        await asyncio.wait([running])
        before = len(fake.calls)
        assert await server.abort(["left"]) == ["left"]
        assert fake.calls[before:] == ["/abort_requests"]

    run_virtual(story())
