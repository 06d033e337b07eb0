"""One request at the simulated engine: its place on the step clock, and the tokens that it draws. Knows no clock but steps."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from asyncrl.wire import GenerateRequest, GenerateResponse, Span
from asyncrl_servers.checks import spans_of
from asyncrl_servers.draws import uniform_draws
from asyncrl_servers.streaming import TokenStream


class Running:
    """A request, admitted at `start` and done at `start + length` of the step clock."""

    __slots__ = ("answer", "end", "is_stop", "length", "num_told", "request", "start", "stream")

    def __init__(self, request: GenerateRequest, answer: asyncio.Future[GenerateResponse], stream: TokenStream | None) -> None:
        self.request, self.answer, self.stream, self.num_told = request, answer, stream, 0
        self.start, self.end, self.length = 0.0, 0.0, 0
        self.is_stop = False

    def __lt__(self, other: Running) -> bool:
        return self.end < other.end

    def untold(self, end: int, vocab_size: int, changes: Sequence[tuple[float, int]]) -> tuple[list[int], list[float], list[Span]]:
        """Tokens from the first that was not told up to number `end`, their logprobs and spans; they count as told.

        `changes`: (place on the step clock, policy_version from there on), in order.
        """
        start, num_tokens = self.num_told, end - self.num_told
        if num_tokens == 0:
            return [], [], []
        self.num_told = end
        first_position = len(self.request.prompt_ids) + start
        draws = uniform_draws(np.full(num_tokens, self.request.seed, np.uint64), np.arange(first_position, first_position + num_tokens))
        # Token k is sampled when the clock reaches start + k + 1; it belongs to the last version in force before that.
        first = max(0, bisect_left(changes, (self.start, -1)) - 1)
        marks = [(max(0, int(steps - self.start + 1e-9) - start), version) for steps, version in changes[first:]]
        logprobs = [float(np.float32(-math.log(vocab_size)))] * num_tokens
        spans = spans_of([mark for mark in marks if mark[0] <= num_tokens], num_tokens)
        return (draws * vocab_size).astype(np.int64).tolist(), logprobs, spans
