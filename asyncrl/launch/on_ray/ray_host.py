"""Ray actor that holds a node's processes: when it ends, their standard inputs close."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.base.errors import ConfigError
from asyncrl.launch import fork_server
from asyncrl.launch.devices import child_environ
from asyncrl.launch.machine import CudaDevice, Machine, find_cuda_devices, this_machine
from asyncrl.launch.nodes import NodeReport, NodeRequirements, inspect_node
from asyncrl.launch.on_ray.fetched_files import FetchedFiles
from asyncrl.launch.processes import ChildProcess, ProcessSpec, free_port_at
from asyncrl.messages.engine_api import FileRequest

RUNTIME_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""Ray's SIGKILL would leave weights in shared memory."""
REMOVE_AFTERWARDS = 'cat > /dev/null; rm -rf "$0"'


def describe(num_cuda: int) -> tuple[Machine, NodeReport]:
    """Return this node with its first `num_cuda` devices; Ray tasks hide devices."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    machine = replace(this_machine(), cuda=find_cuda_devices()[:num_cuda])
    return machine, inspect_node(NodeRequirements())


class Host:
    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """`numbers`: placement numbers of the CUDA devices, in Ray's order."""
        self._address = address
        self._numbers = numbers
        self._files = FetchedFiles()
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", REMOVE_AFTERWARDS, str(self._files.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._children = dict[str, ChildProcess]()
        self._waits = dict[str, asyncio.Future[None]]()
        self._changed = asyncio.Event()
        self._cuda = dict[int, CudaDevice]()

    async def ready(self, requirements: NodeRequirements) -> NodeReport:
        import ray

        names = map(str, ray.get_gpu_ids())
        self._cuda = {number: CudaDevice(name) for number, name in zip(self._numbers, names, strict=True)}
        return await asyncio.to_thread(inspect_node, requirements)

    async def start(self, key: str, spec: ProcessSpec) -> tuple[str, int | None] | ConfigError:
        """Return (URL, process id)."""
        if fork_server.current is None and spec.python is None:
            fork_server.current = fork_server.ForkServer()
        child = ChildProcess(spec, child_environ(spec.devices, self._cuda), self._address)
        try:
            await child.start()
        except ConfigError as error:
            return error
        self._children[key] = child
        self._waits[key] = asyncio.ensure_future(child.wait())
        self._waits[key].add_done_callback(lambda _: self._changed.set())
        return child.url, child.pid

    async def ends(self, wait_s: float) -> Mapping[str, int]:
        """Return exit codes after at most `wait_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._changed.clear()
        codes = {key: child.returncode for key, child in self._children.items()}
        return {key: code for key, code in codes.items() if code is not None}

    async def end(self, key: str) -> tuple[int | None, str]:
        """Return (exit code, survivors)."""
        child = self._children.get(key)
        if child is None:
            return None, ""
        await child.aclose()
        self._children.pop(key)
        self._waits.pop(key).cancel()
        return child.returncode, child.left

    async def kill(self, key: str) -> None:
        self._children[key].kill_nowait()

    async def dump_stacks(self, key: str) -> None:
        self._children[key].dump_stacks_nowait()

    async def free_port(self) -> int:
        return free_port_at(self._address)

    async def fetch(self, request: FileRequest) -> str:
        return await self._files.fetch(request)

    async def leave(self) -> None:
        await asyncio.to_thread(self._files.close)
        if fork_server.current is not None:
            fork_server.current.close()
