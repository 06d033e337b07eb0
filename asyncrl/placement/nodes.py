"""The machines of a run, and who starts processes on them: the words that both launchers share.

A Node is a machine; the controller's own is always the first of a Placement's. A Launcher says which nodes
there are, holds what a Placement takes of them, and makes processes there: on this machine alone
(LocalLauncher), or by Ray on the nodes of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError, RoomError
from asyncrl.placement.machine import Machine, described_machine

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the run. `name`: for people. `address`: under which the others reach its servers;
    servers of a run on one machine listen on loopback alone. `id`: what its launcher calls it.
    """

    name: str
    address: str
    machine: Machine
    id: str = ""


def address_of(node: int) -> str:
    """Stands for the address of that node in the spec of an Order. Its launcher writes the address when the
    process is started, for another machine may have taken the node's place by then.
    """
    return f"<address of node {node}>"


def with_addresses(spec: str, nodes: Sequence[Node]) -> str:
    """The spec with the addresses that the nodes have."""
    for number, node in enumerate(nodes):
        spec = spec.replace(address_of(number), node.address)
    return spec


def described_nodes(
    devices: Sequence[str], cores: Sequence[int], memory: Sequence[str]
) -> tuple[Node, ...] | None:
    """The nodes of `asyncrl check --devices 2x8xH200-141GB --cores 192 --memory 2TB`, node-0 and on; None
    where nothing is given. Each more --devices is of more nodes, with --cores and --memory of its own or the
    same. Raises ConfigError.
    """
    num, machines = max(len(devices), 1), list[Machine]()
    for name, given in {"--cores": cores, "--memory": memory}.items():
        if len(given) not in (0, 1, num):
            what = f"{name} is there {len(given)} times, and --devices {len(devices)} times"
            raise ConfigError(what, way_out=f"write {name} once for all nodes, or once for each --devices.")
    for index in range(num):
        text = devices[index] if devices else None
        several = re.fullmatch(r"([1-9]\d{0,3})x(cpu|\d+x.+)", text or "")
        each, text = (int(several[1]), several[2]) if several else (1, text)
        machine = described_machine(
            text,
            cores[index % len(cores)] if cores else None,
            memory[index % len(memory)] if memory else None,
        )
        machines += [machine] * each if machine else []
    return tuple(Node(f"node-{at}", f"node-{at}", machine) for at, machine in enumerate(machines)) or None


@dataclass(frozen=True)
class Order:
    """A process to be started: what is the same wherever it runs. `module` is run as `python -m module` with
    `spec` (JSON) in a file and a listening socket, at `port` or any free one; `devices` (cpu, cuda:1, ...)
    are those of its node that it sees, and no others. Its log is RUN_DIR/logs/NAME.log on the controller's
    machine.
    """

    name: str
    module: str
    spec: str
    run_dir: Path
    secret: str
    devices: Sequence[str] = ("cpu",)
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None


class Process(Protocol):
    """A server of the run in a process of its own, here or on another node. It can be started, watched and
    ended.

    Life: created -> start() -> running -> ended, by aclose() or of itself (then watch() raises); renewed()
        makes its successor, which writes on in the same log.
    """

    name: str
    url: str
    """Of its server, "" until it is started."""
    left: str
    """That aclose() could not end it, in words."""

    @property
    def log_path(self) -> Path | str:
        """Where what it writes to its standard streams can be read on the controller's machine."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process id if it runs on the controller's machine, else None."""
        ...

    @property
    def returncode(self) -> int | None: ...
    def seen(self) -> str:
        """What is known of it without asking its server, in words."""
        ...

    async def start(self) -> None: ...
    def renewed(self) -> Any: ...
    async def wait(self) -> None: ...
    async def watch(self) -> None: ...
    def death(self) -> RoomError: ...
    def log_tail(self) -> str: ...
    async def aclose(self) -> None: ...
    def kill_nowait(self) -> None: ...
    def dump_stacks_nowait(self) -> None:
        """Have it write its stacks into its log, unless SIGUSR1 would end it."""
        ...


class Launcher(Protocol):
    """Who starts the processes of a run. Nothing else knows which launcher it is.

    Life: open() -> the nodes are known -> hold() -> what the placement takes is ours -> process(), any
        number, each ended by who asked for it -> aclose(): all that it held is free -> close(). The first and
        the last are called outside the event loop: a placement is settled before there is one.
    """

    nodes: tuple[Node, ...]
    """Those that there are, the controller's own first."""

    def open(self) -> None:
        """Look at the nodes. Blocks; raises ConfigError."""
        ...

    async def hold(self, parts: Mapping[int, Sequence[str]]) -> None:
        """Reserve, for each node (by its place in `nodes`), these devices: one entry for each
        process, `cpu` or `cuda:K`. Raises ConfigError for more than there is, RoomError, with what is
        missing, where they do not become free in time.
        """
        ...

    def process(self, node: int, order: Order) -> Process:
        """Not started yet."""
        ...

    async def free_port(self, node: int) -> int:
        """A TCP port that nothing on this node listens on now."""
        ...

    async def sees(self, node: int, path: Path, token: str) -> bool:
        """Whether the file at `path` (absolute) holds `token` on this node: that both see one file system."""
        ...

    async def aclose(self) -> None: ...
    def close(self) -> None:
        """Idempotent."""
        ...
