"""Where this process's tasks and threads are, as data and as text. Knows asyncio and frames; knows no rooms.

A suspended task's own stack has one frame; what it waits for hangs below it as a chain of awaited coroutines. That chain is walked here.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.await_chain import await_chain

_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task waits. `functions`: qualified names from its outermost coroutine down to the innermost.

    `names`: of the object that each of them is a method of (engine-1, trainer-0), empty where it has none. `request`: the id of the
    model request that it makes (g17/r3/t0/a0), empty if none.
    """

    task: str
    functions: tuple[str, ...]
    names: tuple[str, ...] = ()
    request: str = ""

    def name_below(self, function: str) -> str:
        """Name of the innermost object that has one, at `function` or below it."""
        below = self.names[self.functions.index(function) :] if function in self.functions else ()
        return next((name for name in reversed(below) if name), "")


def places(*, all_but: tuple[str, ...] = ()) -> list[Place]:
    """Where the tasks of the running loop wait, by name; those aside whose names start with one of `all_but`."""
    tasks = (task for task in asyncio.all_tasks() if not task.get_name().startswith(all_but or ("\0",)))
    return sorted((_place(task) for task in tasks), key=lambda place: place.task)


def task_stacks() -> str:
    """All tasks that are not done, a line each: name, then function (file:line) down to where it waits. Equal ways are one line."""
    ways: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        way = " > ".join(
            f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" for frame in await_chain(task.get_coro())
        )
        ways.setdefault(way or "not begun", []).append(task.get_name())
    return "\n".join(f"task {_named(names)}: {way}" for way, names in ways.items())


def thread_stacks() -> str:
    """All threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip("\n"))
    return "\n".join(parts)


def _place(task: asyncio.Task[Any]) -> Place:
    frames = list(await_chain(task.get_coro()))
    return Place(
        task.get_name(),
        tuple(frame.f_code.co_qualname for frame in frames),
        tuple(_text_of(frame, "self", "name") for frame in frames),
        next((text for frame in reversed(frames) if (text := _text_of(frame, "request", "request_id"))), ""),
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _text_of(frame: FrameType, variable: str, attribute: str) -> str:
    """`variable.attribute` in this frame, if it is a text."""
    if variable not in frame.f_code.co_varnames:
        return ""
    value = getattr(frame.f_locals.get(variable), attribute, None)
    return value if isinstance(value, str) else ""


def _named(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
