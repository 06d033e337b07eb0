"""Turns a TrainerSpec into a model, an optimizer and functions.

Every failure here is a ConfigError with the way out: it happens before the first step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.model.policy import ForwardPlan, Policy, find_plan
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec

if TYPE_CHECKING:
    from asyncrl.trainer.model.lora import Adapters


class MasterWeights:
    """Named float32 weights that an optimizer steps on, under a model that computes in bfloat16: its
    micro-batches' gradients are added up in float32. In float32 the parameters are their own masters.

    Life: made once; after each optimizer step write_back().
    Invariant: outside of a step the model's weights are the masters, rounded to its dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`model` holds float32 weights; with bfloat16 it is converted. Only parameters that require a
        gradient have a master.
        """
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if dtype == torch.float32:
            self.named: dict[str, Tensor] = dict(named)
            self._working: dict[str, nn.Parameter] = {}
            return
        self.named = {name: parameter.detach().clone() for name, parameter in named.items()}
        for parameter in model.parameters():  # not buffers: a rotary embedding's must not be rounded
            parameter.data = parameter.data.to(dtype)
        self._working = named
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(partial(_collect, self.named[name]))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the model the masters as they are now."""
        for name, parameter in self._working.items():
            parameter.copy_(self.named[name])


def _collect(master: Tensor, parameter: Tensor) -> None:
    """Move the gradient of one backward pass into the master's sum."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


STATE_BYTES = 12
"""Bytes a parameter beside its float32 weight: gradient and two moments of AdamW."""


def resolve_device(spec: TrainerSpec) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of forward pass and exports that the spec's `auto` stand for."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        way_out = "set placement.trainer=cpu, or install a CUDA build of torch."
        raise ConfigError("the trainer is to run on CUDA, but torch sees no CUDA device", way_out=way_out)
    is_cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    dtype = ("bfloat16" if is_cuda else "float32") if spec.dtype == "auto" else spec.dtype
    return torch.device("cuda" if is_cuda else "cpu"), getattr(torch, dtype)


def load_model(spec: TrainerSpec, device: torch.device, dtype: torch.dtype, *, is_sharded: bool) -> Any:
    """The model with float32 master weights, dropout off, all parameters trained; under adapters in the dtype
    of the forward pass.

    One to be sharded stays whole in host memory, in every rank, until its shards go to the device.
    """
    is_adapted = spec.trainer.lora is not None
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.model_path, dtype=dtype if is_adapted else torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot load the model {spec.model_path}: {reason}",
            rule="model.path is a Hugging Face folder or hub id of a causal language model",
            way_out="correct model.path; a hub id needs the network or a filled cache.",
        ) from error
    if missing := sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]):
        raise ConfigError(
            f"the weights of {spec.model_path} lack {len(missing)} tensors, e.g. {missing[0]}",
            rule="transformers would fill them with random numbers, in every process with others",
            way_out="complete the folder; model.scratch makes a model with random weights on purpose.",
        )
    if not is_adapted:  # gradients and optimizer state of adapters are small beside the weights
        _check_memory(sum(parameter.numel() for parameter in model.parameters()), device, spec.trainer)
    for parameter in model.parameters():  # an offload cannot give the memory of a mapped file up
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    # dropout would make the trainer's logprobs differ from the engine's; gradients flow all the same
    model.eval()
    return (model if is_sharded else model.to(device)).requires_grad_(True)


def load_tokenizer(spec: TrainerSpec) -> Any:
    """The model's tokenizer, with spec.chat_template if there is one. Raises OSError or ValueError if it
    cannot be read.
    """
    tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
    if spec.chat_template is not None:
        tokenizer.chat_template = Path(spec.chat_template).read_text(encoding="utf-8")
    return tokenizer


def make_optimizer(weights: Iterable[torch.Tensor], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW, fused; weight decay on matrices alone, not on norms and biases. The learning rate is set before
    each step.
    """
    matrices, others = list[Tensor](), list[Tensor]()
    for weight in weights:
        (matrices if weight.ndim >= 2 else others).append(weight)
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    groups = [group for group in (decayed, {"params": others, "weight_decay": 0.0}) if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run.

    Warm-up rises linearly and reaches the peak in its last step, number warmup_steps - 1; then the rate stays
    (constant) or falls to 0 one step after the last of num_steps * mini_batches * epochs.
    """
    peak, past_warmup = config.learning_rate, step - config.warmup_steps
    if past_warmup < 0:
        return peak * (step + 1) / config.warmup_steps
    length = max(config.num_steps * config.mini_batches * config.epochs - config.warmup_steps, 1)
    progress = min(past_warmup / length, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.schedule]


def _check_memory(num_parameters: int, device: torch.device, config: TrainerConfig) -> None:
    """Refuse what cannot fit before it is allocated. On CUDA the weights themselves are still to be moved, a
    shard to each device.
    """
    if device.type == "cuda" and not config.cpu_offload:
        shard = -(-num_parameters // config.world_size)
        needed_bytes, free_bytes = shard * (STATE_BYTES + 4), torch.cuda.mem_get_info(device)[0]
    else:  # the shards of all ranks lie in the memory of one host
        needed_bytes, free_bytes = num_parameters * STATE_BYTES, psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the trainer needs {needed_bytes / 2**30:.1f} GiB for gradients and optimizer state of "
            f"{num_parameters / 1e6:.0f} M parameters, and {free_bytes / 2**30:.1f} GiB are free",
            rule=f"{STATE_BYTES} bytes a parameter beside the float32 weights, activations not counted",
            way_out="set trainer.lora, take a smaller model or more memory, or raise trainer.world_size.",
        )


def sharded_policy(
    model: Any, plan: ForwardPlan, ranks: Ranks, dtype: torch.dtype, *, is_offloaded: bool
) -> Policy:
    """A policy of `model` (whole, on any device), sharded in place and moved to this rank's device, layer
    after layer. Parameters become float32 shards, which the optimizer steps on; each decoder layer is
    gathered for its forward and backward pass in the dtype of the run, and its gradient is added up over the
    ranks in float32.
    """
    assert ranks.mesh is not None
    policy = Policy(model, plan)
    options: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy() if is_offloaded else fsdp.OffloadPolicy(),
    }
    for layer in _layers(model):
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(policy, **options)
    for module in _sharded(policy):
        # The step's loss is a sum over all ranks, not a mean: nothing is divided.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    # Experts that only some ranks use would give sums of different sizes. Since torch 2.12, before which
    # transformers' stacked experts have a gradient anyway.
    set_unused: Any = getattr(policy, "set_reduce_scatter_unused_params", None)
    if set_unused is not None:
        set_unused(True)
    return policy


def reshard(policy: Policy) -> None:
    """Free what a forward pass without a backward pass has left gathered: outside a step the weights are
    their shards.
    """
    for module in _sharded(policy):
        module.reshard()


def _sharded(policy: Policy) -> list[fsdp.FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, fsdp.FSDPModule)]


def _layers(model: Any) -> list[nn.Module]:
    """The blocks that transformers itself never splits over devices; innermost first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names][::-1]


class TrainedModel:
    """What a trainer computes with. `reference`: the initial weights, where a KL divergence to them is asked
    for and adapters cannot be switched off for it.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks, *, needs_reference: bool) -> None:
        """Load everything. Raises ConfigError if the model cannot be had, or memory is short."""
        self.device, self.dtype = device, dtype = resolve_device(spec)
        self.adapters: Adapters | None = None
        self.reference: Policy | None = None
        model = load_model(spec, device, dtype, is_sharded=ranks.mesh is not None)
        if spec.trainer.lora is not None:
            from asyncrl.trainer.model.lora import Adapters

            self.adapters = Adapters(model, spec.trainer.lora, dtype)
        # Without its adapters the model is the reference.
        has_copy = needs_reference and self.adapters is None
        if ranks.mesh is None:
            if has_copy:
                self.reference = Policy(_frozen_copy(model, dtype))
            self.masters = MasterWeights(model, dtype)
            self.policy = Policy(model)
        else:
            # A policy finds its plan with whole weights in the dtype of the run, so before the shards are
            # cut; in host memory, because a device need not hold the whole model.
            frozen = _frozen_copy(model, dtype)
            plan, is_offloaded = find_plan(frozen), spec.trainer.cpu_offload
            if has_copy:
                self.reference = sharded_policy(frozen, plan, ranks, dtype, is_offloaded=is_offloaded)
            del frozen
            self.policy = sharded_policy(model, plan, ranks, dtype, is_offloaded=is_offloaded)
            self.masters = MasterWeights(model, torch.float32)  # the shards are float32 already
        if spec.trainer.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()


def _frozen_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The weights as they are, in the dtype of the forward pass, never to change."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for parameter in frozen.parameters():
        parameter.data = parameter.data.to(dtype)
    return frozen
