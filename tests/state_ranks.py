"""One rank of two whose weights are sharded, for test_trainer_state.py: started by torch.multiprocessing,
talks gloo over a file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainer_cases import make_batch

from asyncrl.http import Refused
from asyncrl.trainer.ranks import Ranks, join_ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.step import TrainStep


def train(step: TrainStep, first: int, last: int) -> None:
    for version in range(first, last):
        step.train(*make_batch(version=version, seed=version))


def rank_main(rank: int, spec_texts: dict[str, str], folder: Path) -> None:
    """All that two ranks are to show; an assertion that fails ends the process, and with it the test."""
    specs = {
        name: TrainerSpec.model_validate_json(text).model_copy(update={"rank": rank})
        for name, text in spec_texts.items()
    }
    ranks = join_ranks(next(iter(specs.values())), torch.device("cpu"))
    try:
        for name, spec in specs.items():
            _trainers_go_on(spec, ranks, folder / name)
    finally:
        dist.destroy_process_group()


def _trainers_go_on(spec: TrainerSpec, ranks: Ranks, folder: Path) -> None:
    step = TrainStep(spec, ranks)
    train(step, 0, 2)
    torch.manual_seed(100 + ranks.rank)
    pending = step.begin_save_state(folder / "two")
    digest, drawn = step.weights_digest(), torch.rand(3)
    if ranks.is_first:
        (folder / "two.digest").write_text(digest)
    train(step, 2, 3)  # collectives of training beside those of the save
    pending.result()
    dist.barrier()

    fresh = TrainStep(spec, ranks)
    fresh.load_state(folder / "two")
    assert (fresh.policy_version, fresh.weights_digest()) == (2, digest)
    assert torch.equal(torch.rand(3), drawn), "each rank has its own generator back"
    train(fresh, 2, 3)
    assert fresh.weights_digest() == step.weights_digest()

    fresh.load_state(folder / "one")
    assert (fresh.policy_version, fresh.weights_digest()) == (1, (folder / "one.digest").read_text())
    with pytest.raises(Refused, match="cannot be read"):  # on both ranks alike
        fresh.load_state(folder / "nothing")
    assert fresh.weights_digest() == (folder / "one.digest").read_text()
