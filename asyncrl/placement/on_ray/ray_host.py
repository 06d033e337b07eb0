"""The actor of Ray that holds the processes of a run on one node; the controller's end is ray_node.py.

Our processes are ordinary children of it: when it ends, in whatever way, their standard inputs do, and they
exit. All arguments and answers are plain data, and an error of ours is one, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import asyncrl
from asyncrl.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.placement import fork_server
from asyncrl.placement.devices import child_environ
from asyncrl.placement.launchers import child_of, free_port_at, holds
from asyncrl.placement.machine import CudaDevice, Machine, find_cuda_devices, this_machine
from asyncrl.placement.nodes import Order
from asyncrl.placement.processes import ChildProcess
from asyncrl.waits import TimeLimit

MAX_LOG_BYTES = 2**18
"""Of each process in one answer."""


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

    def error(self, name: str) -> AsyncrlError:
        """To be raised on the other side."""
        words = {"rule": self.rule, "way_out": self.way_out}
        return ConfigError(self.what, **words) if self.is_config else RoomError(name, self.what, **words)


@dataclass(frozen=True, slots=True)
class News:
    """What a process has written since it was last asked, and its exit code once all of that is told."""

    log: bytes
    returncode: int | None


def describe(num_cuda: int) -> tuple[Machine, dict[str, str]]:
    """The node, with so many CUDA devices as Ray gives away there, and the versions of what has to be the
    same on all nodes. Runs in a task of Ray, from which Ray hides the devices.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = find_cuda_devices()[:num_cuda]
    versions = {"asyncrl": asyncrl.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return replace(this_machine(), cuda=found), versions


class Host:
    """Starts, watches and ends the processes of a run on its node.

    Life: ready() -> start(), any number -> their ends, told by news() -> forgotten by end().
    Waits: news() sleeps for at most as long as its caller says.
    """

    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """`numbers`: those that the CUDA devices have in the placement, in the order in which Ray gives them
        to this actor.
        """
        self._address, self._numbers = address, numbers
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-host-"))
        self._children = dict[str, ChildProcess]()
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
        if fork_server.current is None and order.python is None and fork_server.preloads(order.module):
            fork_server.current = fork_server.ForkServer()
        order = replace(order, run_dir=self._folder / key)
        child = child_of(order, child_environ(order.devices, self._cuda), self._address)
        try:
            await child.start()
        except AsyncrlError as error:
            what = error.fault if isinstance(error, RoomError) else error.what
            return RefusedStart(what, error.rule, error.way_out, isinstance(error, ConfigError))
        self._children[key] = child
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
                async with TimeLimit(wait_s):
                    await self._changed.wait()
        return {key: _news_of(child, offsets[key]) for key, child in known.items()}

    async def end(self, key: str) -> str:
        """End a process and its group; what is left of it, in words."""
        child = self._children[key]
        await child.aclose()
        return child.left

    async def forget(self, key: str) -> None:
        """Its log is read."""
        self._children.pop(key)
        self._ends.pop(key).cancel()
        shutil.rmtree(self._folder / key, ignore_errors=True)

    async def kill(self, key: str) -> None:
        """SIGKILL."""
        self._children[key].kill_nowait()

    async def dump_stacks(self, key: str) -> None:
        """Into its log."""
        self._children[key].dump_stacks_nowait()

    async def free_port(self) -> int:
        """Of this node's address."""
        return free_port_at(self._address)

    async def sees(self, path: str, token: str) -> bool:
        """Whether that file is here, and holds `token`."""
        return await asyncio.to_thread(holds, Path(path), token)

    async def leave(self) -> None:
        """Nothing of ours is left on the disk."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if fork_server.current is not None:
            fork_server.current.close()


def _news_of(child: ChildProcess, start: int) -> News:
    code = child.returncode
    with contextlib.suppress(OSError), child.log_path.open("rb") as file:
        file.seek(start)
        log = file.read(MAX_LOG_BYTES)
        return News(log, None if len(log) == MAX_LOG_BYTES else code)
    return News(b"", code)
