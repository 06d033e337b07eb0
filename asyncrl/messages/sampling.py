"""Sampling parameters and requests, and stop strings in the decoded tail of sampled
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from asyncrl.messages.records import Adjustment, VersionSpan

if TYPE_CHECKING:  # a worker runs without numpy
    import numpy as np
    import numpy.typing as npt

_SLACK = 8
"""Tokens checked beyond the longest stop string's bytes; special tokens have no bytes.
"""
REPLACEMENT = "\ufffd"
"""Decoded incomplete or invalid character."""
ThoughtState = Literal["unsure", "thought", "text"]


class Decode(Protocol):
    def __call__(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str: ...


@dataclass(unsafe_hash=True, slots=True, kw_only=True)
class SamplingParameters(Adjustment):
    """The distribution of each token: after the adjustment and `temperature` (0:
    greedy), `min_p`, `top_k` and `top_p` cut it in this order, as in vLLM. The link,
    vLLM's requests and the embedded engine's rows follow these fields.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the likeliest tokens up to this total probability (1: all)."""
    top_k: int = 0
    """Keep this number of likeliest tokens (0: all)."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest token's probability."""

    @property
    def is_cut(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary, their support."""
        is_full = self.top_p == 1 and self.top_k == 0 and self.min_p == 0
        return self.temperature > 0 and not is_full

    @property
    def adjustment(self) -> Adjustment | None:
        """None: the logits are the model's."""
        if not self.logit_bias and not self.has_penalty:
            return None
        return Adjustment(**{name: getattr(self, name) for name in ADJUSTMENTS})

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAMPLING_PARAMETERS}

    @property
    def draw(self) -> tuple[float, ...]:
        """The values of DRAW_PARAMETERS."""
        return tuple(getattr(self, name) for name in DRAW_PARAMETERS)


SAMPLING_PARAMETERS = tuple(one.name for one in fields(SamplingParameters))
ADJUSTMENTS = tuple(one.name for one in fields(Adjustment))
"""Parameters of calls that are sampled but not trained: no engine reports the changes."""
DRAW_PARAMETERS = tuple(name for name in SAMPLING_PARAMETERS if name not in ADJUSTMENTS)
"""Numbers that apply to adjusted logits."""
CUTS = frozenset(DRAW_PARAMETERS) - {"temperature"}
"""Parameters that the trainer replays, if the engine reports supports."""

# The limits of OpenAI's API, and vLLM's of the number of biases. A repetition penalty
# near 0 would make logits that float32 does not hold.
LogitBias = Annotated[
    dict[
        Annotated[int, Field(ge=0, strict=False)],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=1024),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]


@dataclass(unsafe_hash=True, slots=True)
class SamplingRequest(SamplingParameters):
    """Sample at most `max_tokens` tokens after the prompt ids, int [P].

    The last `num_resumed` ids were sampled by an earlier segment; they count for stop
    strings, the grammar and penalties. Each draw depends only on (`seed`, absolute position). Stop
    strings count only after the thought that the answer begins with, between the marks
    `thinking`; the first mark is empty if the prompt opens the thought. A sampled token
    with one of `stop_ids` ends the answer, whose last token it is; with `ignore_eos` the
    model's own end tokens do not. Only the pool reads `route_key`, which keeps requests
    with a common prompt on one engine, and `after`, the last span of the previous turn,
    whose engine has the conversation in its cache. `adapter`: name of an open adapter; ""
    is the run's own, or the weights. `role`: which of the run's own adapters, if it has
    several.
    """

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    route_key: str = ""
    after: VersionSpan | None = None
    grammar: str | None = None
    top_logprobs: int = 0
    num_resumed: int = 0
    thinking: tuple[str, str] | None = None
    adapter: str = ""
    role: str = ""


class LeadingThought:
    """Find the end of the thought that an answer begins with, after white space.

    An answer that does not begin with the opening mark has no thought. `state` is
    "unsure" while the answer may still begin with the mark.

    Example: marks <think> and </think>; tokens "<", "think>", "Hm.</" and "think> Yes".
      "<"             unsure
      "think>"        thought
      "Hm.</"         thought
      "think> Yes"    text; add() returns " Yes".
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None,
        decode: Decode,
        begun_ids: Sequence[int] = (),
    ) -> None:
        """`thinking`: opening and closing mark. `begun_ids`: tokens sampled before."""
        self.state: ThoughtState = "text"
        self._decode = decode
        self._ids = list(begun_ids)
        if thinking is not None:
            self._opening, self._closing = thinking
            self._window = len(self._closing.encode()) + _SLACK
            self.state, _ = self._read()

    def add(self, token_id: int) -> str | None:
        """Add a token; if it closes the thought, return the text behind the closing
        mark.
        """
        if self.state == "text":
            return None
        self._ids.append(token_id)
        # The whole answer is decoded only if its last tokens have a closing mark.
        if self.state == "thought" and self._closing not in self._text(
            self._ids[-self._window :]
        ):
            return None
        self.state, after = self._read()
        return after

    def _read(self) -> tuple[ThoughtState, str | None]:
        answer = self._text(self._ids).lstrip()
        if not answer:
            # White space before the thought says nothing. Kept, it would be decoded
            # again with each further token.
            self._ids.clear()
        if not answer.startswith(self._opening):
            may_begin = self._opening.startswith(answer.rstrip(REPLACEMENT))
            return ("unsure" if may_begin else "text"), None
        _, closing, after = answer.removeprefix(self._opening).partition(self._closing)
        return ("text", after) if closing else ("thought", None)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip_special_tokens=False)


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of
    `marker`.
    """
    longest = min(len(text), len(marker) - 1)
    return next(
        (length for length in range(longest, 0, -1) if text.endswith(marker[:length])),
        0,
    )


class StopWatch:
    """Detect stop strings after the leading thought. While an answer may begin a
    thought, nothing stops it.

    `stop_ids`: special tokens, which have no text, that a stop string names.

    Example: tokens are characters, and the answer may think between < and >.
        >>> def decode(ids, *, skip_special_tokens=True):
        ...     return "".join(map(chr, ids))
        >>> watch = StopWatch(["ab"], decode, thinking=("<", ">"))
        >>> [watch.is_complete(ord(one)) for one in "<ab>a"]
        [False, False, False, False, False]
        >>> watch.is_complete(ord("b"))
        True
    """

    def __init__(
        self,
        stop: Iterable[str],
        decode: Decode,
        resumed_ids: Sequence[int] = (),
        stop_ids: Iterable[int] = (),
        thinking: tuple[str, str] | None = None,
    ) -> None:
        self._stop = [text for text in stop if text]
        self._stop_ids = frozenset(stop_ids)
        self._decode = decode
        self.window = (
            max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        )
        """Tokens that a stop string can span."""
        # No stop string counts in the tokens before the window, or the request would
        # have ended. They matter only for the thought, and are decoded once.
        begun_ids = resumed_ids[: -self.window]
        self._thought = LeadingThought(thinking, decode, begun_ids)
        self._tail = [] if self._thought.state == "text" else list(begun_ids)
        self._num_thought = 0
        """Tokens of the tail up to the closing mark. They stay for a while as the
        context of the text.
        """
        self._num_hidden = 0
        """Characters of the tail up to the closing mark."""
        for token_id in resumed_ids[-self.window :]:
            self._add(token_id)

    def is_complete(self, token_id: int) -> bool:
        """Add a token; return true if it completes a stop string."""
        self._add(token_id)
        if self._thought.state != "text":
            return False
        # Special tokens decode to nothing below, so they are found by id.
        if not self._stop_ids.isdisjoint(self._tail[self._num_thought :]):
            return True
        text = self._decode(self._tail)[self._num_hidden :]
        return any(stop in text for stop in self._stop)

    def _add(self, token_id: int) -> None:
        # Cut in steps of _SLACK tokens, not at each one. While the thought is unsure,
        # its mark may turn out to be text, where stop strings count.
        if self._thought.state != "unsure" and len(self._tail) >= self.window + _SLACK:
            self._tail = self._tail[-self.window :]
            self._num_thought = self._num_hidden = 0
        self._tail.append(token_id)
        after = self._thought.add(token_id)
        if after is not None:
            # The last tokens stay as context, since text decodes differently without
            # the tokens before it. The characters of the thought in them are hidden
            # from the search.
            self._tail = self._tail[-_SLACK:]
            self._num_thought = len(self._tail)
            self._num_hidden = len(self._decode(self._tail)) - len(after)
