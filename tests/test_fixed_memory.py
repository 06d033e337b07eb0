"""Memory at fixed addresses: of a CPU, and of a CUDA device if there is one."""

from __future__ import annotations

import pytest
import torch

from asyncrl_servers.embedded import fixed_memory
from asyncrl_servers.embedded.fixed_memory import FixedMemory, FixedTensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_comes_back_as_zeros_at_the_same_address(device: str) -> None:
    memory = FixedMemory(1 << 22, torch.device(device))
    first = memory.zeros(3, 5, dtype=torch.bfloat16)
    second = memory.zeros(1000, dtype=torch.int64)
    assert not first.any()
    assert not second.any()
    addresses = first.data_ptr(), second.data_ptr()
    assert addresses[1] % 256 == addresses[0] % 256 == 0
    for _ in range(3):
        first.fill_(2)
        second.copy_(torch.arange(1000))
        assert first.float().sum() == 30  # the second does not overlap
        memory.unmap()
        memory.map()
        assert not first.any()
        assert not second.any()
        assert (first.data_ptr(), second.data_ptr()) == addresses


def made(device: str) -> list[torch.Tensor]:
    """Return two views of one storage, a tied pair, and a scalar."""
    joined = torch.arange(24.0, device=device).view(6, 4)
    tied = torch.ones(300, dtype=torch.bfloat16, device=device)
    return [joined[:2], joined[2:], tied, tied.view(30, 10), torch.tensor(7.0)]


@pytest.mark.parametrize("device", DEVICES)
def test_moved_tensors_keep_content_views_and_addresses(device: str) -> None:
    tensors, expected = made(device), made(device)
    fixed = FixedTensors(tensors, torch.device(device))
    for found, right in zip(tensors, expected, strict=True):
        assert torch.equal(found, right)
    tensors[0].fill_(5)
    tensors[3][0, 0] = 9
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + tensors[0].nbytes
    assert tensors[2][0] == 9
    addresses = [one.data_ptr() for one in tensors]
    tensors[1].data = torch.zeros(1, device=device)  # as a push of adapters does
    fixed.unmap()
    fixed.memory.map()
    assert [one.data_ptr() for one in tensors] == addresses
    assert not tensors[1].any()


@pytest.mark.parametrize("error", [OSError, RuntimeError])
@pytest.mark.parametrize("step", ["__init__", "tensor"])
def test_tensors_stay_where_they_are_without_such_memory(
    monkeypatch: pytest.MonkeyPatch, step: str, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise error("cuMemCreate failed with 2: out of memory")

    monkeypatch.setattr(fixed_memory.HostPages, step, refuse)
    tensors = made("cpu")
    with pytest.raises(OSError, match="out of memory"):
        FixedTensors(tensors, torch.device("cpu"))
    for found, right in zip(tensors, made("cpu"), strict=True):
        assert torch.equal(found, right)
