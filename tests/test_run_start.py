"""Specs, devices and readiness of the processes of a run. Starts none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from launch_cases import NO_TOKENS, make_python, single_node
from needed_extensions import skip_without
from rollout_cases import virtual

from asyncrl.config import RunConfig, load_config
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.kinds import ENGINE, engine_role
from asyncrl.job.colocate import Disaggregated
from asyncrl.job.roles import EVAL_ENGINE, extra_servers
from asyncrl.job.servers import ServerFactory
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.machine import CudaDevice, Machine, Node
from asyncrl.launch.placement import NodeDevice, place
from asyncrl.launch.processes import ChildProcess, Process
from asyncrl.messages.engine_api import AdapterSpec
from asyncrl_servers.vllm.arguments import VllmSpec

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
VLLM = "rollout.engine=vllm"


def load(*overrides: str) -> RunConfig:
    skip_without(*overrides)
    sizes = ("rollout.slots=64", "rollout.max_tokens=48")
    return load_config(QUICKSTART, ("weight_sync.transport=shm", *sizes, *overrides))


def maker(
    folder: Path, *overrides: str, cuda: tuple[CudaDevice, ...] = ()
) -> ServerFactory:
    config = load(*overrides)
    nodes = single_node(Machine(cuda, 8, 2**34, has_bfloat16=False))
    placement = place(config, nodes, extra_servers(config))
    launcher = LocalLauncher()
    launcher.nodes = nodes
    return ServerFactory(
        config, placement, folder / "model", NO_TOKENS, folder, launcher
    )


def test_vllm_spec_holds_adapters_offload_and_devices() -> None:
    def spec(*overrides: str, role: str = ENGINE, mode: str = "apart") -> VllmSpec:
        nodes = single_node(Machine((), 8, 2**34, has_bfloat16=False))
        placement: Any = SimpleNamespace(
            moves=mode == "colocated", resident=False, nodes=nodes
        )
        folder = Path("/model")
        factory = ServerFactory(
            load(VLLM, *overrides),
            placement,
            folder,
            NO_TOKENS,
            folder,
            LocalLauncher(),
        )
        config = factory.config
        described = extra_servers(config).get(role, engine_role(config))
        order = factory.order(described, "engine-0", NodeDevice(0, "cuda:0"))
        return VllmSpec.model_validate(described.maker.spec(order))

    lora = spec("trainer.lora={rank: 24, alpha: 12}")
    assert lora.adapters == AdapterSpec(rank=24, scale=0.5, targets="all-linear")
    assert lora.device == "cuda"
    assert spec(mode="colocated").args == {"enable_sleep_mode": True}
    own = spec("rollout.vllm={enable-sleep-mode: false}", mode="colocated")
    assert own.args == {"enable-sleep-mode": False}, "unless the user says otherwise"
    split = [
        "rollout.tensor_parallel=2",
        "eval.task.python=asyncrl.tasks.toy:Letters",
        "eval.slots=7",
    ]
    assert (spec(*split).slots, spec(*split).tensor_parallel) == (64, 2)
    held_out = spec(*split, role=EVAL_ENGINE)
    assert (held_out.slots, held_out.tensor_parallel) == (7, 1)


@pytest.mark.parametrize("num_cuda", [0, 3])
def test_process_sees_only_its_devices(tmp_path: Path, num_cuda: int) -> None:
    devices = (CudaDevice("4"), CudaDevice("GPU-b"), CudaDevice("GPU-c"))[:num_cuda]
    anywhere = [
        "placement.trainer=auto",
        "placement.rollout=auto",
        "trainer.world_size=2",
    ]
    launch = maker(tmp_path, *anywhere, cuda=devices)
    servers = [
        *launch.trainers(tmp_path / "staging"),
        *(engine.server for engine in launch.engines()),
    ]
    for server, names in zip(servers, ["4,GPU-b", "4,GPU-b", "GPU-c"], strict=True):
        assert isinstance(server.child, ChildProcess)
        assert json.loads(server.child.spec.spec)["device"] == (
            "cuda" if num_cuda else "cpu"
        )
        assert server.child._environ.get("CUDA_VISIBLE_DEVICES") == (
            names if num_cuda else None
        )


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_processes_share_a_device(tmp_path: Path, kind: str, staleness: int) -> None:
    cuda = (CudaDevice("0", None, 80 * 2**30),)
    python = make_python(tmp_path / "python")
    settings = [
        "placement.trainer=0",
        "placement.rollout=0",
        "placement.share=0.4",
        "rollout.num_engines=2",
    ]
    settings += [f"rollout.engine={kind}", f"buffer.max_staleness={staleness}"]
    settings += [f"rollout.vllm_python={python}"] if kind == "vllm" else []
    launch, own = maker(tmp_path, *settings, cuda=cuda), 0.5 / 80
    (trainer,) = launch.trainers(tmp_path / "staging")
    engines = [engine.server for engine in launch.engines()]
    specs = [json.loads(server.child.spec.spec) for server in (trainer, *engines)]  # type: ignore[union-attr]
    assert specs[0]["share"] == pytest.approx(0.6 - own)
    for spec in specs[1:]:
        if kind == "vllm":
            assert spec["args"] == {"gpu_memory_utilization": pytest.approx(0.2)}, (
                "it has no need to sleep"
            )
        else:
            assert spec["share"] == pytest.approx(0.2 - own)
            assert spec.get("stays", False) == (staleness == 0)


TWO_NODES = (
    "launcher=ray",
    "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}",
    "trainer.world_size=4",
    "rollout.num_engines=2",
    "weight_sync.transport=stream",
)


def test_nodes_hold_parts_and_ranks_know_their_store(tmp_path: Path) -> None:
    machine = Machine((), 8, 2**34, has_bfloat16=False)
    nodes = tuple(
        Node(f"n{number}", f"10.0.0.{number}", machine) for number in range(2)
    )
    config = load(*TWO_NODES)
    launcher: Any = SimpleNamespace(
        nodes=nodes, hold=AsyncMock(), free_port=AsyncMock(return_value=4000)
    )
    launcher.process = lambda node, spec: SimpleNamespace(
        name=spec.name, node=node, spec=spec
    )
    made = ServerFactory(
        config, place(config, nodes), tmp_path, NO_TOKENS, tmp_path, launcher
    )
    for name in ("config.json", "run.id"):
        (tmp_path / name).write_text(name)
    asyncio.run(made.hold(tmp_path / "staging"))
    held, files = launcher.hold.await_args.args
    assert held == {0: ["cpu"] * 3, 1: ["cpu"] * 3}
    read = {str(tmp_path / name): name for name in ("config.json", "run.id")}
    assert files == read
    assert made.rank_store == "10.0.0.0:4000"
    ranks: Any = [server.child for server in made.trainers(tmp_path / "staging")]
    specs = [json.loads(rank.spec.spec) for rank in ranks]
    assert [rank.node for rank in ranks] == [0, 0, 1, 1]
    assert [spec["local_rank"] for spec in specs] == [0, 1, 0, 1]
    assert [spec["address"] for spec in specs] == ["10.0.0.0"] * 2 + ["10.0.0.1"] * 2
    assert {spec["store"] for spec in specs} == {"10.0.0.0:4000"}
    engines: Any = [engine.server.child for engine in made.engines()]
    assert [engine.node for engine in engines] == [0, 1]


@virtual
async def test_rollout_urls_use_the_environment_key_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_VLLM_KEY", "their key")
    urls = [
        "model.scratch=none",
        "model.path=some/model",
        "rollout.urls=['http://127.0.0.1:8000']",
    ]
    (made,) = maker(tmp_path, VLLM, *urls).engines()
    engine = made.server
    assert type(engine.child) is Process
    assert engine.caller.secret == "their key"
    engine.ready = AsyncMock()
    await engine.come_up()
    await engine.end()
    await engine.come_up()
    assert engine.caller.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("are_ours", [True, False])
@virtual
async def test_unknown_weights_are_replaced_before_sampling(are_ours: bool) -> None:
    fake, trainer, served = (
        FakeEngineServer(weights="not known"),
        FakeTrainer(),
        list[int](),
    )
    fake.engine.weights.version = -1
    targets = [EngineServer(fake)]
    async with asyncio.TaskGroup() as tasks:
        await Disaggregated(
            trainer,
            targets,
            timeout_s=60,
            on_lost=print,
            on_served=served.append,
            num_steps=3,
            spawn=tasks.create_task,
            are_ours=are_ours,
        ).start(0)
        assert fake.weights == ("not known" if are_ours else "w0")
        assert served == ([] if are_ours else [0])
        trainer.step()
        await asyncio.sleep(10.0)
        assert served[-1] == 1
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
