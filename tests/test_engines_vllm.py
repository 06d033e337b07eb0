"""VllmServer on a real vLLM with a tiny model: logprobs, versions and wrong loads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from contract_servers import SLOTS
from vllm_house import House

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportResponse

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


async def push(
    server: VllmServer, manifest: ExportResponse, interrupt: Interrupt = "abort"
) -> None:
    assert await server.prepare(manifest) == manifest.digest
    report = await server.commit(manifest.version, manifest.digest, interrupt)
    assert report.version == server.policy_version == manifest.version


def next_of(
    server: VllmServer, house: House, seed: int, **changes: Any
) -> ExportResponse:
    return house.stage(server.policy_version + 1, house.weights(seed), **changes)


def check_gap(house: House, request: SamplingRequest, answer: SegmentPart) -> None:
    """Each token is what the weights of its version give."""
    assert len(answer.logprobs) == len(answer.token_ids)
    for span in answer.sampled.spans:
        weights = house.pushed[span.version]
        where = {"start": span.start, "end": span.end}
        temperature = request.temperature or 1.0
        given = (request.prompt_ids, answer.token_ids, answer.logprobs, temperature)
        assert house.gap(weights, *given, **where) <= 1e-4, (
            f"not of version {span.version}"
        )


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
def test_every_token_has_its_version_through_three_publishes(
    house: House, interrupt: Interrupt
) -> None:
    """Requests run until the last publish. Half of them are streamed."""
    max_tokens, step = 200, 60
    done: dict[tuple[int, int], Completion] = {}
    told: dict[tuple[int, int], list[int]] = {}

    async def story(server: VllmServer) -> None:
        pool, first = EnginePool([server], slots=SLOTS), server.policy_version
        staged = [
            house.stage(first + number, house.weights(100 + number))
            for number in (1, 2, 3)
        ]
        more, over = asyncio.Event(), False

        async def place(seed: int) -> None:
            turn = 0
            while not over:
                tokens = told.setdefault((seed, turn), [])

                def on_tokens(
                    token_ids: Sequence[int], tokens: list[int] = tokens
                ) -> None:
                    tokens.extend(token_ids)
                    more.set()

                name, prompt = f"{interrupt} {seed} {turn}", (10, 11, 12 + seed)
                request = SamplingRequest(
                    name, prompt, max_tokens, seed=100 * turn + seed
                )
                done[seed, turn] = await pool.generate(
                    request, on_tokens=on_tokens if seed % 2 else None
                )
                turn += 1

        async def until_sampled(num_tokens: int) -> None:
            end = sum(map(len, told.values())) + num_tokens
            while sum(map(len, told.values())) < end:
                more.clear()
                await more.wait()

        async with asyncio.TaskGroup() as tasks:
            for seed in range(SLOTS):
                tasks.create_task(place(seed))
            for manifest in staged:
                await until_sampled(step)
                await push(server, manifest, interrupt)
            await until_sampled(step)
            over = True
        spans_seen, num_crossing = set(), 0
        for (seed, turn), completion in done.items():
            is_streamed, spans = bool(seed % 2), completion.sampled.spans
            assert (len(completion.token_ids), completion.finish_reason) == (
                max_tokens,
                "length",
            )
            assert not is_streamed or tuple(told[seed, turn]) == completion.token_ids
            assert [*(span.start for span in spans), max_tokens] == [
                0,
                *(span.end for span in spans),
            ]
            num_crossing += len(spans) > 1
            given = (
                (10, 11, 12 + seed),
                completion.token_ids,
                completion.behaviour_logprobs,
            )
            for span in spans:
                spans_seen.add(span.version)
                gap = house.gap(
                    house.pushed[span.version], *given, start=span.start, end=span.end
                )
                is_exact = (
                    interrupt != "keep_kv"
                    or is_streamed
                    or span.version == spans[0].version
                )
                assert (gap <= 1e-3) == is_exact, (
                    f"{span}: else the old KV cache under new weights"
                )
        assert spans_seen == {first, first + 1, first + 2, first + 3}
        assert bool(num_crossing) == (interrupt != "wait")
        assert (server.policy_version, (await server.health()).num_running) == (
            first + 3,
            0,
        )

    house.run(story)


def mend(house: House) -> None:
    """After a push that was refused: the weights of no version are replaced by right
    ones, behind the back of any client.
    """
    house.process.rpc("asyncrl_plant", fault="")
    house.process.ask(
        "POST", "/update_weight_version", {"new_version": f"{house.version}~"}
    )

    async def story(server: VllmServer) -> None:
        await push(server, next_of(server, house, 50 + house.version))
        request = house.request()
        check_gap(house, request, await server.generate_segment(request))

    house.run(story)


@pytest.mark.parametrize("fault", ["stale_head", "swap_names"])
def test_wrongly_loaded_weights_are_not_announced(house: House, fault: str) -> None:
    """Each call of vLLM's answers 200, and the digests agree: they are of the file."""

    async def story(server: VllmServer) -> None:
        before = server.policy_version
        house.process.rpc("asyncrl_plant", fault=fault)
        with pytest.raises(
            EngineError, match=f"does not compute with policy_version {before + 1}"
        ):
            await push(server, next_of(server, house, 30 + before))
        assert server.policy_version == before
        with pytest.raises(EngineLost, match="belong to no version"):
            await server.generate_segment(house.request())

    house.run(story)
    mend(house)


def test_incomplete_weights_break_a_server_until_a_full_load(house: House) -> None:
    async def story(server: VllmServer) -> None:
        manifest = next_of(server, house, 70 + house.version)
        weights = house.pushed[manifest.version]
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(EngineLost, match="model.layers.1.self_attn.qkv_proj"):
            await push(server, house.stage(manifest.version, weights))

    house.run(story)
    mend(house)
