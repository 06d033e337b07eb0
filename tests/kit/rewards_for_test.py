"""Reward functions that misbehave, for runs in tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from asyncrl.messages.records import Prompt
from asyncrl.tasks.toy import Letters


class JudgeThatNeverGivesUp(Letters):
    """The tenth call asks its judge again for ever."""

    _numbers = itertools.count(1)

    async def score(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        if next(self._numbers) == 10:
            while True:
                with contextlib.suppress(BaseException):
                    await asyncio.Event().wait()
        return super().score(prompt, completion)


class BeginsWithALetter(Letters):
    """1 or 0, by the first character only: with random weights all rollouts of a group
    often earn the same.
    """

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion[:1].isalpha())


def begins_with(prompt: Prompt, completion: str, answer: str) -> float:
    """1 if the completion begins with the answer."""
    return float(completion.startswith(answer))


class Unhurried(Letters):
    """Score with a slow judge: such a run waits more than it works, so that others can
    run in parallel.
    """

    async def score(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        await asyncio.sleep(6.0)  # no wait for anything: it is what this judge takes
        return super().score(prompt, completion)
