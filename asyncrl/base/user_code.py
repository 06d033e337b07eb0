"""User code: loaded by name from the config (load_object), awaited with a limit (UserCalls).

A coroutine that swallows its CancelledError cannot be ended, so nothing may wait for it: no rollout, no event
loop, no process.
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

from asyncrl.base.errors import AsyncrlError, ConfigError, RolloutFailure


def find_here() -> str:
    """Make modules of the working directory importable, as with `python -m`; return its path."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return here


def load_object(spec: str, setting: str) -> Any:
    """Return the object of `spec` (`module:attribute`), also from the working directory.

    `setting` is the config key, for messages. Raises ConfigError if the module cannot be imported or lacks
    the attribute.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{setting}={spec} is not module:name", way_out="write it like my_task:MyTask.")
    here = find_here()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything
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
    """Return the function of `spec`, callable like `usage`. Raises ConfigError like load_object and
    check_call.
    """
    function: Callable[..., Any] = load_object(spec, setting)
    check_call(function, arguments, keywords or {}, said=f"{setting}={spec}", usage=usage)
    return function


def check_call(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, said: str, usage: str
) -> None:
    """Raise ConfigError if `function` does not accept these arguments; `said`: the config's text, `usage`:
    the call.
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
    except ValueError:  # a builtin without a signature: only a call can fail
        return


def raised(error: BaseException) -> str:
    """Return the user code's error and its place, as text after its name."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"raised {type(error).__name__}: {words_of(error)} ({Path(frame.filename).name} line {frame.lineno})"
    )


def words_of(error: BaseException) -> str:
    """Return str(error). User code defines __str__ too, which may raise anything."""
    try:
        return str(error)
    except BaseException as second:
        if is_for_us(second):
            raise
        return f"its __str__ raised {type(second).__name__}"


def is_for_us(error: BaseException) -> bool:
    """Return true for Ctrl-C or this task's cancellation, which user code did not raise.

    With a signal handler of asyncrl or asyncio installed, Ctrl-C raises no KeyboardInterrupt.
    """
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


logger = logging.getLogger("asyncrl.base.user_code")

Result = TypeVar("Result")

GRACE_S = 5.0
"""Seconds for a cancelled call to clean up."""
MAX_ABANDONED = 64
"""Maximum number of running abandoned calls of a function; at the limit it is not called again."""

WAY_OUT = "write `except Exception:`, not `except:` or `except BaseException:`; limit what is awaited."

_abandoned: set[asyncio.Task[Any]] = set()
"""Abandoned tasks of the process, referenced until they end: an unreferenced task is destroyed, which would
resume its coroutine.
"""


class UserCalls:
    """Awaits calls of one user function in separate tasks and abandons stuck ones.

    Life: of a call: started -> done and answered; or its caller is cancelled -> it is cancelled -> it ends
        within grace_s, or is abandoned and runs without a waiter.
    Waits: run sleeps until the call is done. The caller sets the limit by cancelling it.
    Invariant: run returns at most grace_s after its cancellation, and at once after a second one. While
        MAX_ABANDONED calls are alive, check refuses further ones.
    """

    def __init__(
        self,
        name: str,
        *,
        error: Callable[..., AsyncrlError],
        warn: Callable[[str], None] = logger.warning,
        grace_s: float | None = None,
    ) -> None:
        """`name`: the function, as in the config. `error` makes the error that ends the run or worker; `warn`
        is called for the first abandoned call.
        """
        self.name, self._error, self._warn = name, error, warn
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self._alive: set[asyncio.Task[Any]] = set()
        self.num_abandoned = 0

    def check(self) -> None:
        """Raise `error` if too many abandoned calls run. Call it before the function."""
        if len(self._alive) >= MAX_ABANDONED:
            rule = f"{MAX_ABANDONED} of them may run on, and nothing can end them"
            raise self._error(self._what(len(self._alive)), rule=rule, way_out=WAY_OUT)

    async def run(self, call: Awaitable[Result]) -> Result:
        """Return the call's result. Raises its error, and RolloutFailure if it cancels itself."""
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
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(tasks)


async def _carry(call: Awaitable[Result]) -> tuple[Result | None, BaseException | None]:
    """Return the call's result and exception. A SystemExit or KeyboardInterrupt that leaves a task would end
    the event loop.
    """
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def abandon(task: asyncio.Task[Any]) -> None:
    """Unregister a task from asyncio, so that asyncio.run neither cancels nor awaits it."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    asyncio.tasks._unregister_task(task)


Inbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
"""Calls for a thread; None ends it."""


class DaemonThreads(ThreadPoolExecutor):
    """Unbounded, reusable daemon threads for asyncio.to_thread. Reuse matters because the loop waits for a
    thread's start.

    In asyncio's own limited threads, hanging user calls (a request without a timeout) would block other
    calls, the loop's end, which joins threads without a limit, and the end of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._without_call: deque[Inbox] = deque()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()
        inbox = self._without_call.pop() if self._without_call else self._new_thread()
        inbox.put(partial(self._call, inbox, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads; busy ones are abandoned."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        while self._without_call:
            self._without_call.pop().put(None)

    def _new_thread(self) -> Inbox:
        inbox: Inbox = SimpleQueue()

        def body() -> None:
            while (call := inbox.get()) is not None:
                call()
                del call  # it holds the call's result

        threading.Thread(target=body, name="to_thread", daemon=True).start()
        return inbox

    def _call(self, inbox: Inbox, future: Future[Any], fn: partial[Any]) -> None:
        is_wanted = future.set_running_or_notify_cancel()
        try:
            result = fn() if is_wanted else None
        except BaseException as error:  # re-raised in the caller
            self._without_call.append(inbox)  # first, since the receiver may submit the next call
            future.set_exception(error)
        else:
            self._without_call.append(inbox)
            if is_wanted:
                future.set_result(result)


async def end_what_is_left(main: Awaitable[Result]) -> Result:
    """Await `main`, then cancel all other tasks of the loop and abandon those still running after GRACE_S.

    Threads of asyncio.to_thread are abandoned too; `main` awaits the ones it needs.
    """
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
            abandon(task)  # now: a KeyboardInterrupt may leave the wait below
        if left:
            await _wait_within(GRACE_S, left)
        for task in left:
            if not task.done():
                logger.warning("a task did not end within %s s of being cancelled: %s", GRACE_S, task)


@atexit.register
def _outlive_python() -> None:
    """Leak a reference to each abandoned task, because Python's final cleanup would otherwise resume its
    coroutine.
    """
    if _abandoned:
        import ctypes

        for task in _abandoned:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def load_loss(spec: str) -> Callable[..., Any]:
    """Return a loss function. Raises ConfigError if it cannot be imported or has other parameters."""
    usage = "loss(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings)"
    return load_function(spec, "algorithm.loss", usage=usage, arguments=(None,) * 6)


def load_advantage(spec: str) -> Callable[..., Any]:
    """Return an advantage function. Raises ConfigError if it cannot be imported or has other parameters."""
    usage = "advantage(reward_B, group_B)"
    return load_function(spec, "algorithm.advantage", usage=usage, arguments=(None, None))
