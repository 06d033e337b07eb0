"""Memory that two processes share: mapped files, CUDA's driver as far as a library with its signatures shows,
and checksums.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.messages.base import MemoryHandle
from asyncrl.weights import shared_memory as sharing
from asyncrl.weights.shared_memory import (
    GRANULE,
    CudaDriver,
    CudaMemory,
    MappedFile,
    make_memory,
    open_memory,
    shared_digest,
    word_sum,
)

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 1)
MASK = 2**64 - 1


class HostCudaMemory(CudaMemory):
    """Over the stub, whose pointers are the host's."""

    def _tensor(self, allocation: sharing._Allocation) -> Tensor:
        interface = allocation.__cuda_array_interface__
        assert interface["typestr"] == "|u1"
        array = (ctypes.c_ubyte * interface["shape"][0]).from_address(interface["data"][0])
        array.owner = allocation  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stub of CUDA's driver")
    path = tmp_path_factory.mktemp("stub") / "libcuda.so"
    source = Path(__file__).with_name("cuda_driver_stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source, "-lrt"], check=True)
    return str(path)


OPEN_IN_ANOTHER = """
import sys, torch
from test_sharing import DEVICE, HostCudaMemory
from asyncrl.weights.shared_memory import CudaDriver, word_sum
from asyncrl.messages.base import MemoryHandle

driver = CudaDriver(sys.argv[1])
memory = HostCudaMemory.opened(MemoryHandle.model_validate_json(sys.stdin.readline()), DEVICE, driver)
print(word_sum(memory.data).hex(), flush=True)
memory.data[:8] = torch.arange(8)
del memory
assert driver._library.num_held() == 0
"""


def test_what_one_process_writes_into_device_memory_another_reads_and_writes_through_the_handle(
    stub: str,
) -> None:
    driver = CudaDriver(stub)
    memory = HostCudaMemory.made(3 * 2**20, DEVICE, driver)
    assert memory.handle.num_bytes == 4 * 2**20, "whole granules"
    assert len(base64.b64decode(memory.handle.name)) == 64
    memory.data.random_(0, 256)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_IN_ANOTHER, stub],
        input=memory.handle.model_dump_json() + "\n",
        text=True,
        capture_output=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before = memory.data.clone()
    assert before[:8].tolist() == list(range(8))
    assert done.stdout.strip() != word_sum(before).hex()
    json.loads(memory.handle.model_dump_json())


def test_device_memory_goes_with_the_last_view_of_it(stub: str) -> None:
    driver = CudaDriver(stub)
    held = driver._library.num_held()
    memory = HostCudaMemory.made(GRANULE, DEVICE, driver)
    view = memory.data[7:].view(-1)
    del memory
    gc.collect()
    assert driver._library.num_held() == held + 1
    view[0] = 3
    del view
    gc.collect()
    assert driver._library.num_held() == held


def test_what_the_driver_refuses_is_an_error_with_the_call_and_its_reason(stub: str) -> None:
    driver = CudaDriver(stub)
    with pytest.raises(OSError, match="cuMemAlloc_v2 failed with 2: out of memory"):
        HostCudaMemory.made(2**50, DEVICE, driver)
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2 failed with 400: invalid resource handle"):
        HostCudaMemory.opened(
            MemoryHandle(kind="cuda", name=base64.b64encode(bytes(64)).decode(), num_bytes=GRANULE),
            DEVICE,
            driver,
        )
    with pytest.raises(OSError, match="has 64 bytes, this one 3"):
        HostCudaMemory.opened(MemoryHandle(kind="cuda", name="QUJD", num_bytes=GRANULE), DEVICE, driver)
    with pytest.raises(OSError, match="cuDeviceGet failed with 101"):
        HostCudaMemory.made(GRANULE, torch.device("cuda", 5), driver)
    with pytest.raises(OSError, match="cuMemAlloc_v2 failed with 201"):
        driver.allocate(GRANULE)  # outside of on(): the stub would not take what CUDA does not


def test_without_a_driver_there_is_no_device_memory_and_the_error_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(OSError, match="libcuda"):
        CudaMemory.made(GRANULE, DEVICE)
    with pytest.raises(ValueError, match="cuda memory cannot be opened for tensors on cpu"):
        open_memory(MemoryHandle(kind="cuda", name="", num_bytes=1), CPU)


def test_a_mapped_file_shows_each_side_what_the_other_wrote(tmp_path: Path) -> None:
    ours = make_memory(10_000, CPU, tmp_path)
    theirs = open_memory(MemoryHandle.model_validate_json(ours.handle.model_dump_json()), CPU)
    ours.data.random_(0, 256)
    assert torch.equal(ours.data, theirs.data)
    theirs.data[5000:] = 1
    assert ours.data[5000:].eq(1).all()
    for memory in (ours, theirs):
        memory.settle()
        assert "10000 bytes" in repr(memory)


def test_a_mapped_file_that_has_no_room_or_is_cut_off_is_an_error_and_no_signal(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MappedFile.made(tmp_path / "file", 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    memory = MappedFile.made(tmp_path / "short", 5000)
    with pytest.raises(OSError, match="has 5000 bytes instead of 6000"):
        MappedFile.opened(memory.handle.model_copy(update={"num_bytes": 6000}))
    with pytest.raises(FileNotFoundError):
        MappedFile.opened(memory.handle.model_copy(update={"name": str(tmp_path / "none")}))


def sum_of(data: bytes) -> bytes:
    """word_sum as its docstring says it, in Python's integers."""
    total, end = 0, len(data) // 8 * 8
    for position in range(end // 8):
        word = int.from_bytes(data[8 * position : 8 * position + 8], "little")
        word ^= position * 0x9E3779B97F4A7C15 & MASK
        for shift, mixer in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ word >> shift) * mixer & MASK
        total += word
    return (total & MASK).to_bytes(8, "little") + data[end:]


@given(
    st.binary(min_size=2, max_size=200),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_sum_of_words_is_that_of_the_bytes_whatever_the_dtype(data: bytes, dtype: torch.dtype) -> None:
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    tensor = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if data
        else torch.empty(0, dtype=dtype)
    )
    assert word_sum(tensor) == sum_of(data)


def test_a_sum_of_words_goes_on_over_pieces_and_takes_views_that_begin_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.randn(1001).to(torch.bfloat16)
    expected = [word_sum(tensor), word_sum(tensor[3:].clone())]
    assert expected[0] == sum_of(bytes(tensor.view(torch.uint8).tolist()))
    monkeypatch.setattr(sharing, "PIECE_WORDS", 7)
    assert [word_sum(tensor), word_sum(tensor[3:])] == expected


@given(st.data())
@pytest.mark.parametrize(
    "checksum", [word_sum, lambda tensor: shared_digest("w", tensor)], ids=["words", "xxh3"]
)
def test_a_changed_bit_swapped_rows_and_a_shift_change_the_checksum(
    checksum: object, data: st.DataObject
) -> None:
    assert callable(checksum)
    tensor = torch.randn(data.draw(st.integers(2, 40)), 4)
    changed = tensor.clone().view(torch.uint8).flatten()
    position, bit = data.draw(st.integers(0, len(changed) - 1)), data.draw(st.integers(0, 7))
    changed[position] ^= 1 << bit
    expected = checksum(tensor)
    assert checksum(changed.view(torch.float32).view(tensor.shape)) != expected
    assert checksum(tensor.roll(1, 0)) != expected
    top = torch.tensor([0, -(2**63), 0, 0])
    assert len({checksum(top.roll(shift).view(torch.float64)) for shift in range(4)}) == 4, (
        "words that differ in their top bit alone"
    )
    assert checksum(tensor.clone()) == expected


def test_a_digest_has_name_dtype_and_shape_in_it() -> None:
    tensor = torch.zeros(4, 6)
    assert len({shared_digest("a", tensor), shared_digest("b", tensor), shared_digest("a", tensor.T)}) == 3
    assert shared_digest("a", tensor) != shared_digest("a", tensor.view(torch.bfloat16).view(4, 12)[:, :6])
    assert shared_digest("a", torch.empty(0)) != shared_digest("b", torch.empty(0))


OPEN_ON_DEVICE = """
import sys, torch
from asyncrl.weights.shared_memory import open_memory, word_sum
from asyncrl.messages.base import MemoryHandle

memory = open_memory(MemoryHandle.model_validate_json(sys.stdin.readline()), torch.device("cuda"))
print(word_sum(memory.data).hex(), flush=True)
sys.stdin.readline()
print(word_sum(memory.data).hex(), flush=True)
memory.data[:8] = torch.arange(8, device="cuda")
memory.settle()
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_device_another_process_sees_each_new_content_and_sums_are_those_of_the_cpu(
    tmp_path: Path,
) -> None:
    device = torch.device("cuda")
    memory = make_memory(50 * 10**6, device, tmp_path)
    memory.data.random_(0, 256)
    memory.settle()
    assert word_sum(memory.data) == word_sum(memory.data.cpu())
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_ON_DEVICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(memory.handle.model_dump_json() + "\n")
        other.stdin.flush()
        assert other.stdout.readline().strip() == word_sum(memory.data).hex()
        memory.data.random_(0, 256)
        memory.settle()
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline().strip() == word_sum(memory.data).hex()
        assert other.stdout.readline().strip() == "written"
        assert memory.data[:8].tolist() == list(range(8))
        other.stdin.write("\n")
        other.stdin.flush()
    free = torch.cuda.mem_get_info()[0]
    del memory
    gc.collect()
    assert torch.cuda.mem_get_info()[0] - free >= 50 * 10**6, "it goes back to the device"
