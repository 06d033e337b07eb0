"""Memory that the kernel sees: what sleep says it freed has left the process, and chunks are loaded without a
second copy.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from engine_contract import generate
from engine_in_process import make_qwen3, weights_of
from engine_processes import SECRET, EngineProcess, engine_process
from test_engine_sleep import chunk_requests

from asyncrl.engines.own_server import EngineServer
from asyncrl.http import Caller
from asyncrl.messages.base import EnginePart
from asyncrl.messages.engine_calls import GenerateRequest
from asyncrl_servers.embedded.loaded_weights import digest_tensors

MIB = 2**20
BOTH: list[EnginePart] = ["kv", "weights"]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
}


def resident_bytes(child: EngineProcess) -> int:
    return int(psutil.Process(child.process.pid).memory_info().rss)


def forget_peak(child: EngineProcess) -> None:
    Path(f"/proc/{child.process.pid}/clear_refs").write_text("5")


def peak_bytes(child: EngineProcess) -> int:
    lines = Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_memory_leaves_the_process_when_the_engine_sleeps_and_comes_back_with_the_push(
    tmp_path: Path,
) -> None:
    folder = make_qwen3(tmp_path / "model", **SIZES)
    weights = weights_of(folder)
    num_weights = sum(tensor.nbytes for tensor in weights.values())
    chunks = chunk_requests(weights, 1, tmp_path, num_chunks=8)
    largest = max(chunk.num_bytes for chunk in chunks)
    assert num_weights > 50 * MIB
    spec = {"name": "engine-0", "model_path": str(folder), "slots": 8, "max_length": 512, "device": "cpu"}
    found: dict[str, int] = {}

    async def story(child: EngineProcess) -> None:
        caller = Caller("engine-0", child.url, SECRET)
        engine = EngineServer(caller)
        request = GenerateRequest(request_id="r", prompt_ids=list(range(40)), max_tokens=30, seed=3)
        try:
            expected = await generate(caller, request)
            awake = resident_bytes(child)
            freed = await engine.sleep(BOTH)
            asleep = resident_bytes(child)
            found.update(said=freed.num_bytes, dropped=awake - asleep)
            assert freed.num_bytes > num_weights + 20 * MIB
            assert awake - asleep >= freed.num_bytes

            await engine.wake(["weights"])
            forget_peak(child)
            for chunk in chunks:
                assert await engine.load_chunk(chunk) == chunk.digest
            await engine.commit(1, digest_tensors(weights), "abort")
            found.update(
                loaded=resident_bytes(child) - asleep,
                peak=peak_bytes(child) - asleep,
                weights=num_weights,
                chunk=largest,
            )
            assert peak_bytes(child) - asleep < num_weights + largest + 16 * MIB, (
                "weights, and one chunk's file in view"
            )

            taken = await engine.wake(["kv"])
            again = await generate(caller, request)
            assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)
            awake = resident_bytes(child)
            assert awake - asleep >= num_weights + taken.num_bytes - MIB, "it has it again"
            freed = await engine.sleep(BOTH)
            found.update(said_2=freed.num_bytes, dropped_2=awake - resident_bytes(child))
            assert awake - resident_bytes(child) >= freed.num_bytes
            assert resident_bytes(child) <= asleep + 16 * MIB, "nothing stays from turn to turn"
        finally:
            await caller.aclose()

    with engine_process("embedded", spec, tmp_path / "server") as child:
        asyncio.run(story(child))
    print({name: round(value / MIB, 2) for name, value in found.items()})
