"""The forms of `placement`, the devices that each process gets, and the devices of a
machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_cases import (
    EVAL,
    OWN,
    RAY,
    TAUGHT,
    VLLM,
    ZERO,
    load,
    nodes,
    placed,
)

from asyncrl.base import host
from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.placement_config import PlacementConfig
from asyncrl.job.roles import EVAL_ENGINE, extra_models, extra_servers
from asyncrl.launch import machine
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.machine import (
    CudaDevice,
    child_environ,
    described_nodes,
    find_cuda_devices,
)
from asyncrl.launch.placement import NO_DEVICE, NodeDevice, place
from asyncrl.launch.plan import make_plan


def sizes(ranks: int, engines: int = 1, split: int = 1) -> list[str]:
    parallel = [VLLM, f"rollout.tensor_parallel={split}"] if split > 1 else []
    many = [
        "rollout.group_size=16",
        f"trainer.world_size={ranks}",
        f"rollout.num_engines={engines}",
    ]
    return [*many, *parallel]


def where(devices: Iterable[NodeDevice]) -> str:
    """Names of devices by node: `0: 01, 1: c` (c: the CPU, n: none)."""
    found: dict[int, list[str]] = {}
    for node, name in devices:
        found.setdefault(node, []).append(name.removeprefix("cuda:")[:1])
    return ", ".join(f"{node}: {''.join(names)}" for node, names in found.items())


# ---- which device each process gets


@pytest.mark.parametrize(
    ("num_cuda", "trainer", "rollout", "more", "ranks", "engines"),
    [
        # one machine
        ((0,), "cpu", "trainer", [ZERO, *sizes(2)], "0: cc", "0: c"),
        ((1,), "auto", "auto", ["rollout.engine=simulated", *sizes(1, 2)], "0: 0", "0: nn"),
        ((4,), "auto", "auto", sizes(1, 2, split=2), "0: 0", "0: 1212"),
        # separate nodes if there are enough
        ((8, 8), "{nodes: 1, gpus: 8}", "{nodes: 1, gpus: 8}", sizes(8, 8), "0: 01234567", "1: 01234567"),
        # the node of exactly the size first
        ((8, 4), "{nodes: 1, gpus: 4}", "{nodes: 1, gpus: 8}", sizes(4, 8), "1: 0123", "0: 01234567"),
        # auto: one node, else whole nodes
        ((2, 4), "auto", "auto", sizes(4, 2), "1: 0123", "0: 01"),
        ((8, 3, 3), "0-7", "auto", sizes(8, 2, split=2), "0: 01234567", "1: 01, 2: 01"),
        # CPUs
        ((0, 0, 0), "{nodes: 1}", "{nodes: 2}", sizes(2, 4), "0: cc", "1: cc, 2: cc"),
        ((4, 4), "{nodes: 2, gpus: 0}", "{nodes: 2, gpus: 4}", sizes(2, 8), "0: c, 1: c", "0: 0123, 1: 0123"),
    ],
)  # fmt: skip
def test_sides_get_written_or_free_devices(
    num_cuda: tuple[int, ...],
    trainer: str,
    rollout: str,
    more: list[str],
    ranks: str,
    engines: str,
) -> None:
    written = [f"placement.trainer={trainer}", f"placement.rollout={rollout}"]
    placement = placed(num_cuda, *written, *more)
    assert where(placement.trainer) == ranks
    used = [device for devices in placement.engines for device in devices]
    assert where(sorted(used, key=lambda device: device.node)) == engines
    is_colocated = ZERO in more and "cpu" not in rollout
    assert placement.is_colocated == is_colocated


APART = ["placement.trainer=0", "placement.rollout=1"]


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "evaluation", "teacher"),
    [
        ((3,), [EVAL], "0: 2", ""),
        ((1,), [EVAL, "placement.rollout=cpu"], "0: c", ""),
        ((3, 3), [*APART, EVAL, *TAUGHT], "0: 2", "1: 0"),
        ((0, 2), ["placement.trainer={nodes: 1, gpus: 1}", EVAL, OWN], "1: 1", ""),
    ],
)
def test_eval_engine_and_teacher_take_free_devices_first(
    num_cuda: tuple[int, ...], overrides: list[str], evaluation: str, teacher: str
) -> None:
    placement = placed(num_cuda, *overrides)
    devices = [placement.extra.get(name) for name in (EVAL_ENGINE, "teacher")]
    found = [where([device] if device else []) for device in devices]
    assert found == [evaluation, teacher]


@pytest.mark.extension("scoring")
def test_each_device_of_a_server_has_a_copy() -> None:
    several = [*APART, *TAUGHT, "placement.teacher=[3, cpu, 2]"]
    extra = placed(4, *several).extra
    assert [*extra] == ["teacher-0", "teacher-1", "teacher-2"]
    assert [device.name for device in extra.values()] == ["cuda:3", "cpu", "cuda:2"]
    roles = extra_servers(load(*several))
    assert {roles[name].shared_name for name in extra} == {"teacher"}
    assert [*extra_models(load(*several))] == ["teacher"], "its files are read once"
    ranged = placed(4, *APART, *TAUGHT, "placement.teacher=2-3").extra
    assert [device.name for device in ranged.values()] == ["cuda:2", "cuda:3"]
    alone = placed(4, *APART, *TAUGHT, "placement.teacher=[3]").extra
    assert [*alone] == ["teacher"]
    both = [*TAUGHT, "placement.teacher=[2, 0]"]
    stays = placed(4, *APART, *both)
    shared_device = placed(4, "placement.trainer=0", "placement.rollout=0", ZERO, *both)
    leaving = [placement.leaves("teacher-1") for placement in (stays, shared_device)]
    assert leaving == [False, True]
    assert not shared_device.leaves("teacher-0"), "it has its own device"
    shared = {0: ["cuda:0", "cuda:0", "cuda:2", "cuda:0"]}
    assert shared_device.parts(has_engines=True) == shared
    remote = placed(4, *APART, *TAUGHT, "teacher.base_url=http://t:1")
    started = {0: ["cuda:1", "cuda:0"]}
    assert remote.parts(has_engines=True) == started, "a place for a teacher elsewhere"


@pytest.mark.extension("scoring")
def test_servers_may_have_the_trainers_other_devices() -> None:
    four = ["placement.trainer=all", "placement.rollout=0-1", ZERO, *sizes(4, 2)]
    placement = placed(4, *four, *TAUGHT, "placement.teacher=2-3")
    assert placement.is_colocated
    assert where(placement.engine_devices) == "0: 01"
    assert where(placement.extra.values()) == "0: 23"
    assert all(map(placement.leaves, placement.extra))
    for idle in ([], [*TAUGHT, "placement.teacher=2"], [EVAL, OWN, "placement.eval=2"]):
        with pytest.raises(
            ConfigError, match="would be idle in the engines' time slice"
        ):
            placed(4, *four, *idle)


# ---- any placement keeps the rules


@st.composite
def forms(draw: st.DrawFn) -> str:
    counts = draw(
        st.sampled_from(["", ", gpus: 0", ", gpus: 1", ", gpus: 2", ", gpus: all"])
    )
    mapping = f"{{nodes: {draw(st.sampled_from([1, 2, 3, 'all']))}{counts}}}"
    return draw(
        st.sampled_from(
            ["auto", "cpu", "all", "0", "[1, 0]", mapping, mapping, mapping]
        )
    )


@cache
def base_of(split: int) -> RunConfig:
    return load(RAY, *sizes(1, 1, split), EVAL, *TAUGHT)


@pytest.mark.extension("scoring")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    forms(),
    st.one_of(forms(), st.just("trainer")),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2]),
)
def test_accepted_placement_keeps_the_rules(
    num_cuda: list[int],
    trainer: str,
    rollout: str,
    size: int,
    engines: int,
    split: int,
    bound: int,
) -> None:
    sides = {"trainer": yaml.safe_load(trainer), "rollout": yaml.safe_load(rollout)}
    there, base = nodes(*num_cuda), base_of(split)
    changes = {
        "placement": PlacementConfig.model_validate(sides),
        "trainer": base.trainer.model_copy(update={"world_size": size}),
        "rollout": base.rollout.model_copy(update={"num_engines": engines}),
        "buffer": base.buffer.model_copy(update={"max_staleness": bound}),
    }
    config = base.model_copy(update=changes)
    try:
        placement = place(config, there, extra_servers(config))
    except ConfigError:
        return
    ranks = placement.trainer
    on_cuda = {device for device in ranks if device.name != "cpu"}
    used = set(placement.engine_devices)
    assert (len(ranks), len(placement.engines)) == (size, engines)
    assert len(on_cuda) in (0, size), "two ranks share a device"
    assert list(ranks) == sorted(ranks, key=lambda device: device.node), (
        "ranks of a node are adjacent"
    )
    for node, name in (*ranks, *used):
        assert name == "cpu" or int(name.removeprefix("cuda:")) < num_cuda[node]
    for devices in placement.engines:
        assert len(set(devices)) == split, "an engine has a device twice"
        assert len({device.node for device in devices}) == 1, "an engine spans nodes"
    assert on_cuda & used == (on_cuda if placement.is_colocated else set())
    assert not placement.is_colocated or (bound == 0 and {*ranks} == used)
    shared = [name for name, one in placement.extra.items() if one in on_cuda]
    assert all(map(placement.leaves, shared)), "a server shares the trainer's device"
    plan = make_plan(config, there, extra_servers(config))
    assert {process.device for process in plan.processes} <= {*plan.memory, NO_DEVICE}


# ---- the devices of a machine

SMI = """0, GPU-aaaa, 80000, 81559, Tesla T4
1, GPU-bbbb, 40000, 40960, NVIDIA A100-SXM4-40GB
"""
A = CudaDevice("0", 80000 * 2**20, 81559 * 2**20, has_bfloat16=False)
B = CudaDevice("1", 40000 * 2**20, 40960 * 2**20)
NAMED = (replace(B, name="GPU-bbbb"), replace(A, name="GPU-aaaa"))


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, (A, B)), ("GPU-bbbb,GPU-aaaa", NAMED), ("1,-1,0", (B,)), ("0,5,1", (A,))],
)
def test_cuda_visible_devices_selects_from_the_drivers_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: object
) -> None:
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda: SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    assert find_cuda_devices() == found


def test_each_launcher_asks_for_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook runs several times, and what it holds itself changes in between."""
    asked = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    for free in (80000, 20000):
        line = f"0, GPU-aaaa, {free}, 81559, NVIDIA H100"
        asked.write_text(f"#!/bin/sh\necho '{line}'\n")
        asked.chmod(0o755)
        (node,) = LocalLauncher().nodes
        assert [device.free_bytes for device in node.machine.cuda] == [free * 2**20]


def test_child_sees_its_devices_by_the_parents_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    named = (CudaDevice("3"), CudaDevice("GPU-bbbb"))
    shown = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert child_environ(("cuda:1", "cuda:0"), named) == shown
    assert child_environ(("cpu",), ()) == child_environ(("none",), named) == {}


# ---- described machines

THREE = ("8xH200-141GB", 192, "2TB")


@pytest.mark.parametrize(
    ("given", "num_nodes", "num_cuda", "each", "memory"),
    [
        (THREE, 1, 8, 141 * 10**9, 2 * 10**12),
        (("2x8x79.6GiB", 16, "512GB"), 2, 8, int(79.6 * 2**30), 512 * 10**9),
        (("3xcpu", 4, "16GB"), 3, 0, None, 16 * 10**9),
    ],
)
def test_nodes_are_described_by_devices_cores_and_memory(
    given: tuple[str, int, str],
    num_nodes: int,
    num_cuda: int,
    each: int | None,
    memory: int,
) -> None:
    made = described_nodes(*given)
    assert made is not None
    assert [node.name for node in made] == [f"node-{at}" for at in range(num_nodes)]
    for node in made:
        assert [device.free_bytes for device in node.machine.cuda] == [each] * num_cuda
        assert (node.machine.cores, node.machine.memory, node.machine.is_here) == (
            given[1],
            memory,
            False,
        )


@pytest.mark.parametrize(
    "devices", [None, "8", "0xH200-141GB", "2x8xH200-141", "8x0GB"]
)
def test_incomplete_description_is_refused(devices: str | None) -> None:
    with pytest.raises(
        ConfigError, match="--devices 8xH200-141GB --cores 192 --memory 2TB"
    ):
        described_nodes(devices, 192, "2TB")


GB = 10**9
CONTAINER = {
    "memory.max": f"{32 * GB}",
    "memory.current": f"{20 * GB}",
    "cpu.max": "650000 100000",
}
CONTAINER |= {
    "memory.stat": f"file {5 * GB}\nshmem {2 * GB}\ninactive_file {2 * GB}\nactive_file {GB}"
}


def test_group_with_least_left_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GB)
    )
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(64)), raising=False
    )
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    assert (host.available_memory(), host.num_cores()) == (100 * GB, 64)
    (tmp_path / "membership").write_text("0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, text in CONTAINER.items():
        (tmp_path / "job" / name).write_text(f"{text}\n")
        (tmp_path / "job" / "step" / name).write_text("max\n")
    # 3 of 20 GB in use are file pages
    assert (host.available_memory(), host.num_cores()) == (15 * GB, 7)
