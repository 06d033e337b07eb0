"""Two real embedded servers with two slots each, six requests, two aborts: every joined answer is the
uninterrupted one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_processes import SECRET, EngineProcess, engine_process
from tiny_model import make_tiny_model

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import EngineError
from asyncrl.http import Caller
from asyncrl.messages.engine_calls import EngineHealth
from asyncrl.messages.records import Completion, SamplingRequest, WeightManifest
from asyncrl.sync.publisher import Push

pytestmark = pytest.mark.slow

NUM_ENGINES, SLOTS, NUM_REQUESTS = 2, 2, 6


@pytest.fixture(scope="module")
def endless_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with an end token that it cannot sample, and no tokenizer to name one: all run to
    max_tokens.

    Deeper than the usual one, so that aborts surely come in the middle.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("endless") / "model", num_hidden_layers=6)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": 10_000}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def same_weights(endless_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> WeightManifest:
    """An export of the very weights that the servers start with."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.weights.export import export_weights, named_weights

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(endless_model_dir)
    sent = export_weights(named_weights(model), tmp_path_factory.mktemp("staging") / "weights.safetensors", 1)
    return sent.model_copy(update={"canary": None})


@pytest.fixture(params=["greedy", "seeded"])
def temperature(request: pytest.FixtureRequest) -> float:
    return 0.0 if request.param == "greedy" else 1.0


@pytest.fixture(scope="module")
def processes(
    endless_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EngineProcess]]:
    """Two servers that all tests share: their version only grows."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_engine(endless_model_dir, index, tmp_path_factory.mktemp("engine")))
            for index in range(NUM_ENGINES)
        ]


def start_engine(model_dir: Path, index: int, folder: Path) -> AbstractContextManager[EngineProcess]:
    spec = {"name": f"engine-{index}", "model_path": str(model_dir), "slots": SLOTS, "max_length": 400}
    return engine_process("embedded", spec, folder)


@asynccontextmanager
async def open_pool(processes: list[EngineProcess]) -> AsyncIterator[tuple[EnginePool, list[EngineServer]]]:
    callers = [Caller(f"engine-{index}", process.url, SECRET) for index, process in enumerate(processes)]
    try:
        servers = []
        for caller in callers:
            health = await EngineServer(caller).health(timeout_s=120.0)
            servers.append(EngineServer(caller, policy_version=health.policy_version))
        yield EnginePool(servers, slots=SLOTS), servers
    finally:
        for caller in callers:
            await caller.aclose()


def make_requests(temperature: float) -> list[SamplingRequest]:
    """Six requests of two groups, of unequal lengths."""
    return [
        SamplingRequest(
            f"g{index // 3}/r{index % 3}",
            prompt_ids=tuple(range(6, 12 + index // 3)),
            max_tokens=200 + 20 * index,
            temperature=temperature,
            seed=1000 + index,
            route_key=f"g{index // 3}",
        )
        for index in range(NUM_REQUESTS)
    ]


async def tokens_sampled(server: EngineServer, more: int) -> None:
    """Return when the server has sampled `more` tokens more; it is busy, so it will."""
    start = (await server.health()).tokens_generated
    async with asyncio.timeout(60.0):
        while (await server.health()).tokens_generated < start + more:
            pass


async def idle(server: EngineServer) -> EngineHealth:
    """Health of a server that has answered everything, once it says so itself."""
    async with asyncio.timeout(60.0):
        while True:
            health = await server.health()
            if not health.num_running + health.num_queued:
                return health


async def run_all(pool: EnginePool, requests: list[SamplingRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(pool.generate(request) for request in requests)))


def test_joined_answers_equal_uninterrupted_ones_on_real_servers(
    processes: list[EngineProcess], same_weights: WeightManifest, temperature: float
) -> None:
    async def story() -> None:
        async with open_pool(processes) as (pool, servers):
            old = pool.oldest_served_version
            requests = make_requests(temperature)
            expected = await run_all(pool, requests)
            assert [completion.num_interruptions for completion in expected] == [0] * NUM_REQUESTS

            running = asyncio.gather(*(pool.generate(request) for request in requests))
            for server in servers:
                await tokens_sampled(server, 40)
            manifest = replace(same_weights, version=old + 1)
            report = await Push(manifest, servers, served=old, interrupt="abort", timeout_s=60.0).run()
            for server in servers:
                await tokens_sampled(server, 40)
            aborted = await asyncio.gather(*(server.abort(None) for server in servers))
            joined = await running

            assert report.num_interrupted >= NUM_ENGINES * SLOTS
            assert sum(len(names) for names in aborted) >= NUM_ENGINES * SLOTS
            check(requests, expected, joined, old)
            assert pool.oldest_served_version == old + 1
            assert pool.stats().interrupted == sum(completion.num_interruptions for completion in joined)
            for server in servers:
                assert (await idle(server)).policy_version == old + 1

    asyncio.run(story())


def check(
    requests: list[SamplingRequest], expected: list[Completion], joined: list[Completion], old: int
) -> None:
    for request, whole, completion in zip(requests, expected, joined, strict=True):
        assert completion.token_ids == whole.token_ids
        assert completion.behaviour_logprobs == whole.behaviour_logprobs
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == len(completion.behaviour_logprobs) == request.max_tokens
        covered = [index for span in completion.version_spans for index in range(span.start, span.end)]
        assert covered == list(range(request.max_tokens))
        assert completion.num_interruptions >= 1
    versions = [tuple(span.version for span in completion.version_spans) for completion in joined]
    assert versions.count((old, old + 1)) >= NUM_ENGINES * SLOTS, (
        "what ran when the weights came has both versions"
    )
    assert set(versions) <= {(old, old + 1), (old + 1,)}


def test_a_cancelled_request_frees_its_slot_on_a_real_server(processes: list[EngineProcess]) -> None:
    async def story() -> None:
        async with open_pool(processes[:1]) as (pool, (server,)):
            running = [asyncio.create_task(pool.generate(request)) for request in make_requests(1.0)[:3]]
            await tokens_sampled(server, 2)
            for task in running[:2]:
                task.cancel()
            await asyncio.wait(running[:2])
            health = await server.health()
            assert health.num_running + health.num_queued <= 1, "no later than the cancelled calls return"
            assert len((await running[2]).token_ids) == 240

    asyncio.run(story())


def test_a_killed_server_ends_its_requests_with_its_name(endless_model_dir: Path, tmp_path: Path) -> None:
    async def story() -> None:
        with start_engine(endless_model_dir, 0, tmp_path) as victim:
            async with open_pool([victim]) as (pool, (server,)):
                running = asyncio.create_task(pool.generate(make_requests(1.0)[0]))
                await tokens_sampled(server, 2)
                victim.process.kill()
                with pytest.raises(EngineError, match="engine-0: .* gave no answer to /generate"):
                    await running

    asyncio.run(story())
