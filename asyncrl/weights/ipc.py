"""transport: ipc, and embedded engines in turns. Chunks of weights in memory that trainer and engine both
open, or in a file where they cannot (ChunkFile).

The trainer makes one piece of memory, of the largest chunk, on the device that both sides use, and writes
each chunk over the one before (SharedChunk). Where both sides are on several CUDA devices each rank does so
on its own, with the same tensors: an engine sees its own devices alone. The handles and the places of the
tensors go as JSON through the controller; the engine opens the memory of its device once (TrainerMemory),
each worker of a split engine that of its own, loads the tensors where they lie and hashes what it has then.
On the CPU the memory is a mapped file in shared memory, on a CUDA device an allocation of the driver's own,
which CUDA IPC opens in another process on the same device.

Why not torch's IPC (UntypedStorage._share_cuda_): what torch shares lies in a segment of its caching
allocator, which then never goes back to the device; its counter of readers is a file in /dev/shm that a
killed process leaves; and one handle is good for one reader. The driver's calls are public and have none of
it. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html has them.

When a call returns, CUDA copies have begun and may not have ended: call settle() before reporting that bytes
are written or read.
"""

from __future__ import annotations

import base64
import ctypes
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.messages.base import ChunkMemory, MemoryHandle, PlacedTensor
from asyncrl.messages.calls import LoadChunkRequest
from asyncrl.serving import Refused
from asyncrl.weights.export import Entries
from asyncrl.weights.tensor_files import (
    DTYPES,
    RESEND,
    begin_digest,
    finish_digests,
    read_or_refuse,
    write_tensors,
)

ALIGNMENT = 256
"""Each tensor begins on a multiple of so many bytes, as torch's allocators have it."""
GRANULE = 2**21
"""CUDA may put smaller allocations into one block and share all of it: whole blocks are shared here."""
LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that there is."""


def limit_memory(device: torch.device, share: float | None, cuda: Any = torch.cuda) -> None:
    """Have torch take no more of the current CUDA device than this fraction in this process, so that it does
    not starve the one beside it. None, or a CPU: as much as there is.
    """
    if share is not None and device.type == "cuda":
        cuda.set_per_process_memory_fraction(share)


class SharedMemory:
    """Memory that other processes can open by its handle. `data`: all of it, as uint8. It stays open as long
    as a view of `data` lives. Its maker keeps it while others may have it open; what they see after that is
    not defined.
    """

    def __init__(self, handle: MemoryHandle, data: Tensor) -> None:
        self.handle, self.data = handle, data

    def settle(self) -> None:
        """Return when all that was begun with `data` is done, in all streams."""
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)


def make_memory(num_bytes: int, device: torch.device, path: Path) -> SharedMemory:
    """New memory; on the CPU the file `path`. Raises OSError if there is none, or the device cannot share
    it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the driver does not see what torch's allocator keeps unused
        return make_cuda_memory(num_bytes, device)
    return make_file(path, num_bytes)


def open_memory(handle: MemoryHandle, device: torch.device) -> SharedMemory:
    """Memory that another process has made. Raises OSError if it cannot be opened; ValueError if the handle
    is for another device.
    """
    if (handle.kind == "cuda") != (device.type == "cuda"):
        raise ValueError(f"{handle.kind} memory cannot be opened for tensors on {device}")
    return open_file(handle) if handle.kind == "file" else open_cuda_memory(handle, device)


def make_file(path: Path, num_bytes: int) -> SharedMemory:
    """A mapped file, its space set aside: a full shared memory is an error here, and not a signal at the
    first write.
    """
    path.unlink(missing_ok=True)
    path.touch(0o600)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return open_file(MemoryHandle(kind="file", name=str(path), num_bytes=num_bytes))


def open_file(handle: MemoryHandle) -> SharedMemory:
    """Raises OSError, also if it is shorter than its handle says."""
    if (found := Path(handle.name).stat().st_size) < handle.num_bytes:
        raise OSError(f"{handle.name} has {found} bytes instead of {handle.num_bytes}")
    return SharedMemory(
        handle, torch.from_file(handle.name, shared=True, size=handle.num_bytes, dtype=torch.uint8)
    )


def make_cuda_memory(num_bytes: int, device: torch.device, driver: CudaDriver | None = None) -> SharedMemory:
    """A new allocation, by whole granules."""
    driver, num_bytes = driver or CudaDriver(), -(-num_bytes // GRANULE) * GRANULE
    pointer, shared = ctypes.c_uint64(), IpcHandle()
    with driver.on(_ordinal(device)):
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        allocation = _Allocation(driver, pointer, num_bytes, _ordinal(device), "cuMemFree_v2")
        driver.call("cuIpcGetMemHandle", ctypes.byref(shared), pointer)
    name, uuid = base64.b64encode(bytes(shared)).decode(), driver.uuid(_ordinal(device))
    handle = MemoryHandle(kind="cuda", name=name, device=uuid, num_bytes=num_bytes)
    return SharedMemory(handle, device_tensor(allocation, device))


def open_cuda_memory(
    handle: MemoryHandle, device: torch.device, driver: CudaDriver | None = None
) -> SharedMemory:
    """An allocation of another process: CUDA does not open one of this process."""
    driver, pointer = driver or CudaDriver(), ctypes.c_uint64()
    shared = IpcHandle.from_buffer_copy(base64.b64decode(handle.name, validate=True))
    with driver.on(_ordinal(device)):
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), shared, flags)
    allocation = _Allocation(driver, pointer, handle.num_bytes, _ordinal(device), "cuIpcCloseMemHandle")
    return SharedMemory(handle, device_tensor(allocation, device))


def device_tensor(allocation: Any, device: torch.device) -> Tensor:
    """A tensor over it, which keeps it as long as a view of the tensor lives."""
    return torch.as_tensor(allocation, device=device)


def name_of(device: torch.device) -> str:
    """As a MemoryHandle calls it. Raises OSError."""
    return CudaDriver().uuid(_ordinal(device)) if device.type == "cuda" else ""


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class _Allocation:
    """Device memory for torch.as_tensor; given back by the call `end` with the last tensor over it."""

    def __init__(
        self, driver: CudaDriver, pointer: ctypes.c_uint64, num_bytes: int, ordinal: int, end: str
    ) -> None:
        self._driver, self._pointer, self._ordinal, self._end = driver, pointer, ordinal, end
        data = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer.value, False)}
        self.__cuda_array_interface__ = {**data, "strides": None, "version": 3}

    def __del__(self) -> None:
        try:
            with self._driver.on(self._ordinal):
                self._driver.call(self._end, self._pointer)
        except OSError:
            pass  # the process ends, and the driver was sooner


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class CudaDriver:
    """CUDA's driver. All raise OSError."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Work on this device, in the context that torch works in (the primary one), whatever the thread."""
        context = self._contexts.get(ordinal)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuInit", ctypes.c_uint(0))
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # for good, as torch has it
            self._contexts[ordinal] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def uuid(self, ordinal: int) -> str:
        """Of this device; in MIG mode of the instance."""
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid).hex()

    def call(self, name: str, *arguments: Any) -> None:
        """One of its calls."""
        code = self.library[name](*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library["cuGetErrorString"](ctypes.c_int(code), ctypes.byref(text))
            raise OSError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")


class ChunkFile:
    """A safetensors file, whose pages are used again."""

    def __init__(self, path: Path) -> None:
        self.path, self.device = path, torch.device("cpu")

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            digests = write_tensors(file, entries, tensors)
            file.truncate()
        return digests

    def told(self) -> dict[str, Any]:
        return {"path": str(self.path)}


class SharedChunk:
    """The end of one trainer rank: memory of `device` for any chunk, which engines have open while this
    process lives.

    Digests are of the tensors before they are copied: a fault in the copy shows at the other end too.
    """

    def __init__(
        self,
        folder: Path,
        chunks: Iterable[Entries],
        device: torch.device,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] = lambda own: [own],
    ) -> None:
        """`folder`: for a file in shared memory, on the CPU; of this rank's processes before this one none
        stays there. `gather`: one JSON value of each rank that has such memory, where all of them call it.
        Raises OSError.
        """
        for old in folder.glob(f"chunk-{rank}-*.bin"):
            old.unlink()
        size = max(lay_out(entries)[1] for entries in chunks)
        self._memory = make_memory(size, device, folder / f"chunk-{rank}-{os.getpid()}.bin")
        self.device, self._gather = device, gather
        self._placed: list[PlacedTensor] = []
        self._handles: list[MemoryHandle] = []

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
        """Returns when the memory of every rank holds the chunk."""
        self._placed, _ = lay_out(entries)
        digests = copy_placed(self._placed, self._memory.data, tensors)
        self._memory.settle()
        self._handles = [MemoryHandle(**one) for one in self._gather(self._memory.handle.model_dump())]
        return digests

    def told(self) -> dict[str, Any]:
        return {"memory": ChunkMemory(handles=self._handles, tensors=self._placed)}


def lay_out(entries: Entries) -> tuple[list[PlacedTensor], int]:
    """Where each tensor of a buffer begins, and the bytes of the buffer."""
    placed, end = [], 0
    for name, dtype, shape in entries:
        placed.append(PlacedTensor(name=name, dtype=dtype, shape=shape, start=end))
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return placed, end


def copy_placed(
    placed: Iterable[PlacedTensor], data: Tensor, tensors: Iterator[tuple[str, Tensor]]
) -> dict[str, bytes]:
    """Copy the tensors, which come in this order, to their places; returns their digests."""
    begun = {}
    for name, view in views(placed, data).items():
        found, tensor = next(tensors)
        assert found == name, f"{found} came where {name} was to come"
        view.copy_(tensor)
        begun[name] = begin_digest(tensor)
    return finish_digests(begun)


def views(placed: Iterable[PlacedTensor], data: Tensor) -> dict[str, Tensor]:
    """Each tensor where it lies in `data`. Raises Refused (400) if one cannot lie there."""
    tensors: dict[str, Tensor] = {}
    sizes = dict(DTYPES.values())
    for one in placed:
        size = sizes.get(one.dtype, 0)
        end = one.start + math.prod(one.shape) * size
        is_placed = size and one.start % size == 0 and min(one.shape, default=0) >= 0 and end <= len(data)
        if not is_placed or one.name in tensors:
            what = f"{one.name}, {one.dtype} {one.shape} at byte {one.start}, cannot be in a chunk"
            rule = f"each tensor of weights lies once in its {len(data)} bytes"
            raise Refused(400, what, rule=rule, way_out=RESEND)
        tensors[one.name] = data[one.start : end].view(getattr(torch, one.dtype)).view(one.shape)
    return tensors


class TrainerMemory:
    """The engine's end. A trainer's memory stays open until another one tells a handle, or this process
    ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: SharedMemory | None = None

    def _own(self, handles: Sequence[MemoryHandle]) -> MemoryHandle:
        """The one on this device. Raises OSError."""
        here = name_of(self._device)
        for handle in handles:
            if handle.device == here:
                return handle
        there = ", ".join(handle.device or "the host" for handle in handles)
        raise OSError(f"it is on {there}, and this engine on {here or 'the CPU'}")

    @contextmanager
    def chunk(self, request: LoadChunkRequest) -> Iterator[dict[str, Tensor]]:
        """The tensors of a chunk where they lie, in a file or in memory; afterwards they may be written over.
        Raises Refused (400).
        """
        if request.memory is None:
            yield {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
            return
        handles = request.memory.handles
        if self._memory is None or self._memory.handle not in handles:
            self._memory = None
            try:
                self._memory = open_memory(self._own(handles), self._device)
            except (OSError, ValueError) as error:
                what = f"cannot open the {handles[0].kind} memory of {handles[0].num_bytes} bytes: {error}"
                rule = "trainer and engine take turns on the same devices, and share a piece of their memory"
                way_out = "give them the same (placement) and one container, or devices of their own."
                raise Refused(400, what, rule=rule, way_out=way_out) from error
        memory = self._memory
        try:
            yield views(request.memory.tensors, memory.data)
        finally:
            memory.settle()
