"""All engine servers as one: routing, abort and resume. Knows no prompt's meaning, no reward, no staleness rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.engines.joining import SegmentJoin
from asyncrl.engines.routing import Router
from asyncrl.errors import EngineError
from asyncrl.types import Completion, SamplingRequest
from asyncrl.wire import GenerateRequest, GenerateResponse


class SegmentServer(Protocol):
    """What the pool needs of one engine server; EngineServer is it."""

    name: str
    policy_version: int
    num_commits: int

    async def generate_segment(self, request: GenerateRequest) -> GenerateResponse:
        """One segment of a request."""
        ...

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStats:
    """`inflight` logical requests now; `interrupted`, `tokens`, `requests`: totals so far; `load`: inflight by server."""

    inflight: int
    interrupted: int
    tokens: int
    requests: int
    load: Mapping[str, int]


class EnginePool:
    """The SamplingEngine over M servers.

    Life:       a logical request is routed to one server and stays there, segment after segment, until it stops,
                its budget is used, or its caller is cancelled; then its place is free.
    Waits:      generate sleeps in the server's answer. A cancelled one tells the server within `abort_timeout_s`,
                so that its slot is free at once; a server that it cannot tell sees the broken connection.
    Invariant:  what generate returns is what one uninterrupted request would have returned wherever the weights
                did not change, because SegmentJoin keeps seed and positions. A server that interrupts for no
                publish and gives nothing is left after `max_empty_segments` segments in a row, with an EngineError.
    """

    def __init__(
        self,
        servers: Sequence[SegmentServer],
        *,
        slots: int,
        max_empty_segments: int = 32,
        abort_timeout_s: float = 2.0,
    ) -> None:
        if not servers:
            raise ValueError("an EnginePool needs one server at least")
        self.servers = tuple(servers)
        self.slots = slots
        self._router = Router(len(servers), slots)
        self._max_empty_segments = max_empty_segments
        self._abort_timeout_s = abort_timeout_s
        self._interrupted = self._tokens = self._requests = 0

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<EnginePool {len(self.servers)} servers, {stats.inflight} in flight, v{self.oldest_served_version}>"

    @property
    def oldest_served_version(self) -> int:
        """The oldest version that any server has confirmed last."""
        return min(server.policy_version for server in self.servers)

    def stats(self) -> PoolStats:
        """Counts so far."""
        load = {server.name: count for server, count in zip(self.servers, self._router.load, strict=True)}
        return PoolStats(sum(load.values()), self._interrupted, self._tokens, self._requests, load)

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion; survives publishes and aborts. Raises RequestRefused (data) or EngineError."""
        join = SegmentJoin(request)
        with self._router.take(request.route_key) as index:
            server = self.servers[index]
            num_empty, commits_seen = 0, server.num_commits
            while not join.is_finished:
                segment = await self._segment(server, join.next_request())
                join.add(segment)
                self._tokens += len(segment.token_ids)
                if segment.token_ids or server.num_commits != commits_seen:
                    num_empty, commits_seen = 0, server.num_commits
                elif (num_empty := num_empty + 1) >= self._max_empty_segments:
                    raise self._aborts_for_ever(server, join, num_empty)
        self._requests += 1
        self._interrupted += join.num_interruptions
        return join.completion()

    async def _segment(self, server: SegmentServer, request: GenerateRequest) -> GenerateResponse:
        try:
            return await server.generate_segment(request)
        except asyncio.CancelledError:  # a rollout that timed out or was dropped must not keep its slot
            with contextlib.suppress(EngineError):
                await server.abort([request.request_id], timeout_s=self._abort_timeout_s)
            raise

    def _aborts_for_ever(self, server: SegmentServer, join: SegmentJoin, num_empty: int) -> EngineError:
        return EngineError(
            server.name,
            f"aborted request {join.request.request_id} {num_empty} times in a row without a token and without a publish, "
            f"after {len(join.token_ids)} of {join.request.max_tokens} tokens",
            rule="an interrupted request goes on when it is sent again",
            way_out=f"read {server.name}'s log, and make sure that nobody else calls its /abort.",
        )
