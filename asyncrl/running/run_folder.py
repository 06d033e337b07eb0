"""The directory that a command writes into: made, and its controller's log. Knows no run."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import ConfigError


def make_run_dir(folder: Path) -> None:
    """Make the directory, or find it there. Raises ConfigError if it cannot be written."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", way_out="choose another --run-dir.") from error


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
        with contextlib.suppress(OSError):  # a full disk was told already, or its lines are lost and nothing else
            handler.close()


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) must not bury the error that is being told."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Drop the line."""


def allow_many_connections() -> None:
    """Every request in flight is a connection, and the usual limit is 1024 open files: take all that the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # children inherit it
