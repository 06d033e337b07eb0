"""What tests of placement share: the quickstart with some settings, placed on a machine with so many CUDA
devices.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import RunConfig, load_config
from asyncrl.launch.devices import Placement, place
from asyncrl.launch.machine import CudaDevice, Machine

CONFIGS = Path(__file__).parent.parent / "configs"
EVAL = "eval={task: {python: 'asyncrl.tasks.toy:Letters'}, slots: 10, num_prompts: 5}"
OWN = "eval.engine=own"
TAUGHT = ["teacher.path=m", "algorithm.distill_weight=1"]
TURNS = ["placement.rollout=trainer", "buffer.max_staleness=0"]
VLLM = "rollout.engine=vllm"
SIZES = [
    *(f"model.scratch.architecture.{size}" for size in ("hidden_size=128", "intermediate_size=384")),
    *("model.scratch.architecture.num_hidden_layers=4", "algorithm.kl_coefficient=0"),
    *("rollout.slots=64", "rollout.group_size=8", "rollout.max_tokens=48"),
]
URLS = [VLLM, "model.scratch=none", "model.path=m", "rollout.urls=['http://127.0.0.1:8000']"]


def load(*overrides: str, name: str = "quickstart") -> RunConfig:
    """Without the file's placement; the quickstart has SIZES, which the numbers of the tests depend on."""
    anywhere = ["placement.trainer=auto", "placement.rollout=auto"]
    sizes = SIZES if name == "quickstart" else []
    return load_config(CONFIGS / f"{name}.yaml", [*anywhere, *sizes, *overrides])


def placed(num_cuda: int, *overrides: str) -> Placement:
    return place(load(*overrides), num_cuda)


def make_python(path: Path, exit_code: int = 0) -> Path:
    """A Python that says that it has vLLM, or, with another exit code, that it has not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return path


def machine(num_cuda: int, free_bytes: int | None = 2**34, *, has_bfloat16: bool = False) -> Machine:
    """With 8 cores, 64 GiB, and so many CUDA devices, of which nothing is in use."""
    cuda = tuple(CudaDevice(str(number), free_bytes, free_bytes) for number in range(num_cuda))
    return Machine(cuda, cores=8, memory=2**36, has_bfloat16=has_bfloat16)
