"""vLLM in a plan: its devices, its Python, its memory, and the ways of the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from placement_cases import EVAL, Cases

from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement import choices as interpreters
from asyncrl.placement.choices import ChunkWay, chunk_way, find_vllm_python, import_folder
from asyncrl.placement.devices import NO_DEVICE, CudaDevice, Placement, child_environ, place
from asyncrl.placement.plan import Plan, make_plan, plan_text, transport_text
from asyncrl.placement.processes import ForeignProcess
from asyncrl.placement.staging import clear_own_staging, clear_stale_staging, disk_root, new_staging_dir

CASES = Cases(["rollout.engine=vllm", "placement.trainer=auto", "placement.rollout=auto"])
load, placed, refusal = CASES.load, CASES.placed, CASES.refusal
ON_PATH = ["model.scratch=none", "model.path=some/model"]
TURNS = ["placement.rollout=trainer", "buffer.max_staleness=0"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that says that it has vLLM."""
    path = tmp_path / "vllm" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return path


def planned(python: Path, num_cuda: int, *overrides: str) -> tuple[Plan, RunConfig]:
    config = load(f"rollout.vllm_python={python}", *overrides)
    return make_plan(config, [CudaDevice(str(number), 2**34) for number in range(num_cuda)]), config


# ---- devices


def test_an_engine_that_is_split_has_devices_of_its_own_and_the_next_one_the_next() -> None:
    placement = placed(5, "rollout.tensor_parallel=2", "rollout.num_engines=2")
    assert placement.rollout == ("cuda:1", "cuda:3")
    assert [placement.devices_of(index) for index in range(2)] == [("cuda:1", "cuda:2"), ("cuda:3", "cuda:4")]
    assert placed(2).devices_of(0) == ("cuda:1",)


def test_auto_leaves_a_device_that_no_whole_engine_fits_on() -> None:
    assert placed(4, "rollout.tensor_parallel=2", "rollout.num_engines=2").parallel == (
        ("cuda:1", "cuda:2"),
        ("cuda:1", "cuda:2"),
    )


def test_devices_that_cannot_be_split_so_are_refused() -> None:
    error = refusal(4, "rollout.tensor_parallel=2", "placement.rollout=[1, 2, 3]")
    assert "is 3 CUDA devices, and rollout.tensor_parallel=2" in error.what
    error = refusal(8, "rollout.tensor_parallel=2", "placement.rollout=[2, 3, 4, 5]")
    assert "set rollout.num_engines=2, or name fewer: placement.rollout=[2, 3]" in error.way_out


def test_on_the_cpu_an_engine_is_not_split() -> None:
    assert "it works with rollout.threads" in refusal(0, "rollout.tensor_parallel=2").rule


def test_a_vllm_on_the_cpu_takes_no_turns_because_it_gives_nothing_away() -> None:
    error = refusal(0, *TURNS)
    assert "vLLM frees nothing on the CPU when it is told to sleep" in error.rule
    assert "placement.rollout=cpu" in error.way_out
    assert placed(0, "buffer.max_staleness=0").mode == "apart", "side by side, it needs no sleep"
    assert placed(1, *TURNS).mode == "colocated"


def test_nccl_needs_two_devices_and_ipc_one() -> None:
    assert placed(0, "weight_sync.transport=nccl").mode == "apart", "on the CPU it is gloo"
    assert (
        "of trainer and engines the rollout alone is on the CPU"
        in refusal(1, "weight_sync.transport=nccl", "placement.rollout=cpu").what
    )
    assert "work apart on cpu (placement.trainer=auto" in refusal(0, "weight_sync.transport=ipc").what
    assert (
        "NCCL cannot connect two processes on one device"
        in refusal(1, "weight_sync.transport=nccl", *TURNS).rule
    )
    assert "names memory of one CUDA device" in refusal(2, "weight_sync.transport=ipc").rule
    assert placed(2, "weight_sync.transport=nccl").mode == "apart"
    assert placed(1, "weight_sync.transport=ipc", *TURNS).mode == "colocated"


def test_servers_of_somebody_else_take_no_device_from_anybody() -> None:
    urls = [
        *ON_PATH,
        "rollout.urls=['http://127.0.0.1:8000', 'http://127.0.0.1:8001']",
        "rollout.num_engines=2",
    ]
    assert placed(1, *urls) == Placement(("cuda:0",), (NO_DEVICE, NO_DEVICE), None, "apart")
    assert placed(0, *urls, EVAL).evaluation == "cpu"
    assert placed(2, *urls, EVAL).evaluation == "cuda:1", "the eval engine is ours"


# ---- plan


def test_the_plan_names_the_python_of_each_process_and_counts_no_second_set_of_weights(python: Path) -> None:
    plan, config = planned(python, 0, "rollout.num_engines=2", "weight_sync.rolling=true", EVAL)
    engines = [process for process in plan.processes if process.side in ("engine", "eval")]
    assert [engine.name for engine in engines if engine.has_vllm_python] == [
        "engine-0",
        "engine-1",
        "engine-eval",
    ]
    assert {engine.memory.copies for engine in engines if engine.memory} == {0}, (
        "vLLM reads what is staged where it lies"
    )
    text = plan_text(plan, config)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["process"][:3] == ["process", "python", "device"]
    assert (rows["trainer-0"][1], rows["engine-0"][1], rows["staging"][1]) == ("ours", "vllm", "-")
    assert f"vLLM's is {python}" in text
    assert "canary: within 0.001 nats in float32, 0.25 in bfloat16" in text
    assert "one engine after the other" in text


def test_the_kv_cache_of_vllm_on_the_cpu_has_whole_blocks_and_a_floor(python: Path) -> None:
    def kv(*overrides: str) -> int:
        plan, _ = planned(python, 0, *overrides)
        (engine,) = [process for process in plan.processes if process.side == "engine"]
        assert engine.memory is not None
        return engine.memory.kv

    token_bytes = 2 * 4 * 2 * 32 * 4
    assert kv("rollout.slots=1") == 2**26
    assert kv("rollout.slots=1000", "rollout.max_tokens=140") == (2 * 1000 + 1) * 128 * token_bytes


def test_an_engine_that_is_split_has_a_line_a_device(python: Path) -> None:
    plan, config = planned(python, 3, "rollout.tensor_parallel=2")
    parts = [process for process in plan.processes if process.side == "engine"]
    assert [(part.name, part.device) for part in parts] == [("engine-0", "cuda:1"), ("engine-0/1", "cuda:2")]
    assert "1 / 2 of vLLM, KV cache of 64 x 56 tokens at least" in plan_text(plan, config)


def test_a_plan_with_servers_of_somebody_else_needs_no_vllm_here_but_for_the_evaluation(python: Path) -> None:
    urls = [*ON_PATH, "rollout.urls=['http://127.0.0.1:8000']"]
    config = load(*urls, "rollout.vllm_python=/no/such/python")
    plan = make_plan(config, [])
    assert plan.vllm_python is None
    assert "somebody else's, at http://127.0.0.1:8000" in plan_text(plan, config)
    assert "engines elsewhere" in plan_text(plan, config)
    with pytest.raises(ConfigError, match="is no program"):
        make_plan(load(*urls, "rollout.vllm_python=/no/such/python", EVAL), [])
    assert planned(python, 0, *urls, EVAL)[0].vllm_python == python


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "says"),
    [
        (
            0,
            ["weight_sync.transport=disk", "weight_sync.disk_dir=/data"],
            "as one file in /data, because engines on other machines can read it",
        ),
        (
            0,
            ["weight_sync.canary_limit=none"],
            "each push: the digest of what was loaded; running requests: abort; all engines at once",
        ),
    ],
)
def test_the_plan_says_how_weights_travel(
    python: Path, num_cuda: int, overrides: list[str], says: str
) -> None:
    plan, config = planned(python, num_cuda, *overrides)
    assert says in plan_text(plan, config)


def test_transports_from_device_to_device_have_words(python: Path) -> None:
    nccl, ipc = load("weight_sync.transport=nccl"), load("weight_sync.transport=ipc", *TURNS)
    assert "all weights go by NCCL, in one broadcast" in transport_text(nccl, place(nccl, 2))
    assert "all weights go by gloo, in one broadcast" in transport_text(nccl, place(nccl, 0))
    assert "weights go by CUDA IPC in chunks" in transport_text(ipc, place(ipc, 1))
    assert chunk_way(ipc, place(ipc, 1)).place == "memory"
    assert chunk_way(load(*TURNS), place(load(*TURNS), 1)).place == "file"
    for overrides, num_cuda in (
        (["weight_sync.transport=nccl"], 2),
        (["weight_sync.transport=ipc", *TURNS], 1),
    ):
        planned(python, num_cuda, *overrides)


# ---- its Python


def test_a_python_that_is_named_must_be_there_and_have_vllm(python: Path) -> None:
    assert find_vllm_python(RolloutConfig(engine="vllm", vllm_python=str(python))) == python
    with pytest.raises(ConfigError, match="is no program"):
        find_vllm_python(RolloutConfig(engine="vllm", vllm_python=str(python.parent)))
    python.write_text("#!/bin/sh\nexit 1\n")
    interpreters._has_vllm.cache_clear()
    with pytest.raises(ConfigError, match="cannot import vllm") as caught:
        find_vllm_python(RolloutConfig(engine="vllm", vllm_python=str(python)))
    assert "make setup-vllm" in caught.value.way_out


def test_auto_takes_the_one_beside_the_checkout_or_the_folder_of_the_setup(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("VENV_VLLM", raising=False)
    auto = RolloutConfig(engine="vllm")
    with pytest.raises(ConfigError, match="neither .* nor .*can import vllm") as caught:
        find_vllm_python(auto, checkout=tmp_path)
    assert (
        "pip install -e '.[vllm]' in the folder of asyncrl's checkout (CUDA), or `make setup-vllm` there "
        "(CPU)" in caught.value.way_out
    )
    (tmp_path / ".venv-vllm").symlink_to(python.parent.parent)
    assert find_vllm_python(auto, checkout=tmp_path) == tmp_path / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv("VENV_VLLM", str(python.parent.parent))
    assert find_vllm_python(auto, checkout=tmp_path / "elsewhere") == python


def test_another_python_finds_our_two_packages_and_nothing_else_of_ours(tmp_path: Path) -> None:
    folder = import_folder(tmp_path / "imports")
    assert sorted(path.name for path in folder.iterdir()) == ["asyncrl", "asyncrl_servers"]
    ask = "import asyncrl, asyncrl_servers, sys; print(asyncrl.__file__)"
    bare = [getattr(sys, "_base_executable", sys.executable), "-S", "-c", ask]
    told = subprocess.run(
        bare,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(told.stdout.strip()).is_relative_to(folder)
    assert import_folder(folder) == folder, "again, as in a run that goes on"


# ---- a disk as staging


def test_weights_on_a_disk_lie_in_a_folder_that_carries_host_and_owner_and_goes_with_them(
    tmp_path: Path,
) -> None:
    config = load("weight_sync.transport=disk", f"weight_sync.disk_dir={tmp_path / 'weights'}")
    root = disk_root(config.weight_sync)
    assert root == tmp_path / "weights"
    assert disk_root(load().weight_sync) is None
    mine, other = new_staging_dir(root), root / "asyncrl-another_host-1-abcdef01"
    dead = root / mine.name.replace(str(os.getpid()), "999999999")
    for folder in (other, dead):
        folder.mkdir()
        (folder / "lock").touch()
    assert clear_stale_staging(root) == [dead], "what another machine's run has is not ours to judge"
    clear_own_staging()
    assert list(root.iterdir()) == [other]


def test_a_disk_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load("weight_sync.transport=disk", f"weight_sync.disk_dir={tmp_path / 'file' / 'weights'}")
    with pytest.raises(ConfigError, match="weight_sync.disk_dir=.* cannot be made"):
        disk_root(config.weight_sync)


# ---- servers of somebody else


def test_a_server_of_somebody_else_is_never_ended_and_is_the_same_after_a_loss() -> None:
    server = ForeignProcess("engine-0", "http://127.0.0.1:8000/")
    server.kill_nowait()
    server.note_death()
    assert (server.pid, server.returncode, server.died) == (None, None, None)
    assert server.renewed() is server
    assert server.url == "http://127.0.0.1:8000"
    assert "http://127.0.0.1:8000" in server.log_path


# ---- chunks in turns, and what processes are started with


def way(num_cuda: int, **keys: Any) -> ChunkWay:
    values = {
        "model": {"path": "m"},
        "task": {"python": "m:T"},
        "buffer": {"max_staleness": 0},
        "rollout": {},
    }
    config = RunConfig.model_validate(values | keys)
    return chunk_way(config, place(config, num_cuda))


def test_memory_is_shared_where_engines_can_open_it_and_else_there_is_a_file() -> None:
    shared = {"rollout": "trainer"}
    on_cpu = way(0, placement={"trainer": "cpu", **shared})
    assert (on_cpu.place, on_cpu.device, on_cpu.how) == ("memory", "cpu", "through shared memory")
    on_one = way(1, placement={"trainer": "cuda", **shared})
    assert (on_one.place, on_one.device, on_one.how) == ("memory", "cuda:0", "by CUDA IPC")
    assert "NCCL cannot connect" in on_one.why
    two_engines = way(1, placement={"trainer": "cuda", **shared}, rollout={"num_engines": 2})
    assert two_engines.place == "memory", "both are on the one device"
    on_two = way(
        2, placement={"trainer": "all", **shared}, trainer={"world_size": 2}, rollout={"num_engines": 2}
    )
    assert (on_two.place, on_two.device) == ("file", "cpu")
    assert "rank 0 gathers them on cuda:0" in on_two.why
    assert way(0, placement={"trainer": "cpu", **shared}, rollout={"engine": "simulated"}).place == "file"
    assert way(0, placement={"trainer": "cpu", "rollout": "cpu"}).place == "file"


def test_processes_on_the_cpu_are_started_with_large_pages_unless_somebody_said_otherwise() -> None:
    name = "GLIBC_TUNABLES"
    assert child_environ(["cpu"], (), {}) == {name: "glibc.malloc.hugetlb=1"}
    assert child_environ(["cpu"], (), {name: "glibc.malloc.check=3"}) == {
        name: "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    }
    assert child_environ(["cpu"], (), {name: "glibc.malloc.hugetlb=0"}) == {}
    assert child_environ(["none"], (), {}) == {}
