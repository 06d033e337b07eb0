"""Agents of a rollout: who makes a call, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request

from asyncrl.agents.endpoint.requests import invalid
from asyncrl.base.errors import Message

AGENT_HEADER = "x-session-id"
"""Of a call: which agent of its rollout made it."""
LIMITS_HEADER = "x-session-limits"
"""Of a call: limits of this agent and of agents above it, as JSON."""
MAX_AGENT = 256
"""Characters of a name."""
MAX_LIMITS = 4096
"""Characters of the limits."""


class AgentLimits(Message):
    """Of an agent and those below it together. None: those of the rollout only."""

    max_calls: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens."""


_LIMITS = TypeAdapter(dict[str, AgentLimits])


@dataclass(frozen=True, slots=True)
class Agent:
    """`name`: a path, such as searcher/reader; "" for the rollout's own agent.
    `is_stable`: it has the same name in each run; a client of a library may make up
    others.
    """

    name: str = ""
    limits: Mapping[str, AgentLimits] = field(default_factory=dict)
    is_stable: bool = False


MAIN = Agent()


def agent_of(request: Request) -> Agent:
    """Return the agent that made a call. Raises ApiError (400) for wrong headers."""
    name = request.headers.get(AGENT_HEADER, "")
    if len(name) > MAX_AGENT:
        raise invalid(
            f"{AGENT_HEADER} has {len(name)} characters; at most {MAX_AGENT} are read"
        )
    text = request.headers.get(LIMITS_HEADER)
    if text is None:
        return Agent(name)
    try:
        limits = _LIMITS.validate_json(text[: MAX_LIMITS + 1])
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise invalid(
            f"{LIMITS_HEADER} is not JSON of at most {MAX_LIMITS} characters such as "
            f'{{"searcher": {{"max_calls": 4, "max_tokens": 2000}}}}: {why}'
        ) from None
    if others := limits.keys() - set(above(name)):
        raise invalid(
            f"{LIMITS_HEADER} names {min(others)!r:.80}, which is neither the agent {name!r} nor above it"
        )
    return Agent(name, limits, is_stable=bool(name))


def above(agent: str) -> Iterator[str]:
    """Yield an agent and those above it, but main."""
    while agent:
        yield agent
        agent = agent.rpartition("/")[0]


class AgentBudgets:
    """What the agents of a rollout have used, each with those below it.

    Example: searcher may make 4 calls. It has made 3, its reader 1: the next call of
    either is refused.
    """

    def __init__(self) -> None:
        self._num_calls = Counter[str]()
        self._num_tokens = Counter[str]()

    def count_call_nowait(self, agent: Agent) -> None:
        self._num_calls.update(above(agent.name))

    def count_tokens_nowait(self, agent: Agent, num_tokens: int) -> None:
        self._num_tokens.update(dict.fromkeys(above(agent.name), num_tokens))

    def exhausted(self, agent: Agent) -> str | None:
        """Return which limit the agent has reached, if any."""
        for name, limits in agent.limits.items():
            for number, limit, key, unit in (
                (self._num_calls[name], limits.max_calls, "max_calls", "calls"),
                (self._num_tokens[name], limits.max_tokens, "max_tokens", "tokens"),
            ):
                if limit is not None and number >= limit:
                    return f"The agent {name} has used {number} {unit}; agent.{key}={limit} is the limit."
        return None

    def left(self, agent: Agent, most: int) -> int:
        """Return the tokens that a call may sample, 1 to `most`: parallel calls may have
        used up the rest.
        """
        left = [
            limits.max_tokens - self._num_tokens[name]
            for name, limits in agent.limits.items()
            if limits.max_tokens is not None
        ]
        return max(1, min([most, *left]))
