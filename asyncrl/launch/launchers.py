"""Local launcher, and the choice of a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.launch.devices import child_environ
from asyncrl.launch.machine import find_cuda_devices, this_machine
from asyncrl.launch.nodes import Launcher, Node, NodeRequirements, inspect_node, unmet
from asyncrl.launch.processes import LOOPBACK, ChildProcess, ProcessSpec, free_port_at


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
        from asyncrl.launch.on_ray.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigError(
            f"launcher={name}, and the package `ray` is not installed",
            way_out=f"{install_extra('ray')}; or set launcher=local.",
        ) from error
    return RayLauncher(name.removeprefix("ray").removeprefix(":"))


class LocalLauncher(Launcher):
    def open(self) -> None:
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, NodeRequirements]) -> None:
        for requirements in needs.values():
            report = await asyncio.to_thread(inspect_node, requirements)
            if error := unmet(self.nodes[0].name, report, {}):
                raise error

    def process(self, node: int, spec: ProcessSpec) -> ChildProcess:
        return ChildProcess(spec, child_environ(spec.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)
