"""Transport lora: only the adapters, as one safetensors file in shared memory.

It contains `<module>.lora_A.weight` [rank, in], `<module>.lora_B.weight` [out, rank], and the scalar
`scale`, alpha / rank. An embedded engine merges it; vLLM's worker makes a peft folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.weights.export import Exported, Transport, done, export_weights
from asyncrl.weights.tensor_files import SCALE, SUFFIXES, adapted_modules


class AdapterTransport(Transport):
    def begin(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        assert exported.adapters is not None, "transport lora needs adapters"
        tensors = exported.adapters()
        if not self.end.is_first:
            return done(exported.version)
        answer = export_weights(tensors, path, exported.version)
        return done(exported.version, answer.model_copy(update={"kind": "lora"}))


def linear_parameters(model: nn.Module) -> set[str]:
    """Return unshared weights of linear layers."""
    times: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        times[id(parameter)] = times.get(id(parameter), 0) + 1
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and times.get(id(module.weight)) == 1
    }


def routers_of(model: nn.Module) -> list[Any]:
    """Return routers in layer order; their forward returns (logits, weights, indices), from topk."""
    return [one for one in model.modules() if re.search(r"Top[kK]Router$", type(one).__name__)]


def merge(base: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:  # noqa: N803
    """Return W + scale * B A, computed in float32, in the dtype of W."""
    return (base.float() + (lora_B.float() @ lora_A.float()) * scale).to(base.dtype)


@torch.no_grad()
def merge_adapters(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge a file's adapters into `base`, in its dtypes."""
    merged = dict(base)
    for module in adapted_modules(tensors):
        weight = base[f"{module}.weight"]
        a, b = (tensors[module + suffix].to(weight.device) for suffix in SUFFIXES)
        merged[f"{module}.weight"] = merge(weight, a, b, float(tensors[SCALE]))
    return merged


def write_peft(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write a file's adapters as a peft folder."""
    modules = adapted_modules(tensors)
    rank = len(tensors[modules[0] + SUFFIXES[0]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": float(tensors[SCALE]) * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {f"base_model.model.{name}": one for name, one in tensors.items() if name != SCALE}
    save_file(weights, folder / "adapter_model.safetensors")
