"""The copy of the weights that a trainer holds, and the group of processes through
which it sends them.
"""

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

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import GroupMember
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportResponse,
)
from asyncrl.weights.export import LazyWeights, TrainerEnd
from asyncrl.weights.nccl import BroadcastTransport, WeightGroup
from asyncrl.weights.tensor_files import digest_tensors

CPU = torch.device("cpu")
NAMES = itertools.count()


def ranks(folder: Path, size: int, *, timeout_s: float = 20.0) -> list[GroupMember]:
    path = str(folder / f"group-{next(NAMES)}")
    return [
        GroupMember(path=path, size=size, rank=rank, is_new=True, timeout_s=timeout_s)
        for rank in range(size)
    ]


def some_weights(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (33, 7), "b.bias": (5,), "c.weight": (128, 64), "d.scale": ()}
    return {
        name: torch.randn(shape, generator=random) for name, shape in shapes.items()
    }


def hold(
    held: BroadcastTransport, weights: dict[str, Tensor], version: int
) -> ExportResponse:
    return held.begin(version, LazyWeights(weights), Path()).result()


def take(member: GroupMember) -> tuple[int, dict[str, Tensor]]:
    parts = list(WeightGroup(member, CPU).receive())
    (version,) = {version for version, _ in parts}
    return version, {
        name: tensor for _, tensors in parts for name, tensor in tensors.items()
    }


def test_every_receiver_gets_the_bits_that_were_held(
    tmp_path: Path,
) -> None:
    weights, dtype = some_weights(), torch.bfloat16
    expected = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
    held = BroadcastTransport(TrainerEnd(CPU, dtype, 4096))
    answer = hold(held, weights, 3)
    for tensor in weights.values():
        tensor.zero_()
    first, *others = ranks(tmp_path, 3)
    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(take, member) for member in others]
        sent = held.send(BroadcastRequest(version=3, member=first))
        received = [future.result() for future in receiving]
    for version, tensors in received:
        assert version == 3
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], one) for name, one in expected.items())
    assert answer.digest == sent.digest == digest_tensors(expected)
    assert (answer.num_tensors, answer.num_bytes) == (
        4,
        sum(tensor.nbytes for tensor in expected.values()),
    )
    assert hold(held, some_weights(2), 4).digest != answer.digest
    with pytest.raises(Refused, match="the trainer holds 4"):
        held.send(BroadcastRequest(version=3, member=first))


def test_member_that_never_comes_ends_the_wait(tmp_path: Path) -> None:
    held = BroadcastTransport(TrainerEnd(CPU, torch.float32, 2**20))
    hold(held, some_weights(), 1)
    with pytest.raises(Refused, match="no group of 2 processes within 0.3 s"):
        held.send(
            BroadcastRequest(version=1, member=ranks(tmp_path, 2, timeout_s=0.3)[0])
        )
    first, second = ranks(tmp_path, 2)
    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(take, second)
        held.send(BroadcastRequest(version=1, member=first))
        assert receiving.result()[1].keys() == some_weights().keys()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "lora"), [(1, {"rank": 4}), (2, None)])
def test_trainer_sends_the_tensors_that_it_would_write(
    tiny_model_dir: Path, tmp_path: Path, world_size: int, lora: dict[str, int] | None
) -> None:
    """Shards are gathered; a later step changes nothing that is sent."""
    how: dict[str, Any] = {
        "trainer": {"lora": lora},
        "transport": "nccl",
        "is_file_wanted": True,
    }
    with running(
        tiny_model_dir, tmp_path / "trainer", world_size, chunk_bytes=8192, **how
    ) as trainer:
        first, second = ranks(tmp_path, 2)
        body = BroadcastRequest(version=1, member=first)
        trainer.train(*make_batch(version=0))
        exported = trainer.export()
        trainer.train(*make_batch(version=1))
        with ThreadPoolExecutor() as threads:
            receiving = threads.submit(take, second)
            sent = trainer.ask(
                lambda one: one.post(
                    "/broadcast", body, BroadcastResponse, timeout_s=60.0
                )
            )
            version, found = receiving.result()
        written = load_file(exported.path)
        assert (version, found.keys()) == (1, written.keys())
        assert all(torch.equal(found[name], written[name]) for name in written)
        assert sent.digest == exported.digest == digest_tensors(found)
