"""The order of prompts: given ones, then seeded shuffle, epoch after epoch; handed-back ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item, PromptTask, UserCodeFailed, as_messages, user_code


class Feed:
    """Where producers take prompts from.

    The first draws are the prompts of `first`, if there are any. Draw number k after them, of a task with n
    prompts, is place k mod n of epoch k div n. Life of a prompt: drawn, then consumed (without a call of the
    feed) or handed back, and drawn again before any new one, in the old order, with the num_handed_back that
    it came back with. Invariant: state() and the config say all there is; a feed that has loaded it goes on
    with the same prompts.
    """

    def __init__(
        self,
        task: PromptTask,
        *,
        seed: int,
        shuffle: bool,
        system_prompt: str | None = None,
        first: Sequence[Prompt] = (),
        name: str | None = None,
    ) -> None:
        """`first`: whole prompts, whose ids are none of the task's (epoch/index). `name`: what errors call
        the task.
        """
        self._name = name or repr(task)
        if len(task) == 0:
            what = f"the task {self._name} has no prompts"
            raise ConfigError(what, way_out="give it data, or task.size >= 1.")
        self._task, self._seed, self._shuffle, self._system_prompt = task, seed, shuffle, system_prompt
        self._num_prompts = len(task)
        self._first = tuple(first)
        self._first_draws = {prompt.prompt_id: draw for draw, prompt in enumerate(self._first)}
        self.num_drawn = 0
        """Draws so far, repeated ones not counted."""
        self._handed_back: dict[int, int] = {}  # draw -> num_handed_back
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def next_nowait(self) -> Prompt:
        """The next prompt. Raises TaskError if the task cannot make it."""
        draw = min(self._handed_back, default=self.num_drawn)
        self.num_drawn = max(self.num_drawn, draw + 1)
        return self._make(draw, self._handed_back.pop(draw, 0))

    def make_again(self, prompt_id: str, num_handed_back: int) -> Prompt:
        """A prompt that was drawn before. Raises TaskError if the task cannot make it."""
        return self._make(self._draw_of(prompt_id), num_handed_back)

    def _make(self, draw: int, num_handed_back: int) -> Prompt:
        prompt = self._first[draw] if draw < len(self._first) else self._make_prompt(*self._place(draw))
        return replace(prompt, num_handed_back=num_handed_back)

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """Put a drawn prompt at the front again. Raises ValueError if it was not drawn, or was handed back
        already.
        """
        draw = self._draw_of(prompt.prompt_id)
        if draw >= self.num_drawn or draw in self._handed_back:
            raise ValueError(f"prompt {prompt.prompt_id} is not in use, so it cannot be handed back")
        self._handed_back[draw] = prompt.num_handed_back

    def _draw_of(self, prompt_id: str) -> int:
        if (draw := self._first_draws.get(prompt_id)) is not None:
            return draw
        epoch, index = (int(part) for part in prompt_id.split("/"))
        return len(self._first) + epoch * self._num_prompts + int(self._epoch(epoch)[1][index])

    @property
    def order(self) -> dict[str, Any]:
        """All that determines the order of prompts, for JSON. A saved position is valid only with the same
        values.
        """
        order = {"num_prompts": self._num_prompts, "seed": self._seed, "shuffle": self._shuffle}
        return {**order, "num_first": len(self._first)}

    def check_order(self, saved: Mapping[str, Any]) -> None:
        """Raise TaskError if a saved order is another one."""
        for key, value in self.order.items():
            if saved.get(key) != value:
                raise _another(f"the saved position has {key}={saved.get(key)}, this run has {value}")

    def restore_nowait(self, num_drawn: int, handed_back: Mapping[str, int]) -> None:
        """Go on after `num_drawn` draws; `handed_back`: id -> num_handed_back. Every other drawn prompt is
        out or consumed.

        Raises TaskError if the task cannot have given these prompts.
        """
        self.num_drawn = num_drawn
        try:
            for prompt_id, num_handed_back in handed_back.items():
                self.hand_back_nowait(Prompt(prompt_id, (), num_handed_back=num_handed_back))
        except (ValueError, IndexError) as error:
            what = f"prompt {prompt_id} is not among the first {num_drawn} draws of {self._name}"
            raise _another(what) from error

    def prompts_back(self) -> dict[str, int]:
        """Ids of the prompts that come again before any new one, in that order -> their num_handed_back."""
        return {self._prompt_id(draw): count for draw, count in sorted(self._handed_back.items())}

    def state(self) -> dict[str, Any]:
        """The cursor, fit for JSON. Prompts that are out (drawn, neither consumed nor handed back) are the
        caller's to remember.
        """
        return {**self.order, "num_drawn": self.num_drawn, "handed_back": self.prompts_back()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises TaskError if it belongs to another task, seed or order."""
        self.check_order(state)
        self.restore_nowait(state["num_drawn"], state["handed_back"])

    def _place(self, draw: int) -> tuple[int, int]:
        """(epoch, index) of a draw of the task."""
        epoch, place = divmod(draw - len(self._first), self._num_prompts)
        return epoch, int(self._epoch(epoch)[0][place])

    def _prompt_id(self, draw: int) -> str:
        return self._first[draw].prompt_id if draw < len(self._first) else "{}/{}".format(*self._place(draw))

    def _make_epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(index at each place, place of each index), int64 [num_prompts] both."""
        order = np.arange(self._num_prompts)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        return order, np.argsort(order)

    def _make_prompt(self, epoch: int, index: int) -> Prompt:
        place = f"prompt {index} of {self._name}"
        try:
            with user_code():
                found = self._task.prompt(index)
            item = found if isinstance(found, Item) else Item(found)
            messages = as_messages(item.content, place)
        except (UserCodeFailed, ConfigError) as error:
            what = error.what if isinstance(error, ConfigError) else f"{place}: making it {error}"
            raise TaskError("tasks", what, way_out="correct the task's prompt().") from error
        if self._system_prompt is not None:
            if messages[0]["role"] == "system":
                what = f"{place} begins with a system message of its own, and a chat has one"
                raise TaskError("tasks", what, way_out="remove task.system_prompt, or the message.")
            messages = ({"role": "system", "content": self._system_prompt}, *messages)
        return Prompt(f"{epoch}/{index}", messages, item.answer, item.info)


def _another(what: str) -> TaskError:
    rule = "a run goes on with the same task, seed and order"
    way_out = "resume with the data and config of the killed run, or start a new one."
    return TaskError("tasks", what, rule=rule, way_out=way_out)
