"""Tensors that come and go together lie side by side in large pages; whoever else looks at one keeps it where
it is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import torch
from asyncrl.trainer.host_memory import GROUP_BYTES, LARGE_PAGE, HostMemory, gather, new_places
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM


@given(st.lists(st.integers(1, 5 * mmap.PAGESIZE), min_size=1, max_size=20))
def test_places_are_whole_pages_one_after_the_other_from_a_large_page_on_each_a_storage(
    sizes: list[int],
) -> None:
    places = new_places(sizes)
    assert places[0].data_ptr() % LARGE_PAGE == 0
    for place, size in zip(places, sizes, strict=True):
        assert size <= len(place) < size + mmap.PAGESIZE
        assert place.untyped_storage().nbytes() == len(place)
        assert HostMemory().movable(place.untyped_storage()) == (0, len(place)), (
            "nothing of it stays when it is freed"
        )
    for before, after in zip(places, places[1:], strict=False):
        assert after.data_ptr() == before.data_ptr() + len(before)


def test_tensors_move_with_their_values_once_and_what_is_seen_elsewhere_or_a_single_number_stays() -> None:
    parameter = torch.nn.Parameter(torch.randn(300, 70))
    parameter.grad = torch.ones_like(parameter)
    moment, number, seen = torch.randn(5000), torch.tensor(3.0), torch.randn(4000)
    view, strided = seen[10:], torch.randn(200, 100).T
    tensors = [parameter, moment, number, seen, strided, moment]
    before = [tensor.detach().clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    optimizer = torch.optim.AdamW([parameter])
    assert gather(tensors) >= parameter.nbytes + moment.nbytes
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert [tensor.data_ptr() == place for tensor, place in zip(tensors, places, strict=True)] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert view[0] == seen[10]
    assert gather(tensors) == 0
    optimizer.step()
    assert not torch.equal(parameter, before[0]), "it is the parameter that it was"


def test_a_mapped_model_file_does_not_stay_resident_for_the_sake_of_its_small_tensors(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    assert min(tensor.nbytes for tensor in before.values()) < mmap.PAGESIZE
    assert str(path) in Path("/proc/self/maps").read_text()
    gather([*model.parameters(), *model.buffers()])
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_nothing_stays_resident_beyond_the_last_place_once_all_is_freed() -> None:
    before = psutil.Process().memory_info().rss
    groups = [new_places([LARGE_PAGE + mmap.PAGESIZE]) for _ in range(32)]
    for (place,) in groups:
        place.fill_(1)
    for (place,) in groups:
        HostMemory().free(place.untyped_storage())
    assert psutil.Process().memory_info().rss - before < 8 * LARGE_PAGE


def test_many_are_moved_by_groups_that_take_little_beside_them() -> None:
    tensors = [torch.full((GROUP_BYTES // 8,), float(number)) for number in range(4)]
    assert gather(tensors) == 2 * GROUP_BYTES
    assert [tensor[-1].item() for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]
    assert abs(tensors[1].data_ptr() - tensors[0].data_ptr()) == tensors[0].nbytes
