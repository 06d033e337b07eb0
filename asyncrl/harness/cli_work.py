"""What `asyncrl work URL` does: a worker on any host, for a run elsewhere. Knows arguments; the work is done by worker.py."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import socket
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.errors import ConfigError
from asyncrl.harness.build import HarnessSpec, build_harness
from asyncrl.harness.families import hide_memory
from asyncrl.harness.task import Harness
from asyncrl.harness.worker import end_process, log_to_stderr, work
from asyncrl.user_calls import end_what_is_left
from asyncrl.worker_wire import WORKER_KEY_ENV


def run_worker(
    url: str,
    *,
    key: str | None,
    python: str | None = None,
    command: str | None = None,
    verifiers: str | None = None,
    slots: int = 8,
    name: str | None = None,
    args: str | None = None,
    env: Sequence[str] = (),
    pass_env: Sequence[str] = (),
    key_file: Path | None = None,
    max_output_bytes: int = 2**20,
) -> None:
    """Lease rollouts from the gateway at `url` and run them until SIGTERM or Ctrl-C; then the process ends, with 143 or 130.

    `key` None: `key_file` or the environment has it, where no other user reads it. `command` is split like a shell's; `args` is a JSON
    object, `env` has NAME=VALUE, `pass_env` names of variables. Raises ConfigError for what cannot be; if the gateway refuses this
    worker, it is printed and the process ends.
    """
    worker_key = key or (_key_in(key_file) if key_file is not None else os.environ.get(WORKER_KEY_ENV))
    os.environ.pop(WORKER_KEY_ENV, None)
    if not worker_key:
        raise ConfigError(
            "`asyncrl work` has no worker key",
            way_out=f"set {WORKER_KEY_ENV} or give --key-file FILE; a run with generator.remote prints it, and its gateway.json has it.",
        )  # fmt: skip
    if slots < 1:
        raise ConfigError(f"--slots {slots} is less than 1", way_out="give the number of rollouts that this worker may run at once.")
    address = gateway_url(url)
    if sum(bool(each) for each in (python, command, verifiers)) != 1:
        raise ConfigError(
            "`asyncrl work` runs one harness", way_out="give one of --python MODULE:FUNCTION, --command '...', --verifiers ID."
        )
    spec = HarnessSpec(
        python=python, command=shlex.split(command) if command else None, verifiers=verifiers,
        args=_arguments(args), env=dict(_variable(each) for each in env), pass_env=list(pass_env), max_output_bytes=max_output_bytes,
    )  # fmt: skip
    log_to_stderr()
    hide_memory()
    harness = build_harness(spec)
    name = name or f"{socket.gethostname()}/{os.getpid()}"
    logging.getLogger("asyncrl.worker").info("worker %s: %d slots, %s, gateway %s", name, slots, spec.kind, address)
    asyncio.run(end_what_is_left(_work_and_end(harness, url=address, key=worker_key, name=name, slots=slots)))


async def _work_and_end(harness: Harness, *, url: str, key: str, name: str, slots: int) -> NoReturn:
    try:
        number = await work(harness, url=url, key=key, name=name, slots=slots)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        end_process(ConfigError.exit_code)
    end_process(128 + number)


def gateway_url(url: str) -> str:
    """http://host:port, without the /v1 that clients are given. Raises ConfigError if it is no such address."""
    address = url.rstrip("/").removesuffix("/v1")
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is no address of a gateway", way_out="write it like http://trainer-host:8700, as the run prints it.")
    return address


def _key_in(path: Path) -> str:
    """A file with the key alone, or a run's gateway.json."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        return str(json.loads(text)["worker_key"]) if text.startswith("{") else text
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--key-file {path} cannot be read: {type(error).__name__}: {error}",
            rule="it holds the worker key alone, or is the gateway.json of a run with generator.remote", way_out="name the right file.",
        ) from error  # fmt: skip


def _arguments(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args {text:.80} is no JSON: {error}", way_out="write it like --args '{\"max_turns\": 4}'.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--args {text:.80} is no JSON object", way_out="write it like --args '{\"max_turns\": 4}'.")
    return values


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--env {text} is not NAME=VALUE", way_out="write it like --env CORPUS=/data/wiki.")
    return name, value
