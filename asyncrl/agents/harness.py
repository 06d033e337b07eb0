"""What a harness is given: a task, and a session with the model; and the table of the kinds of harness."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError, install_extra
from asyncrl.messages.base import Message
from asyncrl.messages.records import Outcome

if TYPE_CHECKING:
    from openai import AsyncOpenAI

GRACE_S = 30.0
"""What a harness that is cancelled has to clean up, before its rollout's slot is given to the next one."""
MAX_RETRIES = 4
"""Of the client: the gateway samples a call once, however often it is asked for."""


class MissingAnswerError(ConfigError, AttributeError):
    """A harness reads the answer of a task that has none. As an AttributeError it leaves hasattr and
    getattr's default what they are.
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


@dataclass(frozen=True, slots=True)
class Task(AnyTask):
    """With the answer of its prompt, as it has come as JSON: generator.give_answer is true."""

    answer: Any = field(default=None, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class TaskWithoutAnswer(AnyTask):
    """Its answer stays with the run: generator.give_answer is false. Reading it says so, and gives no
    None.
    """

    @property
    def answer(self) -> Any:
        """Raises MissingAnswerError."""
        raise MissingAnswerError(
            "the harness reads task.answer, which it is not given",
            rule="generator.give_answer=false: what a model's tools run could find it",
            way_out="set generator.give_answer=true, or leave the reward to the task (return nothing).",
        )


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
        http_client: Callable[[], Any] | None = None,
    ) -> None:
        """`outcome_key`: what a program posts its outcome with (None: it posts none). `http_client` makes the
        httpx client below `client`; several sessions may share one.
        """
        self.base_url, self.api_key, self.model, self.outcome_key = base_url, api_key, model, outcome_key
        self._http_client = http_client
        self._client: AsyncOpenAI | None = None

    @property
    def client(self) -> AsyncOpenAI:
        """An openai.AsyncOpenAI for this session, without time limits of its own: rollout.timeout_s is the
        limit.

        Raises ConfigError if openai is not installed.
        """
        if self._client is None:
            client_class = _openai().AsyncOpenAI
            http_client = self._http_client() if self._http_client else None
            self._client = client_class(
                base_url=self.base_url,
                api_key=self.api_key,
                max_retries=MAX_RETRIES,
                timeout=None,
                http_client=http_client,
            )
        return self._client


class HttpClients:
    """The one httpx client that the sessions of a worker share: connections are kept, and making one each
    would cost more than a call.

    Life: empty -> get(), made by the first that asks -> aclose().
    """

    def __init__(self) -> None:
        self._client: Any = None

    def get(self) -> Any:
        """The client; to be called in the worker's event loop."""
        if self._client is None:
            import httpx

            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            self._client = _openai().DefaultAsyncHttpxClient(timeout=None, limits=limits, trust_env=False)
        return self._client

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


class Harness(Protocol):
    """A way to run a rollout. Whatever it raises fails this rollout, but ConfigError ends the worker."""

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        """What the rollout came to; Outcome() if there is nothing to say: the task's own reward function
        scores it, then.

        When it returns, raises or is cancelled, nothing of the rollout runs any more.
        """
        ...


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"session.client needs the package openai: {error}",
            rule="it comes with the extra `harness`",
            way_out=f"{install_extra('harness')}, where the worker runs; or call session.base_url with a "
            f"client of your own.",
        ) from error
    return openai


HARNESSES = {
    "python": "asyncrl.agents.python",
    "command": "asyncrl.agents.command",
    "verifiers": "asyncrl.agents.verifiers",
}
"""Modules of the kinds of harness, each loaded when it is run. Each has `make(spec: HarnessSpec) -> Harness`,
which raises ConfigError for what cannot be run.
"""


class HarnessSpec(Message):
    """Which harness, and its settings: those of the config's section `generator`. One of python, command,
    verifiers is given.
    """

    python: str | None = None
    command: list[str] | None = None
    verifiers: str | None = None
    args: dict[str, Any] = {}
    env: dict[str, str] = {}
    pass_env: list[str] = []
    max_output_bytes: int = Field(default=2**20, ge=1024)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(given := [name for name in HARNESSES if getattr(self, name)]) != 1:
            raise ValueError(f"give one of {', '.join(HARNESSES)} (given: {', '.join(given) or 'none'})")
        return self

    @property
    def kind(self) -> str:
        """`python`, `command` or `verifiers`."""
        return next(name for name in HARNESSES if getattr(self, name))


def build_harness(spec: HarnessSpec) -> Harness:
    """The harness. Raises ConfigError if it cannot be run here."""
    harness: Harness = importlib.import_module(HARNESSES[spec.kind]).make(spec)
    return harness
