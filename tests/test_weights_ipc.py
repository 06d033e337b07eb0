"""Chunks of weights in memory that trainer and engine share: a file, or CUDA memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_in_process import answered, make_qwen3, publish, running_engine
from safetensors.torch import load_file
from trainer_cases import make_batch, make_spec

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import (
    ChunkMemory,
    CommitRequest,
    EnginePart,
    LoadChunkRequest,
    PlacedTensor,
    PrepareRequest,
    WakeRequest,
)
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights import ipc
from asyncrl.weights.ipc import make_memory
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl_servers.embedded.embedded_engine import Engine

CPU = torch.device("cpu")
BOTH: list[EnginePart] = ["kv", "weights"]
MakeStep = Callable[..., TrainerRank]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(
        tmp_path_factory.mktemp("shared") / "model", num_hidden_layers=2, vocab_size=256
    )


@pytest.fixture
def make_step(folder: Path, tmp_path: Path) -> MakeStep:
    def make(**values: Any) -> TrainerRank:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainerRank(
            make_spec(
                folder,
                tmp_path,
                **{"chunk_bytes": 10_000, "chunks": "memory", **values},
            )
        )

    return make


def spec_of(values: dict[str, Any], aside_dir: Path) -> dict[str, Any]:
    """Return the engine's part of a trainer's settings."""
    if "trainer" in values:
        adapters = {"rank": 32, "scale": 1.0}
        return {"dtype": "float32", "adapters": adapters, "aside_dir": aside_dir}
    return {"dtype": values["dtype"]}


def request_of(chunk: ExportChunkResponse) -> LoadChunkRequest:
    """Make the request like the client of an engine, over JSON and back."""
    request = LoadChunkRequest.model_validate(chunk, from_attributes=True)
    return LoadChunkRequest.model_validate_json(request.model_dump_json())


def export(step: TrainerRank, index: int) -> Any:
    return step.export_chunk(step.policy_version, index)


def wake_empty(engine: Engine) -> None:
    engine.sleep().result(timeout=60)
    engine.wake(WakeRequest(parts=["weights"])).result(timeout=60)


def push(step: TrainerRank, engine: Engine) -> None:
    """Push all chunks; the engine then has the trainer's bits."""
    wake_empty(engine)
    chunks: list[ExportChunkResponse] = []
    while not chunks or not chunks[-1].is_last:
        chunk = export(step, len(chunks))
        assert chunk.path == ""
        assert engine.weights.load_chunk(request_of(chunk)).digest == chunk.digest
        chunks.append(chunk)
    assert len(chunks) > 3
    digest, weights = chunks[-1].whole_digest, step.exports.pushed()
    commit = CommitRequest(version=step.policy_version, digest=digest)
    assert engine.commit(commit).result(timeout=60).digest == digest
    engine.wake(WakeRequest(parts=["kv"])).result(timeout=60)
    assert engine.health().policy_version == step.policy_version
    found = engine.weights._parameters
    assert engine.weights.digest == digest_tensors(found), "of all, at both ends"
    assert all(
        torch.equal(one.data, weights[name].to(step.dtype))
        for name, one in found.items()
    )


@pytest.mark.parametrize(
    "values", [{"dtype": "bfloat16"}, {"trainer": {"lora": {"rank": 32}}}]
)
def test_engine_has_the_trainers_bits_version_after_version(
    make_step: MakeStep, folder: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    step = make_step(**values)
    with running_engine(folder, **spec_of(values, tmp_path)) as engine:
        opened = set()
        for version in (0, 1):
            step.train(*make_batch(version=version))
            push(step, engine)
            opened.add(engine.weights._memory._memory)
        answered(engine)
        assert len(opened) == 1, "opened once"
        other = make_step(**values)  # takes the place of a trainer that was lost
        place: Any = other.exports._chunks._place
        elsewhere = Path(place._memory.handle.name).with_name("of-another-process")
        place._memory = make_memory(place._memory.handle.num_bytes, CPU, elsewhere)
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


def prepare_of(sent: ExportResponse) -> PrepareRequest:
    """Make the request like the client of an engine, over JSON and back."""
    request = PrepareRequest.model_validate(sent, from_attributes=True)
    return PrepareRequest.model_validate_json(request.model_dump_json())


@pytest.mark.parametrize(
    "values", [{"dtype": "bfloat16"}, {"trainer": {"lora": {"rank": 32}}}]
)
def test_generating_engine_copies_each_version_from_memory(
    make_step: MakeStep, folder: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """The trainer's next step, export and death change nothing that the engine serves."""
    step = make_step(transport="ipc", chunks="file", is_file_wanted=True, **values)
    path = tmp_path / "staging" / "v.safetensors"
    with running_engine(folder, **spec_of(values, tmp_path)) as engine:
        opened = set()
        for version in (0, 1):
            step.train(*make_batch(version=version))
            sent = step.begin_export(path)()
            written = {
                name: tensor.clone() for name, tensor in load_file(sent.path).items()
            }
            assert digest_tensors(written) == sent.digest, (
                "evaluation reads the same weights from the file"
            )
            publish(engine, prepare_of(sent))
            step.train(*make_batch(version=version + 1, seed=1))
            opened.add(engine.weights._memory._memory)
            step.policy_version = version + 1
            assert {*engine.weights._parameters} == {*written}
            assert all(
                torch.equal(engine.weights._parameters[name].data, written[name])
                for name in written
            )
            answered(engine)
        assert len(opened) == 1, "opened once"
        served = engine.weights.digest
        newer = step.begin_export(path)()
        place: Any = step.exports.transport
        place._place._memory.data[0] ^= 1
        with pytest.raises(
            Refused, match=r"policy_version 2 in the trainer's memory holds .* digest"
        ):
            engine.weights.prepare(prepare_of(newer))
        lost = newer.memory
        assert lost is not None
        Path(lost.handles[0].name).unlink()
        gone = lost.handles[0].model_copy(
            update={"name": f"{lost.handles[0].name}.gone"}
        )
        unread = newer.model_copy(
            update={"memory": lost.model_copy(update={"handles": [gone]})}
        )
        with pytest.raises(OSError, match="No such file"):
            engine.weights.prepare(prepare_of(unread))
        answered(engine)
        assert (engine.weights.digest, engine.health().policy_version) == (served, 2)


def test_each_worker_opens_the_memory_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks have a device each; a worker sees one device."""
    first = PlacedTensor(name="one", dtype="uint8", shape=[3], start=0)
    handles = []
    for rank in range(4):
        memory = make_memory(5000, CPU, tmp_path / f"rank-{rank}")
        memory.data.fill_(rank)
        handles.append(memory.handle.model_copy(update={"device": f"uuid-{rank}"}))
    together = ChunkMemory(handles=handles, tensors=[first])
    request: Any = SimpleNamespace(memory=together)
    for rank in (3, 0, 2):
        monkeypatch.setattr(ipc, "name_of", lambda _, rank=rank: f"uuid-{rank}")
        with ipc.TrainerMemory(CPU).opened(request) as tensors:
            assert tensors["one"].tolist() == [rank] * 3
    monkeypatch.setattr(ipc, "name_of", lambda _: "uuid-4")
    with pytest.raises(Refused, match="not of 'uuid-4'"):
        ipc.TrainerMemory(CPU).tensors(request)
