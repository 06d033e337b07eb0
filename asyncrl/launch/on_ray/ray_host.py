"""Ray actor that holds the processes of a run on one node, and the checks of a node. The controller's end is
ray_node.py.

The processes are children of the actor: when it ends in any way, their standard inputs close, and they clean
up and exit; a guard ends the rest. Arguments and answers are plain data, including errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.base.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.launch import fork_server
from asyncrl.launch.devices import child_environ
from asyncrl.launch.launchers import child_of, free_port_at
from asyncrl.launch.machine import CudaDevice, Machine, find_cuda_devices, this_machine
from asyncrl.launch.nodes import Needs, Node, NodeHas, Order, look, misfit
from asyncrl.launch.on_ray.fetched_files import FetchedFiles
from asyncrl.launch.processes import ChildProcess
from asyncrl.messages.engine_api import FileRequest

DESCRIBE_S = 120.0
"""Limit for each node's first answer: Ray starts a Python there."""
MAX_LOG_BYTES = 2**18
"""Per process and answer."""
ORPHANS_S = 20
"""Limit for processes whose actor has ended: longer than a vLLM server and its group take to end."""
RUNTIME_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""Keeps Ray from sending SIGKILL to our processes, which would leave weights in shared memory."""
_GUARD = """
while read -r line; do groups=$line; done
left=$(($1 * 10))
for group in $groups; do
    while kill -s 0 -- "-$group"; do
        [ "$left" -gt 0 ] || { kill -s KILL -- "-$group"; break; }
        left=$((left - 1))
        sleep 0.1
    done
done
shift
rm -rf "$@"
"""
"""Script that reads all current process groups from each line until the actor ends. Then it waits up to $1
seconds, kills surviving groups, frozen or not, and removes the given folders.
"""
EVERYWHERE = ("asyncrl", "python", "torch")
"""Packages with one version on all nodes."""


@dataclass(frozen=True, slots=True)
class Started:
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class RefusedStart:
    """An AsyncrlError as data."""

    what: str
    rule: str
    way_out: str
    is_config: bool

    def error(self, name: str, node: str) -> AsyncrlError:
        words = {"rule": self.rule, "way_out": self.way_out}
        if self.is_config:
            return ConfigError(f"on the node {node}: {self.what}", **words)
        return RoomError(name, self.what, **words)


@dataclass(frozen=True, slots=True)
class News:
    """New log bytes, and the exit code once the log is complete."""

    log: bytes
    returncode: int | None


def start_guard(*folders: Path, wait_s: int = ORPHANS_S) -> subprocess.Popen[bytes]:
    """Return the guard of process groups written to its standard input."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(wait_s), *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


def describe(num_cuda: int, needs: Needs) -> tuple[Machine, dict[str, str], NodeHas]:
    """Return this node with the `num_cuda` devices that Ray assigns, its versions, and its state of
    `needs`. Runs in a Ray task, with hidden devices.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = find_cuda_devices()[:num_cuda]
    versions = {"asyncrl": asyncrl.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return replace(this_machine(), cuda=found), versions, look(needs)


def ask_each(
    ray: Any, found: Sequence[Mapping[str, Any]], own: dict[str, str], needs: Needs
) -> list[Node | ConfigError]:
    """Return each node of Ray, or the reason it does not fit: no answer, unmet needs, or versions other
    than `own`, which the first node fills if empty.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in found:
        on = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(describe).options(num_cpus=0, scheduling_strategy=on)
        asked.append(task.remote(int(node["Resources"].get("GPU", 0)), needs))
    ray.wait(asked, num_returns=len(asked), timeout=DESCRIBE_S)
    told = list[Node | ConfigError]()
    for node, ref in zip(found, asked, strict=True):
        name = node["NodeName"]
        try:
            machine, versions, seen = ray.get(ref, timeout=0)
        except (ray.exceptions.RayError, ImportError) as error:
            why = str(error).strip().splitlines()[-1][:300] or f"no answer within {DESCRIBE_S:g} s"
            way_out = "install asyncrl there, in the Python that Ray runs under, or take the node out of Ray."
            told.append(ConfigError(f"the node {name} cannot run asyncrl: {why}", way_out=way_out))
            continue
        own |= versions if not own else {}
        unfit = other_versions(name, versions, own) or misfit(name, seen, own)
        told.append(unfit or Node(name, node["NodeManagerAddress"], machine, node["NodeID"]))
    return told


def other_versions(name: str, versions: Mapping[str, str], own: Mapping[str, str]) -> ConfigError | None:
    """Return an error if the node's versions differ from the controller's."""
    own = {key: value for key, value in own.items() if key in EVERYWHERE}
    if versions == own:
        return None
    theirs, ours = (", ".join(f"{key} {value}" for key, value in one.items()) for one in (versions, own))
    what = f"the node {name} has {theirs}, the controller's has {ours}"
    way_out = "install the same versions on all nodes, in the Python that Ray runs under."
    return ConfigError(what, rule="all nodes run the same code", way_out=way_out)


class Host:
    """Starts, watches and ends the processes of a run on its node.

    Life: ready() -> start(), any number -> ends reported by `news` updates -> forget(). Ray may reorder calls
        of an async actor: a start after its own end() has no effect.
    Waits: `news` sleeps at most as long as its caller allows.
    """

    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """Initialize. `numbers`: the CUDA devices' numbers in the placement, in Ray's order."""
        self._address, self._numbers = address, numbers
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-host-"))
        self._files = FetchedFiles()
        self._guard = start_guard(self._folder, self._files.folder)
        self._children = dict[str, ChildProcess]()
        self._starts = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Held by a start, and by the end that waits for it."""
        self._given_up = set[str]()
        self._ends = dict[str, asyncio.Future[None]]()
        self._changed = asyncio.Event()
        self._cuda = dict[int, CudaDevice]()

    async def ready(self) -> None:
        import ray

        names = map(str, ray.get_gpu_ids())
        self._cuda = {number: CudaDevice(name) for number, name in zip(self._numbers, names, strict=True)}

    async def start(self, key: str, order: Order) -> Started | RefusedStart:
        """Start a process under a new key, with its own folder."""
        async with self._starts[key]:
            if key in self._given_up:
                self._starts.pop(key)
                return RefusedStart("its end was asked for before its start", "", "", is_config=False)
            return await self._start(key, order)

    async def _start(self, key: str, order: Order) -> Started | RefusedStart:
        if fork_server.current is None and order.python is None and fork_server.preloads(order.module):
            fork_server.current = fork_server.ForkServer()
        order = replace(order, run_dir=self._folder / key)
        environ = child_environ(order.devices, self._cuda)
        try:
            child = await asyncio.to_thread(child_of, order, environ, self._address)
            await child.start()
        except AsyncrlError as error:
            what = error.fault if isinstance(error, RoomError) else error.what
            return RefusedStart(what, error.rule, error.way_out, isinstance(error, ConfigError))
        self._children[key] = child
        self._tell_guard()
        self._ends[key] = asyncio.ensure_future(child.wait())
        self._ends[key].add_done_callback(lambda _: self._changed.set())
        self._changed.set()
        assert child.pid is not None, "it has been started"
        return Started(child.url, child.pid)

    async def news(self, offsets: Mapping[str, int], wait_s: float) -> dict[str, News]:
        """Return output and ends of these processes, whose logs are known up to these bytes. Wait up to
        `wait_s` seconds for a start or an end.
        """
        self._changed.clear()
        known = {key: self._children[key] for key in offsets if key in self._children}
        if all(child.returncode is None for child in known.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        return {key: _news_of(child, offsets[key]) for key, child in known.items()}

    async def end(self, key: str) -> str:
        """End a process, once its start is over, and its group; describe survivors."""
        self._given_up.add(key)
        async with self._starts[key]:
            if (child := self._children.get(key)) is None:  # the start was refused or never arrived
                return ""
            await child.aclose()
            return child.left

    async def forget(self, key: str) -> None:
        self._starts.pop(key, None)
        if self._children.pop(key, None) is not None:
            self._tell_guard()
            self._ends.pop(key).cancel()
        shutil.rmtree(self._folder / key, ignore_errors=True)

    def _tell_guard(self) -> None:
        assert self._guard.stdin is not None, "it has a pipe"
        groups = " ".join(str(child.pid) for child in self._children.values())
        with contextlib.suppress(BrokenPipeError):  # the guard was killed: frozen processes may remain
            self._guard.stdin.write(f"{groups}\n".encode())

    async def kill(self, key: str) -> None:
        self._children[key].kill_nowait()

    async def dump_stacks(self, key: str) -> None:
        self._children[key].dump_stacks_nowait()

    async def free_port(self) -> int:
        return free_port_at(self._address)

    async def fetch(self, request: FileRequest) -> str:
        return await self._files.fetch(request)

    async def look(self, needs: Needs) -> NodeHas:
        return await asyncio.to_thread(look, needs)

    async def leave(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        await asyncio.to_thread(self._files.close)
        if fork_server.current is not None:
            fork_server.current.close()


def _news_of(child: ChildProcess, start: int) -> News:
    code = child.returncode
    with contextlib.suppress(OSError), child.log_path.open("rb") as file:
        file.seek(start)
        log = file.read(MAX_LOG_BYTES)
        return News(log, None if len(log) == MAX_LOG_BYTES else code)
    return News(b"", code)
