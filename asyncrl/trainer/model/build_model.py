"""Build the model and master weights. Every failure is a ConfigError."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.overrides import TorchFunctionMode

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import NO_EXPERT
from asyncrl.trainer.model.attention import choose_flash
from asyncrl.trainer.model.fused import layers_of, why_not_compiled
from asyncrl.trainer.model.loading import check_memory, load_model, loading, meta_model, scatter
from asyncrl.trainer.model.lora import Adapters
from asyncrl.trainer.model.policy import ForwardPlan, Policy, find_plan, probe_model
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.adapters import routers_of
from asyncrl.weights.ipc import limit_memory
from asyncrl.weights.tensor_files import float32_names

log = logging.getLogger("asyncrl.trainer")


class MasterWeights:
    """Float32 weights for the optimizer, under a bfloat16 model.

    Invariant: outside of a step the model's weights are the rounded masters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.then: Callable[[], None] = lambda: None
        if dtype == torch.float32:
            self.named: dict[str, Tensor] = dict(named)
            self._working: dict[str, nn.Parameter] = {}
            return
        self.named = {name: parameter.detach().clone() for name, parameter in named.items()}
        _cast(model, dtype)
        self._working = named
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(partial(_collect, self.named[name]))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self._working.items():
            parameter.copy_(self.named[name])
        self.then()


def _collect(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def resolve_device(spec: TrainerSpec) -> tuple[torch.device, torch.dtype]:
    if spec.device == "cuda" and not torch.cuda.is_available():
        way_out = "set placement.trainer=cpu, or install a CUDA build of torch."
        raise ConfigError("the trainer is to run on CUDA, but torch sees no CUDA device", way_out=way_out)
    is_cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    dtype = ("bfloat16" if is_cuda else "float32") if spec.dtype == "auto" else spec.dtype
    return torch.device("cuda" if is_cuda else "cpu"), getattr(torch, dtype)


def sharded_policy(
    policy: Policy, ranks: Ranks, dtype: torch.dtype, whole: nn.Module | None, *, is_offloaded: bool
) -> Policy:
    """Shard a policy on `meta` in place, and fill it from rank 0's `whole` model. Shards and gradient sums
    are float32; layers are gathered in the run's dtype.
    """
    assert ranks.mesh is not None
    options: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy() if is_offloaded else fsdp.OffloadPolicy(),
    }
    in_float32 = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for router in _float32_modules(policy.model):
        fsdp.fully_shard(router, **options | {"mp_policy": in_float32})
    for layer in layers_of(policy.model):
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(policy, **options)
    for module in _sharded(policy) if ranks.size > 1 else ():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # Experts used by only some ranks would give sums of different sizes. Needs torch 2.12.
    set_unused: Any = getattr(policy, "set_reduce_scatter_unused_params", None)
    if set_unused is not None:
        set_unused(True)
    scatter(policy, whole, torch.device("cpu" if is_offloaded else ranks.mesh.device_type))
    return policy


def _float32_modules(model: nn.Module) -> list[nn.Module]:
    kept = float32_names(model)
    owners = {name: model.get_submodule(name) for name in {one.rpartition(".")[0] for one in kept}}
    return [
        module
        for owner, module in sorted(owners.items())
        if all(f"{owner}.{name}" in kept for name, _ in module.named_parameters())
    ]


def reshard(policy: Policy) -> None:
    for module in _sharded(policy):
        module.reshard()


def _sharded(policy: Policy) -> list[fsdp.FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, fsdp.FSDPModule)]


ALLOCATOR_ENV = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def should_compile(
    spec: TrainerSpec, model: Any, plan: ForwardPlan, device: torch.device, dtype: torch.dtype
) -> bool:
    """Resolve trainer.compile. Raises ConfigError."""
    setting = spec.trainer.compile
    if setting is False or (setting == "auto" and device.type != "cuda"):
        return False
    reason = why_not_compiled(model, device, dtype)
    if not plan.is_packed or plan.window is not None:
        reason = "it cannot be trained on packed tokens at any length"
    if reason and setting != "auto":
        what = f"trainer.compile=true, and a {type(model).__name__} cannot be compiled here: {reason}"
        raise ConfigError(what, way_out="set trainer.compile=auto, or false.")
    log.info("trainer.compile: auto is %s", f"false: {reason}" if reason else "true")
    return not reason


class TrainedModel:
    """`reference`: initial weights for a KL divergence."""

    def __init__(self, spec: TrainerSpec, ranks: Ranks, *, needs_reference: bool) -> None:
        self.device, self.dtype = resolve_device(spec)
        self.reference: Policy | None = None
        limit_memory(self.device, spec.share)
        if self.device.type == "cuda" and ALLOCATOR_ENV.isdisjoint(os.environ):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        model, whole, self.adapters = _load(spec, ranks, self.device, self.dtype)
        if self.device.type == "cuda":
            flash = choose_flash(torch.cuda.get_device_capability())
            log.info("attention on CUDA: %s", flash)
        with loading(spec.model_path):
            plan = find_plan(probe_model(model.config, self.device, self.dtype))
        compiles = should_compile(spec, model, plan, self.device, self.dtype)
        frozen = None
        if needs_reference and self.adapters is None:
            frozen = copy.deepcopy(model).requires_grad_(False)
            _cast(frozen, self.dtype)
        if ranks.mesh is None:
            self.reference = None if frozen is None else Policy(frozen, plan, is_compiled=compiles)
            self.masters = MasterWeights(model, self.dtype)
            self.policy = Policy(model, plan, is_compiled=compiles)
        else:
            shard = partial(
                sharded_policy,
                ranks=ranks,
                dtype=self.dtype,
                whole=whole,
                is_offloaded=spec.trainer.cpu_offload,
            )
            if frozen is not None:
                self.reference = shard(Policy(frozen, plan, is_compiled=compiles))
            self.policy = shard(Policy(model, plan, is_compiled=compiles))
            self.masters = MasterWeights(model, torch.float32)
        if self.adapters is not None and spec.trainer.keeps_merged and ranks.mesh is None:
            self.masters.then = self.adapters.keep_merged
            self.adapters.keep_merged()
        if spec.algorithm.router_replay:
            self.policy.replay = RouterReplay(model)
        if spec.trainer.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()


def _load(
    spec: TrainerSpec, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, Adapters | None]:
    """Return the model (on `meta` if sharded), rank 0's whole model, adapters."""
    whole: Any = None
    if ranks.mesh is None or ranks.is_first:
        whole = load_model(spec, dtype)
    model = whole if ranks.mesh is None else meta_model(spec, dtype)
    if spec.trainer.lora is None:
        check_memory(model, device, spec.trainer)
    if ranks.mesh is None:
        model.to(device)
    if spec.trainer.lora is None:
        return model, whole, None
    adapters = Adapters(model, spec.trainer.lora, dtype)
    if whole is not None and whole is not model:
        Adapters(whole, spec.trainer.lora, dtype)
    return model, whole, adapters


class RouterReplay:
    """Replays the engine's experts in the trainer (R3, https://arxiv.org/abs/2510.11370), weighted by the
    model's own logits. Call with routing int32 [N, E] or None.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        if not self._routers:
            what = f"algorithm.router_replay=true, and {type(model).__name__} has no routers"
            raise ConfigError(what, way_out="set algorithm.router_replay=false: each token has one way.")
        self._sizes = [int(router.top_k) for router in self._routers]
        for router in self._routers:
            # One function, so that torch.compile builds one graph for all layers.
            router.forward = MethodType(_route, router)
        self(None)

    def __call__(self, routing_N: Tensor | None) -> None:
        chosen: Sequence[Tensor | None] = [None] * len(self._sizes)
        if routing_N is not None:
            if routing_N.shape[1] != sum(self._sizes):
                num_experts = f"{routing_N.shape[1]} experts, the model's {sum(self._sizes)}"
                what = f"the routing of a token has {num_experts}"
                raise Refused(422, what, rule="trainer and engine hold the same model")
            chosen = torch.split(routing_N, self._sizes, dim=1)
        for router, chosen_NK in zip(self._routers, chosen, strict=True):
            router.chosen_NK = chosen_NK


def _route(router: Any, *args: Any, **kwargs: Any) -> Any:
    if router.chosen_NK is None:
        return type(router).forward(router, *args, **kwargs)
    with _Chosen(router.chosen_NK, len(router.weight)):
        return type(router).forward(router, *args, **kwargs)


class _Chosen(TorchFunctionMode):
    """Replaces topk by this choice, int32 [N, k]."""

    def __init__(self, chosen_NK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen_NK, self._num_experts = chosen_NK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, chosen_NK = args[0], self._chosen_NK
        if scores.shape != (len(chosen_NK), self._num_experts) or found.indices.shape != chosen_NK.shape:
            return found
        indices_NK = torch.where(chosen_NK == NO_EXPERT, found.indices, chosen_NK.long())
        return torch.return_types.topk((scores.gather(-1, indices_NK), indices_NK))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, not buffers: rotary embeddings must not be rounded."""
    kept = float32_names(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
