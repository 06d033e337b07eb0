"""Open the launcher that the config names; start processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncrl.messages.base import FileRequest
from asyncrl.placement.devices import child_environ
from asyncrl.placement.fit import import_folder
from asyncrl.placement.machine import find_cuda_devices, this_machine
from asyncrl.placement.nodes import LOOPBACK, Launcher, Needs, Node, Order, look, misfit
from asyncrl.placement.processes import ChildProcess, bind_socket

IMPORTS = "imports"
"""Folder in the specs of a run, with links to our packages, for a server with another Python."""


@contextlib.contextmanager
def opened(name: str) -> Iterator[Launcher]:
    """The launcher of this name (`launcher` in the config). Raises ConfigError."""
    launcher: Launcher = LocalLauncher()
    if name != "local":
        from asyncrl.placement.on_ray.ray_launcher import RayLauncher  # which imports this file

        launcher = RayLauncher(name.removeprefix("ray").removeprefix(":"))
    try:
        launcher.open()
        yield launcher
    finally:
        launcher.close()


class LocalLauncher:
    """Starts all on this machine, where everything listens on loopback and nothing has to be reserved."""

    def __init__(self) -> None:
        self.nodes: tuple[Node, ...] = ()
        self.say: Callable[[str], None] = print

    def open(self) -> None:
        """Look at this machine."""
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]) -> None:
        """Check the needs. Devices were checked when they were placed."""
        for given in needs.values():
            if why := misfit(self.nodes[0].name, await asyncio.to_thread(look, given), {}):
                raise why

    def process(self, node: int, order: Order) -> ChildProcess:
        """A child of this process."""
        return child_of(order, child_environ(order.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        """One of loopback."""
        return free_port_at(LOOPBACK)

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Not called: all processes of one machine read the same files."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Nothing was held."""

    def close(self) -> None:
        """Nothing is open."""


def child_of(order: Order, environ: Mapping[str, str], host: str = LOOPBACK) -> ChildProcess:
    """The order as a child of this process. `environ`: shows it its devices. Under another Python it finds
    this machine's packages of ours, whatever folders it shares with others. Raises ConfigError where there is
    no such Python.
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
    """A TCP port of this address of this machine that nothing listens on now."""
    with bind_socket("a port", None, host) as listener:
        port: int = listener.getsockname()[1]
        return port
