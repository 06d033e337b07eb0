"""Draw order of prompts: requeued prompts first, then seeded epochs of one task or several."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt, task_of
from asyncrl.tasks.task import Item, PromptTask, UserCodeFailed, as_messages, user_code

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

FLOOR = 0.1
"""Minimum probability of a prompt in an epoch."""
UNIT = 10**9
"""Unit of rewards: integer sums do not depend on order."""


class Epochs:
    """Order of one task's prompts.

    Each epoch has every prompt once. With `by_difficulty`, a prompt with mean reward p so far (clipped to
    0..1) is in an epoch with probability max(FLOOR, 4p(1 - p)); an unobserved prompt always is. p(1 - p), the
    variance of a binary reward, measures its gradient: "learnability" of https://arxiv.org/abs/2408.15099
    (Sampling For Learnability), used for language models in https://arxiv.org/abs/2502.12272.

    An epoch whose first draw is at policy_version v uses groups that started before v; at max_staleness 0
    timing has no influence.
    """

    def __init__(self, num_prompts: int, seed: int, *, shuffle: bool, by_difficulty: bool = False) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self.by_difficulty = by_difficulty
        self.texts = list[str]()
        """Prompts of each epoch sampled by difficulty."""
        self._places = lru_cache(maxsize=4)(self._make_places)
        self._sums = np.zeros(num_prompts, np.int64)
        self._counts = np.zeros(num_prompts, np.int32)
        self._later = dict[int, list[tuple[int, int]]]()
        """Later observations: start version -> (index, reward in UNITs)."""
        self._ends = list[int]()

    def reach_nowait(self, draw: int, version: int | None) -> tuple[int, str] | None:
        """`version`: start of the draw's group (None: later than all). Return the epoch for load_epoch if one
        sampled by difficulty begins.
        """
        if not self.by_difficulty:
            return None
        for earlier in [start for start in self._later if version is None or start < version]:
            for index, reward in self._later.pop(earlier):
                self._sums[index] += reward
                self._counts[index] += 1
        if self._ends and draw < self._ends[-1]:
            return None
        epoch = len(self.texts)
        packed = np.packbits(self._choose(epoch)).tobytes()
        text = base64.b64encode(zlib.compress(packed, 1)).decode("ascii")
        self.load_epoch(epoch, text)
        return epoch, text

    def observe_nowait(self, index: int, reward: float, version: int) -> None:
        if self.by_difficulty:
            fraction = min(max(reward, 0.0), 1.0)
            self._later.setdefault(version, []).append((index, round(fraction * UNIT)))

    def place(self, draw: int) -> tuple[int, int]:
        epoch = bisect_right(self._ends, draw) if self.by_difficulty else draw // self.num_prompts
        return epoch, int(self._places(epoch)[0][draw - self._start(epoch)])

    def draw_of(self, epoch: int, index: int) -> int:
        """Raises IndexError."""
        place = int(self._places(epoch)[1][index])
        if place < 0:
            raise IndexError(f"epoch {epoch} has no prompt {index}")
        return self._start(epoch) + place

    def load_epoch(self, epoch: int, text: str) -> None:
        """Raises ValueError or zlib.error if it does not fit."""
        size = int(np.count_nonzero(self._has(text)))
        if epoch != len(self.texts) or not size:
            raise ValueError(f"epoch {epoch} cannot follow {len(self.texts)} epochs")
        self.texts.append(text)
        self._ends.append(self._start(epoch) + size)

    def _choose(self, epoch: int) -> Bools:
        """Choose the epoch's prompts, bool [num_prompts]; at least one."""
        mean = self._sums / UNIT / np.maximum(self._counts, 1)
        probability = np.where(self._counts == 0, 1.0, np.maximum(FLOOR, 4 * mean * (1 - mean)))
        drawn = np.random.default_rng([self.seed, epoch, 1]).random(self.num_prompts)
        chosen: Bools = drawn < probability
        chosen[np.argmin(drawn / probability)] = True
        return chosen

    def _start(self, epoch: int) -> int:
        if not self.by_difficulty:
            return epoch * self.num_prompts
        return self._ends[epoch - 1] if epoch else 0

    def _has(self, text: str) -> Bools:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
        if len(bits) != -(-self.num_prompts // 8):
            raise ValueError(f"the epoch's number of prompts is not {self.num_prompts}")
        return np.unpackbits(bits, count=self.num_prompts).astype(np.bool_)

    def _make_places(self, epoch: int) -> tuple[Indices, Indices]:
        """Return (index at each place, place of each index or -1), int64."""
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        if self.by_difficulty:
            order = order[self._has(self.texts[epoch])[order]]
        places = np.full(self.num_prompts, -1, np.int64)
        places[order] = np.arange(len(order))
        return order, places


class TaskPrompts:
    """Ids are [LABEL/]EPOCH/INDEX."""

    def __init__(
        self,
        task: PromptTask,
        *,
        seed: int,
        shuffle: bool,
        system_prompt: str | None = None,
        label: str = "",
        by_difficulty: bool = False,
    ) -> None:
        self._name = type(task).__name__
        if len(task) == 0:
            what = f"the task {self._name} has no prompts"
            raise ConfigError(what, way_out="give it data, or task.size >= 1.")
        self._task = task
        self._system_prompt = system_prompt
        self.label = label
        self._prefix = f"{label}/" if label else ""
        self.epochs = Epochs(len(task), seed, shuffle=shuffle, by_difficulty=by_difficulty)

    def prompt_id(self, draw: int) -> str:
        return self._prefix + "{}/{}".format(*self.epochs.place(draw))

    def place_of(self, prompt_id: str) -> tuple[int, int]:
        epoch, index = prompt_id.removeprefix(self._prefix).split("/")
        return int(epoch), int(index)

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
        """Raises LookupError or ValueError if the prompt is not in use."""
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
        task = self._tasks[name]
        return self._rota.draw_of(name, task.epochs.draw_of(*task.place_of(prompt_id)))

    # ---- saving and restoring

    @property
    def order(self) -> dict[str, Any]:
        order: dict[str, Any] = {"shares": self._rota.shares}
        for name, task in self._tasks.items():
            for key in ("num_prompts", "seed", "shuffle", "by_difficulty"):
                order[f"{name or 'task'}.{key}"] = getattr(task.epochs, key)
        return order

    def check_order(self, saved: Mapping[str, Any]) -> None:
        for key in self.order | dict(saved):
            earlier, current = saved.get(key), self.order.get(key)
            if earlier != current:
                raise _other_task(f"the saved position has {key}={earlier}, this run has {current}")

    def restore_nowait(self, num_drawn: int, requeued: Mapping[str, int]) -> None:
        """Continue after `num_drawn` draws; `requeued`: id -> num_requeued. Raises TaskError."""
        self.num_drawn = num_drawn
        try:
            for prompt_id, num_requeued in requeued.items():
                self.requeue_nowait(Prompt(prompt_id, (), num_requeued=num_requeued))
        except (ValueError, LookupError) as error:
            raise _other_task(f"prompt {prompt_id} is not among the first {num_drawn} draws") from error

    def remember_nowait(
        self, epochs: Sequence[tuple[str, int, str]], observed: Sequence[tuple[str, float, int]]
    ) -> None:
        """Restore the epochs sampled by difficulty and finished groups, before restore_nowait. Raises
        TaskError.
        """
        try:
            for name, epoch, text in epochs:
                self._tasks[name].epochs.load_epoch(epoch, text)
            for group in observed:
                self.observed_nowait(*group)
        except (ValueError, LookupError, zlib.error) as error:
            raise _other_task(f"the saved order of the prompts does not fit: {error}") from error

    def prompts_back(self) -> dict[str, int]:
        counts = dict[str, int]()
        for draw, count in sorted(self._requeued.items()):
            name, number = self._rota.turn(draw)
            counts[self._tasks[name].prompt_id(number)] = count
        return counts

    def epochs(self) -> list[tuple[str, int, str]]:
        """Return (task, number, prompts) of each epoch sampled by difficulty."""
        tasks = self._tasks.items()
        return [(name, *epoch) for name, task in tasks for epoch in enumerate(task.epochs.texts)]

    def state(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "num_drawn": self.num_drawn,
            "requeued": self.prompts_back(),
            "epochs": self.epochs(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore state(), without the rewards observed for `by_difficulty`."""
        self.check_order(state["order"])
        self.remember_nowait(state["epochs"], ())
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
            deadlines = dict[str, Fraction]()
            for name, share in shares.items():
                lacks = twice * (share * turn - len(self._places[name]) * self._length)
                if lacks >= self._length or len(shares) == 1:
                    deadlines[name] = Fraction((twice - 1) * self._length - lacks, share)
            name = min(deadlines, key=deadlines.__getitem__)
            self._turns.append((name, len(self._places[name])))
            self._places[name].append(turn - 1)

    def turn(self, draw: int) -> tuple[str, int]:
        cycle, place = divmod(draw, self._length)
        name, num_earlier = self._turns[place]
        return name, cycle * self.shares[name] + num_earlier

    def draw_of(self, name: str, number: int) -> int:
        cycle, place = divmod(number, self.shares[name])
        return cycle * self._length + self._places[name][place]
