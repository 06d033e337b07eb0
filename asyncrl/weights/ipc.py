"""Weights in memory that trainer and engine both map (transport ipc), or chunks in a
file (ChunkFile).

Colocated, the trainer writes each chunk over the previous one (SharedChunk). If both
sides work at once, it writes each version over the previous one (SharedTransport). The
engine opens the memory once (TrainerMemory), copies from it and hashes the result. On
CPU the memory is a mapped file, on CUDA a driver allocation that CUDA IPC opens.
torch's IPC is unsuitable: memory stays in its caching allocator, and a handle serves
only one reader. See
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import (
    ChunkMemory,
    LoadChunkRequest,
    MemoryHandle,
    PlacedTensor,
    PrepareRequest,
)
from asyncrl.messages.trainer_api import ExportChunkResponse
from asyncrl.weights.cuda_driver import (
    DeviceBytes,
    call_driver,
    in_context,
    ordinal_of,
)
from asyncrl.weights.export import (
    Entries,
    HeldTransport,
    LazyWeights,
    Put,
    entries_of,
    gather_along,
    gathered,
    sizes_of,
)
from asyncrl.weights.tensor_files import (
    Digests,
    digests_of,
    joint_digest,
    read_or_refuse,
    write_tensors,
)

ALIGNMENT = 256
GRANULE = 2**21
"""CUDA may share a whole block of smaller allocations."""
LAZY_PEER_ACCESS = 1


def aligned(num_bytes: int) -> int:
    """Round up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def limit_memory(device: torch.device, share: float | None, taken: int = 0) -> None:
    """Limit torch's memory to a fraction of the current CUDA device, without `taken`
    bytes that torch does not count. None, or CPU: no limit.
    """
    if share is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(1e-3, share - taken / total))


@dataclass(frozen=True, eq=False)
class SharedMemory:
    """Memory that other processes open by its handle; its maker must keep it. `data`:
    uint8.
    """

    handle: MemoryHandle
    data: Tensor

    def settle(self) -> None:
        """Wait for this thread's work on `data`."""
        if self.data.is_cuda:
            # Waiting for the whole device would break a graph that another thread
            # captures.
            torch.cuda.current_stream(self.data.device).synchronize()


def make_memory(num_bytes: int, device: torch.device, path: Path) -> SharedMemory:
    """Allocate memory; on CPU a mapped file, preallocated to raise here instead of at
    the first write. Raises OSError.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the driver does not see torch's unused cache
        return make_cuda_memory(num_bytes, device)
    path.unlink(missing_ok=True)
    path.touch(0o600)
    with path.open("r+b") as file:
        # Pages of a full /dev/shm end a writing process with SIGBUS, which Python
        # cannot catch.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return open_memory(
        MemoryHandle(kind="file", name=str(path), num_bytes=num_bytes), device
    )


def open_memory(handle: MemoryHandle, device: torch.device) -> SharedMemory:
    """Open memory that another process has made. Raises OSError, also if a file is too
    short.
    """
    if handle.kind == "cuda":
        return open_cuda_memory(handle, device)
    if (found := Path(handle.name).stat().st_size) < handle.num_bytes:
        raise OSError(f"{handle.name} has {found} bytes instead of {handle.num_bytes}")
    data = torch.from_file(
        handle.name, shared=True, size=handle.num_bytes, dtype=torch.uint8
    )
    return SharedMemory(handle, data)


def make_cuda_memory(num_bytes: int, device: torch.device) -> SharedMemory:
    # So that no other allocation shares the block, and becomes readable to the engine.
    num_bytes = -(-num_bytes // GRANULE) * GRANULE
    pointer = ctypes.c_uint64()
    shared = IpcHandle()
    with in_context(device):
        call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        free = partial(call_driver, "cuMemFree_v2", pointer)
        allocation = DeviceBytes(pointer, num_bytes, device, free)
        call_driver("cuIpcGetMemHandle", ctypes.byref(shared), pointer)
    name = base64.b64encode(bytes(shared)).decode()
    handle = MemoryHandle(
        kind="cuda", name=name, device=name_of(device), num_bytes=num_bytes
    )
    return SharedMemory(handle, allocation.tensor())


def open_cuda_memory(handle: MemoryHandle, device: torch.device) -> SharedMemory:
    """Open another process's allocation; CUDA cannot open this process's own."""
    pointer = ctypes.c_uint64()
    shared = IpcHandle.from_buffer_copy(base64.b64decode(handle.name, validate=True))
    with in_context(device):
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), shared, flags)
    close = partial(call_driver, "cuIpcCloseMemHandle", pointer)
    opened = DeviceBytes(pointer, handle.num_bytes, device, close)
    return SharedMemory(handle, opened.tensor())


def name_of(device: torch.device) -> str:
    """Return the UUID of a CUDA device, in MIG mode the instance's. Raises OSError."""
    if device.type != "cuda":
        return ""
    found = ctypes.c_int()
    uuid = (ctypes.c_ubyte * 16)()
    call_driver("cuInit", ctypes.c_uint(0))
    call_driver("cuDeviceGet", ctypes.byref(found), ctypes.c_int(ordinal_of(device)))
    call_driver("cuDeviceGetUuid_v2", ctypes.byref(uuid), found)
    return bytes(uuid).hex()


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@dataclass
class ChunkFile:
    path: Path
    device = torch.device("cpu")
    on_all = False

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> Put:
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            digests = write_tensors(file, entries, tensors)
            file.truncate()
        return digests, {"path": str(self.path)}


class SharedChunk:
    """A trainer rank's end: memory of `device`, which engines keep open. Digests
    precede the copy, to detect copy faults.
    """

    def __init__(
        self,
        folder: Path,
        chunks: Iterable[Entries],
        device: torch.device,
        rank: int = 0,
        gather: Callable[[dict[str, object]], list[dict[str, object]]] | None = None,
    ) -> None:
        """`folder`: of the shared-memory file, on CPU. `gather`: JSON values of all
        ranks. Raises OSError.
        """
        # Of a trainer that died. Engines that still map it keep their pages until the
        # next handle arrives.
        for old in folder.glob(f"chunk-{rank}-*.bin"):
            old.unlink()
        size = max(lay_out(entries)[1] for entries in chunks)
        self._memory = make_memory(
            size, device, folder / f"chunk-{rank}-{os.getpid()}.bin"
        )
        self.device = device
        # Engines are on the devices of all ranks: each rank writes the chunk into its
        # own device's memory.
        self.on_all = gather is not None
        self._gather = gather or (lambda own: [own])

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> Put:
        """Return once all ranks have written the chunk."""
        placed, _ = lay_out(entries)
        digests = copy_placed(placed, self._memory.data, tensors)
        self._memory.settle()
        handles = [
            MemoryHandle.model_validate(one)
            for one in self._gather(self._memory.handle.model_dump())
        ]
        return digests, {"memory": ChunkMemory(handles=handles, tensors=placed)}


class SharedTransport(HeldTransport):
    """Transport ipc during generation: one version in memory that engines on the
    trainer's device open.

    Invariant: a version stays whole until the next begin(), which follows the end of
        its push (PushLoop).
    """

    _place: SharedChunk | None = None

    def _hold(
        self,
        version: int,
        weights: LazyWeights,
        tensors: Iterator[tuple[str, Tensor]],
        folder: Path,
    ) -> Put:
        entries = entries_of(weights, self.end.dtype)
        # Allocated once, by the first version: engines keep the memory open.
        if self._place is None:
            self._place = SharedChunk(folder, [entries], self.end.device)
        return self._place.put(entries, tensors)


ChunkPlace: TypeAlias = ChunkFile | SharedChunk
"""Destination of chunks, which put() overwrites."""


class Chunks:
    """Chunks of a trainer's weights, version after version. All ranks make the same
    calls.
    """

    def __init__(
        self, place: ChunkPlace, chunks: Iterable[LazyWeights], dtype: torch.dtype
    ) -> None:
        self._place = place
        self._chunks = [list(chunk) for chunk in chunks]
        self._dtype = dtype
        self.forget()

    def forget(self) -> None:
        self._version = -1
        self._gathered: set[str] = set()
        self._digests: dict[str, bytes] = {}

    def is_last(self, index: int) -> bool:
        return index + 1 == len(self._chunks)

    def write(
        self, weights: LazyWeights, version: int, index: int, *, is_first: bool = True
    ) -> ExportChunkResponse | None:
        """Write the chunk over the previous one; before the last chunk also hash
        tensors without a digest. Return None on other ranks, which only gather or write
        to their own place. Raises OSError.
        """
        if version != self._version:
            self.forget()
            self._version = version
        names = self._chunks[index]
        is_last = self.is_last(index)
        # A restarted trainer may be asked for the last chunk first. The digest of the
        # whole covers all tensors, so those that it has not gathered for this version
        # are gathered now, only to be hashed.
        before = itertools.chain(*self._chunks[:index]) if is_last else ()
        gathering = weights.only(
            [*(name for name in before if name not in self._gathered), *names]
        )
        self._gathered.update(gathering)
        if not (is_first or self._place.on_all):
            gather_along(gathering, self._dtype)
            return None
        chunk = weights.only(names)
        entries = entries_of(chunk, self._dtype)
        num_before = len(entries_of(gathering, self._dtype)) - len(entries)
        with gathered(gathering, self._dtype, self._place.device) as tensors:
            for name, tensor in itertools.islice(tensors, num_before):
                self._digests |= digests_of({name: tensor})
            digests, place = self._place.put(entries, tensors)
        self._digests.update(digests)
        return ExportChunkResponse(
            version=version,
            index=index,
            **place,
            digest=joint_digest(digests.values()),
            num_tensors=len(digests),
            num_bytes=sum(sizes_of(chunk, self._dtype).values()),
            is_last=is_last,
            whole_digest=joint_digest(self._digests.values()) if is_last else "",
        )


def lay_out(entries: Entries) -> tuple[list[PlacedTensor], int]:
    placed = []
    end = 0
    for name, dtype, shape in entries:
        placed.append(PlacedTensor(name=name, dtype=dtype, shape=shape, start=end))
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        # view(dtype) needs a start that its item size divides.
        end += aligned(size)
    return placed, end


def copy_placed(
    placed: Iterable[PlacedTensor], data: Tensor, tensors: Iterator[tuple[str, Tensor]]
) -> dict[str, bytes]:
    """Copy the tensors to their places; return their digests."""
    digests = Digests()
    for name, view in views(placed, data).items():
        found, tensor = next(tensors)
        assert found == name, f"{found} came where {name} was to come"
        view.copy_(tensor)
        digests.add(name, tensor)
    return digests.finish()


def views(placed: Iterable[PlacedTensor], data: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for one in placed:
        dtype = getattr(torch, one.dtype)
        end = one.start + math.prod(one.shape) * dtype.itemsize
        tensors[one.name] = data[one.start : end].view(dtype).view(one.shape)
    return tensors


class TrainerMemory:
    """Engine end; keeps a trainer's memory open until another handle arrives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: SharedMemory | None = None

    @contextmanager
    def opened(
        self, request: LoadChunkRequest | PrepareRequest
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors in place; work on them ends with the context. Raises
        Refused (400) or OSError.
        """
        tensors = self.tensors(request)
        try:
            yield tensors
        finally:
            if self._memory is not None:
                self._memory.settle()

    def tensors(self, request: LoadChunkRequest | PrepareRequest) -> dict[str, Tensor]:
        """Return the tensors in place: of a file, or of memory that the trainer
        overwrites after this push. Raises Refused (400) or OSError.
        """
        if request.memory is None:
            return read_or_refuse(request.path)
        handles = request.memory.handles
        if self._memory is None or self._memory.handle not in handles:
            here = name_of(self._device)
            own = [handle for handle in handles if handle.device == here]
            if not own:
                there = [handle.device for handle in handles]
                raise Refused(
                    400,
                    f"the trainer shares memory of the devices {there}, not of {here!r}",
                    rule="an engine opens the memory of its own device",
                    way_out="set weight_sync.transport=shm.",
                )
            self._memory = None  # before the next one is opened
            self._memory = open_memory(own[0], self._device)
        return views(request.memory.tensors, self._memory.data)
