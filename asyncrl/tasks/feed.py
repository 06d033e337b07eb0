"""Prompt order: repeated prompts first, then seeded shuffles per epoch; several tasks by their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt, task_of
from asyncrl.tasks.epochs import ByDifficulty, Epochs
from asyncrl.tasks.task import Item, PromptTask, UserCodeFailed, as_messages, user_code

_POSITION = ("num_drawn", "handed_back", "memory")


class Feed:
    """Prompt source of the producers.

    A drawn prompt is consumed (no call, except observed_nowait) or returned, to be drawn again before any new
    prompt, with its num_handed_back.

    Invariant: state() and the config are complete; a feed that loads a state continues with the same prompts.
    """

    def __init__(
        self,
        task: PromptTask,
        *,
        seed: int,
        shuffle: bool,
        system_prompt: str | None = None,
        name: str | None = None,
        label: str = "",
        epochs: Epochs | None = None,
    ) -> None:
        """`name`: task name in errors. `label`: prefix of prompt ids with several tasks. `epochs`: by default
        all prompts, shuffled by `seed`.
        """
        self._begin(name or repr(task))
        if len(task) == 0:
            what = f"the task {self._name} has no prompts"
            raise ConfigError(what, way_out="give it data, or task.size >= 1.")
        self._task, self._seed, self._shuffle, self._system_prompt = task, seed, shuffle, system_prompt
        self._label, self._prefix = label, f"{label}/" if label else ""
        self._epochs = epochs or Epochs(len(task), seed=seed, shuffle=shuffle)

    def _begin(self, name: str) -> None:
        self._name = name
        self.num_drawn = 0
        """Draws so far, without repeats."""
        self._handed_back: dict[int, int] = {}  # draw -> num_handed_back

    def next_nowait(self, version: int | None = None) -> Prompt:
        """Return the next prompt, for a group that starts at policy_version `version`. Raises TaskError."""
        draw = min(self._handed_back, default=self.num_drawn)
        if draw == self.num_drawn:
            self._reach(draw, version)
            self.num_drawn += 1
        return self._make(draw, self._handed_back.pop(draw, 0))

    def observed_nowait(self, prompt_id: str, reward: float, version: int) -> None:
        """Record the mean reward of the prompt's finished group, which started at policy_version
        `version`.
        """
        self._epochs.observe_nowait(self._index_of(prompt_id)[1], reward, version)

    def make_again(self, prompt_id: str, num_handed_back: int) -> Prompt:
        """Return a drawn prompt again. Raises TaskError."""
        return self._make(self._draw_of(prompt_id), num_handed_back)

    def _make(self, draw: int, num_handed_back: int) -> Prompt:
        return replace(self._make_prompt(*self._place(draw)), num_handed_back=num_handed_back)

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """Put a drawn prompt at the front again. Raises ValueError if it is not in use."""
        draw = self._draw_of(prompt.prompt_id)
        if draw >= self.num_drawn or draw in self._handed_back:
            raise ValueError(f"prompt {prompt.prompt_id} is not in use, so it cannot be handed back")
        self._handed_back[draw] = prompt.num_handed_back

    def _draw_of(self, prompt_id: str) -> int:
        return self._epochs.draw_of(*self._index_of(prompt_id))

    def _index_of(self, prompt_id: str) -> tuple[int, int]:
        """Return (epoch, index). Raises ValueError."""
        epoch, index = (int(part) for part in prompt_id.removeprefix(self._prefix).split("/"))
        return epoch, index

    @property
    def order(self) -> dict[str, Any]:
        """Settings that determine the prompt order, for JSON. A saved position requires equal values."""
        order = {"num_prompts": len(self._task), "seed": self._seed, "shuffle": self._shuffle}
        return order | self._epochs.order

    def check_order(self, saved: Mapping[str, Any]) -> None:
        """Raise TaskError if a saved order differs."""
        now = self.order
        for key in [*now, *(key for key in saved if key not in (*now, *_POSITION))]:
            if (before := saved.get(key)) != now.get(key):
                raise _another(f"the saved position has {key}={before}, this run has {now.get(key)}")

    def restore_nowait(self, num_drawn: int, handed_back: Mapping[str, int]) -> None:
        """Continue after `num_drawn` draws; `handed_back`: id -> num_handed_back. Other drawn prompts are in
        use or consumed.

        Raises TaskError if the task cannot have given these prompts.
        """
        self.num_drawn = num_drawn
        try:
            for prompt_id, num_handed_back in handed_back.items():
                self.hand_back_nowait(Prompt(prompt_id, (), num_handed_back=num_handed_back))
        except (ValueError, IndexError) as error:
            what = f"prompt {prompt_id} is not among the first {num_drawn} draws of {self._name}"
            raise _another(what) from error

    def remember_nowait(
        self,
        memory: Mapping[str, Any],
        epochs: Sequence[tuple[str, int, str]],
        observed: Sequence[tuple[str, float, int]],
    ) -> None:
        """Restore memory(), later epochs, and later finished groups (as for observed_nowait), before
        restore_nowait. Raises TaskError if they do not fit.
        """
        try:
            self.load_memory(memory)
            for name, epoch, text in epochs:
                self.load_epoch(name, epoch, text)
            for group in observed:
                self.observed_nowait(*group)
        except (KeyError, ValueError, IndexError) as error:
            raise _another(f"what was saved of the order of the prompts does not fit: {error}") from error

    def prompts_back(self) -> dict[str, int]:
        """Return id -> num_handed_back of repeated prompts, in order."""
        return {self._prompt_id(draw): count for draw, count in sorted(self._handed_back.items())}

    def state(self) -> dict[str, Any]:
        """Return the cursor for JSON. The caller must remember prompts in use."""
        position = {"num_drawn": self.num_drawn, "handed_back": self.prompts_back()}
        return self.order | position | {"memory": self.memory()}

    def memory(self) -> dict[str, Any]:
        """Return prompt statistics by task (sampling=by_difficulty), for JSON."""
        found = self._epochs.memory()
        return {self._label: found} if found else {}

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        """Restore memory(). Raises KeyError or ValueError if it does not fit."""
        for found in memory.values():
            self._epochs.load_memory(found)

    def load_epoch(self, name: str, epoch: int, text: str) -> None:
        """Restore an epoch. Raises ValueError."""
        if isinstance(self._epochs, ByDifficulty):
            self._epochs.load_epoch(epoch, text)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises TaskError for another task, seed or order."""
        self.check_order(state)
        self.load_memory(state.get("memory", {}))
        self.restore_nowait(state["num_drawn"], state["handed_back"])

    def _reach(self, draw: int, version: int | None) -> None:
        self._epochs.reach_nowait(draw, version)

    def _place(self, draw: int) -> tuple[int, int]:
        return self._epochs.place(draw)

    def _prompt_id(self, draw: int) -> str:
        return self._prefix + "{}/{}".format(*self._place(draw))

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
        return Prompt(f"{self._prefix}{epoch}/{index}", messages, item.answer, item.info)


def _another(what: str) -> TaskError:
    rule = "a run goes on with the same task, seed and order"
    way_out = "resume with the data and config of the killed run, or start a new one."
    return TaskError("tasks", what, rule=rule, way_out=way_out)


class Rota:
    """Cycle of tasks, each as often as its integer share.

    Invariant: after any number of draws a task deviates by less than one draw from its share, and in any
        window by less than two. This is Tijdeman's solution of the chairman assignment problem (Discrete
        Mathematics 32, 1980): of the tasks that have waited long enough, take the earliest deadline.
    """

    def __init__(self, shares: Mapping[str, int]) -> None:
        self.shares, self._length = dict(shares), sum(shares.values())
        self._turns = list[tuple[str, int]]()
        """(task, its earlier draws in the cycle)"""
        self._places: dict[str, list[int]] = {name: [] for name in shares}
        twice = max(2, 2 * len(shares) - 2)
        for turn in range(1, self._length + 1):
            deadlines = list[tuple[Fraction, str]]()
            for name, share in shares.items():
                lacks = twice * (share * turn - len(self._places[name]) * self._length)
                if lacks >= self._length or len(shares) == 1:
                    deadlines.append((Fraction((twice - 1) * self._length - lacks, share), name))
            _, name = min(deadlines, key=lambda entry: entry[0])  # ties go to the first task
            self._turns.append((name, len(self._places[name])))
            self._places[name].append(turn - 1)

    def turn(self, draw: int) -> tuple[str, int]:
        """Return (task, number of its previous draws)."""
        cycle, place = divmod(draw, self._length)
        name, before = self._turns[place]
        return name, cycle * self.shares[name] + before

    def draw_of(self, name: str, number: int) -> int:
        """Return the overall draw of the task's draw `number`."""
        cycle, place = divmod(number, self.shares[name])
        return cycle * self._length + self._places[name][place]


class MixedFeed(Feed):
    """Feed over several tasks, by name. Only it draws and takes back prompts; the others map their draws to
    prompts.
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
