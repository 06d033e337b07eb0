"""Build the model and master weights. Every failure is a ConfigError."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.base.errors import ConfigError
from asyncrl.config.engine_kinds import engines_with
from asyncrl.messages.tokens import NO_EXPERT
from asyncrl.models.devices import choose_device, own_memory
from asyncrl.models.loading import (
    CONVERSIONS,
    load_language_model,
    loading,
    stored_files,
    text_config,
    ties_of,
)
from asyncrl.models.rope_lengths import pin_length
from asyncrl.trainer.attention.forward_plan import (
    NotCausalError,
    find_plan,
    probe_model,
)
from asyncrl.trainer.attention.packed_attention import HOPPER, choose_flash
from asyncrl.trainer.model.compiled import layers_of, why_not_compiled
from asyncrl.trainer.model.lora import AdapterTable
from asyncrl.trainer.model.policy import ForwardPlan, Policy
from asyncrl.trainer.ranks.optimizer import MasterWeights, Trained, cast_model
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.export import routers_of
from asyncrl.weights.ipc import limit_memory
from asyncrl.weights.tensor_files import float32_names

log = logging.getLogger("asyncrl.trainer")
ALLOCATOR_ENV = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def load_model(
    spec: TrainerSpec, dtype: torch.dtype | None, *, needs_head: bool = True
) -> PreTrainedModel:
    """Load the whole model into host memory in `dtype` (None: as stored). Raises
    ConfigError.
    """
    folder = Path(spec.model_path)
    with loading(folder):
        model = load_language_model(
            folder, needs_head=needs_head, dtype=dtype or stored_dtype(folder)
        )
    own_memory(model)
    return model.eval()  # dropout would change logprobs


def stored_dtype(folder: Path) -> torch.dtype:
    """Return bfloat16 if all of the folder's weights have it, else float32."""
    dtypes = set[str]()
    for path in {*stored_files(folder).values()}:
        with safe_open(path, framework="pt") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return torch.bfloat16 if dtypes == {"BF16"} else torch.float32


def meta_model(
    spec: TrainerSpec, dtype: torch.dtype, whole: PreTrainedModel | None, ranks: Ranks
) -> PreTrainedModel:
    """Build the model on `meta`, with real buffers: no file has rotary frequencies.
    Collective.

    Ties and stored names are facts of rank 0's `whole` model: config.json may declare a
    tie that its weights contradict.
    """
    facts: list[Any] = [None]
    if whole is not None:
        conversions = getattr(whole, CONVERSIONS, None)
        facts = [(whole.config.tie_word_embeddings, ties_of(whole), conversions)]
    if ranks.size > 1:
        dist.broadcast_object_list(facts, 0, group=ranks.group)
    declared, ties, conversions = facts[0]
    folder = Path(spec.model_path)
    with (
        loading(folder),
        torch.random.fork_rng([]),
        init_empty_weights(include_buffers=False),
    ):
        config = text_config(folder)
        config.tie_word_embeddings = declared
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    setattr(model, CONVERSIONS, conversions)
    for name, source in ties.items():  # the context has replaced tied parameters
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    return model.eval()


def make_models(
    spec: TrainerSpec,
    dtype: torch.dtype,
    ranks: Ranks,
    device: torch.device,
    kind: type[Policy],
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Return the model to train, on `meta` if it will be sharded, and the loaded one, of
    the first rank if sharded. Collective. Raises ConfigError.
    """
    if ranks.mesh is None:
        whole = load_model(spec, dtype, needs_head=kind.needs_head).to(device)
        kind.prepare(whole)
        return whole, whole
    whole = None
    if ranks.is_first:
        # Shards are cast on their device; adapters need the dtype before.
        loaded_dtype = dtype if spec.trainer.adapters else None
        whole = load_model(spec, loaded_dtype, needs_head=kind.needs_head)
    model = meta_model(spec, dtype, whole, ranks)
    kind.prepare(model)
    if whole is not None:
        kind.prepare(whole)
    return model, whole


@torch.no_grad()
def scatter(policy: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Fill `policy.model`, sharded on `meta`, from rank 0's `whole` model. Collective."""
    sources = {} if whole is None else whole.state_dict(keep_vars=True)
    made = dict[int, nn.Parameter]()
    state = dict[str, nn.Parameter]()
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor)
        if id(parameter) not in made:
            mesh = parameter.device_mesh
            if whole is None:
                source = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=mesh.device_type
                )
            else:
                source = sources[name.removeprefix("model.")].detach()
                # bfloat16 travels, float32 is made on the device
                if mesh.device_type == "cuda":
                    source = source.pin_memory().to(mesh.device_type, non_blocking=True)
                source = source.to(mesh.device_type, parameter.dtype, copy=True)
            sharded = distribute_tensor(source, mesh, parameter.placements).to(device)
            made[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
        state[name] = made[id(parameter)]
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            if whole is not None:
                tensor.copy_(sources[name.removeprefix("model.")])
            dist.broadcast(tensor, 0)
    policy.load_state_dict(state, strict=False, assign=True)


def shard_policy(
    policy: Policy,
    ranks: Ranks,
    dtype: torch.dtype,
    whole: nn.Module | None,
    *,
    is_offloaded: bool,
) -> None:
    """Shard a policy on `meta` in place, and fill it from rank 0's `whole` model.
    Shards and gradient sums are float32; layers are gathered in the run's dtype.
    """
    assert ranks.mesh is not None
    offloading = fsdp.CPUOffloadPolicy() if is_offloaded else fsdp.OffloadPolicy()
    shard = partial(
        fsdp.fully_shard, mesh=ranks.mesh["shard"], offload_policy=offloading
    )
    mixed = partial(fsdp.MixedPrecisionPolicy, reduce_dtype=torch.float32)
    for router in _float32_modules(policy.model):
        shard(router, mp_policy=mixed(param_dtype=torch.float32))
    for part in (*layers_of(policy.model), policy):
        shard(part, mp_policy=mixed(param_dtype=dtype))
    for module in _sharded(policy) if ranks.size > 1 else ():
        # Loss weights divide by the tokens of all ranks already. FSDP2's mean would
        # divide once more.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # Experts used by only some ranks would give sums of different sizes. Needs torch
    # 2.12.
    set_unused: Any = getattr(policy, "set_reduce_scatter_unused_params", None)
    if set_unused is not None:
        set_unused(True)
    device = torch.device("cpu" if is_offloaded else ranks.mesh.device_type)
    scatter(policy, whole, device)


def _float32_modules(model: nn.Module) -> list[nn.Module]:
    kept = float32_names(model)
    owners = {
        name: model.get_submodule(name)
        for name in {one.rpartition(".")[0] for one in kept}
    }
    return [
        module
        for owner, module in sorted(owners.items())
        if all(f"{owner}.{name}" in kept for name, _ in module.named_parameters())
    ]


def reshard(policy: Policy) -> None:
    for module in _sharded(policy):
        module.reshard()


def _sharded(policy: Policy) -> list[fsdp.FSDPModule]:
    return [
        module for module in policy.modules() if isinstance(module, fsdp.FSDPModule)
    ]


def should_compile(
    spec: TrainerSpec, model: PreTrainedModel, plan: ForwardPlan, device: torch.device
) -> bool:
    """Resolve trainer.compile. Raises ConfigError."""
    setting = spec.trainer.compile
    checkpointing = spec.trainer.gradient_checkpointing
    is_wanted = setting is True or (setting == "auto" and device.type == "cuda")
    reason = (
        why_not_compiled(model, device)
        if is_wanted
        else f"trainer.compile={setting}, on {device.type}"
    )
    if is_wanted and (not plan.is_packed or plan.mixers):
        reason = "it cannot be trained on packed tokens alone"
    if reason and not isinstance(checkpointing, bool):
        what = f"trainer.gradient_checkpointing={checkpointing}, and the layers are not compiled: {reason}"
        raise ConfigError(
            what, way_out="set trainer.gradient_checkpointing=true, or false."
        )
    if reason and setting is True:
        what = f"trainer.compile=true, and a {type(model).__name__} cannot be compiled here: {reason}"
        raise ConfigError(what, way_out="set trainer.compile=auto, or false.")
    if not is_wanted:
        return False
    functorch: Any = torch._functorch.config
    functorch.activation_memory_budget = (
        1.0 if isinstance(checkpointing, bool) else checkpointing
    )
    # Kernels chosen by their measured time would sum in another order after a restart.
    inductor: Any = torch._inductor.config
    inductor.deterministic = spec.trainer.deterministic
    if reason:
        log.warning("layers run uncompiled, at about half the speed: %s", reason)
    return not reason


def set_up_torch(spec: TrainerSpec) -> None:
    """Set threads, seed and determinism of this process, before its first tensor: later
    they would not cover the building of the model.
    """
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    use_deterministic(is_on=spec.trainer.deterministic)


def use_deterministic(*, is_on: bool) -> None:
    """Choose deterministic algorithms for this process, before its first product on
    CUDA. Operators without one raise RuntimeError. Both FlashAttentions follow torch's
    flag, in their backward passes too.
    """
    if is_on and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(is_on)
    # Else torch fills each new tensor with NaN, to detect reads of unwritten memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_kernels(device: torch.device, *, is_compiled: bool) -> dict[str, float]:
    """Choose CUDA's attention kernel, and return metrics of the kernels."""
    if device.type != "cuda":
        return {}
    capability = torch.cuda.get_device_capability()
    flash = (
        {"trainer/flash_attention": float(choose_flash(capability))}
        if capability == HOPPER
        else {}
    )
    return {"trainer/compiled": float(is_compiled), **flash}


def plan_of(
    spec: TrainerSpec, model: PreTrainedModel, device: torch.device
) -> ForwardPlan:
    """Choose how sequences share a pass, and pin rotary frequencies as an engine does.
    Raises ConfigError.
    """
    with loading(spec.model_path):
        small = probe_model(model.config, device)
    try:
        plan = find_plan(small)
    except NotCausalError as error:
        raise ConfigError(
            f"a {type(model).__name__} cannot be trained exactly: {error}",
            rule="a token's logprob depends on the tokens before it alone, in transformers as in the engine",
            way_out="train another model.",
        ) from error
    if not spec.pinned_length or plan.border is None:
        return plan
    if not plan.border.is_stepwise:
        raise ConfigError(
            f"rollout.engine={engines_with('pins_length')}, and the model's RoPE is {plan.border.rope_type}",
            rule="it scales dynamic RoPE by a rule of its own, unlike transformers at any length",
            way_out="set rollout.engine=embedded.",
        )
    pin_length(model, spec.pinned_length)
    return plan._replace(border=None)


class TrainedModel:
    """`reference`: initial weights for a KL divergence. `kind`: of the policy, which may
    be a value model.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        ranks: Ranks,
        *,
        needs_reference: bool,
        kind: type[Policy] = Policy,
    ) -> None:
        self.device, self.dtype = choose_device(spec.device, spec.dtype)
        limit_memory(self.device, spec.share)
        if self.device.type == "cuda" and ALLOCATOR_ENV.isdisjoint(os.environ):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        is_sharded = ranks.mesh is not None
        has_adapters = bool(spec.trainer.adapters)
        dtype = self.dtype if has_adapters else torch.float32
        model, whole = make_models(spec, dtype, ranks, self.device, kind)
        self.adapters: AdapterTable | None = None
        if has_adapters:
            settings = spec.trainer, self.dtype, spec.record_path.parent, spec.seed
            self.adapters = AdapterTable(model, *settings, ranks)
            if is_sharded and whole is not None:
                AdapterTable(whole, *settings, ranks)
        plan = plan_of(spec, model, self.device)
        compiles = should_compile(spec, model, plan, self.device)
        self.kernels = choose_kernels(self.device, is_compiled=compiles)
        frozen = None
        if needs_reference and self.adapters is None:
            # Before the masters hook into the model and its layers are compiled.
            frozen = copy.deepcopy(model).requires_grad_(False)
            cast_model(frozen, self.dtype)

        def policy_of(model: PreTrainedModel) -> Policy:
            policy = kind(model, plan, is_compiled=compiles)
            if is_sharded:
                shard_policy(
                    policy,
                    ranks,
                    self.dtype,
                    whole,
                    is_offloaded=spec.trainer.offload.by_layer,
                )
            return policy

        self.reference = None if frozen is None else policy_of(frozen)
        masters: MasterWeights | None = None
        if not is_sharded and self.adapters is None:
            # before layers are compiled or fused
            masters = MasterWeights.of(model, self.dtype)
        self.policy = policy_of(model)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        if self.adapters is not None:
            self.policy.select = self.adapters.select
            self.trained = self.adapters.policy
        else:
            # Shards are float32.
            masters = masters or MasterWeights.of(model, torch.float32)
            self.trained = Trained(masters, spec.trainer)
        self.masters = self.trained.masters
        if spec.algorithm.router_replay:
            self.policy.replay = RouterReplay(model)
        if spec.trainer.gradient_checkpointing is True:
            self.policy.enable_gradient_checkpointing()


class RouterReplay:
    """Replays the engine's experts in the trainer (R3,
    https://arxiv.org/abs/2510.11370), weighted by the model's own logits. Call with
    routing int32 [N, E] or None.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace the forward functions of all routers. Raises ConfigError without one."""
        self._routers = routers_of(model)
        if not self._routers:
            raise _not_replayed(type(model).__name__, "no router is found")
        self._sizes = [_top_k(router) for router in self._routers]
        for router in self._routers:
            # One function, so that torch.compile builds one graph for all layers.
            router.forward = MethodType(_route, router)
            router.num_scores = next(
                len(one) for one in router.parameters() if one.ndim == 2
            )
        self(None)

    def __call__(self, routing_N: Tensor | None) -> None:
        """Set the experts of the next pass, None for the routers' own. Raises ConfigError
        if the engine has recorded another number of experts.
        """
        chosen: Sequence[Tensor | None] = [None] * len(self._sizes)
        if routing_N is not None:
            if routing_N.shape[1] != sum(self._sizes):
                what = f"the engine tells {routing_N.shape[1]} experts of a token, and the trainer's routers "
                raise _not_replayed(
                    type(self._routers[0]).__name__, what + f"choose {sum(self._sizes)}"
                )
            chosen = torch.split(routing_N, self._sizes, dim=1)
        for router, chosen_NK in zip(self._routers, chosen, strict=True):
            router.chosen_NK = chosen_NK


def _top_k(router: nn.Module) -> int:
    """Return how many experts a router chooses for a token. Raises ConfigError."""
    config = getattr(router, "config", None)
    # Gemma 4 has it in its config
    found = getattr(router, "top_k", getattr(config, "top_k_experts", None))
    if found is None:
        raise _not_replayed(type(router).__name__, "it has no top_k")
    return int(found)


def _not_replayed(name: str, why: str) -> ConfigError:
    what = f"algorithm.router_replay cannot set the experts of {name}: {why}"
    return ConfigError(what, way_out="set algorithm.router_replay=false.")


def _route(router: Any, *args: object, **kwargs: object) -> object:
    if router.chosen_NK is None:
        return type(router).forward(router, *args, **kwargs)
    chosen = _Chosen(router.chosen_NK, router.num_scores)
    with chosen:
        found = type(router).forward(router, *args, **kwargs)
    if not chosen.is_used:
        raise _not_replayed(type(router).__name__, "it calls no topk over its experts")
    return found


class _Chosen(TorchFunctionMode):
    """Replaces topk by this choice, int32 [N, k]."""

    def __init__(self, chosen_NK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen_NK = chosen_NK
        self._num_experts = num_experts
        self.is_used = False

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0]
        chosen_NK = self._chosen_NK
        if (
            scores.shape != (len(chosen_NK), self._num_experts)
            or found.indices.shape != chosen_NK.shape
        ):
            return found
        self.is_used = True
        indices_NK = torch.where(
            chosen_NK == NO_EXPERT, found.indices, chosen_NK.long()
        )
        return torch.return_types.topk((scores.gather(-1, indices_NK), indices_NK))
