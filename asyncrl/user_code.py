"""The user's code: found by its name in the config (load_object), awaited with a limit (UserCalls).

Nothing can end a coroutine that swallows its CancelledError. So nothing may wait for it: not the rollout, not
the end of the event loop, not the end of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import importlib
import inspect
import logging
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast

from asyncrl.errors import AsyncrlError, ConfigError, RolloutFailure


def find_here() -> str:
    """Have modules of the working directory found, as with `python -m`; returns its path."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return here


def load_object(spec: str, setting: str) -> Any:
    """The object that `spec` (`module:attribute`) names; modules of the working directory are found, as with
    `python -m`.

    `setting` is the config key, for the messages. Raises ConfigError if the module cannot be imported or
    lacks the attribute.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{setting}={spec} is not module:name", way_out="write it like my_task:MyTask.")
    here = find_here()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            what = f"{setting}={spec}: there is no module {error.name}"
            rule = f"modules are looked for in the working directory ({here}) and among installed packages"
            way_out = "start asyncrl in the folder of the module, install it, or correct the name."
            raise ConfigError(what, rule=rule, way_out=way_out) from error
        what = f"{setting}={spec}: importing {module_name} raised {type(error).__name__}: {error}"
        raise ConfigError(what, way_out=f"make `python -c 'import {module_name}'` work first.") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, vars(found), n=1)
            way_out = f"did you mean {close[0]}?" if close else f"define {name} there."
            raise ConfigError(f"{setting}={spec}: {module_name} has no {name}", way_out=way_out)
        found = getattr(found, name)
    return found


def load_function(
    spec: str,
    setting: str,
    *,
    usage: str,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The function that `spec` names, which can be called as `usage` says. Raises ConfigError as load_object
    and check_call do.
    """
    function: Callable[..., Any] = load_object(spec, setting)
    check_call(function, arguments, keywords or {}, said=f"{setting}={spec}", usage=usage)
    return function


def check_call(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, said: str, usage: str
) -> None:
    """Raise ConfigError if `function` cannot be called with these arguments; `said` is what the config says,
    `usage` how it will be called.
    """
    if not callable(function):
        what = f"{said} is {function!r:.80}, which cannot be called"
        raise ConfigError(what, rule=f"it is called as {usage}", way_out="name a function or class.")
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        what = f"{said}{inspect.signature(function)} cannot be called as {usage}: {error}"
        names = ", and the names of task.args or generator.args" if keywords else ""
        raise ConfigError(what, way_out=f"give it these parameters{names}, no more.") from error
    except ValueError:  # a builtin without a signature: only the call itself can tell
        return


def raised(error: BaseException) -> str:
    """What the user's code raised and where, in words that follow its name."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"raised {type(error).__name__}: {words_of(error)} ({Path(frame.filename).name} line {frame.lineno})"
    )


def words_of(error: BaseException) -> str:
    """Return str(error). Its __str__ is the user's code as well, and may raise anything."""
    try:
        return str(error)
    except BaseException as second:
        if is_for_us(second):
            raise
        return f"its __str__ raised {type(second).__name__}"


def is_for_us(error: BaseException) -> bool:
    """Return True if the user's code did not raise this: Ctrl-C was pressed, or this task was cancelled.

    With a signal handler of ours (or of asyncio) installed, Ctrl-C raises no KeyboardInterrupt.
    """
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


logger = logging.getLogger("asyncrl.user_code")

Result = TypeVar("Result")

GRACE_S = 5.0
"""Seconds that a cancelled call has to clean up."""
MAX_ABANDONED = 64
"""Most abandoned calls of one function that still run; beyond that it is not called again."""

WAY_OUT = "write `except Exception:`, not `except:` or `except BaseException:`; limit what is awaited."

_abandoned: set[asyncio.Task[Any]] = set()
"""Abandoned tasks of the whole process, referenced here until they end: a task without a reference is
destroyed, which would run its coroutine once more.
"""


class UserCalls:
    """Awaits what one function of the user's returned, each call in a task of its own, and gives up what does
    not end.

    Life of a call: started -> done, and answered; or its caller is cancelled -> it is cancelled -> it ends
        within grace_s, or is abandoned: it runs on without a waiter.
    Waits: run sleeps until the call is done. Its caller sets the limit, by cancelling it.
    Invariant: run is left grace_s after it was cancelled at the latest, and at once if it is cancelled again.
        Once MAX_ABANDONED calls that were given up are alive, no further one passes check.
    """

    def __init__(
        self,
        name: str,
        *,
        error: Callable[..., AsyncrlError],
        warn: Callable[[str], None] = logger.warning,
        grace_s: float | None = None,
    ) -> None:
        """`name` of the function, as the user wrote it. `error` makes the error that ends the run, or this
        worker; `warn` is called once, for the first call that is given up.
        """
        self.name, self._error, self._warn = name, error, warn
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self._alive: set[asyncio.Task[Any]] = set()
        self.num_abandoned = 0
        """Calls that were given up, so far."""

    def check(self) -> None:
        """To be asked before the function is called. Raises `error` if too many of its calls were given up
        and run on.
        """
        if len(self._alive) >= MAX_ABANDONED:
            rule = f"{MAX_ABANDONED} of them may run on, and nothing can end them"
            raise self._error(self._what(len(self._alive)), rule=rule, way_out=WAY_OUT)

    async def run(self, call: Awaitable[Result]) -> Result:
        """What it returns or raises. Raises RolloutFailure if it ends with a CancelledError of its own."""
        task = asyncio.ensure_future(_carry(call))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await self._end(task)
            raise
        if task.cancelled():
            rule = "it was not cancelled from outside: it did so itself, or what it awaited was cancelled"
            way_out = "catch that where it may happen, and raise an error instead."
            raise RolloutFailure(f"{self.name} raised CancelledError", rule=rule, way_out=way_out)
        result, error = task.result()
        if error is not None:
            raise error
        return cast(Result, result)

    async def _end(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        try:
            await _wait_within(self._grace_s, {task})
        finally:
            if not task.done():
                abandon(task)
                self._alive.add(task)
                task.add_done_callback(self._alive.discard)
                self.num_abandoned += 1
                if self.num_abandoned == 1:
                    self._warn(f"{self._what(1)}; it runs on, and more are counted. Way out: {WAY_OUT}")

    def _what(self, num_calls: int) -> str:
        calls = f"{num_calls} call{'s' if num_calls > 1 else ''} of {self.name}"
        return f"{calls} did not end within {self._grace_s} s of being cancelled"


async def _wait_within(timeout_s: float, tasks: set[asyncio.Task[Any]]) -> None:
    """Return when all of them are done, or the loop has run for this many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(tasks)


async def _carry(call: Awaitable[Result]) -> tuple[Result | None, BaseException | None]:
    """Return the call's result and its exception. A SystemExit or KeyboardInterrupt that leaves a task ends
    the event loop.
    """
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def abandon(task: asyncio.Task[Any]) -> None:
    """Unregister a task from asyncio, so that asyncio.run neither cancels it at the end nor waits for it."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    asyncio.tasks._unregister_task(task)


Inbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
"""Calls for a thread; None ends it."""


class DaemonThreads(ThreadPoolExecutor):
    """What asyncio.to_thread runs in: daemon threads, one for each call at a time, and as many as there are
    calls. One whose call is over is used again: to start one, the loop has to wait until it runs.

    In asyncio's own few threads a user's calls that hang (a request without a timeout) would hold up ours,
    then the end of the loop, which joins them without a limit, and the end of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._without_call: deque[Inbox] = deque()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Start it at once."""
        future: Future[Result] = Future()
        inbox = self._without_call.pop() if self._without_call else self._new_thread()
        inbox.put(partial(self._call, inbox, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that have no call. Those that have one are left to themselves."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        while self._without_call:
            self._without_call.pop().put(None)

    def _new_thread(self) -> Inbox:
        inbox: Inbox = SimpleQueue()

        def body() -> None:
            while (call := inbox.get()) is not None:
                call()
                del call  # it holds what the call returned

        threading.Thread(target=body, name="to_thread", daemon=True).start()
        return inbox

    def _call(self, inbox: Inbox, future: Future[Any], fn: partial[Any]) -> None:
        is_wanted = future.set_running_or_notify_cancel()
        try:
            result = fn() if is_wanted else None
        except BaseException as error:  # it is the caller's
            self._without_call.append(inbox)  # first: who is told may have the next call
            future.set_exception(error)
        else:
            self._without_call.append(inbox)
            if is_wanted:
                future.set_result(result)


async def end_what_is_left(main: Awaitable[Result]) -> Result:
    """Await `main`, then cancel every other task of the loop, and leave those to themselves that do not end
    within GRACE_S.

    Threads of asyncio.to_thread are left to themselves, too: what `main` needs of them it awaits.
    """
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
            abandon(task)  # already: a KeyboardInterrupt may leave the wait below
        if left:
            await _wait_within(GRACE_S, left)
        for task in left:
            if not task.done():
                logger.warning("a task did not end within %s s of being cancelled: %s", GRACE_S, task)


@atexit.register
def _outlive_python() -> None:
    """Python destroys every object at its end, which would run these coroutines once more: each gets an extra
    reference that is never released.
    """
    if _abandoned:
        import ctypes

        for task in _abandoned:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def load_loss(spec: str) -> Callable[..., Any]:
    """The function of a loss. Raises ConfigError if it cannot be imported, or takes other parameters."""
    usage = "loss(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings)"
    return load_function(spec, "algorithm.loss", usage=usage, arguments=(None,) * 6)


def load_advantage(spec: str) -> Callable[..., Any]:
    """The function of an advantage. Raises ConfigError if it cannot be imported, or takes other
    parameters.
    """
    usage = "advantage(reward_B, group_B)"
    return load_function(spec, "algorithm.advantage", usage=usage, arguments=(None, None))
