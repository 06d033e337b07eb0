"""transport: ipc, and embedded engines in turns. Chunks of weights in memory that trainer and engine both
open.

The trainer makes one piece of memory, of the largest chunk, on the device that both sides use, and writes
each chunk over the one before (SharedChunk). Its handle and the places of the tensors go as JSON through the
controller; the engine opens the memory once (TrainerMemory), loads the tensors where they lie and hashes
what it has then. On the CPU the memory is a mapped file in shared memory, on a CUDA device an allocation of
the driver's own, which CUDA IPC opens in another process on the same device.

Why not torch's IPC (UntypedStorage._share_cuda_): what torch shares lies in a segment of its caching
allocator, which then never goes back to the device; its counter of readers is a file in /dev/shm that a
killed process leaves; and one handle is good for one reader. The driver's calls are public and have none of
it. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html has them.

CUDA copies are only begun when a call returns: call settle() before saying that bytes are there, or have
been read.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import ChunkMemory, MemoryHandle, PlacedTensor
from asyncrl.weights.chunk_export import Entries
from asyncrl.weights.tensor_files import DTYPES, RESEND, digest_of_tensor

ALIGNMENT = 256
"""Each tensor begins on a multiple of so many bytes, as torch's allocators have it."""
GRANULE = 2**21
"""CUDA may put smaller allocations into one block and share all of it: whole blocks are shared here."""
LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that there is."""


class SharedMemory(Protocol):
    """`data`: all of it, as uint8. It stays open as long as this object or a view of `data` lives."""

    handle: MemoryHandle
    data: Tensor

    def settle(self) -> None:
        """Return when all that was begun with `data` is done."""
        ...


def make_memory(num_bytes: int, device: torch.device, folder: Path) -> SharedMemory:
    """New memory; on the CPU a file in `folder`. Raises OSError if there is none, or the device cannot share
    it.
    """
    if device.type != "cuda":
        return MappedFile.made(folder / f"chunk-{os.getpid()}.bin", num_bytes)
    torch.cuda.empty_cache()  # the driver does not see what torch's allocator keeps unused
    return CudaMemory.made(num_bytes, device)


def open_memory(handle: MemoryHandle, device: torch.device) -> SharedMemory:
    """Memory that another process has made. Raises OSError if it cannot be opened; ValueError if the handle
    is for another device.
    """
    if (handle.kind == "cuda") != (device.type == "cuda"):
        raise ValueError(f"{handle.kind} memory cannot be opened for tensors on {device}")
    return MappedFile.opened(handle) if handle.kind == "file" else CudaMemory.opened(handle, device)


class MappedFile:
    """A mapped file, its space set aside: a full shared memory is an error here, and not a signal at the
    first write.
    """

    def __init__(self, path: str, file: int, num_bytes: int) -> None:
        self.handle = MemoryHandle(kind="file", name=path, num_bytes=num_bytes)
        self.data = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)

    @classmethod
    def made(cls, path: Path, num_bytes: int) -> MappedFile:
        """A new file. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
            return cls(str(path), file, num_bytes)
        finally:
            os.close(file)

    @classmethod
    def opened(cls, handle: MemoryHandle) -> MappedFile:
        """Another process's. Raises OSError, also if it is shorter than its handle says."""
        file = os.open(handle.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if (found := os.fstat(file).st_size) < handle.num_bytes:
                raise OSError(f"{handle.name} has {found} bytes instead of {handle.num_bytes}")
            return cls(handle.name, file, handle.num_bytes)
        finally:
            os.close(file)

    def settle(self) -> None:
        """The host's copies are done when they return."""


class CudaMemory:
    """An allocation on a CUDA device: this process's own, or opened from another's handle.

    Life:       made or opened -> freed or closed with the last view of `data`. Whoever made it keeps it while
    others may have it
                open; what they see after that is not defined.
    """

    def __init__(
        self, driver: CudaDriver, pointer: int, handle: MemoryHandle, device: torch.device, *, is_own: bool
    ) -> None:
        self.handle, self._device = handle, device
        self.data = self._tensor(
            _Allocation(driver, pointer, handle.num_bytes, _ordinal(device), is_own=is_own)
        )

    @classmethod
    def made(cls, num_bytes: int, device: torch.device, driver: CudaDriver | None = None) -> CudaMemory:
        """A new allocation, by whole granules. Raises OSError."""
        driver, num_bytes = driver or CudaDriver(), -(-num_bytes // GRANULE) * GRANULE
        with driver.on(_ordinal(device)):
            pointer = driver.allocate(num_bytes)
            name = base64.b64encode(driver.handle_of(pointer)).decode()
        return cls(
            driver, pointer, MemoryHandle(kind="cuda", name=name, num_bytes=num_bytes), device, is_own=True
        )

    @classmethod
    def opened(
        cls, handle: MemoryHandle, device: torch.device, driver: CudaDriver | None = None
    ) -> CudaMemory:
        """Another process's. Raises OSError."""
        driver = driver or CudaDriver()
        with driver.on(_ordinal(device)):
            pointer = driver.open(base64.b64decode(handle.name, validate=True))
        return cls(driver, pointer, handle, device, is_own=False)

    def settle(self) -> None:
        """Until the device has done them, in all streams."""
        torch.cuda.synchronize(self._device)

    def _tensor(self, allocation: _Allocation) -> Tensor:
        return torch.as_tensor(allocation, device=self._device)


class _Allocation:
    """Device memory for torch.as_tensor, which keeps this object as long as a tensor over it lives."""

    def __init__(
        self, driver: CudaDriver, pointer: int, num_bytes: int, ordinal: int, *, is_own: bool
    ) -> None:
        self.pointer, self.num_bytes = pointer, num_bytes
        self._driver, self._ordinal, self._is_own = driver, ordinal, is_own

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        try:
            with self._driver.on(self._ordinal):
                (self._driver.free if self._is_own else self._driver.close)(self.pointer)
        except OSError:
            pass  # the process ends, and the driver was sooner


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class CudaDriver:
    """The calls of CUDA's driver that sharing takes. Between on(...) they work on that device. All raise
    OSError.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Work on this device, in the context that torch works in (the primary one), whatever the thread."""
        context = self._contexts.get(ordinal)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._call(
                "cuDevicePrimaryCtxRetain", ctypes.byref(context), device
            )  # for good: torch has it as long
            self._contexts[ordinal] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return pointer.value

    def free(self, pointer: int) -> None:
        """What allocate() gave."""
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def handle_of(self, pointer: int) -> bytes:
        """For other processes; 64 bytes."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address, here, of what another process has allocated. Not for the process that allocated it."""
        if len(handle) != ctypes.sizeof(IpcHandle):
            raise OSError(
                f"a handle of CUDA memory has {ctypes.sizeof(IpcHandle)} bytes, this one {len(handle)}"
            )
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """What open() gave."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._library[name](*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library["cuGetErrorString"](ctypes.c_int(code), ctypes.byref(text))
            raise OSError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class SharedChunk:
    """The trainer's end: memory of `device` for any chunk, which engines have open while this process lives.

    Digests are of the tensors before they are copied: a fault in the copy shows at the other end too.
    """

    def __init__(self, folder: Path, chunks: Iterable[Entries], device: torch.device) -> None:
        """`folder`: for a file in shared memory, on the CPU; of trainers before this one none stays there.
        Raises OSError.
        """
        for old in folder.glob("chunk-*.bin"):
            old.unlink()
        self.device = device
        self._memory = make_memory(max(lay_out(entries)[1] for entries in chunks), device, folder)
        self._placed: list[PlacedTensor] = []

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
        """One tensor after the other; done when it returns."""
        self._placed, _ = lay_out(entries)
        digests = copy_placed(self._placed, self._memory.data, tensors)
        self._memory.settle()
        return digests

    def told(self) -> dict[str, Any]:
        """Its handle, and where each tensor begins."""
        return {"memory": ChunkMemory(handle=self._memory.handle, tensors=self._placed)}


def lay_out(entries: Entries) -> tuple[list[PlacedTensor], int]:
    """Where each tensor of a buffer begins, and the bytes of the buffer."""
    placed, end = [], 0
    for name, dtype, shape in entries:
        placed.append(PlacedTensor(name=name, dtype=dtype, shape=shape, start=end))
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return placed, end


def copy_placed(
    placed: Iterable[PlacedTensor], data: Tensor, tensors: Iterator[tuple[str, Tensor]]
) -> dict[str, bytes]:
    """Copy the tensors, which come in this order, to their places; returns their digests."""
    digests = {}
    for name, view in views(placed, data).items():
        found, tensor = next(tensors)
        assert found == name, f"{found} came where {name} was to come"
        view.copy_(tensor)
        digests[name] = digest_of_tensor(name, tensor)
    return digests


def views(placed: Iterable[PlacedTensor], data: Tensor) -> dict[str, Tensor]:
    """Each tensor where it lies in `data`. Raises Refused (400) if one cannot lie there."""
    tensors: dict[str, Tensor] = {}
    for one in placed:
        dtype = getattr(torch, one.dtype) if one.dtype in dict(DTYPES.values()) else None
        if (
            dtype is None
            or any(size < 0 for size in one.shape)
            or one.start % dtype.itemsize
            or one.name in tensors
        ):
            raise _misplaced(one, "its dtype is no weight's, it begins inside of a number, or it comes twice")
        shape = torch.Size(one.shape)
        end = one.start + shape.numel() * dtype.itemsize
        if end > len(data):
            raise _misplaced(one, f"it would end at byte {end} of {len(data)}")
        tensors[one.name] = data[one.start : end].view(dtype).view(shape)
    return tensors


def _misplaced(placed: PlacedTensor, why: str) -> Refused:
    what = f"{placed.name}, {placed.dtype} {placed.shape} at byte {placed.start}"
    return Refused(400, f"{what}, cannot be in a chunk: {why}", way_out=RESEND)


class TrainerMemory:
    """The engine's end. A trainer's memory stays open until another one tells a handle, or this process
    ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: SharedMemory | None = None

    @contextmanager
    def tensors(self, chunk: ChunkMemory) -> Iterator[dict[str, Tensor]]:
        """Its tensors where they lie; afterwards they may be written over. Raises Refused (400)."""
        memory = self._opened(chunk.handle)
        try:
            yield views(chunk.tensors, memory.data)
        finally:
            memory.settle()

    def _opened(self, handle: MemoryHandle) -> SharedMemory:
        if self._memory is None or self._memory.handle != handle:
            self._memory = None
            try:
                self._memory = open_memory(handle, self._device)
            except (OSError, ValueError) as error:
                raise Refused(
                    400,
                    f"cannot open the {handle.kind} memory of {handle.num_bytes} bytes that holds the chunk: "
                    f"{error}",
                    rule="trainer and engine take turns on one device of one machine, and share a piece of "
                    "its memory",
                    way_out="give them the same device (placement), or devices of their own; in containers, "
                    "one that holds both.",
                ) from error
        return self._memory
