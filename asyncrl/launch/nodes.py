"""Machines of a run, and the interface of launchers that start processes on them.

The controller's own Node is always first. A Launcher lists the nodes, reserves the devices of a Placement and
creates processes: on this machine (LocalLauncher), or with Ray on a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.launch.machine import Machine, described_machine
from asyncrl.messages.engine_api import FileRequest

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the run. `name` is for display, `id` the launcher's. Other nodes reach its servers at
    `address`; a single-machine run uses loopback.
    """

    name: str
    address: str
    machine: Machine
    id: str = ""


def address_of(node: int) -> str:
    """Return a placeholder for an Order's spec, replaced at each start, because another machine may
    replace the node.
    """
    return f"<address of node {node}>"


def with_addresses(spec: str, nodes: Sequence[Node]) -> str:
    for number, node in enumerate(nodes):
        spec = spec.replace(address_of(number), node.address)
    return spec


def described_nodes(
    devices: Sequence[str], cores: Sequence[int], memory: Sequence[str]
) -> tuple[Node, ...] | None:
    """Return the nodes of `asyncrl check --devices 2x8xH200-141GB --cores 192 --memory 2TB`, named node-0,
    node-1, ...; None without options. Each further --devices adds nodes, with its own --cores and --memory
    or the same. Raises ConfigError.
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
    """A process to start, independent of the machine. `module` runs as `python -m module` with `spec`
    (JSON) in a file and a listening socket, at `port` or any free one. It sees only `devices` (cpu,
    cuda:1, ...) of its node. Its log is RUN_DIR/logs/NAME.log on the controller's machine. `python`,
    called on its node, finds its Python (None: ours) or raises ConfigError.
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
    """Requirements on a node. `files`: contents by absolute path ("": anything). `package`, called there,
    returns the engines' package and version, equal on all nodes with engines, or raises ConfigError.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    package: Callable[[], Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class NodeHas:
    """State of Needs on a node. `unseen`: files that are missing or differ."""

    unseen: Sequence[str]
    package: Mapping[str, str]
    refusal: ConfigError | None = None
    """Set if the package is missing."""


def look(needs: Needs) -> NodeHas:
    """Check this machine. Blocks."""
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
    """Return the reason that the node does not fit, if any. The first node with the packages fills
    `versions`.
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
    """A server of the run in its own process, here or on another node.

    Life: created -> start() -> running -> ended, by aclose() or by itself (then watch() raises); renewed()
        makes its successor, which continues the log.
    """

    name: str
    url: str
    """"" before the start."""
    left: str
    """Survivors of aclose(), as text."""

    @property
    def log_path(self) -> Path | str:
        """Place of its output on the controller's machine."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id if it runs on the controller's machine."""
        ...

    @property
    def returncode(self) -> int | None: ...
    def seen(self) -> str:
        """Describe its state without a request to its server."""
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
        """Make it log its stacks, unless SIGUSR1 would end it."""
        ...


class Launcher(Protocol):
    """Starts the processes of a run; nothing else depends on the kind of launcher.

    Life: open() -> nodes known -> hold() -> devices reserved -> process(), any number, each ended by its
        requester -> aclose(): all released -> close(). open() and close() run outside the event loop, because
        placement precedes it.
    """

    nodes: tuple[Node, ...]
    """The controller's own is first."""
    say: Callable[[str], None]
    """Shows messages about nodes to the user."""

    def open(self) -> None:
        """Query the nodes. Blocks; raises ConfigError."""
        ...

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]) -> None:
        """Reserve these devices on each node (by its index in `nodes`), one entry per process: `cpu` or
        `cuda:K`.

        Raises ConfigError for more devices than exist or for unmet needs, RoomError if the devices do not
        become free in time.
        """
        ...

    def process(self, node: int, order: Order) -> Process:
        """Return a process, not started yet."""
        ...

    async def free_port(self, node: int) -> int: ...

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Fetch a file of weights to this node; return its path there. Raises RoomError."""
        ...

    async def aclose(self) -> None: ...
    def close(self) -> None: ...
