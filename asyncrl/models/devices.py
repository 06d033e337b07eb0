"""A process's device, and copies of host arrays on it."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


def choose_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Resolve "auto": CUDA if there is one; bfloat16 on CUDA, float32 on a CPU."""
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    default = "bfloat16" if is_cuda else "float32"
    chosen: torch.dtype = getattr(torch, default if dtype == "auto" else dtype)
    return torch.device("cuda" if is_cuda else "cpu"), chosen


def own_memory(model: nn.Module) -> None:
    """Copy the model's tensors that are pages of its file.

    No offload can free these pages. And they begin anywhere in a cache line, by which
    kernels round on CPUs without AVX-512: a push or a sleep would change bits.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def pinned(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    # From pageable memory, the copy would make the host wait for all kernels before it.
    # torch keeps the pinned block until the copy has run.
    return pinned(array, device).to(device, non_blocking=True)
