"""One rank of two that train adapters, for test_trainer_lora.py: started by torch.multiprocessing, talks gloo
over a file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from trainer_cases import make_batch

from asyncrl.trainer.ranks import Ranks, join_ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.transport import make_transport


def rank_main(rank: int, spec_text: str, dtypes: list[str], folder: Path) -> None:
    """Train three batches in each dtype and write what a rank alone would: logprobs, both saves and both
    exports.
    """
    spec = TrainerSpec.model_validate_json(spec_text).model_copy(update={"rank": rank})
    ranks = join_ranks(spec, torch.device("cpu"))
    try:
        for dtype in dtypes:
            if ranks.is_first:
                (folder / dtype).mkdir()
            _train_and_write(spec.model_copy(update={"dtype": dtype}), ranks, folder / dtype)
    finally:
        dist.destroy_process_group()


def _train_and_write(spec: TrainerSpec, ranks: Ranks, folder: Path) -> None:
    step = TrainStep(spec, ranks)
    for version in range(3):
        step.train(*make_batch(version=version))
    assert all(
        isinstance(master, DTensor) and master.dtype == torch.float32
        for master in step._masters.named.values()
    )
    base = [parameter for parameter in step.policy.parameters() if not parameter.requires_grad]
    assert all(isinstance(parameter, DTensor) and parameter.dtype == step.dtype for parameter in base)
    header, arrays = make_batch(version=3)
    logprobs = step._forward(step.policy, header, arrays, arrays.loss_mask)
    reference = step._numbers(header, arrays, arrays.loss_mask).reference_N
    if ranks.is_first:
        np.savez(folder / "logprobs", logprobs=logprobs, reference=reference)
    step.save(folder / "final")
    step.save(folder / "adapter", merged=False)
    step.export(folder / "weights.safetensors")
    step.transport = make_transport("lora", step.transport.end)
    step.export(folder / "lora.safetensors")
