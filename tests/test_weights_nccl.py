"""The copy of the weights that a trainer holds, and the group of processes through which it sends them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import running
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import make_batch

from asyncrl.http import CallRefused
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, GroupSeat
from asyncrl.messages.calls import ExportResponse
from asyncrl.serving import Refused
from asyncrl.weights.export import LazyWeights
from asyncrl.weights.nccl import BroadcastTransport, GroupBroken, WeightGroup
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl.weights.transport import Exported, TrainerEnd

CPU = torch.device("cpu")
NAMES = itertools.count()


def seats(folder: Path, size: int, *, timeout_s: float = 20.0) -> list[GroupSeat]:
    path = str(folder / f"group-{next(NAMES)}")
    return [
        GroupSeat(path=path, size=size, rank=rank, is_new=True, timeout_s=timeout_s) for rank in range(size)
    ]


def some_weights(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (33, 7), "b.bias": (5,), "c.weight": (128, 64), "d.scale": ()}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def hold(held: BroadcastTransport, weights: dict[str, Tensor], version: int) -> ExportResponse:
    return held.export(Exported(version, lambda: LazyWeights(weights)), Path())


def take(seat: GroupSeat) -> tuple[int, dict[str, Tensor]]:
    parts = list(WeightGroup(seat, CPU).receive())
    (version,) = {version for version, _ in parts}
    return version, {name: tensor for _, tensors in parts for name, tensor in tensors.items()}


def test_every_receiver_gets_the_bits_that_were_held_whatever_training_does_meanwhile(
    tmp_path: Path,
) -> None:
    weights, dtype = some_weights(), torch.bfloat16
    expected = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
    held = BroadcastTransport(TrainerEnd(CPU, dtype, 4096))
    answer = hold(held, weights, 3)
    for tensor in weights.values():
        tensor.zero_()
    first, *others = seats(tmp_path, 3)
    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(take, seat) for seat in others]
        sent = held.send(BroadcastRequest(version=3, seat=first))
        received = [future.result() for future in receiving]
    for version, tensors in received:
        assert version == 3
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], one) for name, one in expected.items())
    assert answer.digest == sent.digest == digest_tensors(expected)
    assert (answer.num_tensors, answer.num_bytes) == (4, sum(tensor.nbytes for tensor in expected.values()))
    buffers = [buffer.data_ptr() for buffer in held._buffers]
    assert hold(held, some_weights(2), 4).digest != answer.digest
    assert [buffer.data_ptr() for buffer in held._buffers] == buffers, "no memory is taken twice"
    with pytest.raises(Refused, match="what is held is version 4"):
        held.send(BroadcastRequest(version=3, seat=first))


def test_a_member_that_never_comes_ends_the_wait_and_the_next_group_works(tmp_path: Path) -> None:
    held = BroadcastTransport(TrainerEnd(CPU, torch.float32, 2**20))
    hold(held, some_weights(), 1)
    with pytest.raises(Refused, match="no group of 2 processes within 0.3 s"):
        held.send(BroadcastRequest(version=1, seat=seats(tmp_path, 2, timeout_s=0.3)[0]))
    first, second = seats(tmp_path, 2)
    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(take, second)
        held.send(BroadcastRequest(version=1, seat=first))
        assert receiving.result()[1].keys() == some_weights().keys()


def test_a_member_that_dies_breaks_the_group_for_good(tmp_path: Path) -> None:
    first, second = seats(tmp_path, 2)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(WeightGroup, second, CPU)
        group = WeightGroup(first, CPU)
        other = joining.result()
    other.close()
    del other
    for what in ("broadcast of", "the group is closed"):
        with pytest.raises(GroupBroken, match=what):
            group._broadcast(torch.zeros(8))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "lora"), [(1, {"rank": 4}), (2, None)])
def test_a_trainer_process_sends_what_it_would_write(
    tiny_model_dir: Path, tmp_path: Path, world_size: int, lora: dict[str, int] | None
) -> None:
    """Shards are gathered, adapters are merged; a step after the export changes nothing of what is sent."""
    how: dict[str, Any] = {"trainer": {"lora": lora}, "transport": "nccl", "is_file_wanted": True}
    with running(tiny_model_dir, tmp_path / "trainer", world_size, chunk_bytes=8192, **how) as trainer:
        first, second = seats(tmp_path, 2)

        def send(version: int) -> BroadcastResponse:
            body = BroadcastRequest(version=version, seat=first)
            return trainer.ask(lambda one: one.post("/broadcast", body, BroadcastResponse, timeout_s=60.0))

        trainer.train(*make_batch(version=0))
        exported = trainer.export()
        trainer.train(*make_batch(version=1))
        with ThreadPoolExecutor() as threads:
            receiving = threads.submit(take, second)
            sent = send(1)
            version, found = receiving.result()
        written = load_file(exported.path)
        assert version == 1
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], written[name]) for name in written)
        assert sent.digest == exported.digest == digest_tensors(found)
        with pytest.raises(CallRefused, match="what is held is version 1"):
            send(0)
