"""What is offloaded comes back to the bit; what needs it is refused meanwhile; what cannot be moved stays
where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import TIMEOUT_S, Group, running, save_state
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import MakeStep, full_disk, learned, make_batch

from asyncrl.errors import TrainerError
from asyncrl.http import CallRefused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.messages.calls import StateRequest, TrainerHealth
from asyncrl.serving import Refused
from asyncrl.trainer import offload
from asyncrl.trainer.offload import PARTS, HostMemory
from asyncrl.trainer.ranks import Ranks
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


def are_gone(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize(
    ("values", "is_tied"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"}, True),
        ({"trainer": {"mini_batches": 2}, "algorithm": {"kl_coefficient": 0.1}}, False),
    ],
    ids=["tied", "untied in bfloat16", "lora in bfloat16", "reference"],
)
def test_a_trainer_that_was_offloaded_between_its_steps_takes_the_steps_of_one_that_never_was(
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


def test_what_is_away_has_no_memory_and_moves_are_counted_once(make_step: MakeStep) -> None:
    step = make_step(dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    step.train(*make_batch())
    weights, optimizer = step._tensors_of("weights"), step._tensors_of("optimizer")
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    moved = step.offload(("optimizer",))
    assert moved.num_bytes / (num_parameters * 12) >= 0.8, "float32 masters and two moments"
    assert are_gone(optimizer)
    assert not are_gone(weights), "an export needs no more than these"
    assert step.offload(ALL).num_bytes >= 0.75 * num_parameters * 4, "policy and reference in bfloat16"
    assert are_gone(weights)
    assert step.offload(ALL).num_bytes == 0
    assert step.offloaded == ["gradients", "optimizer", "weights"]
    assert step.onload(("optimizer",)).num_bytes == moved.num_bytes
    assert step.onload(("optimizer",)).num_bytes == 0
    assert step.offloaded == ["gradients", "weights"]


def test_what_needs_a_part_that_is_away_is_refused_by_its_name(make_step: MakeStep, tmp_path: Path) -> None:
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
        "export a chunk: weights": lambda: step.chunk_names(0, 0),
        "save: weights": lambda: step.save(tmp_path / "again"),
        "load a state: weights and optimizer": lambda: step.load_state(tmp_path / "state"),
    }.items():
        with pytest.raises(Refused, match=f"cannot {what} offloaded"):
            call()
    step.onload(ALL)
    step.train(*make_batch())


@pytest.mark.parametrize("parts", [("weights",), ("optimizer",), ALL], ids=["weights", "optimizer", "all"])
def test_a_checkpoint_may_be_made_of_what_is_away(make_step: MakeStep, tmp_path: Path, parts: Any) -> None:
    step = make_step(dtype="bfloat16")
    for version in range(2):
        step.train(*make_batch(version=version, seed=version))
    digest = step.weights_digest()
    step.offload(parts)
    step.begin_save_state(tmp_path / "away")
    step.onload(parts)
    step.wait_save_state()
    step.train(*make_batch(version=2, seed=2))
    again = make_step(dtype="bfloat16")
    again.load_state(tmp_path / "away")
    assert again.weights_digest() == digest
    again.train(*make_batch(version=2, seed=2))
    assert again.weights_digest() == step.weights_digest()


def test_a_host_with_no_memory_for_a_copy_has_a_checkpoint_written_from_where_the_state_is_away(
    make_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next step ends after it, since the move that follows would overwrite it."""
    monkeypatch.setattr(offload, "available_memory", lambda: 10_000)
    may_write, step = threading.Event(), make_step(dtype="bfloat16")
    moves = step._offload
    moves._pinned = {part: HostMemory(torch.device("cpu")) for part in PARTS}
    for version in range(2):
        step.train(*make_batch(version=version, seed=version))
    digest = step.weights_digest()
    with pytest.raises(Refused, match="bytes are needed, and the host has 10000 available"):
        step.begin_save_state(tmp_path / "here").result()
    monkeypatch.setattr(offload, "available_memory", lambda: 2**30)
    step.offload(ALL)
    slabs = {part: memory._data.data_ptr() for part, memory in moves._pinned.items()}
    monkeypatch.setattr(offload, "available_memory", lambda: 10_000)
    step._state._writer.submit(may_write.wait)
    saving = step.begin_save_state(tmp_path / "away")
    step.onload(ALL)
    assert sum(copy.nbytes for copy in step._state._host.values()) > len(step._state._memory)
    next_step = threading.Thread(target=step.train, args=make_batch(version=2, seed=2))
    next_step.start()
    next_step.join(0.2)
    assert next_step.is_alive(), "after it comes the move, over what is being written"
    assert not saving.done()
    may_write.set()
    next_step.join()
    assert saving.done()
    step.offload(ALL)
    assert {part: memory._data.data_ptr() for part, memory in moves._pinned.items()} == slabs
    step.onload(ALL)
    again = make_step(dtype="bfloat16")
    again.load_state(tmp_path / "away")
    assert again.weights_digest() == digest
    again.train(*make_batch(version=2, seed=2))
    assert again.weights_digest() == step.weights_digest()


def test_a_part_that_a_full_disk_does_not_take_stays_where_it_was(make_step: MakeStep) -> None:
    step = make_step()
    step.train(*make_batch())
    before = step.weights_digest()
    words = "offload weights, optimizer on rank 0: OSError"
    with full_disk(), pytest.raises(Refused, match=words) as refused:
        step.offload(("weights", "optimizer"))
    assert refused.value.status == 507
    assert "free space on the disk" in refused.value.body.way_out
    assert (step.offloaded, step.weights_digest()) == ([], before)
    step.train(*make_batch(version=1))


def test_ranks_of_a_host_ask_for_its_memory_together(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone would find enough for itself, and be killed once all have it."""

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, value] if isinstance(value, list) else [value]

    step = make_step()
    step.train(*make_batch())
    digest, moves = step.weights_digest(), step._offload
    moves._ranks = Two()
    moves._pinned = {part: HostMemory(torch.device("cpu")) for part in PARTS}
    size = sum(map(offload._aligned, (storage for part in ALL for storage in moves._storages(part))))
    for factor, is_enough in ((1.5, False), (2.5, True), (0.0, True)):
        monkeypatch.setattr(offload, "available_memory", lambda factor=factor: int(factor * size))
        if is_enough:
            step.offload(ALL)
            step.onload(ALL)
        else:
            words = rf"2 ranks on 127.0.0.1 need {2 * size} bytes of host memory, and {int(1.5 * size)} are"
            with pytest.raises(Refused, match=words):
                step.offload(ALL)
        assert (step.offloaded, step.weights_digest()) == ([], digest), "memory once taken is kept"


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


# ---- real processes

NOISY = """
import torch
def loss(current, *rest):
    return current * torch.rand_like(current), {}
"""


def move(group: Group, what: str, *parts: TrainerPart) -> Moved:
    moved: Moved = group.ask(lambda caller: getattr(TrainerClient(caller, timeout_s=TIMEOUT_S), what)(parts))
    return moved


@pytest.mark.slow
def test_two_ranks_that_were_offloaded_give_the_bits_of_two_that_never_were(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    for name in ("plain", "moved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "noisy_loss.py").write_text(NOISY)  # each rank draws noise of its own
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
            assert move(moved, "offload", *ALL).num_bytes == 0
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
