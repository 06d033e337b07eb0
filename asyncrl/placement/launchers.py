"""Which launcher the config names, what it is to bring, and the one of a run on this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from asyncrl.config import RunConfig
from asyncrl.config.operation import NodesConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import child_environ, place
from asyncrl.placement.fit import import_folder
from asyncrl.placement.machine import CudaDevice, find_cuda_devices, this_machine
from asyncrl.placement.nodes import LOOPBACK, NOTHING, Launcher, Needs, Node, Order, look, misfit
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


def bring_nodes(config: RunConfig, launcher: Launcher, num_engines: int) -> None:
    """Have the nodes started that the placement needs, and that are not there, for the first `num_engines`
    engines; the others are to come. Raises RoomError.
    """
    until_s = time.monotonic() + (wait_s := config.supervision.node_wait_s)
    while True:
        there = [node for node in launcher.nodes if not node.is_to_come]
        now, later = missing_parts(config, there, num_engines)
        if not launcher.bring(now, later, wait_s) or not now:
            return
        wait_s = max(0.0, until_s - time.monotonic())


def missing_parts(
    config: RunConfig, nodes: Sequence[Node], num_engines: int
) -> tuple[list[list[str]], list[Node]]:
    """What would be on each node more that the placement needs at once: a device for each process there; and
    the nodes that come later, each with engines alone, all of them above `num_engines`. None where no more
    nodes would do, and settle() says why.
    """
    forms = [
        form for form in (config.placement.trainer, config.placement.rollout) if isinstance(form, NodesConfig)
    ]
    num_cuda = [len(node.machine.cuda) for node in nodes] + [
        form.gpus for form in forms if type(form.gpus) is int
    ]
    cuda = tuple(CudaDevice(str(number)) for number in range(max(num_cuda)))
    machine = replace(nodes[0].machine, cuda=cuda, is_here=False)
    most = sum(form.nodes for form in forms if form.nodes != "all")
    new = [Node(f"to-come-{number + 1}", "", machine) for number in range(most)]
    for num in range(most + 1):
        with contextlib.suppress(ConfigError):
            placement = place(config, [*nodes, *new[:num]])
            parts = placement.parts(has_engines=config.rollout.urls is None)
            elastic = placement.elastic(num_engines) if config.rollout.is_scaled else {}
            missing = [node for node in range(len(nodes), len(nodes) + num) if node in parts]
            now = [node for node in missing if elastic.get(node, True)]
            return [parts[node] for node in now], new[: len(missing) - len(now)]
    return [], []


class LocalLauncher:
    """Starts all on this machine, where everything listens on loopback and nothing has to be reserved."""

    def __init__(self) -> None:
        self.nodes: tuple[Node, ...] = ()
        self.say: Callable[[str], None] = print

    def open(self) -> None:
        """Look at this machine."""
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    def bring(self, parts: Sequence[Sequence[str]], later: Sequence[Node], wait_s: float) -> bool:
        """Nothing: this machine is the only one."""
        return False

    async def hold(
        self,
        parts: Mapping[int, Sequence[str]],
        needs: Mapping[int, Needs],
        elastic: Mapping[int, bool] = NOTHING,
    ) -> None:
        """Reserves nothing: that the devices are there was seen when they were placed."""
        for given in needs.values():
            if why := misfit(self.nodes[0].name, await asyncio.to_thread(look, given), {}):
                raise why

    async def come(self, node: int) -> None:
        """Nothing: this machine is never given back."""

    rest = come

    def process(self, node: int, order: Order) -> ChildProcess:
        """A child of this process."""
        return child_of(order, child_environ(order.devices, find_cuda_devices()))

    async def free_port(self, node: int) -> int:
        """One of loopback."""
        return free_port_at(LOOPBACK)

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
