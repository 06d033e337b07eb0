"""Faults, refused settings and refused requests of a scripted vLLM server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fake_vllm import (
    DECODE_S,
    ENV,
    MODEL,
    MODES,
    SLOTS,
    FakeVllm,
    check_logprobs,
    lost,
    publish,
    ready_server,
    request,
    server_over,
    versions,
)
from rollout_cases import virtual

from asyncrl.base.errors import ConfigError, EngineError, EngineLost, RequestRefused
from asyncrl.engines.link import OnChunk
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.vllm.vllm_process import (
    GRAMMARS,
    LOADS_ADAPTERS,
    VllmRequirements,
    check_settings,
)
from asyncrl.extensions.vllm.vllm_sampling import joint_watch
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.tokens import SegmentPart
from asyncrl.testing.virtual_time import all_blocked

pytestmark = pytest.mark.extension("vllm")

PHASES = [
    "/pause",
    "/abort_requests",
    "asyncrl_load",
    "/update_weight_version",
    "/resume",
]


async def another_process(fake: FakeVllm, server: VllmServer) -> None:
    fake.restart()
    server.reset_nowait()
    await server.ready(10.0)


def server_info(folder: Path) -> dict[str, Any]:
    """What a server for sequences of 64 tokens says of itself."""
    model = {
        "model": str(folder),
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
    }
    config = {
        "model_config": {**model, "max_model_len": 64},
        "structured_outputs_config": {"reasoning_parser_plugin": GRAMMARS},
        "scheduler_config": {"max_num_seqs": 4},
    }
    env = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 10**6}
    return {"vllm_config": config, "vllm_env": env}


def test_server_that_cannot_take_adapters_is_refused(tmp_path: Path) -> None:
    info = server_info(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    needed = VllmRequirements(
        str(tmp_path), "float32", slots=4, max_length=64, end_ids=(2,), adapter_rank=8
    )
    said = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=False instead of True"
    said += (
        " and max_lora_rank=0 instead of 8 or more and max_loras=0 instead of 1 or more"
    )
    with pytest.raises(ConfigError, match=said):
        check_settings("engine-0", info, needed)
    info["vllm_env"][LOADS_ADAPTERS] = True
    info["vllm_config"]["lora_config"] = {"max_lora_rank": 16, "max_loras": 2}
    check_settings("engine-0", info, needed)
    several = replace(needed, max_adapters=2)
    with pytest.raises(ConfigError, match="has max_loras=2 instead of 3 or more"):
        check_settings("engine-0", info, several)


def test_length_that_decides_rotary_frequencies_is_the_run_s(tmp_path: Path) -> None:
    info = server_info(tmp_path)
    needed = VllmRequirements(
        str(tmp_path), "float32", slots=4, max_length=48, end_ids=(2,)
    )
    for scaling in ({"rope_type": "llama3"}, {"type": "longrope"}):
        (tmp_path / "config.json").write_text(json.dumps({"rope_scaling": scaling}))
        if "type" not in scaling:
            check_settings("engine-0", info, needed)
            continue
        with pytest.raises(ConfigError, match="max_model_len=64 instead of 48"):
            check_settings("engine-0", info, needed)


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
@virtual
async def test_failed_canary_ends_the_commit_and_requests_move_on(
    interrupt: Interrupt,
) -> None:
    fake, server = await ready_server()
    told: list[bool] = []

    def on_lost(error: EngineLost) -> None:
        told.append(error.is_told)
        pool.down_nowait(error.component)
        server.disconnect_nowait()

    pool = EnginePool([server], slots=SLOTS, on_lost=on_lost)
    fake.wrong_loads = [2.0]
    async with asyncio.TaskGroup() as tasks:
        asked = [request(f"{number}", max_tokens=100) for number in range(SLOTS)]
        running = [tasks.create_task(pool.generate(one)) for one in asked]
        await asyncio.sleep(5 * DECODE_S)
        says = "engine-0: does not compute with policy_version 1"
        with pytest.raises(EngineError, match=says) as caught:
            await publish(server, 1, interrupt)
        assert not isinstance(caught.value, EngineLost)
        assert (server.policy_version, fake.pause) == (0, None)
        await all_blocked()
        assert told == [False, True, True, True], "its supervisor learns of it"
        assert (await lost(server.generate_segment(request()))).is_told
        await another_process(fake, server)
        pool.up_nowait("engine-0")
    for task in running:
        assert len(task.result().token_ids) == 100
        check_logprobs(task.result())


@pytest.mark.parametrize("interrupt", MODES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancelled", "cut", "dies", "refuses"])
@virtual
async def test_broken_commit_leaves_no_pause_and_no_unknown_token(
    interrupt: Interrupt, phase: str, how: str
) -> None:
    fake, server = await ready_server()
    requests = [request(f"{index}", max_tokens=40) for index in range(SLOTS)]
    running = [asyncio.ensure_future(server.generate_segment(one)) for one in requests]
    await asyncio.sleep(5 * DECODE_S)
    begun, lives = False, how in ("cancelled", "refuses")

    async def hook() -> None:
        nonlocal begun
        begun = True
        if how == "cut":
            server.disconnect_nowait()
        elif how == "dies":
            fake.die()
        elif how == "refuses":
            fake.refused_routes[phase] = (500, "planted")
        else:
            commit.cancel()
            await asyncio.sleep(0.001)

    fake.hooks[phase] = hook
    commit = asyncio.ensure_future(publish(server, 1, interrupt))
    await asyncio.wait([commit])
    fake.refused_routes.clear()
    assert begun or phase == "/abort_requests", (
        "with these modes there may be nothing to abort"
    )
    if begun:
        assert commit.cancelled() == (how == "cancelled")
        error = None if commit.cancelled() else commit.exception()
        assert commit.cancelled() or isinstance(
            error, EngineError if lives else EngineLost
        ), f"{error!r}"
        assert (
            not isinstance(error, EngineLost)
            or lives
            or error.is_told == (how == "cut")
        )
        assert server.policy_version == 0
    is_whole = not begun or (lives and phase in ("/pause", "/abort_requests"))
    if lives and (how, phase) != ("refuses", "/resume"):
        assert fake.pause is None
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(
            outcome, SegmentPart if is_whole else SegmentPart | EngineLost
        )
        if isinstance(outcome, SegmentPart):
            check_logprobs(outcome)
            assert is_whole or all(span.version == 0 for span in outcome.sampled.spans)
    if not is_whole:
        await lost(server.generate_segment(request("after")))
        await another_process(fake, server)
        await publish(server, 1, interrupt)
    check_logprobs(await server.generate_segment(request("again")))


@pytest.mark.parametrize(
    "on_chunk", [None, lambda part: None], ids=["whole", "streamed"]
)
@virtual
async def test_surplus_logprobs_are_refused(on_chunk: OnChunk) -> None:
    fake, server = await ready_server()
    fake.num_surplus = 1
    with pytest.raises(EngineError, match=r"\d+ tokens, \d+ logprobs, "):
        await server.generate_segment(request(), on_chunk=on_chunk)


@virtual
async def test_tokens_of_another_runs_weights_are_refused() -> None:
    fake, server = await ready_server()
    await publish(server, 1)
    assert versions(await server.generate_segment(request("before"))) == [1]
    theirs = server_over(fake, mark="theirs")
    await theirs.ready(10.0)
    await publish(theirs, 1)
    with pytest.raises(EngineError, match="labels .*~theirs"):
        await server.generate_segment(request("after"))
    assert versions(await theirs.generate_segment(request("theirs"))) == [1]


@virtual
async def test_other_server_settings_are_refused() -> None:
    fake, _ = await ready_server()
    wrong = {
        "logprobs_mode": "raw_logprobs",
        "model": "/other",
        "dtype": "torch.bfloat16",
    }
    says = "model=/other .*dtype=bfloat16 .*logprobs_mode=.*max_model_len=999 .*KEEP_ALIVE=5 "
    with (
        patch.dict(MODEL, wrong | {"max_model_len": 999}),
        patch.dict(ENV, VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5),
    ):
        with pytest.raises(ConfigError, match=says):
            await server_over(fake).ready(10.0)


@virtual
async def test_temperature_that_vllm_would_change_is_refused() -> None:
    _, server = await ready_server()
    says = "engine-0 refused request a: .*temperature 0.001; vLLM samples at 0.01"
    with pytest.raises(RequestRefused, match=says):
        await server.generate_segment(replace(request(), temperature=0.001))


def test_stop_string_across_two_segments_is_found() -> None:
    needed = VllmRequirements(
        "/model", "float32", 1, 1000, (), decode=lambda ids, **_: "".join(map(chr, ids))
    )
    for resumed, new, stop, taken in (
        ("hello wo", "rld!", ["world"], 3),  # over the joint: ends with its last letter
        ("hello wo", "rk", ["world", ""], None),
        # vLLM's to watch
        ("hello", " a text that is longer than any stop", ["stop"], None),
    ):
        asked = request(prompt=tuple(map(ord, "ask: " + resumed)))
        asked = replace(asked, num_resumed=len(resumed), stop=tuple(stop))
        watch = joint_watch(asked, needed)
        assert watch is not None
        found = [watch.is_complete(ord(letter)) for letter in new[: watch.window]]
        assert (found.index(True) + 1 if True in found else None) == taken
