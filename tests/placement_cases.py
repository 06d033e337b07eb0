"""What tests of placement share: the quickstart with some settings, placed on a machine with so many CUDA
devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import CudaDevice, Placement, place

CONFIGS = Path(__file__).parent.parent / "configs"
EVAL = "eval={task: {python: 'asyncrl.tasks.letters:Letters'}, slots: 10, num_prompts: 5}"
TURNS = ["placement.rollout=trainer", "buffer.max_staleness=0"]
VLLM = "rollout.engine=vllm"
URLS = [VLLM, "model.scratch=none", "model.path=m", "rollout.urls=['http://127.0.0.1:8000']"]


def load(*overrides: str, name: str = "quickstart") -> RunConfig:
    """Placed on its own, and not where the file says."""
    return load_config(
        CONFIGS / f"{name}.yaml", ["placement.trainer=auto", "placement.rollout=auto", *overrides]
    )


def placed(num_cuda: int, *overrides: str) -> Placement:
    return place(load(*overrides), num_cuda)


def refusal(num_cuda: int, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        placed(num_cuda, *overrides)
    return caught.value


def cuda_devices(num: int, free_bytes: int | None = 2**34) -> list[CudaDevice]:
    return [CudaDevice(str(number), free_bytes) for number in range(num)]
