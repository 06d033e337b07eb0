"""Which device everybody gets, on machines of 0 to 8 CUDA devices."""

from __future__ import annotations

import itertools
from pathlib import Path

from placement_cases import EVAL, Cases

from asyncrl.config import PlacementConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import (
    CudaDevice,
    Placement,
    child_environ,
    find_cuda_devices,
    place,
    visible_names,
)

CASES = Cases(["placement.trainer=auto", "placement.rollout=auto"])
load, placed, refusal = CASES.load, CASES.placed, CASES.refusal


def test_without_a_cuda_device_auto_is_the_cpu_and_both_sides_work_at_once() -> None:
    for max_staleness in (0, 4):
        placement = placed(0, f"buffer.max_staleness={max_staleness}", "rollout.num_engines=2")
        assert placement == Placement(("cpu",), ("cpu", "cpu"), None, "apart")


def test_the_cpu_is_shared_without_turns_unless_they_are_asked_for() -> None:
    assert (
        placed(0, "placement.trainer=cpu", "placement.rollout=cpu", "buffer.max_staleness=0").mode == "apart"
    )
    asked = placed(
        0,
        "placement.trainer=cpu",
        "placement.rollout=trainer",
        "buffer.max_staleness=0",
        "trainer.world_size=2",
    )
    assert asked == Placement(("cpu", "cpu"), ("cpu",), None, "colocated")


def test_auto_gives_the_trainer_a_device_a_rank_and_the_engines_others() -> None:
    assert placed(2) == Placement(("cuda:0",), ("cuda:1",), None, "apart")
    assert placed(8, "trainer.world_size=4", "rollout.num_engines=4") == Placement(
        ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), ("cuda:4", "cuda:5", "cuda:6", "cuda:7"), None, "apart"
    )
    assert placed(2, "rollout.num_engines=3").rollout == ("cuda:1",) * 3


def test_auto_takes_what_the_other_side_leaves() -> None:
    assert placed(3, "placement.trainer=1").rollout == ("cuda:0",)
    assert placed(3, "placement.rollout=0").trainer == ("cuda:1",)
    assert placed(1, "placement.trainer=cpu") == Placement(("cpu",), ("cuda:0",), None, "apart")
    assert placed(1, "placement.rollout=cpu") == Placement(("cuda:0",), ("cpu",), None, "apart")
    assert placed(1, "placement.trainer=cpu", "placement.rollout=cuda").rollout == ("cuda:0",)


def test_one_cuda_device_is_shared_in_turns_at_max_staleness_0() -> None:
    for devices in ([], ["placement.trainer=cuda"], ["placement.rollout=0"], ["placement.trainer=all"]):
        assert placed(1, "buffer.max_staleness=0", *devices) == Placement(
            ("cuda:0",), ("cuda:0",), None, "colocated"
        )


def test_one_cuda_device_above_that_is_refused_with_the_ways_out() -> None:
    error = refusal(1, "buffer.max_staleness=1")
    assert (
        "no CUDA device left for placement.rollout, the other side has cuda:0, and buffer.max_staleness=1 "
        "wants both" in str(error)
    )
    assert (
        error.way_out
        == "set buffer.max_staleness=0 (they take turns), or placement.rollout=cpu, or placement.trainer=cpu."
    )
    for way_out in ("buffer.max_staleness=0", "placement.rollout=cpu", "placement.trainer=cpu"):
        placed(1, "buffer.max_staleness=1", way_out)


def test_a_trainer_on_all_devices_leaves_none() -> None:
    error = refusal(2, "trainer.world_size=2")
    assert "trainer.world_size=1" in error.way_out
    placed(2, "trainer.world_size=1")
    shared = placed(2, "trainer.world_size=2", "rollout.num_engines=2", "buffer.max_staleness=0")
    assert shared == Placement(("cuda:0", "cuda:1"), ("cuda:0", "cuda:1"), None, "colocated")


def test_the_same_devices_on_both_sides_mean_turns_in_whatever_order_they_are_written() -> None:
    shared = placed(
        2,
        "placement.trainer=0-1",
        "placement.rollout=[1, 0]",
        "trainer.world_size=2",
        "rollout.num_engines=2",
        "buffer.max_staleness=0",
    )
    assert shared.mode == "colocated"
    assert shared.rollout == ("cuda:1", "cuda:0")
    assert (
        placed(1, "placement.trainer=all", "placement.rollout=0", "buffer.max_staleness=0").mode
        == "colocated"
    )


def test_turns_that_only_the_machine_shows_are_refused_above_max_staleness_0() -> None:
    error = refusal(1, "placement.trainer=all", "placement.rollout=0", "buffer.max_staleness=2")
    assert "buffer.max_staleness=2 could never be used" in str(error)
    error = refusal(
        2, "placement.trainer=all", "placement.rollout=0", "trainer.world_size=2", "buffer.max_staleness=0"
    )
    assert "share [0] and not the others" in str(error)


def test_a_rank_has_a_device_of_its_own_and_no_named_device_is_idle() -> None:
    error = refusal(4, "placement.trainer=0-3", "placement.rollout=cpu")
    assert "trainer.world_size=1 would leave 3 of them idle" in str(error)
    assert error.way_out == "set trainer.world_size=4, or name fewer: placement.trainer=[0]."
    error = refusal(4, "placement.trainer=[0]", "placement.rollout=cpu", "trainer.world_size=2")
    assert error.way_out == "set trainer.world_size=1, or name 2 devices, or cpu, in placement.trainer."
    assert placed(0, "trainer.world_size=2", "placement.trainer=cpu").trainer == ("cpu", "cpu")


def test_engines_are_dealt_over_their_devices_and_none_of_those_may_be_idle() -> None:
    assert placed(3, "placement.trainer=0", "placement.rollout=1-2", "rollout.num_engines=3").rollout == (
        "cuda:1",
        "cuda:2",
        "cuda:1",
    )
    error = refusal(3, "placement.trainer=0", "placement.rollout=1-2")
    assert error.way_out == "set rollout.num_engines=2, or name fewer: placement.rollout=[1]."
    error = refusal(
        2,
        "placement.trainer=all",
        "placement.rollout=trainer",
        "trainer.world_size=2",
        "buffer.max_staleness=0",
    )
    assert error.way_out == "set rollout.num_engines=2."


def test_a_device_that_is_not_there_is_refused() -> None:
    assert "names cuda:2" in str(refusal(2, "placement.trainer=2"))
    assert "this machine shows 2 CUDA devices" in refusal(2, "placement.rollout=[1, 7]").rule
    for devices in ("cuda", "all", "0", "[0, 1]"):
        assert "no CUDA device that torch could use" in str(refusal(0, f"placement.trainer={devices}"))


def test_simulated_engines_take_no_device() -> None:
    placement = placed(1, "rollout.engine=simulated", "rollout.num_engines=2", EVAL)
    assert placement == Placement(("cuda:0",), ("none", "none"), "none", "apart")


def test_adapters_alone_cannot_go_to_engines_that_sleep() -> None:
    lora = ["trainer.lora={rank: 2}", "weight_sync.transport=lora", "buffer.max_staleness=0"]
    assert placed(0, *lora).mode == "apart"
    assert "set weight_sync.transport=shm" in refusal(0, *lora, "placement.rollout=trainer").way_out


def test_the_eval_engine_takes_a_device_that_is_free_else_one_of_the_engines() -> None:
    assert placed(0, EVAL).evaluation == "cpu"
    assert placed(3, EVAL).evaluation == "cuda:2"
    assert placed(2, EVAL).evaluation == "cuda:1"
    crowded = placed(3, EVAL, "placement.rollout=1-2", "rollout.num_engines=3")
    assert crowded.evaluation == "cuda:2", "cuda:1 has two engines already"
    assert placed(2, EVAL, "placement.eval=cpu").evaluation == "cpu"
    assert placed(3, EVAL, "placement.eval=1").evaluation == "cuda:1"


def test_the_eval_engine_is_no_part_of_turns() -> None:
    turns = [EVAL, "buffer.max_staleness=0", "placement.rollout=trainer"]
    error = refusal(1, *turns)
    assert "puts the eval engine on cuda:0, where trainer and engines take turns" in str(error)
    assert "set placement.eval=cpu" in error.way_out
    assert placed(1, *turns, "placement.eval=cpu").evaluation == "cpu"
    assert placed(2, *turns).evaluation == "cuda:1"
    assert placed(0, *turns).evaluation == "cpu", "beside the turns: the CPU is not anybody's own"
    assert "where the trainer works" in str(refusal(2, EVAL, "placement.eval=0"))


def test_whatever_is_not_refused_keeps_the_rules() -> None:
    base, num_placed = load(), 0
    forms = ("auto", "cpu", "cuda", "all", 0, 1, "0-1", "trainer")
    for num_cuda, trainer, rollout, size, engines, bound in itertools.product(
        (0, 1, 2, 4), forms[:-1], forms, (1, 2), (1, 2), (0, 2)
    ):
        config = base.model_copy(
            update={
                "placement": PlacementConfig(trainer=trainer, rollout=rollout),
                "trainer": base.trainer.model_copy(update={"world_size": size}),
                "rollout": base.rollout.model_copy(update={"num_engines": engines}),
                "buffer": base.buffer.model_copy(update={"max_staleness": bound}),
            }
        )
        placement = place_or_none(config, num_cuda)
        if placement is None:
            continue
        num_placed += 1
        ranks, on_cuda = set(placement.trainer) - {"cpu"}, set(placement.rollout) - {"cpu"}
        assert len(placement.trainer) == size
        assert len(placement.rollout) == engines
        assert len(ranks) in (0, size), "two ranks share a device"
        assert all(int(device.removeprefix("cuda:")) < num_cuda for device in ranks | on_cuda)
        if placement.mode == "apart":
            assert not ranks & on_cuda
        else:
            assert bound == 0
            assert ranks == on_cuda
    assert num_placed > 200


def place_or_none(config: RunConfig, num_cuda: int) -> Placement | None:
    try:
        return place(config, num_cuda)
    except ConfigError:
        return None


# ---- which devices there are


SMI = "0, GPU-aaaa, 80000\n1, GPU-bbbb, 40000\n"


def driver(tmp_path: Path, num: int) -> Path:
    for number in range(num):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    return tmp_path


def found(tmp_path: Path, num: int, visible: str | None = None, smi: str = SMI) -> tuple[CudaDevice, ...]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_cuda_devices(
        driver_dir=driver(tmp_path, num), environ=environ, query=lambda: smi, is_built=lambda: True
    )


def test_the_driver_says_how_many_devices_there_are_and_nvidia_smi_what_they_have_free(
    tmp_path: Path,
) -> None:
    assert found(tmp_path, 2) == (CudaDevice("0", 80000 * 2**20), CudaDevice("1", 40000 * 2**20))


def test_without_nvidia_smi_the_free_memory_is_not_known(tmp_path: Path) -> None:
    assert found(tmp_path, 1, smi="") == (CudaDevice("0", None),)


def test_devices_are_counted_among_the_visible_ones(tmp_path: Path) -> None:
    assert found(tmp_path, 2, visible="1") == (CudaDevice("1", 40000 * 2**20),)
    assert [device.free_bytes for device in found(tmp_path / "..", 0, visible="GPU-bbbb,GPU-aaaa")] == [
        40000 * 2**20,
        80000 * 2**20,
    ]
    assert found(tmp_path / "..", 0, visible="") == ()


def test_the_first_name_that_is_no_device_hides_all_after_it() -> None:
    assert visible_names("1,-1,0", 2) == ("1",)
    assert visible_names("0,5,1", 2) == ("0",)
    assert visible_names("nonsense", 2) == ()
    assert visible_names(None, 2) == ("0", "1")
    assert visible_names("GPU-aaaa", 0) == ()


def test_a_torch_without_cuda_has_no_devices_whatever_the_driver_lists(tmp_path: Path) -> None:
    assert (
        find_cuda_devices(
            driver_dir=driver(tmp_path, 2), environ={}, query=lambda: SMI, is_built=lambda: False
        )
        == ()
    )


def test_the_installed_torch_is_asked_without_being_imported() -> None:
    import torch

    from asyncrl.placement.devices import torch_has_cuda

    assert torch_has_cuda() == (torch.version.cuda is not None)


def test_a_child_sees_its_devices_in_order_and_by_the_names_of_the_parent() -> None:
    cuda = (CudaDevice("3"), CudaDevice("GPU-bbbb"))
    assert child_environ(("cuda:1", "cuda:0"), cuda, {}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-bbbb,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert (
        child_environ(("cuda:0",), cuda, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})["CUDA_DEVICE_ORDER"]
        == "FASTEST_FIRST"
    )
    assert child_environ(("cpu",), (), {}).keys() == {"GLIBC_TUNABLES"}
    assert child_environ(("none",), cuda, {}) == {}
