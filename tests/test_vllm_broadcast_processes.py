"""A real trainer and real vLLM servers: weights by broadcast are, bit for bit, those that go through a file;
and chunks in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from broadcast_house import BroadcastHouse
from engine_in_process import make_qwen3
from rank_processes import running
from vllm_process import VllmProcess, vllm_process

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Caller
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.messages.engine_api import GenerateRequest, LoadChunkRequest
from asyncrl.messages.trainer_api import ExportChunkRequest, ExportChunkResponse, ExportResponse
from asyncrl.sync.push import Push
from asyncrl.trainer.model.random_init import make_character_tokenizer
from asyncrl.trainer.trainer_client import TrainerClient

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
MAX_LENGTH, SLOTS = 512, 8
HOW: dict[str, Any] = {"canary_tokens": 160, "chunk_bytes": 40_000}


class House(BroadcastHouse):
    def run(self, story: Any, *, num_servers: int) -> None:
        self.tell(story, {f"engine-{index}": one for index, one in enumerate(self.servers[:num_servers])})

    async def client_of(
        self, server: VllmProcess, caller: Caller, broadcast_group: BroadcastGroup
    ) -> VllmServer:
        engine = self.client(caller, served(server), broadcast_group)
        await engine.ready(200)
        return engine

    def client(
        self, caller: Caller, version: int = 0, broadcast_group: BroadcastGroup | None = None
    ) -> VllmServer:
        needed = VllmRequirements(
            str(self.model_path),
            "float32",
            SLOTS,
            MAX_LENGTH,
            (),
            "cpu",
            canary_limit=1e-3,
            chunk_bytes=40_000,
        )
        return VllmServer(caller, needed, policy_version=version, broadcast_group=broadcast_group)


def served(server: VllmProcess) -> int:
    """The version that the story before has left there."""
    label = server.get("/weight_info")["weight_version"]
    return 0 if label == "default" else int(label)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("broadcast")
    tokenizer = make_character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,!?")
    model_path = make_qwen3(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model_path)
    sizes = {"max_length": MAX_LENGTH, "slots": SLOTS}
    spec = {"model_path": str(model_path), "dtype": "float32", "device": "cpu", "transport": "nccl", **sizes}
    with (
        vllm_process({**spec, "name": "engine-0"}, folder / "server-0") as first,
        vllm_process({**spec, "name": "engine-1"}, folder / "server-1") as second,
        running(model_path, folder / "trainer", 1, transport="nccl", is_file_wanted=True, **HOW) as trainer,
    ):
        yield House(trainer, [first.wait_ready(), second.wait_ready()], model_path)


async def sample(engine: VllmServer) -> tuple[list[int], list[float]]:
    request = GenerateRequest(request_id="look", prompt_ids=[5, 6, 7, 8], max_tokens=24, seed=3)
    answer = await engine.generate_segment(request)
    assert [span.version for span in answer.version_spans] == [engine.policy_version]
    return answer.token_ids, answer.logprobs


async def push(
    manifest: ExportResponse, engines: list[VllmServer], served: int, lost: list[EngineLost] | None = None
) -> None:
    told = None if lost is None else lost.append
    push = Push(manifest.version, engines, served=served, timeout_s=100.0, on_lost=told)
    await push.whole(manifest)


def test_three_broadcasts_give_the_bits_that_files_give(house: House) -> None:
    async def story(trainer: TrainerClient, engines: list[VllmServer]) -> None:
        seen = []
        for _ in range(3):
            await asyncio.to_thread(house.train)
            manifest = await trainer.export()
            assert manifest.is_held
            assert manifest.path
            await push(manifest, engines, house.version - 1)
            by_broadcast = [await sample(engine) for engine in engines]
            for engine, broadcast in zip(engines, by_broadcast, strict=True):
                by_file = house.client(engine._caller)
                await push(manifest.model_copy(update={"is_held": False}), [by_file], 0)
                assert await sample(by_file) == broadcast, "every token and every bit of every logprob"
            assert by_broadcast == by_broadcast[:1] * 2
            seen.append(by_broadcast[0][1])
        assert seen[0] != seen[1] != seen[2], "each version computes something else"

    house.run(story, num_servers=2)


def test_chunks_in_shared_memory_are_loaded_as_written(house: House, tmp_path: Path) -> None:
    """The way of transport=ipc, but for the calls of CUDA's driver that make and open the memory: here it is
    a mapped file.
    """
    server = house.servers[0]
    trainer = running(house.model_path, tmp_path / "trainer", 1, transport="ipc", chunks="memory", **HOW)
    with trainer as other:
        handles = set[str]()
        for index in range(100):
            message = ExportChunkRequest(version=0, index=index)
            chunk = other.ask(partial(post_chunk, message))
            assert chunk.memory is not None
            handles.add(chunk.memory.handles[0].name)
            asked = chunk.model_dump(include=set(LoadChunkRequest.model_fields))
            if index == 0:
                wrong = server.rpc("asyncrl_load_chunk", **{**asked, "digest": "0" * 32})
                assert "with digest 0000" in wrong["error"]
            assert server.rpc("asyncrl_load_chunk", **asked) == {"ok": True, "digest": chunk.digest}
            if chunk.is_last:
                break
        assert index > 2
        assert len(handles) == 1, "one piece of memory, opened once"
        finished = server.rpc("asyncrl_finish_chunks", version=0, digest=chunk.whole_digest)
        assert finished == {"ok": True, "digest": chunk.whole_digest}
        assert chunk.canary is not None
        _, logprobs = server.generate(chunk.canary.token_ids, salt="memory", max_tokens=1)
        assert abs(logprobs[0] - chunk.canary.next_logprob) < 1e-4, "of the start, as this trainer is"


async def post_chunk(message: ExportChunkRequest, caller: Caller) -> ExportChunkResponse:
    return await caller.post("/export_chunk", message, ExportChunkResponse, timeout_s=60)
