"""Sampling parameters and requests, and stop strings in the decoded tail of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from asyncrl.messages.records import VersionSpan

if TYPE_CHECKING:  # a worker runs without numpy
    import numpy as np
    import numpy.typing as npt

Decode = Callable[[Sequence[int]], str]
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
