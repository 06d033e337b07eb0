"""Harness `command`: one program, in any language, per rollout.

It reads the task as JSON on standard input. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY,
OPENAI_MODEL, the same for Anthropic's clients, PATH, HOME, LANG, TMPDIR and generator.env. Answer and outcome
key come only with the task, through a pipe that is read once, so that children do not inherit them. Without
generator.sandbox, a command may read and write everything that the worker's user may (sandbox.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import ValidationError

from asyncrl.agents.command_processes import (
    MARK_ENV,
    end_group,
    kill_group_nowait,
    reap_orphans,
    start_guard,
)
from asyncrl.agents.harness import OUTCOME, AnyTask, Session, first_fault
from asyncrl.agents.sandbox import HOME, Forwarder, find_sandbox, is_file
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.config import GeneratorConfig
from asyncrl.messages.records import Outcome

log = logging.getLogger(__name__)

KEPT_ENV = ("PATH", "HOME", "LANG")
ROLLOUT_ENV = ["TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"]
ROLLOUT_ENV += ["ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"]
OWN_PREFIX = "ASYNCRL_"
"""Prefix of asyncrl's own variables (keys and secrets included), hidden from commands."""
STDERR_TAIL_BYTES = 2000
MAX_OUTPUT_BYTES = 2**20
"""Most that a command may print; more fails its rollout."""
_CHUNK_BYTES = 2**16


class CommandHarness:
    """Runs a command for each rollout, in its own session and folder.

    Life: run: folder created -> started -> exits, prints too much, or is cancelled -> its whole process group
        ended and reaped -> folder removed.
    Waits: run sleeps until the command exits; then up to GRACE_S for the rest of its group, and as long again
        after SIGKILL.
    Invariant: after run(), no process of the group, open pipe or folder remains.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        """Initialize. `is_worker`: adopt orphans of commands, and kill all commands if this process is
        killed. Arguments that name files become absolute, because the command runs in another folder.

        Raises ConfigError if the program or sandbox is missing, generator.env sets a reserved variable, or a
        variable of generator.pass_env is unset.
        """
        _refuse_own("generator.env", config.env)
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        self._env = kept | passed_env(config.pass_env) | config.env
        command = config.command or []
        self.command = [str(Path(part).absolute()) if is_file(part) else part for part in command]
        program = shutil.which(self.command[0], path=self._env.get("PATH"))
        if program is None:
            what = f"generator.command: there is no program {command[0]}"
            rule = f"it is looked for in {Path.cwd()} and on PATH={self._env.get('PATH', '')}"
            raise ConfigError(what, rule=rule, way_out="correct the name, or make the file executable.")
        self.sandbox = find_sandbox(config, [program, *self.command])
        self.token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._own_children: set[int] = set()
        self._num_starting = 0
        self._is_killed = False
        self._folder: str | None = None
        if is_worker:
            self._folder = tempfile.mkdtemp(prefix="asyncrl-commands-")
            self._guard = start_guard(self.token, self._folder)
            self._own_children.add(self._guard.pid)

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """Return the outcome on the last line (empty if outcomes are posted). Raises RolloutFailure for an
        exit code other than 0, too much output, or an invalid last line.
        """
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-command-", dir=self._folder))
        forwarder = None if self.sandbox is None else Forwarder(session.base_url)
        try:
            for name in ("work", "tmp", "shm"):
                (folder / name).mkdir()
            with (
                contextlib.closing(OutputPipe("standard output", MAX_OUTPUT_BYTES)) as output,
                contextlib.closing(OutputPipe("standard error", MAX_OUTPUT_BYTES)) as errors,
            ):
                code = await self._run(task, session, folder, forwarder, output, errors)
                if self._is_killed:  # killed by this process at its end: no result of the rollout
                    raise asyncio.CancelledError
                text = self._output(code, output, errors)
            return last_line_outcome(text) if session.outcome_key is None else Outcome()
        finally:
            if forwarder is not None:
                await forwarder.aclose()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def kill_all_nowait(self) -> None:
        """Kill all commands and cancel their rollouts. Callable from any thread."""
        self._is_killed = True
        kill_group_nowait(self.token)

    async def _run(
        self,
        task: AnyTask,
        session: Session,
        folder: Path,
        forwarder: Forwarder | None,
        output: OutputPipe,
        errors: OutputPipe,
    ) -> int:
        mark = f"{self.token}.{next(self._numbers)}."
        if forwarder is not None:
            session = replace(session, base_url=forwarder.inner_url)
        command, environment = self.command, self._environment(session, folder, mark)
        fds = tuple[int, ...]()
        if forwarder is not None and self.sandbox is not None:
            fds = (forwarder.their_end.fileno(),)
            command = self.sandbox.around(command, folder, fds[0])
            environment |= {"HOME": HOME, "TMPDIR": "/tmp"}
        reading_end, writing_end = os.pipe()  # a pipe, so that the task can be read only once
        feed, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(writing_end, "wb", buffering=0)
        )
        feed.write(_standard_input(task, session))
        feed.close()  # after all is written
        process: asyncio.subprocess.Process | None = None
        try:
            self._num_starting += 1
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=reading_end,
                    stdout=output.writing_end,
                    stderr=errors.writing_end,
                    cwd=folder / "work",
                    env=environment,
                    start_new_session=True,
                    pass_fds=fds,
                )
            except OSError as error:
                raise RolloutFailure(f"command {self.command[0]} cannot be started: {error}") from error
            finally:
                self._num_starting -= 1
                os.close(reading_end)
            self._own_children.add(process.pid)
            for pipe in (output, errors):
                pipe.read(on_overflow=functools.partial(kill_group_nowait, mark, process.pid))
            if forwarder is not None:
                await forwarder.wait_open()
            return await process.wait()
        finally:
            if feed.get_write_buffer_size():  # otherwise written and closed
                feed.abort()
            await self._end(process, mark)

    def _environment(self, session: Session, folder: Path, mark: str) -> dict[str, str]:
        return self._env | {
            "TMPDIR": str(folder / "tmp"),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.api_key,
            MARK_ENV: mark,
        }

    async def _end(self, process: asyncio.subprocess.Process | None, mark: str) -> None:
        group = process.pid if process else None
        try:
            if survivors := await end_group(mark, group):
                log.error("processes of command %s survive SIGKILL: %s", self.command[0], survivors)
            if process is not None:
                await process.wait()
        except asyncio.CancelledError:  # the second cancellation: no time left
            kill_group_nowait(mark, group)
            raise
        finally:
            if process is not None and process.returncode is not None:
                self._own_children.discard(process.pid)
            # a starting child, unknown to asyncio so far, would look like an orphan
            if self._folder is not None and not self._num_starting:
                reap_orphans(but=self._own_children)

    def _output(self, code: int, output: OutputPipe, errors: OutputPipe) -> str:
        """Raises RolloutFailure if the command failed."""
        for pipe in (output, errors):
            pipe.take()
            if pipe.is_over:
                what = f"command {self.command[0]} printed more than {pipe.max_bytes} bytes to {pipe.name}"
                raise RolloutFailure(what, way_out="print less.")
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            tail = errors.text()[-STDERR_TAIL_BYTES:].strip() or "(empty)"
            raise RolloutFailure(f"command {self.command[0]} {how}; the end of its standard error: {tail}")
        return output.text()


def passed_env(names: Sequence[str]) -> dict[str, str]:
    """Return these variables. Raises ConfigError for an unset or a reserved variable."""
    _refuse_own("generator.pass_env", names)
    if missing := [name for name in names if name not in os.environ]:
        what = f"generator.pass_env names {', '.join(missing)}, which this process does not have"
        raise ConfigError(what, way_out=f"export {missing[0]}=... before `asyncrl` is started.")
    return {name: os.environ[name] for name in names}


def _refuse_own(setting: str, names: Iterable[str]) -> None:
    if taken := sorted(name for name in names if name in ROLLOUT_ENV or name.startswith(OWN_PREFIX)):
        rule = f"{', '.join(ROLLOUT_ENV)} are set for each rollout; {OWN_PREFIX}... are asyncrl's own"
        raise ConfigError(f"{setting} has {', '.join(taken)}", rule=rule, way_out="choose other names.")


def _standard_input(task: AnyTask, session: Session) -> bytes:
    """Return the task with the outcome key, which the command's children would inherit from the
    environment.
    """
    values = asdict(task) | {"name": task.name}
    if session.outcome_key is not None:
        values |= {"outcome_url": f"{session.base_url}/outcome", "outcome_key": session.outcome_key}
    return json.dumps(values).encode()


def last_line_outcome(text: str) -> Outcome:
    """Parse the last non-empty line: a number, a JSON object of rewards, or nothing. Raises
    RolloutFailure.
    """
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        with contextlib.suppress(ValueError):
            last = json.dumps({"reward": float(last)})
        return OUTCOME.validate_json(last) if last.startswith("{") else Outcome()
    except ValidationError as error:
        what = f"the command's last line is no outcome: {last[:200]!r}: {first_fault(error)}"
        rule = 'it is a number, an object like {"reward": 1.0, "metrics": {"turns": 3}}, or any other text'
        raise RolloutFailure(what, rule=rule) from None


class OutputPipe:
    """Pipe read without waiting for EOF, so that a process that keeps its end open cannot block the worker.

    Life: both ends open -> passed to a process -> read() -> take() for the rest after the process's exit ->
        close().
    Invariant: holds at most max_bytes and one chunk.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name, self.max_bytes, self._data = name, max_bytes, bytearray()
        reading_end, writing_end = os.pipe()
        os.set_blocking(reading_end, False)
        self._reading_end = os.fdopen(reading_end, "rb", buffering=0)
        self.writing_end = os.fdopen(writing_end, "wb", buffering=0)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading_end)
        self._reading_end.close()
        self.writing_end.close()

    @property
    def is_over(self) -> bool:
        return len(self._data) > self.max_bytes

    def text(self) -> str:
        return self._data.decode("utf-8", errors="replace")

    def read(self, on_overflow: Callable[[], None]) -> None:
        """Read while the process runs. `on_overflow` is called beyond max_bytes."""

        def readable() -> None:
            self.take()
            if self.is_over:
                on_overflow()

        self.writing_end.close()
        asyncio.get_running_loop().add_reader(self._reading_end, readable)

    def take(self) -> None:
        """Read the bytes written so far."""
        while not self.is_over:
            chunk = self._reading_end.read(_CHUNK_BYTES)
            if chunk is None:  # no data now
                return
            self._data += chunk
            if not chunk:
                break
        asyncio.get_running_loop().remove_reader(self._reading_end)
