"""Local launcher, and the choice of a launcher."""

from __future__ import annotations

import contextlib
import platform

from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.launch.machine import (
    LOOPBACK,
    Node,
    child_environ,
    this_machine,
)
from asyncrl.launch.processes import ChildProcess, Launcher, ProcessSpec, free_port_at


def opened(name: str) -> contextlib.closing[Launcher]:
    """Return the launcher of config `launcher` (local, ray, ray:HOST:PORT), as a
    context that closes it. Raises ConfigError.
    """
    return contextlib.closing(
        LocalLauncher() if name == "local" else _ray_launcher(name)
    )


def _ray_launcher(name: str) -> Launcher:
    try:
        # Here, because ray is an optional package.
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
        return ChildProcess(
            spec, child_environ(spec.devices, self.nodes[node].machine.cuda)
        )

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)
