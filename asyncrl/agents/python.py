"""The harness `python`: an async (or plain) function of the user's, `module:function`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable
from typing import Any

from asyncrl.agents.harness import GRACE_S, AnyTask, HarnessSpec, Session
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Outcome
from asyncrl.user_code import UserCalls, load_function


class PythonHarness:
    """Calls `function(task, session, **args)`, with as many calls at once as the worker has slots.

    An async function runs on the worker's event loop: what blocks that loop stops all its rollouts, and for
    longer than gateway.lease_timeout_s loses them; one that does not end when it is cancelled is given up
    (user_calls.py). A plain one runs in a thread of its own, which nothing can end: after a timeout it goes
    on until its next call of the model, which is refused.
    """

    def __init__(self, spec: str, args: dict[str, Any]) -> None:
        """Raises ConfigError if there is no such function, or it cannot be called so."""
        self.spec, self._args = spec, args
        usage = ", ".join(["(task, session", *(f"{name}=..." for name in args)]) + ")"
        self._function: Callable[..., Any] = load_function(
            spec,
            "generator.python",
            usage=usage,
            arguments=(None, None),
            keywords=args,
            args="generator.args",
        )
        self._calls = UserCalls(f"generator.python={spec}", error=ConfigError, grace_s=GRACE_S)
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  an object with `async def __call__` is as good
        )

    @property
    def num_abandoned(self) -> int:
        """Calls so far that were given up because they did not end when they were cancelled."""
        return self._calls.num_abandoned

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """What the function returns, as an Outcome. Raises RolloutFailure for a value that is none, and
        whatever the function raises.
        """
        call = functools.partial(self._function, task, session, **self._args)
        self._calls.check()
        value = call() if self._is_async else await _in_thread(call)
        if inspect.isawaitable(value):  # of a plain function too: a partial, a decorator
            value = await self._calls.run(value)
        return as_outcome(value, self.spec)


def as_outcome(value: object, spec: str) -> Outcome:
    """None, a finite number, or an Outcome of such numbers. Raises RolloutFailure for all else."""
    if value is None:
        return Outcome()
    if not isinstance(value, Outcome):
        return Outcome(_number(value, "reward", spec))
    parts = {}
    for name in ("metrics", "turn_rewards", "branch_rewards"):
        given = getattr(value, name)
        parts[name] = {key: _number(number, f"{name}[{key}]", spec) for key, number in given.items()}
    return Outcome(None if value.reward is None else _number(value.reward, "reward", spec), **parts)


def _number(value: object, name: str, spec: str) -> float:
    """A Python number, one of numpy's, or an array or tensor with one element."""
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        with contextlib.suppress(
            ValueError, RuntimeError
        ):  # more than one element: said below, as what it is
            value = value.item()
    if not isinstance(value, numbers.Real):
        raise _nonsense(spec, f"{name} is {value!r:.80} ({type(value).__name__})")
    if not math.isfinite(value):
        raise _nonsense(spec, f"{name} is {float(value)}, which is not finite")
    return float(value)


def _nonsense(spec: str, what: str) -> RolloutFailure:
    return RolloutFailure(
        f"generator.python={spec} returned no outcome: {what}",
        rule="it returns a finite number, an Outcome of finite numbers, or None for the task's own reward",
        way_out=f"correct what {spec} returns.",
    )


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Not asyncio.to_thread: its few threads would be held by calls that timed out, and the process could not
    end before them.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(is_value: bool, result: Any) -> None:
        if not done.done():  # else the call was cancelled
            done.set_result(result) if is_value else done.set_exception(result)

    def body() -> None:
        try:
            result, is_value = call(), True
        except SystemExit as raised:
            result, is_value = RuntimeError(f"sys.exit({raised.code})"), False
        # carried over to the task that waits, which CancelledError and the like would end or cancel
        except BaseException as raised:
            is_carried = isinstance(raised, Exception) and not isinstance(
                raised, StopIteration
            )  # a future cannot carry that one
            result, is_value = (
                (raised if is_carried else RuntimeError(f"{type(raised).__name__}: {raised}")),
                False,
            )
        try:
            loop.call_soon_threadsafe(settle, is_value, result)
        except RuntimeError:  # the loop is closed: the worker ends
            return

    threading.Thread(target=body, name="harness", daemon=True).start()
    return await done


def make(spec: HarnessSpec) -> PythonHarness:
    """The harness of a worker. Loads openai, if it is there, while nothing runs: that takes seconds, which
    the event loop would stand still.
    """
    assert spec.python is not None
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("openai")
    return PythonHarness(spec.python, spec.args)
