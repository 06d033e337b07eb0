"""Faster layers: compiled on CUDA; on CPU in float32 with closed-form gradients, if
their bytecode equals Llama's.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import CompilationMetrics, get_compilation_metrics
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama

from asyncrl.weights.tensor_files import float32_names

P = ParamSpec("P")
T = TypeVar("T")
ROTARY = "apply_rotary_pos_emb"
BACKEND = "inductor"
# All layers of a class compile one function, and each kind of layer adds graphs to it.
# torch stops at 8 by default.
MOST_GRAPHS = 64
_norm_backward = torch.ops.aten.native_layer_norm_backward


def fuse(model: nn.Module) -> None:
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)  # transformers 5.24 wraps it
        if not isinstance(forward, FunctionType):
            continue
        if _code(forward) == _code(llama.LlamaRMSNorm.forward):
            module.forward = MethodType(_norm, module)
        elif ROTARY in forward.__code__.co_names and not forward.__closure__:
            names = forward.__globals__
            if _is_llamas_rotary(names.get(ROTARY)):
                made = FunctionType(
                    forward.__code__,
                    {**names, ROTARY: _rotary},
                    None,
                    forward.__defaults__,
                )
                made.__kwdefaults__ = forward.__kwdefaults__
                module.forward = MethodType(made, module)


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


def compilations() -> list[CompilationMetrics]:
    """Return this process's latest 64 compilations, oldest first, with their seconds
    and causes.
    """
    return get_compilation_metrics()


@cache
def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function of tensors of any length."""
    return torch.compile(function, backend=BACKEND, dynamic=True)


def _is_llamas_rotary(function: object) -> bool:
    half = getattr(function, "__globals__", {}).get("rotate_half")
    return _code(function) == _code(llama.apply_rotary_pos_emb) and _code(
        half
    ) == _code(llama.rotate_half)


def _code(function: Any) -> tuple[object, ...] | None:
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_consts[1:],
        function.__defaults__,
    )


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if (
        hidden_states.is_cpu
        and hidden_states.dtype == self.weight.dtype == torch.float32
    ):
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.
    https://arxiv.org/abs/1910.07467.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        output: Tensor = x * scale
        return output.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        size = x.shape[-1]
        # Layer norm also subtracts the mean of weight * grad.
        nothing = torch.zeros_like(scale)
        wanted = [True, ctx.needs_input_grad[1], False]
        grad_x, grad_weight, _ = _norm_backward(
            grad,
            x,
            [size],
            nothing,
            scale,
            weight,
            None,
            wanted,
        )
        grad_x += (grad @ weight).div_(size)[..., None] * scale
        return grad_x, grad_weight, None


def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    if all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in (q, k, cos)):
        angles = (cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
        return _Rotary.apply(q, *angles), _Rotary.apply(k, *angles)  # type: ignore[no-untyped-call]
    return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]


class _Rotary(torch.autograd.Function):
    """x * cos + (-x2, x1) * sin for the halves x1, x2 of the last dimension.
    https://arxiv.org/abs/2104.09864.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        output = x * cos
        half = x.shape[-1] // 2
        output[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1.0)
        output[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad * cos
        half = grad.shape[-1] // 2
        grad_x[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        grad_x[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1.0)
        return grad_x, None, None
