"""Agents of a rollout: who makes a call, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request

from asyncrl.agents.endpoint.requests import invalid
from asyncrl.base.errors import Message
from asyncrl.base.waits import Signal, waiting
from asyncrl.messages.turn_rewards import above

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


class AgentBudgets:
    """What the agents of a rollout have used, each with those below it.

    A running call holds the tokens that it may sample, so parallel calls of an agent
    cannot pass its limit together.

    Waits: wait_room until calls that run have ended, or leave enough tokens.

    Example: searcher may sample 100 tokens. A call of it runs, and may sample 80.

        reader of searcher asks for 20     it runs, too
        searcher asks for 50               it waits
        the first call ends after 10       70 are left: the third call runs
    """

    def __init__(self) -> None:
        self._num_calls = Counter[str]()
        self._num_tokens = Counter[str]()
        self._num_held = Counter[str]()
        self._released = Signal()

    def count_call_nowait(self, agent: Agent) -> None:
        for name in above(agent.name):
            self._num_calls[name] += 1

    def count_tokens_nowait(self, agent: Agent, num_tokens: int) -> None:
        for name in above(agent.name):
            self._num_tokens[name] += num_tokens

    def exhausted(self, agent: Agent) -> str | None:
        """Return which limit the agent has reached, if any."""
        at_calls = self._at_limit(agent, "calls", self._num_calls)
        return at_calls or self.out_of_tokens(agent)

    def out_of_tokens(self, agent: Agent) -> str | None:
        return self._at_limit(agent, "tokens", self._num_tokens)

    def _at_limit(self, agent: Agent, unit: str, used: Counter[str]) -> str | None:
        key = f"max_{unit}"
        for name, limits in agent.limits.items():
            limit = getattr(limits, key)
            if limit is not None and used[name] >= limit:
                return f"The agent {name} has used {used[name]} {unit}; agent.{key}={limit} is the limit."
        return None

    def _num_left(self, agent: Agent) -> dict[str, int]:
        """Return the tokens that no call has used or holds, by limited agent."""
        return {
            name: limits.max_tokens - self._num_tokens[name] - self._num_held[name]
            for name, limits in agent.limits.items()
            if limits.max_tokens is not None
        }

    async def wait_room(self, agent: Agent, most: int) -> None:
        """Return once a call may sample `most` tokens, or no running call holds any."""

        def has_room() -> bool:
            return all(
                left >= most or not self._num_held[name]
                for name, left in self._num_left(agent).items()
            )

        if agent.limits and not has_room():
            with waiting(
                "tokens of a sub-agent", on="its other calls", who="calls of agents"
            ):
                await self._released.wait_for(has_room)

    def hold_nowait(self, agent: Agent, most: int) -> int:
        """Hold the tokens that a call may sample, and return their number: `most`, or
        what is left.
        """
        num = min([most, *self._num_left(agent).values()])
        for name in above(agent.name):
            self._num_held[name] += num
        return num

    def release_nowait(self, agent: Agent, num_tokens: int) -> None:
        for name in above(agent.name):
            self._num_held[name] -= num_tokens
        self._released.notify()
