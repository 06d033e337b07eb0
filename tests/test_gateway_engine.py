"""The official client and curl against a gateway over a real engine server, with weights published in the
middle of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_in_process import staging_request, weights_of
from engine_processes import SECRET, EngineProcess, engine_process
from gateway_cases import World, gateway_world, in_loop

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.http import Caller
from asyncrl.messages.records import Outcome
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "2+2="}]
LENGTH = 250


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    spec = {"name": "engine-0", "model_path": str(tiny_model_dir), "slots": 4, "max_length": 500}
    with engine_process("embedded", spec, tmp_path_factory.mktemp("engine")) as process:
        yield process


@asynccontextmanager
async def world_over(
    engine: EngineProcess, model_dir: Path
) -> AsyncIterator[tuple[World, EngineServer, openai.AsyncOpenAI]]:
    caller = Caller("engine-0", engine.url, SECRET)
    try:
        version = (await EngineServer(caller).health(timeout_s=120)).policy_version
        server, tokenizer = EngineServer(caller, policy_version=version), HFChatTokenizer(model_dir)
        async with (
            gateway_world(
                EnginePool([server], slots=4),
                tokenizer=tokenizer,
                tool_format="none",
                vocab_size=40,
                max_tokens=LENGTH,
                max_length=500,
            ) as world,
            openai.AsyncOpenAI(
                base_url=world.url + "/v1", api_key=world.session.key, max_retries=0
            ) as client,
        ):
            yield world, server, client
    finally:
        await caller.aclose()


async def prepare(server: EngineServer, model_dir: Path, folder: Path) -> str:
    staged = staging_request(
        {name: weight * 1.1 for name, weight in weights_of(model_dir).items()},
        server.policy_version + 1,
        folder,
    )
    return await server.prepare(ExportResponse(**staged.model_dump()))


def test_a_publish_in_the_middle_of_a_stream_is_invisible(
    engine: EngineProcess, tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        tokenizer = HFChatTokenizer(tiny_model_dir)
        async with world_over(engine, tiny_model_dir) as (world, server, client):
            for number in range(20):  # until an answer was long enough to be interrupted
                session, first = world.open(f"g{number}/r0"), server.policy_version
                digest, texts = await prepare(server, tiny_model_dir, tmp_path), [""] * 4
                own = client.with_options(api_key=session.key)
                stream = await own.chat.completions.create(
                    model="m", messages=HI, stream=True, n=4, seed=number
                )
                committed = False
                async for chunk in stream:
                    texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                    if chunk.choices[0].delta.content and not committed:
                        committed = True
                        await server.commit(first + 1, digest, "abort")
                branches = session.rollout(0, Outcome(), 1.0)
                sampled = [tokenizer.decode(each.token_ids[each.loss_mask].tolist()) for each in branches]
                assert sorted(texts) == sorted(sampled), "branches are in the order of their content"
                session.end_nowait("done")
                spans = [[span.version for span in branch.version_spans] for branch in branches]
                if [first, first + 1] in spans:
                    return
        raise AssertionError("20 times 4 answers were all over before the swap")

    asyncio.run(story())


@in_loop
async def test_turns_choices_and_a_stop_string_over_a_real_engine(
    engine: EngineProcess, tiny_model_dir: Path
) -> None:
    async with world_over(engine, tiny_model_dir) as (world, _, client):
        messages = list(HI)
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=20)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
        stats = world.gateway.stats()
        assert (stats.extended + stats.realigned, stats.forked) == (2, 0)
        (trajectory,) = world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.num_sampled == stats.completion_tokens
        choices = (
            await client.chat.completions.create(model="m", messages=HI, n=3, max_tokens=50, stop=["a"])
        ).choices
        assert len(choices) == 3
        assert all("a" not in (choice.message.content or "") for choice in choices)
        again = await asyncio.gather(
            *(client.chat.completions.create(model="m", messages=HI, seed=7, max_tokens=30) for _ in range(2))
        )
        assert again[0].choices[0].message.content == again[1].choices[0].message.content
