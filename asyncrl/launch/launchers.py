"""Local launcher, and the choice of a launcher."""

from __future__ import annotations

import contextlib
import platform

from asyncrl.base.extensions import load_place, rows
from asyncrl.launch.machine import (
    LOOPBACK,
    Node,
    child_environ,
    this_machine,
)
from asyncrl.launch.processes import ChildProcess, Launcher, ProcessSpec, free_port_at


def opened(name: str) -> contextlib.closing[Launcher]:
    """Return the launcher of config `launcher` (local, or the launcher of an extension,
    as NAME or NAME:HOST:PORT), as a context that closes it. Raises ConfigError.
    """
    kind, _, address = name.partition(":")
    if kind == "local":
        return contextlib.closing(LocalLauncher())
    return contextlib.closing(load_place(rows("launchers")[kind])(address))


class LocalLauncher(Launcher):
    def __init__(self) -> None:
        self.nodes = (Node(platform.node(), LOOPBACK, this_machine()),)

    def process(self, node: int, spec: ProcessSpec) -> ChildProcess:
        return ChildProcess(
            spec, child_environ(spec.devices, self.nodes[node].machine.cuda)
        )

    async def free_port(self, node: int) -> int:
        return free_port_at(LOOPBACK)
