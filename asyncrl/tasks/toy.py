"""Quickstart task: "b 7" asks for the letter b, seven times. Learnable with random
weights.

Lognormal counts give lengths the long tail that asynchronous training handles. A
quarter of all (letter, count) pairs is held out, the same in all runs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item

MAX_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Letters:
    """`size` prompts "LETTER COUNT"; letters are uniform, counts lognormal, clipped to
    1 .. max_count. `held_out`: draw held-out pairs.
    """

    size: int
    seed: int
    letters: str = "abcdef"
    median_count: float = 4.0
    sigma: float = 0.8
    max_count: int = 40
    held_out: bool = False

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Item:
        draw = random.Random(f"letters/{self.seed}/{index}")
        for _ in range(MAX_DRAWS):
            count = round(self.median_count * math.exp(draw.gauss(0.0, self.sigma)))
            pair = f"{draw.choice(self.letters)} {min(max(count, 1), self.max_count)}"
            if is_held_out(pair) == self.held_out:
                return Item(pair, answer=right_answer(pair))
        raise ValueError(
            f"letters={self.letters} and its counts leave no pair with held_out={self.held_out}"
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 0 .. 1: 0.4 for the share of right letters, 0.5 for a length near the
        count, 0.1 for an exact answer.

        Each part can be learned first.
        """
        letter, count_text = prompt.messages[-1]["content"].split(" ")
        count = int(count_text)
        if not completion:
            return 0.0
        right_share = completion.count(letter) / len(completion)
        closeness = min(len(completion), count) / max(len(completion), count)
        return (
            0.4 * right_share + 0.5 * closeness + 0.1 * (completion == letter * count)
        )


def right_answer(pair: str) -> str:
    letter, count = pair.split(" ")
    return letter * int(count)


def is_held_out(pair: str) -> bool:
    """Say whether training never sees this pair.

    A Latin square: each letter misses every fourth count, and each count a quarter of
    the letters ("b 3", "b 7", "c 2", "c 6", ...). A random quarter left some letters
    with few counts, and their held-out answers were wrong by one letter in some runs.
    """
    letter, count = pair.split(" ")
    return (ord(letter) + int(count)) % 4 == 1
