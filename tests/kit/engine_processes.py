"""Starts real engine servers for tests: binds the socket, hands it over, and ends the
process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_processes import popen

from asyncrl.base.http import SECRET_ENV

SECRET = "a secret for tests"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
"""The folder of the package of the simulated engine."""


@dataclass
class EngineProcess:
    """A running engine server. `process.stdin` is the pipe whose end means that its
    parent is gone.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def engine_process(
    kind: str, spec: dict[str, Any], folder: Path
) -> Iterator[EngineProcess]:
    """Start the server of a kind with `spec`: `asyncrl_servers.<kind>`, or the simulated
    engine. `folder` takes its spec file and log. Killed at the end.

    Connections wait in the socket's backlog until the server has loaded, so callers
    need not wait for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, SECRET_ENV: SECRET, "HF_HUB_OFFLINE": "1"}
    module = f"asyncrl_servers.{kind}"
    if kind == "simulated":
        module = "asyncrl_simulated.simulated_engine"
        env["PYTHONPATH"] = f"{BENCHMARKS}:{env.get('PYTHONPATH', '')}"
    spec_file, log = folder / "spec.json", folder / "engine.log"
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as listener,
        log.open("wb") as output,
    ):
        fd = listener.fileno()
        command = [
            sys.executable,
            "-m",
            module,
            "--spec",
            str(spec_file),
            "--fd",
            str(fd),
        ]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": output,
            "stderr": output,
        }
        process = popen(command, pass_fds=[fd], env=env, **pipes)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield EngineProcess(process, url, log)
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
