"""Rewards for questions with one word as their answer: one for training, that leads
there, and an exact match for evaluation.

A pretrained model knows most of the answers and says them in a sentence: "The plural of
mouse is mice." So the right word counts, the less the more words stand around it. No
question holds its answer, and what is said twice is longer, so neither repeating the
question nor guessing several words pays.
"""

from __future__ import annotations

import re
from typing import Any


def shortest(prompt: Any, completion: str, answer: str) -> float:
    """1 for the right word alone, 1 / (number of words) if it is one of several, else
    0.
    """
    words = words_of(completion)
    return 1.0 / len(words) if answer.lower() in words else 0.0


def exact(prompt: Any, completion: str, answer: str) -> float:
    """1 for the right word alone, else 0."""
    return float(words_of(completion) == [answer.lower()])


def words_of(text: str) -> list[str]:
    """In lower case, without punctuation; each piece of other signs is a word, too."""
    return re.findall(r"\w+|[^\w\s.,!?\"'*]+", text.lower())
