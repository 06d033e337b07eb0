"""The harness `command`: a program of any language, once a rollout.

It finds the task as JSON on standard input, and in its environment OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL, beside PATH, HOME, LANG, TMPDIR and generator.env. What it starts inherits the environment and
does not find the answer or the outcome key there: those come with the task, through a pipe that is read once.
This keeps rollouts apart from each other and from the run's settings. It is not a sandbox: a command may read
and write everything that the worker's user may.

The processes of a command are its process group, and every process with the command's mark in its
environment. Children inherit the mark, so a process with a session of its own (setsid, a daemon) is found
too. Two kinds are not found: a process that has its own session and was started without the mark (`setsid env
-i ...`), and one of another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from pydantic import ValidationError

from asyncrl.agents.harness import OUTCOME, AnyTask, Session, first_fault
from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Outcome

log = logging.getLogger(__name__)

KEPT_ENV = ("PATH", "HOME", "LANG")
ROLLOUT_ENV = ("TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
OWN_PREFIX = "ASYNCRL_"
"""Prefix of asyncrl's own variables: MARK_ENV, keys and secrets. A command gets none of them."""
MARK_ENV = "ASYNCRL_COMMAND"
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL; less than the worker itself is given."""
STDERR_TAIL_BYTES = 2000
_CHUNK_BYTES = 2**16
_POLL_S, _KILL_WAIT_S = 0.02, 5.0
_KILL_ROUNDS = 20
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

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
"""Started by a worker, it waits until that has ended, in whatever way; then it kills all that has the text $1
in its environment, those included that they start meanwhile, and removes the folder $2.
"""


class CommandHarness:
    """Runs a command for each rollout, in a session and a folder of its own.

    Life: run: folder made -> started -> exits, prints too much, or is cancelled -> its whole process group
        ended and reaped -> folder removed.
    Waits: run sleeps until the command exits; then GRACE_S at most for what it left behind, and as long again
        after SIGKILL.
    Invariant: when run() is left, no process of the group lives, no pipe is open, no folder left.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        """`is_worker`: this process has no children but commands: it adopts the processes that a command
        leaves behind, and if this process itself is killed they are killed too. Arguments that name files of
        the working directory are given as absolute paths: the command runs in another one.

        Raises ConfigError if there is no such program, generator.env sets what is not its own, or a variable
        of generator.pass_env is not set.
        """
        _refuse_own("generator.env", config.env)
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        self._env = kept | passed_env(config.pass_env) | config.env
        command = config.command or []
        self.command = [str(Path(part).absolute()) if Path(part).is_file() else part for part in command]
        if shutil.which(self.command[0], path=self._env.get("PATH")) is None:
            what = f"generator.command: there is no program {command[0]}"
            rule = f"it is looked for in {Path.cwd()} and on PATH={self._env.get('PATH', '')}"
            raise ConfigError(what, rule=rule, way_out="correct the name, or make the file executable.")
        self.max_output_bytes = config.max_output_bytes
        self.token = secrets.token_hex(8)
        """Prefix of the marks of all commands of this harness."""
        self._numbers = itertools.count()
        self._own_children: set[int] = set()
        self._num_starting = 0
        self._folder: str | None = None
        if is_worker:
            self._folder = tempfile.mkdtemp(prefix="asyncrl-commands-")
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", f"{MARK_ENV}={self.token}", self._folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={},
            )
            self._own_children.add(self._guard.pid)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """The outcome on the command's last line (empty where outcomes are posted). Raises RolloutFailure for
        any exit code but 0, too much output, or a last line that is not an outcome.
        """
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-command-", dir=self._folder))
        try:
            (folder / "work").mkdir()
            (folder / "tmp").mkdir()
            with (
                contextlib.closing(OutputPipe("standard output", self.max_output_bytes)) as output,
                contextlib.closing(OutputPipe("standard error", self.max_output_bytes)) as errors,
            ):
                code = await self._run(task, session, folder, output, errors)
                text = self._output(code, output, errors)
            return last_line_outcome(text) if session.outcome_key is None else Outcome()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def kill_all_nowait(self) -> None:
        """SIGKILL to all that any command of this harness has started."""
        kill_group_nowait(self.token)

    async def _run(
        self, task: AnyTask, session: Session, folder: Path, output: OutputPipe, errors: OutputPipe
    ) -> int:
        mark = f"{self.token}.{next(self._numbers)}."
        environment = self._env | {
            "TMPDIR": str(folder / "tmp"),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            MARK_ENV: mark,
        }
        reading_end, writing_end = os.pipe()  # read once: a pipe keeps nothing
        feed, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(writing_end, "wb", buffering=0)
        )
        feed.write(_standard_input(task, session))
        feed.close()  # once all is written
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
            if survivors := await end_group(mark, group):
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
        for pipe in (output, errors):
            pipe.take()
            if pipe.is_over:
                what = f"command {self.command[0]} printed more than {pipe.max_bytes} bytes to {pipe.name}"
                raise RolloutFailure(what, way_out="print less, or raise generator.max_output_bytes.")
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            tail = errors.text()[-STDERR_TAIL_BYTES:].strip() or "(empty)"
            raise RolloutFailure(f"command {self.command[0]} {how}; the end of its standard error: {tail}")
        return output.text()


def passed_env(names: Sequence[str]) -> dict[str, str]:
    """The values of these variables in this process. Raises ConfigError for one that is not set, or that no
    command may have.
    """
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
        what = f"the command's last line is no outcome: {last[:200]!r}: {first_fault(error)}"
        rule = 'it is a number, an object like {"reward": 1.0, "metrics": {"turns": 3}}, or any other text'
        raise RolloutFailure(what, rule=rule) from None


class OutputPipe:
    """A pipe whose reading end is ours. We do not wait for its end: a process that keeps the writing end open
    cannot block us.

    Life: both ends open -> given to a process -> read() -> take() once the process has exited: the rest of
        what it wrote -> close().
    Invariant: holds max_bytes and one chunk at most.
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
        """More than max_bytes came."""
        return len(self._data) > self.max_bytes

    def text(self) -> str:
        """What came, as UTF-8; what is none is replaced."""
        return self._data.decode("utf-8", errors="replace")

    def read(self, on_overflow: Callable[[], None]) -> None:
        """Of the process, which has its writing end. `on_overflow` is called once there is too much."""

        def readable() -> None:
            self.take()
            if self.is_over:
                on_overflow()

        self.writing_end.close()
        asyncio.get_running_loop().add_reader(self._reading_end, readable)

    def take(self) -> None:
        """What has been written by now, while it is not too much."""
        while not self.is_over:
            chunk = self._reading_end.read(_CHUNK_BYTES)
            if chunk is None:  # nothing for now
                return
            self._data += chunk
            if not chunk:
                break
        asyncio.get_running_loop().remove_reader(self._reading_end)


# ---- the processes of a command


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def hide_memory() -> None:
    """Hide this process's environment, memory and files in /proc from others of this user: what a model runs
    is of the same user, and a worker and a run's controller have the worker key, and the answers of their
    rollouts.

    An exec ends it, so child processes are not hidden. Linux only; root can still read everything.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def find_group(mark: str, group: int | None = None) -> list[int]:
    """Live processes of the group, or with a mark that has this prefix; never this process itself."""
    wanted = b"\0" + f"{MARK_ENV}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it is gone, or another user's
            if pid == os.getpid() or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(pid) == group or wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


async def end_group(mark: str, group: int | None) -> list[int]:
    """SIGTERM, and after GRACE_S SIGKILL, to all of them; returns once none lives, or those that would not
    die.
    """
    now_s, found = asyncio.get_running_loop().time, list[int]()
    for number, limit_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
        until_s, pause_s, signalled = now_s() + limit_s, _POLL_S, set[int]()
        while found := find_group(mark, group):
            for pid in found:
                if pid not in signalled:
                    _signal(pid, number)
            signalled.update(found)
            if now_s() >= until_s:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, until_s - now_s())
        else:
            return []
    return found


def kill_group_nowait(mark: str, group: int | None = None) -> None:
    """SIGKILL to all of them, those included that they start meanwhile; waits for none."""
    for _ in range(_KILL_ROUNDS):
        found = find_group(mark, group)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            return


def reap_orphans(but: set[int]) -> None:
    """Reap adopted processes that have ended; `but` are this process's own children, which asyncio reaps."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
