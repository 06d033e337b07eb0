"""A teacher.prompt for tests: what the best sibling has answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def lesson(prompt: Any, attempt: Any, siblings: Sequence[Any]) -> str | None:
    """Return None if no sibling is better. The text has at most 12 tokens."""
    best = max(siblings, key=lambda one: (one.reward, one.sample_index))
    if best.reward <= attempt.reward:
        return None
    return f"{best.text[:8]} {prompt.messages[-1]['content'][:2]}"
