"""All engine servers as one: routing, abort and resume, failover. Knows no prompt's meaning, no reward, no
staleness rule.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.engines.engine import EngineClient
from asyncrl.errors import ConnectionShortage, EngineError, EngineLost
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse
from asyncrl.messages.records import Completion, PartialCompletion, SamplingRequest, VersionSpan
from asyncrl.waits import waiting


@dataclass(frozen=True, slots=True)
class PoolStats:
    """`inflight` logical requests on a server; `interrupted`, `tokens`, `requests`: totals so far; `load`:
    inflight by server.

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

    Life:       a logical request is routed to one server and stays there, segment after segment, until it
    stops,
                its budget is used, or its caller is cancelled; then its place is free. If its server is lost,
                it keeps its segments and chunks and goes on at another one; what had not come of them is
                sampled again. It moves too if a segment is interrupted, by a publish or by balance() say,
                while its server has more requests than slots and another one has a free slot: its cache is
                lost wherever it goes.
    Waits:      generate sleeps in the server's answer. A cancelled one tells the server within
    `abort_timeout_s`,
                so that its slot is free at once; a server that it cannot tell sees the broken connection.
                With no server up it sleeps until up_nowait; its caller's rollout.timeout_s is the limit.
    Invariant:  what generate returns is what one uninterrupted request would have returned wherever the
    weights
                did not change, because SegmentJoin keeps seed and positions. A server that interrupts for no
                publish and gives nothing is left after `max_empty_segments` segments in a row, with an
                EngineError.

    `on_lost` is told of every EngineLost, and must see to it that the server is down (down_nowait, and its
    calls cut) when it returns. Without it nobody brings a server back: the error goes to the caller.
    """

    def __init__(
        self,
        servers: Sequence[EngineClient],
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
        """Requests of which each server samples a segment, in the order in which they came to it: those
        beyond its slots queue.
        """
        self._max_empty_segments = max_empty_segments
        self._abort_timeout_s = abort_timeout_s
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._interrupted = self._tokens = self._requests = self._moved = 0

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<EnginePool {len(self.servers)} servers, {stats.inflight} in flight, "
            f"v{self.oldest_served_version}>"
        )

    @property
    def oldest_served_version(self) -> int:
        """The oldest version that any server which is up has confirmed last; -1 if none is up."""
        return min((self.servers[index].policy_version for index in self._router.up), default=-1)

    def stats(self) -> PoolStats:
        """Counts so far."""
        load = {server.name: count for server, count in zip(self.servers, self._router.load, strict=True)}
        down = tuple(server.name for index, server in enumerate(self.servers) if index not in self._router.up)
        return PoolStats(
            sum(load.values()), self._interrupted, self._tokens, self._requests, load, self._moved, down
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        found: dict[str, float] = {
            "tokens/generated": self._tokens,
            "rollout/interrupted": self._interrupted,
            "engine/down": len(self.servers) - len(self._router.up),
        }
        if len(self.servers) > 1:
            found |= {
                f"engine/policy_version/{server.name}": server.policy_version for server in self.servers
            }
        return found

    def down_nowait(self, name: str) -> None:
        """Give this server no work any more. Who says so cuts its calls too, so that they go on elsewhere.
        Idempotent.
        """
        self._router.up.discard(self._index(name))

    def up_nowait(self, name: str) -> None:
        """Give this server work again: it serves the newest announced version, or a newer one. Idempotent."""
        self._router.up.add(self._index(name))
        self._changed.set()
        self._changed = asyncio.Event()

    async def balance(self) -> None:
        """Have what only queues go on at servers with free slots, as far as there are any; to be called after
        up_nowait.

        The newest ones of each queue: they would wait longest. Nothing that runs is ended. Waits
        abort_timeout_s at most.
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
        """Sample one completion; survives publishes, aborts and dead servers. Raises RequestRefused (data) or
        EngineError.

        `on_tokens` is told of the tokens of `partial` first: all that it is told, joined, are the
        completion's token_ids.
        """
        join = SegmentJoin(request, partial, on_segment)
        if on_tokens is not None and join.token_ids:
            on_tokens(tuple(join.token_ids))
        while not join.is_finished:
            while not self._router.up:
                with waiting("an engine that is up", on="supervisor"):
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

    async def _sample_on(
        self, index: int, join: SegmentJoin, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> None:
        """Segments from one server until the request is finished, or has to move. Raises EngineLost with
        `join` as far as it got.
        """
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

    async def _segment(
        self, index: int, join: SegmentJoin, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> None:
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
            with waiting("completions", on=server.name, who="rollouts"):
                rest = await server.generate_segment(
                    request, on_chunk=None if on_tokens is None else on_chunk
                )
        except asyncio.CancelledError:  # a rollout that timed out or was dropped must not keep its slot
            await self._abort(server, [request.request_id])
            raise
        finally:
            del self._sent[index][request.request_id]
        join.add(rest, index)
        tell(rest.token_ids)

    async def _abort(self, server: EngineClient, request_ids: list[str]) -> None:
        """As far as the server can be told: one that gives no answer is lost, and that is seen by the calls
        that wait for it.
        """
        with contextlib.suppress(EngineError, ConnectionShortage):
            await server.abort(request_ids, timeout_s=self._abort_timeout_s)

    def _near(self, request: SamplingRequest) -> int:
        """The server that has the conversation before this turn in its cache, which new weights empty; -1 if
        none has.
        """
        after = request.after
        if after is None or not 0 <= after.engine < len(self.servers):
            return -1
        return after.engine if self.servers[after.engine].policy_version == after.version else -1

    def _index(self, name: str) -> int:
        return next(index for index, server in enumerate(self.servers) if server.name == name)

    def _aborts_for_ever(self, server: EngineClient, join: SegmentJoin, num_empty: int) -> EngineError:
        return EngineError(
            server.name,
            f"aborted request {join.request.request_id} {num_empty} times in a row without a token and "
            f"without a publish, "
            f"after {len(join.token_ids)} of {join.request.max_tokens} tokens",
            rule="an interrupted request goes on when it is sent again",
            way_out=f"read {server.name}'s log, and make sure that nobody else calls its /abort.",
        )


# Which server takes a request. Pure: knows counts and keys, no server and no wait.


class Router:
    """Least loaded server first; but where the request's prefix is cached, as long as that server has a free
    slot.

    Life:       take(key) charges one server until the block ends. Requests of one key that are in flight stay
    together; the key is
                forgotten with the last of them, so that nothing grows with the number of groups. Turns of one
                session follow each other: `near` says where the last one was. A server is up, or down and
                then given nothing.
    Invariant:  a request is given to a server without a free slot only when no server that is up has one; and
    once one has, a request
                of a server with more than its slots that is interrupted moves there (has_to_move). It moves
                for nothing less, so that no request goes to and fro.
    """

    def __init__(self, num_servers: int, slots: int) -> None:
        self.load = [0] * num_servers
        self.up = set(range(num_servers))
        self.slots = slots
        self._keys: dict[
            str, tuple[int, int]
        ] = {}  # route key -> (server of its last request, requests in flight)

    def __repr__(self) -> str:
        return f"<Router load {self.load} of {self.slots}, {len(self._keys)} keys>"

    @contextlib.contextmanager
    def take(self, route_key: str, near: int = -1) -> Iterator[int]:
        """Number of the server for one request, charged until the block ends. The key "" is no key; a server
        must be up.
        """
        index = self._choose(route_key, near)
        self.load[index] += 1
        if route_key:
            self._keys[route_key] = (index, self._keys.get(route_key, (index, 0))[1] + 1)
        try:
            yield index
        finally:
            self.load[index] -= 1
            if route_key:
                self._release_key(route_key)

    @property
    def num_free(self) -> int:
        """Free slots of all servers that are up."""
        return sum(max(0, self.slots - self.load[index]) for index in self.up)

    def has_to_move(self, index: int) -> bool:
        """Whether a request that is at this server, and has lost its cache there, would be better off if it
        were taken anew.
        """
        if index not in self.up:
            return True
        return self.load[index] > self.slots and any(self.load[other] < self.slots for other in self.up)

    def _choose(self, route_key: str, near: int) -> int:
        cached = self._keys[route_key][0] if route_key in self._keys else near
        if cached in self.up and self.load[cached] < self.slots:
            return cached
        return min(sorted(self.up), key=lambda index: self.load[index])

    def _release_key(self, route_key: str) -> None:
        index, count = self._keys[route_key]
        if count > 1:
            self._keys[route_key] = (index, count - 1)
        else:
            del self._keys[route_key]


# Segments of one logical request, joined into one completion. Pure: knows no server and no wait.


class SegmentJoin:
    """What has been sampled of one request so far, and what to ask for next.

    Life:       empty -> segments, with next_request() before each -> is_finished, completion(). A segment is
    any number of
                add_chunk(), and add() for the rest of it, or cut() if the rest never came.
    Invariant:  the lengths of all segments add up to at most request.max_tokens, if `partial` is not longer,
    and the spans cover every
                token once: each segment's spans are shifted to where its tokens lie.
    """

    def __init__(
        self,
        request: SamplingRequest,
        partial: PartialCompletion | None = None,
        on_segment: Callable[[PartialCompletion], None] | None = None,
    ) -> None:
        """`partial`: what an earlier process had sampled of it; `on_segment` is told all there is after each
        interruption.
        """
        self.request, self._on_segment = request, on_segment
        before = partial or PartialCompletion()
        self.token_ids = list(before.token_ids)
        self.logprobs = list(before.behaviour_logprobs)
        self.spans = list(before.version_spans)
        self.num_interruptions = before.num_interruptions + (partial is not None)
        self._num_told = len(self.token_ids)
        """Tokens that on_segment knows of."""
        self._finish_reason: str | None = None if self.num_left > 0 else "length"

    def __repr__(self) -> str:
        state = self._finish_reason or "unfinished"
        return (
            f"<SegmentJoin {self.request.request_id} {len(self.token_ids)}/{self.request.max_tokens} "
            f"tokens, {state}>"
        )

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled; below 0 if a killed run, whose partial this is, had a larger
        limit.
        """
        return self.request.max_tokens - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """No further segment is needed."""
        return self._finish_reason is not None

    def next_request(self) -> GenerateRequest:
        """The message that goes on where the last segment ended.

        The seed stays: the server draws each token from (seed, absolute position), so that the resumed
        request draws what the uninterrupted one would have drawn.
        """
        request = self.request
        return GenerateRequest(
            request_id=request.request_id,
            prompt_ids=[*request.prompt_ids, *self.token_ids],
            num_resumed=len(self.token_ids),
            max_tokens=self.num_left,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=list(request.stop),
            seed=request.seed,
        )

    def add_chunk(self, chunk: GenerateChunk, engine: int = -1) -> None:
        """Append a part of a segment by engine server number `engine`, which SegmentCheck has passed."""
        start = len(self.token_ids)
        self._add_span(VersionSpan(start, start + len(chunk.token_ids), chunk.version, engine))
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs

    def add(self, segment: GenerateResponse, engine: int = -1) -> None:
        """Append a segment by engine server number `engine`, or what is left of it after its chunks, which
        SegmentCheck has passed.
        """
        shift = len(self.token_ids)
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        for span in segment.version_spans:
            self._add_span(VersionSpan(span.start + shift, span.end + shift, span.version, engine))
        if segment.finish_reason != "abort":
            self._finish_reason = segment.finish_reason
            return
        self._interrupted()

    def cut(self) -> None:
        """The rest of the segment is lost; its chunks, if there were any, stay."""
        if len(self.token_ids) > self._num_told:
            self._interrupted()

    def _interrupted(self) -> None:
        self.num_interruptions += 1
        if self.num_left <= 0:
            self._finish_reason = "length"
        elif self._on_segment is not None and len(self.token_ids) > self._num_told:
            self._on_segment(self.partial())
        self._num_told = len(self.token_ids)

    def partial(self) -> PartialCompletion:
        """All segments so far."""
        return PartialCompletion(
            tuple(self.token_ids), tuple(self.logprobs), tuple(self.spans), self.num_interruptions
        )

    def completion(self) -> Completion:
        """All segments as one. Only when is_finished."""
        assert self._finish_reason is not None, f"{self!r} is not finished"
        return Completion(
            token_ids=tuple(self.token_ids),
            behaviour_logprobs=tuple(self.logprobs),
            version_spans=tuple(self.spans),
            finish_reason="stop" if self._finish_reason == "stop" else "length",
            num_interruptions=self.num_interruptions,
        )

    def _add_span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.engine) == (span.version, span.engine):
            self.spans[-1] = replace(last, end=span.end)
        else:
            self.spans.append(span)
