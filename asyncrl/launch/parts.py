"""Which runs train a batch in parts, and the size of the parts (docs/decisions/0050)."""

from __future__ import annotations

from asyncrl.algorithms.registry import WHOLE_BATCH, resolve
from asyncrl.config import AlgorithmConfig, RunConfig
from asyncrl.config.trainer_config import CPU_MICRO_BATCH_TOKENS
from asyncrl.launch.memory import leaving_parts
from asyncrl.launch.model_sizes import read_architecture
from asyncrl.launch.placement import Placement
from asyncrl.models.support import has_experts

WITHIN_GROUP = ("grpo", "grpo_sample", "dr_grpo", "rloo", "leave_one_out", "gigpo")
"""Advantages that compare only the rollouts of one group."""
MOVES = "the engines must leave the devices before the trainer works"
NO_ROOM = "the sums of parts, 8 bytes for each trained weight, do not fit"


def part_tokens(config: RunConfig, placement: Placement) -> int:
    """Return the fewest tokens of a part: a micro-batch for each rank. 0: a batch is
    trained whole.
    """
    if not placement.in_parts:
        return 0
    tokens = config.trainer.micro_batch_tokens
    if not placement.is_on_cuda:
        tokens = min(tokens, CPU_MICRO_BATCH_TOKENS)
    return tokens * config.trainer.world_size


def why_whole(config: RunConfig, placement: Placement) -> str:
    """Return why a batch is trained whole, or '' if it may be trained in parts."""
    trainer = config.trainer
    if not placement.engines:
        return "there are no rollouts"
    if config.buffer.max_staleness > 0:
        return "buffer.max_staleness is above 0, so that whole batches are sent ahead"
    # Not on a CPU, where both sides share the memory anyway: the run keeps the bits of a
    # run on separate devices.
    if placement.moves and placement.is_on_cuda:
        return MOVES
    if trainer.roles is not None:
        return "trainer.roles gives a step for each policy"
    if trainer.mini_batches * trainer.epochs > 1:
        return "trainer.mini_batches or trainer.epochs gives several steps"
    if leaving_parts(config, moves=False):
        return "trainer.offload moves a part of the state within a step"
    architecture = read_architecture(config.model)
    if trainer.router_aux_loss != 0 and has_experts(architecture):
        return "trainer.router_aux_loss is not 0, and its loss is of the whole batch"
    return next(filter(None, map(_why_whole, config.all_algorithms)), "")


def _why_whole(algorithm: AlgorithmConfig) -> str:
    correction = resolve(algorithm).correction
    if correction in WHOLE_BATCH:
        return f"the correction {correction} compares all tokens of the batch"
    if algorithm.top_entropy < 1:
        return "algorithm.top_entropy compares all tokens of the batch"
    if algorithm.rewards != "sum":
        return f"algorithm.rewards={algorithm.rewards} normalizes over the batch"
    if algorithm.advantage == "gae":
        if algorithm.whiten_advantages:
            return "algorithm.whiten_advantages compares all tokens of the batch"
    elif algorithm.advantage not in WITHIN_GROUP:
        return f"algorithm.advantage={algorithm.advantage} may compare all groups"
    return ""
