"""Pushes to a real vLLM that answer 200 and are wrong, one fault after the other: none is announced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm_house import CANARY_LIMIT, House
from vllm_process import SECRET

from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import Caller
from asyncrl.messages.engine_calls import GenerateResponse
from asyncrl.messages.trainer_calls import ExportResponse

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
Tamper = Callable[[str, dict[str, str], dict[str, Any]], None]


async def push(server: VllmServer, house: House, seed: int, *, has_canary: bool = True) -> None:
    await push_staged(
        server, house.stage(server.policy_version + 1, house.weights(seed), has_canary=has_canary)
    )


async def push_staged(server: VllmServer, manifest: ExportResponse) -> None:
    await server.prepare(manifest)
    await server.commit(manifest.version, manifest.digest, "abort")


def mend(house: House) -> None:
    """After a push that was refused: the weights of no version are replaced by right ones, behind the back of
    any client.
    """
    house.process.rpc("asyncrl_plant", fault="")
    house.process.post("/update_weight_version", {"new_version": str(house.version)})

    async def story(server: VllmServer) -> None:
        await push(server, house, 50 + house.version)
        answer = await server.generate_segment(house.request())
        assert (
            house.gap(house.pushed[server.policy_version], [10, 11, 12], answer.token_ids, answer.logprobs)
            <= 1e-4
        )

    house.run(story)


def test_the_canary_limit_is_far_from_what_right_weights_differ_by(house: House) -> None:
    async def story(server: VllmServer) -> None:
        await push(server, house, 9)

    house.run(story, canary_limit=CANARY_LIMIT / 20)


@pytest.mark.parametrize("fault", ["stale_head", "skip_chunk_unseen", "swap_names"])
def test_weights_that_were_not_loaded_as_they_were_sent_are_not_announced(house: House, fault: str) -> None:
    """vLLM answers 200 to every call, and the digests agree: they are of the file."""

    async def story(server: VllmServer) -> None:
        before = server.policy_version
        house.process.rpc("asyncrl_plant", fault=fault)
        with pytest.raises(
            EngineError,
            match=f"does not compute with the weights of policy_version {before + 1} .*the trainer says",
        ) as caught:
            await push(server, house, 30 + before)
        assert "2 of 2 attempts" in str(caught.value)
        assert server.policy_version == before
        with pytest.raises(EngineLost, match="weights are those of no version"):
            await server.generate_segment(house.request())

    house.warnings.clear()
    house.run(story)
    assert len(house.warnings) == 1, "the first attempt was followed by another"
    mend(house)


def test_a_fault_that_passes_costs_a_second_load_and_no_token(house: House) -> None:
    async def story(server: VllmServer) -> None:
        house.process.rpc("asyncrl_plant", fault="swap_names")
        house.on_warning = lambda: house.process.rpc("asyncrl_plant", fault="")
        begun, is_over = asyncio.Event(), False
        manifest = house.stage(server.policy_version + 1, house.weights(40))
        answers: list[GenerateResponse] = []

        async def sample_on() -> None:
            while not is_over:
                answers.append(await server.generate_segment(house.request(max_tokens=300)))
                begun.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sample_on())
            await begun.wait()
            await push_staged(server, manifest)
            is_over = True
        for answer in answers:
            for span in answer.version_spans:
                weights = house.pushed[span.version]
                assert (
                    house.gap(
                        weights,
                        [10, 11, 12],
                        answer.token_ids,
                        answer.logprobs,
                        start=span.start,
                        end=span.end,
                    )
                    <= 1e-4
                )
        answer = await server.generate_segment(house.request())
        assert (
            house.gap(house.pushed[server.policy_version], [10, 11, 12], answer.token_ids, answer.logprobs)
            <= 1e-4
        )

    house.warnings.clear()
    house.run(story)
    assert len(house.warnings) == 1
    mend(house)


@asynccontextmanager
async def tampered(url: str, tamper: Tamper) -> AsyncIterator[str]:
    """A server that passes everything on, with path, query and body as `tamper` leaves them."""

    async def pass_on(request: web.Request) -> web.Response:
        query, body = dict(request.query), json.loads(await request.read() or b"{}")
        tamper(request.path, query, body)
        headers = {"Authorization": f"Bearer {SECRET}"}
        data = body if request.method == "POST" else None
        async with session.request(
            request.method, url + request.path, params=query, json=data, headers=headers
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type="application/json"
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        async with aiohttp.ClientSession() as session:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def no_salt_and_no_clearing(path: str, query: dict[str, str], body: dict[str, Any]) -> None:
    body.pop("cache_salt", None)
    if path == "/pause":
        query["clear_cache"] = "false"


def labels_of_another_version(path: str, _: dict[str, str], body: dict[str, Any]) -> None:
    if path == "/update_weight_version" and body["new_version"] != "0":
        body["new_version"] = str(int(body["new_version"].partition("#")[0]) - 1)


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (no_salt_and_no_clearing, "the next token has logprob"),
        (labels_of_another_version, "it answers under the label"),
    ],
)
def test_a_stale_prefix_cache_and_a_wrong_label_are_not_announced(
    house: House, tamper: Tamper, words: str
) -> None:
    async def story(server: VllmServer) -> None:
        async with tampered(house.process.url, tamper) as url:
            caller = Caller("engine-0", url, SECRET)
            try:
                behind = VllmServer(
                    caller,
                    facts=house.facts(),
                    policy_version=server.policy_version,
                    canary_limit=1e-3,
                    retries=0,
                )
                if tamper is no_salt_and_no_clearing:
                    await push(behind, house, 60)  # the first one: nothing is in the cache yet
                version = behind.policy_version
                with pytest.raises(
                    EngineError,
                    match=f"does not compute with the weights of policy_version {version + 1} .*{words}",
                ):
                    await push(behind, house, 61)
                assert behind.policy_version == version
                house.version = version
            finally:
                await caller.aclose()

    house.run(story)
    mend(house)


def test_a_load_in_which_the_worker_misses_parameters_is_an_engine_lost(house: House) -> None:
    async def story(server: VllmServer) -> None:
        house.process.rpc("asyncrl_plant", fault="skip_chunk")
        with pytest.raises(EngineLost, match="failed in a swap .* lack .* parameters of the model") as caught:
            await push(server, house, 70, has_canary=False)
        assert not caught.value.is_told
        assert house.process.get("/is_paused") == {"is_paused": False}
        with pytest.raises(EngineLost):
            await server.generate_segment(house.request())

    house.run(story)
    mend(house)
