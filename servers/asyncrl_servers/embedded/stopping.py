"""Stop strings of one request, watched token by token. Knows a tokenizer; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special ones)."""


class StopWatch:
    """Tells when the decoded text of a request contains one of its stop strings.

    Only the tail is decoded: as many tokens as the longest stop string has bytes, and a few more. Special tokens
    have no text, but a stop string that is one special token's name stops at that token.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Any, resumed_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in self._stop if text in special}
        self._window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        self._tail = list(resumed_ids[-self._window :])

    def is_complete(self, token_id: int) -> bool:
        """Take one more token; true if it completes a stop string."""
        self._tail.append(token_id)
        if len(self._tail) > self._window:
            del self._tail[0]
        if token_id in self._stop_ids:
            return True
        text = self._tokenizer.decode(self._tail, skip_special_tokens=True)
        return any(stop in text for stop in self._stop)
