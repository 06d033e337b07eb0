"""The worker process: `python -m asyncrl.agents.worker` as a child of a run, `asyncrl work URL` on any host.

Harnesses run on the event loop of the main thread. GET /health of a child is answered from another thread, so
that a harness that blocks the loop costs its rollouts and not the run. SIGTERM ends a worker with all that
its commands have started; so does the end of the parent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import Field

from asyncrl.agents.harness import Harness, build_harness
from asyncrl.agents.process_group import hide_memory
from asyncrl.agents.work_client import Worker
from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError
from asyncrl.http import Caller
from asyncrl.messages.base import ErrorBody, Message, fatal_line
from asyncrl.messages.work import WORKER_KEY_ENV, WorkerHealth
from asyncrl.user_code import end_what_is_left


class WorkerSpec(Message):
    """What a worker of a run gets; the worker key is a secret beside it, WORKER_KEY_ENV."""

    name: str
    url: str
    slots: int = Field(ge=1)
    harness: GeneratorConfig


def work(
    harness: Harness,
    spec: WorkerSpec,
    key: str,
    *,
    say: Callable[[ConfigError], int],
    begun: Callable[[Worker], None] = lambda worker: None,
    code_of: Callable[[int], int] = lambda number: 128 + number,
) -> NoReturn:
    """Work until SIGTERM or SIGINT comes, and end the process with code_of its number; the second one ends it
    at once. `say` prints a ConfigError that Worker.run raises, and returns the exit code.
    """

    async def live() -> int:
        caller, caught = Caller("gateway", spec.url, key), list[int]()
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            if caught:  # the second one does not wait for what a harness cleans up
                end_process(128 + number)
            caught.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        try:
            worker = Worker(harness, caller, name=spec.name, slots=spec.slots)
            begun(worker)
            await worker.run()
        except asyncio.CancelledError:
            if not caught:
                raise
        finally:
            await caller.aclose()
        return code_of(caught[0])

    async def live_and_end() -> NoReturn:
        try:
            code = await live()
        except ConfigError as error:
            code = say(error)
        end_process(code)

    asyncio.run(end_what_is_left(live_and_end()))
    raise AssertionError("the process has ended")


def main() -> None:
    """Work until SIGTERM or the parent's end; ends with a fatal line if the spec cannot be met."""
    from asyncrl.http import child_arguments, die_with_parent, fail, make_app, secret_of, serve

    text, fd = child_arguments()
    spec = WorkerSpec.model_validate_json(text)
    harnesses: list[Harness] = []

    def kill_commands() -> None:
        for harness in harnesses:
            getattr(harness, "kill_all_nowait", lambda: None)()

    die_with_parent(kill_commands)
    log_to_stderr()
    hide_memory()
    key = secret_of(WORKER_KEY_ENV)
    try:
        harnesses.append(build_harness(spec.harness))
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)

    def serve_health(worker: Worker) -> None:
        loop, app = asyncio.get_running_loop(), make_app()

        @app.get("/health")
        async def health() -> WorkerHealth:
            return worker.health(loop.time())

        threading.Thread(target=serve, args=(app, fd), name="health", daemon=True).start()

    def say(error: ConfigError) -> int:
        body = ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out)
        print(fatal_line(body), file=sys.stderr)
        return 1

    work(harnesses[0], spec, key, say=say, begun=serve_health, code_of=lambda number: 0)


def log_to_stderr() -> None:
    """The worker's log, without a line for each call of the model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def end_process(code: int) -> NoReturn:
    """End at once, from within the event loop: closing that would wait for threads that a harness has hanging
    in asyncio.to_thread.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- `asyncrl work`


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
    """Run rollouts of the gateway at `url` until SIGTERM or Ctrl-C; then the process ends, with 143 or 130.

    `key` None: `key_file` or the environment has it, where no other user reads it. `command` is split like a
    shell's; `args` is a JSON object, `env` has NAME=VALUE, `pass_env` names of variables. Raises ConfigError
    for what cannot be; if the gateway refuses this worker, it is printed and the process ends.
    """
    worker_key = key or (_key_in(key_file) if key_file is not None else os.environ.get(WORKER_KEY_ENV))
    os.environ.pop(WORKER_KEY_ENV, None)
    if not worker_key:
        raise ConfigError(
            "`asyncrl work` has no worker key",
            way_out=f"set {WORKER_KEY_ENV} or give --key-file FILE; a run with generator.remote prints it, "
            f"and its gateway.json has it.",
        )
    try:
        harness = GeneratorConfig(
            python=python,
            command=shlex.split(command) if command else None,
            verifiers=verifiers,
            args=json.loads(args or "{}"),
            env=dict(_variable(each) for each in env),
            pass_env=list(pass_env),
            max_output_bytes=max_output_bytes,
        )
        if not harness.is_harness:
            raise ValueError("no harness is given")
        name = name or f"{socket.gethostname()}/{os.getpid()}"
        spec = WorkerSpec(name=name, url=gateway_url(url), slots=slots, harness=harness)
    except ValueError as error:
        raise ConfigError(
            f"`asyncrl work` got python={python}, command={command}, verifiers={verifiers}, {args=}: {error}",
            rule="it runs one harness: --python MODULE:FUNCTION, --command '...' or --verifiers ID",
            way_out="write --args as a JSON object, like '{\"max_turns\": 4}'.",
        ) from error
    log_to_stderr()
    hide_memory()
    logging.getLogger("asyncrl.worker").info("worker %s: %d slots, gateway %s", name, slots, spec.url)

    def say(error: ConfigError) -> int:
        print(f"ConfigError: {error}", file=sys.stderr)
        return ConfigError.exit_code

    work(build_harness(spec.harness), spec, worker_key, say=say)


def gateway_url(url: str) -> str:
    """http://host:port, without the /v1 that clients are given. Raises ConfigError if it is no such
    address.
    """
    address = url.rstrip("/").removesuffix("/v1")
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        way_out = "write it like http://trainer-host:8700, as the run prints it."
        raise ConfigError(f"{url} is no address of a gateway", way_out=way_out)
    return address


def _key_in(path: Path) -> str:
    """A file with the key alone, or a run's gateway.json."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        return str(json.loads(text)["worker_key"]) if text.startswith("{") else text
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--key-file {path} cannot be read: {type(error).__name__}: {error}",
            rule="it holds the worker key alone, or is the gateway.json of a run with generator.remote",
        ) from error


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--env {text} is not NAME=VALUE", way_out="write it like --env CORPUS=/data/wiki.")
    return name, value


if __name__ == "__main__":
    main()
