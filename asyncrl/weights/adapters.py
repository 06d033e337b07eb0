"""Transport lora: only the adapters, as one safetensors file in shared memory.

It contains `<module>.lora_A.weight` [rank, in], `<module>.lora_B.weight` [out, rank], and the scalar
`scale`, alpha / rank. An embedded engine merges it; vLLM gets a peft folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.base.http import Refused
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.weights.export import Exported, Transport, done, export_weights
from asyncrl.weights.tensor_files import SCALE, SUFFIXES, adapted_modules


class AdapterTransport(Transport):
    sends_chunks = False

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
def merge_adapters(
    tensors: Mapping[str, Tensor], base: Mapping[str, Tensor], linear: set[str], path: str
) -> dict[str, Tensor]:
    """Merge a file's adapters into `base`, in its dtypes. Raises Refused (409)."""
    modules = adapted_modules(tensors)
    expected = {SCALE, *(module + suffix for module in modules for suffix in SUFFIXES)}
    missing, unknown = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unknown or not modules:
        raise _wrong(f"{path}: {len(modules)} layers, lacks {missing[:3]}, has unknown tensors {unknown[:3]}")
    scale = tensors[SCALE]
    if scale.numel() != 1 or not bool(torch.isfinite(scale).all()):
        raise _wrong(f"{SCALE} in {path} is {scale.tolist()}")
    merged = dict(base)
    for module in modules:
        name = f"{module}.weight"
        shape = tuple(base[name].shape) if name in linear else None
        a, b = (tensors[module + suffix] for suffix in SUFFIXES)
        if not a.ndim == b.ndim == 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != shape:
            shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
            raise _wrong(f"the adapter of {module} in {path} is {shapes}, a linear layer there is {shape}")
        a, b = (one.to(base[name].device) for one in (a, b))
        merged[name] = merge(base[name], a, b, float(scale))
    return merged


def _wrong(what: str) -> Refused:
    return Refused(
        409,
        what,
        rule="adapters are A [rank, in] and B [out, rank] of linear layers [out, in], and one finite scale",
        way_out="use the same model in trainer and engine, and publish what asyncrl's own trainer exports.",
    )
