"""Scorers with a prompt and samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes import FakeTokenizer
from token_cases import completion_of

from asyncrl.config import TaskConfig
from asyncrl.messages.records import Completion, Prompt
from asyncrl.tasks import TaskScorer

TOKENIZER: Any = FakeTokenizer()


PROMPT = Prompt("0/7", ({"role": "user", "content": "say x"},), answer="x")


def make_scorer(
    function: Any, pool: str = "inline", *, warn: Any = print, **settings: Any
) -> TaskScorer:
    """A scorer in the thread or inline pool."""
    given = {"python": "x:y", "reward_pool": pool, "reward_timeout_s": 10.0} | settings
    config = TaskConfig.model_validate(given)
    task: Any = SimpleNamespace(score=function)
    return TaskScorer(task, config, TOKENIZER, seed=0, warn=warn)


def sampled(text: str) -> Completion:
    return completion_of(
        [*map(ord, text)], [-0.5] * len(text), finish="length", prompt=[1, 2]
    )


class Numbers:
    """Prompt number i is the text "item i"."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Any:
        return f"item {index}"

    def score(self, prompt: Any, completion: str) -> float:
        return 0.0
