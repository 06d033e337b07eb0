"""Offloaded parts return bit for bit, and calls that need them are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import MakeStep, learned, make_batch

from asyncrl.base.http import Refused
from asyncrl.messages.trainer_api import TrainerPart
from asyncrl.trainer.ranks import ONE_RANK, Ranks

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")
PAGED = {"hidden_size": 64, "intermediate_size": 256}
"""Weights of several pages."""


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", **PAGED)


@pytest.fixture
def make_step(make_step: MakeStep, paged_model_dir: Path) -> MakeStep:
    return lambda model_dir=paged_model_dir, **values: make_step(model_dir, **values)


def are_gone(tensors: Sequence[Tensor]) -> bool:
    return not any(
        tensor.untyped_storage().nbytes() for tensor in tensors if tensor.ndim
    )


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"},
        {"trainer": {"mini_batches": 2}, "algorithm": {"kl_coefficient": 0.1}},
    ],
    ids=["lora in bfloat16", "reference"],
)
def test_offloaded_trainer_takes_the_same_steps(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any]
) -> None:
    plain, step = make_step(**values), make_step(**values)
    weights, optimizer = ("weights",), ("optimizer",)
    between: list[list[tuple[str, tuple[str, ...]]]] = [
        [("offload", ALL), ("onload", ALL)],  # before there is any optimizer state
        [
            ("offload", ("gradients", "optimizer")),
            ("offload", weights),
            ("onload", ALL),
        ],
        [
            ("offload", optimizer),
            ("offload", ALL),
            ("offload", ALL),
            ("onload", optimizer),
            ("onload", ALL),
        ],
    ]
    for version, moves in enumerate(between):
        for move, parts in moves:
            getattr(step, move)(parts)
        batch = make_batch(version=version, seed=version)
        expected, actual = plain.train(*batch), step.train(*batch)
        assert learned(actual) == learned(expected)
    assert (
        step.export(tmp_path / "one").digest == plain.export(tmp_path / "other").digest
    )
    step.offload(ALL)
    step.begin_save_state(tmp_path / "state").result()
    step.onload(ALL)
    assert (step.offloaded, step.weights_digest()) == ([], plain.weights_digest())
    plain.train(*make_batch(version=3))
    plain.load_state(tmp_path / "state")
    assert plain.weights_digest() == step.weights_digest(), "saved while it was away"


class OtherRankFails(Ranks):
    def agree(self, work: Callable[[], Any]) -> Any:
        work()
        raise Refused(507, "no memory on rank 1")


def test_move_that_fails_on_another_rank_moves_nothing(make_step: MakeStep) -> None:
    step = make_step()
    step.train(*make_batch())
    step._offload._ranks = OtherRankFails()
    with pytest.raises(Refused, match="on rank 1"):
        step.offload(ALL)
    assert (step.offloaded, are_gone(step._tensors_of("weights"))) == ([], False)
    step._offload._ranks = ONE_RANK
    step.offload(ALL)
    step._offload._ranks = OtherRankFails()
    with pytest.raises(Refused, match="on rank 1"):
        step.onload(ALL)
    assert len(step.offloaded) == 3
    assert are_gone(step._tensors_of("weights"))


def test_offloaded_parts_have_no_memory(make_step: MakeStep) -> None:
    step = make_step(dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    step.train(*make_batch())
    weights, optimizer = step._tensors_of("weights"), step._tensors_of("optimizer")
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    moved = step.offload(("optimizer",))
    assert moved.num_bytes / (num_parameters * 12) >= 0.8, (
        "float32 masters and two moments"
    )
    assert are_gone(optimizer)
    assert not are_gone(weights), "an export needs no more than these"
    step.offload(ALL)
    assert are_gone(weights)
    assert step.offload(ALL).num_bytes == 0
    assert step.offloaded == ["gradients", "optimizer", "weights"]
    assert step.onload(("optimizer",)).num_bytes == moved.num_bytes


def test_call_that_needs_an_offloaded_part_is_refused(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    step.offload(("optimizer",))
    with pytest.raises(Refused, match="cannot train: optimizer offloaded") as refused:
        step.train(*make_batch())
    assert refused.value.body.way_out == "POST /onload with parts ['optimizer'] first."
    step.export(tmp_path / "v0.safetensors")
    step.offload(("weights",))
    for call in (
        lambda: step.export(tmp_path / "v1.safetensors"),
        lambda: step.export_chunk(0, 0),
        lambda: step.save(tmp_path / "again"),
        lambda: step.load_state(tmp_path / "state"),
    ):
        with pytest.raises(Refused, match="weights.* offloaded"):
            call()


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
    step.train(*make_batch(version=1))
    step.load_state(tmp_path / "state")
    assert step.weights_digest() == digest
