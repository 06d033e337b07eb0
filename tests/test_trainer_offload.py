"""What is offloaded comes back to the bit; what needs it is refused meanwhile; what cannot be moved stays
where it was.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import make_batch, make_spec

from asyncrl.http import Refused
from asyncrl.messages.base import TrainerPart
from asyncrl.trainer.step import TrainStep

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")
MakeStep = Callable[..., TrainStep]
PAGED = {"hidden_size": 64, "intermediate_size": 256}
"""Weights of several pages."""


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", **PAGED)


@pytest.fixture
def make_step(paged_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = paged_model_dir, **values: Any) -> TrainStep:
        (tmp_path / "staging").mkdir(exist_ok=True)
        return TrainStep(make_spec(model_dir, tmp_path, **values))

    return make


@contextmanager
def full_disk() -> Iterator[None]:
    """As a disk on which no file can grow past 50 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def are_gone(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtype": "bfloat16"},
        {"trainer": {"lora": {"rank": 4, "alpha": 8.0}}},
        {"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"},
        {"trainer": {"mini_batches": 2}, "algorithm": {"kl_coefficient": 0.1}},
    ],
    ids=["float32", "bfloat16", "lora", "lora in bfloat16", "reference"],
)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_trainer_that_was_offloaded_between_its_steps_takes_the_steps_of_one_that_never_was(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any], is_tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied, **PAGED)
    plain = TrainStep(make_spec(folder, tmp_path, **values))
    step = make_step(folder, **values)
    between: list[list[tuple[str, tuple[TrainerPart, ...]]]] = [
        [("offload", ALL), ("onload", ALL)],  # before there is any optimizer state
        [
            ("offload", ("gradients", "optimizer")),
            ("offload", ("weights",)),
            ("onload", ("weights", "optimizer")),
        ],
        [
            ("offload", ("optimizer",)),
            ("offload", ALL),
            ("offload", ALL),
            ("onload", ("optimizer",)),
            ("onload", ALL),
            ("onload", ALL),
        ],
        [
            ("offload", ("weights",)),
            ("onload", ("weights",)),
            ("offload", ("optimizer",)),
            ("onload", ("optimizer",)),
        ],
    ]
    for version, moves in enumerate(between):
        for move, parts in moves:
            getattr(step, move)(parts)
        batch = make_batch(version=version, seed=version)
        expected, actual = plain.train(*batch), step.train(*batch)
        assert {**actual, "perf/train_s": 0} == {**expected, "perf/train_s": 0}
    assert step.weights_digest() == plain.weights_digest()
    assert step.export(tmp_path / "one").digest == plain.export(tmp_path / "other").digest
    assert step.offloaded == []


def test_what_is_away_has_no_memory_and_moves_are_counted_once(make_step: MakeStep) -> None:
    step = make_step(dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    step.train(*make_batch())
    weights, optimizer = step._tensors_of("weights"), step._tensors_of("optimizer")
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    moved = step.offload(("optimizer",))
    assert moved.num_bytes / (num_parameters * 12) >= 0.8, "float32 masters and two moments"
    assert are_gone(optimizer)
    assert not are_gone(weights), "an export needs no more than these"
    assert step.offload(("weights", "optimizer")).num_bytes >= 0.75 * num_parameters * 4, (
        "policy and reference in bfloat16, and buffers"
    )
    assert are_gone(weights)
    assert step.offload(ALL).num_bytes == 0
    assert step.offloaded == ["weights", "gradients", "optimizer"]
    assert step.onload(("optimizer",)).num_bytes == moved.num_bytes
    assert step.onload(("optimizer",)).num_bytes == 0
    assert step.offloaded == ["weights", "gradients"]


def test_gradients_that_are_left_over_are_dropped_and_the_next_step_makes_its_own(
    make_step: MakeStep,
) -> None:
    step = make_step()
    weight = next(step.policy.parameters())
    weight.grad = torch.ones_like(weight)
    assert step.offload(("gradients",)).num_bytes == weight.nbytes
    assert weight.grad is None
    assert step.offloaded == ["gradients"]
    step.train(*make_batch())
    assert step.offloaded == []


def test_what_needs_a_part_that_is_away_is_refused_by_its_name(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step()
    step.offload(("optimizer",))
    with pytest.raises(Refused, match="cannot train: optimizer is offloaded") as refused:
        step.train(*make_batch())
    assert refused.value.status == 409
    assert refused.value.body.way_out == "POST /onload with parts ['optimizer'] first."
    step.export(tmp_path / "v0.safetensors")
    step.save(tmp_path / "saved")
    step.chunk_names(0, 0)
    step.offload(("weights",))
    with pytest.raises(Refused, match="cannot train: weights and optimizer are offloaded"):
        step.train(*make_batch())
    with pytest.raises(Refused, match="cannot export: weights are offloaded"):
        step.export(tmp_path / "v1.safetensors")
    with pytest.raises(Refused, match="cannot export a chunk: weights are offloaded"):
        step.chunk_names(0, 0)
    with pytest.raises(Refused, match="cannot save: weights are offloaded"):
        step.save(tmp_path / "again")
    with pytest.raises(Refused, match="cannot load a state: weights and optimizer are offloaded"):
        step.load_state(tmp_path / "state")
    step.onload(ALL)
    step.train(*make_batch())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [("weights",), ("optimizer",), ALL], ids=["weights", "optimizer", "all"])
def test_a_checkpoint_of_an_offloaded_trainer_is_that_of_one_which_is_not(
    make_step: MakeStep, tmp_path: Path, dtype: str, parts: tuple[TrainerPart, ...]
) -> None:
    step = make_step(dtype=dtype)
    for version in range(2):
        step.train(*make_batch(version=version, seed=version))
    step.offload(parts)
    step.begin_save_state(tmp_path / "away")
    step.wait_save_state()
    assert step.offloaded == list(parts), "it is saved from where it lies"
    step.onload(parts)
    step.begin_save_state(tmp_path / "here")
    step.onload(parts)
    step.wait_save_state()
    step.train(*make_batch(version=2, seed=2))
    loaded = []
    for name in ("away", "here"):
        again = make_step(dtype=dtype)
        again.load_state(tmp_path / name)
        again.train(*make_batch(version=2, seed=2))
        loaded.append(again.weights_digest())
    assert loaded == [step.weights_digest()] * 2


def test_a_part_that_a_full_disk_does_not_take_stays_where_it_was_and_the_error_says_so(
    make_step: MakeStep, tmp_path: Path
) -> None:
    plain, step = make_step(), make_step()
    for one in (plain, step):
        one.train(*make_batch())
    with (
        full_disk(),
        pytest.raises(Refused, match=r"cannot offload weights, optimizer to .*/offload: OSError") as refused,
    ):
        step.offload(("weights", "optimizer"))
    assert refused.value.status == 507
    assert refused.value.body.rule == "what cannot be moved on one rank stays where it was on all"
    assert "free space on the disk" in refused.value.body.way_out
    assert step.offloaded == []
    plain.train(*make_batch(version=1))
    step.train(*make_batch(version=1))
    assert step.weights_digest() == plain.weights_digest()
    step.offload(ALL)
    step.onload(ALL)
    assert step.weights_digest() == plain.weights_digest()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_device_parts_go_to_pinned_memory_and_come_back_to_the_bit(
    make_step: MakeStep, tmp_path: Path, dtype: str
) -> None:
    step = make_step(device="cuda", dtype=dtype)
    step.train(*make_batch())
    digest, before = step.weights_digest(), torch.cuda.memory_allocated()
    moved = step.offload(ALL)
    assert torch.cuda.memory_allocated() <= before - moved.num_bytes
    step.begin_save_state(tmp_path / "state")
    step.wait_save_state()
    step.onload(ALL)
    assert step.weights_digest() == digest
    again = make_step(device="cuda", dtype=dtype)
    again.load_state(tmp_path / "state")
    assert again.weights_digest() == digest
    step.train(*make_batch(version=1))
