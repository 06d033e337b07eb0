"""The spec of a simulated engine server, and one request at it. Its only clock is the number of steps."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.messages.calls import GenerateRequest, GenerateResponse
from asyncrl_servers.checks import spans_of, uniform_draws
from asyncrl_servers.engine_app import TokenStream


class SimulatedSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.simulated`: one JSON object, unknown keys refused.

    With n running requests a decode step takes decode_step_s + n * per_row_s, and each of them gets one
    token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of this server in logs and errors, like engine-0."""
    slots: int = Field(ge=1)
    """Requests that run at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are drawn from 0..vocab_size-1, each as likely as the other."""
    decode_step_s: float = Field(default=0.002, gt=0)
    """Seconds of a decode step, however many requests run."""
    per_row_s: float = Field(default=0.0001, ge=0)
    """Seconds that each running request adds to a decode step."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Seconds for each prompt token of an admitted request; decoding stands still meanwhile."""
    swap_s: float = Field(default=0.001, ge=0)
    """Seconds that a weight swap stops decoding."""
    mean_tokens: float = Field(default=64.0, ge=1)
    """Mean length of a completion, lognormal and drawn from the request's seed; max_tokens cuts it."""
    sigma: float = Field(default=1.0, ge=0)
    """Sigma of the lognormal length (0 = all completions have mean_tokens)."""
    weights_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the weights take, when they sleep and wake."""
    kv_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the KV cache takes."""
    start_version: int = Field(default=0, ge=0)
    """policy_version at the start."""
    max_queued: int = Field(default=1_000_000, ge=1)
    """Requests that may wait for a slot; one more is refused with 503."""

    def completion_length(self, seed: int) -> int:
        """Tokens until the end, lognormal with mean mean_tokens; from the seed alone."""
        first, second = uniform_draws(np.full(2, seed, dtype=np.uint64), np.array([-1, -2])).tolist()
        normal = math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * second)
        scale = math.exp(self.sigma * normal - self.sigma * self.sigma / 2)
        return max(1, round(self.mean_tokens * scale))


class SimulatedRequest:
    """A request, admitted at `start` and done at `start + length` of the step clock."""

    __slots__ = ("answer", "end", "is_stop", "length", "num_told", "request", "start", "stream")

    def __init__(self, request: GenerateRequest, stream: TokenStream | None) -> None:
        self.request, self.stream, self.num_told = request, stream, 0
        self.answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        self.start, self.end, self.length, self.is_stop = 0.0, 0.0, 0, False

    def __lt__(self, other: SimulatedRequest) -> bool:
        return self.end < other.end

    def begin(self, steps: float, wanted: int) -> None:
        """It runs from here on; it would end by itself after `wanted` tokens."""
        self.is_stop, self.length = wanted <= self.request.max_tokens, min(wanted, self.request.max_tokens)
        self.start, self.end = steps, steps + self.length

    def num_sampled(self, steps: float) -> int:
        """Tokens that the step clock has passed, without the one that ends it."""
        return max(0, min(int(steps - self.start + 1e-9), self.length - 1))

    def tell(self, end: int, spec: SimulatedSpec, changes: Sequence[tuple[float, int]]) -> None:
        """Put the tokens up to number `end` into the stream."""
        if self.stream is None or end <= self.num_told:
            return
        new = self.sampled(self.num_told, end, spec, changes, "length")
        for span in new.version_spans:
            tokens = slice(span.start, span.end)
            pairs = zip(new.token_ids[tokens], new.logprobs[tokens], strict=True)
            self.stream.put((token_id, logprob, span.version) for token_id, logprob in pairs)
        self.num_told = end

    def sampled(
        self,
        start: int,
        end: int,
        spec: SimulatedSpec,
        changes: Sequence[tuple[float, int]],
        reason: Literal["stop", "length", "abort"],
    ) -> GenerateResponse:
        """Its tokens [start, end) as an answer. `changes`: (place on the step clock, policy_version from
        there on), in order.
        """
        num_tokens, first_position = end - start, len(self.request.prompt_ids) + start
        positions = np.arange(first_position, first_position + num_tokens)
        draws = uniform_draws(np.full(num_tokens, self.request.seed, np.uint64), positions)
        # Token k is sampled when the clock reaches self.start + k + 1; it belongs to the last version in
        # force before that.
        since = changes[max(0, bisect_left(changes, (self.start, -1)) - 1) :]
        marks = [(max(0, int(steps - self.start + 1e-9) - start), version) for steps, version in since]
        return GenerateResponse(
            request_id=self.request.request_id,
            token_ids=(draws * spec.vocab_size).astype(np.int64).tolist(),
            logprobs=[float(np.float32(-math.log(spec.vocab_size)))] * num_tokens,
            version_spans=spans_of([mark for mark in marks if mark[0] <= num_tokens], num_tokens),
            finish_reason=reason,
        )
