"""Which CUDA devices a run may use, and how much of their memory is free. Looks at the driver's files and programs; knows no torch.

Devices are numbered among those that CUDA_VISIBLE_DEVICES leaves, in the order of the bus, which is that of nvidia-smi.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DRIVER_DIR = Path("/proc/driver/nvidia/gpus")
QUERY = ("--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
HUGETLB = "glibc.malloc.hugetlb"
"""Of GLIBC_TUNABLES since glibc 2.35: 1 = madvise(MADV_HUGEPAGE) for what malloc takes. Others ignore the variable."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device. `name`: how CUDA_VISIBLE_DEVICES of a child process calls it. `free_bytes`: None where nvidia-smi does not say."""

    name: str
    free_bytes: int | None = None


def find_cuda_devices(
    *,
    driver_dir: Path = DRIVER_DIR,
    environ: Mapping[str, str] | None = None,
    query: Callable[[], str] | None = None,
    is_built: Callable[[], bool] | None = None,
) -> tuple[CudaDevice, ...]:
    """The devices that torch can use here: none beside a torch that was built without CUDA, whatever the driver lists."""
    if not (is_built or torch_has_cuda)():
        return ()
    told = _read_query((query or ask_nvidia_smi)())
    num_devices = sum(1 for _ in driver_dir.iterdir()) if driver_dir.is_dir() else len(told)  # WSL has no such folder
    free = {name: row[2] for row in told for name in (row[0], row[1])}
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return tuple(CudaDevice(name, free.get(name)) for name in visible_names(visible, num_devices))


def visible_names(visible: str | None, num_devices: int) -> tuple[str, ...]:
    """The names that CUDA_VISIBLE_DEVICES leaves (None: not set). As CUDA reads it, the first that is no device hides all after it."""
    if visible is None:
        return tuple(str(number) for number in range(num_devices))
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        is_number = name.isdigit() and int(name) < num_devices
        if not (is_number or (num_devices and name.startswith(("GPU-", "MIG-")))):
            break
        names.append(name)
    return tuple(names)


def child_environ(devices: Sequence[str], cuda: Sequence[CudaDevice], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that show a child process these devices (`cuda:1`, ...) and no others, in this order; on the CPU those of its memory."""
    if not devices or not all(device.startswith("cuda:") for device in devices):
        return _large_pages(os.environ if environ is None else environ) if "cpu" in devices else {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = (os.environ if environ is None else environ).get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}


def _large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Have glibc ask for large pages: new memory then costs a fifth (gradients, each step, where turns give it back in between)."""
    given = environ.get("GLIBC_TUNABLES", "")
    return {} if HUGETLB in given else {"GLIBC_TUNABLES": ":".join(filter(None, [given, f"{HUGETLB}=1"]))}


@functools.cache
def ask_nvidia_smi() -> str:
    """What nvidia-smi says, '' where there is none or it fails. Asked once a process, before it starts anything."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read_query(text: str) -> list[tuple[str, str, int | None]]:
    """(index, uuid, free bytes) of each line; MiB are told."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit():
            rows.append((parts[0], parts[1], int(parts[2]) * 2**20 if parts[2].isdigit() else None))
    return rows


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; reads its version file and does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, flags=re.MULTILINE) is not None
