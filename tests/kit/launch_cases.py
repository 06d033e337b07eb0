"""Placements for tests: the quickstart with some settings, on nodes with so many CUDA
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from needed_extensions import skip_without

from asyncrl.config import RunConfig, load_config
from asyncrl.job.roles import extra_servers
from asyncrl.launch.machine import LOOPBACK, CudaDevice, Machine, Node, this_machine
from asyncrl.launch.placement import Placement, place

CONFIGS = Path(__file__).parents[2] / "configs"
EVAL = "eval={task: {python: 'asyncrl.tasks.toy:Letters'}, slots: 10, num_prompts: 5}"
OWN = "eval.engine=own"
RAY = "launcher=ray"
TAUGHT = ["teacher.path=m", "algorithm.distill_weight=1"]
COLOCATED = ["placement.rollout=trainer", "buffer.max_staleness=0"]
VLLM = "rollout.engine=vllm"
ZERO = "buffer.max_staleness=0"
SIZES = [
    *(
        f"model.scratch.architecture.{size}"
        for size in ("hidden_size=128", "intermediate_size=384")
    ),
    "model.scratch.architecture.num_hidden_layers=4",
    "algorithm.kl_coefficient=0",
    "rollout.slots=64",
    "rollout.group_size=8",
    "rollout.max_tokens=48",
]
NO_TOKENS: Any = SimpleNamespace(
    special_ids=frozenset(), end_ids=frozenset(), decode=str
)
"""A tokenizer for servers that are not started."""
URLS = [
    VLLM,
    "model.scratch=none",
    "model.path=m",
    "rollout.urls=['http://127.0.0.1:8000']",
]


def single_node(machine: Machine | None = None) -> tuple[Node, ...]:
    """None: this machine."""
    return (Node("this machine", LOOPBACK, machine or this_machine()),)


def load(*overrides: str, name: str = "quickstart") -> RunConfig:
    """Load a config without its placement; the quickstart has SIZES, which the numbers
    of the tests need.
    """
    anywhere = ["placement.trainer=auto", "placement.rollout=auto"]
    skip_without(*overrides)
    sizes = SIZES if name == "quickstart" else []
    return load_config(CONFIGS / f"{name}.yaml", [*anywhere, *sizes, *overrides])


def machine(
    num_cuda: int, free_bytes: int | None = 2**34, *, has_bfloat16: bool = False
) -> Machine:
    """Return a machine with 8 cores, 64 GiB, and idle CUDA devices."""
    cuda = tuple(
        CudaDevice(str(number), free_bytes, free_bytes) for number in range(num_cuda)
    )
    return Machine(cuda, cores=8, memory=2**36, has_bfloat16=has_bfloat16)


def nodes(*num_cuda: int) -> tuple[Node, ...]:
    """Return nodes elsewhere: this machine is not asked for vLLM."""
    there = [replace(machine(num), is_here=False) for num in num_cuda]
    return tuple(Node(f"n{at}", f"10.0.0.{at}", one) for at, one in enumerate(there))


def placed(num_cuda: int | Sequence[int], *overrides: str) -> Placement:
    each = (num_cuda,) if isinstance(num_cuda, int) else num_cuda
    launcher = [RAY] if len(each) > 1 else []
    config = load(*launcher, *overrides)
    return place(config, nodes(*each), extra_servers(config))


def make_python(path: Path, exit_code: int = 0) -> Path:
    """Make a Python that has vLLM, or, with another exit code, that has not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return path
