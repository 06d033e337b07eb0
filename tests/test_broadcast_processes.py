"""A real trainer broadcasts its weights to real engines of each kind, and processes that die meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_in_process import drawn, make_qwen3
from engine_processes import SECRET, engine_process
from rank_processes import Group, running
from trainer_cases import changed, make_batch
from vllm_process import vllm_process

from asyncrl.base.errors import EngineLost, WeightsLost
from asyncrl.base.http import Caller
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.messages.engine_api import GenerateResponse
from asyncrl.messages.records import SamplingRequest
from asyncrl.messages.trainer_api import (
    ExportResponse,
    TrainResponse,
    pack_batch,
)
from asyncrl.sync.push import Push
from asyncrl.trainer.random_init import make_character_tokenizer
from asyncrl.trainer.trainer_client import TrainerClient

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {"slots": 8, "max_length": 512}
CHUNKS: dict[str, Any] = {"canary_tokens": 160, "chunk_bytes": 40_000}
REQUEST = SamplingRequest(request_id="look", prompt_ids=(5, 6, 7, 8), max_tokens=24, seed=3)
Story = Callable[[TrainerClient, list[Any]], Awaitable[None]]


@dataclass
class House:
    """A trainer that broadcasts, and two engines. Versions grow from story to story."""

    kind: str
    trainer: Group
    servers: list[Any]
    model_path: Path
    version: int = 0

    def run(self, story: Story, num_servers: int = 2) -> None:
        """Run the story with clients of the live servers."""

        async def within() -> None:
            async with AsyncExitStack() as stack, asyncio.timeout(300):
                caller = Caller("trainer", self.trainer.urls[0], "s3cret")
                trainer = TrainerClient(await stack.enter_async_context(aclosing(caller)), timeout_s=100.0)
                group = BroadcastGroup(trainer.broadcast, self.trainer.folder, timeout_s=60.0)
                engines = []
                for index, server in enumerate(self.servers[:num_servers]):
                    if server.process.poll() is None:
                        caller = Caller(f"engine-{index}", server.url, SECRET)
                        await stack.enter_async_context(aclosing(caller))
                        engines.append(await self.client(caller, group))
                await story(trainer, engines)

        asyncio.run(within())

    async def client(self, caller: Caller, group: BroadcastGroup) -> Any:
        if self.kind == "embedded":
            return EngineServer(caller, policy_version=self.version, broadcast_group=group)
        needed = VllmRequirements(
            str(self.model_path),
            "float32",
            SIZES["slots"],
            SIZES["max_length"],
            (),
            "cpu",
            canary_limit=1e-3,
        )
        engine = VllmServer(caller, needed, policy_version=self.version, broadcast_group=group)
        await engine.ready(200)
        return engine

    async def trained(self, trainer: TrainerClient) -> ExportResponse:
        header, arrays = make_batch(version=self.version)
        body = pack_batch(header, changed(arrays, token_ids=np.minimum(arrays.token_ids, 39)))
        post = partial(self.trainer.ask, lambda one: one.post("/train", body, TrainResponse, timeout_s=120))
        self.version = (await asyncio.to_thread(post)).policy_version
        return await trainer.export()

    async def push(
        self, manifest: ExportResponse, engines: list[Any], lost: list[EngineLost] | None = None
    ) -> None:
        def on_lost(error: EngineLost) -> None:
            assert lost is not None, error
            lost.append(error)
            next(one for one in engines if one.name == error.room).disconnect_nowait()

        push = Push(manifest.version, engines, timeout_s=100.0, on_lost=on_lost)
        await push.whole(manifest)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder, kind = tmp_path_factory.mktemp("broadcast"), request.param
    tokenizer = make_character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,!?")
    model_path = make_qwen3(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model_path)
    spec = {"model_path": str(model_path), "dtype": "float32", "device": "cpu", **SIZES}
    start: Any = vllm_process if kind == "vllm" else partial(engine_process, "embedded")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(start({**spec, "name": f"engine-{index}"}, folder / f"server-{index}"))
            for index in range(2)
        ]
        trainer = stack.enter_context(running(model_path, folder / "trainer", 1, transport="nccl", **CHUNKS))
        yield House(kind, trainer, servers, model_path)


def seen(answer: GenerateResponse) -> tuple[list[int], tuple[list[int], list[float]]]:
    return [span.version for span in answer.version_spans], drawn(answer)


only_embedded = pytest.mark.parametrize("house", ["embedded"], indirect=True)


def test_all_engines_compute_with_each_broadcast(house: House) -> None:
    """Each compared its digest with the trainer's, and vLLM its canary."""
    found = []

    async def story(trainer: TrainerClient, engines: list[Any]) -> None:
        for _ in range(3):
            manifest = await house.trained(trainer)
            assert manifest.is_held
            await house.push(manifest, engines)
            answers = [seen(await engine.generate_segment(REQUEST)) for engine in engines]
            assert answers[0] == answers[1]
            assert answers[0][0] == [manifest.version]
            found.append(answers[0][1])

    house.run(story)
    assert found[0] != found[1] != found[2], "each version computes something else"


@only_embedded
def test_killed_member_leaves_the_others_their_weights(house: House) -> None:
    async def story(trainer: TrainerClient, engines: list[Any]) -> None:
        manifest, (first, second), lost = await house.trained(trainer), engines, list[EngineLost]()
        os.kill(house.servers[1].process.pid, signal.SIGSTOP)
        pushing = asyncio.ensure_future(house.push(manifest, engines, lost))
        answer = await first.generate_segment(REQUEST)
        assert seen(answer)[0] == [house.version - 1], "it samples during the wait"
        await asyncio.sleep(1.0)
        assert not pushing.done(), "the broadcast needs every member"
        house.servers[1].process.kill()
        await pushing
        assert [error.room for error in lost] == ["engine-1"]
        assert (first.policy_version, second.policy_version) == (house.version, house.version - 1)
        await house.push(await house.trained(trainer), [first])
        assert seen(await first.generate_segment(REQUEST))[0] == [house.version]

    house.run(story)


@only_embedded
def test_killed_trainer_costs_no_engine(house: House) -> None:
    """The last story of this house."""

    async def story(trainer: TrainerClient, engines: list[Any]) -> None:
        manifest, first = await house.trained(trainer), engines[0]
        before = await first.generate_segment(REQUEST)
        os.kill(house.trainer.processes[0].pid, signal.SIGSTOP)
        pushing = asyncio.ensure_future(house.push(manifest, [first]))
        await asyncio.sleep(1.0)
        house.trainer.processes[0].kill()
        with pytest.raises(WeightsLost, match="trainer"):
            await pushing
        assert seen(await first.generate_segment(REQUEST)) == seen(before)

    house.run(story)
