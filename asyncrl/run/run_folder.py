"""The directory that a command writes into: made, and its controller's log. Knows no run."""

from __future__ import annotations

import contextlib
import logging
import resource
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import ConfigError, RoomError
from asyncrl.http import OURS, out_of

MODEL_PIN = "model.json"
"""In the run directory: the model that the run began with."""


def make_run_dir(folder: Path, mode: int) -> None:
    """Make the directory, or find it there, with these permissions. Raises ConfigError if it cannot be
    written.

    One that holds what is not ours keeps its own: it is about to be refused.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        has, is_ours = folder.stat().st_mode, (folder / "run.lock").exists() or not any(folder.iterdir())
        if is_ours and has & 0o777 != mode:
            with contextlib.suppress(PermissionError):  # a mounted volume, say, is another user's
                folder.chmod(stat.S_IMODE(has) & ~0o777 | mode)
            _warn_if_open(folder, mode)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}", way_out="choose another --run-dir."
        ) from error


def _warn_if_open(folder: Path, mode: int) -> None:
    """Say so if others may do with the directory what `mode` does not let them."""
    has = folder.stat().st_mode & 0o777
    if has & ~mode:
        print(
            f"WARNING: {folder} has mode {has:04o} and belongs to another user, so it cannot be made "
            f"{mode:04o} (observe.readable_by): "
            "others may read or change what this run writes.\n  Way out: a directory of your own as "
            "--run-dir.",
            file=sys.stderr,
        )


def run_again(folder: Path, *more: str) -> str:
    """The command that goes on with the run in this directory."""
    return shlex.join(["asyncrl", "run", str(folder / "config.yaml"), "--run-dir", str(folder), *more])


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """What asyncrl logs inside goes to logs/controller.log in this directory, and nowhere else."""
    handler = _LogFile(folder / "logs" / "controller.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("asyncrl")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(
            OSError
        ):  # a full disk was told already, or its lines are lost and nothing else
            handler.close()


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) must not bury the error that is being told."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Drop the line."""


def allow_many_connections() -> None:
    """Every request in flight is a connection, and the usual limit is 1024 open files: take all that the
    system allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # children inherit it


def refused_by_system(error: OSError, run_dir: Path) -> RoomError:
    """What the kernel refused the controller, which for most of its calls is a file."""
    if error.errno in OURS:
        return out_of("cannot go on", error.errno)
    return RoomError(
        "controller",
        f"cannot use the run directory {run_dir}: {error}",
        way_out="free space on its disk, or choose another --run-dir, and start the run again.",
    )
