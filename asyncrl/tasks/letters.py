"""The quickstart task: "b 7" asks for the letter b, seven times. Small enough for a model with random
weights.

Most counts are small and a few are large (lognormal), so response lengths have the long tail that
asynchronous training is about. The reward looks at the prompt's text and the completion alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item


@dataclass(frozen=True, kw_only=True)
class Letters:
    """`size` prompts "LETTER COUNT"; letters are drawn evenly, counts from a lognormal, clipped to 1 ..
    max_count.
    """

    size: int
    seed: int
    letters: str = "abcdef"
    median_count: float = 4.0
    sigma: float = 0.8
    max_count: int = 40

    def __post_init__(self) -> None:
        if len(set(self.letters)) != len(self.letters) or not self.letters.isalpha():
            raise ValueError("give letters, each once")
        if not 1 <= self.median_count <= self.max_count or self.sigma < 0:
            raise ValueError("median_count and sigma are no spread of 1 .. max_count")

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Item:
        """Prompt number `index`, e.g. "b 7"."""
        draw = random.Random(f"letters/{self.seed}/{index}")
        count = round(self.median_count * math.exp(draw.gauss(0.0, self.sigma)))
        return Item(f"{draw.choice(self.letters)} {min(max(count, 1), self.max_count)}")

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
