"""Blocking work beside the event loop. Knows no process and no room."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work of the start-up off the loop. Raises what it raises; a sys.exit() in it becomes a RuntimeError.

    Not asyncio.to_thread: its threads are joined when the loop closes, and again when the interpreter ends, so that Ctrl-C
    would take as long as the slowest download or constructor.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not done.done():  # else nobody waits any more
            result()

    def body() -> None:
        try:
            result = work()
        except (Exception, SystemExit) as raised:  # carried over to the task that waits, not handled
            error = raised if isinstance(raised, Exception) else RuntimeError(f"sys.exit({raised.code}) was called")
            answer = functools.partial(done.set_exception, error)
        else:
            answer = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=body, name="start-up", daemon=True).start()
    return await done
