"""Harnesses that the tests name as module:function."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import time
from typing import Any

import numpy as np

from asyncrl.agents import Outcome, Session, Task


async def two_turns(task: Task, session: Session, *, bonus: float = 0.0) -> Outcome:
    messages: list[Any] = list(task.messages)
    for _ in range(2):
        answer = await session.client.chat.completions.create(model=session.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return Outcome(1.0 + bonus, {"turns": 2})


def plain(task: Task, session: Session) -> float:
    time.sleep(0.01)
    return float(task.answer)


async def says_nothing(task: Task, session: Session) -> None:
    return None


async def numpy_reward(task: Task, session: Session) -> Any:
    return np.float32(0.5)


async def whole_outcome(task: Task, session: Session) -> Outcome:
    return Outcome(turn_rewards={"chatcmpl-0": np.int64(1), "chatcmpl-1": 0.0}, metrics={"ok": True})  # type: ignore[dict-item]


async def says_text(task: Task, session: Session) -> Any:
    return "good"


async def not_finite(task: Task, session: Session) -> Outcome:
    return Outcome(1.0, {"loss": math.nan})


async def raises(task: Task, session: Session) -> float:
    raise ZeroDivisionError("by \ud800 zero")


def raises_in_thread(task: Task, session: Session) -> float:
    raise StopIteration("no more")


class UnspeakableError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise GeneratorExit


async def raises_the_unspeakable(task: Task, session: Session) -> float:
    raise UnspeakableError


async def interrupts(task: Task, session: Session) -> float:
    raise KeyboardInterrupt


async def cancels_itself(task: Task, session: Session) -> float:
    raise asyncio.CancelledError


async def no_session(task: Task) -> float:
    return 1.0


class Judge:
    async def __call__(self, task: Task, session: Session) -> float:
        return 0.75


judge = Judge()


async def environment(task: Task, session: Session) -> Outcome:
    # PR_GET_DUMPABLE: others of this user do not read it in /proc
    is_hidden = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
    return Outcome(1.0, {"has_worker_key": "ASYNCRL_WORKER_KEY" in os.environ, "is_hidden": is_hidden})
