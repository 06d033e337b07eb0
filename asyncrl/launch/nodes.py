"""Machines of a run, and the interface of launchers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncrl
from asyncrl.base.errors import ConfigError
from asyncrl.launch.machine import CudaDevice, Machine, this_machine
from asyncrl.launch.processes import LOOPBACK, Process, ProcessSpec
from asyncrl.messages.engine_api import FileRequest


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    address: str
    machine: Machine


def single_node(machine: Machine | None = None) -> tuple[Node, ...]:
    """None: this machine."""
    return (Node("this machine", LOOPBACK, machine or this_machine()),)


def described_nodes(devices: str | None, cores: int | None, memory: str | None) -> tuple[Node, ...] | None:
    """Parse `asyncrl check --devices 2x8xH200-141GB --cores 192 --memory 2TB`. GB is 10^9 bytes. Raises
    ConfigError.
    """
    if devices is None and cores is None and memory is None:
        return None
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(?:cpu|([1-9]\d*)x(?:.*-)?([^-]+))", devices or "")
    num_nodes, num_cuda, size = match.groups() if match else (None, None, None)
    available = _bytes_of(memory or "")
    device_bytes = _bytes_of(size or "")
    if not match or (size and not device_bytes) or not cores or cores < 1 or not available:
        given = {"--devices": devices, "--cores": cores, "--memory": memory}
        text = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"{text} describes no machine",
            rule="devices are their number, x, a name if you like, and the memory of one; cpu is none",
            way_out="write all three: --devices 8xH200-141GB --cores 192 --memory 2TB (2x8x80GB: two nodes).",
        )
    cuda = tuple(CudaDevice(str(at), device_bytes, device_bytes) for at in range(int(num_cuda or 0)))
    machine = Machine(cuda, cores, available, has_bfloat16=False, is_here=False)
    return tuple(Node(f"node-{at}", f"node-{at}", machine) for at in range(int(num_nodes or 1)))


def _bytes_of(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(i?)B", text)
    if match is None:
        return 0
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** (2 + "MGT".index(match[2])))


@dataclass(frozen=True, slots=True)
class NodeRequirements:
    """`files`: required contents by absolute path ("": any). `package` returns engine versions, equal on
    all nodes, or raises ConfigError.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    package: Callable[[], Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class NodeReport:
    unseen: Sequence[str]
    versions: Mapping[str, str]
    refusal: ConfigError | None = None


def inspect_node(requirements: NodeRequirements) -> NodeReport:
    """Blocks."""
    unseen = [path for path, text in requirements.files.items() if not _holds(Path(path), text)]
    versions = {"asyncrl": asyncrl.__version__, "python": platform.python_version(), "torch": "not installed"}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    try:
        engine = requirements.package() if requirements.package else {}
    except ConfigError as error:
        return NodeReport(unseen, versions, error)
    return NodeReport(unseen, {**versions, **engine})


def _holds(path: Path, text: str) -> bool:
    try:
        return text in path.read_text(encoding="utf-8", errors="replace") if text else path.is_file()
    except OSError:
        return False


def unmet(name: str, report: NodeReport, versions: dict[str, str]) -> ConfigError | None:
    """`versions` collects the first version of each package."""
    if report.unseen:
        return ConfigError(
            f"the node {name} does not see {', '.join(report.unseen)}, or sees another file there",
            rule="every node reads the run directory, the model, model.chat_template and "
            "weight_sync.disk_dir at the path that the controller uses",
            way_out="put them on a file system that all nodes mount (--run-dir, model.path).",
        )
    if (error := report.refusal) is not None:
        return ConfigError(f"the node {name} cannot run engines: {error.what}", way_out=error.way_out)
    for package, version in report.versions.items():
        first = versions.setdefault(package, version)
        if first != version:
            return ConfigError(
                f"the node {name} has {package} {version or 'without a version'}, another node has {first}",
                rule="all nodes of a run use the same versions",
                way_out=f"install {package} {first} there (engines: in rollout.vllm_python).",
            )
    return None


class Launcher:
    """Starts the processes of a run.

    Life: open() -> hold() reserves devices -> process(), repeatedly -> aclose() releases them -> close().
        open() and close() run outside the event loop.
    """

    nodes: tuple[Node, ...] = ()
    """The controller's is first."""

    def open(self) -> None:
        """Blocks; raises ConfigError."""

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, NodeRequirements]) -> None:
        """Reserve devices by node index, per process. Raises ConfigError or RoomError."""

    def process(self, node: int, spec: ProcessSpec) -> Process:
        raise NotImplementedError

    async def free_port(self, node: int) -> int:
        raise NotImplementedError

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Return the local path of downloaded weights. Raises RoomError."""
        raise NotImplementedError

    async def aclose(self) -> None: ...

    def close(self) -> None: ...
