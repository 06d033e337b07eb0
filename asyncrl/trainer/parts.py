"""Makes what a TrainStep works with: model, adapters, reference, master weights. Knows how they fit together; knows no batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncrl.trainer.loading import load_model, resolve_device
from asyncrl.trainer.plan_check import find_plan
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.precision import MasterWeights
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.sharding import sharded_policy
from asyncrl.trainer.spec import TrainerSpec

if TYPE_CHECKING:
    from asyncrl.trainer.lora import Adapters


@dataclass(frozen=True)
class Parts:
    """`reference`: the initial weights, where a KL divergence to them is asked for and adapters cannot be switched off for it."""

    device: torch.device
    dtype: torch.dtype
    adapters: Adapters | None
    reference: Policy | None
    policy: Policy
    masters: MasterWeights


def make_parts(spec: TrainerSpec, ranks: Ranks, *, needs_reference: bool) -> Parts:
    """Load everything. Raises ConfigError if the model cannot be had, or memory is short."""
    device, dtype = resolve_device(spec)
    model = load_model(spec, device, is_sharded=ranks.mesh is not None)
    adapters = _add_adapters(model, spec, dtype)
    has_copy = needs_reference and adapters is None  # without its adapters the model is the reference itself
    reference = None
    if ranks.mesh is None:
        if has_copy:
            reference = Policy(_frozen_copy(model, dtype))
        masters = MasterWeights(model, dtype)
        policy = Policy(model)
    else:
        # A policy finds its plan with whole weights in the dtype of the run, so before the shards are cut; in host memory, because a
        # device need not hold the whole model. What a plan depends on is the architecture, not the device.
        frozen = _frozen_copy(model, dtype)
        plan = find_plan(frozen)
        if has_copy:
            reference = sharded_policy(frozen, plan, ranks, dtype, is_offloaded=spec.trainer.cpu_offload)
        del frozen
        policy = sharded_policy(model, plan, ranks, dtype, is_offloaded=spec.trainer.cpu_offload)
        masters = MasterWeights(model, torch.float32)  # the shards are float32 already
    if spec.trainer.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return Parts(device, dtype, adapters, reference, policy, masters)


def _add_adapters(model: Any, spec: TrainerSpec, dtype: torch.dtype) -> Adapters | None:
    """Put adapters into the model if it is to have some. Raises ConfigError if it cannot."""
    if spec.trainer.lora is None:
        return None
    from asyncrl.trainer.lora import Adapters  # peft takes seconds to import

    return Adapters(model, spec.trainer.lora, spec.seed, dtype)


def _frozen_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The weights as they are, in the dtype of the forward pass, never to change."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for parameter in frozen.parameters():
        parameter.data = parameter.data.to(dtype)
    return frozen
