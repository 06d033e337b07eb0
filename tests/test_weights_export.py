"""Exports that other readers understand, their chunks, and one digest for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from torch import Tensor, nn
from trainer_cases import make_batch, make_spec, weights_digest
from weight_cases import chunks_of

from asyncrl.base.http import Refused
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights import tensor_files
from asyncrl.weights.export import named_weights
from asyncrl.weights.tensor_files import (
    block_sums,
    digest_tensors,
    digests_of,
    read_or_refuse,
    write_tensors,
)

CHUNK_BYTES = 10_000
MakeStep = Callable[..., TrainerRank]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = tiny_model_dir, **values: Any) -> TrainerRank:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainerRank(
            make_spec(model_dir, tmp_path, **{"chunk_bytes": CHUNK_BYTES, **values})
        )

    return make


# ---- whole


def test_weights_are_named_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk through the modules costs 0.05 ms between two steps."""
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.BatchNorm1d(2), nn.Linear(2, 2), inner)
    model[2].bias = inner.bias
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    parameters = dict(model.named_parameters())
    buffers = {f"1.{name}": one for name, one in model[1].named_buffers()}
    monkeypatch.delattr(nn.Module, "_named_members")
    found = named_weights(model)
    assert [*found] == [*parameters, *buffers]
    for name, tensor in (parameters | buffers).items():
        assert found[name].data_ptr() == tensor.data_ptr()


def test_export_holds_every_weight_once_by_its_name(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    step = TrainerRank(make_spec(tiny_model_dir, tmp_path, dtype="bfloat16"))
    step.train(*make_batch())
    answer = step.begin_export(tmp_path / "v1.safetensors")()
    loaded, parameters = (
        load_file(answer.path),
        dict(step.policy.model.named_parameters()),
    )
    assert loaded.keys() == parameters.keys()
    assert "lm_head.weight" not in loaded, "tied to the exported embedding"
    assert all(
        torch.equal(loaded[name], one.detach().bfloat16())
        for name, one in parameters.items()
    )
    assert answer.digest == digest_tensors(loaded)
    num_bytes = sum(tensor.nbytes for tensor in loaded.values())
    assert (answer.version, answer.num_tensors, answer.num_bytes) == (
        1,
        len(loaded),
        num_bytes,
    )
    assert [path.name for path in tmp_path.glob("*safetensors*")] == ["v1.safetensors"]


# ---- in chunks


@pytest.mark.parametrize(
    "values", [{}, {"trainer": {"lora": {"rank": 64}}, "dtype": "bfloat16"}]
)
def test_chunks_together_are_the_export(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any]
) -> None:
    step = make_step(
        make_tiny_model(tmp_path / "model", tie_word_embeddings=False), **values
    )
    for version in (1, 2):
        step.train(*make_batch(version=version - 1))
        whole = step.begin_export(tmp_path / f"v{version}.safetensors")()
        chunks, tensors = chunks_of(step), dict[str, Tensor]()
        assert len(chunks) > 3
        for index, (answer, chunk) in enumerate(chunks):
            is_last = index == len(chunks) - 1
            assert (answer.version, answer.index, answer.is_last) == (
                version,
                index,
                is_last,
            )
            assert (answer.digest, answer.num_tensors) == (
                digest_tensors(chunk),
                len(chunk),
            )
            assert answer.num_bytes == sum(tensor.nbytes for tensor in chunk.values())
            assert answer.num_bytes <= CHUNK_BYTES or len(chunk) == 1
            assert (answer.whole_digest == whole.digest) == is_last
            assert not tensors.keys() & chunk.keys()
            tensors.update(chunk)
        expected = load_file(whole.path)
        assert list(tensors) == sorted(expected)
        assert all(
            torch.equal(tensors[name], tensor) for name, tensor in expected.items()
        )


def test_restarted_trainer_exports_any_chunk(make_step: MakeStep) -> None:
    chunks, again = [answer for answer, _ in chunks_of(make_step())], make_step()
    for index in (len(chunks) - 1, 1, len(chunks) - 1, len(chunks) - 1):
        answer = again.export_chunk(0, index)
        assert (answer.digest, answer.whole_digest) == (
            chunks[index].digest,
            chunks[index].whole_digest,
        )


def test_unknown_chunk_is_refused_and_a_full_disk_retried(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    with pytest.raises(Refused, match="version 1 was requested at policy_version 0"):
        step.export_chunk(1, 0)
    file = tmp_path / "staging" / "chunk.safetensors"
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        chunks_of(step)
    file.unlink()
    assert chunks_of(step)[-1][0].is_last


def test_export_is_written_during_the_forward_pass(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step, forward_ran, changes = make_step(), threading.Event(), list[bool]()
    before = weights_digest(step)

    def change_now(*_: object) -> None:
        changes.append(exporting.done())

    def write_late(*arguments: Any) -> dict[str, bytes]:
        assert forward_ran.wait(60), "the export blocked parallel work"
        return write_tensors(*arguments)

    step.policy.register_forward_hook(lambda *_: forward_ran.set())
    step.trained.optimizer.register_step_pre_hook(change_now)
    with patch("asyncrl.weights.export.write_tensors", write_late):
        finish = step.begin_export(tmp_path / "v0.safetensors")
        exporting = step.exports.exporting
        assert exporting is not None
        step.train(*make_batch())
    answer = finish()
    assert changes == [True]
    assert (answer.version, answer.digest) == (0, before)
    assert digest_tensors(load_file(answer.path)) == before != weights_digest(step)


def test_failed_export_reaches_its_caller_and_training_continues(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    (tmp_path / "v0.safetensors.unfinished").symlink_to("/dev/full")
    finish = step.begin_export(tmp_path / "v0.safetensors")
    step.train(*make_batch())
    with pytest.raises(OSError, match="No space left"):
        finish()
    assert not (tmp_path / "v0.safetensors").exists()
    assert step.begin_export(tmp_path / "v1.safetensors")().version == 1


# ---- digests and files


def sums_of(data: bytes) -> bytes:
    """Compute a tensor's sums in Python's integers."""
    data += bytes(-len(data) % 2048)
    signed = memoryview(data).cast("b").tolist()
    sums = b""
    for start in range(0, len(data), 2048):
        for keys in tensor_files.block_keys().T.tolist():
            total = sum(
                byte * key
                for byte, key in zip(signed[start : start + 2048], keys, strict=True)
            )
            sums += total.to_bytes(4, "little", signed=True)
    return sums


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@given(
    st.sampled_from([0, 1, 3, 2047, 2048, 2049, 5000, 2048 * 17]),
    st.sampled_from([b"\x80", b"\x7f", None]),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    st.sampled_from(DEVICES),
    st.lists(st.integers(1, 18), min_size=1, max_size=3),
)
@settings(max_examples=30)
def test_processors_devices_and_cuts_compute_the_same_sums(
    num_bytes: int,
    filled_with: bytes | None,
    dtype: torch.dtype,
    device: str,
    cuts: list[int],
) -> None:
    num_bytes -= num_bytes % dtype.itemsize
    random = np.random.default_rng(num_bytes).bytes(num_bytes)
    data = random if filled_with is None else filled_with * num_bytes
    tensor = (
        torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        .view(dtype)
        .to(device)
    )
    expected = sums_of(data)
    floats = tensor_files._product_of_floats
    for cut in [*cuts, tensor_files.PIECE_BLOCKS.get(device, 8192)]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(tensor_files.PIECE_BLOCKS, device, cut)
            assert block_sums(tensor).cpu().numpy().tobytes() == expected
            patched.setattr(
                torch,
                "_int_mm",
                lambda blocks, keys, out: floats(blocks, keys.float(), out=out),
            )
            assert block_sums(tensor).cpu().numpy().tobytes() == expected


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "ieee"), ("cpu", "bf16"), *[(one, "tf32") for one in DEVICES]],
)
def test_products_of_any_allowed_precision_are_exact(
    device: str, precision: str
) -> None:
    matmul: Any = (
        torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul
    )  # type: ignore[attr-defined]
    keys_KS = torch.from_numpy(tensor_files.block_keys())
    # The largest possible sums, of either sign, and 400 blocks between them.
    largest_SK = torch.where(keys_KS.T > 0, 127, -128)
    random_BK = torch.randint(-128, 128, (400, 2048))
    blocks_BK = torch.cat([largest_SK, -1 - largest_SK, random_BK]).to(torch.int8)
    found_BS = torch.empty(len(blocks_BK), 8, dtype=torch.int32, device=device)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        tensor_files._product_of_floats(
            blocks_BK.to(device), keys_KS.to(device).float(), out=found_BS
        )
    finally:
        matmul.fp32_precision = before
    assert torch.equal(found_BS.cpu().long(), blocks_BK.long() @ keys_KS.long())


@given(st.data())
def test_any_change_of_a_tensor_changes_its_digest(data: st.DataObject) -> None:
    tensor = torch.randn(data.draw(st.integers(2, 40)), 4)
    changed = tensor.clone().view(torch.uint8).flatten()
    position, bit = (
        data.draw(st.integers(0, len(changed) - 1)),
        data.draw(st.integers(0, 7)),
    )
    changed[position] ^= 1 << bit
    changed = changed.view(torch.float32).view(tensor.shape)
    others = [changed, -tensor, tensor.roll(1, 0), tensor.T, tensor.view(torch.int32)]
    digests = {digests_of({"w": one})["w"] for one in (tensor, *others)} | {
        digests_of({"v": tensor})["v"]
    }
    assert len(digests) == 2 + len(others)
    assert digests_of({"w": tensor.clone()})["w"] in digests


def test_torn_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.randn(3, 5)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Refused, match="cannot read the weights file"):
        read_or_refuse(str(path))
