"""Client end of the link to an engine server: frames on one WebSocket, and the check of
sampled tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import EngineError
from asyncrl.base.http import Caller, CallGarbled, CallLost, CallRefused, FrameSocket
from asyncrl.base.waits import Signal, loop_iteration
from asyncrl.messages import codec
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import BEHAVIOUR, SUPPORT, Ragged, SegmentPart, Tokens

OnChunk = Callable[[SegmentPart], None] | None
OnInterrupted = Callable[[SegmentPart], bool] | None
PATH = "/link"
FRAME_REQUESTS = 256
"""Maximum requests per frame; the event loop runs other tasks between frames."""
ITERATION_ROWS = 32
"""Maximum rows, over all links, per iteration of the event loop."""


LOGPROB_SLACK = 1e-3
"""In nats."""
_NO_LOGPROBS = np.zeros(0, np.float32)
_RULE = "ids are 0 or more, logprobs finite and at most 0, spans cover every token once, under versions from"


def are_sampled(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> bool:
    """Return whether ids [N] are not negative, and logprobs [N] are finite and at most
    0.
    """
    if not len(ids):
        return True
    # NaN passes no comparison. The bare ufuncs take half as long as the methods, which
    # matters for one token.
    largest, least = np.maximum.reduce(logprobs), np.minimum.reduce(logprobs)
    return bool(
        np.minimum.reduce(ids) >= 0 and largest <= LOGPROB_SLACK and least > -np.inf
    )


class SegmentCheck:
    """Checks every chunk of a segment, and its end, before any other code sees them.
    Raises EngineError for invalid answers of server `name` to `request`.

    Invariant: versions never decrease from `oldest` (confirmed at sending) to `newest`
        (offered last). A completion's last token comes with its finish_reason, so a
        request can continue after a lost server.
    """

    def __init__(
        self,
        name: str,
        request: SamplingRequest,
        *,
        oldest: int,
        has_supports: bool = True,
    ) -> None:
        """`has_supports`: of a request with a cut, each token has one."""
        self._name = name
        self._request = request
        self._has_supports = request.is_cut and has_supports
        self._num_accepted = 0
        self._version = oldest

    def accept(
        self, part: SegmentPart, *, newest: int, has_fine_values: bool = False
    ) -> None:
        """Check the part's values too, unless its whole frame `has_fine_values`."""
        request = self._request
        num_known = len(request.prompt_ids) + self._num_accepted
        num_context = part.tokens.num_context
        # An answer with experts repeats the prompt, and all tokens that were accepted
        # before. Any other context is checked as if it were new, and fails: a resumed
        # completion would get a token twice, or lose one.
        if num_context == num_known and num_context <= len(part.tokens):
            new = part.sampled
        else:
            new, num_context = part.tokens, 0
        self._num_accepted += len(new)
        oldest = self._version
        if fault := self._fault(
            new, part.finish_reason, newest, has_fine_values=has_fine_values
        ):
            what = f"answered request {request.request_id} of {request.max_tokens} tokens with {fault}"
            rule = f"{_RULE} {oldest} (confirmed before) to {newest} (offered last), in order"
            raise EngineError(
                self._name, what, rule=rule, way_out=f"read {self._name}'s log."
            )

    def _fault(
        self, new: Tokens, finish: str | None, newest: int, *, has_fine_values: bool
    ) -> str:
        num_new = len(new.ids)
        num_left = self._request.max_tokens - self._num_accepted
        # The last token of the budget must come with its finish_reason. If it came in a
        # chunk and the server died then, a stop would be recorded as a cut at the
        # limit.
        if num_left < 0 or (finish is None and not num_left):
            return f"{self._num_accepted} tokens and finish_reason {finish}"
        if (finish == "length" and num_left) or (finish == "stop" and not num_new):
            return f"finish_reason {finish} after {self._num_accepted} tokens"
        logprobs: Any = new.columns.get(BEHAVIOUR, _NO_LOGPROBS)
        if len(logprobs) != num_new or not (
            has_fine_values or are_sampled(new.ids, logprobs)
        ):
            pairs = zip(new.ids.tolist(), logprobs.tolist(), strict=False)
            bad = [
                pair
                for pair in pairs
                if pair[0] < 0 or not -math.inf < pair[1] <= LOGPROB_SLACK
            ]
            return f"{len(logprobs)} logprobs for {num_new} tokens, invalid (id, logprob) {bad[:3]}"
        if self._has_supports and num_new and (fault := _support_fault(new)):
            return fault
        end = 0
        for span in new.spans:
            if (
                span.start != end
                or span.end <= end
                or not self._version <= span.version <= newest
            ):
                break
            end = span.end
            # Kept across chunks: versions never decrease over the whole segment.
            self._version = span.version
        return "" if end == num_new else f"spans {new.spans[:6]} over {num_new} tokens"


def _support_fault(new: Tokens) -> str:
    """Return the fault of the supports of sampled tokens; an empty one is the whole
    vocabulary. Without its support a token would be trained on a wrong ratio, and no
    metric would show it.
    """
    support = new.columns.get(SUPPORT)
    if not isinstance(support, Ragged):
        return f"{len(new.ids)} tokens without supports: top_p, top_k or min_p cut this request"
    owners = np.repeat(np.arange(len(new.ids)), support.sizes)
    has_own = support.sizes == 0
    has_own[owners[support.values == new.ids[owners]]] = True
    if has_own.all():
        return ""
    first = int(np.argmin(has_own))
    return f"token {new.ids[first]}, which is not among the {support.sizes[first]} ids of its support"


@dataclass(eq=False, slots=True)
class OpenRequest:
    request: SamplingRequest
    check: SegmentCheck
    on_chunk: OnChunk = None
    on_interrupted: OnInterrupted = None
    number: int = -1
    done: asyncio.Future[SegmentPart] = field(default_factory=lambda: asyncio.Future())


class Link:
    """Link to one engine server.

    Life: opening -> open -> broken (server gone, or close_nowait()).
    Waits: sample() sleeps until its answer comes or the link breaks.
    Invariant: requests of one event-loop iteration share a frame, in order.

    `newest` returns the policy_version of an adapter that was offered last.
    """

    def __init__(self, caller: Caller, newest: Callable[[str], int]) -> None:
        self._caller, self._newest = caller, newest
        self._numbers = itertools.count()
        self._open: dict[int, OpenRequest] = {}
        self._asked: list[OpenRequest] = []
        self._resumed: list[int] = []
        self._aborted: list[int] = []
        # Notified, not sent at once: requests, resumes and aborts of one loop iteration
        # become one frame of each kind.
        self._news = Signal()
        self._broken: Exception | None = None
        self._running = asyncio.ensure_future(self._run())

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def find(self, request_ids: list[str] | None) -> list[OpenRequest]:
        wanted = None if request_ids is None else set(request_ids)
        return [
            one
            for one in self._open.values()
            if wanted is None or one.request.request_id in wanted
        ]

    async def sample(self, opened: OpenRequest) -> SegmentPart:
        """Send a request and return the end of its answer; chunks go to its on_chunk.
        Raises CallRefused, CallLost or EngineError.
        """
        if self._broken is not None:
            raise self._broken
        opened.number = next(self._numbers)
        self._open[opened.number] = opened
        self._asked.append(opened)
        self._news.notify()
        try:
            return await opened.done
        finally:
            # Still open, so the caller was cancelled. Without an abort the server would
            # keep sampling for nobody.
            if self._open.pop(opened.number, None) is not None:
                self._aborted.append(opened.number)
                self._news.notify()

    def abort_nowait(self, opened: OpenRequest) -> None:
        self._aborted.append(opened.number)
        self._news.notify()

    def close_nowait(self) -> None:
        """Open requests raise CallLost."""
        # The cancelled task closes the socket, but reports nothing: callers are woken
        # here.
        self._running.cancel()
        self._break(CallLost(self._caller.name, PATH, "the link was closed"))

    async def _run(self) -> None:
        socket = writer = None
        try:
            socket = await self._caller.connect(PATH)
            writer = asyncio.ensure_future(self._write(socket))
            await self._read(socket)
        # Not a cancellation: close_nowait and _write have set the reason already.
        except Exception as error:
            self._break(error)
        finally:
            if writer is not None:
                writer.cancel()
            if socket is not None:
                await socket.close()

    def _break(self, why: Exception) -> None:
        # Later errors are consequences of the first.
        self._broken = self._broken or why
        while self._open:
            _, opened = self._open.popitem()
            if not opened.done.done():
                opened.done.set_exception(self._broken)

    async def _write(self, socket: FrameSocket) -> None:
        try:
            while True:
                await self._news.wait_for(
                    lambda: self._asked or self._resumed or self._aborted
                )
                # Swapped before the first await below: what arrives during a send
                # belongs to the next round.
                asked, self._asked = self._asked, []
                # Taken together, so that resumes and aborts follow their requests.
                numbers_of = {
                    "resume": self._resumed,
                    "abort": [*dict.fromkeys(self._aborted)],
                }
                self._resumed, self._aborted = [], []
                for first in range(0, len(asked), FRAME_REQUESTS):
                    # A burst of requests, as after a restart, must not stop the loop
                    # while it is encoded.
                    if first:
                        await asyncio.sleep(0)
                    batch = asked[first : first + FRAME_REQUESTS]
                    rows = [
                        codec.Asked(one.number, one.request, one.on_chunk is not None)
                        for one in batch
                    ]
                    await socket.send(codec.submit_frame(rows))
                for kind, numbers in numbers_of.items():
                    if numbers:
                        await socket.send(codec.numbers_frame(kind, numbers))
        # Also an error while encoding. The reader would otherwise wait for answers to
        # requests that were never sent.
        except Exception as error:
            self._break(error)
            self._running.cancel()

    async def _read(self, socket: FrameSocket) -> None:
        while True:
            data = await socket.receive()
            try:
                frame = codec.read_frame(data)
                if frame.kind == "sampled":
                    tokens = Tokens.from_arrays(frame.arrays)
                    # Once for all rows: per row it would take as long as all other
                    # checks.
                    has_fine_values = are_sampled(tokens.ids, tokens.behaviour_logprobs)
                    rows = iter(codec.read_sampled(frame, tokens))
                    # Each row may wake a rollout. A block ends the iteration, so timers
                    # and other sockets are served between 32 rows.
                    while block := [*itertools.islice(rows, ITERATION_ROWS)]:
                        async with loop_iteration():
                            for row in block:
                                self._take(row, has_fine_values=has_fine_values)
                elif frame.kind == "refused":
                    self._refused(frame)
                else:
                    raise ValueError(
                        f"unexpected frame of kind {frame.kind} with {sorted(frame.arrays)}"
                    )
            except (ValueError, LookupError, TypeError) as error:
                raise CallGarbled(self._caller.name, PATH, str(error)) from error

    def _take(self, row: codec.Sampled, *, has_fine_values: bool) -> None:
        opened = self._open.get(row.number)
        # Its caller has left. The abort is on its way, and these tokens were sent
        # before it arrived.
        if opened is None:
            return
        try:
            part = row.part
            newest = self._newest(opened.request.adapter)
            opened.check.accept(part, newest=newest, has_fine_values=has_fine_values)
            if part.finish_reason is None:
                assert opened.on_chunk is not None, "only streamed requests get chunks"
                opened.on_chunk(part)
            elif row.then != "interrupted":
                self._end(opened, part)
            elif opened.on_interrupted is not None and opened.on_interrupted(part):
                # Resumes of all rows of this block leave as one frame, and the server
                # continues them in their slots.
                self._resumed.append(row.number)
                self._news.notify()
            else:
                # Ends the server's hold on the slot. The request goes elsewhere with
                # the tokens that it has got.
                self.abort_nowait(opened)
                self._end(opened, part)
        # Of the check or of a callback: it concerns this request only, so the reader
        # continues.
        except Exception as error:
            self.abort_nowait(opened)
            self._end(opened, error)

    def _end(self, opened: OpenRequest, answer: SegmentPart | Exception) -> None:
        del self._open[opened.number]
        if opened.done.done():
            return
        if isinstance(answer, SegmentPart):
            opened.done.set_result(answer)
        else:
            opened.done.set_exception(answer)

    def _refused(self, frame: codec.Frame) -> None:
        status, body = codec.read_refused(frame)
        for number in frame.numbers:
            if (opened := self._open.get(number)) is not None:
                self._end(opened, CallRefused(self._caller.name, PATH, status, body))
