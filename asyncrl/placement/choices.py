"""Choices made before a run starts: the type of its weights, the Python of vLLM's servers, and where chunks
of weights lie.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import asyncrl
from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.errors import ConfigError, install_extra
from asyncrl.placement.devices import Placement, find_cuda_devices, place


def chunk_device(config: RunConfig, placement: Placement) -> str | None:
    """The device whose memory holds the chunks that trainer and engines both open; None: chunks are files."""
    is_shared = config.rollout.engine == "embedded" or config.weight_sync.way.shares_device
    if placement.mode == "apart" or not is_shared:
        return None
    # rank 0 gathers them on its device, and an engine sees its own devices alone
    devices = {*placement.trainer, *placement.rollout}
    return placement.trainer[0] if len(devices) == 1 else None


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of /proc/cpuinfo, where a CPU multiplies in bfloat16; the last one is ARM's."""
CPUINFO = Path("/proc/cpuinfo")


def cpu_has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; False if it does not list its instructions."""
    if not CPUINFO.is_file():
        return False
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.partition(":")[2].split())


def settle_dtype(config: RunConfig, *, begun: str | None = None) -> tuple[RunConfig, str]:
    """The config with a type in place of `model.dtype: auto`, and what to tell people ("" = nothing).

    `begun`: the type of the resumed run, which auto then stands for. Raises ConfigError for a placement that
    cannot be.
    """
    placement = place(config, len(find_cuda_devices()))
    is_on_cpu = "cpu" in (*placement.trainer, *placement.engine_devices)
    is_slow = is_on_cpu and not cpu_has_bfloat16()
    given = config.model.dtype
    if given != "auto":
        slow = (
            f"model.dtype: {given}, and this CPU has no instructions for it: 8.6 times the time of a float32 "
            "step, measured with SmolLM2 135M; model.dtype=float32 (or auto) is faster here"
        )
        return config, slow if is_slow and given != "float32" else ""
    if begun not in (None, "auto"):
        dtype, why = begun, "as the run began"
    elif is_slow:
        dtype, why = "float32", "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16)"
    else:
        dtype = "bfloat16"
        why = "this CPU has instructions for it" if is_on_cpu else "trainer and engines are on CUDA"
    model = config.model.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"model": model}), f"model.dtype: auto is {dtype}: {why}"


CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
VENV_ENV, VENV_NAME = "VENV_VLLM", ".venv-vllm"
"""Environment variable that `make setup-vllm` takes its folder from, and that folder otherwise."""
ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
ASK_TIMEOUT_S = 30.0
PACKAGES = ("asyncrl", "asyncrl_servers")


def find_vllm_python(rollout: RolloutConfig) -> Path:
    """rollout.vllm_python, else this Python, else the one of `make setup-vllm`. Raises ConfigError if it has
    no vLLM.
    """
    install = f"{install_extra('vllm')} (CUDA), or `make setup-vllm` there (CPU)"
    if rollout.vllm_python != "auto":
        # not resolved: a venv's python is a link to one that does not have its packages
        found = Path(shutil.which(Path(rollout.vllm_python).expanduser()) or "").absolute()
        if not has_vllm(found):
            raise ConfigError(
                f"rollout.vllm_python={rollout.vllm_python} is no program, or cannot import vllm",
                rule="it is the Python that vLLM is installed in",
                way_out=f"give the path of its bin/python, or auto after {install}.",
            )
        return found
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    own = Path(os.environ.get(VENV_ENV) or CHECKOUT / VENV_NAME).absolute() / "bin" / "python"
    if has_vllm(own):
        return own
    raise ConfigError(
        f"rollout.engine=vllm, and neither {sys.executable} nor {own} can import vllm",
        rule="vLLM runs in a process of its own, under a Python that it is installed in",
        way_out=f"{install}; or name the Python that has it: rollout.vllm_python=/path/to/bin/python.",
    )


@functools.cache
def has_vllm(python: Path) -> bool:
    """Asks that Python where vllm is, without importing it, which would take seconds."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        subprocess.run(
            [python, "-c", ASK], env=environ, capture_output=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def import_folder(folder: Path) -> Path:
    """`folder` with links to our two packages and nothing else, for PYTHONPATH: another Python must not see
    our site-packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link, target = folder / name, Path(str(files(name))).resolve()
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)  # of an installation that has moved since
            link.symlink_to(target)
    return folder
