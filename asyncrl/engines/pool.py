"""All engine servers as one: routing, abort and resume, failover. Knows no prompt's meaning, no reward, no staleness rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.engines.joining import SegmentJoin
from asyncrl.engines.routing import Router
from asyncrl.errors import ConnectionShortage, EngineError, EngineLost
from asyncrl.types import Completion, PartialCompletion, SamplingRequest
from asyncrl.wire import GenerateChunk, GenerateRequest, GenerateResponse


class SegmentServer(Protocol):
    """What the pool needs of one engine server; EngineServer is it."""

    name: str
    num_commits: int

    @property
    def policy_version(self) -> int:
        """The version that the server has confirmed last."""
        ...

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: Callable[[GenerateChunk], None] | None = None
    ) -> GenerateResponse:
        """One segment of a request; with `on_chunk`, what is left of it after the chunks that it was told."""
        ...

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStats:
    """`inflight` logical requests on a server; `interrupted`, `tokens`, `requests`: totals so far; `load`: inflight by server.

    `moved`: times that a request lost its server and went on; `down`: servers that get no work now.
    """

    inflight: int
    interrupted: int
    tokens: int
    requests: int
    load: Mapping[str, int]
    moved: int = 0
    down: tuple[str, ...] = ()


class EnginePool:
    """The SamplingEngine over M servers.

    Life:       a logical request is routed to one server and stays there, segment after segment, until it stops,
                its budget is used, or its caller is cancelled; then its place is free. If its server is lost, it keeps
                its segments and chunks and goes on at another one; what had not come of them is sampled again. It
                moves too if a segment is interrupted, by a publish or by balance() say, while its server has more
                requests than slots and another one has a free slot: its cache is lost wherever it goes.
    Waits:      generate sleeps in the server's answer. A cancelled one tells the server within `abort_timeout_s`,
                so that its slot is free at once; a server that it cannot tell sees the broken connection. With no
                server up it sleeps until up_nowait; its caller's rollout.timeout_s is the limit.
    Invariant:  what generate returns is what one uninterrupted request would have returned wherever the weights
                did not change, because SegmentJoin keeps seed and positions. A server that interrupts for no
                publish and gives nothing is left after `max_empty_segments` segments in a row, with an EngineError.

    `on_lost` is told of every EngineLost, and must see to it that the server is down (down_nowait, and its calls cut) when
    it returns. Without it nobody brings a server back: the error goes to the caller.
    """

    def __init__(
        self,
        servers: Sequence[SegmentServer],
        *,
        slots: int,
        max_empty_segments: int = 32,
        abort_timeout_s: float = 2.0,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        if not servers:
            raise ValueError("an EnginePool needs one server at least")
        self.servers = tuple(servers)
        self.slots = slots
        self._router = Router(len(servers), slots)
        self._sent: list[dict[str, None]] = [{} for _ in servers]
        """Requests of which each server samples a segment, in the order in which they came to it: those beyond its slots queue."""
        self._max_empty_segments = max_empty_segments
        self._abort_timeout_s = abort_timeout_s
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._interrupted = self._tokens = self._requests = self._moved = 0

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<EnginePool {len(self.servers)} servers, {stats.inflight} in flight, v{self.oldest_served_version}>"

    @property
    def oldest_served_version(self) -> int:
        """The oldest version that any server which is up has confirmed last; -1 if none is up."""
        return min((self.servers[index].policy_version for index in self._router.up), default=-1)

    def stats(self) -> PoolStats:
        """Counts so far."""
        load = {server.name: count for server, count in zip(self.servers, self._router.load, strict=True)}
        down = tuple(server.name for index, server in enumerate(self.servers) if index not in self._router.up)
        return PoolStats(sum(load.values()), self._interrupted, self._tokens, self._requests, load, self._moved, down)

    def down_nowait(self, name: str) -> None:
        """Give this server no work any more. Who says so cuts its calls too, so that they go on elsewhere. Idempotent."""
        self._router.up.discard(self._index(name))

    def up_nowait(self, name: str) -> None:
        """Give this server work again: it serves the newest announced version, or a newer one. Idempotent."""
        self._router.up.add(self._index(name))
        self._changed.set()
        self._changed = asyncio.Event()

    async def balance(self) -> None:
        """Have what only queues go on at servers with free slots, as far as there are any; to be called after up_nowait.

        The newest ones of each queue: they would wait longest. Nothing that runs is ended. Waits abort_timeout_s at most.
        """
        num_free = self._router.num_free
        asking = []
        for index in sorted(self._router.up):
            queued = list(self._sent[index])[self.slots :]
            moving = queued[max(0, len(queued) - num_free) :]
            num_free -= len(moving)
            if moving:
                asking.append(self._abort(self.servers[index], moving))
        await asyncio.gather(*asking)

    async def generate(
        self,
        request: SamplingRequest,
        *,
        partial: PartialCompletion | None = None,
        on_segment: Callable[[PartialCompletion], None] | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Completion:
        """Sample one completion; survives publishes, aborts and dead servers. Raises RequestRefused (data) or EngineError.

        `on_tokens` is told of the tokens of `partial` first: all that it is told, joined, are the completion's token_ids.
        """
        join = SegmentJoin(request, partial, on_segment)
        if on_tokens is not None and join.token_ids:
            on_tokens(tuple(join.token_ids))
        while not join.is_finished:
            while not self._router.up:
                await self._changed.wait()
            with self._router.take(request.route_key, self._near(request)) as index:
                try:
                    await self._sample_on(index, join, on_tokens)
                except EngineLost as lost:
                    join.cut()
                    if self._on_lost is None:
                        raise
                    self._moved += 1
                    self._on_lost(lost)
        self._requests += 1
        self._interrupted += join.num_interruptions
        return join.completion()

    async def _sample_on(self, index: int, join: SegmentJoin, on_tokens: Callable[[Sequence[int]], None] | None) -> None:
        """Segments from one server until the request is finished, or has to move. Raises EngineLost with `join` as far as it got."""
        server = self.servers[index]
        num_empty, commits_seen = 0, server.num_commits
        while not join.is_finished:
            num_before = len(join.token_ids)
            await self._segment(index, join, on_tokens)
            if self._router.has_to_move(index):
                return
            if len(join.token_ids) > num_before or server.num_commits != commits_seen:
                num_empty, commits_seen = 0, server.num_commits
            elif (num_empty := num_empty + 1) >= self._max_empty_segments:
                raise self._aborts_for_ever(server, join, num_empty)

    async def _segment(self, index: int, join: SegmentJoin, on_tokens: Callable[[Sequence[int]], None] | None) -> None:
        """One segment, into `join` as it comes; a token is in there before on_tokens is told of it."""
        server, request = self.servers[index], join.next_request()

        def on_chunk(chunk: GenerateChunk) -> None:
            join.add_chunk(chunk, index)
            tell(chunk.token_ids)

        def tell(token_ids: list[int]) -> None:
            self._tokens += len(token_ids)
            if on_tokens is not None and token_ids:
                on_tokens(token_ids)

        self._sent[index][request.request_id] = None
        try:
            rest = await server.generate_segment(request, on_chunk=None if on_tokens is None else on_chunk)
        except asyncio.CancelledError:  # a rollout that timed out or was dropped must not keep its slot
            await self._abort(server, [request.request_id])
            raise
        finally:
            del self._sent[index][request.request_id]
        join.add(rest, index)
        tell(rest.token_ids)

    async def _abort(self, server: SegmentServer, request_ids: list[str]) -> None:
        """As far as the server can be told: one that gives no answer is lost, and that is seen by the calls that wait for it."""
        with contextlib.suppress(EngineError, ConnectionShortage):
            await server.abort(request_ids, timeout_s=self._abort_timeout_s)

    def _near(self, request: SamplingRequest) -> int:
        """The server that has the conversation before this turn in its cache, which new weights empty; -1 if none has."""
        after = request.after
        if after is None or not 0 <= after.engine < len(self.servers):
            return -1
        return after.engine if self.servers[after.engine].policy_version == after.version else -1

    def _index(self, name: str) -> int:
        return next(index for index, server in enumerate(self.servers) if server.name == name)

    def _aborts_for_ever(self, server: SegmentServer, join: SegmentJoin, num_empty: int) -> EngineError:
        return EngineError(
            server.name,
            f"aborted request {join.request.request_id} {num_empty} times in a row without a token and without a publish, "
            f"after {len(join.token_ids)} of {join.request.max_tokens} tokens",
            rule="an interrupted request goes on when it is sent again",
            way_out=f"read {server.name}'s log, and make sure that nobody else calls its /abort.",
        )
