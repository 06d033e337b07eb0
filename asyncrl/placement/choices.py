"""Which Python runs vLLM's servers, and how it finds our packages without the rest of ours. Starts none but
to ask it a question.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import asyncrl
from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.errors import ConfigError, install_extra
from asyncrl.placement.devices import NO_DEVICE, CudaDevice, Placement, find_cuda_devices, place

# Where the trainer puts chunks of weights for engines that it takes turns with, and why.


NO_NCCL = "NCCL cannot connect two processes on one device"


@dataclass(frozen=True, slots=True)
class ChunkWay:
    """`place` is TrainerSpec.chunks; `device`: whose memory a chunk takes; `how` and `why` in words."""

    place: Literal["memory", "file"]
    device: str
    how: str
    why: str


def chunk_way(config: RunConfig, placement: Placement) -> ChunkWay:
    """Memory that both sides have open, where engines can open it, else a file. Apart nobody asks for
    chunks.
    """
    is_shared = config.rollout.engine == "embedded" or config.weight_sync.way.shares_device
    if placement.mode == "apart" or not is_shared:
        why = (
            f"a {config.rollout.engine} engine reads files"
            if config.rollout.engine != "embedded"
            else "engines read whole files"
        )
        return ChunkWay(
            "file", "cpu", "through shared memory", f"{NO_NCCL}, and {why}" if placement.is_on_cuda else why
        )
    if not placement.is_on_cuda:
        return ChunkWay("memory", "cpu", "through shared memory", "both sides have it mapped")
    devices = dict.fromkeys((*placement.trainer, *placement.rollout))
    if len(devices) > 1:
        why = (
            f"rank 0 gathers them on {placement.trainer[0]}, and an engine sees its own of the "
            f"{len(devices)} devices alone"
        )
        return ChunkWay("file", "cpu", "through shared memory", why)
    return ChunkWay(
        "memory", placement.trainer[0], "by CUDA IPC", f"both sides are on {placement.shared} ({NO_NCCL})"
    )


# What `model.dtype: auto` is on this machine, and what bfloat16 costs on a CPU that has no instructions for
# it. Knows no torch.


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of /proc/cpuinfo, where a CPU multiplies in bfloat16; the last one is ARM's."""
NAMES = "avx512_bf16, amx_bf16"
COST = "8.6 times the time of a float32 step, measured with SmolLM2 135M"


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for bfloat16; one that does not say has none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next(
        (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), []
    )
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def settle_dtype(
    config: RunConfig,
    *,
    begun: str | None = None,
    cuda: Sequence[CudaDevice] | None = None,
    has_bfloat16: bool | None = None,
) -> tuple[RunConfig, str]:
    """The config with a type in place of `model.dtype: auto`, one for trainer and engines, and what to tell
    people ("" = nothing).

    `begun`: that of the run that is gone on with, which auto then is. `cuda`, `has_bfloat16`: what the
    machine has, else it is asked. Raises ConfigError for a placement that cannot be.
    """
    placement = place(config, len(find_cuda_devices() if cuda is None else cuda))
    engines = {device for index in range(len(placement.rollout)) for device in placement.devices_of(index)}
    is_on_cpu = "cpu" in {*placement.trainer, *engines} - {NO_DEVICE}
    is_slow = is_on_cpu and not (cpu_has_bfloat16() if has_bfloat16 is None else has_bfloat16)
    given = config.model.dtype
    if given != "auto":
        if given == "float32" or not is_slow:
            return config, ""
        return config, (
            f"model.dtype: {given}, and this CPU has no instructions for it ({NAMES}): {COST}; "
            f"model.dtype=float32 (or auto) is faster here"
        )
    if begun is not None and begun != "auto":
        dtype, why = begun, "as the run began"
    elif is_slow:
        dtype, why = "float32", f"this CPU has no bfloat16 instructions ({NAMES})"
    else:
        dtype, why = (
            "bfloat16",
            "this CPU has instructions for it" if is_on_cpu else "trainer and engines are on CUDA",
        )
    return config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": dtype})}
    ), f"model.dtype: auto is {dtype}: {why}"


CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
VENV_ENV = "VENV_VLLM"
"""Environment variable that `make setup-vllm` takes its folder from."""
VENV_NAME = ".venv-vllm"
ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
ASK_TIMEOUT_S = 30.0
PACKAGES = ("asyncrl", "asyncrl_servers")
INSTALL = f"{install_extra('vllm')} (CUDA), or `make setup-vllm` there (CPU)"


def find_vllm_python(
    rollout: RolloutConfig, *, checkout: Path = CHECKOUT, has_vllm: Callable[[Path], bool] | None = None
) -> Path:
    """rollout.vllm_python, else this Python, else the one of `make setup-vllm`. Raises ConfigError if it has
    no vLLM.
    """
    has = has_vllm or _has_vllm
    if rollout.vllm_python != "auto":
        given = Path(rollout.vllm_python).expanduser()
        found = given if given.is_file() else Path(shutil.which(rollout.vllm_python) or "")
        if not (found.is_file() and os.access(found, os.X_OK)):
            raise ConfigError(
                f"rollout.vllm_python={rollout.vllm_python} is no program",
                rule="it is the Python that vLLM is installed in",
                way_out=f"give the path of its bin/python, or auto after {INSTALL}.",
            )
        if not has(found):
            raise ConfigError(
                f"rollout.vllm_python={rollout.vllm_python} cannot import vllm",
                rule="it is the Python that vLLM is installed in",
                way_out=f"install vLLM there, or set rollout.vllm_python=auto after {INSTALL}.",
            )
        return (
            found.absolute()
        )  # not resolved: a venv's python is a link to one that does not have its packages
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    own = Path(os.environ.get(VENV_ENV) or checkout / VENV_NAME) / "bin" / "python"
    if own.is_file() and has(own):
        return own.absolute()
    raise ConfigError(
        f"rollout.engine=vllm, and neither {sys.executable} nor {own} can import vllm",
        rule="vLLM runs in a process of its own, under a Python that it is installed in",
        way_out=f"{INSTALL}; or name the Python that has it: rollout.vllm_python=/path/to/bin/python.",
    )


def import_folder(folder: Path) -> Path:
    """`folder` with links to our two packages and nothing else, for PYTHONPATH: another Python must not see
    our site-packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"the package {name} is not installed", way_out="install asyncrl again.")
        link, target = folder / name, Path(next(iter(spec.submodule_search_locations))).resolve()
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)  # of an installation that has moved since
        link.symlink_to(target, target_is_directory=True)
    return folder


@functools.cache
def _has_vllm(python: Path) -> bool:
    """Asks that Python where vllm is, without importing it, which would take seconds."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        asked = subprocess.run(
            [str(python), "-c", ASK], env=environ, capture_output=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
