"""What its client knows of one vLLM process: which weights it serves, who may be sent to it, what is in
flight, whether it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from asyncrl.engines.engine import CallCut, Lifeline, engine_error, given_up
from asyncrl.engines.vllm.segments import Segment
from asyncrl.engines.vllm.vllm_routes import Routes
from asyncrl.errors import EngineLost
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.base import EnginePart

START_LABEL = "default"
"""What vLLM calls the weights that it started with, until it is told otherwise."""
_MAX_LEFT = 1024
_HEALTH_LIMIT_S = 5.0
T = TypeVar("T")


class Process:
    """One vLLM process behind a server's name. The next one gets a Process of its own, so that nobody
    mistakes the two.

    Life:       whole: open, or closed while weights change or parts of it sleep -> given up by cut_nowait, or
    broken by break_nowait:
                what it holds is no version. Both are for good.
    Waits:      a segment sleeps in wait_open until it may be sent, and in wait_settled with an answer that
    came after a load began, until
                it is clear what the weights were. Every change wakes them; hold ends them all when the
                process is lost.
    Invariant:  a segment is sent only while the weights are those of `version`, under `label`. No token
    leaves under a label that is
                distrusted: version_of has no version for it.
    """

    def __init__(self, routes: Routes, version: int, mark: str = "") -> None:
        """`mark` stands in every label of ours: another run that pushes to the same server has another
        one.
        """
        caller = routes.caller
        self.name = caller.name
        self._mark = f"~{mark}" if mark else ""  # vLLM takes no @ in a salt
        self._caller, self._routes = caller, routes
        self._start_version = version
        self.version = self.offered_version = version
        self.label, self.digest = START_LABEL, ""
        self.model: str | None = None
        """Name of the adapter that serves; None is the base model."""
        self.asleep: set[EnginePart] = set()
        self.has_content = True
        """False from a sleep of the weights until they are restored or a commit has filled them."""
        self.vocab_size: int | None = None
        """Ids that the model knows: 0..vocab_size - 1. None until it is ready."""
        self.num_loads = self.last_kept_kv = 0
        self.is_committing, self.is_settled = False, True
        self.line = Lifeline()
        self._why_broken: tuple[str, str, str] | None = None
        self.is_given_up = False
        """Whoever supervises it decided that it is lost, and knows."""
        self._distrusted: set[str] = set()
        self._segments: dict[str, Segment] = {}
        self._left: dict[str, str] = {}
        """Wire ids by request id of segments whose caller was cancelled: vLLM may not have seen it yet."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        state = "lost" if self.line.is_cut else "open" if self.is_open else "closed"
        return f"<Process {self.name} v{self.version} {state}, {len(self._segments)} in flight>"

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self.is_settled and self.has_content and not self.is_committing and not self.asleep

    @property
    def sent(self) -> list[Segment]:
        """Segments that vLLM has, as far as one can know."""
        return [
            segment
            for segment in self._segments.values()
            if segment.is_sent and not segment.answered.is_set()
        ]

    @property
    def num_waiting(self) -> int:
        """Segments at the gate."""
        return sum(not segment.is_sent for segment in self._segments.values())

    def is_here(self, request_id: str) -> bool:
        """Whether a segment of this request is in flight."""
        return any(segment.request.request_id == request_id for segment in self._segments.values())

    def version_of(self, label: str) -> int | None:
        """The version that a label of ours means; None if what was sampled under it is not to be trusted, -1
        if it is none of ours.
        """
        if label in self._distrusted:
            return None
        text = label.removesuffix(self._mark).partition("#")[0]
        if label == START_LABEL:
            return self._start_version
        return int(text) if text.isdecimal() and label.endswith(self._mark) else -1

    def label_of(self, version: int, attempt: int = 0) -> str:
        """What the weights of a version are called at the server; each attempt to load them has a label of
        its own.
        """
        return f"{version}{f'#{attempt}' if attempt else ''}{self._mark}"

    # weights

    def begin_commit_nowait(self, version: int) -> None:
        """Close. end_commit_nowait follows."""
        self.is_committing = True
        self.offered_version = max(self.offered_version, version)
        self.change_nowait()

    def begin_load_nowait(self, *, keeps_kv: bool) -> None:
        """From here until confirm_nowait nobody knows what the weights are."""
        self.num_loads += 1
        self.is_settled = False
        if keeps_kv:
            self.last_kept_kv = self.num_loads

    def serve_nowait(self, version: int, label: str, digest: str, model: str | None) -> None:
        """It has these weights, as it says; confirm_nowait follows if it is true."""
        self.version, self.label, self.digest, self.model = version, label, digest, model

    def distrust_nowait(self, label: str) -> None:
        """Tokens that were sampled under it are no version's."""
        self._distrusted.add(label)

    def confirm_nowait(self) -> None:
        """The weights are those of `label`: it was checked."""
        self.is_settled = self.has_content = True
        self.change_nowait()

    def end_commit_nowait(self) -> None:
        """Open again, if the weights are known."""
        self.is_committing = False
        self.change_nowait()

    def is_certain(self, segment: Segment) -> bool:
        """Whether what comes of it now was sampled under the version that it was sent under."""
        return segment.num_loads == self.num_loads

    def is_stale(self, segment: Segment) -> bool:
        """Whether a load that kept the KV cache lies between its sending and now: if it began after that, it
        may have read old blocks.
        """
        return self.last_kept_kv > segment.num_loads

    async def wait_open(self, segment: Segment) -> None:
        """Return once it may be sent, marked as sent; or was aborted."""
        while not self.is_open and not segment.is_aborted:
            await self._changed.wait()
        segment.version, segment.label, segment.num_loads = self.version, self.label, self.num_loads
        segment.is_sent = not segment.is_aborted

    async def wait_settled(self, segment: Segment) -> None:
        """Return once it is known what the weights were under which the rest of it was sampled."""
        while not self.is_certain(segment) and not self.is_settled:
            await self._changed.wait()

    # segments

    @contextlib.contextmanager
    def holding(self, segment: Segment) -> Iterator[None]:
        """In flight until the block ends. Left by a cancellation, its wire id is kept for the abort that
        follows.
        """
        self._segments[segment.wire_id] = segment
        try:
            yield
        except asyncio.CancelledError:
            if segment.is_sent and not segment.answered.is_set():
                self._left[segment.request.request_id] = segment.wire_id
                while len(self._left) > _MAX_LEFT:  # nobody asked: the broken connection has long ended those
                    del self._left[next(iter(self._left))]
            raise
        finally:
            del self._segments[segment.wire_id]
            segment.answered.set()

    def abort_nowait(self, request_ids: list[str] | None) -> tuple[list[Segment], dict[str, str]]:
        """Mark these segments (None = all) as aborted; those at the gate end. Also wire ids of those that
        were left, by request id.
        """
        wanted = None if request_ids is None else set(request_ids)
        found = [one for one in self._segments.values() if wanted is None or one.request.request_id in wanted]
        for segment in found:
            segment.is_aborted = True
        left = {name: wire_id for name, wire_id in self._left.items() if wanted is None or name in wanted}
        for name in left:
            del self._left[name]
        self.change_nowait()
        return found, left

    # calls

    async def hold(self, path: str, call: Callable[[], Awaitable[T]]) -> T:
        """What the call returns. Raises EngineLost once the process is lost; what else a call raises
        passes.
        """
        try:
            return await self.line.hold(call)
        except CallCut:
            raise self._lost(path) from None

    async def ask(self, path: str, call: Callable[[], Awaitable[T]]) -> T:
        """The same, with every failure as an EngineError; an EngineLost if the engine behind the server is
        dead.
        """
        try:
            return await self.hold(path, call)
        except CallLost as lost:
            raise engine_error(self._caller, lost, is_told=self.is_given_up) from lost
        except CallRefused as refusal:
            raise (await self.death_of(refusal) or engine_error(self._caller, refusal)) from refusal

    async def death_of(self, refusal: CallRefused) -> EngineLost | None:
        """Of an engine whose server lives on for a moment, and answers 500 or above to what it can no longer
        do. None if it is well.

        Raises EngineLost if the process is given up meanwhile.
        """
        if refusal.status < 500:
            return None
        try:
            await self.hold("/health", lambda: self._routes.is_well(timeout_s=_HEALTH_LIMIT_S))
        except (CallLost, CallRefused) as dead:
            return EngineLost(
                self.name,
                f"answered {refusal.status} to {refusal.path} ({refusal.body.error}) and is not well: {dead}",
                rule="a run needs its engine servers",
                way_out=f"read {self.name}'s log for why its engine died, then start the run again.",
                is_told=self.is_given_up,
            )
        return None

    def break_nowait(self, what: str, *, rule: str, way_out: str) -> None:
        """What it holds is no version: all calls end, those to come too. Whoever supervises it learns of it
        from them. Idempotent.
        """
        if not self.line.is_cut:
            self._why_broken = what, rule, way_out
            self.line.cut_nowait()

    def cut_nowait(self) -> None:
        """Give it up: all calls end, those to come too. Idempotent."""
        self.is_given_up = True
        self.line.cut_nowait()

    def change_nowait(self) -> None:
        """Wake who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _lost(self, path: str) -> EngineLost:
        if self._why_broken is None:
            return given_up(self.name, path)
        what, rule, way_out = self._why_broken
        return EngineLost(self.name, what, rule=rule, way_out=way_out, is_told=self.is_given_up)
