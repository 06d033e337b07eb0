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
from asyncrl.launch.launchers import find_misfit
from asyncrl.launch.machine import CudaDevice, Machine, child_environ, find_cuda_devices, this_machine
from asyncrl.launch.processes import ChildProcess, ProcessSpec, free_port_at
from asyncrl.messages.engine_api import FileRequest
from asyncrl.weights.download import FetchedFiles

RUNTIME_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""Ray's SIGKILL would leave weights in shared memory."""
REMOVE_AFTERWARDS = 'cat > /dev/null; rm -rf "$0"'


def describe(num_cuda: int) -> Machine:
    """Return this node with its first `num_cuda` devices; Ray tasks hide devices."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return replace(this_machine(), cuda=find_cuda_devices()[:num_cuda])


class Host:
    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """`numbers`: placement numbers of the CUDA devices, in Ray's order."""
        self._address = address
        self._numbers = numbers
        self._files = FetchedFiles()
        remover = ["/bin/sh", "-c", REMOVE_AFTERWARDS, str(self._files.folder)]
        self._remover = subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True)
        self._children = dict[str, ChildProcess]()
        self._cuda = dict[int, CudaDevice]()

    async def ready(
        self, name: str, files: Mapping[str, str], versions: Mapping[str, str]
    ) -> ConfigError | None:
        import ray

        names = map(str, ray.get_gpu_ids())
        self._cuda = {number: CudaDevice(name) for number, name in zip(self._numbers, names, strict=True)}
        return await asyncio.to_thread(find_misfit, name, files, versions)

    async def start(self, key: str, spec: ProcessSpec) -> tuple[str, int | None]:
        """Return (URL, process id)."""
        if fork_server.current is None and spec.python is None:
            fork_server.current = fork_server.ForkServer()
        child = ChildProcess(spec, child_environ(spec.devices, self._cuda), self._address)
        await child.start()
        self._children[key] = child
        return child.url, child.pid

    async def call(self, key: str, method: str, limit_s: float | None = None) -> int | None:
        """Call a method of a process; return its exit code, or None while it runs."""
        child = self._children[key]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                answer = getattr(child, method)()
                if answer is not None:
                    await answer
        return child.returncode

    async def free_port(self) -> int:
        return free_port_at(self._address)

    async def fetch(self, request: FileRequest) -> str:
        return await self._files.fetch(request)

    async def leave(self) -> None:
        await asyncio.to_thread(self._files.close)
        if fork_server.current is not None:
            fork_server.current.close()
