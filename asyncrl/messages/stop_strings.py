"""Stop strings in the decoded tail of sampled tokens, for engines and their clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]
_SLACK = 8
"""Tokens checked beyond the longest stop string's bytes; special tokens have no bytes."""


class StopWatch:
    """Detects stop strings. `stop_ids`: special tokens, which have no text, that a stop string names."""

    def __init__(
        self,
        stop: Iterable[str],
        decode: Decode,
        resumed_ids: Sequence[int] = (),
        stop_ids: Iterable[int] = (),
    ) -> None:
        self._stop = [text for text in stop if text]
        self._stop_ids = frozenset(stop_ids)
        self._decode = decode
        self.window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        """Tokens that a stop string can span."""
        self._tail = list(resumed_ids[-self.window :])

    def is_complete(self, token_id: int) -> bool:
        """Add a token; return true if it completes a stop string."""
        self._tail = [*self._tail, token_id][-self.window :]
        if token_id in self._stop_ids:
            return True
        text = self._decode(self._tail)
        return any(stop in text for stop in self._stop)
