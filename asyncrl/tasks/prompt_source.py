"""Draw order of prompts: requeued prompts first, then seeded epochs of one task or
several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt, task_of
from asyncrl.tasks.rewards import UserCodeFailed, user_code
from asyncrl.tasks.task import Item, PromptTask, as_messages

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

FLOOR = 0.1
"""Minimum probability of a prompt in an epoch."""
UNIT = 10**9
"""Unit of rewards: integer sums do not depend on order."""


class Epochs:
    """Order of one task's prompts.

    Each epoch has every prompt once. With `by_difficulty`, a prompt with mean reward p
    so far (clipped to 0..1) is in an epoch with probability max(FLOOR, 4p(1 - p)); an
    unobserved prompt always is. p(1 - p), the variance of a binary reward, measures its
    gradient: "learnability" of https://arxiv.org/abs/2408.15099 (Sampling For
    Learnability), used for language models in https://arxiv.org/abs/2502.12272.

    An epoch whose first draw is at policy_version v uses groups that started before v;
    at max_staleness 0 timing has no influence.

    Example by difficulty: mean rewards 0.5, 0.9 and 1.0 give the probabilities 1, 0.36
    and 0.1 (FLOOR). So of three such prompts, about 1.5 are in an epoch: `texts` has
    them as bits, and `_ends` has 2 if two were chosen. Draw 2 then begins epoch 1.
    """

    def __init__(
        self, num_prompts: int, seed: int, *, shuffle: bool, by_difficulty: bool = False
    ) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self.by_difficulty = by_difficulty
        self.texts = list[str]()
        """Prompts of each epoch sampled by difficulty."""
        self._order = lru_cache(maxsize=4)(self._make_order)
        self._sums = np.zeros(num_prompts, np.int64)
        self._counts = np.zeros(num_prompts, np.int32)
        self._later = dict[int, list[tuple[int, int]]]()
        """Later observations: start version -> (index, reward in UNITs)."""
        self._ends = list[int]()

    def reach_nowait(self, draw: int, version: int | None) -> tuple[int, str] | None:
        """Prepare for a draw: choose its epoch by difficulty, if it begins one, and
        return it for load_epoch. `version`: start of the draw's group (None: later than
        all).
        """
        if not self.by_difficulty:
            return None
        for earlier in [
            start for start in self._later if version is None or start < version
        ]:
            for index, reward in self._later.pop(earlier):
                self._sums[index] += reward
                self._counts[index] += 1
        # The draw is within an epoch that was chosen already. Later rewards count for
        # the next one: an epoch never changes once its prompts are journaled.
        if self._ends and draw < self._ends[-1]:
            return None
        epoch = len(self.texts)
        text = np.packbits(self._choose(epoch)).tobytes().hex()
        self.load_epoch(epoch, text)
        return epoch, text

    def observe_nowait(self, index: int, reward: float, version: int) -> None:
        if self.by_difficulty:
            fraction = min(max(reward, 0.0), 1.0)
            self._later.setdefault(version, []).append((index, round(fraction * UNIT)))

    def place(self, draw: int) -> tuple[int, int]:
        epoch = (
            bisect_right(self._ends, draw)
            if self.by_difficulty
            else draw // self.num_prompts
        )
        return epoch, int(self._order(epoch)[draw - self._start(epoch)])

    def load_epoch(self, epoch: int, text: str) -> None:
        assert epoch == len(self.texts), (
            f"epoch {epoch} cannot follow {len(self.texts)} epochs"
        )
        size = int(np.count_nonzero(self._has(text)))
        self.texts.append(text)
        self._ends.append(self._start(epoch) + size)

    def _choose(self, epoch: int) -> Bools:
        """Choose the epoch's prompts, bool [num_prompts]; at least one."""
        mean = self._sums / UNIT / np.maximum(self._counts, 1)
        probability = np.where(
            self._counts == 0, 1.0, np.maximum(FLOOR, 4 * mean * (1 - mean))
        )
        # The 1 separates these draws from those of the epoch's order.
        drawn = np.random.default_rng([self.seed, epoch, 1]).random(self.num_prompts)
        chosen: Bools = drawn < probability
        # An empty epoch could not supply the draw that begins it. The prompt that came
        # closest is in it in any case, and changes nothing if any was chosen.
        chosen[np.argmin(drawn / probability)] = True
        return chosen

    def _start(self, epoch: int) -> int:
        if not self.by_difficulty:
            return epoch * self.num_prompts
        return self._ends[epoch - 1] if epoch else 0

    def _has(self, text: str) -> Bools:
        bits = np.frombuffer(bytes.fromhex(text), np.uint8)
        return np.unpackbits(bits, count=self.num_prompts).astype(np.bool_)

    def _make_order(self, epoch: int) -> Indices:
        """Return the epoch's indices in order, int64."""
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        if self.by_difficulty:
            order = order[self._has(self.texts[epoch])[order]]
        return order


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
        self._task = task
        self._system_prompt = system_prompt
        self.label = label
        self._prefix = f"{label}/" if label else ""
        self.epochs = Epochs(
            len(task), seed, shuffle=shuffle, by_difficulty=by_difficulty
        )

    def make(self, epoch: int, index: int) -> Prompt:
        place = f"prompt {index} of {type(self._task).__name__}"
        try:
            with user_code():
                content = self._task.prompt(index)
        except UserCodeFailed as failure:
            raise ConfigError(
                f"{place}: making it {failure}", way_out="correct the task's prompt()."
            ) from failure
        item = content if isinstance(content, Item) else Item(content)
        messages = as_messages(item.content, place)
        if self._system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ConfigError(
                    f"{place} already begins with a system message",
                    way_out="remove task.system_prompt, or the message.",
                )
            messages = ({"role": "system", "content": self._system_prompt}, *messages)
        return Prompt(
            f"{self._prefix}{epoch}/{index}", messages, item.answer, item.info
        )


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
        """`on_epoch` is called before the first prompt of an epoch sampled by
        difficulty.
        """
        self._tasks = {task.label: task for task in tasks}
        self._shares = dict(shares or dict.fromkeys(self._tasks, 1))
        self._rota = make_rota(self._shares)
        self._on_epoch = on_epoch
        self.num_drawn = 0
        self.requeued: dict[str, int] = {}
        """num_requeued by prompt id."""

    def next_nowait(self, version: int | None = None) -> Prompt:
        # The smallest place first, not the prompt that returned first: which group
        # ended first depends on timing, and the order of prompts must not.
        if self.requeued:
            prompt_id = min(self.requeued, key=_place_of)
            return self.make_again(prompt_id, self.requeued.pop(prompt_id))
        cycle, place = divmod(self.num_drawn, len(self._rota))
        name, number = self._rota[place]
        number += cycle * self._shares[name]
        task = self._tasks[name]
        # Recorded before its first prompt is drawn. A resume cannot repeat the choice,
        # which depended on the groups that had ended at this moment.
        if (epoch := task.epochs.reach_nowait(number, version)) is not None:
            self._on_epoch(name, *epoch)
        self.num_drawn += 1
        return task.make(*task.epochs.place(number))

    def observe_nowait(self, prompt_id: str, reward: float, version: int) -> None:
        _, index, name = _place_of(prompt_id)
        self._tasks[name].epochs.observe_nowait(index, reward, version)

    def requeue_nowait(self, prompt: Prompt) -> None:
        assert prompt.prompt_id not in self.requeued, (
            f"prompt {prompt.prompt_id} is not in use"
        )
        self.requeued[prompt.prompt_id] = prompt.num_requeued

    def make_again(self, prompt_id: str, num_requeued: int) -> Prompt:
        epoch, index, name = _place_of(prompt_id)
        return replace(self._tasks[name].make(epoch, index), num_requeued=num_requeued)

    # ---- saving and restoring

    @property
    def order(self) -> dict[str, list[int]]:
        """Return share, number of prompts, seed, shuffle and by_difficulty of each
        task.
        """
        return {
            name: [
                self._shares[name],
                task.epochs.num_prompts,
                task.epochs.seed,
                task.epochs.shuffle,
                task.epochs.by_difficulty,
            ]
            for name, task in self._tasks.items()
        }

    def check_order(self, saved: Mapping[str, object]) -> None:
        if saved != self.order:
            raise TaskError(
                "tasks",
                f"the saved order of the prompts is {saved}, this run has {self.order}",
                rule="a resumed run continues with the same task, seed and order",
                way_out="resume with the same data and config, or start a new run.",
            )

    def restore_nowait(
        self,
        num_drawn: int,
        requeued: Mapping[str, int],
        epochs: Sequence[tuple[str, int, str]],
        observed: Sequence[tuple[str, float, int]],
    ) -> None:
        """Continue after `num_drawn` draws, `requeued` prompts first. `epochs`: those
        sampled by difficulty; `observed`: rewards of finished groups.
        """
        self.num_drawn = num_drawn
        self.requeued.update(requeued)
        for name, epoch, text in epochs:
            self._tasks[name].epochs.load_epoch(epoch, text)
        for group in observed:
            self.observe_nowait(*group)

    def epochs(self) -> list[tuple[str, int, str]]:
        """Return (task, number, prompts) of each epoch sampled by difficulty."""
        tasks = self._tasks.items()
        return [
            (name, *epoch)
            for name, task in tasks
            for epoch in enumerate(task.epochs.texts)
        ]


def _place_of(prompt_id: str) -> tuple[int, int, str]:
    """Return (epoch, index, task) of a prompt."""
    *_, epoch, index = prompt_id.split("/")
    return int(epoch), int(index), task_of(prompt_id)


def make_rota(shares: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (task, number of its draw) for a cycle of tasks, each as often as its
    share.

    Draw k of a task with share s lies between k / s and (k + 1) / s of the cycle; the
    earliest end is next. So each task stays within one draw of its share (Pfair,
    https://doi.org/10.1007/BF01940883).

    Example: shares a: 2 and b: 3 make a cycle of 5 places.

        place   begun, with its end     next
        0       a0 (2.5), b0 (1.7)      b0
        1       a0 (2.5), b1 (3.3)      a0
        2       a1 (5), b1 (3.3)        b1
        3       a1 (5), b2 (5)          a1, by name
        4       b2 (5)                  b2
    """
    size, rota = sum(shares.values()), list[tuple[str, int]]()
    drawn = dict.fromkeys(shares, 0)
    for place in range(size):
        begun = [
            name
            for name, share in shares.items()
            if drawn[name] * size < (place + 1) * share
        ]
        name = min(
            begun, key=lambda name: (-(-(drawn[name] + 1) * size // shares[name]), name)
        )
        rota.append((name, drawn[name]))
        drawn[name] += 1
    return rota
