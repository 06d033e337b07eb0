"""Where the memory of offloaded tensors lies meanwhile: the host's, for a device's; a file, for the host's.
Knows bytes; knows no tensor.

Both are made once and grow to the most that was ever put into them. There is one place for the bytes of each
offset: whoever uses a store says what lies where.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.weights.tensor_files import host_bytes

SLAB_BYTES = 2**26
"""torch rounds a pinned allocation up to a power of two: of slabs that are one, nothing is wasted but the end
of the last.
"""

NUM_THREADS = min(4, os.cpu_count() or 1)


class Store(Protocol):
    """Bytes by offset. `data` is a contiguous uint8 tensor; a copy is done only after wait()."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for offsets 0 .. num_bytes - 1. Raises OSError, MemoryError or RuntimeError if there is
        none.
        """
        ...

    def write(self, offset: int, data: Tensor) -> None:
        """Put `data` there."""
        ...

    def read(self, offset: int, data: Tensor) -> None:
        """Overwrite `data` with what lies there."""
        ...

    def wait(self) -> None:
        """Return when all reads and writes are done."""
        ...


class HostBuffers:
    """Host memory, pinned for a CUDA device, whose copies run beside each other and are waited for once."""

    def __init__(self, device: torch.device, slab_bytes: int = SLAB_BYTES) -> None:
        self._device, self._slab_bytes = device, slab_bytes
        self._slabs: list[Tensor] = []

    def __repr__(self) -> str:
        return f"<HostBuffers {len(self._slabs)} x {self._slab_bytes} bytes for {self._device.type}>"

    def reserve(self, num_bytes: int) -> None:
        """More slabs, if it takes more."""
        while len(self._slabs) * self._slab_bytes < num_bytes:
            self._slabs.append(
                torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            )

    def write(self, offset: int, data: Tensor) -> None:
        """Begins the copies."""
        for here, there in self._pieces(offset, data):
            there.copy_(here, non_blocking=True)

    def read(self, offset: int, data: Tensor) -> None:
        """Begins the copies."""
        for here, there in self._pieces(offset, data):
            here.copy_(there, non_blocking=True)

    def wait(self) -> None:
        """Until the device has done them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pieces(self, offset: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`data` cut where slabs end: (its piece, the same bytes of the slab)."""
        start = 0
        while start < len(data):
            number, first = divmod(offset + start, self._slab_bytes)
            size = min(self._slab_bytes - first, len(data) - start)
            yield data[start : start + size], self._slabs[number][first : first + size]
            start += size


class HostFile:
    """A file without a name in `folder`: however this process ends, the disk gets its space back. For data in
    host memory.

    A few threads copy, since most of the time goes into the kernel's handling of pages.
    """

    def __init__(self, folder: Path, piece_bytes: int = 2**24) -> None:
        self.folder, self._piece_bytes = folder, piece_bytes
        self._file: int | None = None
        self._num_bytes = 0
        self._copying: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, "offload")

    def __repr__(self) -> str:
        return f"<HostFile of {self._num_bytes} bytes in {self.folder}>"

    def reserve(self, num_bytes: int) -> None:
        """Have the disk set the space aside, so that no later write finds it full. Raises OSError."""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._file = os.dup(file.fileno())
        if num_bytes > self._num_bytes:
            os.posix_fallocate(self._file, 0, num_bytes)
            self._num_bytes = num_bytes

    def write(self, offset: int, data: Tensor) -> None:
        """Begins the copies."""
        self._begin(lambda file, view, place: os.pwrite(file, view, place), offset, data)

    def read(self, offset: int, data: Tensor) -> None:
        """Begins the copies."""
        self._begin(lambda file, view, place: os.preadv(file, [view], place), offset, data)

    def wait(self) -> None:
        """Until all are done. Raises the OSError of the first that could not be."""
        copying, self._copying = self._copying, []
        for failed in [copied for copied in copying if copied.exception() is not None]:
            failed.result()

    def _begin(self, copy: Callable[[int, memoryview, int], int], offset: int, data: Tensor) -> None:
        assert self._file is not None
        for start in range(0, len(data), self._piece_bytes):
            view = host_bytes(data[start : start + self._piece_bytes])
            self._copying.append(self._threads.submit(self._copy, copy, self._file, view, offset + start))

    def _copy(
        self, copy: Callable[[int, memoryview, int], int], file: int, view: memoryview, offset: int
    ) -> None:
        while view:
            done = copy(file, view, offset)
            if not done:
                raise OSError(f"the offload file in {self.folder} ends at byte {offset}")
            view, offset = view[done:], offset + done
