"""What is offloaded comes back to the bit; what needs it is refused meanwhile; what cannot be moved stays
where it was.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from asyncrl.trainer.host_memory import HostMemory
from hypothesis import given
from hypothesis import strategies as st
from offload_ranks import steps_agree
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import make_batch, make_spec

from asyncrl.http import Refused
from asyncrl.messages.base import TrainerPart
from asyncrl.trainer.offload import Parking
from asyncrl.trainer.ranks import ALONE
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.stores import HostBuffers, HostFile

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
    """The pages of those that have at least two read as zeros."""
    return not any(tensor.flatten()[tensor.numel() // 2].item() for tensor in tensors if tensor.nbytes > 8192)


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
    assert moved.num_bytes <= num_parameters * 12 + mmap.PAGESIZE * len(optimizer), (
        "by whole pages, at most one more for each tensor"
    )
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
    step.end_save_state()
    assert step.offloaded == list(parts), "it is saved from where it lies"
    assert not step._state._host, "on the CPU a copy would stay in the memory that is to be free"
    step.onload(parts)
    step.begin_save_state(tmp_path / "here")
    step.onload(parts)
    step.end_save_state()
    assert step._state._host, "made once for a trainer that stays"
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
    assert refused.value.body.rule == "what cannot be moved stays where it was"
    assert "free space on the disk" in refused.value.body.way_out
    assert step.offloaded == []
    plain.train(*make_batch(version=1))
    step.train(*make_batch(version=1))
    assert step.weights_digest() == plain.weights_digest()
    step.offload(ALL)
    step.onload(ALL)
    assert step.weights_digest() == plain.weights_digest()


def test_the_file_has_no_name_so_that_no_end_of_the_process_leaves_it_behind(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    step.offload(ALL)
    assert list((tmp_path / "offload").iterdir()) == []


def test_tensors_over_a_mapped_file_and_with_a_numpy_view_are_moved_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(torch.arange(8192.0).numpy().tobytes())
    whole = torch.from_file(str(tmp_path / "file"), size=8192)
    whole += 1.0
    array, half = whole.numpy(), whole[4096:].view(64, 64)
    parking = Parking(HostMemory(), HostFile(tmp_path))
    parking.free(parking.copy([whole.untyped_storage()]))
    assert parking.num_bytes == whole.nbytes
    assert torch.equal(whole, torch.arange(8192.0)), "private changes are gone, the file shows"
    content = parking.content_of(half)
    assert content is not None
    assert torch.equal(content.flatten(), torch.arange(4097.0, 8193.0))
    parking.bring_back()
    assert array[-1] == half[-1, -1] == 8192.0
    assert torch.equal(whole, torch.arange(1.0, 8193.0))


@given(st.data())
def test_a_store_gives_back_what_was_put_at_each_offset_wherever_slabs_end(data: st.DataObject) -> None:
    store = HostBuffers(torch.device("cpu"), slab_bytes=2 ** data.draw(st.integers(0, 4)))
    for _ in range(2):  # the second time into what the first has made
        pieces = [
            torch.randint(0, 256, (size,), dtype=torch.uint8)
            for size in data.draw(st.lists(st.integers(0, 40), max_size=5))
        ]
        offsets = [sum(len(piece) for piece in pieces[:index]) for index in range(len(pieces))]
        store.reserve(sum(len(piece) for piece in pieces))
        for offset, piece in zip(offsets, pieces, strict=True):
            store.write(offset, piece)
        for offset, piece in zip(offsets, pieces, strict=True):
            found = torch.zeros_like(piece)
            store.read(offset, found)
            assert torch.equal(found, piece)


def test_a_file_is_made_once_and_grows_to_the_most_it_has_held(tmp_path: Path) -> None:
    store = HostFile(tmp_path, piece_bytes=1000)
    for size in (5000, 10_000, 100):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        store.reserve(size + 7)
        store.write(7, data)
        store.wait()
        found = torch.zeros_like(data)
        store.read(7, found)
        store.wait()
        assert torch.equal(found, data)
    assert "10007 bytes" in repr(store)
    store.read(10_000, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(OSError, match="ends at byte"):
        store.wait()


def test_storages_that_are_set_to_size_0_as_on_a_device_come_back_to_the_bit_too(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    spec = make_spec(paged_model_dir, tmp_path, dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    steps_agree(
        spec, ALONE, tmp_path
    )  # in float32 the weights of a model on the CPU lie in a mapped file, which has one size


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
    step.end_save_state()
    step.onload(ALL)
    assert step.weights_digest() == digest
    again = make_step(device="cuda", dtype=dtype)
    again.load_state(tmp_path / "state")
    assert again.weights_digest() == digest
    step.train(*make_batch(version=1))
