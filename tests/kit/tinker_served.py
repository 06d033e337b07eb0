"""A real `asyncrl serve tinker`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinker_stories import KEYS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tinker.yaml"
START_S = 120.0


@dataclass
class Served:
    """`run_dir` holds everything that outlives the process."""

    run_dir: Path
    process: subprocess.Popen[str]
    url: str

    def kill(self, name: str = "") -> None:
        """Kill the server, or one of its processes by a part of its command line."""
        if not name:
            self.process.kill()
            self.process.wait()
            return
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", name],
            capture_output=True,
            text=True,
            check=True,
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def served(run_dir: Path, *overrides: str, port: int = 0) -> Iterator[Served]:
    """Serve the tiny model until the block ends. `port` 0: any."""
    keys = [f"--key={name}={key}" for name, key in KEYS.items()]
    chosen = [f"tinker.port={port}"] if port else []
    command = [sys.executable, "-m", "asyncrl.cli", "serve", "tinker", str(CONFIG)]
    process = subprocess.Popen(
        [*command, *keys, "--run-dir", str(run_dir), *chosen, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        yield Served(run_dir, process, _url(process))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def free_port() -> int:
    """Return a port for a server that is started twice."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines, began_s = list[str](), time.monotonic()
    for line in process.stdout:
        lines.append(line)
        if "TINKER_BASE_URL=" in line:
            return line.rpartition("=")[2].strip()
        if time.monotonic() - began_s > START_S:
            break
    raise AssertionError("".join(lines))
