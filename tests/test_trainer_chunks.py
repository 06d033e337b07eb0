"""Weights leave the trainer in chunks that together are the export: the same tensors, the same digest, one
file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import make_batch, make_spec

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.chunk_export import cut
from asyncrl.weights.export import digest_of

CHUNK_BYTES = 10_000
MakeStep = Callable[..., TrainStep]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = tiny_model_dir, **values: Any) -> TrainStep:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainStep(make_spec(model_dir, tmp_path, **{"chunk_bytes": CHUNK_BYTES, **values}))

    return make


def chunks_of(step: TrainStep) -> list[tuple[ExportChunkResponse, dict[str, Tensor]]]:
    """As an engine asks for them: each loaded before the next is asked for."""
    chunks: list[tuple[ExportChunkResponse, dict[str, Tensor]]] = []
    while not chunks or not chunks[-1][0].is_last:
        step.chunk_names(step.policy_version, len(chunks))
        answer = step.export_chunk(len(chunks))
        chunks.append((answer, {name: tensor.clone() for name, tensor in load_file(answer.path).items()}))
    return chunks


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtype": "bfloat16"},
        {"trainer": {"lora": {"rank": 4}}},
        {"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"},
    ],
    ids=["float32", "bfloat16", "lora", "lora in bfloat16"],
)
def test_the_chunks_together_are_the_export_in_its_order_and_with_its_digest(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any]
) -> None:
    step = make_step(make_tiny_model(tmp_path / "model", tie_word_embeddings=False), **values)
    for version in (1, 2):
        step.train(*make_batch(version=version - 1))
        whole = step.export(tmp_path / f"v{version}.safetensors")
        chunks = chunks_of(step)
        assert len(chunks) > 3
        tensors: dict[str, Tensor] = {}
        for index, (answer, chunk) in enumerate(chunks):
            assert (answer.version, answer.index, answer.is_last) == (
                version,
                index,
                index == len(chunks) - 1,
            )
            assert answer.digest == digest_of(chunk)
            assert answer.num_tensors == len(chunk)
            assert answer.num_bytes == sum(tensor.nbytes for tensor in chunk.values())
            assert answer.num_bytes <= CHUNK_BYTES or len(chunk) == 1
            assert (answer.whole_digest == whole.digest) == answer.is_last
            assert not tensors.keys() & chunk.keys()
            tensors.update(chunk)
        expected = load_file(whole.path)
        assert list(tensors) == sorted(expected)
        assert all(
            torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
            for name, tensor in expected.items()
        )
        assert sum(answer.num_bytes for answer, _ in chunks) == whole.num_bytes


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 60))
def test_a_chunk_is_what_fits_or_one_tensor_that_does_not_and_none_could_take_the_next_one(
    sizes: list[int], chunk_bytes: int
) -> None:
    by_name = {f"{index:02}": size for index, size in enumerate(sizes)}
    chunks = cut(by_name, chunk_bytes)
    assert [name for chunk in chunks for name in chunk] == list(by_name)
    total = [sum(by_name[name] for name in chunk) for chunk in chunks]
    assert all(size <= chunk_bytes or len(chunk) == 1 for size, chunk in zip(total, chunks, strict=True))
    assert all(size + by_name[later[0]] > chunk_bytes for size, later in zip(total, chunks[1:], strict=False))


def test_all_chunks_go_through_one_file_which_has_the_length_of_its_chunk(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    chunks_of(step)
    (file,) = (tmp_path / "staging").iterdir()
    inode = file.stat().st_ino
    last = chunks_of(step)[-1][0]
    assert (tmp_path / "staging" / "chunk.safetensors").stat().st_ino == inode
    head = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + head + last.num_bytes


def test_a_trainer_that_is_started_again_goes_on_with_any_chunk_and_knows_the_digest_of_all(
    make_step: MakeStep, tmp_path: Path
) -> None:
    first = make_step()
    chunks = chunks_of(first)
    again = make_step()
    for index in (len(chunks) - 1, 1, len(chunks) - 1, len(chunks) - 1):
        again.chunk_names(0, index)
        assert again.export_chunk(index) == chunks[index][0]
        assert digest_of(load_file(chunks[index][0].path)) == chunks[index][0].digest
    assert chunks[-1][0].whole_digest == first.export(tmp_path / "v0.safetensors").digest


def test_a_loaded_state_leaves_no_digest_of_the_weights_before(make_step: MakeStep, tmp_path: Path) -> None:
    step, other = make_step(), make_step()
    other.train(*make_batch(seed=5))
    other.begin_save_state(tmp_path / "state")
    other.wait_save_state()
    step.train(*make_batch())
    chunks_of(step)
    step.load_state(tmp_path / "state")
    last = len(chunks_of(other)) - 1
    step.chunk_names(1, last)
    assert step.export_chunk(last).whole_digest == other.export(tmp_path / "other").digest


def test_what_is_no_chunk_of_the_newest_weights_is_refused(make_step: MakeStep) -> None:
    step = make_step()
    with pytest.raises(Refused, match="chunk 99 was asked for, and version 0 has "):
        step.chunk_names(0, 99)
    with pytest.raises(
        Refused, match="a chunk of version 1 was asked for while the trainer is at policy_version 0"
    ):
        step.chunk_names(1, 0)
    adapters = make_step(trainer={"lora": {"rank": 4}}, transport="lora")
    with pytest.raises(Refused, match="transport=lora sends the adapters alone") as refused:
        adapters.chunk_names(0, 0)
    assert refused.value.body.way_out.startswith("POST /export")


def test_a_chunk_that_cannot_be_written_is_an_error_and_can_be_asked_for_again(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    (tmp_path / "staging" / "chunk.safetensors").symlink_to("/dev/full")
    step.chunk_names(0, 0)
    with pytest.raises(OSError, match="No space left"):
        step.export_chunk(0)
    (tmp_path / "staging" / "chunk.safetensors").unlink()
    assert chunks_of(step)[-1][0].whole_digest == step.export(tmp_path / "v0.safetensors").digest
