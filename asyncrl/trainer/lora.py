"""Low-rank adapters in a Hugging Face model: put in, merged, exported, saved. Knows modules; knows no batch and no optimizer.

A layer with an adapter computes with W + scale * B A, scale = alpha / rank (lora_layer.py); the base model knows this weight by its
own name. A starts random and B at zero, so that a new adapter changes nothing (https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.config import LoraConfig
from asyncrl.durable import open_as, whole_folder
from asyncrl.trainer.lora_layer import ADAPTER, MergedLinear, merge
from asyncrl.trainer.lora_targets import find_targets
from asyncrl.trainer.weights import in_export_dtype, named_weights

SCALE = "scale"
"""Name of the scalar float32 tensor, alpha / rank, that goes with exported adapters: an engine needs it, and the digest covers it."""


class Adapters:
    """The adapters of one model.

    Life:       made once, before the policy and the optimizer; the model then trains its adapters and nothing else.
    Invariant:  the base weights stay as they were loaded, rounded to the dtype of the run, and require no gradient.
    """

    def __init__(self, model: Any, config: LoraConfig, seed: int, dtype: torch.dtype) -> None:
        """Puts them into `model`; they are float32. Raises ConfigError if they cannot sit where trainer.lora.targets says."""
        names = find_targets(model, config)
        self._model, self.config, self._dtype = model, config, dtype
        self._peft_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated as int, and only ever divided
            target_modules=names,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        # As in https://huggingface.co/docs/peft/developer_guides/custom_models
        self._peft_config._register_custom_module({nn.Linear: MergedLinear})
        peft.inject_adapter_in_model(self._peft_config, model, ADAPTER)
        self.layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        for parameter in model.parameters():  # whatever the dtype that the model was loaded in
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)
        random = torch.Generator().manual_seed(seed)
        for layer in self.layers.values():
            start = torch.empty(layer.lora_A[ADAPTER].weight.shape)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=random)  # drawn on the CPU: the same on any device
            with torch.no_grad():
                layer.lora_A[ADAPTER].weight.copy_(start)
                layer.lora_B[ADAPTER].weight.zero_()

    def __repr__(self) -> str:
        return f"<Adapters of rank {self.config.rank} on {len(self.layers)} layers>"

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.config.alpha / self.config.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """Meanwhile the model computes as if it had none: with scale 0, bit for bit."""
        try:
            self._set_scale(0.0)
            yield
        finally:
            self._set_scale(self.scale)

    def tensors(self) -> dict[str, Tensor]:
        """A [rank, in] and B [out, rank] of each layer, sharded where the model is."""
        adapters = {}
        for name, layer in self.layers.items():
            adapters[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
            adapters[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
        return adapters

    def export_tensors(self) -> dict[str, Tensor]:
        """What an engine needs beside the base weights, as the model computes with it: tensors() on the CPU, and the scale.

        Sharded ones are gathered, here and in merged() and save(): every rank calls, and in the same order.
        """
        return {**in_export_dtype(self.tensors(), self._dtype), SCALE: torch.tensor(self.scale)}

    def merged(self) -> dict[str, Tensor]:
        """All weights by the base model's own names, those of layers with an adapter merged, sharded where the model is."""
        weights, merges = self.merging()
        return weights | {name: merge_one() for name, merge_one in merges.items()}

    def merging(self) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
        """(all weights by the base model's own names, as they are without adapters; what merges each that has one), for one at a time."""
        weights = {name: tensor for name, tensor in named_weights(self._model).items() if ".lora_" not in name}
        merges: dict[str, Callable[[], Tensor]] = {}
        for name, layer in self.layers.items():
            prefix = f"{name}.base_layer."
            for found in [found for found in weights if found.startswith(prefix)]:
                weights[f"{name}.{found.removeprefix(prefix)}"] = weights.pop(found)
            merges[f"{name}.weight"] = partial(self._merge, layer, weights[f"{name}.weight"])
        return weights, merges

    def _merge(self, layer: Any, base: Tensor) -> Tensor:
        lora_A, lora_B = (module[ADAPTER].weight.detach().to(self._dtype) for module in (layer.lora_A, layer.lora_B))
        return merge(base, lora_A, lora_B, self.scale)

    def save(self, path: Path, model_path: str) -> None:
        """Write a folder that peft.PeftModel.from_pretrained opens on the base, complete or not at all; replaces one. Raises OSError."""
        tensors = {f"base_model.model.{name}": tensor for name, tensor in in_export_dtype(self.tensors(), self._dtype).items()}
        with whole_folder(path) as unfinished:
            unfinished.mkdir()
            self._peft_config.base_model_name_or_path = model_path
            self._peft_config.inference_mode = True
            self._peft_config.target_modules = _short_names(self._model, list(self.layers))
            self._peft_config.save_pretrained(str(unfinished))
            save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
            open_as(unfinished, unfinished / "adapter_config.json")

    def _set_scale(self, scale: float) -> None:
        for layer in self.layers.values():
            layer.scaling[ADAPTER] = scale


def _short_names(model: Any, names: list[str]) -> list[str]:
    """Last parts of the names where they mean these modules and no others, as people write them; else the full names."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    meant = [name for name, module in model.named_modules() if name.rpartition(".")[2] in ends and "base_layer" not in name]
    return ends if sorted(meant) == sorted(names) else sorted(names)
