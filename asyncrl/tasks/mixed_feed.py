"""Prompts of several tasks in one order, each task as often as its share says."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asyncrl.messages.records import Prompt, task_of
from asyncrl.tasks.feed import Feed


class Rota:
    """Whose turn a draw is: a cycle in which each task comes as often as its share, a whole number, says.

    Invariant: after any number of draws a task has had less than one draw more or less than its part of them,
    and in any window less than two. This is Tijdeman's solution of the chairman assignment problem (Discrete
    Mathematics 32, 1980): of the tasks that have waited for long enough, the one whose deadline is first.
    """

    def __init__(self, shares: Mapping[str, int]) -> None:
        self.shares, self._length = dict(shares), sum(shares.values())
        self._turns = list[tuple[str, int]]()
        """(task, its draws in the cycle before this one)"""
        self._places: dict[str, list[int]] = {name: [] for name in shares}
        twice = max(2, 2 * len(shares) - 2)
        for turn in range(1, self._length + 1):
            deadlines = list[tuple[Fraction, str]]()
            for name, share in shares.items():
                lacks = twice * (share * turn - len(self._places[name]) * self._length)
                if lacks >= self._length or len(shares) == 1:
                    deadlines.append((Fraction((twice - 1) * self._length - lacks, share), name))
            _, name = min(deadlines, key=lambda entry: entry[0])  # of equal ones the first task
            self._turns.append((name, len(self._places[name])))
            self._places[name].append(turn - 1)

    def turn(self, draw: int) -> tuple[str, int]:
        """(task, number of its draws before) of a draw of all tasks."""
        cycle, place = divmod(draw, self._length)
        name, before = self._turns[place]
        return name, cycle * self.shares[name] + before

    def draw_of(self, name: str, number: int) -> int:
        """The draw of all tasks that is draw `number` of this one."""
        cycle, place = divmod(number, self.shares[name])
        return cycle * self._length + self._places[name][place]


class MixedFeed(Feed):
    """A feed over those of several tasks, by name. It alone hands out prompts and takes them back; the others
    say which prompt each of their draws is.
    """

    def __init__(self, feeds: Mapping[str, Feed], shares: Mapping[str, int]) -> None:
        self._begin("the tasks")
        self._feeds, self._rota = dict(feeds), Rota(shares)

    @property
    def order(self) -> dict[str, Any]:
        return {
            "shares": self._rota.shares,
            "tasks": {name: feed.order for name, feed in self._feeds.items()},
        }

    def observed_nowait(self, prompt_id: str, reward: float, version: int) -> None:
        self._feeds[task_of(prompt_id)].observed_nowait(prompt_id, reward, version)

    def memory(self) -> dict[str, Any]:
        return {name: found for one in self._feeds.values() for name, found in one.memory().items()}

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        for name, found in memory.items():
            self._feeds[name].load_memory({name: found})

    def load_epoch(self, name: str, epoch: int, text: str) -> None:
        self._feeds[name].load_epoch(name, epoch, text)

    def _reach(self, draw: int, version: int | None) -> None:
        name, number = self._rota.turn(draw)
        self._feeds[name]._reach(number, version)

    def _make(self, draw: int, num_handed_back: int) -> Prompt:
        name, number = self._rota.turn(draw)
        return self._feeds[name]._make(number, num_handed_back)

    def _prompt_id(self, draw: int) -> str:
        name, number = self._rota.turn(draw)
        return self._feeds[name]._prompt_id(number)

    def _draw_of(self, prompt_id: str) -> int:
        name = task_of(prompt_id)
        if name not in self._feeds:
            raise ValueError(f"prompt {prompt_id} is of no task of this run")
        return self._rota.draw_of(name, self._feeds[name]._draw_of(prompt_id))
