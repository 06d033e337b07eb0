"""Trainers whose memory is moved as on a CUDA device, but for the device: storages of size 0, and host
buffers in slabs.

As one rank of two it is started by torch.multiprocessing, for test_trainer_offload_processes.py, and talks
gloo over a file.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from asyncrl.trainer.host_memory import CudaMemory
from torch.distributed.tensor import DTensor
from trainer_cases import make_batch

from asyncrl.messages.base import TrainerPart
from asyncrl.trainer.offload import Parking, local_of
from asyncrl.trainer.ranks import Ranks, join_ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.stores import HostBuffers

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")


def as_on_cuda(step: TrainStep) -> TrainStep:
    cpu = torch.device("cpu")
    step._offload._parking = {
        part: Parking(CudaMemory(), HostBuffers(cpu, slab_bytes=10_000)) for part in step._offload._parking
    }
    step._offload._memory = CudaMemory()
    return step


def steps_agree(spec: TrainerSpec, ranks: Ranks, folder: Path) -> None:
    """Three steps with moves between them are three steps without; a checkpoint of what is away is one of
    what is here.
    """
    plain, step = TrainStep(spec, ranks), as_on_cuda(TrainStep(spec, ranks))
    for version in range(3):
        step.offload(ALL)
        assert all(
            local_of(tensor).untyped_storage().nbytes() == 0
            for tensor in step._tensors_of("weights")
            if tensor.ndim
        )
        if version == 2:
            step.begin_save_state(folder / f"{spec.dtype}-{ranks.size}").wait()
        step.onload(("weights",))
        step.onload(ALL)
        batch = make_batch(version=version, seed=version)
        expected, actual = plain.train(*batch), step.train(*batch)
        assert {**actual, "perf/train_s": 0} == {**expected, "perf/train_s": 0}
    digest = plain.weights_digest()
    assert step.weights_digest() == digest
    step.load_state(folder / f"{spec.dtype}-{ranks.size}")
    step.train(*make_batch(version=2, seed=2))
    assert step.weights_digest() == digest


def rank_main(rank: int, spec_texts: list[str], folder: Path) -> None:
    specs = [TrainerSpec.model_validate_json(text).model_copy(update={"rank": rank}) for text in spec_texts]
    ranks = join_ranks(specs[0], torch.device("cpu"))
    try:
        for spec in specs:
            steps_agree(spec, ranks, folder)
            assert isinstance(next(TrainStep(spec, ranks).policy.parameters()), DTensor)
    finally:
        dist.destroy_process_group()
