"""Compiled layers, as on CUDA."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.weights.tensor_files import float32_names

P = ParamSpec("P")
T = TypeVar("T")
BACKEND = "inductor"
# All layers of a class compile one function, and each kind of layer adds graphs to it.
# torch stops at 8 by default.
MOST_GRAPHS = 64


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that transformers never splits."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names][
        ::-1
    ]


def why_not_compiled(model: PreTrainedModel, device: torch.device) -> str:
    """Return why compile_layers() is impossible, or ""."""
    layers = layers_of(model)
    if not layers:
        return "it has no layers that torch.compile could take one by one"
    has_experts = any(
        parameter.ndim > 2 for layer in layers for parameter in layer.parameters()
    )
    if (
        has_experts
        and getattr(model.config, "_experts_implementation", None) != "grouped_mm"
    ):
        return "the work of its layers depends on the data (experts)"
    return missing_for_compiling(device)


def missing_for_compiling(device: torch.device) -> str:
    """Return what torch.compile lacks on this machine, and the packages to install; or
    "".
    """
    if not any(
        shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")
    ):
        return "there is no C compiler (install gcc)"
    if device.type == "cpu":
        return ""
    # Triton looks there too, not where Debian's Python would put its own
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme))
    if (
        importlib.util.find_spec("triton") is None
        or not (headers / "Python.h").is_file()
    ):
        return f"it needs Triton, and Python's headers in {headers} (install triton and python3-dev)"
    return ""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile one graph per kind of layer. Raises for uncompilable code. Float32
    routers stay uncompiled, since no graph can contain their FSDP hooks.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    is_whole = not float32_names(model)
    compiled = dict[Callable[..., object], Callable[..., object]]()
    for layer in layers_of(model):
        forward: Any = type(layer).forward
        if forward.__code__.co_name == "forward_with_checkpointing":
            forward = forward.__wrapped__
        if forward not in compiled:
            compiled[forward] = torch.compile(
                forward, backend=BACKEND, dynamic=True, fullgraph=is_whole
            )
        layer.forward = MethodType(compiled[forward], layer)


@cache
def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function of tensors of any length."""
    return torch.compile(function, backend=BACKEND, dynamic=True)
