"""Adapters as they arrive: checked against the model, merged over its base weights. Knows tensors and names;
knows no request.

A file of adapters holds `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of each
layer that has one, and the scalar `scale`. The trainer merges by the same rule
(asyncrl/trainer/lora_layer.py): both compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.http import Refused

SCALE = "scale"
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
WAY_OUT = "use the same model in trainer and engine, and publish what asyncrl's own trainer exports."


@dataclass(frozen=True, slots=True)
class Adapter:
    """Change of one parameter [out, in]: scale * B A, of A [rank, in] and B [out, rank]."""

    parameter: str
    a: Tensor
    b: Tensor
    scale: float

    @torch.no_grad()
    def merged(self, base: Tensor) -> Tensor:
        """W + scale * B A, computed in float32, in the dtype and on the device of W."""
        a, b = (tensor.to(device=base.device, dtype=torch.float32) for tensor in (self.a, self.b))
        return (base.float() + (b @ a) * self.scale).to(base.dtype)


def linear_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that an adapter may change: weights of linear layers that no other layer
    shares.
    """
    times: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        times[id(parameter)] = times.get(id(parameter), 0) + 1
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and times.get(id(module.weight)) == 1
    }


def read_adapters(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], linear: set[str], path: str
) -> list[Adapter]:
    """The adapters of a file, each of which fits its parameter. Raises Refused (409) with the names of what
    does not.
    """
    modules = sorted(
        {name.removesuffix(suffix) for name in tensors for suffix in SUFFIXES if name.endswith(suffix)}
    )
    _check_names(set(tensors), modules, linear, path)
    scale = tensors[SCALE]
    if scale.numel() != 1 or not bool(torch.isfinite(scale).all()):
        raise Refused(
            409,
            f"{SCALE} in {path} is {scale.tolist()}",
            rule="it is one finite number, alpha / rank",
            way_out=WAY_OUT,
        )
    adapters = []
    for module in modules:
        name = f"{module}.weight"
        lora_A, lora_B = (tensors[module + suffix] for suffix in SUFFIXES)
        _check_shapes(module, lora_A, lora_B, parameters[name], path)
        adapters.append(Adapter(name, lora_A, lora_B, float(scale)))
    return adapters


def _check_names(found: set[str], modules: list[str], linear: set[str], path: str) -> None:
    expected = {SCALE, *(module + suffix for module in modules for suffix in SUFFIXES)}
    missing, unknown = sorted(expected - found), sorted(found - expected)
    strangers = [module for module in modules if f"{module}.weight" not in linear]
    if missing or unknown or strangers or not modules:
        raise Refused(
            409,
            f"{path} has adapters of {len(modules)} layers: lacks {missing[:3]}, has unknown tensors "
            f"{unknown[:3]}, and adapters for "
            f"{strangers[:3]}, which are no linear layers of their own in this model",
            rule="adapters are <module>.lora_A.weight and <module>.lora_B.weight of linear layers, and one "
            "scale",
            way_out=WAY_OUT,
        )


def _check_shapes(module: str, lora_A: Tensor, lora_B: Tensor, weight: Tensor, path: str) -> None:
    out_features, in_features = weight.shape
    fits = (
        lora_A.ndim == lora_B.ndim == 2
        and lora_A.shape[0] == lora_B.shape[1] > 0
        and (lora_B.shape[0], lora_A.shape[1]) == (out_features, in_features)
        and lora_A.is_floating_point()
        and lora_B.is_floating_point()
    )
    if not fits:
        raise Refused(
            409,
            f"the adapter of {module} in {path} is A {tuple(lora_A.shape)} {lora_A.dtype} and B "
            f"{tuple(lora_B.shape)} {lora_B.dtype}, "
            f"the layer's weight is {tuple(weight.shape)}",
            rule="A is [rank, in] and B [out, rank] for a weight [out, in]",
            way_out=WAY_OUT,
        )
