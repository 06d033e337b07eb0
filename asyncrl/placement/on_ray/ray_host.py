"""The actor of Ray that holds the processes of a run on one node; what a node is asked before it gets one.
The controller's end is ray_node.py.

Our processes are ordinary children of it: when it ends, in whatever way, their standard inputs do, and they
clear up and exit; a guard ends those that do not. All arguments and answers are plain data, and an error of
ours is one, too.
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
from asyncrl.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.messages.base import FileRequest
from asyncrl.placement import fork_server
from asyncrl.placement.devices import child_environ
from asyncrl.placement.launchers import child_of, free_port_at
from asyncrl.placement.machine import CudaDevice, Machine, find_cuda_devices, this_machine
from asyncrl.placement.nodes import Needs, Node, NodeHas, Order, look, misfit
from asyncrl.placement.on_ray.fetched_files import FetchedFiles
from asyncrl.placement.processes import ChildProcess

DESCRIBE_S = 120.0
"""For the first answer of each node: Ray starts a Python there."""
MAX_LOG_BYTES = 2**18
"""Of each process in one answer."""
ORPHANS_S = 20
"""For processes whose actor has ended: longer than a vLLM server and all of its group take to end."""
RUNTIME_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""Of the actor. Ray would send SIGKILL to our processes, and they would leave weights in shared memory."""
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
"""Reads the process groups that there are, all of them in each line, until the actor ends, in whatever way;
then it waits for $1 seconds at most until they have ended, kills what is left, frozen or not, and removes the
other folders.
"""
EVERYWHERE = ("asyncrl", "python", "torch")
"""What has one version on all nodes."""


@dataclass(frozen=True, slots=True)
class Started:
    """Where it listens, and its process there."""

    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class RefusedStart:
    """An error of ours, as data: what failed, the rule, the way out."""

    what: str
    rule: str
    way_out: str
    is_config: bool

    def error(self, name: str, node: str) -> AsyncrlError:
        """To be raised on the other side."""
        words = {"rule": self.rule, "way_out": self.way_out}
        if self.is_config:
            return ConfigError(f"on the node {node}: {self.what}", **words)
        return RoomError(name, self.what, **words)


@dataclass(frozen=True, slots=True)
class News:
    """What a process has written since it was last asked, and its exit code once all of that is told."""

    log: bytes
    returncode: int | None


def start_guard(*folders: Path, wait_s: int = ORPHANS_S) -> subprocess.Popen[bytes]:
    """The guard of all processes whose groups are written to its standard input."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(wait_s), *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


def describe(num_cuda: int, needs: Needs) -> tuple[Machine, dict[str, str], NodeHas]:
    """The node, with so many CUDA devices as Ray gives away there, the versions of what has to be the same on
    all nodes, and what it has of its needs. Runs in a task of Ray, from which Ray hides the devices.
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
    """Each node that Ray has found, or why nothing of the run can be there: it does not answer, lacks some of
    these needs, or has other versions than `own`. Those of the first are put into that while it is empty.
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
    """That the node of this name has others than the controller's, if so."""
    own = {key: value for key, value in own.items() if key in EVERYWHERE}
    if versions == own:
        return None
    theirs, ours = (", ".join(f"{key} {value}" for key, value in one.items()) for one in (versions, own))
    what = f"the node {name} has {theirs}, the controller's has {ours}"
    way_out = "install the same versions on all nodes, in the Python that Ray runs under."
    return ConfigError(what, rule="all nodes run the same code", way_out=way_out)


class Host:
    """Starts, watches and ends the processes of a run on its node.

    Life: ready() -> start(), any number -> their ends, told by news() -> forgotten by end(). Ray may call an
        actor that awaits in another order than it was asked: a start comes to nothing after its own end.
    Waits: news() sleeps for at most as long as its caller says.
    """

    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """`numbers`: those that the CUDA devices have in the placement, in the order in which Ray gives them
        to this actor.
        """
        self._address, self._numbers = address, numbers
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-host-"))
        self._files = FetchedFiles()
        self._guard = start_guard(self._folder, self._files.folder)
        self._children = dict[str, ChildProcess]()
        self._starts = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Held by a start, and by the end that has to wait for it."""
        self._given_up = set[str]()
        """Keys of all whose end was asked for."""
        self._ends = dict[str, asyncio.Future[None]]()
        self._changed = asyncio.Event()
        self._cuda = dict[int, CudaDevice]()

    async def ready(self) -> None:
        """Learn which devices are ours."""
        import ray

        names = map(str, ray.get_gpu_ids())
        self._cuda = {number: CudaDevice(name) for number, name in zip(self._numbers, names, strict=True)}

    async def start(self, key: str, order: Order) -> Started | RefusedStart:
        """Start a process, under a key that no other had. Its log and its spec lie in a folder of its own."""
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
        """Of the processes with these keys, whose logs are known up to these bytes: after `wait_s` seconds,
        or as soon as one is started or ends.
        """
        self._changed.clear()
        known = {key: self._children[key] for key in offsets if key in self._children}
        if all(child.returncode is None for child in known.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        return {key: _news_of(child, offsets[key]) for key, child in known.items()}

    async def end(self, key: str) -> str:
        """End a process and its group; what is left of it, in words. Of one that is being started, because
        its caller has given that up, once it is.
        """
        self._given_up.add(key)
        async with self._starts[key]:
            if (child := self._children.get(key)) is None:  # its start was refused, or never got here
                return ""
            await child.aclose()
            return child.left

    async def forget(self, key: str) -> None:
        """Its log is read."""
        self._starts.pop(key, None)
        if self._children.pop(key, None) is not None:
            self._tell_guard()
            self._ends.pop(key).cancel()
        shutil.rmtree(self._folder / key, ignore_errors=True)

    def _tell_guard(self) -> None:
        assert self._guard.stdin is not None, "it has a pipe"
        groups = " ".join(str(child.pid) for child in self._children.values())
        with contextlib.suppress(BrokenPipeError):  # it was killed: processes that are frozen may stay
            self._guard.stdin.write(f"{groups}\n".encode())

    async def kill(self, key: str) -> None:
        """SIGKILL."""
        self._children[key].kill_nowait()

    async def dump_stacks(self, key: str) -> None:
        """Into its log."""
        self._children[key].dump_stacks_nowait()

    async def free_port(self) -> int:
        """Of this node's address."""
        return free_port_at(self._address)

    async def fetch(self, request: FileRequest) -> str:
        """Fetch a file of weights into this node's shared memory; return its path."""
        return await self._files.fetch(request)

    async def look(self, needs: Needs) -> NodeHas:
        """What is here of it."""
        return await asyncio.to_thread(look, needs)

    async def leave(self) -> None:
        """Remove all files."""
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
