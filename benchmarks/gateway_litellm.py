"""LiteLLM's proxy, the peer of benchmarks/gateway.py: in an environment of its own, with all off that it can
leave out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

from asyncrl.launch.processes import bind_socket

HOME = Path.home() / ".cache" / "asyncrl-bench" / "litellm"
PACKAGE = "litellm[proxy]"
MODEL = "bench"
START_S = 240.0


class NotInstalled(Exception):  # noqa: N818  the benchmark goes on without the peer
    """LiteLLM cannot be had."""


def find_python(given: Path | None) -> Path:
    """Python of the environment with LiteLLM: the one that was given, or one made on demand. Raises
    NotInstalled.
    """
    python = given or HOME / "bin" / "python"
    if not python.exists() and given is None:
        print(f"installing {PACKAGE} into {HOME}, once", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", str(HOME)],
            [str(python), "-m", "pip", "install", "-q", PACKAGE],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise NotInstalled(
                    f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()[-500:]}"
                )
    version_of(python)
    return python


def version_of(python: Path) -> str:
    """Version of LiteLLM there. Raises NotInstalled."""
    asked = [
        str(python),
        "-c",
        "from importlib.metadata import version; import uvloop; print(version('litellm'))",
    ]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(f"{python} has no LiteLLM: {error}") from None


@contextlib.asynccontextmanager
async def running(
    python: Path, engine_url: str, secret: str, core: int, folder: Path
) -> AsyncIterator[tuple[int, int]]:
    """(process id, port) of a proxy with one worker on one core, no database, no logging, no key of its
    own.
    """
    (folder / "litellm.yaml").write_text(yaml.safe_dump(_config(engine_url, secret)))
    with bind_socket() as listener:
        port = listener.getsockname()[1]
    command = [
        str(python.parent / "litellm"),
        "--config",
        str(folder / "litellm.yaml"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    env = {name: value for name, value in os.environ.items() if name != "LITELLM_MASTER_KEY"}
    env |= {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"
    }  # as ours has no users to look up, so the peer has none
    with (folder / "litellm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--num_workers",
            "1",
            "--telemetry",
            "False",
            cwd=folder,
            env=env,
            stdout=log,
            stderr=log,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        async with asyncio.timeout(START_S):
            while not await _answers(port):
                if process.returncode is not None:
                    raise NotInstalled(
                        f"LiteLLM ended with {process.returncode}: "
                        f"{(folder / 'litellm.log').read_text()[-1500:]}"
                    )
                await asyncio.sleep(0.5)
        yield process.pid, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _config(engine_url: str, secret: str) -> dict[str, object]:
    """One model; what production.md of its documentation turns off is off."""
    return {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {"model": "openai/sim", "api_base": f"{engine_url}/v1", "api_key": secret},
            }
        ],
        "litellm_settings": {
            "set_verbose": False,
            "telemetry": False,
            "num_retries": 0,
            "request_timeout": 600,
        },
        "general_settings": {
            "disable_spend_logs": True,
            "disable_error_logs": True,
            "disable_adding_master_key_hash_to_db": True,
        },
    }


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
