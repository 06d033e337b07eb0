"""CUDA devices, cores and memory of a machine, without torch.

CUDA devices are numbered within CUDA_VISIBLE_DEVICES in bus order.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from asyncrl.base.host import available_memory, num_cores

DRIVER_DIR = Path("/proc/driver/nvidia/gpus")
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """`name` as in CUDA_VISIBLE_DEVICES; bytes None if unknown."""

    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """`is_here`: False for a described machine."""

    cuda: tuple[CudaDevice, ...]
    cores: int
    memory: int
    has_bfloat16: bool
    is_here: bool = True


def this_machine() -> Machine:
    return Machine(find_cuda_devices(), num_cores(), available_memory(), cpu_has_bfloat16())


def cpu_has_bfloat16() -> bool:
    if not CPUINFO.is_file():
        return False
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.partition(":")[2].split())


def find_cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch_has_cuda():
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in ask_nvidia_smi().splitlines()]
    sizes = {
        name: (int(free) * 2**20, int(total) * 2**20)
        for *names, free, total in rows
        if free.isdigit() and total.isdigit()
        for name in names
    }
    # WSL has no such folder
    num_devices = len(list(DRIVER_DIR.iterdir())) if DRIVER_DIR.is_dir() else len(rows)
    names: list[str] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = map(str, range(num_devices)) if visible is None else map(str.strip, visible.split(","))
    for name in shown:
        is_uuid = num_devices > 0 and name.startswith(("GPU-", "MIG-"))
        if not is_uuid and not (name.isdigit() and int(name) < num_devices):
            break  # as CUDA: an invalid name hides all later ones
        names.append(name)
    return tuple(CudaDevice(name, *sizes.get(name, ())) for name in names)


@functools.cache
def ask_nvidia_smi() -> str:
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


@functools.cache
def torch_has_cuda() -> bool:
    """Read torch's version file. Without torch, True: pip installs a CUDA build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return spec is None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, flags=re.MULTILINE) is not None
