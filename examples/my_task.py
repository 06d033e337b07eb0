"""A task of your own: reverse a word. `task: {python: examples.my_task:Reverse, args:
{length: 4}}`.
"""

import random

from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item


class Reverse:
    """`size` random words of `length` letters; the score is the share of letters that
    stand in the right place.
    """

    def __init__(self, *, size: int, seed: int, length: int = 4) -> None:
        letters = random.Random(seed)
        self.words = [
            "".join(letters.choices("abcdefgh", k=length)) for _ in range(size)
        ]

    def __len__(self) -> int:
        return len(self.words)

    def prompt(self, index: int) -> Item:
        """The question, and the answer for score() alone."""
        word = self.words[index]
        return Item(f"Write this word backwards: {word}", answer=word[::-1])

    def score(self, prompt: Prompt, completion: str) -> float:
        """0 .. 1; a completion of another length loses for every letter too many or too
        few.
        """
        right = sum(
            ours == theirs
            for ours, theirs in zip(completion, prompt.answer, strict=False)
        )
        return right / max(len(completion), len(prompt.answer))
