"""The harness `command`: a program of any language, once a rollout.

It finds the task as JSON on standard input, and in its environment OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL, beside PATH, HOME, LANG, TMPDIR and generator.env. What it starts inherits the environment and
does not find the answer or the outcome key there: those come with the task, through a pipe that is read once.
This keeps rollouts apart from each other and from the run's settings. It is not a sandbox: a command may read
and write everything that the worker's user may.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from asyncrl.agents.harness import OUTCOME, AnyTask, Session, first_fault
from asyncrl.agents.process_group import (
    MARK_ENV,
    adopt_orphans,
    end_group,
    find_group,
    kill_group_nowait,
    kill_when_gone,
    reap_orphans,
)
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Outcome

log = logging.getLogger(__name__)

KEPT_ENV = ("PATH", "HOME", "LANG")
ROLLOUT_ENV = ("TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
OWN_PREFIX = "ASYNCRL_"
"""Prefix of asyncrl's own variables: MARK_ENV, keys and secrets. A command gets none of them."""
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL; less than the worker itself is given."""
STDERR_TAIL_BYTES = 2000
_CHUNK_BYTES = 2**16


class CommandHarness:
    """Runs a command for each rollout, in a session and a folder of its own.

    Life: run: folder made -> started -> exits, prints too much, or is cancelled -> its whole process group
        ended and reaped -> folder removed.
    Waits: run sleeps until the command exits; then GRACE_S at most for what it left behind, and as long again
        after SIGKILL.
    Invariant: when run() is left, no process of the group lives (see process_group.py for what escapes), no
        pipe is open, no folder left.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        max_output_bytes: int,
        *,
        pass_env: Sequence[str] = (),
        is_worker: bool = False,
    ) -> None:
        """`pass_env`: names of variables of this process that the command gets, too. `is_worker`: this
        process has no children but commands: it adopts the processes that a command leaves behind, and if
        this process itself is killed they are killed too. Arguments that name files of the working directory
        are given as absolute paths: the command runs in another one.

        Raises ConfigError if there is no such program, `env` sets what is not its own, or a variable of
        `pass_env` is not set.
        """
        _refuse_own("generator.env", env)
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        self._env = kept | passed_env(pass_env) | dict(env)
        self.command = tuple(str(Path(part).absolute()) if Path(part).is_file() else part for part in command)
        if shutil.which(self.command[0], path=self._env.get("PATH")) is None:
            raise ConfigError(
                f"generator.command: there is no program {command[0]}",
                rule=f"it is looked for in {Path.cwd()} and on PATH={self._env.get('PATH', '')}",
                way_out="correct the name, give an absolute path, or make the file executable.",
            )
        self.max_output_bytes = max_output_bytes
        self.token = secrets.token_hex(8)
        """Prefix of the marks of all commands of this harness."""
        self._numbers = itertools.count()
        self._own_children: set[int] = set()
        self._num_starting = 0
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-commands-")) if is_worker else None
        if self._folder is not None:
            self._killer = kill_when_gone(self.token, self._folder)
            self._own_children.add(self._killer.pid)
            adopt_orphans()

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """The outcome on the command's last line (empty where outcomes are posted). Raises RolloutFailure for
        any exit code but 0, too much output, or a last line that is not an outcome.
        """
        mark = f"{self.token}.{next(self._numbers)}."
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-command-", dir=self._folder))
        try:
            (folder / "work").mkdir()
            (folder / "tmp").mkdir()
            most = self.max_output_bytes
            with (
                contextlib.closing(OutputPipe(most)) as output,
                contextlib.closing(OutputPipe(most)) as errors,
            ):
                code = await self._run(task, session, mark, folder, output, errors)
                text = self._output(code, output, errors)
            return last_line_outcome(text) if session.outcome_key is None else Outcome()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def kill_all_nowait(self) -> None:
        """SIGKILL to all that any command of this harness has started."""
        kill_group_nowait(self.token)

    async def _run(
        self, task: AnyTask, session: Session, mark: str, folder: Path, output: OutputPipe, errors: OutputPipe
    ) -> int:
        reading_end, writing_end = os.pipe()  # read once: a pipe keeps nothing
        feed, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(writing_end, "wb", buffering=0)
        )
        feed.write(_standard_input(task, session))
        feed.close()  # once all is written
        environment = self._env | {
            "TMPDIR": str(folder / "tmp"),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            MARK_ENV: mark,
        }
        process: asyncio.subprocess.Process | None = None
        try:
            self._num_starting += 1
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=reading_end,
                    stdout=output.writing_end,
                    stderr=errors.writing_end,
                    cwd=folder / "work",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise RolloutFailure(f"command {self.command[0]} cannot be started: {error}") from error
            finally:
                self._num_starting -= 1
                os.close(reading_end)
                output.close_writing_end()
                errors.close_writing_end()
            self._own_children.add(process.pid)
            for pipe in (output, errors):
                pipe.read(on_overflow=functools.partial(kill_group_nowait, mark, process.pid))
            return await process.wait()
        finally:
            if feed.get_write_buffer_size():  # else all is written, and it is closed
                feed.abort()
            await self._end(process, mark)

    async def _end(self, process: asyncio.subprocess.Process | None, mark: str) -> None:
        group = process.pid if process else None
        try:
            if not await end_group(mark, group, grace_s=GRACE_S):
                survivors = find_group(mark, group)
                log.error("processes of command %s survive SIGKILL: %s", self.command[0], survivors)
            if process is not None:
                await process.wait()
        except asyncio.CancelledError:  # a second one: there is no time left
            kill_group_nowait(mark, group)
            raise
        finally:
            if process is not None and process.returncode is not None:
                self._own_children.discard(process.pid)
            # while a child starts, asyncio does not know it yet and it might be taken for an orphan
            if self._folder is not None and not self._num_starting:
                reap_orphans(but=self._own_children)

    def _output(self, code: int, output: OutputPipe, errors: OutputPipe) -> str:
        """What it printed. Raises RolloutFailure if it did not end well."""
        for name, pipe in (("standard output", output), ("standard error", errors)):
            pipe.drain()
            if pipe.is_over:
                raise RolloutFailure(
                    f"command {self.command[0]} printed more than {self.max_output_bytes} bytes to {name}",
                    way_out="have it print less, or raise generator.max_output_bytes.",
                )
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            tail = errors.text()[-STDERR_TAIL_BYTES:].strip() or "(empty)"
            raise RolloutFailure(
                f"command {self.command[0]} {how}; the end of its standard error: {tail}",
                rule="a rollout ends well with exit code 0",
            )
        return output.text()


def passed_env(names: Sequence[str]) -> dict[str, str]:
    """The values of these variables in this process. Raises ConfigError for one that is not set, or that no
    command may have.
    """
    _refuse_own("generator.pass_env", names)
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(
            f"generator.pass_env names {', '.join(missing)}, which this process does not have",
            rule="a command gets the values of the environment in which `asyncrl` was started",
            way_out=f"export {missing[0]}=... before, or remove the name.",
        )
    return {name: os.environ[name] for name in names}


def _refuse_own(setting: str, names: Iterable[str]) -> None:
    if taken := sorted(name for name in names if name in ROLLOUT_ENV or name.startswith(OWN_PREFIX)):
        raise ConfigError(
            f"{setting} has {', '.join(taken)}",
            rule=f"{', '.join(ROLLOUT_ENV)} are set for each rollout; {OWN_PREFIX}... are asyncrl's own",
            way_out="leave them out, or give the command that value under another name.",
        )


def _standard_input(task: AnyTask, session: Session) -> bytes:
    """The task as JSON, with the outcome key. The key is here alone: in the environment every child process
    of the command would inherit it.
    """
    values = asdict(task)
    if session.outcome_key is not None:
        values |= {"outcome_url": f"{session.base_url}/outcome", "outcome_key": session.outcome_key}
    return json.dumps(values).encode()


def last_line_outcome(text: str) -> Outcome:
    """What the last line that is not empty says: a number, a JSON object of rewards, or nothing. Raises
    RolloutFailure for a wrong one.
    """
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        with contextlib.suppress(ValueError):
            last = json.dumps({"reward": float(last)})
        return OUTCOME.validate_json(last) if last.startswith("{") else Outcome()
    except ValidationError as error:
        raise RolloutFailure(
            f"the command's last line is no outcome: {last[:200]!r}: {first_fault(error)}",
            rule="it is a number, a JSON object of reward, metrics, turn_rewards, branch_rewards, or text",
            way_out='print e.g. {"reward": 1.0, "metrics": {"turns": 3}}, or a word if the task scores it.',
        ) from None


class OutputPipe:
    """A pipe whose reading end is ours. We do not wait for its end: a process that keeps the writing end open
    cannot block us.

    Life: both ends open -> given to a process, close_writing_end() -> read() -> drain() once the process has
        exited: the rest of what it wrote -> close().
    Invariant: holds max_bytes and one chunk at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._data = max_bytes, bytearray()
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)

    def close(self) -> None:
        self.close_writing_end()
        self._stop()
        os.close(self._reading_end)

    @property
    def is_over(self) -> bool:
        """More than max_bytes came."""
        return len(self._data) > self.max_bytes

    def text(self) -> str:
        """What came, as UTF-8; what is none is replaced."""
        return self._data.decode("utf-8", errors="replace")

    def close_writing_end(self) -> None:
        """Ours; the process has its own. Idempotent."""
        if self.writing_end >= 0:
            os.close(self.writing_end)
            self.writing_end = -1

    def read(self, on_overflow: Callable[[], None]) -> None:
        """Read as it comes; `on_overflow` is called once there is too much, and no more is read."""

        def readable() -> None:
            if not self._read_once() or self.is_over:
                self._stop()
            if self.is_over:
                on_overflow()

        asyncio.get_running_loop().add_reader(self._reading_end, readable)

    def drain(self) -> None:
        """Take what has been written by now."""
        self._stop()
        with contextlib.suppress(BlockingIOError):
            while not self.is_over and self._read_once():
                pass

    def _read_once(self) -> bool:
        """False at the end of all writers."""
        chunk = os.read(self._reading_end, _CHUNK_BYTES)
        self._data += chunk
        return bool(chunk)

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading_end)
