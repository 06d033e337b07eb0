"""OpenEnv servers in their own processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("openenv_server_for_test.py")


class Server:
    """A server in its own process, which can be killed and started again."""

    def __init__(
        self,
        kind: str = "text",
        num_places: int = 8,
        *,
        program: Sequence[str] | None = None,
    ) -> None:
        """`program` gets the option --port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        program = program or [sys.executable, str(SERVER), kind, str(num_places)]
        self._command = [*program, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=ROOT)

    def wait_ready(self) -> Server:
        for _ in range(5000):  # a server imports for seconds of CPU time
            assert self.process.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
            except OSError:
                time.sleep(0.1)
            else:
                return self
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
