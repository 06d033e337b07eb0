"""Agents of a rollout: who makes a call."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from asyncrl.agents.endpoint.requests import invalid

AGENT_HEADER = "x-session-id"
"""Header of a call that names the agent of the rollout that made the call."""
MAX_AGENT = 256
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class Agent:
    """`name`: a path, such as searcher/reader; "" for the rollout's own agent.
    `is_stable`: the harness has chosen the name, which is the same in each run. The
    client of a library may make up other names.
    """

    name: str = ""
    is_stable: bool = False


def agent_of(request: Request) -> Agent:
    """Return the agent that made a call. Raises ApiError (400) for a long name.

    A name with a leading slash is stable: session.child() sends it, and no library
    begins a random name with a slash.

    Example: X-Session-ID: /searcher/reader is the stable agent searcher/reader.
    """
    name = request.headers.get(AGENT_HEADER, "")
    path = name.removeprefix("/")
    if len(path) > MAX_AGENT:
        raise invalid(
            f"{AGENT_HEADER} has {len(path)} characters; at most {MAX_AGENT} are read"
        )
    return Agent(path, is_stable=path != name)
