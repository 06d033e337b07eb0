"""Harness `command`: one program, in any language, per rollout.

It reads the task as JSON on standard input. Its environment has the address, key and
model of the endpoint (endpoint_env), PATH, LANG, a private HOME and TMPDIR, and
generator.env. Answer and outcome key come only through the pipe, so that children
do not inherit them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from asyncrl.agents.harness import (
    OUTCOME,
    AnyTask,
    Session,
    without_proxy,
)
from asyncrl.agents.sandbox import HOME, forwarded, is_file, make_sandbox
from asyncrl.base.errors import (
    ConfigError,
    OutcomeUnusable,
    RolloutFailure,
    first_fault,
)
from asyncrl.base.failures import FailureKind, kind_of_error, kind_of_text
from asyncrl.base.signals import IGNORE_IN_SHELL, how_ended
from asyncrl.base.waits import at_most, shielded
from asyncrl.config import GeneratorConfig
from asyncrl.config.generator_config import ENDPOINT_ENV
from asyncrl.messages.records import Outcome

log = logging.getLogger("asyncrl.worker")

# Nothing else of the worker's environment: it may hold API keys, and the model runs
# programs with what a command inherits.
KEPT_ENV = ("PATH", "LANG")
OF_HOME = {
    "PYTHONUSERBASE": ".local",
    "PIP_CACHE_DIR": ".cache/pip",
    "UV_CACHE_DIR": ".cache/uv",
    "npm_config_cache": ".npm",
    "RUSTUP_HOME": ".rustup",
    "PYENV_ROOT": ".pyenv",
    "HF_HOME": ".cache/huggingface",
}
"""Folders of installed packages and downloads, which programs look for in HOME. A command
has a private HOME, and reads these folders in the worker's.
"""
MARK_ENV = "ASYNCRL_COMMAND"
STDERR_TAIL_BYTES = 2000
TAIL_BYTES = 2**20
"""The end of a program's output that is kept; earlier output is dropped."""
LIKE_A_REWARD = re.compile(
    r"^[^\w\n.]*(?:(?:reward|score)[^\w\n.]+)?\.?\d[\d.]*[^\S\n]*$",
    re.IGNORECASE | re.MULTILINE,
)
"""A line that is no outcome, but may be meant as one."""
GRACE_S = 2.0
_KILL_WAIT_S = 5.0
_POLL_S = 0.02
_DRAIN_S = 1.0

_GUARD = """
read _
for round in 1 2 3 4 5 6 7 8; do
    for file in $(grep -ls "$1" /proc/[0-9]*/environ); do
        pid=${file#/proc/}
        kill -9 "${pid%/environ}"
    done
done
rm -rf "$2"
"""
"""Wait for the worker's end, kill all processes with $1 in their environment, and
remove $2.
"""


class CommandHarness:
    """Run each command in its own process group and folder.

    Waits: for its exit, then up to GRACE_S for the rest of its group.

    Invariant: after run(), no process of the group, pipe or folder remains. A process
    outside the group ends with the worker or sandbox.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        """Arguments that name files become absolute. `is_worker`: kill all commands if
        this process is killed. Raises ConfigError.
        """
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        home = Path(os.environ.get("HOME", "/"))
        kept |= {
            name: str(home / place)
            for name, place in OF_HOME.items()
            if config.sandbox == "none" and (home / place).is_dir()
        }
        self._env = kept | passed_env(config.pass_env) | config.env
        # Each command runs in its own folder, in which a relative path would lead
        # nowhere.
        command = config.command or []
        self.command = [
            str(Path(part).absolute()) if is_file(part) else part for part in command
        ]
        programs = [
            self.command[0],
            *(["bwrap"] if config.sandbox == "bubblewrap" else []),
        ]
        found = {
            name: shutil.which(name, path=self._env.get("PATH")) for name in programs
        }
        if missing := [name for name, path in found.items() if path is None]:
            raise ConfigError(
                f"generator.command: there is no program {missing[0]} in {Path.cwd()} or PATH",
                way_out="correct or install it, and make the file executable.",
            )
        self.sandbox = make_sandbox(
            config, [*filter(None, found.values()), *self.command]
        )
        self.token = secrets.token_hex(8)
        self._folder: str | None = None
        if is_worker:
            self._folder = tempfile.mkdtemp(prefix="asyncrl-commands-")
            # A worker that is killed (kill -9, out of memory) cleans nothing up. The
            # guard sees the end of its pipe. Its own environment is empty, or it would
            # find the mark there and kill itself.
            self._guard = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    IGNORE_IN_SHELL + _GUARD,
                    "guard",
                    f"{MARK_ENV}={self.token}",
                    self._folder,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={},
            )

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-command-", dir=self._folder))
        for name in ("work", "tmp", "shm", "home"):
            (folder / name).mkdir()
        try:
            text = await self._run(task, session, folder)
            return last_line_outcome(text) if session.outcome_key is None else Outcome()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run(self, task: AnyTask, session: Session, folder: Path) -> str:
        """Return the standard output. Raises RolloutFailure."""
        command = self.command
        # Notes and sessions of agents in HOME would pass between the rollouts of a group.
        own_home = {"HOME": str(folder / "home")}
        environment = own_home | self._env | {"TMPDIR": str(folder / "tmp")}
        fds = list[int]()
        async with contextlib.AsyncExitStack() as stack:
            if self.sandbox is not None:
                inner_url, channel = await stack.enter_async_context(
                    forwarded(session.base_url)
                )
                session = replace(session, base_url=inner_url)
                fds.append(channel)
                command = self.sandbox(command, folder, channel)
                environment |= {"HOME": HOME, "TMPDIR": "/tmp"}
            environment |= endpoint_env(session) | {MARK_ENV: self.token}
            environment |= without_proxy(environment, session.base_url)
            # In its own session, the command leads a process group that can be killed
            # as a whole, and Ctrl-C reaches the worker only.
            start = asyncio.get_running_loop().subprocess_exec(
                _Process,
                *command,
                cwd=folder / "work",
                env=environment,
                start_new_session=True,
                pass_fds=fds,
            )
            try:
                # cancelled halfway, asyncio kills only the child and waits for the
                # pipes of its children
                (transport, process), cancelled = await shielded(start)
            except OSError as error:
                raise RolloutFailure(
                    f"command {command[0]} cannot be started: {error}",
                    kind=kind_of_error(error, FailureKind.RUNTIME_START),
                ) from error
            try:
                if cancelled is not None:
                    raise cancelled
                feed = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
                # Closed at once, for programs that read to the end.
                feed.write(_standard_input(task, session))
                feed.close()
                await process.ended.wait()
            finally:
                await _end(transport, process)
        return self._checked(process, transport.get_returncode() or 0)

    def _checked(self, process: _Process, code: int) -> str:
        if code != 0:
            tail = process.text(2)[-STDERR_TAIL_BYTES:].strip() or "(empty)"
            raise RolloutFailure(
                f"command {self.command[0]} {how_ended(code)}; the end of its standard error: {tail}",
                kind=kind_of_text(tail, FailureKind.AGENT_CRASH),
            )
        return process.text(1)


class _Process(asyncio.SubprocessProtocol):
    """The end of the output, by file descriptor."""

    def __init__(self) -> None:
        self.output = {1: bytearray(), 2: bytearray()}
        self.ended = asyncio.Event()
        self.drained = asyncio.Event()

    def text(self, fd: int) -> str:
        return self.output[fd][-TAIL_BYTES:].decode("utf-8", errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        output = self.output[fd]
        output += data
        # Rarely, since it moves the rest.
        if len(output) > 2 * TAIL_BYTES:
            del output[:-TAIL_BYTES]

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drained.set()


async def _end(transport: asyncio.SubprocessTransport, process: _Process) -> None:
    """End a command with its group, and read the rest of its output."""
    try:
        await _end_group(transport.get_pid())
        # a process outside the group may hold a pipe
        await _within_drain(process.drained)
    finally:
        transport.close()
        # It was killed, but a thread has yet to read that. Without this wait, a loop
        # that closes now leaves a process that nobody has waited for.
        _, cancelled = await shielded(_within_drain(process.ended))
        if cancelled is not None:
            raise cancelled


async def _within_drain(event: asyncio.Event) -> None:
    async with at_most(_DRAIN_S):
        await event.wait()


async def _end_group(group: int) -> None:
    """Send SIGTERM and, after GRACE_S or a second cancellation, SIGKILL."""
    try:
        for number, limit_s in (
            (signal.SIGTERM, GRACE_S),
            (signal.SIGKILL, _KILL_WAIT_S),
        ):
            _signal(group, number)
            async with at_most(limit_s):
                while _signal(group, 0):  # noqa: ASYNC110  it has no event
                    await asyncio.sleep(_POLL_S)
                return
    except asyncio.CancelledError:
        # The second cancellation does not wait for the grace of SIGTERM.
        _signal(group, signal.SIGKILL)
        raise


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def passed_env(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of generator.pass_env. Raises ConfigError if one is unset."""
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(
            f"generator.pass_env names {', '.join(missing)}, which this process does not have",
            way_out=f"export {missing[0]}=... before `asyncrl` is started.",
        )
    return {name: os.environ[name] for name in names}


def _standard_input(task: AnyTask, session: Session) -> bytes:
    values = asdict(task) | {"name": task.name}
    if session.outcome_key is not None:
        values |= {
            "outcome_url": f"{session.base_url}/outcome",
            "outcome_key": session.outcome_key,
        }
    return json.dumps(values).encode()


def last_line_outcome(text: str) -> Outcome:
    """Parse the last non-empty line: a number, an object of rewards, or nothing.

    Raises RolloutFailure for an object that is no outcome, and for a reward in an object
    on an earlier line.
    """
    # Only at line feeds: a JSON text may hold other line ends, such as U+2028.
    lines = [line.strip() for line in text.split("\n") if line.strip()] or [""]
    last = lines[-1]
    is_cut = len(lines) == 1 and len(text.encode()) >= TAIL_BYTES
    # A plain number is the reward, for programs without JSON.
    with contextlib.suppress(ValueError):
        last = json.dumps({"reward": float(last)})
    if is_cut or last.startswith("{"):
        try:
            return OUTCOME.validate_json(last)
        except ValidationError as error:
            raise _no_outcome(
                f"is not an outcome: {first_fault(error)}", last
            ) from None
    for line in lines:
        if line.startswith("{") and "reward" in line:
            with contextlib.suppress(ValidationError):
                OUTCOME.validate_json(line)
                raise _no_outcome("is text, after the outcome", line)
    if (found := LIKE_A_REWARD.search(text)) is not None:
        log.warning(
            "a command printed %r, but its last line is text, %r: the task scores. A reward must be "
            "the last line.",
            found[0].strip()[:80],
            last[:80],
        )
    return Outcome()


def _no_outcome(what: str, line: str) -> RolloutFailure:
    return OutcomeUnusable(
        f"the command's last line {what}: {line[:200]!r}",
        rule='print a number, an object like {"reward": 1.0, "metrics": {"turns": 3}}, or other text; '
        "an outcome is the last line",
    )


def endpoint_env(session: Session) -> dict[str, str]:
    """Return the variables in which programs look for address, key and model."""
    values = {
        "url": session.base_url,
        "host": session.base_url.removesuffix("/v1"),
        "key": session.api_key,
        "model": session.model,
    }
    return {name: values[value] for name, value in ENDPOINT_ENV.items()}
