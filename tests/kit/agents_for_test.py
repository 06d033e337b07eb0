"""Agents of the tests, named as module:function."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from asyncrl.agents import Outcome, Session, Task
from examples.lookup import run

# ---- good ones


async def two_turns(task: Task, session: Session, *, bonus: float = 0.0) -> Outcome:
    """The share of the letter a in both answers is a metric."""
    messages: list[Any] = list(task.messages)
    for _ in range(2):
        answer = await session.client.chat.completions.create(
            model=session.model, messages=messages
        )
        text = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "a 2"},
        ]
    text = "".join(
        message["content"] for message in messages if message["role"] == "assistant"
    )
    return Outcome(
        1.0 + bonus, {"turns": 2, "share": text.count("a") / max(1, len(text))}
    )


async def share_of_a(task: Task, session: Session) -> Outcome:
    outcome = await two_turns(task, session)
    return Outcome(outcome.metrics["share"], {"turns": 2})


async def edits_its_history(task: Task, session: Session) -> Outcome:
    """Three turns, two of them streamed; then the first answer is forgotten, which
    starts a branch of two more.
    """
    messages: list[Any] = list(task.messages)
    for turn in range(5):
        if turn == 3:
            del messages[1:3]
        asked: Any = {"model": session.model, "messages": messages, "stream": turn != 1}
        answer = await session.client.chat.completions.create(**asked)
        if asked["stream"]:
            text = "".join(
                [part.choices[0].delta.content or "" async for part in answer]
            )
        else:
            text = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "a 2"},
        ]
    return Outcome(float(len(text)))


async def asks_twice(task: Task, session: Session, *, schema: Any = None) -> Outcome:
    """Two turns with a reward each, of any text or of JSON of a schema."""
    asked: Any = {"model": session.model, "messages": [*task.messages]}
    if schema is not None:
        wanted = {"name": "answer", "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": wanted}
    rewards = {}
    for _ in range(2):
        answer = await session.client.chat.completions.create(**asked)
        text = answer.choices[0].message.content or ""
        rewards[answer.id] = len({*text}) / 24
        asked["messages"] += [{"role": "assistant", "content": text}, task.messages[-1]]
    return Outcome(turn_rewards=rewards)


async def environment(task: Task, session: Session) -> Outcome:
    # PR_GET_DUMPABLE: others of this user do not read it in /proc
    is_hidden = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
    return Outcome(
        1.0,
        {"has_worker_key": "ASYNCRL_WORKER_KEY" in os.environ, "is_hidden": is_hidden},
    )


# ---- agents that return or raise


class UnspeakableError(Exception):
    """An exception whose text cannot be built."""

    def __str__(self) -> str:
        raise GeneratorExit


RESULTS: dict[str, Any] = {
    "nothing": None,
    "numpy": np.float32(0.5),
    "outcome": Outcome(
        turn_rewards={"chatcmpl-0": np.int64(1), "chatcmpl-1": 0.0},
        metrics={"ok": True},
    ),  # type: ignore[dict-item]
    "text": "good",
    "not finite": Outcome(1.0, {"loss": math.nan}),
    "error": ZeroDivisionError("by \ud800 zero"),
    "no await": AttributeError("'coroutine' object has no attribute 'choices'"),
    "unspeakable": UnspeakableError(),
    "interrupt": KeyboardInterrupt(),
    "cancellation": asyncio.CancelledError(),
    "stop": StopIteration("no more"),
}


def plain(task: Task, session: Session, *, result: str = "") -> Any:
    time.sleep(0.01)
    value = RESULTS[result] if result else float(task.answer)
    if isinstance(value, BaseException):
        raise value
    return value


class Agent:
    async def __call__(self, task: Task, session: Session, *, result: str) -> Any:
        return plain(task, session, result=result)


agent = Agent()


# ---- agents that lose their worker

_begun = itertools.count()
"""Attempts of plays_then_holds in this worker."""


async def loses_two_workers(task: Task, session: Session, *, marks: str) -> Outcome:
    """The lookup agent; the first to come while `blocks` is in this folder takes it
    away, and holds its worker's loop for ever; a later agent takes `dies` away, and
    kills its worker.
    """
    for mark in (Path(marks) / "blocks", Path(marks) / "dies"):
        if mark.exists():
            mark.unlink()
            if mark.name == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(3600.0)  # noqa: ASYNC251  that is the point
    return await run(task, session)


async def plays_then_holds(
    task: Task, session: Session, *, num_played: int, mark: str
) -> Outcome:
    """The first attempts of a worker are played; each later one writes the mark and
    never ends: its worker holds it from then on.
    """
    if next(_begun) >= num_played:
        Path(mark).touch()  # noqa: ASYNC240
        await asyncio.Event().wait()
    return await two_turns(task, session)


# ---- a hostile agent

_numbers = itertools.count()
_left_over: set[asyncio.Task[None]] = set()


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


BODIES = {
    "large message": chat("x" * 2**20),
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "million tokens": chat("1 " * 10**6),
    "too large a body": chat("x" * 2**25),
}
WAYS = (
    *BODIES,
    "floods",
    "calls after its end",
    "never ends",
    "swallows its cancellation",
)


async def misbehaves(task: Task, session: Session, *, log: str) -> None:
    """Two turns, scored by the task; every other rollout does something first, and
    writes into `log` what came of it.
    """
    number = next(_numbers)
    if number % 2:
        way = WAYS[number // 2 % len(WAYS)]
        note = partial(_note, Path(log), way)
        if way == "calls after its end":
            left_over = asyncio.ensure_future(_call(session, b"{}", note, until=401))
            _left_over.add(left_over)
            left_over.add_done_callback(_left_over.discard)
        elif way == "floods":
            await _call(session, b"no JSON", note, until=401)
        elif way in BODIES:
            await _call(session, BODIES[way], note)
        else:
            note(0)
            while True:
                with contextlib.suppress(
                    BaseException if way.startswith("swallows") else ()
                ):
                    await asyncio.Event().wait()
    await two_turns(task, session)


def _note(log: Path, way: str, status: int) -> None:
    with log.open("a") as file:
        file.write(json.dumps([way, status]) + "\n")


async def _call(
    session: Session, body: bytes, note: Callable[[int], None], until: int = 0
) -> None:
    """Call once, or until a status."""
    url = f"{session.base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60.0) as http:
        while True:
            status = (await http.post(url, content=body)).status_code
            if status == until or not until:
                return note(status)
            await asyncio.sleep(0 if body == b"no JSON" else 0.1)


# ---- several policies


async def solver_and_critic(task: Task, session: Session) -> Outcome:
    """The solver earns the letters a of its answer, the critic the letters b."""
    shares = dict[str, float]()
    of_roles = {"solver": session, "critic": session.child("critic")}
    for (role, own), letter in zip(of_roles.items(), "ab", strict=True):
        answer = await own.client.chat.completions.create(
            model=role, messages=task.messages
        )
        text = answer.choices[0].message.content or ""
        shares[role] = text.count(letter) / max(1, len(text))
    return Outcome(None, shares, {"main": shares["solver"], "critic": shares["critic"]})
