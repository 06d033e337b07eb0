"""The order of prompts: seeded shuffle, epoch after epoch, handed-back ones first. Knows no group and no version."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import TaskError
from asyncrl.tasks.outcome import caught
from asyncrl.tasks.task import Item, Task, as_messages
from asyncrl.types import Prompt


class Feed:
    """The PromptSource of a run.

    Draw number k of a task with n prompts is place k mod n of epoch k div n. Life of a prompt: drawn, then consumed
    (the feed hears nothing of it) or handed back, and drawn again before any new one, in the old order.
    Invariant: state() and the config say all there is; a feed that has loaded it goes on with the same prompts.
    """

    def __init__(self, task: Task, *, seed: int, shuffle: bool, system_prompt: str | None = None) -> None:
        if len(task) == 0:
            raise TaskError(
                "tasks", f"the task {task!r} has no prompts", rule="a run needs at least one", way_out="give it data, or task.size >= 1."
            )
        self._task, self._seed, self._shuffle, self._system_prompt = task, seed, shuffle, system_prompt
        self._num_prompts = len(task)
        self._num_drawn = 0
        self._handed_back: list[int] = []
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def __repr__(self) -> str:
        return f"<Feed {self._num_drawn} drawn of {self._num_prompts} an epoch, {len(self._handed_back)} handed back>"

    def next_nowait(self) -> Prompt:
        """The next prompt. Raises TaskError if the task cannot make it."""
        if self._handed_back:
            draw = heapq.heappop(self._handed_back)
        else:
            draw = self._num_drawn
            self._num_drawn += 1
        epoch, place = divmod(draw, self._num_prompts)
        return self._make_prompt(epoch, int(self._epoch(epoch)[0][place]))

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """Put a drawn prompt at the front again. Raises ValueError if it was not drawn, or was handed back already."""
        epoch, index = (int(part) for part in prompt.prompt_id.split("/"))
        draw = epoch * self._num_prompts + int(self._epoch(epoch)[1][index])
        if draw >= self._num_drawn or draw in self._handed_back:
            raise ValueError(f"prompt {prompt.prompt_id} is not out: it cannot be handed back")
        heapq.heappush(self._handed_back, draw)

    def state(self) -> dict[str, Any]:
        """The cursor, fit for JSON. Prompts that are out (drawn, neither consumed nor handed back) are the caller's to remember."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_drawn": self._num_drawn,
            "handed_back": sorted(self._handed_back),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises TaskError if it belongs to another task, seed or order."""
        own = self.state()
        for key in ("num_prompts", "seed", "shuffle"):
            if state.get(key) != own[key]:
                raise TaskError(
                    "tasks",
                    f"the saved position has {key}={state.get(key)}, this run has {own[key]}",
                    rule="a position means something in the same task, seed and order alone",
                    way_out="resume with the data and config of the saved run, or start a new one.",
                )
        self._num_drawn = int(state["num_drawn"])
        self._handed_back = sorted(int(draw) for draw in state["handed_back"])

    def _make_epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(index at each place, place of each index), int64 [num_prompts] both."""
        order = np.arange(self._num_prompts)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        return order, np.argsort(order)

    def _make_prompt(self, epoch: int, index: int) -> Prompt:
        place = f"prompt {index} of {self._task!r}"
        with caught() as boundary:
            found = self._task.prompt(index)
        if boundary.error is not None:
            raise TaskError("tasks", f"{place}: making it {boundary.failure}", way_out="mend the task's prompt().") from boundary.error
        item = found if isinstance(found, Item) else Item(found)
        messages = as_messages(item.content, place)
        if self._system_prompt is not None:
            if messages[0]["role"] == "system":
                raise TaskError(
                    "tasks",
                    f"{place} begins with a system message of its own",
                    rule="a chat has one system message",
                    way_out="remove task.system_prompt, or the message.",
                )
            messages = ({"role": "system", "content": self._system_prompt}, *messages)
        return Prompt(f"{epoch}/{index}", messages, item.answer, item.info)
