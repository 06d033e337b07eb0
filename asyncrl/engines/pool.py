"""All engine servers as one: routing, abort and resume, failover."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.waits import waiting
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import GenerateResponse
from asyncrl.messages.records import Completion, TopLogprobs, VersionSpan
from asyncrl.messages.sampling import SamplingRequest

DRAIN_TIMEOUT_S = 30.0
_UNKNOWN = b"\xff"
"""Each byte of NO_EXPERT."""

OnLost = Callable[[EngineLost], None]
OnTokens = Callable[[Sequence[int]], None]
OnSpent = Callable[[int], None]


class EnginePool:
    """Samples on M servers: one logical request in, one joined completion out.

    Life: a request moves, with its tokens, if its server is lost, or is overloaded at an interruption
        while another has a free slot.
    Waits: generate sleeps in the server's answer; without a server, until up_nowait. The limit is
        rollout.timeout_s.
    Invariant: SegmentJoin keeps seed and positions, so a completion equals an uninterrupted one.

    `on_lost` gets every EngineLost and must take the server down; without it the error reaches the
    caller.
    """

    def __init__(self, servers: Sequence[EngineClient], *, slots: int, on_lost: OnLost | None = None) -> None:
        assert servers, "an EnginePool needs one server at least"
        self.servers = tuple(servers)
        self.slots = slots
        self._on_lost = on_lost
        self._index = {server.name: index for index, server in enumerate(servers)}
        self._router = Router(len(servers), slots)
        self._sent: list[dict[str, None]] = [{} for _ in servers]
        """Requests of each server, in order of arrival."""
        self._busy_s = [0.0] * len(servers)
        self._changed = asyncio.Event()
        self._interrupted = self._tokens = 0

    @property
    def load(self) -> dict[str, int]:
        return {server.name: count for server, count in zip(self.servers, self._router.load, strict=True)}

    def busy_s(self, now_s: float) -> dict[str, float]:
        """Return each server's request-seconds up to `now_s`."""
        sums = zip(self.servers, self._busy_s, self._sent, strict=True)
        return {server.name: busy_s + len(sent) * now_s for server, busy_s, sent in sums}

    @property
    def down(self) -> tuple[str, ...]:
        return tuple(one.name for index, one in enumerate(self.servers) if index not in self._router.up)

    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {
            "tokens/generated": self._tokens,
            "rollout/interrupted": self._interrupted,
            "engine/down": len(self.down),
        }
        if len(self.servers) > 1:
            for index in sorted(self._router.up):
                server = self.servers[index]
                gauges[f"engine/policy_version/{server.name}"] = server.policy_version
        return gauges

    def counted_apart(self) -> EnginePool:
        """Return a view with separate counts, for untrained tokens."""
        other = copy.copy(self)
        other._interrupted = other._tokens = 0
        return other

    def down_nowait(self, name: str) -> None:
        """Stop routing to this server. Idempotent."""
        self._router.up.discard(self._index[name])

    def up_nowait(self, name: str) -> None:
        """Route to this server, which serves the newest announced version. Idempotent."""
        self._router.up.add(self._index[name])
        self._changed.set()
        self._changed.clear()

    async def drain(self, name: str) -> None:
        """Stop routing to this server and move its requests."""
        self.down_nowait(name)
        index = self._index[name]
        if requests := list(self._sent[index]):
            with contextlib.suppress(EngineError):  # waiting calls detect a lost server
                await self.servers[index].abort(requests, timeout_s=DRAIN_TIMEOUT_S)

    async def generate(
        self,
        request: SamplingRequest,
        *,
        partial: Completion | None = None,
        on_segment: Callable[[Completion], None] | None = None,
        on_tokens: OnTokens | None = None,
        on_spent: OnSpent | None = None,
    ) -> Completion:
        """Sample one completion across pushes, aborts and lost servers. Raises RequestRefused (data) or
        EngineError.

        The calls of `on_tokens`, joined, are the completion's token_ids, `partial` included. `on_spent`
        gets each segment's number of tokens, even if the request fails later.
        """
        join = SegmentJoin(request, partial, on_segment)
        if on_tokens is not None and join.token_ids:
            on_tokens(tuple(join.token_ids))

        def on_part(token_ids: list[int]) -> None:
            self._tokens += len(token_ids)
            if on_spent is not None:
                on_spent(len(token_ids))
            if on_tokens is not None and token_ids:
                on_tokens(token_ids)

        while not join.is_finished:
            while not self._router.up:
                with waiting("an engine that is up", on="supervisor"):
                    await self._changed.wait()
            with self._router.take(request.route_key, self._near(request)) as charge:
                try:
                    await self._sample_on(charge, join, on_part, is_streamed=on_tokens is not None)
                except EngineLost as lost:
                    join.cut()
                    if self._on_lost is None:
                        raise
                    self._on_lost(lost)
        self._interrupted += join.num_interruptions
        return join.completion()

    async def _sample_on(
        self, charge: Charge, join: SegmentJoin, on_part: Callable[[list[int]], None], *, is_streamed: bool
    ) -> None:
        """Append segments to `join` until the request ends or moves. A token is in `join` before
        `on_part` gets it.
        """
        index = charge.index
        server = self.servers[index]

        def on_chunk(part: GenerateResponse) -> None:
            join.add(part, index)
            on_part(part.token_ids)

        def on_interrupted(part: GenerateResponse) -> bool:
            if self._router.moves(charge):
                return False
            on_chunk(part)
            return True

        clock = asyncio.get_running_loop().time
        sent = self._sent[index]
        while True:
            request = join.next_request()
            sent[request.request_id] = None
            self._busy_s[index] -= clock()
            try:
                with waiting("completions", on=server.name, who="rollouts"):
                    rest = await server.generate_segment(
                        request, on_chunk=on_chunk if is_streamed else None, on_interrupted=on_interrupted
                    )
            finally:
                del sent[request.request_id]
                self._busy_s[index] += clock()
            on_chunk(rest)
            if join.is_finished or charge.index != index or self._router.moves(charge):
                return

    def _near(self, request: SamplingRequest) -> int:
        after = request.after
        if after is None or not 0 <= after.engine < len(self.servers):
            return -1
        return after.engine if self.servers[after.engine].policy_version == after.version else -1


@dataclass(slots=True)
class Charge:
    index: int
    route_key: str


class Router:
    """Prefers the server with the request's prefix while it has a free slot, else the least loaded one.
    Pure.

    Invariant: a full server gets a request only if all are full. Only interrupted requests of overloaded
        servers move, so none oscillates.
    """

    def __init__(self, num_servers: int, slots: int) -> None:
        self.load = [0] * num_servers
        self.up = set(range(num_servers))
        self.slots = slots
        self._keys: dict[str, tuple[int, int]] = {}
        """(last server, requests in flight) by route key."""

    @contextlib.contextmanager
    def take(self, route_key: str, near: int = -1) -> Iterator[Charge]:
        """Charge a server until the block ends. "" is no key; a server must be up."""
        index, num_taken = self._keys.get(route_key, (near, 0))
        if index not in self.up or self.load[index] >= self.slots:
            index = self._least_loaded()
        charge = Charge(index, route_key)
        self.load[index] += 1
        if route_key:
            self._keys[route_key] = index, num_taken + 1
        try:
            yield charge
        finally:
            self.load[charge.index] -= 1
            if route_key:
                last, num_taken = self._keys.pop(route_key)
                if num_taken > 1:
                    self._keys[route_key] = last, num_taken - 1

    def moves(self, charge: Charge) -> bool:
        """Return whether an interrupted request must move, and move its charge."""
        index = charge.index
        is_full = self.load[index] > self.slots
        if index in self.up and not (is_full and any(self.load[other] < self.slots for other in self.up)):
            return False
        if self.up:
            self.load[index] -= 1
            charge.index = self._least_loaded()
            self.load[charge.index] += 1
            if charge.route_key:
                self._keys[charge.route_key] = charge.index, self._keys[charge.route_key][1]
        return True

    def _least_loaded(self) -> int:
        return min(sorted(self.up), key=lambda other: self.load[other])


class SegmentJoin:
    """Sampled tokens of one request and its next segment. Pure.

    A segment is any number of chunks and an end, or cut(). `partial`: tokens of an earlier process.
    `on_segment` gets all tokens after each interruption.

    Invariant: the spans cover every token once; there are at most request.max_tokens tokens unless
        `partial` has more.
    """

    def __init__(
        self,
        request: SamplingRequest,
        partial: Completion | None = None,
        on_segment: Callable[[Completion], None] | None = None,
    ) -> None:
        self.request = request
        self._on_segment = on_segment
        before = partial or Completion()
        self.token_ids = list(before.token_ids)
        self.logprobs = list(before.behaviour_logprobs)
        self.spans = list(before.version_spans)
        self.num_interruptions = before.num_interruptions + (partial is not None)
        self.top_logprobs: list[TopLogprobs] = [()] * len(self.token_ids)
        """Unknown for an earlier process."""
        self._routed = RoutedTokens(len(request.prompt_ids), before)
        self._num_kept = len(self.token_ids)
        self._has_stopped = False

    @property
    def num_left(self) -> int:
        """Remaining token budget; below 0 if a partial is longer."""
        return self.request.max_tokens - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self._has_stopped or self.num_left <= 0

    def next_request(self) -> SamplingRequest:
        """Continue after the last segment: the server draws by (seed, absolute position)."""
        request = self.request
        if not self.token_ids:
            return request
        prompt_ids = np.concatenate([request.prompt_ids, self.token_ids], dtype=np.int32, casting="unsafe")
        num_resumed = len(self.token_ids)
        return replace(request, prompt_ids=prompt_ids, num_resumed=num_resumed, max_tokens=self.num_left)

    def add(self, part: GenerateResponse, engine: int = -1) -> None:
        num_before = len(self.token_ids)
        for span in part.version_spans:
            last = self.spans[-1] if self.spans else None
            end = span.end + num_before
            if last is not None and (last.version, last.engine) == (span.version, engine):
                self.spans[-1] = replace(last, end=end)
            else:
                self.spans.append(VersionSpan(span.start + num_before, end, span.version, engine))
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.top_logprobs += part.top_logprobs
        self._routed.add(part.routing, self._num_kept, len(self.token_ids))  # chunks tell no experts
        self._has_stopped = part.finish_reason == "stop"
        if part.finish_reason == "abort":
            self._interrupted()

    def cut(self) -> None:
        """Keep the chunks of a segment whose rest is lost."""
        if len(self.token_ids) > self._num_kept:
            self._interrupted()

    def completion(self) -> Completion:
        return Completion(
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.spans),
            ("stop" if self._has_stopped else "length") if self.is_finished else None,
            self.num_interruptions,
            tuple(self.top_logprobs) if self.request.top_logprobs else (),
            self._routed.all(len(self.token_ids)),
        )

    def _interrupted(self) -> None:
        self.num_interruptions += 1
        if self._on_segment is not None and self.num_left > 0 and len(self.token_ids) > self._num_kept:
            self._on_segment(self.completion())
        self._num_kept = len(self.token_ids)


class RoutedTokens:
    """Experts that read a request's tokens, uint16 (little endian). Pure.

    The end of a segment covers the tokens read since the previous end; the first one the whole prompt.
    Known experts stay when tokens are read again; unknown ones are NO_EXPERT. `before`: of an earlier
    process.
    """

    def __init__(self, num_prompt: int, before: Completion = Completion()) -> None:
        self._num_prompt = num_prompt
        self._width = width = len(before.routing) // (num_prompt + len(before.token_ids))
        self._known = before.routing[: len(before.routing) - width]

    def add(self, routing: bytes, num_before: int, num_after: int) -> None:
        if not routing:
            return
        end = self._num_prompt + num_after - 1
        self._width = width = self._width or len(routing) // end
        first = len(self._known) // width
        assert len(routing) >= (end - first) * width, f"{len(routing)} bytes for tokens {first} to {end}"
        new = bytearray(routing[len(routing) - (end - first) * width :])
        lost_from = max(first, self._num_prompt - 1)
        num_lost = self._num_prompt + num_before - 1 - lost_from
        if num_lost > 0:
            start = (lost_from - first) * width
            new[start : start + num_lost * width] = _UNKNOWN * (num_lost * width)
        self._known += bytes(new)

    def all(self, num_sampled: int) -> bytes:
        """Return them for every token: NO_EXPERT for the unread last one, and what a lost server knew."""
        return self._known.ljust((self._num_prompt + num_sampled) * self._width, _UNKNOWN)
