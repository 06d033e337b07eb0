"""The machines of a run, and who starts processes on them: the words that both launchers share.

A Node is a machine; the controller's own is always the first of a Placement's. A Launcher says which nodes
there are, holds what a Placement takes of them, and makes processes there: on this machine alone
(LocalLauncher), or by Ray on the nodes of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError, RoomError
from asyncrl.messages.base import FileRequest
from asyncrl.placement.machine import Machine, described_machine

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the run. `name`: for people. `address`: under which the others reach its servers;
    servers of a run on one machine listen on loopback only. `id`: the launcher's name for it.
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
    machine. `python`: called on its node, finds the Python that it runs under (None: ours); raises
    ConfigError.
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
    python: Callable[[], Path] | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a node must have for the processes of the run there. `files`: by their absolute paths, and what
    each holds ("": anything). `package`: called there, finds what its engines run under, by its name, and the
    version, which is the same on all nodes with engines; raises ConfigError where there is none.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    package: Callable[[], Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class NodeHas:
    """What a node has of its Needs. `unseen`: the files that are not there, or hold something else."""

    unseen: Sequence[str]
    package: Mapping[str, str]
    refusal: ConfigError | None = None
    """That it has no such package."""


def look(needs: Needs) -> NodeHas:
    """On this machine. Blocks."""
    unseen = [path for path, token in needs.files.items() if not _holds(Path(path), token)]
    try:
        return NodeHas(unseen, needs.package() if needs.package else {})
    except ConfigError as error:
        return NodeHas(unseen, {}, error)


def _holds(path: Path, token: str) -> bool:
    try:
        return token in path.read_text(encoding="utf-8", errors="replace") if token else path.is_file()
    except OSError:
        return False


def misfit(name: str, seen: NodeHas, versions: dict[str, str]) -> ConfigError | None:
    """Why nothing of the run can be on the node of this name, if so. The `versions` of packages are those of
    the first node that has them: they are put into it.
    """
    if seen.unseen:
        return ConfigError(
            f"the node {name} does not see {', '.join(seen.unseen)}, or sees another file there",
            rule="every node reads what its parts need at the path that the controller has: the model, the "
            "run directory and model.chat_template (trainer ranks), weight_sync.disk_dir",
            way_out="put them on a file system that all nodes mount (--run-dir, model.path).",
        )
    if (error := seen.refusal) is not None:
        return ConfigError(
            f"the node {name} lacks what its engines need: {error.what}", way_out=error.way_out
        )
    for package, version in seen.package.items():
        if (first := versions.setdefault(package, version)) != version:
            theirs, ours = (f"{package} {number or 'of no known version'}" for number in (version, first))
            return ConfigError(
                f"the node {name} has {theirs}, the first node with engines has {ours}",
                rule="all engines of a run are of one version",
                way_out=f"install {ours} there, name a Python that has it (rollout.{package}_python, "
                f"VENV_{package.upper()}), or place no engine there (placement.rollout).",
            )
    return None


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
    say: Callable[[str], None]
    """Is told what people are to know of the nodes."""

    def open(self) -> None:
        """Look at the nodes. Blocks; raises ConfigError."""
        ...

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]) -> None:
        """Reserve these devices on each node (by its index in `nodes`), one entry per process: `cpu` or
        `cuda:K`.

        Raises ConfigError for more than exists, or for needs that a node does not meet, RoomError if the
        devices do not become free in time.
        """
        ...

    def process(self, node: int, order: Order) -> Process:
        """Not started yet."""
        ...

    async def free_port(self, node: int) -> int:
        """A TCP port that nothing on this node listens on now."""
        ...

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Fetch a file of weights to this node; return its path there. Raises RoomError."""
        ...

    async def aclose(self) -> None: ...
    def close(self) -> None:
        """Idempotent."""
        ...
