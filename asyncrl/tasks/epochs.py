"""Draw order of a task's prompts."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

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

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        shuffle: bool,
        by_difficulty: bool = False,
    ) -> None:
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._by_difficulty = by_difficulty
        self._order = lru_cache(maxsize=4)(self._make_order)
        self._sums = np.zeros(num_prompts, np.int64)
        self._counts = np.zeros(num_prompts, np.int32)
        self._later = dict[int, list[tuple[int, int]]]()
        """Later observations: start version -> (index, reward in UNITs)."""
        self._epochs = list[str]()
        self._ends = list[int]()

    @property
    def order(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "by_difficulty": self._by_difficulty,
        }

    def reach_nowait(self, draw: int, version: int | None) -> tuple[int, str] | None:
        """`version`: start of the draw's group (None: later than all). Return the epoch for load_epoch if one
        sampled by difficulty begins.
        """
        if not self._by_difficulty:
            return None
        for earlier in [start for start in self._later if version is None or start < version]:
            for index, reward in self._later.pop(earlier):
                self._sums[index] += reward
                self._counts[index] += 1
        if self._ends and draw < self._ends[-1]:
            return None
        epoch = len(self._epochs)
        text = _as_text(np.packbits(self._choose(epoch)))
        self.load_epoch(epoch, text)
        return epoch, text

    def observe_nowait(self, index: int, reward: float, version: int) -> None:
        if self._by_difficulty:
            fraction = min(max(reward, 0.0), 1.0)
            self._later.setdefault(version, []).append((index, round(fraction * UNIT)))

    def place(self, draw: int) -> tuple[int, int]:
        epoch = bisect_right(self._ends, draw) if self._by_difficulty else draw // self.num_prompts
        return epoch, int(self._order(epoch)[0][draw - self._start(epoch)])

    def draw_of(self, epoch: int, index: int) -> int:
        if self._by_difficulty and not 0 <= epoch < len(self._epochs):
            raise IndexError(f"epoch {epoch} has not begun")
        if (place := int(self._order(epoch)[1][index])) < 0:
            raise IndexError(f"epoch {epoch} has no prompt {index}")
        return self._start(epoch) + place

    def load_epoch(self, epoch: int, text: str) -> None:
        """Raises ValueError if it does not fit."""
        size = int(np.count_nonzero(self._has(text)))
        if epoch != len(self._epochs) or not size:
            raise ValueError(f"epoch {epoch} cannot follow {len(self._epochs)} epochs")
        self._epochs.append(text)
        self._ends.append(self._start(epoch) + size)

    def memory(self) -> dict[str, Any]:
        if not self._by_difficulty:
            return {}
        return {
            "epochs": list(self._epochs),
            "sums": _as_text(self._sums),
            "counts": _as_text(self._counts),
            "later": [(version, *entry) for version, entries in self._later.items() for entry in entries],
        }

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        """Raises KeyError or ValueError."""
        self._sums = np.frombuffer(_from_text(memory["sums"]), np.int64).copy()
        self._counts = np.frombuffer(_from_text(memory["counts"]), np.int32).copy()
        if len(self._sums) != self.num_prompts:
            raise ValueError(f"{len(self._sums)} prompts were observed, and there are {self.num_prompts}")
        for version, index, reward in memory["later"]:
            self._later.setdefault(version, []).append((index, reward))
        for epoch, text in enumerate(memory["epochs"]):
            self.load_epoch(epoch, text)

    def _choose(self, epoch: int) -> Bools:
        """Choose the epoch's prompts, bool [num_prompts]; at least one."""
        mean = self._sums / UNIT / np.maximum(self._counts, 1)
        probability = np.where(self._counts == 0, 1.0, np.maximum(FLOOR, 4 * mean * (1 - mean)))
        drawn = np.random.default_rng([self._seed, epoch, 1]).random(self.num_prompts)
        chosen: Bools = drawn < probability
        chosen[np.argmin(drawn / probability)] = True
        return chosen

    def _start(self, epoch: int) -> int:
        if not self._by_difficulty:
            return epoch * self.num_prompts
        return self._ends[epoch - 1] if epoch else 0

    def _has(self, text: str) -> Bools:
        bits = np.frombuffer(_from_text(text), np.uint8)
        if len(bits) != -(-self.num_prompts // 8):
            raise ValueError(f"the epoch's number of prompts is not {self.num_prompts}")
        return np.unpackbits(bits, count=self.num_prompts).astype(np.bool_)

    def _make_order(self, epoch: int) -> tuple[Indices, Indices]:
        """Return (index at each place, place of each index or -1), int64."""
        order = np.arange(self.num_prompts)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        if self._by_difficulty:
            order = order[self._has(self._epochs[epoch])[order]]
        places = np.full(self.num_prompts, -1, np.int64)
        places[order] = np.arange(len(order))
        return order, places


def _as_text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 1)).decode("ascii")


def _from_text(text: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"the saved epoch cannot be read: {error}") from error
