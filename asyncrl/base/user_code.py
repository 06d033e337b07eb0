"""User code: loaded by name (load_object), awaited with a limit (UserCalls), abandoned
if it cannot be ended.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import importlib
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

import uvloop

from asyncrl.base.errors import AsyncrlError, ConfigError, RolloutFailure
from asyncrl.base.host import exit_raises
from asyncrl.base.progress import told_if_long


def find_here() -> str:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return here


@exit_raises()
def load_object(spec: str, setting: str) -> Any:
    """Import `module:attribute`. Raises ConfigError about `setting`."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{setting}={spec} is not module:name",
            way_out="write it like my_task:MyTask, for the class or function MyTask of my_task.py.",
        )
    if module_name.endswith(".py"):
        path = Path(module_name)
        # A module outside the working directory has no dotted name.
        is_outside = path.is_absolute() or ".." in path.parts
        dotted = path.stem if is_outside else ".".join(path.with_suffix("").parts)
        folder = f", and start asyncrl in {path.parent}" if is_outside else ""
        raise ConfigError(
            f"{setting}={spec} names a file, and a module belongs there",
            way_out=f"write {setting}={dotted}:{attribute}{folder}.",
        )
    here = find_here()
    try:
        with told_if_long(f"importing {module_name}"):
            target: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            target = getattr(target, name)
    except KeyboardInterrupt:  # Ctrl-C during a check
        raise
    except BaseException as error:  # user code may raise anything
        module = sys.modules.get(module_name)
        file = getattr(module, "__file__", None)
        found = f" ({module_name} is {file})" if file else ""
        way_out = "start asyncrl in the module's folder, install the module, or correct the name."
        if module is None and not isinstance(error, ModuleNotFoundError):
            way_out = f"correct {_place_of_error(error)}."
        raise ConfigError(
            f"{setting}={spec} cannot be loaded: {message_of(error)}{found}",
            rule=f"modules are imported from the working directory ({here}) and installed packages",
            way_out=way_out,
        ) from error
    return target


def load_function(
    spec: str,
    setting: str,
    *,
    usage: str,
    arguments: tuple[object, ...],
    keywords: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Import a function that can be called like `usage`. Raises ConfigError."""
    function: Callable[..., Any] = load_object(spec, setting)
    check_call(
        function, arguments, keywords or {}, said=f"{setting}={spec}", usage=usage
    )
    return function


def check_call(
    function: object,
    arguments: tuple[object, ...],
    keywords: Mapping[str, object],
    *,
    said: str,
    usage: str,
) -> None:
    """Raise ConfigError if `function` does not accept these arguments; `said` names it
    in the message.
    """
    if not callable(function):
        raise ConfigError(
            f"{said} is {function!r:.80}, which cannot be called",
            rule=f"it is called as {usage}",
            way_out="name a function or class.",
        )
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        signature = inspect.signature(function)
        way_out = "give it exactly these parameters."
        if keywords:
            way_out = f"give only its parameters: {', '.join(signature.parameters)}."
        raise ConfigError(
            f"{said}{signature} cannot be called as {usage}: {error}", way_out=way_out
        ) from error
    except ValueError:  # a builtin without a signature
        return


def raised(error: BaseException) -> str:
    message = message_of(error)
    hint = "; is an `await` missing?" if "'coroutine' object" in message else ""
    return f"raised {message}{hint} ({_place_of_error(error)})"


def _place_of_error(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    frame = _users_of(traceback.extract_tb(error.__traceback__))
    return f"{Path(frame.filename).name} line {frame.lineno}"


def message_of(error: BaseException) -> str:
    """Return the error's type and text; a user's __str__ may raise."""
    return shown("".join(traceback.format_exception_only(error)).strip())


def shown(text: str) -> str:
    """Cut a text of user code, and escape lone surrogates, which UTF-8 lacks."""
    return text[:MAX_TEXT].encode(errors="backslashreplace").decode()


MAX_TEXT = 2000


NOT_USERS = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<frozen")


def place_of(thread: int) -> str:
    """Return the entry of a traceback for what a thread runs: the user's innermost,
    else the innermost.
    """
    stack = traceback.extract_stack(sys._current_frames()[thread])
    return traceback.format_list([_users_of(stack)])[0]


def _users_of(stack: traceback.StackSummary) -> traceback.FrameSummary:
    users = [frame for frame in stack if not frame.filename.startswith(NOT_USERS)]
    return (users or stack)[-1]


logger = logging.getLogger("asyncrl.base.user_code")

Args = ParamSpec("Args")
Result = TypeVar("Result")

GRACE_S = 5.0
"""Seconds for a cancelled call to clean up."""
MAX_HUNG = 64
"""Nothing can end a hung call, and each keeps its stack and perhaps a thread."""
WAY_OUT = "write `except Exception:`, not `except:` or `except BaseException:`; limit every await."

_abandoned: set[asyncio.Task[object]] = set()
"""Abandoned tasks: destroying an unreferenced task would resume its coroutine."""


@dataclass(eq=False)
class UserCalls:
    """Awaits calls of one user function; abandons a call that ignores cancellation.

    Invariant: run returns at most grace_s after its cancellation, and at once after a
        second one.
    """

    name: str
    _: KW_ONLY
    error: Callable[..., AsyncrlError] = ConfigError
    warn: Callable[[str], None] = logger.warning
    """Reports the first abandoned call."""
    grace_s: float = field(default_factory=lambda: GRACE_S)
    way_out: str = WAY_OUT
    num_abandoned: int = field(default=0, init=False)
    _hung: set[asyncio.Future[Any]] = field(default_factory=set, init=False)

    def check(self) -> None:
        """Raise `error` if MAX_HUNG abandoned calls are still running."""
        if len(self._hung) >= MAX_HUNG:
            raise self.error(
                f"{MAX_HUNG} calls of {self.name} are still running after their time limit",
                rule="nothing can end them",
                way_out=self.way_out,
            )

    async def run(self, call: Awaitable[Result]) -> Result:
        """Return the call's result. Raises its error, and RolloutFailure if it cancels
        itself.
        """
        # In its own task, awaited by asyncio.wait: when we are cancelled, the wait ends
        # at once, while `await call` would last as long as user code that catches
        # CancelledError.
        task = asyncio.ensure_future(_catch(call))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=self.grace_s)
            finally:
                if not task.done():
                    # Also if a second cancellation ended the wait above.
                    abandon(task)
                    self._left_running(task)
            raise
        # Nothing of ours has cancelled it: our own cancellation is raised again above.
        if task.cancelled():
            raise RolloutFailure(
                f"{self.name} raised CancelledError",
                rule="nothing outside cancelled it: it cancelled itself, or an awaited task was cancelled",
                way_out="catch the CancelledError inside it, and raise another error.",
            )
        result, error = task.result()
        if error is not None:
            raise error
        return cast(Result, result)

    async def in_thread(
        self, function: Callable[[], Result], limit: AbstractAsyncContextManager[object]
    ) -> Result:
        """Return the result of a plain function. Raises its error, or the error of
        `limit`: a call that keeps running then is counted.
        """
        called = asyncio.get_running_loop().run_in_executor(None, function)
        # a cancelled rollout does not retrieve it
        called.add_done_callback(asyncio.Future.exception)
        try:
            async with limit:
                # A thread cannot be cancelled. The shield keeps the future, by which a
                # call that is still running after its limit is counted.
                return await asyncio.shield(called)
        except asyncio.CancelledError:
            called.add_done_callback(_close_coroutine)
            raise
        except Exception:
            if not called.done():
                self._left_running(called)
            raise

    def _left_running(self, call: asyncio.Future[Any]) -> None:
        self._hung.add(call)
        call.add_done_callback(self._hung.discard)
        self.num_abandoned += 1
        if self.num_abandoned == 1:
            self.warn(
                f"a call of {self.name} kept running after the time limit. "
                f"The run ends at {MAX_HUNG} of them. Way out: {self.way_out}"
            )


def _close_coroutine(called: asyncio.Future[Any]) -> None:
    """Close what nobody will await: Python would warn of it on the console."""
    is_failed = called.cancelled() or called.exception() is not None
    if not is_failed and inspect.iscoroutine(called.result()):
        called.result().close()


async def _catch(call: Awaitable[Result]) -> tuple[Result | None, BaseException | None]:
    """Return a call's result and error: SystemExit in a task would end the loop."""
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def abandon(task: asyncio.Task[object]) -> None:
    """Unregister a task, so that asyncio.run neither cancels nor awaits it."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    # At its end asyncio.run() cancels all registered tasks and waits for them without
    # limit: one task that ignores its cancellation would hang the process. The set
    # above keeps the reference that asyncio no longer counts.
    asyncio.tasks._unregister_task(task)


# The standard executor has at most 32 threads, so hung rewards would block every other
# to_thread(). At exit it also joins its threads. Here each call without an idle thread
# gets a new one, which is a daemon and not registered for the join. It shares only the
# type with its base class, which set_default_executor() asks for: the base class starts
# threads under private names, which differ between Pythons.
class DaemonThreads(ThreadPoolExecutor):
    """Daemon threads for asyncio.to_thread: a call that hangs delays neither others nor
    the process's end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]()
        self._idle = threading.Semaphore(0)
        """Threads that wait for a call that is not submitted yet."""

    def submit(
        self, fn: Callable[Args, Result], /, *args: Args.args, **kwargs: Args.kwargs
    ) -> Future[Result]:
        answer = Future[Result]()
        self._calls.put((answer, partial(fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="to_thread", daemon=True).start()
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads, and the others after their call, without waiting."""
        self._calls.put(None)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            _make_call(*job)
            del job  # a thread that waits must not keep the call's arguments
            self._idle.release()
        self._calls.put(None)  # for the next thread


def _make_call(answer: Future[Any], call: Callable[[], object]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        answer.set_exception(error)
        del answer  # else the error's traceback keeps the error alive
    else:
        answer.set_result(result)


class RunLoop(uvloop.Loop):  # type: ignore[misc]  # it has no types
    """An event loop that user code cannot stop before its main future is done."""

    def run_until_complete(self, future: Any) -> Any:
        self._main = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._main)

    def stop(self) -> None:
        if not self._main.done():
            raise RuntimeError(
                "this event loop is the run's; user code must not stop it"
            )
        super().stop()


@exit_raises()
def run_loop(main: Awaitable[Result]) -> Result:
    """Run `main`, then end its remaining tasks. A gateway's call takes a fifth less CPU
    time than with asyncio's own loop (benchmarks/gateway.py).
    """
    with asyncio.Runner(loop_factory=RunLoop) as runner:
        return runner.run(_cancel_remaining(main))


async def _cancel_remaining(main: Awaitable[Result]) -> Result:
    """Await `main`, then cancel other tasks and abandon those still running after
    GRACE_S.
    """
    # Before `main`: its first to_thread() would create the standard executor.
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        return await main
    finally:
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
            abandon(task)  # a KeyboardInterrupt may end the wait below
        if remaining:
            _, stuck = await asyncio.wait(remaining, timeout=GRACE_S)
            for task in stuck:
                logger.warning(
                    "a task did not end within %s s of being cancelled: %s",
                    GRACE_S,
                    task,
                )


@atexit.register
def _leak_abandoned() -> None:
    """Leak abandoned tasks: Python's final cleanup would resume their coroutines."""
    for task in _abandoned:
        # Destroying a suspended coroutine throws GeneratorExit into it. User code that
        # catches it runs again, in an interpreter whose modules are already cleared.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def load_loss(spec: str) -> Callable[..., Any]:
    return load_function(
        spec, "algorithm.loss", usage="loss(tokens, settings)", arguments=(None, None)
    )


def load_advantage(spec: str) -> Callable[..., Any]:
    return load_function(
        spec,
        "algorithm.advantage",
        usage="advantage(reward_B, group_B)",
        arguments=(None, None),
    )
