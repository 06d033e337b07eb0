"""Shards a policy over the ranks with FSDP2. Knows modules; knows no batch.

Parameters become float32 shards, which the optimizer steps on; each decoder layer is gathered for its forward and backward
pass in the dtype of the run, and its gradient is added up over the ranks in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from asyncrl.trainer.plan_check import Plan
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.ranks import Ranks


def sharded_policy(model: Any, plan: Plan, ranks: Ranks, dtype: torch.dtype, *, is_offloaded: bool) -> Policy:
    """A policy of `model` (whole, on any device), sharded in place and moved to this rank's device, layer after layer."""
    assert ranks.mesh is not None
    policy = Policy(model, plan)
    options: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if is_offloaded else OffloadPolicy(),
    }
    for layer in _layers(model):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    register_fsdp_forward_method(policy, Policy.text_logprobs.__name__)
    for module in _sharded(policy):
        # The step's loss is a sum over all ranks, not a mean: nothing is divided.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    # Experts that only some ranks use would give sums of different sizes. Since torch 2.12, on whose predecessors
    # transformers' stacked experts have a gradient anyway.
    set_unused = getattr(policy, "set_reduce_scatter_unused_params", None)
    if set_unused is not None:
        set_unused(True)
    return policy


def reshard(policy: Policy) -> None:
    """Free what a forward pass without a backward pass has left gathered: outside a step the weights are their shards."""
    for module in _sharded(policy):
        module.reshard()


def _sharded(policy: Policy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _layers(model: Any) -> list[nn.Module]:
    """The blocks that transformers itself never splits over devices; innermost first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names][::-1]
