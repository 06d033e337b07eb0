"""What the ranks other than the first do: follow its commands. Knows the commands; knows no HTTP.

A refusal that all ranks come to alike is rank 0's to answer. Any other error ends this process, with the reason as its last
word, and so the run: the group cannot go on without one of its ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from asyncrl.serving import Refused
from asyncrl.trainer.movable_step import MovableStep
from asyncrl.trainer.ranks import Command, OneRankError, is_loss_of_a_rank
from asyncrl.wire import ErrorBody, fatal_line, unpack_batch

log = logging.getLogger("asyncrl.trainer")

GRACE_S = 10.0
"""How long a rank that has lost another one waits to be ended, so that the other is named and not itself."""

COMMANDS: dict[str, Callable[[MovableStep, Command], object]] = {
    "train": lambda step, command: step.train(*unpack_batch(command.body)),
    "export": lambda step, command: step.join_export(),
    "save": lambda step, command: step.join_save(**command.arguments),
    "begin_save_state": lambda step, command: step.begin_save_state(Path(command.arguments["path"])),
    "wait_save_state": lambda step, command: step.end_save_state(),
    "offload": lambda step, command: step.offload(command.arguments["parts"]),
    "onload": lambda step, command: step.onload(command.arguments["parts"]),
    "export_chunk": lambda step, command: step.join_chunk(**command.arguments),
    "load_state": lambda step, command: step.load_state(Path(command.arguments["path"]), is_checked=command.arguments["is_checked"]),
}
"""Each request to rank 0, by name: the part of the other ranks."""


class Follower:
    """Life: run() on the torch thread, which never returns: the process ends."""

    def __init__(self, step: MovableStep) -> None:
        self._step = step
        self.is_busy = False

    def run(self) -> NoReturn:
        """Wait for a command, as long as it takes; do it; and again."""
        try:
            while True:
                self._follow(self._step.ranks.wait_command())
        except Exception as error:  # the outermost border of this thread: told, and the end
            log.exception("rank %d cannot go on", self._step.ranks.rank)
            if is_loss_of_a_rank(error):
                threading.Event().wait(GRACE_S)
            body = error.body if isinstance(error, OneRankError) else ErrorBody(error=f"{type(error).__name__}: {error}")
            print(fatal_line(body), file=sys.stderr, flush=True)
            os._exit(1)

    def _follow(self, command: Command) -> None:
        self.is_busy = True
        try:
            COMMANDS[command.name](self._step, command)
        except Refused as refused:
            log.warning("%s was refused: %s", command.name, refused)
        finally:
            self.is_busy = False
