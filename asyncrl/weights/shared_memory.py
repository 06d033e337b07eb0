"""Memory that two processes share, and checksums of what lies in it. Knows mapped files and CUDA's driver;
knows no weights.

One process makes the memory and tells its handle (wire.MemoryHandle: plain JSON); others open it. On the CPU
it is a mapped file in shared memory, on a CUDA device an allocation of the driver's own, which CUDA IPC opens
in another process on the same device.

Why not torch's IPC (UntypedStorage._share_cuda_): what torch shares lies in a segment of its caching
allocator, which then never goes back to the device; its counter of readers is a file in /dev/shm that a
killed process leaves; and one handle is good for one reader. The driver's calls are public and have none of
it. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html has them.

CUDA copies are only begun when a call returns: whoever says that bytes are there, or have been read, calls
settle() first.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.messages.base import MemoryHandle, tensor_digest

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

    def __repr__(self) -> str:
        return f"<MappedFile {self.handle.name}, {self.handle.num_bytes} bytes>"

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

    def __repr__(self) -> str:
        return f"<CudaMemory of {self.handle.num_bytes} bytes on {self._device}>"

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


PIECE_WORDS = 2**20
"""Words that are mixed at once: what the temporaries of a checksum take."""
MIXERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The odd 64-bit numbers of splitmix64, as int64 has them: https://prng.di.unimi.it/splitmix64.c."""


def shared_digest(name: str, tensor: Tensor) -> bytes:
    """wire.tensor_digest over a checksum of the tensor's bytes, where they are: no copy of a device's tensor
    to the host.

    It proves that the bytes, their order, name, dtype and shape are the same at both ends, against any fault
    and not against somebody who wants to deceive: 128 bits of XXH3 on the CPU, 64 bits of mixed words on a
    device.
    """
    return _digest(name, tensor, _checksum(tensor.detach().contiguous()))


def word_digest(name: str, tensor: Tensor) -> bytes:
    """The same by mixed words wherever the tensor is: for a Python that may have torch alone (vLLM's own)."""
    return _digest(name, tensor, b"words" + word_sum(tensor.detach().contiguous()))


def byte_digest(name: str, tensor: Tensor) -> bytes:
    """wire.tensor_digest of the bytes themselves."""
    return _digest(name, tensor, bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; a copy only where it is not there, or not contiguous."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _digest(name: str, tensor: Tensor, data: bytes | memoryview) -> bytes:
    return tensor_digest(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _checksum(tensor: Tensor) -> bytes:
    if tensor.device.type != "cpu":
        return b"words" + word_sum(tensor)
    import xxhash  # vLLM's own Python has it not

    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return b"xxh3" + xxhash.xxh3_128_digest(data)


def word_sum(tensor: Tensor) -> bytes:
    """Each 64-bit word of a contiguous tensor is mixed with its position, and all are added modulo 2**64;
    then come the odd bytes.

    A change of one word always changes the sum, since mixing loses nothing; of several, all but once in
    2**64.
    """
    flat, per_word = tensor.reshape(-1), 8 // tensor.element_size()
    num_words = flat.numel() // per_word
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    words, rest = flat[: num_words * per_word].view(torch.int64), flat[num_words * per_word :]
    positions = torch.arange(min(num_words, PIECE_WORDS), dtype=torch.int64, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, num_words, PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        mixed = (positions[: len(piece)] + start) * MIXERS[0]
        mixed.bitwise_xor_(piece)
        for shift, mixer in ((30, MIXERS[1]), (27, MIXERS[2])):
            high = (mixed >> shift).bitwise_and_(2 ** (64 - shift) - 1)  # int64 shifts its sign along
            mixed.bitwise_xor_(high).mul_(mixer)
        total += mixed.sum()
    odd = rest.view(torch.uint8).cpu().numpy().tobytes() if rest.numel() else b""
    return int(total.item()).to_bytes(8, "little", signed=True) + odd
