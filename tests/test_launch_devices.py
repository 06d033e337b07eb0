"""How placement is written, which device each process gets of 0 to 8 CUDA devices, and which there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_cases import EVAL, OWN, TAUGHT, TURNS, URLS, VLLM, load, placed

from asyncrl.base.errors import ConfigError
from asyncrl.config import PlacementConfig, load_config, run_config_yaml
from asyncrl.config.operation import device_numbers
from asyncrl.launch import machine
from asyncrl.launch.devices import Placement, child_environ, place
from asyncrl.launch.machine import CudaDevice, described_machine, find_cuda_devices

ZERO = "buffer.max_staleness=0"
TWO_RANKS = "trainer.world_size=2"
TWO_EACH = [ZERO, TWO_RANKS, "rollout.num_engines=2", "placement.trainer=0-1"]
SPLIT = [VLLM, "rollout.tensor_parallel=2"]


# ---- what is refused before any machine is looked at


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("auto", None), ("cpu", None), ("all", None), ("2", [2]), ("[3, 1]", [3, 1]), ("2-4", [2, 3, 4])],
)
def test_every_form_is_read_and_written_back_as_it_was(
    text: str, numbers: list[int] | None, tmp_path: Path
) -> None:
    config = load(f"placement.trainer={text}", "placement.rollout=cpu")
    (tmp_path / "config.yaml").write_text(run_config_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert str(config.placement.trainer) == text
    assert device_numbers(config.placement.trainer) == numbers


NO_FORMS = "gpu cuda true none -1 3-1 0,1 [] [0,0] [0,cpu] rollout node0.1 0:1 [0.1,0.2] host@0".split()
TOO_MANY = "all cuda 0-1 [0,1]".split()


@pytest.mark.parametrize(
    ("key", "text"), [*(("trainer", text) for text in NO_FORMS), *(("eval", text) for text in TOO_MANY)]
)
def test_anything_else_is_refused(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"placement.{key}"):
        load(f"placement.{key}={text}")


# ---- which device each process gets


SHARE, SIZED = "placement.share=0.4", "rollout.vllm={gpu-memory-utilization: 0.9}"


def cuda(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cuda:{number}" for number in numbers)


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "trainer", "rollout", "mode"),
    [
        (0, ["buffer.max_staleness=4", "rollout.num_engines=2"], ("cpu",), ("cpu", "cpu"), "apart"),
        (0, ["placement.trainer=cpu", "placement.rollout=cpu", ZERO], ("cpu",), ("cpu",), "apart"),
        (0, ["placement.trainer=cpu", *TURNS, TWO_RANKS], ("cpu", "cpu"), ("cpu",), "colocated"),
        (2, [], cuda(0), cuda(1), "apart"),
        (2, ["rollout.num_engines=3"], cuda(0), cuda(1, 1, 1), "apart"),
        (8, ["trainer.world_size=4", "rollout.num_engines=4"], cuda(0, 1, 2, 3), cuda(4, 5, 6, 7), "apart"),
        (3, ["placement.trainer=1"], cuda(1), cuda(0), "apart"),
        (3, ["placement.rollout=0"], cuda(1), cuda(0), "apart"),
        (1, ["placement.trainer=cpu"], ("cpu",), cuda(0), "apart"),
        (1, ["placement.rollout=cpu"], cuda(0), ("cpu",), "apart"),
        (1, [ZERO], cuda(0), cuda(0), "colocated"),
        (1, [ZERO, "placement.trainer=all", "placement.rollout=0"], cuda(0), cuda(0), "colocated"),
        (2, [*TWO_EACH, "placement.trainer=auto"], cuda(0, 1), cuda(0, 1), "colocated"),
        (2, [*TWO_EACH, "placement.rollout=[1, 0]"], cuda(0, 1), cuda(1, 0), "colocated"),
        (1, ["rollout.engine=simulated", "rollout.num_engines=2"], cuda(0), ("none", "none"), "apart"),
        (1, URLS, cuda(0), ("none",), "apart"),
        (5, [*SPLIT, "rollout.num_engines=2"], cuda(0), cuda(1, 3), "apart"),
        (4, [*SPLIT, "rollout.num_engines=2"], cuda(0), cuda(1, 1), "apart"),
        (0, [VLLM, "weight_sync.transport=nccl"], ("cpu",), ("cpu",), "apart"),
        (1, [VLLM, "weight_sync.transport=ipc", *TURNS], cuda(0), cuda(0), "colocated"),
        (1, [ZERO, SHARE], cuda(0), cuda(0), "colocated"),
        (1, [SHARE], cuda(0), cuda(0), "apart"),
        (2, [SHARE, *TWO_EACH, "buffer.max_staleness=2"], cuda(0, 1), cuda(0, 1), "apart"),
    ],
)
def test_both_sides_get_what_is_written_or_what_the_other_side_leaves(
    num_cuda: int, overrides: list[str], trainer: tuple[str, ...], rollout: tuple[str, ...], mode: str
) -> None:
    placement = placed(num_cuda, *overrides)
    assert (placement.trainer, placement.rollout, placement.mode) == (trainer, rollout, mode)


def test_an_engine_that_is_split_has_devices_of_its_own() -> None:
    placement = placed(5, *SPLIT, "rollout.num_engines=2")
    assert placement.engines == (cuda(1, 2), cuda(3, 4))


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "setting"),
    [
        (1, [], "buffer.max_staleness=0"),
        (1, ["placement.trainer=all", "placement.rollout=0"], "placement.share=0.4"),
        (2, ["placement.trainer=0-1", "placement.rollout=[1, 0]", TWO_RANKS], "buffer.max_staleness=0"),
        (0, ["placement.rollout=trainer"], "buffer.max_staleness=0"),
        (2, [ZERO, TWO_RANKS, "placement.trainer=all", "placement.rollout=0"], "placement.rollout=trainer"),
        (4, ["placement.trainer=0-3", "placement.rollout=cpu"], "trainer.world_size=4"),
        (3, ["placement.trainer=0", "placement.rollout=1-2"], "rollout.num_engines=2"),
        (2, ["placement.trainer=all", *TURNS, TWO_RANKS], "rollout.num_engines=2"),
        (2, ["placement.trainer=2"], "placement.trainer=auto"),
        (0, ["placement.trainer=all"], "placement.trainer=auto"),
        (4, [*SPLIT, "placement.rollout=[1, 2, 3]"], "rollout.tensor_parallel"),
        (0, [VLLM, *TURNS], "rollout.engine=embedded"),
        (0, ["trainer.lora={rank: 2}", "weight_sync.transport=lora", *TURNS], "weight_sync.transport=shm"),
        (1, [VLLM, "weight_sync.transport=nccl", "placement.rollout=cpu"], "weight_sync.transport=shm"),
        (1, [VLLM, "weight_sync.transport=nccl", *TURNS], "weight_sync.transport=ipc"),
        (2, ["rollout.num_engines=2", "weight_sync.transport=nccl"], "weight_sync.transport=shm"),
        (1, [EVAL, OWN, *TURNS], "placement.eval=cpu"),
        (2, [EVAL, "placement.eval=0"], "eval.engine=rollout"),
        (1, [*TAUGHT, *TURNS], "placement.teacher=cpu"),
        (0, [SHARE], "placement.share=auto"),
        (0, [SHARE, *TURNS], "placement.share=auto"),
        (2, [SHARE], "placement.share=auto"),
        (1, [SHARE, *URLS], "placement.share=auto"),
        (1, [SHARE, VLLM, SIZED], "rollout.vllm.gpu-memory-utilization"),
        (1, [SHARE, EVAL, OWN], "placement.eval=cpu"),
        (1, ["rollout.num_engines={min: 1, max: 2}", ZERO], "rollout.num_engines=2"),
    ],
)
def test_a_refused_placement_names_a_setting_that_helps(
    num_cuda: int, overrides: list[str], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(num_cuda, *overrides)
    assert setting in caught.value.way_out


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "device"),
    [
        (0, [], "cpu"),
        (3, [], "cuda:2"),
        (3, [OWN, "placement.rollout=1-2", "rollout.num_engines=3"], "cuda:2"),
        (3, ["placement.eval=1"], "cuda:1"),
        (2, TURNS, "cuda:1"),
        (2, URLS, "cuda:1"),
        (1, ["placement.rollout=cpu"], "cpu"),
        (1, ["rollout.engine=simulated"], "none"),
    ],
)
def test_the_eval_engine_takes_a_free_device_else_the_least_used_of_the_engines(
    num_cuda: int, overrides: list[str], device: str
) -> None:
    assert placed(num_cuda, EVAL, *overrides).evaluation == device


@pytest.mark.parametrize(
    ("num_cuda", "overrides"),
    [
        (1, TURNS),
        (1, ["placement.share=0.4", "placement.rollout=0", "placement.trainer=0"]),
        (2, []),
        (1, URLS),
        (3, ["eval.engine=rollout"]),
        (0, ["eval.engine=rollout", *TURNS]),
        (1, ["eval.engine=rollout", "rollout.engine=simulated"]),
    ],
)
def test_the_rollout_engines_evaluate_where_no_device_is_free_or_asked_to(
    num_cuda: int, overrides: list[str]
) -> None:
    assert placed(num_cuda, EVAL, *overrides).evaluation is None


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "device"),
    [
        (0, [], "cpu"),
        (2, [], "cuda:1"),
        (3, [], "cuda:2"),
        (4, [EVAL], "cuda:3"),
        (2, ["placement.teacher=cpu"], "cpu"),
    ],
)
def test_the_teacher_takes_a_device_beside_trainer_engines_and_evaluation_if_there_is_one(
    num_cuda: int, overrides: list[str], device: str
) -> None:
    assert placed(num_cuda, *TAUGHT, *overrides).teacher == device


def test_whatever_is_not_refused_keeps_the_rules() -> None:
    base, num_placed = load(), 0
    forms = ("auto", "cpu", "all", 0, 1, "0-1", "trainer")
    choices = (0, 1, 2, 4), forms[:-1], forms, (1, 2), (1, 2), (0, 2)
    for num_cuda, trainer, rollout, size, engines, bound in itertools.product(*choices):
        changes = {
            "placement": PlacementConfig(trainer=trainer, rollout=rollout),
            "trainer": base.trainer.model_copy(update={"world_size": size}),
            "rollout": base.rollout.model_copy(update={"num_engines": engines}),
            "buffer": base.buffer.model_copy(update={"max_staleness": bound}),
        }
        try:
            placement = place(base.model_copy(update=changes), num_cuda)
        except ConfigError:
            continue
        num_placed += 1
        ranks, on_cuda = set(placement.trainer) - {"cpu"}, set(placement.rollout) - {"cpu"}
        assert (len(placement.trainer), len(placement.rollout)) == (size, engines)
        assert len(ranks) in (0, size), "two ranks share a device"
        assert all(int(device.removeprefix("cuda:")) < num_cuda for device in ranks | on_cuda)
        assert not ranks & on_cuda if placement.mode == "apart" else (bound, ranks) == (0, on_cuda)
    assert num_placed > 150


# ---- which devices there are

SMI = "0, GPU-aaaa, 80000, 81559\n1, GPU-bbbb, 40000, 40960\n"
A = CudaDevice("0", 80000 * 2**20, 81559 * 2**20)
B = CudaDevice("1", 40000 * 2**20, 40960 * 2**20)
NAMED = (replace(B, name="GPU-bbbb"), replace(A, name="GPU-aaaa"))


@pytest.mark.parametrize(
    ("gpus", "smi", "visible", "found"),
    [
        (2, SMI, None, (A, B)),
        (1, "", None, (CudaDevice("0", None),)),
        (0, SMI, None, (A, B)),
        (2, SMI, "1", (B,)),
        (2, SMI, "GPU-bbbb,GPU-aaaa", NAMED),
        (2, SMI, "1,-1,0", (B,)),
        (2, SMI, "0,5,1", (A,)),
        (2, SMI, "", ()),
    ],
)
def test_devices_are_those_of_the_driver_that_cuda_visible_devices_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, smi: str, visible: str | None, found: object
) -> None:
    for number in range(gpus):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(machine, "DRIVER_DIR", tmp_path / "gpus")
    monkeypatch.setattr(machine, "ask_nvidia_smi", lambda: smi)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: False)
    assert find_cuda_devices() == ()
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    assert find_cuda_devices() == found


def test_the_installed_torch_is_asked_without_being_imported() -> None:
    import torch

    assert machine.torch_has_cuda() == (torch.version.cuda is not None)


def test_a_child_sees_its_devices_in_order_and_by_the_names_of_the_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    named = (CudaDevice("3"), CudaDevice("GPU-bbbb"))
    shown = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert child_environ(("cuda:1", "cuda:0"), named) == shown
    assert child_environ(("cpu",), ()) == child_environ(("none",), named) == {}
    assert Placement(("cuda:0",), (("none",),), None, "apart").is_on_cuda


# ---- a machine that is described

THREE = ("8xH200-141GB", 192, "2TB")


@pytest.mark.parametrize(
    ("given", "num_cuda", "each", "memory"),
    [
        (THREE, 8, 141 * 10**9, 2 * 10**12),
        (("1xRTX4090-24GB", 16, "64GiB"), 1, 24 * 10**9, 64 * 2**30),
        (("2x79.6GiB", 16, "512GB"), 2, int(79.6 * 2**30), 512 * 10**9),
        (("1xA100-SXM4-80GB", 16, "900MB"), 1, 80 * 10**9, 900 * 10**6),
        (("cpu", 4, "16GB"), 0, None, 16 * 10**9),
    ],
)
def test_a_machine_is_described_by_its_devices_cores_and_memory(
    given: tuple[str, int, str], num_cuda: int, each: int | None, memory: int
) -> None:
    made = described_machine(*given)
    assert made is not None
    assert [device.free_bytes for device in made.cuda] == [each] * num_cuda
    assert (made.cores, made.memory, made.is_here) == (given[1], memory, False)
    assert described_machine(None, None, None) is None


@pytest.mark.parametrize(
    "given",
    [
        (None, *THREE[1:]),
        (THREE[0], None, None),
        (THREE[0], 0, "2TB"),
        (THREE[0], 192, "plenty"),
        (THREE[0], 192, "0GB"),
        *((devices, 192, "2TB") for devices in
          ("8", "H200-141GB", "0xH200-141GB", "8xH200", "8xH200-141", "8x0GB", "-1x80GB", "")),
    ],
)  # fmt: skip
def test_a_machine_that_is_not_described_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="describes no machine") as caught:
        described_machine(*given)
    assert "--devices 8xH200-141GB --cores 192 --memory 2TB" in caught.value.way_out
