"""Low-rank adapters (https://arxiv.org/abs/2106.09685): W + scale * B A, scale = alpha
/ rank, B zero at first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.base.errors import ConfigError
from asyncrl.config.trainer_config import LoraConfig
from asyncrl.models.structure import hooked
from asyncrl.trainer.attention.forward_plan import probe_model
from asyncrl.weights.export import (
    local_if_whole,
    merge,
    named_weights,
    whole_tensors,
)
from asyncrl.weights.tensor_files import (
    SCALE,
    float32_names,
    rename_adapters,
)

ADAPTER = "default"


def find_targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return full names of the layers to adapt. Raises ConfigError."""
    # Tied weights are the same object under two names. An adapter on one would change
    # both.
    named = model.named_parameters(remove_duplicate=False)
    times = Counter(id(parameter) for _, parameter in named)
    head = model.get_output_embeddings()
    called = called_layers(model.config)
    linear = [
        name
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear)
        and times[id(one.weight)] == 1
        # The head's weight is sliced without a call of the module (policy.py), so an
        # adapter on it would have no effect.
        and one is not head
        and _kind(name) in called
    ]
    if not linear:
        what = f"trainer.lora: {type(model).__name__} has no linear layers that adapters fit"
        raise ConfigError(what, way_out="remove trainer.lora, to train all weights.")
    if config.targets == "all-linear":
        return linear
    chosen = {
        end: [name for name in linear if f".{name}".endswith(f".{end}")]
        for end in config.targets
    }
    if missing := [end for end, names in chosen.items() if not names]:
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ConfigError(
            f"trainer.lora.targets: {type(model).__name__} has no layer {', '.join(missing)}",
            rule="adapters need a called torch.nn.Linear with an unshared weight, other than the head",
            way_out=f"name modules or the ends of their names; the linear layers are {kinds}.",
        )
    return [name for name in linear if any(name in names for names in chosen.values())]


@torch.no_grad()
def called_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of linear layers that a model calls.

    Others only hold a weight that the model reads, such as Mamba's dt_proj, which would
    pass by an adapter. Subclasses with a forward of their own, such as routers, would
    lose it.
    """
    small = probe_model(config, torch.device("cpu"))
    linear: dict[nn.Module, str] = {
        one: _kind(name)
        for name, one in small.named_modules()
        if isinstance(one, nn.Linear) and type(one).forward is nn.Linear.forward
    }
    called = set[str]()
    with hooked(linear, lambda kind, *_: called.add(kind)):
        small(input_ids=torch.arange(2)[None], use_cache=False)
    return called


def _kind(name: str) -> str:
    """Return a module's name without the numbers of layers."""
    return re.sub(r"\d+", "#", name)


class MergedLinear(lora.Linear):
    """A peft layer that merges W + scale * B A once per push and rounds it, as engines
    do.

    Adding scale * B (A x) to W x would be another policy: changes below half a bfloat16
    step do not reach the engine.
    """

    kept: Tensor | None = None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank]."""
        lora_A: Any = self.lora_A[ADAPTER]
        lora_B: Any = self.lora_B[ADAPTER]
        return lora_A.weight, lora_B.weight

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        scale = self.scaling[ADAPTER]
        if not scale:
            return self.get_base_layer()(x)  # type: ignore[no-any-return]
        return _MergedLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
            x,
            self.weight,
            self.bias,
            *self.pair(),
            scale,
            self.kept,
        )


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor,
        bias: Tensor | None,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        merged: Tensor | None,
    ) -> Tensor:
        # Without kept merged weights the backward pass merges again: keeping them would
        # cost a second copy of each adapted weight.
        ctx.save_for_backward(x, base if merged is None else merged, lora_A, lora_B)
        ctx.scale = scale
        ctx.is_merged = merged is not None
        return functional.linear(
            x, merge(base, lora_A, lora_B, scale) if merged is None else merged, bias
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_A, lora_B = ctx.saved_tensors
        grad_NO = grads[0].flatten(0, -2)
        x_NI = x.flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] @ (
                weight if ctx.is_merged else merge(weight, lora_A, lora_B, ctx.scale)
            )
        # Through the rank's narrow side, never as [out, in]: the full gradient of W is
        # what adapters save.
        grad_A = ctx.scale * ((grad_NO @ lora_B).T @ x_NI)
        grad_B = ctx.scale * (grad_NO.T @ (x_NI @ lora_A.T))
        return grad_x, None, None, grad_A, grad_B, None, None


class Adapters:
    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype
    ) -> None:
        """Insert float32 adapters. Raises ConfigError."""
        names = find_targets(model, config)
        self._model = model
        self._dtype = dtype
        self.scale = config.alpha / config.rank
        # With a transformers config, peft would rename names and move dense adapters to
        # experts.
        holder = nn.Module()
        holder.model = model
        described = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated as int, and only ever divided
            target_modules=[f"model.{name}" for name in names],
        )
        # https://huggingface.co/docs/peft/developer_guides/custom_models
        described._register_custom_module({nn.Linear: MergedLinear})
        is_meta = next(model.parameters()).is_meta
        peft.inject_adapter_in_model(
            described, holder, ADAPTER, low_cpu_mem_usage=is_meta
        )
        self.layers: dict[str, MergedLinear] = {
            name: model.get_submodule(name) for name in names
        }
        kept = float32_names(model)
        for name, parameter in model.named_parameters():
            in_float32 = parameter.requires_grad or name in kept
            parameter.data = parameter.data.to(torch.float32 if in_float32 else dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        # A scale of 0 takes the base layer's own path, so these are the bits of the
        # initial model.
        try:
            self._set_scale(0.0)
            yield
        finally:
            self._set_scale(self.scale)

    @torch.no_grad()
    def keep_merged(self) -> None:
        """Merge, unless no adapter has changed."""
        for layer in self.layers.values():
            if layer.kept is None:
                lora_A, lora_B = layer.pair()
                layer.kept = merge(layer.weight, lora_A, lora_B, self.scale)

    def forget_merged(self) -> None:
        """Free the merged weights until the next pass."""
        for layer in self.layers.values():
            layer.kept = None

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of each layer, sharded like the model."""
        return {
            f"{name}.{kind}.weight": weight.detach()
            for name, layer in self.layers.items()
            for kind, weight in zip(("lora_A", "lora_B"), layer.pair(), strict=True)
        }

    def export_tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return tensors() on CPU in the run's dtype under checkpoint names, and the
        scale. Collective. `names`: stored_names() of the model.
        """
        tensors = dict(whole_tensors(self.tensors(), self._dtype))
        return {**rename_adapters(tensors, names), SCALE: torch.tensor(self.scale)}

    def merging(self) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
        """Return all weights, and merge functions of adapted weights."""
        weights = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in named_weights(self._model).items()
            if ".lora_" not in name
        }
        merges: dict[str, Callable[[], Tensor]] = {
            f"{name}.weight": partial(self._merge, layer, weights[f"{name}.weight"])
            for name, layer in self.layers.items()
        }
        return weights, merges

    def _merge(self, layer: MergedLinear, base: Tensor) -> Tensor:
        lora_A, lora_B = layer.pair()
        # Rounded as the exported adapters are, so that trainer and engines merge the
        # same numbers.
        whole_A = local_if_whole(lora_A.detach()).to(self._dtype)
        whole_B = local_if_whole(lora_B.detach()).to(self._dtype)
        return merge(base, whole_A, whole_B, self.scale)

    def _set_scale(self, scale: float) -> None:
        for layer in self.layers.values():
            layer.scaling[ADAPTER] = scale
