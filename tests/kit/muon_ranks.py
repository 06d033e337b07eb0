"""Muon's steps of a tiny model from drawn gradients, on one rank or several."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from model_zoo import make_config, random_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncrl.config import TrainerConfig
from asyncrl.trainer.ranks.optimizer import MasterWeights, make_optimizer
from asyncrl.weights.export import whole_tensors

SETTINGS = TrainerConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)
NUM_STEPS = 3


def drawn_gradients(name: str, step: int) -> dict[str, Tensor]:
    """In the last step no token reaches an expert, and one matrix has no gradient."""
    generator = torch.Generator().manual_seed(step)
    weights = random_model(make_config(name)).named_parameters()
    drawn = {key: torch.randn(one.shape, generator=generator) for key, one in weights}
    if step == NUM_STEPS - 1:
        for key, one in drawn.items():
            if one.ndim == 3:
                one[0] = 0
            elif "mlp" in key and one.ndim == 2:
                one.zero_()
    return drawn


def train(
    name: str, shard: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[MasterWeights, torch.optim.Optimizer]:
    """Return the weights after NUM_STEPS steps."""
    masters = MasterWeights.of(random_model(make_config(name)), torch.float32)
    masters.named = {key: shard(one.detach()) for key, one in masters.named.items()}
    optimizer = make_optimizer(masters, SETTINGS)
    for step in range(NUM_STEPS):
        for key, gradient in drawn_gradients(name, step).items():
            masters.named[key].grad = shard(gradient)
        optimizer.step()
    return masters, optimizer


def compare_with_one(rank: int, name: str, size: int, store: str) -> None:
    """Train shards as FSDP2 makes them, as one of several ranks, and compare each bit of
    the hidden matrices with whole weights.
    """
    torch.set_num_threads(1)
    group = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    found = train(name, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    whole = train(name)
    for key in whole[0].hidden:
        pairs = [
            (masters.named[key], optimizer.state[masters.named[key]]["momentum_buffer"])
            for masters, optimizer in (found, whole)
        ]
        for one, other in zip(*pairs, strict=True):
            ((_, gathered),) = whole_tensors({key: one})
            assert torch.equal(gathered, other), key
    dist.destroy_process_group()
