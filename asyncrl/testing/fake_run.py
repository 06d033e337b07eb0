"""One request at a fake engine server, and the tokens that it draws. Knows no server and no wait but its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from asyncrl.wire import GenerateChunk, GenerateRequest, GenerateResponse, Span

END_TOKEN = 0
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Sampled tokens are the letters a..z, one id a character, and END_TOKEN."""


def fake_token(weights: str, seed: int, ids: Sequence[int], end_fraction: float) -> tuple[int, float]:
    """(token, logprob) that comes after `ids`: a pure function, a fresh draw for each seed and position."""
    key = f"{weights}|{seed}|{len(ids)}|{','.join(map(str, ids[-8:]))}"
    draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    is_end = (draw >> 32) / 2**32 < end_fraction
    return (END_TOKEN if is_end else FIRST_TOKEN + draw % NUM_TOKENS), -1.0 - (draw % 1024) / 1024


class FakeRun:
    """One request at the fake server: what it has drawn, and how much of it the client was told in chunks."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.is_granted = self.is_aborted = False
        self.changed = asyncio.Event()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.num_told = 0

    async def wait(self) -> None:
        """Sleep until the server wakes this request."""
        self.changed.clear()
        await self.changed.wait()

    def add(self, token: int, logprob: float, version: int) -> None:
        """One more token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def chunks(self) -> list[GenerateChunk]:
        """What was not told yet, a chunk a version; it counts as told."""
        start, spans = self.num_told, self._spans()
        self.num_told = len(self.token_ids)
        return [
            GenerateChunk(
                token_ids=self.token_ids[start + span.start : start + span.end],
                logprobs=self.logprobs[start + span.start : start + span.end],
                version=span.version,
            )
            for span in spans
        ]

    def answer(self, reason: str) -> GenerateResponse:
        """What was not told yet, and how it ended."""
        told = self.num_told
        values: dict[str, Any] = {"token_ids": self.token_ids[told:], "logprobs": self.logprobs[told:], "version_spans": self._spans()}
        return GenerateResponse(request_id=self.request.request_id, finish_reason=reason, **values)

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        for index, version in enumerate(self.versions[self.num_told :]):
            if spans and spans[-1].version == version:
                spans[-1] = Span(start=spans[-1].start, end=index + 1, version=version)
            else:
                spans.append(Span(start=index, end=index + 1, version=version))
        return spans
