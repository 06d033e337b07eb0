"""Open the launcher of the config; start processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncrl.launch.devices import child_environ
from asyncrl.launch.fit import import_folder
from asyncrl.launch.machine import find_cuda_devices, this_machine
from asyncrl.launch.nodes import LOOPBACK, Launcher, Needs, Node, Order, look, misfit
from asyncrl.launch.processes import ChildProcess, bind_socket
from asyncrl.messages.engine_api import FileRequest

IMPORTS = "imports"
"""Folder in a run's specs, with links to our packages for another Python."""


@contextlib.contextmanager
def opened(name: str) -> Iterator[Launcher]:
    """Yield the launcher of this name. Raises ConfigError."""
    launcher: Launcher = LocalLauncher()
    if name != "local":
        from asyncrl.launch.on_ray.ray_launcher import RayLauncher  # imports this file

        launcher = RayLauncher(name.removeprefix("ray").removeprefix(":"))
    try:
        launcher.open()
        yield launcher
    finally:
        launcher.close()


class LocalLauncher:
    """Starts all processes on this machine, listening on loopback."""

    def __init__(self) -> None:
        self.nodes: tuple[Node, ...] = ()
        self.say: Callable[[str], None] = print

    def open(self) -> None:
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]) -> None:
        """Check the needs. Placement has checked the devices."""
        for given in needs.values():
            if why := misfit(self.nodes[0].name, await asyncio.to_thread(look, given), {}):
                raise why

    def process(self, node: int, order: Order) -> ChildProcess:
        return child_of(order, child_environ(order.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Never called: all processes of one machine read the same files."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: nothing is reserved."""

    def close(self) -> None:
        """Do nothing."""


def child_of(order: Order, environ: Mapping[str, str], host: str = LOOPBACK) -> ChildProcess:
    """Return the order as a child process. `environ` selects its devices. Another Python finds only our
    packages of this machine. Raises ConfigError if that Python is missing.
    """
    python = order.python() if order.python else None
    imports = {"PYTHONPATH": str(import_folder(order.run_dir / "specs" / IMPORTS))} if python else {}
    return ChildProcess(
        order.name,
        order.module,
        order.spec,
        order.run_dir,
        order.secret,
        order.port,
        {**environ, **imports, **order.env},
        order.secrets,
        python,
        host,
    )


def free_port_at(host: str) -> int:
    with bind_socket("a port", None, host) as listener:
        port: int = listener.getsockname()[1]
        return port
