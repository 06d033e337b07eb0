"""Host memory that is pinned for CUDA, or backed by a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.base.host import available_memory


class HostMemory:
    """Reusable host memory, pinned at its exact size for CUDA; torch's allocator rounds
    up. With `folder` it is a file there that has no name.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self._folder = folder
        self._data = torch.empty(0, dtype=torch.uint8)
        self._mapped: mmap.mmap | None = None
        self._ordinal = torch.cuda.current_device() if device.type == "cuda" else None

    def __del__(self) -> None:
        self.free()

    def of(self, num_bytes: int) -> Tensor:
        """Return uint8 of this size; growing loses the content. Raises MemoryError,
        OSError and RuntimeError.
        """
        if num_bytes > len(self._data):
            # Before the new allocation: both at once may not fit.
            self.free()
            if self._folder is not None:
                self._mapped = _map_file(self._folder, num_bytes)
                self._data = torch.frombuffer(self._mapped, dtype=torch.uint8)
                return self._data[:num_bytes]
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
        self._mapped = None

    def drop_pages(self) -> None:
        """Take the pages of a file out of this process: the kernel writes them to disk
        when it needs their memory.
        """
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

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


def _map_file(folder: Path, num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=folder) as file:
        # On a full disk this raises OSError. Writing to a sparse file's pages would end
        # the process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def return_free_memory() -> None:
    """Give the pages that malloc keeps back to the system.

    glibc keeps freed blocks of up to 32 MiB for itself: without this call a process
    that freed 38 MB of weights kept all of them (`tests/kit/offload_bytes.py`).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)
