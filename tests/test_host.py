"""What a process may have of its host, as the files of its control groups say it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from asyncrl.base import host

GB = 10**9
Put = Callable[[str, dict[str, str]], None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Writes to which groups a process belongs, and their files, on a host of 100 GB and 64 cores."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "groups")

    def write(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


@pytest.mark.usefixtures("put")
def test_host_without_groups_is_the_limit() -> None:
    assert (host.available_memory(), host.num_cores()) == (100 * GB, 64)


def test_group_of_a_container_is_the_limit(put: Put) -> None:
    stat = f"anon {15 * GB}\nfile {5 * GB}\nshmem {2 * GB}\ninactive_file {2 * GB}\nactive_file {GB}"
    limits = {"memory.max": str(32 * GB), "memory.current": str(20 * GB), "cpu.max": "650000 100000"}
    put("0::/\n", limits | {"memory.stat": stat})
    # 20 GB in use, 3 of which are pages of files
    assert (host.available_memory(), host.num_cores()) == (15 * GB, 7)


def test_nested_group_with_least_left_counts(put: Put) -> None:
    files = {"job/step/memory.max": "max", "job/step/memory.current": str(3 * GB)}
    files |= {"job/memory.max": str(10 * GB), "job/memory.current": str(4 * GB)}
    files |= {"job/step/cpu.max": "max 100000", "job/cpu.max": "200000 100000"}
    put("0::/job/step\n", files)
    assert (host.available_memory(), host.num_cores()) == (6 * GB, 2)


def test_full_group_leaves_nothing_and_hidden_one_is_ignored(put: Put) -> None:
    put("0::/not/shown/here\n1:name=systemd:/\n", {})
    assert (host.available_memory(), host.num_cores()) == (100 * GB, 64)
    put("0::/\n", {"memory.max": str(GB), "memory.current": str(2 * GB)})
    assert host.available_memory() == 0
