"""Chunks of weights in memory that trainer and engine share: a file, or CUDA memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import answered, make_qwen3, running_engine
from engine_processes import SECRET, engine_process
from trainer_cases import make_batch, make_spec

from asyncrl.base.http import Caller, Refused
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import (
    ChunkMemory,
    CommitRequest,
    EnginePart,
    LoadChunkRequest,
    SleepRequest,
    WakeRequest,
)
from asyncrl.messages.trainer_api import ExportChunkResponse
from asyncrl.trainer.step import TrainStep
from asyncrl.weights import ipc
from asyncrl.weights.ipc import make_file
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl_servers.embedded.embedded_engine import Engine

BOTH: list[EnginePart] = ["kv", "weights"]
MakeStep = Callable[..., TrainStep]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("shared") / "model", num_hidden_layers=2, vocab_size=256)


@pytest.fixture
def make_step(folder: Path, tmp_path: Path) -> MakeStep:
    def make(**values: Any) -> TrainStep:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainStep(make_spec(folder, tmp_path, **{"chunk_bytes": 10_000, "chunks": "memory", **values}))

    return make


def request_of(chunk: ExportChunkResponse) -> LoadChunkRequest:
    """Make the request like the client of an engine, over JSON and back."""
    request = LoadChunkRequest.model_validate(chunk, from_attributes=True)
    return LoadChunkRequest.model_validate_json(request.model_dump_json())


def export(step: TrainStep, index: int) -> Any:
    return step.export_chunk(step.policy_version, index)


def wake_empty(engine: Engine) -> None:
    engine.sleep(SleepRequest(parts=BOTH)).result(timeout=60)
    engine.wake(WakeRequest(parts=["weights"])).result(timeout=60)


def push(step: TrainStep, engine: Engine) -> None:
    """Push all chunks; the engine then has the trainer's bits."""
    wake_empty(engine)
    chunks: list[ExportChunkResponse] = []
    while not chunks or not chunks[-1].is_last:
        chunk = export(step, len(chunks))
        assert chunk.path == ""
        assert engine.weights.load_chunk(request_of(chunk)).digest == chunk.digest
        chunks.append(chunk)
    assert len(chunks) > 3
    digest, weights = chunks[-1].whole_digest, step._lazy_weights()
    commit = CommitRequest(version=step.policy_version, digest=digest)
    assert engine.commit(commit).result(timeout=60).digest == digest
    engine.wake(WakeRequest(parts=["kv"])).result(timeout=60)
    assert engine.health().policy_version == step.policy_version
    found = engine.weights._parameters
    assert engine.weights.digest == digest_tensors(found), "of all, at both ends"
    assert all(torch.equal(one.data, weights[name].to(step.dtype)) for name, one in found.items())


@pytest.mark.parametrize("values", [{"dtype": "bfloat16"}, {"trainer": {"lora": {"rank": 4}}}])
def test_engine_has_the_trainers_bits_version_after_version(
    make_step: MakeStep, folder: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    step = make_step(**values)
    with running_engine(folder, dtype=values.get("dtype", "float32")) as engine:
        opened = set()
        for version in (0, 1):
            step.train(*make_batch(version=version))
            push(step, engine)
            opened.add(engine.weights._memory._memory)
        answered(engine)
        assert len(opened) == 1, "opened once"
        other = make_step(**values)  # takes the place of a trainer that was lost
        place: Any = other._chunks._place
        elsewhere = Path(place._memory.handle.name).with_name("of-another-process")
        place._memory = make_file(elsewhere, place._memory.handle.num_bytes)
        for version in (0, 1, 2):
            other.train(*make_batch(version=version))
        push(other, engine)
        assert engine.weights._memory._memory not in opened, "opened anew"
        wake_empty(engine)
        chunk = export(other, 0)
        place._memory.data[0] ^= 1
        with pytest.raises(Refused, match=r"chunk 0 in file memory.*digest"):
            engine.weights.load_chunk(request_of(chunk))
        with pytest.raises(Refused, match="loaded are 0 of"):
            engine.weights.load_chunk(request_of(export(other, 1)))
        push(other, engine)


def test_lost_memory_is_refused(make_step: MakeStep, tmp_path: Path) -> None:
    chunk = export(make_step(), 0)
    ((handle,), (first, *_)) = chunk.memory.handles, chunk.memory.tensors
    gone = ChunkMemory(handles=[handle.model_copy(update={"name": str(tmp_path / "none")})], tensors=[first])
    request = request_of(chunk).model_copy(update={"memory": gone})
    with pytest.raises(OSError, match="No such file"), ipc.TrainerMemory(torch.device("cpu")).chunk(request):
        pass


def test_each_worker_opens_the_memory_of_its_device(
    make_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks have a device each; a worker sees one device."""
    chunk = export(make_step(), 0)
    first = chunk.memory.tensors[0].model_copy(update={"start": 0, "dtype": "uint8", "shape": [3]})
    memories = [make_file(tmp_path / f"rank-{rank}", 5000) for rank in range(4)]
    handles = []
    for rank, memory in enumerate(memories):
        memory.data.fill_(rank)
        handles.append(memory.handle.model_copy(update={"device": f"uuid-{rank}"}))
    together = ChunkMemory(handles=handles, tensors=[first])
    request = request_of(chunk.model_copy(update={"memory": together}))
    for rank in (3, 0, 2):
        monkeypatch.setattr(ipc, "name_of", lambda _, rank=rank: f"uuid-{rank}")
        worker = ipc.TrainerMemory(torch.device("cpu"))
        for _ in range(2):
            with worker.chunk(request) as tensors:
                assert tensors[first.name].tolist() == [rank] * 3


@pytest.mark.gpu
@pytest.mark.slow
def test_device_weights_reach_an_engine_process(make_step: MakeStep, folder: Path, tmp_path: Path) -> None:
    step = make_step(device="cuda", dtype="bfloat16", chunk_bytes=2**16)
    spec = {"name": "engine-0", "model_path": str(folder), "slots": 4, "max_length": 128}

    async def story(url: str) -> None:
        caller = Caller("engine-0", url, SECRET)
        engine = EngineServer(caller)
        try:
            for version in (1, 2, 3):
                step.train(*make_batch(version=version - 1))
                await engine.sleep(BOTH)
                await engine.wake(["weights"])
                index, is_last = 0, False
                while not is_last:
                    chunk = export(step, index)
                    assert chunk.memory is not None
                    assert chunk.memory.handles[0].kind == "cuda"
                    assert await engine.load_chunk(chunk) == chunk.digest
                    index, is_last = index + 1, chunk.is_last
                await engine.commit(version, chunk.whole_digest, "abort")
                await engine.wake(["kv"])
                step.offload(("weights", "gradients", "optimizer"))
                step.onload(("weights", "optimizer"))
        finally:
            await caller.aclose()

    device = {"device": "cuda", "dtype": "bfloat16"}
    with engine_process("embedded", spec | device, tmp_path / "server") as child:
        asyncio.run(story(child.url))
    memory = ipc.make_memory(50 * 10**6, torch.device("cuda"), tmp_path)
    free = torch.cuda.mem_get_info()[0]
    del memory
    gc.collect()
    assert torch.cuda.mem_get_info()[0] - free >= 50 * 10**6, "it goes back to the device"
