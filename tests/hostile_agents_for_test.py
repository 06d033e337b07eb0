"""An agent that does all that an agent should not, one thing a rollout, between rollouts that are well."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from asyncrl.agents import Session, Task

Post = Callable[[bytes], Awaitable[int]]
"""A body as it is -> the status of its answer."""

_numbers = itertools.count()
_left_over: set[asyncio.Task[None]] = set()


def chat(content: Any, role: str = "user") -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content}]}).encode()


BODIES = {
    "large message": chat("x" * 2**20),
    "broken JSON": b'{"messages": [{"role":',
    "wrong role": chat("hi", role="emperor"),
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "million tokens": chat("1 " * 10**6),
    "too large a body": chat("x" * 2**23),
}
WAYS = (*BODIES, "floods", "calls after its end", "never ends", "swallows its cancellation")


async def misbehaves(task: Task, session: Session, *, log: str) -> None:
    """Two turns, scored by the task; every other rollout does something first, and writes into `log` what
    came of it.
    """
    number = next(_numbers)
    if number % 2:
        await _misbehave(WAYS[number // 2 % len(WAYS)], session, Path(log))
    messages: list[Any] = list(task.messages)
    answer = await session.client.chat.completions.create(model=session.model, messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "a"}]
    await session.client.chat.completions.create(model=session.model, messages=messages)


async def _misbehave(way: str, session: Session, log: Path) -> None:
    if way == "never ends":
        _write(log, way, 0)
        await asyncio.Event().wait()
    elif way == "swallows its cancellation":
        _write(log, way, 0)
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.Event().wait()
    elif way == "calls after its end":
        task = asyncio.ensure_future(_call_until_the_end(way, session, log))
        _left_over.add(task)
        task.add_done_callback(_left_over.discard)
    elif way == "floods":
        async with _client(session) as post:
            while (status := await post(b"no JSON")) == 400:
                pass
            _write(log, way, status)
    else:
        async with _client(session) as post:
            _write(log, way, await post(BODIES[way]))


async def _call_until_the_end(way: str, session: Session, log: Path) -> None:
    async with _client(session) as post:
        while (status := await post(b"{}")) != 410:  # noqa: ASYNC110  nothing else says it
            await asyncio.sleep(0.1)
        _write(log, way, status)


@contextlib.asynccontextmanager
async def _client(session: Session) -> AsyncIterator[Post]:
    url, headers = f"{session.base_url}/chat/completions", {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60.0) as http:

        async def post(body: bytes) -> int:
            return (await http.post(url, content=body)).status_code

        yield post


def _write(log: Path, way: str, status: int) -> None:
    with log.open("a") as file:
        file.write(json.dumps([way, status]) + "\n")
