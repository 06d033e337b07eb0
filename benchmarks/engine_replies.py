"""Send requests to an embedded engine in this process, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from asyncrl.base.http import Refused
from asyncrl.messages.codec import Asked, Sampled, response, spans_of
from asyncrl.messages.engine_api import GenerateResponse
from asyncrl.messages.sampling import SamplingRequest


class Reply(Future[GenerateResponse]):
    def __init__(
        self, engine: Any, request: SamplingRequest, *, is_streamed: bool = False, ends: bool = True
    ) -> None:
        """Raises Refused (400)."""
        super().__init__()
        self._engine, self._ends, self.rows = engine, ends, list[Sampled]()
        self.run = engine.run(Asked(0, request, is_streamed), self)

    def sampled(self, rows: Sequence[Sampled]) -> None:
        self.rows += rows
        if rows[-1].then == "interrupted" and self._ends:
            self.abort()
        elif rows[-1].then not in ("more", "interrupted"):
            self.set_result(response(self.run.request.request_id, joined(self.rows)))

    def refused(self, number: int, refusal: Refused) -> None:
        self.set_exception(refusal)

    def resume(self) -> None:
        """Go on."""
        self._engine.resume([self.run])

    def abort(self) -> None:
        self._engine.abort([self.run])


def joined(rows: Sequence[Sampled]) -> Sampled:
    """Return all tokens of a request as one row."""
    marks = list[tuple[int, int]]()
    num = 0
    for row in rows:
        for start, _, version in row.spans:
            if not marks or marks[-1][1] != version:
                marks.append((num + start, version))
        num += len(row.token_ids)
    return rows[-1]._replace(
        token_ids=np.concatenate([row.token_ids for row in rows]),
        logprobs=np.concatenate([row.logprobs for row in rows]),
        spans=spans_of(marks, 0, num),
        top=[pairs for row in rows for pairs in row.top],
        routing=b"".join(row.routing for row in rows),
    )


def ask(engine: Any, requests: Sequence[SamplingRequest], **how: bool) -> list[Reply]:
    """Submit these together."""
    answers = [Reply(engine, request, **how) for request in requests]
    engine.submit([answer.run for answer in answers])
    return answers
