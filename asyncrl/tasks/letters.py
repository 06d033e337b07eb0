"""The quickstart task: "b 7" asks for the letter b, seven times. Small enough for a model with random
weights.

Most counts are small and a few are large (lognormal), so response lengths have the long tail that
asynchronous training is about. The reward looks at the prompt's text and the completion alone.
"""

from __future__ import annotations

import math
import random

from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item


class Letters:
    """`size` prompts "LETTER COUNT"; letters are drawn evenly, counts from a lognormal, clipped to 1 ..
    max_count.
    """

    def __init__(
        self,
        *,
        size: int,
        seed: int,
        letters: str = "abcdef",
        median_count: float = 4.0,
        sigma: float = 0.8,
        max_count: int = 40,
    ) -> None:
        if len(set(letters)) != len(letters) or not letters.isalpha():
            raise ValueError(f"letters={letters!r}: give letters, each once")
        if not 1 <= median_count <= max_count or sigma < 0:
            raise ValueError(f"{median_count=}, {sigma=}, {max_count=}: not a spread of 1 .. max_count")
        self._seed, self._size, self._letters = seed, size, letters
        self._median_count, self._sigma, self._max_count = median_count, sigma, max_count

    def __repr__(self) -> str:
        return f"<Letters {self._size} prompts>"

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Item:
        """Prompt number `index`, e.g. "b 7"."""
        draw = random.Random(f"letters/{self._seed}/{index}")
        count = round(self._median_count * math.exp(draw.gauss(0.0, self._sigma)))
        return Item(f"{draw.choice(self._letters)} {min(max(count, 1), self._max_count)}")

    def score(self, prompt: Prompt, completion: str) -> float:
        """0 .. 1, in three parts: 0.6 for the share of right letters, 0.35 for a length near the count, 0.05
        for exactness.

        A sum and not a product, so that each part can be learnt before the other.
        """
        letter, count_text = prompt.messages[-1]["content"].split(" ")
        count = int(count_text)
        if not completion:
            return 0.0
        right_share = completion.count(letter) / len(completion)
        closeness = min(len(completion), count) / max(len(completion), count)
        return 0.6 * right_share + 0.35 * closeness + 0.05 * (completion == letter * count)
