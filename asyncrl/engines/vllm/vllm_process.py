"""The client's state of one vLLM process: which weights it serves, which requests may be sent, which are in
flight, whether it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.engines.vllm.vllm_routes import Routes, Said
from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import EnginePart
from asyncrl.messages.calls import GenerateRequest

START_LABEL = "default"
"""vLLM's label for the weights that it started with."""
_ASK_AGAIN_S = 0.1
"""An abort that overtook its request finds nothing: it is sent again until the request has ended."""
_HEALTH_LIMIT_S = 5.0


@dataclass(eq=False)
class Segment:
    """One segment from its arrival to its answer.

    Life: made -> at the gate -> sent, under a version and its label -> answered, however the call ended.
        `num_loads`: how often weights had been loaded when it was sent.
    """

    request: GenerateRequest
    wire_id: str
    is_streamed: bool
    version: int = 0
    label: str = ""
    num_loads: int = 0
    is_sent: bool = False
    is_aborted: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class VllmProcess(Routes):
    """One vLLM process behind a server's name.

    Life: open, or closed while weights change or parts of it sleep -> cut, as any Lifeline. It is broken when
        what it holds is no version.
    Waits: a segment sleeps in wait_open until it may be sent, and in wait_settled with an answer that came
        after a load began, until it is clear what the weights were. change_nowait wakes them.
    Invariant: a segment is sent only while the weights are those of `version`, under `label`. No token leaves
        under a label that is distrusted: version_of has no version for it.
    """

    def __init__(self, caller: Caller, version: int, mark: str = "") -> None:
        """`mark` is in every label of this run: another run that pushes to the same server has another
        mark.
        """
        super().__init__(caller)
        self._mark = f"~{mark}" if mark else ""  # vLLM takes no @ in a salt
        self.version = self.offered_version = self._start_version = version
        self.label, self.digest = START_LABEL, ""
        self.model: str | None = None
        """Name of the adapter that serves; None is the base model."""
        self.asleep: set[EnginePart] = set()
        self.has_content = True
        """False from a sleep of the weights until they are restored or a commit has filled them."""
        self.vocab_size: int | None = None
        """Ids that the model knows: 0..vocab_size - 1. None until it is ready."""
        self.is_committing, self.is_settled = False, True
        self.distrusted: set[str] = set()
        """Labels of loads whose canary failed."""
        self._num_loads = self._last_kept_kv = 0
        self._segments: dict[str, Segment] = {}
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self.is_settled and self.has_content and not self.is_committing and not self.asleep

    @property
    def sent(self) -> list[Segment]:
        """Segments that were sent to vLLM and not answered."""
        return [one for one in self._segments.values() if one.is_sent and not one.answered.is_set()]

    @property
    def num_waiting(self) -> int:
        """Segments at the gate."""
        return sum(not segment.is_sent for segment in self._segments.values())

    def is_here(self, request_id: str) -> bool:
        """Whether a segment of this request is in flight."""
        return any(segment.request.request_id == request_id for segment in self._segments.values())

    def label_of(self, version: int, attempt: int = 0) -> str:
        """What the weights of a version are called at the server; each attempt to load them has a label of
        its own.
        """
        return f"{version}{f'#{attempt}' if attempt else ''}{self._mark}"

    def version_of(self, label: str) -> int | None:
        """The version that a label means; None if what was sampled under it is not to be trusted, -1 if it is
        none of ours.
        """
        if label in self.distrusted:
            return None
        if label == START_LABEL:
            return self._start_version
        text = label.removesuffix(self._mark).partition("#")[0]
        return int(text) if text.isdecimal() and label.endswith(self._mark) else -1

    def change_nowait(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    def begin_load_nowait(self, version: int, *, keeps_kv: bool = False) -> None:
        """From here until confirm_nowait it is unknown which weights the process has."""
        self._num_loads += 1
        self.is_settled = False
        self.offered_version = max(self.offered_version, version)
        if keeps_kv:
            self._last_kept_kv = self._num_loads

    def confirm_nowait(self) -> None:
        """The weights are those of `label`, as a check has confirmed."""
        self.is_settled = self.has_content = True
        self.change_nowait()

    def is_certain(self, segment: Segment) -> bool:
        """Whether its tokens are sampled under the version with which it was sent."""
        return segment.num_loads == self._num_loads

    def is_stale(self, segment: Segment) -> bool:
        """Whether a load that kept the KV cache lies between its sending and now: if it began after that, it
        may have read old blocks.
        """
        return self._last_kept_kv > segment.num_loads

    async def wait_open(self, segment: Segment) -> None:
        """Return once it may be sent, marked as sent; or was aborted."""
        while not self.is_open and not segment.is_aborted:
            await self._changed.wait()
        segment.version, segment.label, segment.num_loads = self.version, self.label, self._num_loads
        segment.is_sent = not segment.is_aborted

    async def wait_settled(self, segment: Segment) -> None:
        """Return once it is known under which weights the rest of it was sampled."""
        while not self.is_certain(segment) and not self.is_settled:
            await self._changed.wait()

    @contextlib.contextmanager
    def holding(self, segment: Segment) -> Iterator[None]:
        """In flight until the block ends. If it is cancelled, the broken connection ends it in vLLM."""
        self._segments[segment.wire_id] = segment
        try:
            yield
        finally:
            del self._segments[segment.wire_id]
            segment.answered.set()

    def abort_nowait(self, request_ids: list[str] | None) -> list[Segment]:
        """These segments (None = all), marked as aborted; those at the gate end. end() ends the others."""
        found = [
            segment
            for segment in self._segments.values()
            if request_ids is None or segment.request.request_id in request_ids
        ]
        for segment in found:
            segment.is_aborted = True
        self.change_nowait()
        return found

    async def end(self, segments: Sequence[Segment]) -> None:
        """Have these end with what they have; returns once vLLM has answered all of them."""
        while wire_ids := [segment.wire_id for segment in segments if not segment.answered.is_set()]:
            await self.abort(wire_ids)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    for segment in segments:
                        await segment.answered.wait()

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        """EngineLost too if the engine is dead: its server lives on a moment, and answers 500 or above."""
        if isinstance(failure, CallRefused) and failure.status >= 500:
            try:
                await self.get("/health", Said, _HEALTH_LIMIT_S)
            except (CallLost, CallRefused) as dead:
                said = f"answered {failure.status} to {failure.path} ({failure.body.error})"
                return EngineLost(
                    self.name,
                    f"{said} and is not well: {dead}",
                    rule="a run needs its engine servers",
                    way_out=f"read {self.name}'s log for why its engine died, then start the run again.",
                    is_told=self.is_given_up,
                )
        return await super().error_of(failure)
