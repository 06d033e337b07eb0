"""Starts a real vLLM server for tests, in vLLM's own Python: the socket, the secret,
the log, and the end of the whole process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_processes import SECRET, EngineProcess

from asyncrl.base.http import SECRET_ENV
from asyncrl.launch.processes import group_members

ROOT = Path(__file__).parents[2]


def vllm_python() -> Path:
    """The Python that has vLLM. Skips the test if there is none, and fails it where
    ASYNCRL_REQUIRE_VLLM=1.
    """
    python = Path(
        os.environ.get("ASYNCRL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python"
    )
    if not python.exists():
        if os.environ.get("ASYNCRL_REQUIRE_VLLM") == "1":
            pytest.fail(
                f"ASYNCRL_REQUIRE_VLLM=1, but there is no {python}: run `make setup-vllm`"
            )
        pytest.skip(f"no vLLM at {python}: run `make setup-vllm`")
    return python


class VllmProcess(EngineProcess):
    """A vLLM server, perhaps still starting."""

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        secret: str | None = SECRET,
        timeout_s: float = 120.0,
    ) -> Any:
        """The JSON of an answer. Raises httpx.HTTPStatusError."""
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        sent = (body or {}) if method == "POST" else None
        answer = httpx.request(
            method,
            self.url + path,
            json=sent,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
        )
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def rpc(self, method: str, **request: Any) -> dict[str, Any]:
        """Return the first worker's answer to a method of the extension."""
        answer = self.ask(
            "POST", "/collective_rpc", {"method": method, "args": [json.dumps(request)]}
        )
        result: dict[str, Any] = answer["results"][0]
        return result

    def generate(
        self, prompt_ids: list[int], *, salt: str | None = None, **sampling: Any
    ) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of one request. `salt` divides the prefix cache."""
        params = {
            "max_tokens": 16,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            **sampling,
        }
        body = {"token_ids": prompt_ids, "sampling_params": params} | (
            {"cache_salt": salt} if salt else {}
        )
        choice = self.ask("POST", "/inference/v1/generate", body)["choices"][0]
        return choice["token_ids"], [
            token["logprob"] for token in choice["logprobs"]["content"]
        ]

    def wait_ready(self, timeout_s: float = 400.0) -> VllmProcess:
        """Connections wait in the socket's backlog until vLLM serves, so this is one
        request.
        """
        self.ask("GET", "/health", timeout_s=timeout_s)
        return self

    def group(self) -> list[int]:
        """Running processes of the server's group."""
        leader = [self.process.pid] if self.process.poll() is None else []
        return leader + [member.pid for member in group_members(self.process.pid)]

    def wait_group_ended(self) -> None:
        end = time.monotonic() + 400
        while group := self.group():
            assert time.monotonic() < end, f"{group}\n{self.read_log()[-3000:]}"
            time.sleep(0.05)

    def scratch(self) -> Path:
        """Return the folder of its sockets."""
        members = [psutil.Process(pid) for pid in self.group()]
        sockets = [
            each.laddr for member in members for each in member.net_connections("unix")
        ]
        (scratch,) = set(re.findall(r"[^\s']+/asyncrl-vllm-\w+", " ".join(sockets)))
        return Path(scratch)

    def assert_leaves_nothing(self, end: Callable[[], object], code: int) -> None:
        """After `end` it ends with this code, and leaves no processes, shared memory or
        files.
        """
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.group())
        shared, scratch = set(re.findall(r"/dev/shm/[^\s]+", maps)), self.scratch()
        assert any("psm_" in name for name in shared)
        end()
        assert self.process.wait(120) == code
        self.wait_group_ended()
        assert not [name for name in shared if Path(name).exists()]
        assert not scratch.exists()


def packages_for(folder: Path) -> Path:
    """Return a folder of our packages and nothing else: vLLM's Python must not see our
    site-packages.
    """
    packages = folder / "path"
    packages.mkdir()
    (packages / "asyncrl").symlink_to(ROOT / "asyncrl")
    (packages / "asyncrl_servers").symlink_to(ROOT / "servers" / "asyncrl_servers")
    (packages / "faulty_vllm_worker.py").symlink_to(
        ROOT / "tests" / "kit" / "faulty_vllm_worker.py"
    )
    return packages


@contextmanager
def vllm_process(
    spec: dict[str, Any], folder: Path, port: int = 0
) -> Iterator[VllmProcess]:
    """Start `asyncrl_servers.vllm` with `spec`; `folder` takes its spec file and log.
    Its whole group is ended at the end. It is not waited for: see wait_ready.
    """
    python = vllm_python()
    folder.mkdir(parents=True, exist_ok=True)
    spec_file = folder / "spec.json"
    log = folder / "engine.log"
    packages = packages_for(folder)
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    with (
        socket.create_server(("127.0.0.1", port), backlog=512) as listener,
        log.open("wb") as output,
    ):
        fd = listener.fileno()
        process = subprocess.Popen(
            [
                str(python),
                "-m",
                "asyncrl_servers.vllm",
                "--spec",
                str(spec_file),
                "--fd",
                str(fd),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[fd],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(packages)},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert process.stdin is not None
    process.stdin.write(json.dumps({SECRET_ENV: SECRET}).encode() + b"\n")
    process.stdin.flush()
    server = VllmProcess(process, url, log)
    try:
        yield server
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        # Its reaper ends them, and takes shared memory and scratch folder away.
        psutil.wait_procs(group_members(process.pid), timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
