"""One rank of two whose weights are sharded, for test_trainer_state.py: started by torch.multiprocessing,
talks gloo over a file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_cases import make_batch

from asyncrl.http import Refused
from asyncrl.trainer.ranks import ALONE, Ranks, join_ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.state import Progress, TrainerState
from asyncrl.trainer.step import TrainStep


def train(step: TrainStep, first: int, last: int) -> None:
    for version in range(first, last):
        step.train(*make_batch(version=version, seed=version))


class PlainMasters:
    """Parameters that are their own masters."""

    def __init__(self, model: nn.Module) -> None:
        self.named: dict[str, Tensor] = dict(model.named_parameters())

    def write_back(self) -> None:
        """Nothing to do."""


class Run:
    """A small model, AdamW and a TrainerState over them. Odd sizes: rank 1 has no share of the last layer."""

    def __init__(self, seed: int, ranks: Ranks = ALONE) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
        if ranks.size > 1:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.masters = PlainMasters(self.model)
        self.optimizer = torch.optim.AdamW(self.masters.named.values(), lr=0.1, fused=True)
        self.state = TrainerState(
            self.masters,
            self.optimizer,
            ranks,
            model_path="m",
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def train(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.model(torch.arange(14.0).view(2, 7).sin() + step).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """Weights and moments, whole, on every rank."""
        tensors = {name: master.detach() for name, master in self.masters.named.items()}
        for name, master in self.masters.named.items():
            tensors.update({f"{name}.{key}": value for key, value in self.optimizer.state[master].items()})
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in tensors.items()
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rank_main(rank: int, spec_texts: dict[str, str], folder: Path) -> None:
    """All that two ranks are to show; an assertion that fails ends the process, and with it the test."""
    specs = {
        name: TrainerSpec.model_validate_json(text).model_copy(update={"rank": rank})
        for name, text in spec_texts.items()
    }
    ranks = join_ranks(next(iter(specs.values())), torch.device("cpu"))
    try:
        _two_ranks_go_on(ranks, folder)
        for name, spec in specs.items():
            _trainers_go_on(spec, ranks, folder / name)
        _refused_on_both(ranks, folder)
    finally:
        dist.destroy_process_group()


def _trainers_go_on(spec: TrainerSpec, ranks: Ranks, folder: Path) -> None:
    step = TrainStep(spec, ranks)
    train(step, 0, 2)
    pending = step.begin_save_state(folder / "two")
    digest = step.weights_digest()
    if ranks.is_first:
        (folder / "two.digest").write_text(digest)
    train(step, 2, 3)
    pending.wait()

    fresh = TrainStep(spec, ranks)
    fresh.load_state(folder / "two")
    assert (fresh.policy_version, fresh.weights_digest()) == (2, digest)
    train(fresh, 2, 3)
    assert fresh.weights_digest() == step.weights_digest()

    fresh.load_state(folder / "one")
    assert (fresh.policy_version, fresh.weights_digest()) == (1, (folder / "one.digest").read_text())


def _two_ranks_go_on(ranks: Ranks, folder: Path) -> None:
    run = Run(0, ranks)
    assert isinstance(run.masters.named["0.weight"], DTensor)
    run.train(3)
    torch.manual_seed(100 + ranks.rank)
    pending = run.state.begin_save(Progress(policy_version=3, num_optimizer_steps=3), folder / "two")
    saved = run.values()
    drawn = torch.rand(3)
    run.train(2)  # collectives of training beside those of the save
    pending.wait()
    if ranks.is_first:
        torch.save(saved, folder / "two.pt")
        assert sorted(file.name for file in (folder / "two").iterdir()) == [
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "state.json",
        ]

    fresh = Run(1, ranks)
    assert fresh.state.load(folder / "two") == Progress(policy_version=3, num_optimizer_steps=3)
    assert same(fresh.values(), saved)
    assert torch.equal(torch.rand(3), drawn), "each rank has its own generator back"
    fresh.train(2)
    assert same(fresh.values(), run.values())

    assert fresh.state.load(folder / "one") == Progress(
        policy_version=4, num_optimizer_steps=8, num_skipped_in_a_row=1
    )
    assert same(fresh.values(), torch.load(folder / "one.pt")), "what one process saved, two have now"


def _refused_on_both(ranks: Ranks, folder: Path) -> None:
    run = Run(2, ranks)
    run.train(1)
    before = run.values()
    with pytest.raises(Refused, match="cannot be read"):
        run.state.load(folder / "nothing")
    assert same(run.values(), before)
    with pytest.raises(Refused, match="there already"):  # on the rank that does not write too
        run.state.begin_save(Progress(), folder / "one").wait()
