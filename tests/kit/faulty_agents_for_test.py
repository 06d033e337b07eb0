"""Agents whose infrastructure fails, named as module:function."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from asyncrl.agents import Outcome, Session, Task


async def ask(session: Session) -> str:
    answer = await session.client.chat.completions.create(
        model=session.model, messages=[{"role": "user", "content": "hi"}]
    )
    return answer.choices[0].message.content or ""


def plant(fault: str) -> None:
    """Meet a failure of the infrastructure, as environments do."""
    if fault == "full":
        fill_disk()
    if fault == "refused":
        httpx.get("http://127.0.0.1:9")


def fill_disk() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("x")


async def full(task: Task, session: Session) -> float:
    await ask(session)
    try:
        fill_disk()
    except OSError as error:
        raise RuntimeError("no notes were written") from error
    return 0.0


async def over_its_limit(task: Task, session: Session, *, then: str) -> float:
    """Make a call more than gateway.max_calls=1 allows; then stop, or write to a full
    disk.
    """
    await ask(session)
    try:
        await ask(session)
    except openai.RateLimitError:
        if then == "stop":
            raise
    fill_disk()
    return 0.0


async def crashes(task: Task, session: Session, *, after_answer: bool) -> float:
    if after_answer:
        await ask(session)
    return float(json.loads("answer: 1"))


async def hangs(task: Task, session: Session, *, after_answer: bool) -> None:
    if after_answer:
        await ask(session)
    await asyncio.Event().wait()


async def asks_elsewhere(task: Task, session: Session, *, url: str) -> None:
    """Ask a judge at `url`."""
    await ask(session)
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as judge:
        await judge.chat.completions.create(
            model="judge", messages=[{"role": "user", "content": "Is it right?"}]
        )


async def gives(
    task: Task, session: Session, *, reward: Any = float("nan"), timed_out: bool = False
) -> Outcome:
    await ask(session)
    return Outcome(reward, timed_out=timed_out)


async def dies(task: Task, session: Session) -> None:
    await ask(session)
    os.kill(os.getpid(), signal.SIGKILL)


async def is_a_day_ahead(task: Task, session: Session) -> float:
    """Move the clock of the worker's process, and take a reward."""
    now = time.time
    time.time = lambda: now() + 86_400.0
    await ask(session)
    await asyncio.sleep(0.05)
    return 1.0
