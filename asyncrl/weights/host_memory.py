"""Host memory that is pinned for CUDA."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from asyncrl.base.host import available_memory


class HostMemory:
    """Reusable host memory, pinned at its exact size for CUDA; torch's allocator rounds
    up.
    """

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._ordinal = torch.cuda.current_device() if device.type == "cuda" else None

    def __del__(self) -> None:
        self.free()

    def of(self, num_bytes: int) -> Tensor:
        """Return uint8 of this size; growing loses the content. Raises MemoryError and
        RuntimeError.
        """
        if num_bytes > len(self._data):
            # Before the new allocation: both at once may not fit.
            self.free()
            # Without this check the kernel would kill a process when the memory is
            # first written.
            available = available_memory()
            if num_bytes > available:
                raise MemoryError(
                    f"{num_bytes} bytes are needed, and the host has {available} available"
                )
            memory = mmap.mmap(
                -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            with suppress(OSError):  # a kernel without large pages
                # 2 MB at once: pinning walks every page
                memory.madvise(mmap.MADV_HUGEPAGE)
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._call("cudaHostRegister", data.data_ptr(), num_bytes, 0)
            self._data = data
        return self._data[:num_bytes]

    def free(self) -> None:
        if len(self._data):
            self._call("cudaHostUnregister", self._data.data_ptr())
        self._data = torch.empty(0, dtype=torch.uint8)

    def free_if_short(self) -> None:
        if available_memory() < len(self._data):
            self.free()

    def _call(self, name: str, *arguments: int) -> None:
        if self._ordinal is None:
            return
        cuda: Any = torch.cuda
        # else a context is created on the first device
        with cuda.device(self._ordinal):
            try:
                cuda.check_error(getattr(cuda.cudart(), name)(*arguments))
            except RuntimeError:
                # CUDA reports the refusal again at the next launch.
                with suppress(RuntimeError):
                    cuda._sleep(1)
                raise
