"""Send requests to an embedded engine in this process, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from asyncrl.base.http import Refused
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import TOP_IDS, TOP_LOGPROBS, SegmentPart, Tokens


def top_logprobs(answer: SegmentPart) -> list[list[tuple[int, float]]]:
    """Return (id, logprob) of the likeliest tokens, for each new token."""
    ids, logprobs = (
        answer.sampled.column(name).lists() for name in (TOP_IDS, TOP_LOGPROBS)
    )
    return [
        [*zip(*of_token, strict=True)] for of_token in zip(ids, logprobs, strict=True)
    ]


class Reply(Future[SegmentPart]):
    def __init__(
        self,
        engine: Any,
        request: SamplingRequest,
        *,
        is_streamed: bool = False,
        ends: bool = True,
    ) -> None:
        """Make a request whose rows are collected. Raises Refused (400)."""
        super().__init__()
        self._engine, self._ends, self.rows = engine, ends, list[Sampled]()
        self.run = engine.run(Asked(0, request, is_streamed), self)

    def on_sampled(self, rows: Sequence[Sampled]) -> None:
        self.rows += rows
        if rows[-1].then == "interrupted" and self._ends:
            self.abort()
        elif rows[-1].then not in ("more", "interrupted"):
            self.set_result(joined(self.rows).part)

    def on_refused(self, number: int, refusal: Refused) -> None:
        self.set_exception(refusal)

    def resume(self) -> None:
        """Go on."""
        self._engine.resume([self.run])

    def abort(self) -> None:
        self._engine.abort([self.run])


def joined(rows: Sequence[Sampled]) -> Sampled:
    """Return all tokens of a request as one row."""
    return rows[-1]._replace(tokens=Tokens.join([row.tokens for row in rows]))


def ask(engine: Any, requests: Sequence[SamplingRequest], **how: bool) -> list[Reply]:
    """Submit these together."""
    answers = [Reply(engine, request, **how) for request in requests]
    engine.submit([answer.run for answer in answers])
    return answers
