"""CUDA MPS lets kernels of two processes run on one device at the same time, instead of
in time slices.

Each run has a control daemon in a private folder. No setting of a device is changed.
See https://docs.nvidia.com/deploy/mps/.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from asyncio import subprocess
from collections.abc import Iterable
from pathlib import Path

from asyncrl.base.signals import IGNORE_IN_SHELL
from asyncrl.config import RunConfig
from asyncrl.launch.machine import CudaDevice

CONTROL = "nvidia-cuda-mps-control"
START_TIMEOUT_S = 30.0
PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
codes = cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
raise SystemExit(f"CUDA error {max(codes)} in a process under MPS" if any(codes) else 0)
"""
"""Fails without a usable MPS server, which the daemon starts for its first client."""
KEEP_DAEMON = """
trap 'echo quit | "$0"; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
exec 3>&1 > "$CUDA_MPS_LOG_DIRECTORY/start.log" 2>&1
"$0" -d < /dev/null 3>&- && timeout -s KILL "$3" "$1" -c "$2" < /dev/null 3>&- || exit
echo started >&3
cat > /dev/null
"""
"""$0: CONTROL, $1: Python, $2: PROBE, $3: its limit in seconds, because aclose() waits
for this shell, which waits for the probe. Standard input ends with the run, also if the
controller is killed.
"""


def why_time_slices(config: RunConfig, devices: Iterable[CudaDevice]) -> str:
    """Return why processes cannot use these devices at the same time; '': they can, by
    MPS.
    """
    if config.placement.mps == "never":
        return "placement.mps=never"
    if config.launcher != "local":
        return f"launcher={config.launcher} starts no MPS"
    for device in devices:
        if device.mode != "Default":
            return f"the compute mode of CUDA device {device.name} is {device.mode or 'unknown'}, not Default"
    return "" if shutil.which(CONTROL) else f"{CONTROL} is not installed"


class Mps:
    """Control daemon of this run, kept by a shell.

    Life: start() -> running -> aclose(), or the death of this process: then the shell
        stops the daemon.
    """

    def __init__(self, devices: Iterable[CudaDevice], logs: Path) -> None:
        # A socket's path has at most 107 bytes, which a run directory or TMPDIR may
        # exceed.
        self._folder = tempfile.mkdtemp(prefix="asyncrl-mps-", dir="/tmp")
        self._logs = logs
        self._devices = devices
        self._shell: subprocess.Process | None = None

    def environ(self, devices: Iterable[CudaDevice]) -> dict[str, str]:
        """Return the environment of a client. Daemon and clients agree only on UUIDs,
        not on numbers.
        """
        names = ",".join(device.uuid for device in devices)
        return {"CUDA_VISIBLE_DEVICES": names, "CUDA_MPS_PIPE_DIRECTORY": self._folder}

    async def start(self) -> str:
        """Return why the daemon does not work, or ''."""
        self._logs.mkdir(parents=True, exist_ok=True)
        folder = {"CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
        self._shell = await asyncio.create_subprocess_exec(
            *(
                "/bin/sh",
                "-c",
                IGNORE_IN_SHELL + KEEP_DAEMON,
                CONTROL,
                sys.executable,
                PROBE,
                str(START_TIMEOUT_S),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environ(self._devices), **folder},
            start_new_session=True,
        )
        assert self._shell.stdout is not None
        # KEEP_DAEMON prints one line if the daemon works; end-of-file or silence mean
        # that it does not.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                if await self._shell.stdout.readline():
                    return ""
        return f"CUDA MPS does not start; read {self._logs}/start.log"

    async def aclose(self) -> None:
        """Stop the daemon. Idempotent."""
        if self._shell is not None and self._shell.stdin is not None:
            # End-of-file ends `cat`, and the shell's trap stops the daemon.
            self._shell.stdin.close()
            await self._shell.wait()
