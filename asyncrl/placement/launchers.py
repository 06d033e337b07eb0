"""Which launcher the config names, and the one of a run on this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.placement.devices import child_environ
from asyncrl.placement.machine import find_cuda_devices, this_machine
from asyncrl.placement.nodes import LOOPBACK, Launcher, Node, Order
from asyncrl.placement.processes import ChildProcess, bind_socket


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

    def open(self) -> None:
        """Look at this machine."""
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    async def hold(self, parts: Mapping[int, Sequence[str]]) -> None:
        """Nothing: that the devices are there was seen when they were placed."""

    def process(self, node: int, order: Order) -> ChildProcess:
        """A child of this process."""
        return child_of(order, child_environ(order.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        """One of loopback."""
        return free_port_at(LOOPBACK)

    async def sees(self, node: int, path: Path, token: str) -> bool:
        """Whether it is there."""
        return await asyncio.to_thread(holds, path, token)

    async def aclose(self) -> None:
        """Nothing was held."""

    def close(self) -> None:
        """Nothing is open."""


def child_of(order: Order, environ: Mapping[str, str], host: str = LOOPBACK) -> ChildProcess:
    """The order as a child of this process. `environ`: shows it its devices."""
    return ChildProcess(
        order.name,
        order.module,
        order.spec,
        order.run_dir,
        order.secret,
        order.port,
        {**environ, **order.env},
        order.secrets,
        order.python,
        host,
    )


def free_port_at(host: str) -> int:
    """A TCP port of this address of this machine that nothing listens on now."""
    with bind_socket("a port", None, host) as listener:
        port: int = listener.getsockname()[1]
        return port


def holds(path: Path, token: str) -> bool:
    """Whether this file holds `token`."""
    try:
        return token in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
