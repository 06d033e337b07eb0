"""Local launcher, and the choice of a launcher."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncrl
from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.launch.machine import LOOPBACK, Node, child_environ, find_cuda_devices, this_machine
from asyncrl.launch.processes import ChildProcess, Process, ProcessSpec, free_port_at
from asyncrl.messages.engine_api import FileRequest


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


@contextlib.contextmanager
def opened(name: str) -> Iterator[Launcher]:
    """Raises ConfigError."""
    launcher = LocalLauncher() if name == "local" else _ray_launcher(name)
    try:
        launcher.open()
        yield launcher
    finally:
        launcher.close()


def _ray_launcher(name: str) -> Launcher:
    try:
        from asyncrl.launch.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigError(
            f"launcher={name}, and the package `ray` is not installed",
            way_out=f"{install_extra('ray')}; or set launcher=local.",
        ) from error
    return RayLauncher(name.removeprefix("ray").removeprefix(":"))


class LocalLauncher(Launcher):
    def open(self) -> None:
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    def process(self, node: int, spec: ProcessSpec) -> ChildProcess:
        return ChildProcess(spec, child_environ(spec.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)
