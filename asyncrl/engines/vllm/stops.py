"""Stop strings that lie over the joint of a resumed segment: vLLM looks at new text alone. Knows a decoder; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.wire import GenerateRequest

_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special ones)."""


class JointWatch:
    """Tells which of the first new tokens completes a stop string that began before them.

    Life: made with the resumed ids -> take() for the new ones, in order -> is_over: no stop string reaches back so far any more.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], resumed_ids: Sequence[int]) -> None:
        self._stop = [text for text in stop if text]
        self._decode = decode
        self._window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        self._tail = list(resumed_ids[-self._window :])
        self._num_taken = 0

    @property
    def is_over(self) -> bool:
        """The tokens to come are vLLM's to watch."""
        return self._num_taken >= self._window

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Number of these that are left when the one that completes a stop string is the last; None if none does."""
        for index, token_id in enumerate(token_ids):
            if self.is_over:
                return None
            self._tail.append(token_id)
            self._num_taken += 1
            text = self._decode(self._tail)
            if any(stop in text for stop in self._stop):
                return index + 1
        return None


def watch_of(request: GenerateRequest, decode: Callable[[Sequence[int]], str] | None) -> JointWatch | None:
    """A watch, where the segment has a joint that a stop string can lie over, and its text can be read."""
    if decode is None or not request.num_resumed or not any(request.stop):
        return None
    return JointWatch(request.stop, decode, request.prompt_ids[-request.num_resumed :])
