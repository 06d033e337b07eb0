"""transport: lora. The adapters alone, as one small safetensors file in shared memory.

The file holds `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of each layer
that has an adapter, and the scalar `scale`, which is alpha / rank. An embedded engine keeps the weights that
it started with and merges each set of adapters over them (read_adapters, Adapter.merged) by the rule by
which the trainer computes (asyncrl/trainer/model/lora.py); vLLM gets them as a peft folder
(asyncrl/engines/vllm/vllm_weights.py). In turns there is nothing to add adapters to: an engine that sleeps
has given its weights away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.export import export_weights
from asyncrl.weights.transport import Exported, Transport, only_gathered

SCALE = "scale"
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
WAY_OUT = "use the same model in trainer and engine, and publish what asyncrl's own trainer exports."


class AdapterTransport(Transport):
    """The adapters in one file, in float32."""

    sends_chunks = False

    def export(self, exported: Exported, path: Path) -> ExportResponse:
        """Written by rank 0."""
        assert exported.adapters is not None, "the config has it so"
        tensors = exported.adapters()
        if not self.end.is_first:
            return only_gathered(exported.version)
        return export_weights(tensors, path, exported.version).model_copy(update={"kind": "lora"})


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
    modules = sorted({name.removesuffix(end) for name in tensors for end in SUFFIXES if name.endswith(end)})
    expected = {SCALE, *(module + suffix for module in modules for suffix in SUFFIXES)}
    missing, unknown = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    strangers = [module for module in modules if f"{module}.weight" not in linear]
    if missing or unknown or strangers or not modules:
        raise Refused(
            409,
            f"{path} has adapters of {len(modules)} layers: lacks {missing[:3]}, has unknown tensors "
            f"{unknown[:3]}, and adapters for {strangers[:3]}, which are no linear layers of their own in "
            "this model",
            rule="adapters are <module>.lora_A.weight and <module>.lora_B.weight of linear layers, and one "
            "scale",
            way_out=WAY_OUT,
        )
    scale = tensors[SCALE]
    if scale.numel() != 1 or not bool(torch.isfinite(scale).all()):
        rule = "it is one finite number, alpha / rank"
        raise Refused(409, f"{SCALE} in {path} is {scale.tolist()}", rule=rule, way_out=WAY_OUT)
    adapters = []
    for module in modules:
        name = f"{module}.weight"
        low_in, low_out = (tensors[module + suffix] for suffix in SUFFIXES)
        _check_shapes(module, low_in, low_out, parameters[name], path)
        adapters.append(Adapter(name, low_in, low_out, float(scale)))
    return adapters


def _check_shapes(module: str, low_in: Tensor, low_out: Tensor, weight: Tensor, path: str) -> None:
    fits = (
        low_in.ndim == low_out.ndim == 2
        and low_in.shape[0] == low_out.shape[1] > 0
        and (low_out.shape[0], low_in.shape[1]) == tuple(weight.shape)
        and low_in.is_floating_point()
        and low_out.is_floating_point()
    )
    if not fits:
        raise Refused(
            409,
            f"the adapter of {module} in {path} is A {tuple(low_in.shape)} {low_in.dtype} and B "
            f"{tuple(low_out.shape)} {low_out.dtype}, the layer's weight is {tuple(weight.shape)}",
            rule="A is [rank, in] and B [out, rank] for a weight [out, in]",
            way_out=WAY_OUT,
        )
