"""Local launcher, and the choice of a launcher."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import asyncrl
from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.launch.machine import LOOPBACK, Node, child_environ, find_cuda_devices, this_machine
from asyncrl.launch.processes import ChildProcess, Process, ProcessSpec, free_port_at
from asyncrl.messages.engine_api import FileRequest


def own_versions() -> dict[str, str]:
    versions = {"asyncrl": asyncrl.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions


def find_misfit(name: str, files: Mapping[str, str], versions: Mapping[str, str]) -> ConfigError | None:
    """Compare this node with the controller's versions, and `files` with their contents ("": any). Blocks."""
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
        return text in path.read_text(encoding="utf-8", errors="replace") if text else path.is_file()
    except OSError:
        return False


class Launcher:
    """Starts the processes of a run.

    Life: created -> hold() reserves devices -> process(), repeatedly -> aclose() releases them -> close().
        Creation and close() run outside the event loop.
    """

    nodes: tuple[Node, ...] = ()
    """The controller's is first."""

    async def hold(self, parts: Mapping[int, Sequence[str]], files: Mapping[str, str]) -> None:
        """Reserve devices by node; all nodes see `files`. Raises ConfigError or RoomError."""

    def process(self, node: int, spec: ProcessSpec) -> Process:
        raise NotImplementedError

    async def free_port(self, node: int) -> int:
        raise NotImplementedError

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Return the local path of downloaded weights. Raises RoomError."""
        raise NotImplementedError

    async def aclose(self) -> None: ...

    def close(self) -> None: ...


def opened(name: str) -> contextlib.closing[Launcher]:
    """Raises ConfigError."""
    return contextlib.closing(LocalLauncher() if name == "local" else _ray_launcher(name))


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
    def __init__(self) -> None:
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    def process(self, node: int, spec: ProcessSpec) -> ChildProcess:
        return ChildProcess(spec, child_environ(spec.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)
