"""Calls of the CUDA driver, for memory that torch's allocator cannot give.

See https://docs.nvidia.com/cuda/cuda-driver-api/index.html.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of the CUDA driver. Raises OSError."""
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver[name](*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        driver["cuGetErrorString"](ctypes.c_int(code), ctypes.byref(text))
        raise OSError(
            f"{name} failed with {code}: {(text.value or b'unknown').decode()}"
        )


def ordinal_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def in_context(device: torch.device) -> Iterator[None]:
    """Use this device's primary context, like torch, in any thread. Raises OSError."""
    call_driver("cuCtxPushCurrent_v2", _context(ordinal_of(device)))
    try:
        yield
    finally:
        call_driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _context(ordinal: int) -> ctypes.c_void_p:
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    call_driver("cuInit", ctypes.c_uint(0))
    call_driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


class DeviceBytes:
    """Device memory for torch.as_tensor. `free` runs with its last tensor."""

    def __init__(
        self,
        pointer: ctypes.c_uint64,
        num_bytes: int,
        device: torch.device,
        free: Callable[[], None],
    ) -> None:
        # Resolved here: a finalizer may run in a thread with another current device.
        self._device = torch.device("cuda", ordinal_of(device))
        self._free = free
        data = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer.value, False)}
        self.__cuda_array_interface__ = {**data, "strides": None, "version": 3}

    def __del__(self) -> None:
        # at process exit driver and module may be gone
        with suppress(OSError, TypeError), in_context(self._device):
            self._free()

    def tensor(self) -> Tensor:
        """Return uint8 of all bytes."""
        return torch.as_tensor(self, device=self._device)
