"""Agents of the job tests, named as module:function."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

from harnesses_for_test import two_turns

from asyncrl.agents import Outcome, Session, Task
from examples.lookup import run

_begun = itertools.count()
"""Attempts of plays_then_holds in this worker."""


async def loses_two_workers(task: Task, session: Session, *, marks: str) -> Outcome:
    """The lookup agent; the first to come while `blocks` is in this folder takes it away, and holds its
    worker's loop for ever; of those that come later the first does so with `dies`, and kills its worker.
    """
    for mark in (Path(marks) / "blocks", Path(marks) / "dies"):
        if mark.exists():
            mark.unlink()
            if mark.name == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(3600.0)  # noqa: ASYNC251  that is the point
    return await run(task, session)


async def plays_then_holds(task: Task, session: Session, *, num_played: int, mark: str) -> Outcome:
    """The first attempts of a worker are played; each later one writes the mark and never ends: its worker
    holds it from then on.
    """
    if next(_begun) >= num_played:
        Path(mark).touch()  # noqa: ASYNC240
        await asyncio.Event().wait()
    return await two_turns(task, session)
