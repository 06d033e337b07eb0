"""Our side of benchmarks/trainer.py, in its own process: TrainerRank.train on one
batch, repeatedly.

    python benchmarks/trainer_ours.py CASE.json RESULT.json

All of train() counts: checks, packing, advantages, forward, backward, clipping,
optimizer, statistics, record.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import trainer_spec
from torch import Tensor
from trainer_case import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Case, Meter, write_result

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.messages.tokens import spans_of
from asyncrl.trainer.attention import tree
from asyncrl.trainer.attention.forward_plan import find_plan
from asyncrl.trainer.attention.tree import TokenRange
from asyncrl.trainer.loss import packing
from asyncrl.trainer.model import build_model
from asyncrl.trainer.model.policy import ForwardPlan
from asyncrl.trainer.ranks.rank_process import TrainerService
from asyncrl.trainer.trainer_client import TrainerSpec


def make_spec(case: Case, folder: Path) -> TrainerSpec:
    """The spec of this case: PPO's clip around the behaviour policy, mean over the
    batch's tokens.
    """
    trainer = TrainerConfig(
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=False,
    )
    algorithm = AlgorithmConfig(
        loss="ppo_clip",
        advantage="trainer_ours:trl_advantage",
        clip_low=CLIP,
        clip_high=CLIP,
    )
    return trainer_spec(
        case.model_path,
        folder,
        dtype=case.dtype,
        device=case.device,
        threads=case.threads,
        trainer=trainer,
        algorithm=algorithm,
    )


def trl_advantage(reward_B: Tensor, group_B: Tensor) -> Tensor:  # noqa: N803
    reward_GS = reward_B.view(int(group_B.max()) + 1, -1)  # noqa: N806
    centred_GS = reward_GS - reward_GS.mean(dim=1, keepdim=True)  # noqa: N806
    return (centred_GS / (reward_GS.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def nothing_shared(
    sequences: Sequence[TokenRange], token_ids: object
) -> list[tree.TreeNode]:
    return [tree.TreeNode(one, 0, one.length, None, ends=[one]) for one in sequences]


def main() -> None:
    """Train until the case's seconds are over."""
    case = Case.load(sys.argv[1])
    if case.is_untangled:
        tree._trie = nothing_shared
        packing.in_tree_order = lambda sequences, _: [(one, 0) for one in sequences]
    if case.is_alone:
        build_model.find_plan = lambda model: ForwardPlan(
            False, find_plan(model).has_plain_head
        )
    header, arrays = case.batch()
    with tempfile.TemporaryDirectory() as folder:
        # Made as a trainer's process makes it: on CUDA that may be shards on a mesh of
        # one rank.
        step, meter = TrainerService(make_spec(case, Path(folder))).rank, Meter(case)
        meter.mark_loaded()
        metrics: list[dict[str, float]] = []
        while not meter.is_over():
            version = len(metrics)
            header = header.model_copy(
                update={"version": version, "min_version": version}
            )
            arrays = replace(
                arrays, spans=spans_of(np.where(arrays.is_sampled, version, -1))
            )
            meter.start()
            metrics.append(step.train(header, arrays))
            meter.stop()
            meter.end_step()
        write_result(
            sys.argv[2],
            meter,
            loss=metrics[0]["policy/loss"],
            grad_norm=metrics[0]["policy/grad_norm"],
        )


if __name__ == "__main__":
    main()
