"""Ray actor that holds a node's processes: when it ends, their standard inputs close."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.launch import fork_server
from asyncrl.launch.launchers import find_misfit
from asyncrl.launch.machine import CudaDevice, Machine, child_environ, find_cuda_devices, this_machine
from asyncrl.launch.processes import ChildProcess, ProcessSpec, free_port_at
from asyncrl.messages.engine_api import FileRequest

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


NUM_KEPT = 2
RETRY_S = 0.5
SILENT_S = 10.0
"""Silence after which the trainer is lost."""
CHUNK_BYTES = 2**22


class FetchedFiles:
    def __init__(self) -> None:
        """Raises RoomError without space. Blocks."""
        clear_stale_staging()
        self.folder = new_staging_dir()
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._kept = defaultdict[str, list[Path]](list)

    async def fetch(self, request: FileRequest) -> str:
        """Return the local path. Raises OSError."""
        async with self._locks[request.purpose]:
            path = self.folder / f"{request.purpose}-{request.key}.safetensors"
            kept = self._kept[request.purpose]
            if path not in kept:
                for old in kept[: len(kept) - NUM_KEPT + 1]:
                    old.unlink(missing_ok=True)
                    kept.remove(old)
                try:
                    await download(request, path)
                except aiohttp.ClientResponseError as error:
                    raise OSError(f"{request.url} answered {error.status} {error.message}") from error
                kept.append(path)
            return str(path)

    def close(self) -> None:
        remove_staging_dir(self.folder)


async def download(request: FileRequest, path: Path) -> None:
    """Raises ConnectionError after SILENT_S without data."""
    clock = asyncio.get_running_loop().time
    part = path.with_suffix(".part")
    limits = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S / 2, sock_read=SILENT_S)
    headers = {"Authorization": f"Bearer {request.secret}", "Accept-Encoding": "identity"}
    heard_s = clock()
    async with aiohttp.ClientSession(raise_for_status=True, timeout=limits, headers=headers) as session:
        while True:
            try:
                with part.open("wb") as file:
                    async with session.get(request.url) as answer:
                        async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                            await asyncio.to_thread(file.write, chunk)
                            heard_s = clock()
                break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if clock() - heard_s > SILENT_S:
                    raise ConnectionError(f"{request.url} is silent: {error}") from error
                await asyncio.sleep(RETRY_S)
    part.rename(path)
