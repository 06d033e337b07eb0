"""Requeued prompts first, then seeded epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt, task_of
from asyncrl.tasks.epochs import Epochs
from asyncrl.tasks.task import Item, PromptTask, UserCodeFailed, as_messages, user_code


class TaskPrompts:
    """Ids are [LABEL/]EPOCH/INDEX."""

    def __init__(
        self,
        task: PromptTask,
        *,
        seed: int,
        shuffle: bool,
        system_prompt: str | None = None,
        name: str | None = None,
        label: str = "",
        by_difficulty: bool = False,
    ) -> None:
        self._name = name or repr(task)
        if len(task) == 0:
            what = f"the task {self._name} has no prompts"
            raise ConfigError(what, way_out="give it data, or task.size >= 1.")
        self._task = task
        self._system_prompt = system_prompt
        self.label = label
        self._prefix = f"{label}/" if label else ""
        self.epochs = Epochs(len(task), seed=seed, shuffle=shuffle, by_difficulty=by_difficulty)

    def prompt_id(self, draw: int) -> str:
        return self._prefix + "{}/{}".format(*self.epochs.place(draw))

    def place_of(self, prompt_id: str) -> tuple[int, int]:
        epoch, index = (int(part) for part in prompt_id.removeprefix(self._prefix).split("/"))
        return epoch, index

    def make(self, draw: int) -> Prompt:
        _, index = self.epochs.place(draw)
        place = f"prompt {index} of {self._name}"
        try:
            with user_code():
                content = self._task.prompt(index)
            item = content if isinstance(content, Item) else Item(content)
            messages = as_messages(item.content, place)
        except (UserCodeFailed, ConfigError) as error:
            what = error.what if isinstance(error, ConfigError) else f"{place}: making it {error}"
            raise TaskError("tasks", what, way_out="correct the task's prompt().") from error
        if self._system_prompt is not None:
            if messages[0]["role"] == "system":
                what = f"{place} already begins with a system message"
                raise TaskError("tasks", what, way_out="remove task.system_prompt, or the message.")
            messages = ({"role": "system", "content": self._system_prompt}, *messages)
        return Prompt(self.prompt_id(draw), messages, item.answer, item.info)


class PromptSource:
    """Prompts from one task or several.

    A drawn prompt is consumed (no call) or requeued, to be drawn again first.

    Invariant: a source that loads state() continues with the same prompts.
    """

    def __init__(
        self,
        *tasks: TaskPrompts,
        shares: Mapping[str, int] | None = None,
        on_epoch: Callable[[str, int, str], None] = lambda name, epoch, text: None,
    ) -> None:
        """`on_epoch` is called before the first prompt of an epoch sampled by difficulty."""
        self._tasks = {task.label: task for task in tasks}
        self._rota = Rota(shares or dict.fromkeys(self._tasks, 1))
        self._on_epoch = on_epoch
        self.num_drawn = 0
        self._requeued: dict[int, int] = {}  # draw -> num_requeued

    def next_nowait(self, version: int | None = None) -> Prompt:
        draw = min(self._requeued, default=self.num_drawn)
        if draw == self.num_drawn:
            name, number = self._rota.turn(draw)
            if (epoch := self._tasks[name].epochs.reach_nowait(number, version)) is not None:
                self._on_epoch(name, *epoch)
            self.num_drawn += 1
        return self._make(draw, self._requeued.pop(draw, 0))

    def observed_nowait(self, prompt_id: str, reward: float, version: int) -> None:
        task = self._tasks[task_of(prompt_id)]
        task.epochs.observe_nowait(task.place_of(prompt_id)[1], reward, version)

    def requeue_nowait(self, prompt: Prompt) -> None:
        """Raises ValueError if the prompt is not in use."""
        draw = self._draw_of(prompt.prompt_id)
        if draw >= self.num_drawn or draw in self._requeued:
            raise ValueError(f"prompt {prompt.prompt_id} is not in use")
        self._requeued[draw] = prompt.num_requeued

    def make_again(self, prompt_id: str, num_requeued: int) -> Prompt:
        return self._make(self._draw_of(prompt_id), num_requeued)

    def _make(self, draw: int, num_requeued: int) -> Prompt:
        name, number = self._rota.turn(draw)
        return replace(self._tasks[name].make(number), num_requeued=num_requeued)

    def _draw_of(self, prompt_id: str) -> int:
        name = task_of(prompt_id)
        if name not in self._tasks:
            raise ValueError(f"prompt {prompt_id} does not belong to a task of this run")
        task = self._tasks[name]
        return self._rota.draw_of(name, task.epochs.draw_of(*task.place_of(prompt_id)))

    # ---- saving and restoring

    @property
    def order(self) -> dict[str, Any]:
        order: dict[str, Any] = {"shares": self._rota.shares}
        for name, task in self._tasks.items():
            order |= {f"{name or 'task'}.{key}": value for key, value in task.epochs.order.items()}
        return order

    def check_order(self, saved: Mapping[str, Any]) -> None:
        now = self.order
        for key in now | dict(saved):
            if (before := saved.get(key)) != now.get(key):
                raise _other_task(f"the saved position has {key}={before}, this run has {now.get(key)}")

    def restore_nowait(self, num_drawn: int, requeued: Mapping[str, int]) -> None:
        """Continue after `num_drawn` draws; `requeued`: id -> num_requeued. Raises TaskError."""
        self.num_drawn = num_drawn
        try:
            for prompt_id, num_requeued in requeued.items():
                self.requeue_nowait(Prompt(prompt_id, (), num_requeued=num_requeued))
        except (ValueError, IndexError) as error:
            raise _other_task(f"prompt {prompt_id} is not among the first {num_drawn} draws") from error

    def remember_nowait(
        self,
        memory: Mapping[str, Any],
        epochs: Sequence[tuple[str, int, str]],
        observed: Sequence[tuple[str, float, int]],
    ) -> None:
        """Restore memory(), later epochs and finished groups, before restore_nowait. Raises TaskError."""
        try:
            for name, saved in memory.items():
                self._tasks[name].epochs.load_memory(saved)
            for name, epoch, text in epochs:
                self._tasks[name].epochs.load_epoch(epoch, text)
            for group in observed:
                self.observed_nowait(*group)
        except (KeyError, ValueError, IndexError) as error:
            raise _other_task(f"the saved order of the prompts does not fit: {error}") from error

    def prompts_back(self) -> dict[str, int]:
        counts = dict[str, int]()
        for draw, count in sorted(self._requeued.items()):
            name, number = self._rota.turn(draw)
            counts[self._tasks[name].prompt_id(number)] = count
        return counts

    def memory(self) -> dict[str, Any]:
        memories = {name: task.epochs.memory() for name, task in self._tasks.items()}
        return {name: memory for name, memory in memories.items() if memory}

    def state(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "num_drawn": self.num_drawn,
            "requeued": self.prompts_back(),
            "memory": self.memory(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.check_order(state["order"])
        self.remember_nowait(state["memory"], (), ())
        self.restore_nowait(state["num_drawn"], state["requeued"])


def _other_task(what: str) -> TaskError:
    rule = "a resumed run continues with the same task, seed and order"
    way_out = "resume with the same data and config, or start a new run."
    return TaskError("tasks", what, rule=rule, way_out=way_out)


class Rota:
    """Cycle of tasks, each as often as its integer share.

    Invariant: after any number of draws a task deviates by less than one draw from its share, and in any
    window by less than two: Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
    1980): of the tasks that have waited long enough, take the earliest deadline.
    """

    def __init__(self, shares: Mapping[str, int]) -> None:
        self.shares = dict(shares)
        self._length = sum(shares.values())
        self._turns = list[tuple[str, int]]()
        self._places: dict[str, list[int]] = {name: [] for name in shares}
        twice = max(2, 2 * len(shares) - 2)
        for turn in range(1, self._length + 1):
            deadlines = list[tuple[Fraction, str]]()
            for name, share in shares.items():
                lacks = twice * (share * turn - len(self._places[name]) * self._length)
                if lacks >= self._length or len(shares) == 1:
                    deadlines.append((Fraction((twice - 1) * self._length - lacks, share), name))
            _, name = min(deadlines, key=lambda entry: entry[0])
            self._turns.append((name, len(self._places[name])))
            self._places[name].append(turn - 1)

    def turn(self, draw: int) -> tuple[str, int]:
        cycle, place = divmod(draw, self._length)
        name, before = self._turns[place]
        return name, cycle * self.shares[name] + before

    def draw_of(self, name: str, number: int) -> int:
        cycle, place = divmod(number, self.shares[name])
        return cycle * self._length + self._places[name][place]
