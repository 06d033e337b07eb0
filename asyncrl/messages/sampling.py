"""Sampling parameters and requests, and stop strings in the decoded tail of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.messages.records import VersionSpan

if TYPE_CHECKING:  # a worker runs without numpy
    import numpy as np
    import numpy.typing as npt

Decode = Callable[..., str]
"""From token ids, and skip_special_tokens (default true), to text."""
_SLACK = 8
"""Tokens checked beyond the longest stop string's bytes; special tokens have no bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """The distribution of each token. The link, vLLM's requests and the embedded engine's rows follow these
    fields.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAMPLING_PARAMETERS}


SAMPLING_PARAMETERS = tuple(one.name for one in fields(SamplingParameters))


@dataclass(frozen=True, slots=True)
class SamplingRequest(SamplingParameters):
    """Sample at most `max_tokens` tokens after the prompt ids, int [P].

    The last `num_resumed` ids were sampled by an earlier segment; they count for stop strings and the
    grammar. Each draw depends only on (`seed`, absolute position). Only the pool reads `route_key`, which
    keeps requests with a common prompt on one engine, and `after`, the last span of the previous turn,
    whose engine has the conversation in its cache.
    """

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0
    route_key: str = ""
    after: VersionSpan | None = None
    grammar: str | None = None
    top_logprobs: int = 0
    num_resumed: int = 0
    thinking: tuple[str, str] | None = None
    """Opening and closing mark of a thought, before whose end no stop string counts."""
    is_thinking: bool = False
    """The prompt has opened the thought."""

    def gate(self) -> ThoughtGate | None:
        return None if self.thinking is None else ThoughtGate(self.thinking, is_open=self.is_thinking)


class ThoughtGate:
    """Find the end of the thought at the start of an answer. Its texts include special tokens.

    Example, marks `<think>` and `</think>`: "<think>hm</th", "ink>Yes" gives ("<think>hm", "") and then
    ("</think>", "Yes").
    """

    def __init__(self, marks: tuple[str, str], *, is_open: bool) -> None:
        self._begin, self._end = (mark.strip() for mark in marks)
        self._state: Literal["unknown", "thought", "text"] = "thought" if is_open else "unknown"
        self._held = ""

    @property
    def is_past(self) -> bool:
        return self._state == "text"

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the next text through the end of the thought, and the text after it."""
        held = self._held + text
        self._held = ""
        if self._state == "unknown":
            bare = held.lstrip()
            if bare.startswith(self._begin):
                self._state = "thought"
            elif is_last or not self._begin.startswith(bare):
                self._state = "text"
            else:
                self._held = held
                return "", ""
        if self._state == "text":
            return "", held
        thought, found, rest = held.partition(self._end)
        if found:
            self._state = "text"
            return thought + found, rest
        num_held = 0 if is_last else overlap(held, self._end)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held], ""


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


class StopWatch:
    """Detects stop strings. `stop_ids`: special tokens, which have no text, that a stop string names.

    `gate`: no stop string counts before the end of the thought.
    """

    def __init__(
        self,
        stop: Iterable[str],
        decode: Decode,
        resumed_ids: Sequence[int] = (),
        stop_ids: Iterable[int] = (),
        gate: ThoughtGate | None = None,
    ) -> None:
        self._stop = [text for text in stop if text]
        self._stop_ids = frozenset(stop_ids)
        self._decode = decode
        self.window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        """Tokens that a stop string can span."""
        self._gate = gate
        self._before = ""
        """Text of the token that ended the thought."""
        self._tail = list(resumed_ids[-self.window :])
        if gate is not None:
            self._tail = []
            for token in resumed_ids:
                self.is_complete(token)

    def is_complete(self, token_id: int) -> bool:
        """Add a token; return true if it completes a stop string."""
        if self._gate is not None:
            written = self._decode([token_id], skip_special_tokens=False)
            _, after = self._gate.feed(written)
            if self._gate.is_past:
                self._gate = None
            is_special = bool(after) and not self._decode([token_id])
            self._before = after.removesuffix(written) if is_special else after
            is_named = is_special and token_id in self._stop_ids
            return is_named or any(stop in self._before for stop in self._stop)
        self._tail = [*self._tail, token_id][-self.window :]
        if token_id in self._stop_ids:
            return True
        text = self._decode(self._tail)
        if len(self._tail) < self.window:
            text = self._before + text
        return any(stop in text for stop in self._stop)
