"""Chunks in memory that trainer and engine both have open: a mapped file here, an allocation of the device
where there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import make_qwen3, make_request, running_engine
from engine_processes import SECRET, engine_process
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import make_batch, make_spec

from asyncrl.config import RunConfig
from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import ConfigError
from asyncrl.http import Caller, Refused
from asyncrl.messages.base import ChunkMemory, EnginePart, PlacedTensor, joint_digest
from asyncrl.messages.engine_calls import CommitRequest, LoadChunkRequest, SleepRequest, WakeRequest
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.placement.choices import ChunkWay, chunk_way
from asyncrl.placement.devices import child_environ, place
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.shared_memory import MappedFile, shared_digest
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.trainer_memory import views

CHUNK_BYTES = 10_000
BOTH: list[EnginePart] = ["kv", "weights"]
MakeStep = Callable[..., TrainStep]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("shared") / "model", num_hidden_layers=2, vocab_size=256)


@pytest.fixture
def make_step(folder: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = folder, **values: Any) -> TrainStep:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainStep(
            make_spec(model_dir, tmp_path, **{"chunk_bytes": CHUNK_BYTES, "chunks": "memory", **values})
        )

    return make


def request_of(chunk: ExportChunkResponse) -> LoadChunkRequest:
    """As the client of an engine makes it, over JSON and back."""
    fields = chunk.model_dump(exclude={"whole_digest", "canary"})
    return LoadChunkRequest.model_validate_json(LoadChunkRequest(**fields).model_dump_json())


def export(step: TrainStep, index: int) -> ExportChunkResponse:
    step.chunk_names(step.policy_version, index)
    return step.export_chunk(index)


def push(step: TrainStep, engine: Engine) -> int:
    """Number of chunks."""
    engine.sleep(SleepRequest(parts=BOTH)).result(timeout=60)
    engine.wake(WakeRequest(parts=["weights"])).result(timeout=60)
    index, is_last = 0, False
    while not is_last:
        chunk = export(step, index)
        assert chunk.path == ""
        assert chunk.num_bytes <= CHUNK_BYTES or chunk.num_tensors == 1
        assert engine.load_chunk(request_of(chunk)).digest == chunk.digest
        index, is_last = index + 1, chunk.is_last
    commit = CommitRequest(version=step.policy_version, digest=chunk.whole_digest)
    assert engine.commit(commit).result(timeout=60).digest == chunk.whole_digest
    engine.wake(WakeRequest(parts=["kv"])).result(timeout=60)
    return index


def loaded(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in engine.weights._parameters.items()}


def exported(step: TrainStep) -> dict[str, Tensor]:
    return {name: step._lazy_weights()[name].to(step.dtype) for name in step._lazy_weights()}


@pytest.mark.parametrize(
    "values",
    [{}, {"dtype": "bfloat16"}, {"trainer": {"lora": {"rank": 4}}}],
    ids=["float32", "bfloat16", "merged adapters"],
)
def test_version_after_version_the_engine_has_the_trainers_bits_through_one_piece_of_memory(
    make_step: MakeStep, folder: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    step = make_step(**values)
    with running_engine(folder, dtype=values.get("dtype", "float32")) as engine:
        opened = set()
        for version in (1, 2):
            step.train(*make_batch(version=version - 1))
            assert push(step, engine) > 3
            weights = exported(step)
            assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded(engine).items())
            assert engine.health().policy_version == version
            opened.add(engine.resting._chunks._memory._memory)
        engine.submit(make_request("r")).result(timeout=60)
    assert len(opened) == 1, "opened once"
    assert len(list((tmp_path / "staging").glob("chunk*"))) == 1


def test_the_digest_of_all_is_the_joint_one_of_each_tensors_checksum_and_another_trainer_says_the_same(
    make_step: MakeStep,
) -> None:
    first, again = make_step(), make_step()
    expected = joint_digest(shared_digest(name, tensor) for name, tensor in exported(first).items())
    index, chunk = 0, export(first, 0)
    while not chunk.is_last:
        index += 1
        chunk = export(first, index)
    assert chunk.whole_digest == expected
    assert export(again, index).whole_digest == expected, (
        "asked for the last chunk alone, it computes the others"
    )


def test_a_trainer_that_takes_the_place_of_another_is_opened_anew(make_step: MakeStep, folder: Path) -> None:
    with running_engine(folder) as engine:
        push(make_step(), engine)
        before = engine.resting._chunks._memory._memory
        assert before is not None
        step = make_step()
        step._chunks._place._memory = MappedFile.made(
            Path(before.handle.name).with_name("other"), before.handle.num_bytes
        )  # type: ignore[attr-defined]
        step.train(*make_batch())
        push(step, engine)
        assert engine.resting._chunks._memory._memory is not before
        assert all(torch.equal(tensor, exported(step)[name]) for name, tensor in loaded(engine).items())


def test_what_is_written_over_a_chunk_before_it_is_loaded_is_refused_and_the_push_begins_anew(
    make_step: MakeStep, folder: Path
) -> None:
    step = make_step()
    step.train(*make_batch())
    with running_engine(folder) as engine:
        engine.sleep(SleepRequest(parts=BOTH)).result(timeout=60)
        engine.wake(WakeRequest(parts=["weights"])).result(timeout=60)
        chunk = export(step, 0)
        step._chunks._place._memory.data[0] ^= 1  # type: ignore[attr-defined]
        with pytest.raises(Refused, match=r"chunk 0 in file memory.*digest"):
            engine.load_chunk(request_of(chunk))
        with pytest.raises(Refused, match="loaded is nothing"):
            engine.load_chunk(request_of(export(step, 1)))
        push(step, engine)


def test_a_layout_that_cannot_be_and_memory_that_is_gone_are_refused(
    make_step: MakeStep, folder: Path, tmp_path: Path
) -> None:
    step = make_step()
    chunk = request_of(export(step, 0))
    assert chunk.memory is not None
    data = torch.zeros(chunk.memory.handle.num_bytes, dtype=torch.uint8)
    for change in ({"start": 10**6}, {"start": 2}, {"dtype": "int8"}, {"shape": [-1, 5]}, {"shape": [10**9]}):
        wrong = chunk.memory.model_copy(
            update={"tensors": [chunk.memory.tensors[0].model_copy(update=change)]}
        )
        with pytest.raises(Refused, match="cannot be in a chunk"):
            views(wrong, data)
    twice = ChunkMemory(
        handle=chunk.memory.handle, tensors=[PlacedTensor(name="a", dtype="float32", shape=[1], start=0)] * 2
    )
    with pytest.raises(Refused, match="comes twice"):
        views(twice, data)
    with running_engine(folder) as engine:
        engine.sleep(SleepRequest(parts=BOTH)).result(timeout=60)
        engine.wake(WakeRequest(parts=["weights"])).result(timeout=60)
        gone = chunk.memory.handle.model_copy(update={"name": str(tmp_path / "none")})
        with pytest.raises(Refused, match="cannot open the file memory") as refused:
            engine.load_chunk(
                chunk.model_copy(update={"memory": chunk.memory.model_copy(update={"handle": gone})})
            )
        assert "the same device" in refused.value.body.way_out
        cuda = chunk.memory.handle.model_copy(update={"kind": "cuda"})
        with pytest.raises(Refused, match="cuda memory cannot be opened for tensors on cpu"):
            engine.load_chunk(
                chunk.model_copy(update={"memory": chunk.memory.model_copy(update={"handle": cuda})})
            )


def test_a_trainer_that_cannot_have_the_memory_says_so_before_it_starts(
    make_step: MakeStep, tmp_path: Path
) -> None:
    folder = tmp_path / "none"
    with pytest.raises(ConfigError, match="that trainer and engines could share") as error:
        make_step(make_tiny_model(tmp_path / "model"), staging_dir=str(folder))
    assert "publisher.chunk_bytes" in (error.value.way_out or "")


def way(num_cuda: int, **keys: Any) -> ChunkWay:
    values = {
        "model": {"path": "m"},
        "task": {"python": "m:T"},
        "buffer": {"max_staleness": 0},
        "rollout": {},
    }
    config = RunConfig.model_validate(values | keys)
    return chunk_way(config, place(config, num_cuda))


def test_memory_is_shared_where_engines_can_open_it_and_else_there_is_a_file() -> None:
    shared = {"rollout": "trainer"}
    on_cpu = way(0, placement={"trainer": "cpu", **shared})
    assert (on_cpu.place, on_cpu.device, on_cpu.how) == ("memory", "cpu", "through shared memory")
    on_one = way(1, placement={"trainer": "cuda", **shared})
    assert (on_one.place, on_one.device, on_one.how) == ("memory", "cuda:0", "by CUDA IPC")
    assert "NCCL cannot connect" in on_one.why
    two_engines = way(1, placement={"trainer": "cuda", **shared}, rollout={"num_engines": 2})
    assert two_engines.place == "memory", "both are on the one device"
    on_two = way(
        2, placement={"trainer": "all", **shared}, trainer={"world_size": 2}, rollout={"num_engines": 2}
    )
    assert (on_two.place, on_two.device) == ("file", "cpu")
    assert "rank 0 gathers them on cuda:0" in on_two.why
    assert way(0, placement={"trainer": "cpu", **shared}, rollout={"engine": "simulated"}).place == "file"
    assert way(0, placement={"trainer": "cpu", "rollout": "cpu"}).place == "file"


def test_processes_on_the_cpu_are_started_with_large_pages_unless_somebody_said_otherwise() -> None:
    name = "GLIBC_TUNABLES"
    assert child_environ(["cpu"], (), {}) == {name: "glibc.malloc.hugetlb=1"}
    assert child_environ(["cpu"], (), {name: "glibc.malloc.check=3"}) == {
        name: "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    }
    assert child_environ(["cpu"], (), {name: "glibc.malloc.hugetlb=0"}) == {}
    assert child_environ(["none"], (), {}) == {}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_device_weights_reach_an_engine_process_without_the_host(
    make_step: MakeStep, folder: Path, tmp_path: Path, dtype: str
) -> None:
    step = make_step(device="cuda", dtype=dtype, chunk_bytes=2**16)
    spec = {
        "name": "engine-0",
        "model_path": str(folder),
        "slots": 4,
        "max_length": 128,
        "device": "cuda",
        "dtype": dtype,
    }

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
                    assert chunk.memory.handle.kind == "cuda"
                    assert await engine.load_chunk(chunk) == chunk.digest
                    index, is_last = index + 1, chunk.is_last
                await engine.commit(version, chunk.whole_digest, "abort")
                await engine.wake(["kv"])
                step.offload(("weights", "gradients", "optimizer"))
                step.onload(("weights", "optimizer"))
        finally:
            await caller.aclose()

    with engine_process("embedded", spec, tmp_path / "server") as child:
        asyncio.run(story(child.url))
