"""What a harness is given: a task, and a session with the model. Of the kinds of harness `python`,
an async (or plain) function of the user's. How one attempt becomes an outcome, or a failure as data.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from asyncrl.config import GeneratorConfig
from asyncrl.config.harnesses import kind_of
from asyncrl.errors import AsyncrlError, ConfigError, RolloutFailure, RolloutTimeout, install_extra
from asyncrl.messages.base import ErrorBody
from asyncrl.messages.records import Outcome, task_of
from asyncrl.messages.work import MAX_OUTCOME_BYTES, WorkItem
from asyncrl.user_code import UserCalls, is_for_us, load_function, words_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger("asyncrl.worker")

GRACE_S = 30.0
"""Seconds that a cancelled harness has to clean up before its slot is given to the next rollout."""
MAX_RETRIES = 4
"""Retries of the client: the gateway samples a call once, however often the client repeats it."""
OUTCOME = TypeAdapter(Outcome)
_MAX_WORDS = 4000


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

    @property
    def name(self) -> str:
        """Of the task that its prompt is of, or the evaluation; '' where a run has one that has no name."""
        return task_of(self.prompt_id)

    def __getattr__(self, name: str) -> Any:
        """Raises MissingAnswerError for `answer` if generator.give_answer is false: a harness that reads it
        gets this error and not None.
        """
        if name != "answer":
            raise AttributeError(f"a task has no {name}")
        way_out = "set generator.give_answer=true, or leave the reward to the task (return nothing)."
        raise MissingAnswerError("the harness reads task.answer, which it is not given", way_out=way_out)


@dataclass(frozen=True, slots=True)
class Task(AnyTask):
    """With the answer of its prompt, as it has come as JSON: generator.give_answer is true."""

    answer: Any = field(default=None, repr=False, kw_only=True)


@dataclass(frozen=True, eq=False, repr=False)
class Session:
    """The model, as this one rollout may call it: any OpenAI client with `base_url` and `api_key`, or
    `client`.

    Life: opened for one attempt; once that has ended, every call answers 410.

    `outcome_key`: what a program posts its outcome with (None: it posts none). `http_client` makes the httpx
    client below `client`; several sessions may share one.
    """

    base_url: str
    api_key: str
    model: str
    outcome_key: str | None = None
    http_client: Callable[[], Any] = lambda: None

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
            http_client=self.http_client(),
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
        way_out = f"{install_extra('harness')}, where the worker runs; or use session.base_url yourself."
        raise ConfigError(f"session.client needs the package openai: {error}", way_out=way_out) from error


class Harness(Protocol):
    """A way to run a rollout. Whatever it raises fails this rollout, but ConfigError ends the worker."""

    async def run(self, task: AnyTask, session: Session) -> Any:
        """What the rollout came to, for as_outcome; None or Outcome() if there is nothing to say: the task's
        own reward function scores it, then.

        When it returns, raises or is cancelled, nothing of the rollout runs any more.
        """
        ...


def build_harness(config: GeneratorConfig, *, is_worker: bool = True) -> Harness:
    """The harness of a worker, or one to check a config. Raises ConfigError if it cannot be run here."""
    kind = kind_of(config)
    assert kind is not None, "the config has a harness"
    module, _, name = kind.place.partition(":")
    make = getattr(importlib.import_module(f"asyncrl.agents.{module}"), name)
    harness: Harness = make(config, is_worker=is_worker)
    return harness


class PythonHarness:
    """Calls `function(task, session, **args)`, with as many calls at once as the worker has slots.

    An async function runs on the worker's event loop: what blocks that loop stops all its rollouts, and for
    longer than gateway.lease_timeout_s loses them; one that does not end when it is cancelled is given up
    (user_code.py). A plain one runs in a thread of its own, which nothing can end: after a timeout it goes
    on until its next call of the model, which is refused.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        """Raises ConfigError if there is no such function, or it cannot be called so."""
        spec, self._args = config.python or "", config.args
        if is_worker:
            with contextlib.suppress(ModuleNotFoundError):  # while nothing runs: it takes seconds
                importlib.import_module("openai")
        usage = ", ".join(["(task, session", *(f"{name}=..." for name in self._args)]) + ")"
        self._function: Callable[..., Any] = load_function(
            spec,
            "generator.python",
            usage=usage,
            arguments=(None, None),
            keywords=self._args,
        )
        self.calls = UserCalls(f"generator.python={spec}", error=ConfigError, grace_s=GRACE_S)
        called = getattr(self._function, "__call__", None)  # noqa: B004  an object with `async def __call__`
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(called)

    async def run(self, task: AnyTask, session: Session) -> Any:
        """What the function returns. Raises whatever it raises."""
        call = functools.partial(self._function, task, session, **self._args)
        self.calls.check()
        value = call() if self._is_async else await self.calls.run(asyncio.to_thread(_in_thread, call))
        # of a plain function too: a partial, a decorator
        return await self.calls.run(value) if inspect.isawaitable(value) else value


def _in_thread(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as error:  # no future carries it
        raise RuntimeError(f"StopIteration: {error}") from error


# ---- one attempt


async def run_item(harness: Harness, item: WorkItem, session: Session) -> Outcome | ErrorBody:
    """What an attempt came to. What goes wrong in a harness is data; ConfigError passes."""
    given = (item.prompt_id, tuple(item.messages), item.info, item.seed, item.sample_index, item.attempt)
    task: AnyTask = Task(*given, answer=item.answer) if item.has_answer else AnyTask(*given)
    limit = asyncio.timeout(item.timeout_s)
    try:
        async with limit:
            return as_outcome(await harness.run(task, session))
    except ConfigError:
        raise
    except BaseException as error:
        if is_for_us(error):
            raise
        if isinstance(error, TimeoutError) and limit.expired():
            what = f"{item.rollout_id} (prompt {item.prompt_id}) did not end within {item.timeout_s} s"
            rule = "that is what was left of rollout.timeout_s, the limit of all attempts together"
            error = RolloutTimeout(what, rule=rule)
        elif not isinstance(error, RolloutFailure):
            log.warning("%s attempt %d failed", item.rollout_id, item.attempt, exc_info=True)
        return _failure(item, error)


def as_outcome(value: object) -> Outcome:
    """An Outcome from None, a finite number (of numpy and torch too), or an Outcome of such numbers. Raises
    RolloutFailure for all else.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise ValueError("it is a text")
        outcome = OUTCOME.validate_python(value if isinstance(value, Outcome) else Outcome(value))  # type: ignore[arg-type]
    except ValueError as error:
        what = (
            f"the harness returned no outcome: {value!r:.80} ({type(value).__name__}): {first_fault(error)}"
        )
        rule = "it returns a finite number, an Outcome of such, or None for the task's own reward"
        raise RolloutFailure(what, rule=rule) from error
    if (size := len(OUTCOME.dump_json(outcome))) > MAX_OUTCOME_BYTES:
        rule = f"{MAX_OUTCOME_BYTES} is the limit"
        raise RolloutFailure(f"the outcome has {size} bytes", rule=rule, way_out="give fewer metrics.")
    return outcome


def _failure(item: WorkItem, error: BaseException) -> ErrorBody:
    """Fit for JSON, whatever a harness has put into its exception."""
    rule, way_out = "", "the worker's log has the traceback."
    what = f"{item.rollout_id} (prompt {item.prompt_id}): its harness raised {type(error).__name__}"
    what += f": {words_of(error)}"
    if isinstance(error, AsyncrlError):
        what, rule, way_out = error.what, error.rule, error.way_out
    words = [text[:_MAX_WORDS].encode("utf-8", errors="replace").decode() for text in (what, rule, way_out)]
    return ErrorBody(error=words[0], rule=words[1], way_out=words[2])


def first_fault(error: ValueError) -> str:
    """What is wrong first, and where."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
