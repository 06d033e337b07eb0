"""Reward functions that misbehave, for runs in tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import Any

from asyncrl.messages.records import Prompt
from asyncrl.tasks.letters import Letters


class Raises(Letters):
    """Every score raises."""

    def score(self, prompt: Prompt, completion: str) -> float:
        raise KeyError("no such answer")


class RaisesSometimes(Letters):
    """A score raises for short completions."""

    def score(self, prompt: Prompt, completion: str) -> float:
        if len(completion) % 5 == 0:
            raise ValueError(f"length {len(completion)}")
        return super().score(prompt, completion)


class Hangs(Letters):
    """Every score hangs for ever."""

    def score(self, prompt: Prompt, completion: str) -> float:
        threading.Event().wait()
        return 0.0


class JudgeThatNeverGivesUp(Letters):
    """The tenth call asks its judge again for ever, whatever happens."""

    _numbers = itertools.count(1)

    async def score(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        if next(self._numbers) == 10:
            while True:
                with contextlib.suppress(BaseException):
                    await asyncio.Event().wait()
        return super().score(prompt, completion)


def no_number(prompt: Prompt, completion: str, answer: Any) -> Any:
    """No number at all."""
    return {"score": 1}


class BeginsWithALetter(Letters):
    """1 or 0, by the first character alone: with random weights all rollouts of a group often earn the
    same.
    """

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion[:1].isalpha())


class NeverRight(Letters):
    """Always 0."""

    def score(self, prompt: Prompt, completion: str) -> float:
        return 0.0
