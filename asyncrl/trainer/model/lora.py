"""Low-rank adapters of the trainer: peft's layers and names, computed as in engines
(asyncrl/models/low_rank.py). scale = alpha / rank, and B is zero at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.trainer_config import LoraConfig
from asyncrl.models.low_rank import LowRank, find_targets, noted_calls
from asyncrl.trainer.attention.forward_plan import probe_model
from asyncrl.weights.export import local_if_whole, merge
from asyncrl.weights.tensor_files import SUFFIXES, float32_names

ADAPTER = "default"


@torch.no_grad()
def targets_of(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the full names of the layers to adapt. Raises ConfigError."""
    small = probe_model(model.config, torch.device("cpu"))
    with noted_calls(small) as called:
        small(input_ids=torch.arange(2)[None], use_cache=False)
    return find_targets(model, config.targets, called)


class AddedLinear(lora.Linear):
    """A peft layer that computes as engines do: W x + scale * B (A x), in the dtype of
    x.
    """

    @property
    def low_rank(self) -> LowRank:
        lora_A: Any = self.lora_A[ADAPTER]
        lora_B: Any = self.lora_B[ADAPTER]
        return LowRank(lora_A.weight, lora_B.weight, self.scaling[ADAPTER])

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        product: Tensor = self.get_base_layer()(x)
        low_rank = self.low_rank
        # At scale 0 these are the bits of the model without adapters.
        return low_rank.add(product, x) if low_rank.scale else product


class Adapters:
    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype
    ) -> None:
        """Insert float32 adapters. Raises ConfigError."""
        names = targets_of(model, config)
        self._dtype = dtype
        self.scale = config.scale
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
        described._register_custom_module({nn.Linear: AddedLinear})
        is_meta = next(model.parameters()).is_meta
        peft.inject_adapter_in_model(
            described, holder, ADAPTER, low_cpu_mem_usage=is_meta
        )
        self.layers: dict[str, AddedLinear] = {
            name: model.get_submodule(name) for name in names
        }
        kept = float32_names(model)
        for name, parameter in model.named_parameters():
            in_float32 = parameter.requires_grad or name in kept
            parameter.data = parameter.data.to(torch.float32 if in_float32 else dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the initial model."""
        try:
            self._set_scale(0.0)
            yield
        finally:
            self._set_scale(self.scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of each layer, sharded like the model."""
        return {
            f"{name}{end}": local_if_whole(weight.detach())
            for name, layer in self.layers.items()
            for end, weight in zip(SUFFIXES, layer.low_rank[:2], strict=True)
        }

    def merging(
        self, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
        """Return all weights, and merge functions of adapted weights. `weights`: of the
        model with its adapters.
        """
        plain = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in weights.items()
            if ".lora_" not in name
        }
        merges = dict[str, Callable[[], Tensor]]()
        for name, layer in self.layers.items():
            # A tied head is listed as the embedding, which has no adapter.
            base = local_if_whole(layer.weight.detach())
            plain[f"{name}.weight"] = base
            merges[f"{name}.weight"] = partial(self._merge, layer, base)
        return plain, merges

    def _merge(self, layer: AddedLinear, base: Tensor) -> Tensor:
        # Rounded as the exported adapters are, so that an export that merges them later
        # has the same bits.
        down, up = (
            local_if_whole(one.detach()).to(self._dtype) for one in layer.low_rank[:2]
        )
        return merge(base, down, up, self.scale)

    def _set_scale(self, scale: float) -> None:
        for layer in self.layers.values():
            layer.scaling[ADAPTER] = scale
