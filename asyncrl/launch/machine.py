"""CUDA devices, cores, memory and the engines' Python of a machine, without torch.

CUDA devices are numbered within CUDA_VISIBLE_DEVICES in bus order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

import asyncrl
from asyncrl.base.errors import ConfigError
from asyncrl.base.host import available_memory, num_cores
from asyncrl.config import RolloutConfig
from asyncrl.config.engine_kinds import ENGINES, EngineKind

LOOPBACK = "127.0.0.1"
_SIZE = TypeAdapter(ByteSize)
FIELDS = "index,uuid,memory.free,memory.total,name"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
NO_BFLOAT16 = re.compile(
    r"\b([TVPMK]\d{1,4}|GTX|RTX 20\d\d|RTX [2-8]000|TITAN)\b(?!.* Ada)"
)
"""Cards before Ampere (compute capability 8.0) compute bfloat16 slowly, in software."""
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """`name` as in CUDA_VISIBLE_DEVICES; bytes None if unknown."""

    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    has_bfloat16: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """`is_here`: False for a described machine."""

    cuda: tuple[CudaDevice, ...]
    cores: int
    memory: int
    has_bfloat16: bool
    is_here: bool = True

    def has_fast_bfloat16(self, device: str) -> bool:
        """Return whether `device` (cpu, cuda:1, ...) has instructions for it."""
        number = device.removeprefix("cuda:")
        if number == device:
            return self.has_bfloat16 or device != "cpu"
        return self.cuda[int(number)].has_bfloat16


def this_machine() -> Machine:
    return Machine(
        find_cuda_devices(), num_cores(), available_memory(), cpu_has_bfloat16()
    )


def cpu_has_bfloat16() -> bool:
    if not CPUINFO.is_file():
        return False
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.partition(":")[2].split())


def find_cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch_has_cuda():
        return ()
    found = dict[str, CudaDevice]()
    for line in ask_nvidia_smi().splitlines():
        cells = map(str.strip, line.split(","))
        index, uuid, *sizes, model = cells
        free, total = (int(size) * 2**20 if size.isdigit() else None for size in sizes)
        # CUDA_VISIBLE_DEVICES may name devices by number or by UUID.
        found |= {
            name: CudaDevice(name, free, total, has_bfloat16(model))
            for name in (index, uuid)
        }
    visible = os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(filter(str.isdigit, found))
    )
    devices = list[CudaDevice]()
    for name in map(str.strip, visible.split(",")):
        if name not in found and not (found and name.startswith(("GPU-", "MIG-"))):
            break  # as CUDA: an invalid name hides all later ones
        devices.append(found.get(name, CudaDevice(name)))
    return tuple(devices)


def has_bfloat16(model: str) -> bool:
    return NO_BFLOAT16.search(model) is None


def ask_nvidia_smi() -> str:
    try:
        done = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


@functools.cache
def torch_has_cuda() -> bool:
    """Read torch's version file. Without torch, True: pip installs a CUDA build."""
    # Importing torch takes seconds, and the controller never needs it.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return spec is None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, flags=re.MULTILINE) is not None


def child_environ(
    devices: Sequence[str], cuda: Sequence[CudaDevice] | Mapping[int, CudaDevice]
) -> dict[str, str]:
    if not devices[0].startswith("cuda:"):
        return {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    # nvidia-smi numbers devices by their bus, CUDA by speed unless this is set: on a
    # machine with two kinds of cards, number 0 would be another card.
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    address: str
    machine: Machine


def described_nodes(
    devices: str | None, cores: int | None, memory: str | None
) -> tuple[Node, ...] | None:
    """Parse `asyncrl check --devices 2x8xH200-141GB --cores 192 --memory 2TB`. GB is
    10^9 bytes. Raises ConfigError.
    """
    if devices is None and cores is None and memory is None:
        return None
    match = re.fullmatch(
        r"(?:([1-9]\d{0,4})x)?(?:cpu|([1-9]\d{0,4})x(?:(.*)-)?([^-]+))", devices or ""
    )
    num_nodes, num_cuda, model, size = match.groups() if match else [None] * 4
    available = _bytes_of(memory or "")
    device_bytes = _bytes_of(size or "")
    if (
        not match
        or (size and not device_bytes)
        or not cores
        or cores < 1
        or not available
    ):
        given = {"--devices": devices, "--cores": cores, "--memory": memory}
        text = " ".join(
            f"{name} {value}" for name, value in given.items() if value is not None
        )
        raise ConfigError(
            f"{text} describes no machine",
            rule="devices are their number, x, a name if you like, and the memory of one; cpu is none",
            way_out="write all three: --devices 8xH200-141GB --cores 192 --memory 2TB (2x8x80GB: two nodes).",
        )
    cuda = tuple(
        CudaDevice(
            str(at),
            device_bytes,
            device_bytes,
            has_bfloat16=has_bfloat16(model or ""),
        )
        for at in range(int(num_cuda or 0))
    )
    machine = Machine(cuda, cores, available, has_bfloat16=False, is_here=False)
    return tuple(
        Node(f"node-{at}", f"node-{at}", machine) for at in range(int(num_nodes or 1))
    )


def _bytes_of(text: str) -> int:
    with contextlib.suppress(ValidationError):
        return _SIZE.validate_python(text if text.endswith("B") else "")
    return 0


# ---- the Python of separately installed engines

CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
ASK = "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])"
ASK_TIMEOUT_S = 30.0


def find_python(rollout: RolloutConfig, kind: EngineKind) -> Path:
    """Return the Python that has the package of an engine kind: the one in
    rollout.{package}_python; for auto, ours or the one in .venv-{package} or
    $VENV_{PACKAGE}. Raises ConfigError.
    """
    package = ENGINES[kind].package
    assert package is not None, "this kind has its own Python"
    given = getattr(rollout, f"{package}_python")
    named = Path(shutil.which(Path(given).expanduser()) or given)
    folder = Path(
        os.environ.get(f"VENV_{package.upper()}") or CHECKOUT / f".venv-{package}"
    )
    pythons = (
        [Path(sys.executable), folder / "bin" / "python"]
        if given == "auto"
        else [named]
    )
    for python in pythons:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            ask_for_package(python.absolute(), package)
            return python.absolute()  # do not resolve: a venv's python is a link
    raise ConfigError(
        f"rollout.{package}_python={given}: {' and '.join(map(str, pythons))} cannot import {package}",
        way_out=f"{ENGINES[kind].installation}; or name one, or its folder in VENV_{package.upper()}.",
    )


def find_worker_python(name: str) -> Path:
    """Return the absolute path of generator.worker_python. Raises ConfigError."""
    path = shutil.which(Path(name).expanduser())
    if path is None:
        raise ConfigError(
            f"generator.worker_python={name}: there is no such program in {Path.cwd()} or PATH",
            way_out="name the bin/python of a venv.",
        )
    return Path(path).absolute()  # do not resolve: a venv's python is a link


# Errors are not cached: in a notebook, the next run may find a package that has been
# installed in between.
@functools.cache
def ask_for_package(python: Path, package: str) -> None:
    """Raise OSError or SubprocessError if this Python does not have a package."""
    # PYTHONPATH and PYTHONHOME belong to our Python, and would make the other one find
    # our packages.
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    asking = [str(python), "-c", ASK, package]
    subprocess.run(
        asking, env=environ, capture_output=True, timeout=ASK_TIMEOUT_S, check=True
    )


def own_versions() -> dict[str, str]:
    versions = {"asyncrl": asyncrl.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions


def find_misfit(
    name: str, files: Mapping[str, str], versions: Mapping[str, str]
) -> ConfigError | None:
    """Compare this node with the controller's versions, and `files` with their contents
    ("": any). Blocks.
    """
    if unseen := [path for path, text in files.items() if not _holds(Path(path), text)]:
        return ConfigError(
            f"the node {name} does not see {', '.join(unseen)}, or sees another file there",
            rule="every node reads the run directory, the model, model.chat_template and "
            "weight_sync.disk_dir at the path that the controller uses",
            way_out="put them on a file system that all nodes mount (--run-dir, model.path).",
        )
    if (here := own_versions()) != versions:
        return ConfigError(
            f"the node {name} has {here}, and the controller's node has {versions}",
            rule="all nodes of a run use the same versions",
            way_out="install the same packages on all nodes.",
        )
    return None


def _holds(path: Path, text: str) -> bool:
    try:
        return (
            text in path.read_text(encoding="utf-8", errors="replace")
            if text
            else path.is_file()
        )
    except OSError:
        return False
