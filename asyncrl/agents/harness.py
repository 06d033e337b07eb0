"""What a harness is given: a task, and a session with the model. The kinds of harness, and of them `python`,
an async (or plain) function of the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError, RolloutFailure, install_extra
from asyncrl.messages.records import Outcome
from asyncrl.user_code import UserCalls, load_function

if TYPE_CHECKING:
    from openai import AsyncOpenAI

GRACE_S = 30.0
"""Seconds that a cancelled harness has to clean up before its slot is given to the next rollout."""
MAX_RETRIES = 4
"""Retries of the client: the gateway samples a call once, however often the client repeats it."""
OUTCOME = TypeAdapter(Outcome)


class MissingAnswerError(ConfigError, AttributeError):
    """A harness reads the answer of a task that has none. It is an AttributeError, so hasattr and getattr's
    default work as usual.
    """


@dataclass(frozen=True, slots=True)
class AnyTask:
    """One attempt at one prompt. `info` has come as JSON: tuples are lists, keys are texts.

    `seed`, in [0, 2**63), is for the harness's own draws: another one for each rollout and each attempt, the
    same in a run that is repeated. `attempt` counts from 0.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    sample_index: int = 0
    attempt: int = 0

    def __getattr__(self, name: str) -> Any:
        """Raises MissingAnswerError for `answer` if generator.give_answer is false: a harness that reads it
        gets this error and not None.
        """
        if name != "answer":
            raise AttributeError(f"a task has no {name}")
        raise MissingAnswerError(
            "the harness reads task.answer, which it is not given",
            rule="generator.give_answer=false: what a model's tools run could find it",
            way_out="set generator.give_answer=true, or leave the reward to the task (return nothing).",
        )


@dataclass(frozen=True, slots=True)
class Task(AnyTask):
    """With the answer of its prompt, as it has come as JSON: generator.give_answer is true."""

    answer: Any = field(default=None, repr=False, kw_only=True)


class Session:
    """The model, as this one rollout may call it: any OpenAI client with `base_url` and `api_key`, or
    `client`.

    Life: opened for one attempt; once that has ended, every call answers 410.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        outcome_key: str | None = None,
        http_client: Callable[[], Any] = lambda: None,
    ) -> None:
        """`outcome_key`: what a program posts its outcome with (None: it posts none). `http_client` makes the
        httpx client below `client`; several sessions may share one.
        """
        self.base_url, self.api_key, self.model, self.outcome_key = base_url, api_key, model, outcome_key
        self._http_client = http_client

    @functools.cached_property
    def client(self) -> AsyncOpenAI:
        """An openai.AsyncOpenAI for this session, without time limits of its own: rollout.timeout_s is the
        limit. Raises ConfigError if openai is not installed.
        """
        client: AsyncOpenAI = _openai().AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=MAX_RETRIES,
            timeout=None,
            http_client=self._http_client(),
        )
        return client


def make_http_client() -> Any:
    """An httpx client for all sessions of a worker: making one each would cost more than a call."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return _openai().DefaultAsyncHttpxClient(timeout=None, limits=limits, trust_env=False)


def _openai() -> Any:
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"session.client needs the package openai: {error}",
            way_out=f"{install_extra('harness')}, where the worker runs; or use session.base_url yourself.",
        ) from error


class Harness(Protocol):
    """A way to run a rollout. Whatever it raises fails this rollout, but ConfigError ends the worker."""

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """What the rollout came to; Outcome() if there is nothing to say: the task's own reward function
        scores it, then.

        When it returns, raises or is cancelled, nothing of the rollout runs any more.
        """
        ...


def build_harness(spec: GeneratorConfig) -> Harness:
    """The harness of a worker. Raises ConfigError if it cannot be run here."""
    if spec.command:
        from asyncrl.agents.command import CommandHarness

        return CommandHarness(
            spec.command, spec.env, spec.max_output_bytes, pass_env=spec.pass_env, is_worker=True
        )
    if spec.verifiers:
        from asyncrl.agents.verifiers import VerifiersHarness

        return VerifiersHarness(spec.verifiers, spec.args)
    with contextlib.suppress(ModuleNotFoundError):  # while nothing runs: it takes seconds
        importlib.import_module("openai")
    return PythonHarness(spec.python or "", spec.args)


class PythonHarness:
    """Calls `function(task, session, **args)`, with as many calls at once as the worker has slots.

    An async function runs on the worker's event loop: what blocks that loop stops all its rollouts, and for
    longer than gateway.lease_timeout_s loses them; one that does not end when it is cancelled is given up
    (user_code.py). A plain one runs in a thread of its own, which nothing can end: after a timeout it goes
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
        )
        self._calls = UserCalls(f"generator.python={spec}", error=ConfigError, grace_s=GRACE_S)
        called = getattr(self._function, "__call__", None)  # noqa: B004  an object with `async def __call__`
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(called)

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
        value = call() if self._is_async else await self._calls.run(asyncio.to_thread(_in_thread, call))
        if inspect.isawaitable(value):  # of a plain function too: a partial, a decorator
            value = await self._calls.run(value)
        return as_outcome(value, self.spec)


def _in_thread(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (
        StopIteration,
        KeyboardInterrupt,
    ) as error:  # the first no future carries; the second ends the loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def as_outcome(value: object, spec: str) -> Outcome:
    """An Outcome from None, a finite number (of numpy and torch too), or an Outcome of such numbers. Raises
    RolloutFailure for all else.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise ValueError("it is a text")
        return OUTCOME.validate_python(value if isinstance(value, Outcome) else Outcome(value))  # type: ignore[arg-type]
    except ValueError as error:
        raise RolloutFailure(
            f"generator.python={spec} returned no outcome: {value!r:.80} ({type(value).__name__}): "
            f"{first_fault(error)}",
            rule="it returns a finite number, an Outcome of such, or None for the task's own reward",
        ) from error


def first_fault(error: ValueError) -> str:
    """What is wrong first, and where."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
