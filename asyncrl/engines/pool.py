"""All engine servers as one: routing, abort and resume, failover."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.waits import Signal, clock, waiting
from asyncrl.engines.engine import EngineClient, raise_lost
from asyncrl.messages.records import CallSpan, Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import EMPTY, SegmentPart, Tokens

DRAIN_TIMEOUT_S = 30.0
MAX_CHUNKS = 32
"""Chunks kept apart: one of a single token takes some 800 bytes, joined ones 20 per
token.
"""

T = TypeVar("T")
OnLost = Callable[[EngineLost], None]
OnTokens = Callable[[Sequence[int]], None]
OnSpent = Callable[[int], None]


class EnginePool:
    """Samples on M servers: one logical request in, one joined completion out.

    Life: a request moves, with its tokens, if its server is lost, or is overloaded at
        an interruption while another has a free slot.
    Waits: generate sleeps in the server's answer; without a server, until up_nowait.
        The limit is rollout.timeout_s.
    Invariant: SegmentJoin keeps seed and positions, so a completion equals an
        uninterrupted one.

    `on_lost` gets every EngineLost and must take the server down; without it the error
    reaches the caller.
    """

    def __init__(
        self,
        servers: Sequence[EngineClient],
        *,
        slots: int,
        on_lost: OnLost | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self.slots = slots
        self._on_lost = on_lost or raise_lost
        self._index = {server.name: index for index, server in enumerate(servers)}
        self._router = Router(len(servers), slots)
        self._sent: list[dict[str, None]] = [{} for _ in servers]
        """Requests of each server, in order of arrival."""
        # A request in flight counts as minus its start, so busy_s() adds only the
        # number of open requests times now, and does not walk over them.
        self._busy_s = [0.0] * len(servers)
        self._changed = Signal()
        self._interrupted = self._tokens = 0

    @property
    def load(self) -> dict[str, int]:
        return {
            server.name: count
            for server, count in zip(self.servers, self._router.load, strict=True)
        }

    def busy_s(self, now_s: float) -> dict[str, float]:
        """Return each server's request-seconds up to `now_s`."""
        sums = zip(self.servers, self._busy_s, self._sent, strict=True)
        return {
            server.name: busy_s + len(sent) * now_s for server, busy_s, sent in sums
        }

    @property
    def down(self) -> tuple[str, ...]:
        return tuple(
            one.name
            for index, one in enumerate(self.servers)
            if index not in self._router.up
        )

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
        # A shallow copy: the router, the open requests and the signal stay common, so
        # both views charge the same slots, and a lost server is down for both.
        other = copy.copy(self)
        other._interrupted = other._tokens = 0
        return other

    def down_nowait(self, name: str) -> None:
        """Stop routing to this server. Its calls continue until the supervisor cuts them.
        Idempotent.
        """
        self._router.up.discard(self._index[name])

    def up_nowait(self, name: str) -> None:
        """Route to this server, which serves the newest announced version. Idempotent."""
        self._router.up.add(self._index[name])
        self._changed.notify()

    async def drain(self, name: str) -> None:
        """Stop routing to this server and move its requests."""
        # First, so that the aborted requests cannot come back to this server.
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
        """Sample one completion across pushes, aborts and lost servers. Raises
        RequestRefused (data) or EngineError.

        The calls of `on_tokens`, joined, are the completion's token_ids, `partial`
        included. `on_spent` gets each segment's number of tokens, even if the request
        fails later.
        """
        join = SegmentJoin(request, partial, on_segment)
        if on_tokens is not None and partial is not None and partial.token_ids:
            on_tokens(partial.token_ids)

        def on_part(new: Tokens) -> None:
            self._tokens += len(new)
            if on_spent is not None:
                on_spent(len(new))
            if on_tokens is not None and len(new):
                on_tokens(new.ids.tolist())

        # Each round is one stay on one server. A request comes back here with its
        # tokens when that server is lost, drained or overloaded.
        while not join.is_finished:
            await self._wait_up()
            with self._router.take(request.route_key, self._near(request)) as charge:
                try:
                    await self._sample_on(
                        charge, join, on_part, is_streamed=on_tokens is not None
                    )
                except EngineLost as lost:
                    # Streamed chunks of the lost segment were checked on arrival. They
                    # stay, so the next server continues after them; only unreported
                    # tokens are sampled again.
                    join.cut()
                    # It takes the server down before it returns. Otherwise this loop
                    # would choose the dead server again at once.
                    self._on_lost(lost)
        # Counted once, at the end. A partial completion brings the count of its
        # process, which ended before it could add it.
        self._interrupted += join.num_interruptions
        return join.completion()

    async def ask(self, what: str, call: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Return the result of `call` with the least loaded server that is up; with another
        one if that is lost. `what` names the wait. Raises what `call` raises.
        """
        while True:
            await self._wait_up()
            with self._router.take("") as charge:
                server = self.servers[charge.index]
                try:
                    with waiting(what, on=server.name, who="rollouts"):
                        return await call(server)
                except EngineLost as lost:
                    self._on_lost(lost)

    async def _wait_up(self) -> None:
        # Nothing is awaited after this check, so a server is up when take() chooses.
        if not self._router.up:
            with waiting("an engine that is up", on="supervisor"):
                await self._changed.wait_for(lambda: self._router.up)

    async def _sample_on(
        self,
        charge: Charge,
        join: SegmentJoin,
        on_part: Callable[[Tokens], None],
        *,
        is_streamed: bool,
    ) -> None:
        """Append segments to `join` until the request ends or moves. A token is in
        `join` before `on_part` gets it.
        """
        index = charge.index
        server = self.servers[index]

        def on_chunk(part: SegmentPart) -> None:
            on_part(join.add(part, index))

        # Called by the link's reader, before this task runs again. False gives up the
        # slot that the server still holds for this request; its tokens then arrive as
        # the answer.
        def on_interrupted(part: SegmentPart) -> bool:
            if self._router.moves(charge):
                return False
            on_chunk(part)
            return True

        sent = self._sent[index]
        while True:
            # The same request_id again is fine: the link numbers its requests, and
            # vLLM's client adds a random part.
            request = join.next_request()
            sent[request.request_id] = None
            self._busy_s[index] -= clock()
            try:
                with waiting("completions", on=server.name, who="rollouts"):
                    rest = await server.generate_segment(
                        request,
                        on_chunk=on_chunk if is_streamed else None,
                        on_interrupted=on_interrupted,
                    )
            finally:
                del sent[request.request_id]
                self._busy_s[index] += clock()
            on_chunk(rest)
            # vLLM cannot hold an interrupted request, so it asks here whether to move.
            # The changed index says that on_interrupted has decided already.
            if join.is_finished or charge.index != index or self._router.moves(charge):
                return

    def _near(self, request: SamplingRequest) -> int:
        # The previous turn's tokens are in that engine's cache only as long as it
        # serves the same weights: a push drops the rows that it keeps for next turns.
        after = request.after
        if after is None or not 0 <= after.engine < len(self.servers):
            return -1
        return (
            after.engine
            if self.servers[after.engine].policy_version == after.version
            else -1
        )


@dataclass(slots=True)
class Charge:
    """A request on server `index`, until the block ends."""

    router: Router
    index: int
    route_key: str

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.end(self)


class Router:
    """Prefers the server with the request's prefix while it has a free slot, else the
    least loaded one. Pure.

    Invariant: a full server gets a request only if all are full. Only interrupted
        requests of overloaded servers move, so none oscillates.
    """

    def __init__(self, num_servers: int, slots: int) -> None:
        self.load = [0] * num_servers
        self.up = set(range(num_servers))
        self.slots = slots
        self._keys: dict[str, tuple[int, int]] = {}
        """(last server, requests in flight) by route key."""

    def take(self, route_key: str, near: int = -1) -> Charge:
        """Charge a server until the block ends. "" is not a key; a server must be up."""
        # Siblings of a group, and the calls of an agent, share a key: the prompt is
        # read once, where the first of them went.
        index, num_taken = self._keys.get(route_key, (near, 0))
        if index not in self.up or self.load[index] >= self.slots:
            index = self._least_loaded()
        self.load[index] += 1
        if route_key:
            self._keys[route_key] = index, num_taken + 1
        return Charge(self, index, route_key)

    def end(self, charge: Charge) -> None:
        self.load[charge.index] -= 1
        if charge.route_key:
            # The key is forgotten with its last request. Otherwise the table would grow
            # by an entry per group of the run.
            last, num_taken = self._keys.pop(charge.route_key)
            if num_taken > 1:
                self._keys[charge.route_key] = last, num_taken - 1

    def moves(self, charge: Charge) -> bool:
        """Return whether an interrupted request must move, and move its charge.

        Example: slots=4, server 0 has 6 requests, server 1 has 3. The first interrupted
        request of server 0 moves (5, 4). The second stays: server 1 is full now.
        """
        index = charge.index
        # More than its slots: requests are waiting there, for instance because another
        # server was down. A server that is exactly full keeps its requests, since
        # elsewhere they would lose their cached prefix for nothing.
        is_full = self.load[index] > self.slots
        if index in self.up and not (
            is_full and any(self.load[other] < self.slots for other in self.up)
        ):
            return False
        if self.up:
            # The charge moves here and now. One frame interrupts many requests, and
            # each asks before any of them is sent again: without this, one free slot
            # elsewhere would attract all of them.
            self.load[index] -= 1
            charge.index = self._least_loaded()
            self.load[charge.index] += 1
            if charge.route_key:
                self._keys[charge.route_key] = (
                    charge.index,
                    self._keys[charge.route_key][1],
                )
        return True

    def _least_loaded(self) -> int:
        # Sorted, so that a tie always goes to the first server.
        return min(sorted(self.up), key=lambda other: self.load[other])


class SegmentJoin:
    """Sampled tokens of one request and its next segment. Pure.

    A segment is any number of chunks and an end, or cut(). `partial`: tokens of an
    earlier process. `on_segment` gets all tokens after each interruption.

    Invariant: the spans cover every sampled token once; there are at most
        request.max_tokens tokens unless `partial` has more.

    Example: the prompt 5 6 and max_tokens 3.
        >>> from asyncrl.messages.records import VersionSpan
        >>> request = SamplingRequest(request_id="g0/r0", prompt_ids=[5, 6], max_tokens=3)
        >>> join = SegmentJoin(request)
        >>> def sampled(ids, version, finish):
        ...     columns = {"behaviour_logprobs": np.full(len(ids), -1, np.float32)}
        ...     spans = (VersionSpan(0, len(ids), version),)
        ...     return SegmentPart(Tokens(np.array(ids, np.int32), spans, columns), finish)
        >>> _ = join.add(sampled([7], version=1, finish="abort"))   # new weights come
        >>> following = join.next_request()
        >>> following.prompt_ids.tolist(), following.num_resumed, following.max_tokens
        ([5, 6, 7], 1, 2)
        >>> _ = join.add(sampled([8, 9], version=2, finish="length"))
        >>> done = join.completion()
        >>> done.token_ids, done.finish_reason, [(span.start, span.version) for span in done.sampled.spans]
        ((7, 8, 9), 'length', [(0, 1), (1, 2)])
    """

    def __init__(
        self,
        request: SamplingRequest,
        partial: Completion | None = None,
        on_segment: Callable[[Completion], None] | None = None,
    ) -> None:
        self.request = request
        self._on_segment = on_segment
        self._prompt = Tokens(np.asarray(request.prompt_ids, np.int32))
        self._kept = EMPTY
        """Sampled tokens of ended segments."""
        self._read = EMPTY
        """The context of the newest tokens, as their engine has read it. The trainer must
        read it with the same experts. Older tokens belong to older versions.
        """
        if partial is not None:
            self._kept = partial.sampled
            self._read = partial.tokens.slice(0, partial.num_prompt)
        self._chunks = list[Tokens]()
        """The newest sampled tokens of the current segment, by `_engine`."""
        self._blocks = list[Tokens]()
        """Its earlier ones, MAX_CHUNKS chunks each."""
        self._engine = -1
        self.num_tokens = len(self._kept)
        self.num_interruptions = 0
        if partial is not None:
            # The end of the earlier process was an interruption too.
            self.num_interruptions = partial.num_interruptions + 1
        self._has_stopped = False

    @property
    def num_left(self) -> int:
        """Remaining token budget; below 0 if a partial is longer."""
        return self.request.max_tokens - self.num_tokens

    @property
    def is_finished(self) -> bool:
        return self._has_stopped or self.num_left <= 0

    def next_request(self) -> SamplingRequest:
        """Return the rest of the request, with the sampled tokens as part of the prompt.

        The server draws by (seed, absolute position), so the tokens that follow are the
        ones that an uninterrupted request would have got under the same weights.
        """
        request = self.request
        # The same prompt object: a frame encodes the prompt of a whole group once, by
        # identity.
        if not self.num_tokens:
            return request
        parts = [self._prompt, self._kept, *self._blocks, *self._chunks]
        prompt_ids = np.concatenate([part.ids for part in parts])
        return replace(
            request,
            prompt_ids=prompt_ids,
            num_resumed=self.num_tokens,
            max_tokens=self.num_left,
        )

    def add(self, part: SegmentPart, engine: int = -1) -> Tokens:
        """Return the new tokens."""
        new, num_context = part.sampled, part.tokens.num_context
        # A streamed answer comes token by token. Joining at every token would be
        # quadratic, and keeping 10,000 chunks would take 8 MB.
        if len(self._chunks) == MAX_CHUNKS:
            self._blocks.append(Tokens.join(self._chunks))
            self._chunks = []
        self._chunks.append(new)
        # All chunks of one segment come from one server, so the number is set on the
        # joined segment.
        self._engine = engine
        self.num_tokens += len(new)
        self._has_stopped = part.finish_reason == "stop"
        if num_context:
            self._read = part.tokens.slice(0, num_context)
        if part.finish_reason is not None:
            self._end_segment(is_interrupted=part.finish_reason == "abort")
        return new

    def cut(self) -> None:
        """Keep the chunks of a segment whose rest is lost."""
        if self._chunks:
            self._end_segment(is_interrupted=True)

    def completion(self) -> Completion:
        finish: Literal["stop", "length"] | None = None
        if self.is_finished:
            finish = "stop" if self._has_stopped else "length"
        tokens = Tokens.join([self._prompt, self._kept, *self._blocks, *self._chunks])
        tokens = tokens.read_again(self._read)
        num_prompt, grammar = len(self._prompt), self.request.grammar
        # The trainer must mask the same logits, or its logprobs would be of another
        # distribution. One span for all segments: the grammar continues over them.
        if grammar is not None:
            call = CallSpan(num_prompt, len(tokens), grammar)
            tokens = replace(tokens, calls=(call,) if self.num_tokens else ())
        return Completion(tokens, num_prompt, finish, self.num_interruptions)

    def _end_segment(self, *, is_interrupted: bool) -> None:
        num_before = len(self._kept)
        segment = Tokens.join([*self._blocks, *self._chunks]).sampled_by(self._engine)
        # The first segment is most often the only one.
        self._kept = Tokens.join([self._kept, segment]) if num_before else segment
        self._blocks, self._chunks = [], []
        if is_interrupted:
            self.num_interruptions += 1
            # The journal needs no copy of a segment without tokens. A completion at its
            # budget is recorded as a whole instead.
            if (
                self._on_segment is not None
                and self.num_left > 0
                and self.num_tokens > num_before
            ):
                self._on_segment(self.completion())
