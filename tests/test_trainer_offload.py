"""Offloaded parts return bit for bit, and calls that need them are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import TIMEOUT_S, Group, running, save_state
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import MakeStep, full_disk, learned, make_batch

from asyncrl.base.errors import TrainerError
from asyncrl.base.http import CallRefused, Refused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.trainer_api import StateRequest, TrainerHealth, TrainerPart
from asyncrl.trainer.offload import HostMemory
from asyncrl.trainer.trainer_client import TrainerClient

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")
PAGED = {"hidden_size": 64, "intermediate_size": 256}
"""Weights of several pages."""


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", **PAGED)


@pytest.fixture
def make_step(make_step: MakeStep, paged_model_dir: Path) -> MakeStep:
    return lambda model_dir=paged_model_dir, **values: make_step(model_dir, **values)


def test_host_memory_asks_for_large_pages() -> None:
    memory = HostMemory(torch.device("cpu"))
    address = memory.of(2**23).fill_(3).data_ptr()
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ranges = {tuple(int(end, 16) for end in one.split(" ", 1)[0].split("-")): one for one in maps if one}
    (found,) = (text for (start, end), text in ranges.items() if start <= address < end)
    has_large = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert (" hg" in found.split("VmFlags:")[1]) == has_large
    assert bool((memory.of(2**20) == 3).all())


def are_gone(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize(
    ("values", "is_tied"),
    [
        ({}, True),
        ({"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"}, True),
        ({"trainer": {"mini_batches": 2}, "algorithm": {"kl_coefficient": 0.1}}, False),
    ],
    ids=["tied", "lora in bfloat16", "reference"],
)
def test_offloaded_trainer_takes_the_same_steps(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any], is_tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied, **PAGED)
    plain, step = make_step(folder, **values), make_step(folder, **values)
    weights, optimizer = ("weights",), ("optimizer",)
    between: list[list[tuple[str, tuple[str, ...]]]] = [
        [("offload", ALL), ("onload", ALL)],  # before there is any optimizer state
        [("offload", ("gradients", "optimizer")), ("offload", weights), ("onload", ALL)],
        [("offload", optimizer), ("offload", ALL), ("offload", ALL), ("onload", optimizer), ("onload", ALL)],
        [("offload", weights), ("onload", weights), ("offload", optimizer), ("onload", optimizer)],
    ]
    for version, moves in enumerate(between):
        for move, parts in moves:
            getattr(step, move)(parts)
        batch = make_batch(version=version, seed=version)
        expected, actual = plain.train(*batch), step.train(*batch)
        assert learned(actual) == learned(expected)
    assert step.weights_digest() == plain.weights_digest()
    assert step.export(tmp_path / "one").digest == plain.export(tmp_path / "other").digest
    assert step.offloaded == []


def test_offloaded_parts_have_no_memory(make_step: MakeStep) -> None:
    step = make_step(dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    step.train(*make_batch())
    weights, optimizer = step._tensors_of("weights"), step._tensors_of("optimizer")
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    moved = step.offload(("optimizer",))
    assert moved.num_bytes / (num_parameters * 12) >= 0.8, "float32 masters and two moments"
    assert are_gone(optimizer)
    assert not are_gone(weights), "an export needs no more than these"
    step.offload(ALL)
    assert are_gone(weights)
    assert step.offload(ALL).num_bytes == 0
    assert step.offloaded == ["gradients", "optimizer", "weights"]
    assert step.onload(("optimizer",)).num_bytes == moved.num_bytes


def test_call_that_needs_an_offloaded_part_is_refused(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step()
    step.offload(("optimizer",))
    with pytest.raises(Refused, match="cannot train: optimizer offloaded") as refused:
        step.train(*make_batch())
    assert refused.value.body.way_out == "POST /onload with parts ['optimizer'] first."
    step.export(tmp_path / "v0.safetensors")
    step.save(tmp_path / "saved")
    step.offload(("weights",))
    for what, call in {
        "train: weights and optimizer": lambda: step.train(*make_batch()),
        "export: weights": lambda: step.export(tmp_path / "v1.safetensors"),
        "export a chunk: weights": lambda: step.export_chunk(0, 0),
        "save: weights": lambda: step.save(tmp_path / "again"),
        "load a state: weights and optimizer": lambda: step.load_state(tmp_path / "state"),
    }.items():
        with pytest.raises(Refused, match=f"cannot {what} offloaded"):
            call()
    step.onload(ALL)
    step.train(*make_batch())


@pytest.mark.gpu
def test_device_parts_come_back_to_the_bit(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step(device="cuda", dtype="bfloat16")
    step.train(*make_batch())
    digest, before = step.weights_digest(), torch.cuda.memory_allocated()
    moved = step.offload(ALL)
    assert torch.cuda.memory_allocated() <= before - moved.num_bytes
    step.begin_save_state(tmp_path / "state")
    step.wait_save_state()
    step.onload(ALL)
    assert step.weights_digest() == digest
    again = make_step(device="cuda", dtype="bfloat16")
    again.load_state(tmp_path / "state")
    assert again.weights_digest() == digest
    step.train(*make_batch(version=1))


# ---- real processes

NOISY = """
import torch
def loss(tokens, settings):
    return tokens.current_M * torch.rand_like(tokens.current_M), {}
"""


def move(group: Group, what: str, *parts: TrainerPart) -> TransferStats:
    moved: TransferStats = group.ask(
        lambda caller: getattr(TrainerClient(caller, timeout_s=TIMEOUT_S), what)(parts)
    )
    return moved


@pytest.mark.slow
def test_offloaded_ranks_give_the_same_bits(paged_model_dir: Path, tmp_path: Path) -> None:
    for name in ("plain", "moved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "noisy_loss.py").write_text(NOISY)  # each rank draws other noise
    noisy = {"algorithm": {"loss": "noisy_loss:loss"}}
    with (
        running(paged_model_dir, tmp_path / "plain", **noisy) as plain,
        running(paged_model_dir, tmp_path / "moved", **noisy) as moved,
    ):
        for version in range(3):
            assert (move(moved, "offload", "optimizer").num_bytes > 0) == (version > 0)
            with full_disk(moved.processes[1].pid):
                with pytest.raises(
                    TrainerError, match="cannot offload weights, gradients on rank 1: OSError"
                ):
                    move(moved, "offload", *ALL)
            assert [moved.health(rank).offloaded for rank in range(2)] == [["optimizer"]] * 2
            move(moved, "offload", *ALL)
            if version == 2:
                with pytest.raises(CallRefused, match="cannot export: weights offloaded"):
                    moved.export()
                save_state(moved, tmp_path / "state")
            move(moved, "onload", *ALL)
            batch = make_batch(version=version, seed=version)
            expected, actual = plain.train(*batch).metrics, moved.train(*batch).metrics
            assert learned(actual) == learned(expected)
        assert moved.export().digest == plain.export().digest
        plain.post("/load_state", StateRequest(path=str(tmp_path / "state")), TrainerHealth)
        plain.train(*make_batch(version=2, seed=2))
        assert moved.export().digest == plain.export().digest, "saved while it was away, generators included"
