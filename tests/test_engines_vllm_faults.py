"""What can go wrong with a vLLM server, and what is left of it, on a scripted one and the virtual clock: each
fault of a commit in turn; what is refused at the start, and of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_vllm import (
    DECODE_S,
    MODES,
    SLOTS,
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

from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.sampling import joint_watch
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import ConfigError, EngineError, EngineLost, RequestRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import GenerateResponse
from asyncrl.testing.virtual_time import all_blocked, run_virtual

PHASES = ["/pause", "/abort_requests", "asyncrl_load", "/update_weight_version", "/resume"]


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
def test_a_canary_that_fails_for_good_ends_the_commit_and_what_ran_goes_on_in_another_process(
    interrupt: Interrupt,
) -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        told: list[bool] = []

        def on_lost(error: EngineLost) -> None:
            told.append(error.is_told)
            pool.down_nowait(error.room)
            server.cut_nowait()

        pool = EnginePool([server], slots=SLOTS, on_lost=on_lost)
        fake.wrong_loads = [2.0, 3.0]
        async with asyncio.TaskGroup() as tasks:
            running = some(tasks, pool, SLOTS, 100)
            await asyncio.sleep(5 * DECODE_S)
            says = r"engine-0: does not compute with the weights of policy_version 1 .*2 of 2 attempts"
            with pytest.raises(EngineError, match=says) as caught:
                await publish(server, 1, interrupt)
            assert not isinstance(caught.value, EngineLost)
            assert "weight_sync.canary_limit=0.001" in str(caught.value)
            assert (server.policy_version, fake.pause) == (0, None)
            await all_blocked()
            assert told == [False, True, True, True], "its supervisor learns of it"
            assert (await lost(server.generate_segment(request()))).is_told
            fake.restart()
            server.renew_nowait()
            await server.ready(10.0)
            pool.up_nowait("engine-0")
        check_all(running, 100)

    play(story)


def plant_a_stale_cache(fake: FakeVllm) -> None:
    fake.ignores_salt = fake.keeps_cache = True
    fake.cache = {(None, prompt): kv for (_, prompt), kv in fake.cache.items()}


def plant_a_wrong_label(fake: FakeVllm) -> None:
    fake.ignored.add("/update_weight_version")


def plant_a_load_that_does_nothing(fake: FakeVllm) -> None:
    fake.wrong_loads = [fake.weights] * 2


@pytest.mark.parametrize("plant", [plant_a_stale_cache, plant_a_wrong_label, plant_a_load_that_does_nothing])
def test_what_answers_200_and_is_wrong_is_caught_and_not_announced(plant: Any) -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        await publish(server, 1)
        plant(fake)
        with pytest.raises(EngineError, match="does not compute with the weights of policy_version 2"):
            await publish(server, 2)
        assert server.policy_version == 1

    play(story)


def test_without_a_canary_a_wrong_label_is_caught_with_the_next_answer() -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        plant_a_wrong_label(fake)
        await publish(server, 1, has_canary=False)
        with pytest.raises(EngineError, match="v0 .* from 1 .confirmed before. to 1"):
            await server.generate_segment(request())

    play(story)


@pytest.mark.parametrize("interrupt", MODES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancelled", "cut", "dies", "refuses"])
def test_a_commit_that_breaks_off_leaves_no_paused_engine_and_no_token_of_unknown_weights(
    interrupt: Interrupt, phase: str, how: str
) -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        requests = [request(f"{index}", max_tokens=40) for index in range(SLOTS)]
        running = [asyncio.ensure_future(server.generate_segment(one)) for one in requests]
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
        lives = how in ("cancelled", "refuses")
        is_whole = not begun.is_set() or (lives and phase in ("/pause", "/abort_requests"))
        if lives and (how, phase) != ("refuses", "/resume"):
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

    play(story)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_frozen_server_holds_a_commit_until_its_limit_or_until_it_is_given_up(is_cut: bool) -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
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
                task = tasks.create_task(timed_out(server.commit(1, "d1", "abort")))
        assert not is_cut or task.result().is_told
        assert clock() - started < (4.0 if is_cut else 30.0 + 10.0 + 1.0), "a resume has ten seconds"
        assert (await lost(server.generate_segment(request()))).is_told == is_cut

    play(story)


async def timed_out(call: Coroutine[Any, Any, object]) -> Any:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 30.0)


def test_a_second_cancellation_does_not_cut_the_resume_short() -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
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

    play(story)


def test_a_request_that_breaks_is_data_while_the_engine_lives_and_a_loss_when_it_is_dead() -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
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

    play(story)


def test_tokens_of_weights_that_another_run_pushed_are_never_taken_for_a_version_of_this_one() -> None:
    async def story() -> None:
        fake = FakeVllm()
        ours, theirs = server_over(fake, mark="ours"), server_over(fake, mark="theirs", starts_fresh=False)
        await ours.ready(10.0)
        await publish(ours, 1)
        assert versions(await ours.generate_segment(request("before"))) == [1]
        await theirs.ready(10.0)
        await publish(theirs, 1)
        with pytest.raises(EngineError, match="labels that this run never set.*~theirs"):
            await ours.generate_segment(request("after"))
        assert versions(await theirs.generate_segment(request("theirs"))) == [1]

    run_virtual(story())


@pytest.mark.parametrize("is_well", [True, False])
@pytest.mark.parametrize("route", ["asyncrl_stage", "/pause"])
def test_a_server_whose_engine_is_dead_is_lost_whatever_it_is_asked_and_one_that_is_well_only_failed(
    route: str, is_well: bool
) -> None:
    async def story(fake: FakeVllm, server: VllmServer) -> None:
        fake.refused[route] = (500, "EngineCore encountered an issue.")
        if not is_well:
            fake.refused["/health"] = (503, "the engine is dead")
        with pytest.raises(EngineError, match=f"answered 500 to .*{route}") as caught:
            await publish(server, 1, "wait")
        assert (server.policy_version, isinstance(caught.value, EngineLost)) == (0, not is_well)

    play(story)


@pytest.mark.parametrize(
    ("section", "setting", "value", "flag"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "model", "/other", "vllm serve /model"),
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32"),
        ("model_config", "max_model_len", 999, "--max-model-len 1000"),
        ("scheduler_config", "max_num_seqs", SLOTS - 1, f"--max-num-seqs {SLOTS}"),
    ],
)
def test_a_server_with_other_settings_than_the_run_counts_on_is_refused_with_the_flag(
    section: str, setting: str, value: object, flag: str
) -> None:
    async def story() -> None:
        fake = FakeVllm()
        fake.settings[section][setting] = value
        with pytest.raises(ConfigError, match=f"has {setting}=.*\n.*{flag}"):
            await server_over(fake).ready(10.0)

    run_virtual(story())


def test_a_server_that_lacks_a_route_or_has_the_weights_of_another_run_is_refused() -> None:
    async def story() -> None:
        fake = FakeVllm()
        for route, status, says in [
            ("/health", 401, "ASYNCRL_VLLM_KEY"),
            ("/server_info", 404, "VLLM_SERVER_DEV_MODE=1"),
            ("asyncrl_facts", 500, "--worker-extension-cls asyncrl_servers"),
            ("/inference/v1/generate", 404, "--enable-scale-out"),
        ]:
            fake.refused = {route: (status, "no")}
            with pytest.raises(ConfigError, match=says):
                await server_over(fake).ready(10.0)
        fake.refused, fake.label = {}, "4711"
        with pytest.raises(ConfigError, match="weights that another run pushed, under the label 4711"):
            await server_over(fake).ready(10.0)

    run_virtual(story())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 998}, r"3 prompt tokens \+ 998 new ones = 1001, a slot holds 1000"),
        ({"prompt_ids": [2**20]}, "it has token id 1048576; the model knows ids 0..1048575"),
        ({"num_resumed": 4}, "num_resumed=4 of 3"),
        ({"temperature": 0.001}, "temperature 0.001; vLLM samples at 0.01"),
    ],
)
def test_what_vllm_would_do_otherwise_than_asked_is_refused(changes: dict[str, Any], says: str) -> None:
    async def story(_: FakeVllm, server: VllmServer) -> None:
        with pytest.raises(RequestRefused, match=f"engine-0 refused request a: .*{says}"):
            await server.generate_segment(request().model_copy(update=changes))

    play(story)


@pytest.mark.parametrize(
    ("resumed", "new", "stop", "taken"),
    [
        ("hello wo", "rld!", ["world"], 3),  # over the joint: ends with its last letter
        ("hello wo", "rk", ["world", ""], None),
        ("hello", " a long text", ["long"], 7),
        ("hello", " a text that is longer than any stop", ["stop"], None),  # vLLM's to watch
    ],
)
def test_a_stop_string_over_the_joint_of_two_segments_is_found(
    resumed: str, new: str, stop: list[str], taken: int | None
) -> None:
    asked = request(prompt=tuple(map(ord, "ask: " + resumed)))
    asked = asked.model_copy(update={"num_resumed": len(resumed), "stop": stop})
    watch = joint_watch(asked, lambda ids: "".join(map(chr, ids)))
    assert watch is not None
    found = [watch.take([ord(letter)]) for letter in new]
    assert (found.index(1) + 1 if 1 in found else None) == taken
