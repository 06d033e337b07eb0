"""Task and session of a harness, and the harness `python`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from asyncrl.base.errors import (
    ConfigError,
    OutcomeUnusable,
    RolloutFailure,
    RolloutTimeout,
    first_fault,
)
from asyncrl.base.extensions import load_place
from asyncrl.base.failures import FailureKind, kind_of_error
from asyncrl.base.user_code import UserCalls, load_function, raised, shown
from asyncrl.base.waits import within
from asyncrl.config import GeneratorConfig
from asyncrl.config.generator_config import kind_of
from asyncrl.messages.records import Outcome, task_of
from asyncrl.messages.worker_api import FailureBody, WorkItem

if TYPE_CHECKING:
    from httpx import AsyncClient
    from openai import AsyncOpenAI

log = logging.getLogger("asyncrl.worker")

GRACE_S = 30.0
"""Limit for the cleanup of a cancelled harness."""
MAX_RETRIES = 4
"""The gateway samples a repeated call only once."""
REQUEST_LOGGERS: tuple[str, ...] = (
    "aiohttp.access",
    "anthropic",
    "httpcore",
    "httpx",
    "httpcore2",
    "httpx2",
    "openai",
    "urllib3",
)
"""Loggers of a line per request, with addresses that may hold keys."""
OUTCOME = TypeAdapter(Outcome)
MAX_TRACE = 20_000
"""Characters of a traceback in the log: an error's text may have megabytes."""


@dataclass(frozen=True, slots=True)
class AnyTask:
    """`info` comes from JSON: tuples become lists, keys strings.

    `seed`, in [0, 2**63), differs for each attempt, and is equal in a repeated run.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    sample_index: int = 0
    attempt: int = 0

    @property
    def name(self) -> str:
        return task_of(self.prompt_id)

    def __getattr__(self, name: str) -> Any:
        if name != "answer":
            raise AttributeError(f"a task has no {name}")
        raise ConfigError(
            "the harness reads task.answer, which it is not given",
            way_out="set generator.give_answer=true, or return nothing and let the task score.",
        )


@dataclass(frozen=True, slots=True)
class Task(AnyTask):
    """Task with an answer."""

    answer: Any = field(default=None, repr=False, kw_only=True)


def make_http_client() -> AsyncClient:
    """Return the shared httpx client of a worker."""
    import httpx
    from openai import DefaultAsyncHttpxClient

    # All rollouts of a worker share this client. In a pool with a limit, long calls of
    # some rollouts would hold up the calls of others.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return DefaultAsyncHttpxClient(timeout=None, limits=limits, trust_env=False)


@dataclass(frozen=True, eq=False, repr=False)
class Session:
    """Access of one rollout to the model: `base_url` and `api_key` for any OpenAI
    client, or `client`.

    `agent`: path of a sub-agent, from child(). Other clients than `client` send it as
    X-Session-ID, with a leading slash. After the attempt, every call gets 401. With
    trainer.roles, each call names one of `roles` as its model, in place of `model`.
    """

    base_url: str
    api_key: str
    model: str
    outcome_key: str | None = None
    http_client: Callable[[], AsyncClient] = make_http_client
    agent: str = ""
    roles: tuple[str, ...] = ()

    def child(self, role: str) -> Session:
        """Return the session of a sub-agent. Its tokens belong to this rollout, with its
        reward or a separate reward: Outcome(turn_rewards={"main": 1, "ROLE": 0}).

        Example: session.child("searcher").child("reader") is the agent searcher/reader.
        """
        # A header's value has no space at its ends.
        is_header = role.isascii() and role.isprintable() and role == role.strip()
        if not role or "/" in role or not is_header:
            raise ConfigError(
                f"session.child({role!r:.80}) has no name for the agent",
                rule="a role is printable ASCII without / and without spaces at its ends",
                way_out='name it, such as session.child("searcher").',
            )
        return replace(self, agent=f"{self.agent}/{role}".lstrip("/"))

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the calls of a sub-agent, for other clients."""
        if not self.agent:
            return {}
        # The slash says that the name is the same in each run: see agent_of().
        return {"X-Session-ID": f"/{self.agent}"}

    @cached_property
    def client(self) -> AsyncOpenAI:
        """Return a client without time limits."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=MAX_RETRIES,
            timeout=None,
            http_client=self.http_client(),
            default_headers=self.headers,
        )


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the variables that keep calls of `url` from the proxies of `environment`."""
    names = ("NO_PROXY", "no_proxy")
    hosts = [environment.get(name) for name in names] + [urlsplit(url).hostname]
    return dict.fromkeys(names, ",".join(dict.fromkeys(filter(None, hosts))))


class Harness(Protocol):
    """An exception in run fails its rollout; ConfigError ends the worker."""

    async def run(self, task: AnyTask, session: Session) -> object:
        """Return a reward, an Outcome, or None for the task's reward.

        Nothing of the rollout may run after the end or cancellation.
        """
        ...


def build_harness(config: GeneratorConfig, *, is_worker: bool = True) -> Harness:
    """Return the harness. Raises ConfigError."""
    kind = kind_of(config)
    assert kind is not None, "the config has a harness"
    harness: Harness = load_place(kind.place)(config, is_worker=is_worker)
    return harness


class PythonHarness:
    """Call `function(task, session, **args)`.

    An async function that blocks the event loop stops all rollouts and, beyond
    gateway.lease_timeout_s, loses them. A plain function runs in its own thread until
    its next model call is refused.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        self._args = config.args
        usage = (
            ", ".join(["(task, session", *(f"{name}=..." for name in self._args)]) + ")"
        )
        self._function: Callable[..., object] = load_function(
            config.python or "",
            "generator.python",
            usage=usage,
            arguments=(None, None),
            keywords=self._args,
        )
        self.calls = UserCalls(f"generator.python={config.python}", grace_s=GRACE_S)

    async def run(self, task: AnyTask, session: Session) -> object:
        self.calls.check()
        call = partial(self._function, task, session, **self._args)
        value = await self.calls.run(asyncio.to_thread(_in_thread, call))
        return await self.calls.run(value) if inspect.isawaitable(value) else value


def _in_thread(call: Callable[[], object]) -> object:
    try:
        return call()
    except StopIteration as error:  # a future cannot carry StopIteration
        raise RuntimeError(f"StopIteration: {error}") from error


# ---- one attempt


async def run_item(
    harness: Harness, item: WorkItem, session: Session
) -> Outcome | FailureBody:
    given = (
        item.prompt_id,
        tuple(item.messages),
        item.info,
        item.seed,
        item.sample_index,
        item.attempt,
    )
    task: AnyTask = (
        Task(*given, answer=item.answer) if item.has_answer else AnyTask(*given)
    )
    late = partial(
        RolloutTimeout,
        f"{item.rollout_id} (prompt {item.prompt_id}) did not end within {item.timeout_s} s",
        rule="rollout.timeout_s limits all attempts together",
    )
    try:
        async with within(item.timeout_s, late):
            return as_outcome(await harness.run(task, session))
    except (ConfigError, asyncio.CancelledError):
        raise
    # User code may raise anything, also SystemExit and KeyboardInterrupt. It fails one
    # rollout, not the worker with all others.
    except BaseException as error:
        if not isinstance(error, RolloutFailure):
            trace = "".join(traceback.format_exception(error))
            log.warning(
                "%s attempt %d failed\n%s",
                item.rollout_id,
                item.attempt,
                trace[:MAX_TRACE],
            )
            what = f"{item.rollout_id} (prompt {item.prompt_id}): its harness {raised(error)}"
            error = RolloutFailure(
                what,
                way_out="the worker's log has the traceback.",
                kind=kind_of_error(error, FailureKind.AGENT_CRASH),
            )
        return FailureBody(
            error=shown(error.what),
            rule=shown(error.rule),
            way_out=shown(error.way_out),
            kind=error.kind,
        )


def as_outcome(value: object) -> Outcome:
    """Convert None, a finite number, or an Outcome. Raises RolloutFailure."""
    try:
        outcome = value if isinstance(value, Outcome) else Outcome(value)  # type: ignore[arg-type]
        return OUTCOME.validate_python(outcome)
    except ValueError as error:
        kind = type(value).__name__
        raise OutcomeUnusable(
            f"the harness returned no outcome: {value!r:.80} ({kind}): {first_fault(error)}",
            rule="return a finite number, an Outcome, or None for the task's own reward",
        ) from error
