"""VllmServer on a real vLLM with a tiny model: logprobs, versions and wrong loads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from contract_servers import SLOTS
from vllm_house import World

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
    server: VllmServer, world: World, seed: int, **changes: Any
) -> ExportResponse:
    return world.stage(server.policy_version + 1, world.weights(seed), **changes)


def check_gap(world: World, request: SamplingRequest, answer: SegmentPart) -> None:
    """Each token is what the weights of its version give."""
    assert len(answer.logprobs) == len(answer.token_ids)
    for span in answer.sampled.spans:
        weights = world.pushed[span.version]
        where = {"start": span.start, "end": span.end}
        temperature = request.temperature or 1.0
        given = (request.prompt_ids, answer.token_ids, answer.logprobs, temperature)
        assert world.gap(weights, *given, **where) <= 1e-4, (
            f"not of version {span.version}"
        )


def test_answers_end_by_the_ids_of_their_request(world: World) -> None:
    found = list[SegmentPart]()

    async def sample(server: VllmServer) -> None:
        ways: list[dict[str, Any]] = [{}]
        if found:
            ids = found[0].token_ids
            ways += [{"ignore_eos": True}, {"stop_ids": (ids[4],)}]
        requests = [world.request(**fields) for fields in ways]
        found.extend(await asyncio.gather(*map(server.generate_segment, requests)))

    world.run(sample)
    ids = found[0].token_ids
    world.run(sample, facts={"end_ids": (ids[9],)})
    ends = [len(ids), ids.index(ids[9]) + 1, len(ids), ids.index(ids[4]) + 1]
    assert [one.token_ids for one in found] == [ids[:end] for end in ends]
    finishes = [one.finish_reason for one in found]
    assert finishes == ["length", "stop", "length", "stop"]


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
def test_every_token_has_its_version_through_three_publishes(
    world: World, interrupt: Interrupt
) -> None:
    """Requests run until the last publish. Half of them are streamed."""
    max_tokens, step = 200, 60
    done: dict[tuple[int, int], Completion] = {}
    told: dict[tuple[int, int], list[int]] = {}

    async def story(server: VllmServer) -> None:
        pool, first = EnginePool([server], slots=SLOTS), server.policy_version
        staged = [
            world.stage(first + number, world.weights(100 + number))
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
                gap = world.gap(
                    world.pushed[span.version], *given, start=span.start, end=span.end
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
        health = await server.health()
        assert (server.policy_version, health.num_running) == (first + 3, 0)
        # The cache was never full: a push that clears it is no pressure.
        assert health.num_preempted == 0

    world.run(story)


def mend(world: World) -> None:
    """After a push that was refused: the weights of no version are replaced by right
    ones, behind the back of any client.
    """
    world.process.rpc("asyncrl_plant", fault="")
    world.process.ask(
        "POST", "/update_weight_version", {"new_version": f"{world.version}~"}
    )

    async def story(server: VllmServer) -> None:
        await push(server, next_of(server, world, 50 + world.version))
        request = world.request()
        check_gap(world, request, await server.generate_segment(request))

    world.run(story)


@pytest.mark.parametrize("fault", ["stale_head", "swap_names"])
def test_wrongly_loaded_weights_are_not_announced(world: World, fault: str) -> None:
    """Each call of vLLM's answers 200, and the digests agree: they are of the file."""

    async def story(server: VllmServer) -> None:
        before = server.policy_version
        world.process.rpc("asyncrl_plant", fault=fault)
        with pytest.raises(
            EngineError, match=f"does not compute with policy_version {before + 1}"
        ):
            await push(server, next_of(server, world, 30 + before))
        assert server.policy_version == before
        with pytest.raises(EngineLost, match="belong to no version"):
            await server.generate_segment(world.request())

    world.run(story)
    mend(world)


def test_incomplete_weights_break_a_server_until_a_full_load(world: World) -> None:
    async def story(server: VllmServer) -> None:
        manifest = next_of(server, world, 70 + world.version)
        weights = world.pushed[manifest.version]
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(EngineLost, match="model.layers.1.self_attn.qkv_proj"):
            await push(server, world.stage(manifest.version, weights))

    world.run(story)
    mend(world)
