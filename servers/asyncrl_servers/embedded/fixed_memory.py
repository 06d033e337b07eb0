"""Memory whose addresses outlive its content: CUDA graphs stay valid while another
process has the device.

torch's allocator cannot do this: memory that it gives back comes again at any address.
On CUDA see https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html; on a CPU
the kernel takes back the pages of an anonymous mapping.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.weights.aside import (
    Copies,
    content_in,
    copy_back,
    copy_out,
    free_storages,
    give_back,
)
from asyncrl.weights.cuda_driver import (
    DeviceBytes,
    call_driver,
    in_context,
    ordinal_of,
)
from asyncrl.weights.host_memory import HostMemory
from asyncrl.weights.ipc import aligned

PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE and
CU_MEM_ACCESS_FLAGS_PROT_READWRITE of cuda.h.
"""
NO_FLAGS = ctypes.c_uint64(0)


class HostPages:
    """Pages of host memory at a reserved address."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, num_bytes, flags=flags)

    def tensor(self) -> Tensor:
        """Return uint8 of all bytes; valid while mapped."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def map(self) -> None:
        """Do nothing: the kernel gives a zeroed page at the first access."""

    def unmap(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)


class MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationKind(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", MemoryLocation),
        ("windows_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class MemoryAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", ctypes.c_int))


class DevicePages:
    """Device memory at a reserved address.

    map() creates memory, maps it there and lets its handle go, so unmap() frees it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises OSError."""
        self._device = device
        self._pointer = ctypes.c_uint64()
        self._is_mapped = False
        location = MemoryLocation(ON_DEVICE, ordinal_of(device))
        self._kind = AllocationKind(type=PINNED, location=location)
        self._access = MemoryAccess(location, READ_WRITE)
        granule = ctypes.c_size_t()
        with in_context(device):
            kind, minimum = ctypes.byref(self._kind), ctypes.c_int(0)
            call_driver(
                "cuMemGetAllocationGranularity", ctypes.byref(granule), kind, minimum
            )
            size = -(-num_bytes // granule.value) * granule.value
            self._size = ctypes.c_size_t(size)
            call_driver(
                "cuMemAddressReserve",
                ctypes.byref(self._pointer),
                self._size,
                ctypes.c_size_t(0),  # any alignment
                ctypes.c_uint64(0),  # any address
                NO_FLAGS,
            )
        try:
            self.map()
        except OSError:
            with in_context(device):
                self._free()
            raise

    def tensor(self) -> Tensor:
        return DeviceBytes(
            self._pointer, self._size.value, self._device, self._free
        ).tensor()

    def map(self) -> None:
        """Take memory. Raises OSError; then there is none."""
        # The driver does not see the memory that torch keeps for later.
        give_back(self._device)
        handle = ctypes.c_uint64()
        kind, access = ctypes.byref(self._kind), ctypes.byref(self._access)
        place = self._pointer, self._size
        with in_context(self._device):
            call_driver("cuMemCreate", ctypes.byref(handle), self._size, kind, NO_FLAGS)
            try:
                call_driver("cuMemMap", *place, ctypes.c_size_t(0), handle, NO_FLAGS)
                self._is_mapped = True
                call_driver("cuMemSetAccess", *place, access, ctypes.c_size_t(1))
            except OSError:
                self._unmap()
                raise
            finally:
                call_driver("cuMemRelease", handle)

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)  # kernels may still use it
        with in_context(self._device):
            self._unmap()

    def _unmap(self) -> None:
        if self._is_mapped:
            call_driver("cuMemUnmap", self._pointer, self._size)
            self._is_mapped = False

    def _free(self) -> None:
        call_driver("cuCtxSynchronize")  # unmap does not wait for kernels
        self._unmap()
        call_driver("cuMemAddressFree", self._pointer, self._size)


class FixedMemory:
    """Memory of tensors that keep their addresses.

    Life: mapped -> unmap() -> no memory, nobody may use the tensors -> map() -> mapped,
        all zeros.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises OSError and RuntimeError."""
        is_cuda = device.type == "cuda"
        self.num_bytes = num_bytes
        self._pages: DevicePages | HostPages = (
            DevicePages(num_bytes, device) if is_cuda else HostPages(num_bytes)
        )
        self._data = self._pages.tensor()
        self._num_taken = 0
        self.is_mapped = True
        self._clear()

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes, uint8."""
        start = self._num_taken
        self._num_taken += aligned(num_bytes)
        return self._data[start : start + num_bytes]

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor in the next bytes, like torch.zeros."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.take(num_bytes).view(dtype).view(shape)

    def map(self) -> None:
        """Take memory, if there is none. Raises OSError."""
        if not self.is_mapped:
            self._pages.map()
            self.is_mapped = True
            self._clear()

    def unmap(self) -> int:
        """Give the memory back, if there is any; return its bytes."""
        if not self.is_mapped:
            return 0
        self.is_mapped = False
        self._pages.unmap()
        return self.num_bytes

    def _clear(self) -> None:
        if self._data.is_cuda:  # the driver promises no content, the kernel zeros
            self._data.zero_()


class FixedTensors:
    """Existing tensors, moved into a FixedMemory.

    Storages move whole, so tied or merged weights stay views of one tensor. None may be
    pages of a file (own_memory).
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Raises MemoryError, OSError and RuntimeError; then nothing has moved."""
        self._tensors = list(tensors)
        # Through the host: both at once may not fit on the device.
        beside = HostMemory(device)
        copies = copy_out(self._tensors, device, beside)
        free_storages(copies)
        failed = ""
        try:
            self.memory, placed = _filled(copies, device)
            self._places = [content_in(placed, one) for one in self._tensors]
        except (OSError, RuntimeError) as error:
            failed = str(error)
        # Behind the except block, whose traceback holds the new memory: the device may
        # not have both.
        if failed:
            copy_back(copies, device)
            raise OSError(failed)
        self._return()

    def unmap(self) -> None:
        """Give the memory back. Tensors that were moved since return."""
        self._return()
        self.memory.unmap()

    def _return(self) -> None:
        for tensor, place in zip(self._tensors, self._places, strict=True):
            tensor.data = place


def _filled(copies: Copies, device: torch.device) -> tuple[FixedMemory, Copies]:
    """Return memory with this content, and where each storage's is."""
    memory = FixedMemory(sum(aligned(len(data)) for _, data in copies), device)
    placed: Copies = []
    for storage, data in copies:
        place = memory.take(len(data))
        place.copy_(data)
        placed.append((storage, place))
    return memory, placed
