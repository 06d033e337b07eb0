"""A real trainer and real embedded servers: weights by broadcast are, bit for bit, those that go through a
file, and whoever dies as they come takes no other engine along.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from broadcast_house import BroadcastHouse
from engine_in_process import drawn, make_qwen3, publish, running_engine
from engine_processes import EngineProcess, engine_process
from engine_replies import ask
from rank_processes import running

from asyncrl.base.errors import EngineLost, WeightsLost
from asyncrl.base.http import Caller
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import GenerateRequest, GenerateResponse, PrepareRequest
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.sync.push import Push
from asyncrl.trainer.trainer_client import TrainerClient

pytestmark = pytest.mark.slow
CHUNK_BYTES = 40_000
SIZES: dict[str, Any] = {"slots": 4, "max_length": 256}
REQUEST = GenerateRequest(request_id="look", prompt_ids=(5, 6, 7, 8), max_tokens=24, seed=3)


class House(BroadcastHouse):
    def run(self, story: Any) -> None:
        """With clients of the servers that still run."""
        servers = {f"engine-{index}": one for index, one in enumerate(self.servers)}
        self.tell(story, {name: one for name, one in servers.items() if one.process.poll() is None})

    async def client_of(
        self, server: EngineProcess, caller: Caller, broadcast_group: BroadcastGroup
    ) -> EngineServer:
        return EngineServer(caller, policy_version=self.version, broadcast_group=broadcast_group)

    async def trained(self, trainer: TrainerClient) -> ExportResponse:
        await asyncio.to_thread(self.train)
        return await trainer.export()

    async def push(
        self, manifest: ExportResponse, engines: list[EngineServer], lost: list[EngineLost] | None = None
    ) -> None:
        def on_lost(error: EngineLost) -> None:
            assert lost is not None, error
            lost.append(error)
            next(one for one in engines if one.name == error.room).disconnect_nowait()

        push = Push(manifest.version, engines, served=self.version - 1, timeout_s=100.0, on_lost=on_lost)
        await push.whole(manifest)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("broadcast")
    model_path = make_qwen3(folder / "model", vocab_size=40)
    spec = {"model_path": str(model_path), "device": "cpu", "receives_bytes": CHUNK_BYTES, **SIZES}
    sent = {"transport": "nccl", "is_file_wanted": True, "chunk_bytes": CHUNK_BYTES}
    with (
        engine_process("embedded", {**spec, "name": "engine-0"}, folder / "server-0") as first,
        engine_process("embedded", {**spec, "name": "engine-1"}, folder / "server-1") as second,
        running(model_path, folder / "trainer", 1, **sent) as trainer,
    ):
        yield House(trainer, [first, second], model_path)


def seen(answer: GenerateResponse) -> tuple[list[int], tuple[list[int], list[float]]]:
    return [span.version for span in answer.version_spans], drawn(answer)


def test_three_broadcasts_give_the_bits_that_files_give(house: House) -> None:
    found = []

    async def story(trainer: TrainerClient, engines: list[EngineServer]) -> None:
        with running_engine(house.model_path, **SIZES) as by_file:
            for _ in range(3):
                manifest = await house.trained(trainer)
                assert manifest.is_held
                await house.push(manifest, engines)
                names = {"version", "path", "digest", "num_tensors", "num_bytes"}
                publish(by_file, PrepareRequest(**manifest.model_dump(include=names)))
                expected = ask(by_file, [REQUEST])[0].result(timeout=60)
                found.append(drawn(expected))
                for engine in engines:
                    answer = await engine.generate_segment(REQUEST)
                    assert seen(answer) == ([manifest.version], found[-1])

    house.run(story)
    assert found[0] != found[1] != found[2], "each version computes something else"


def test_engine_killed_during_a_broadcast_leaves_others_the_weights(house: House) -> None:
    async def story(trainer: TrainerClient, engines: list[EngineServer]) -> None:
        manifest, (first, second), lost = await house.trained(trainer), engines, list[EngineLost]()
        os.kill(house.servers[1].process.pid, signal.SIGSTOP)
        pushing = asyncio.ensure_future(house.push(manifest, engines, lost))
        answer = await first.generate_segment(REQUEST)
        assert [span.version for span in answer.version_spans] == [house.version - 1], "it samples on"
        await asyncio.sleep(1.0)
        assert not pushing.done(), "no member has all without the one that stands still"
        house.servers[1].process.kill()
        await pushing
        assert [error.room for error in lost] == ["engine-1"]
        assert (first.policy_version, second.policy_version) == (house.version, house.version - 1)
        await house.push(await house.trained(trainer), [first])
        assert seen(await first.generate_segment(REQUEST))[0] == [house.version]

    house.run(story)


def test_trainer_killed_before_a_broadcast_costs_no_engine(house: House) -> None:
    """The last story."""

    async def story(trainer: TrainerClient, engines: list[EngineServer]) -> None:
        manifest, (first,) = await house.trained(trainer), engines
        before = await first.generate_segment(REQUEST)
        os.kill(house.trainer.processes[0].pid, signal.SIGSTOP)
        pushing = asyncio.ensure_future(house.push(manifest, engines))
        await asyncio.sleep(1.0)
        house.trainer.processes[0].kill()
        with pytest.raises(WeightsLost, match="trainer"):
            await pushing
        assert seen(await first.generate_segment(REQUEST)) == seen(before)

    house.run(story)
