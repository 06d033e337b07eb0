"""A task for tests of the order of prompts."""

from __future__ import annotations

from typing import Any


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
