"""Shared by all engine clients, and the client of our own engines: EngineServer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence

from pydantic import BaseModel

from asyncrl.base.errors import (
    AdapterMissing,
    EngineError,
    EngineLost,
    RequestRefused,
    WeightsLost,
)
from asyncrl.base.http import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.base.waits import clock
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.link import Link, OnChunk, OnInterrupted, OpenRequest, SegmentCheck
from asyncrl.messages import engine_api as api
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse

logger = logging.getLogger(__name__)
REFUSALS = (400, 404, 409, 422)
"""Statuses that fail a request, and say nothing about the server."""


class CallScope:
    """Ends all calls to a lost process; its successor gets a new CallScope. `versions`:
    last confirmed, by adapter.

    Life: whole -> cut: given up by the supervisor (disconnect_nowait), or broken
        (break_nowait).
    Waits: calls() sleeps in its block until a cut: a frozen process keeps its
        connections.
    """

    def __init__(self, caller: Caller, version: int = 0) -> None:
        self.caller = caller
        self.name = caller.name
        self.versions = {"": version}
        self.is_given_up = False
        self._why_cut = ""
        self._limits: set[asyncio.Timeout] = set()

    @property
    def version(self) -> int:
        return self.versions[""]

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """Raise EngineLost once the process is given up, EngineError for a failed call."""
        # A timeout without a deadline is a switch: break_nowait sets the deadline to
        # now, which ends the block in its own task. To cancel the task instead would
        # look like a cancellation by its caller.
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self.check_whole()
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                # A TimeoutError of the block itself, such as a shorter limit inside it.
                raise
            self.check_whole()
        except (CallLost, CallRefused) as failure:
            raise await self.error_of(failure) from failure

    def check_whole(self) -> None:
        """Raise EngineLost if the process is cut."""
        if self._why_cut:
            raise self.lost(self._why_cut) from None

    def disconnect_nowait(self) -> None:
        """Give the process up: the supervisor ends it, so no call may wait for it.
        Idempotent.
        """
        self.is_given_up = True
        self.break_nowait("was given up")

    def break_nowait(self, what: str) -> None:
        """Mark the process as broken; calls report it to the supervisor. Idempotent."""
        # The first reason wins. Giving up a process whose commit has failed must not
        # hide why.
        self._why_cut = self._why_cut or what
        while self._limits:
            self._limits.pop().reschedule(clock())

    def lost(self, what: str) -> EngineLost:
        way_out = f"read {self.name}'s log for why, then start the run again."
        lost = EngineLost(self.name, what, way_out=way_out)
        # The supervisor has cut the calls itself, so these errors are not a second loss
        # to report.
        lost.is_told = self.is_given_up
        return lost

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        where = f"({self.caller.url})"
        way_out = f"read {self.name}'s log."
        # An answer, even an invalid one, shows that the process lives: EngineError,
        # which ends the run instead of restarting a server that would answer the same
        # again.
        if isinstance(failure, CallRefused):
            said = failure.body
            what = f"{where} answered {failure.status} to {failure.path}: {said.error}"
            return EngineError(
                self.name, what, rule=said.rule, way_out=said.way_out or way_out
            )
        if isinstance(failure, CallGarbled):
            what = f"{where} gave an invalid answer to {failure.path}: {failure.why}"
            return EngineError(self.name, what, way_out=way_out)
        return self.lost(f"{where} gave no answer to {failure.path}: {failure.why}")


def raise_lost(lost: EngineLost) -> None:
    """React to a lost server if nobody supervises it."""
    raise lost


def refused(
    name: str, request: SamplingRequest | api.ScoreRequest, refusal: CallRefused
) -> RequestRefused:
    """Return the error of a request that the server cannot serve. It fails only this
    rollout: the server is well.
    """
    said = refusal.body
    if isinstance(request, api.ScoreRequest):
        call, sizes = "/score", f"{len(request.token_ids)} tokens"
    else:
        call = f"request {request.request_id}"
        sizes = (
            f"{len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}"
        )
    what = f"{name} answered {refusal.status} to {call} ({sizes}): {said.error}"
    way_out = said.way_out or f"ask for what the model can do; read {name}'s log."
    # `why` is for an agent's client, which does not know our request ids.
    why = said.error.replace(call, "this call")
    kind = AdapterMissing if refusal.status in (404, 409) else RequestRefused
    return kind(what, why=why, rule=said.rule, way_out=way_out)


@contextlib.contextmanager
def reading(manifest: ExportResponse) -> Iterator[None]:
    """Raise WeightsLost if an engine cannot read the trainer's memory: the trainer may
    have died with it.
    """
    try:
        yield
    except EngineError as error:
        if manifest.memory is None or isinstance(error, EngineLost):
            raise
        raise error.as_kind(WeightsLost, error.component) from error


class ServerClient(ABC):
    """Client of one server that a run starts, in any role.

    A supervisor calls disconnect_nowait() when a process is lost, reset_nowait() before
    the next one starts, and up_nowait() once that serves.
    """

    name: str

    def gauges(self) -> dict[str, float]:
        return {}

    @abstractmethod
    def disconnect_nowait(self) -> None:
        """Give the process up; all calls raise EngineLost. Idempotent."""

    @abstractmethod
    def reset_nowait(self) -> None:
        """Use a new process. Idempotent."""

    def up_nowait(self) -> None:  # noqa: B027  most clients need no notice
        """Send calls to the new process."""

    @abstractmethod
    async def health(self, *, timeout_s: float | None = 10.0) -> api.EngineHealth: ...

    async def ready(self, timeout_s: float) -> api.EngineHealth:
        """Wait until a new process serves. Raises ConfigError, EngineError or
        EngineLost.
        """
        health = await self.health(timeout_s=timeout_s)
        if health.note:
            logger.warning("%s: %s", self.name, health.note)
        return health


class EngineClient(ServerClient):
    """Client of an engine server: EngineServer (ours) or VllmServer.

    Calls raise EngineError, EngineLost if the process is gone or given up, and
    RequestRefused. `policy_version` is the last confirmed version. A new process has
    the initial weights.

    - generate_segment: sample until the end, the budget or an interruption. `on_chunk`
      gets tokens early; the answer is the rest. A server that can hold an interrupted
      request passes its tokens to `on_interrupted` and continues if that returns true.
      Cancelling the call ends the request.
    - score: return logprobs of a given text; only EngineServer can.
    - abort: end these requests (None: all) with their tokens; return the ids found.
    - prepare, load_chunk: load weights during serving, or a chunk into woken weights;
      return the digest.
    - open_adapter: make room for an adapter, which a push then brings. drop_adapter:
      forget it; its requests end as aborted. Both return the names of all.
    - sleep, wake: interrupt requests and free all memory; allocate these parts again.
      Idempotent. Requests wait until all parts are awake and a push is committed.

    `broadcast_group`: for transport nccl.
    """

    _scope: CallScope

    def __init__(
        self,
        caller: Caller,
        *,
        policy_version: int = 0,
        broadcast_group: BroadcastGroup | None = None,
        has_supports: bool = True,
    ) -> None:
        """`has_supports`: each token of a call with a cut comes with its support."""
        self._caller = caller
        self.name = caller.name
        self._start_version = policy_version
        self._group = broadcast_group
        self._has_supports = has_supports
        self._begin_nowait()

    def disconnect_nowait(self) -> None:
        self._scope.disconnect_nowait()
        # A broadcast waits for all engines that have prepared. A lost engine must
        # leave, or the others wait until their limit.
        self._leave_group_nowait()

    def reset_nowait(self) -> None:
        self.disconnect_nowait()
        self._begin_nowait()

    def _leave_group_nowait(self) -> None:
        if self._group is not None:
            self._group.leave_nowait(self.name)

    @property
    def policy_version(self) -> int:
        return self._scope.version

    @abstractmethod
    def _begin_nowait(self) -> None:
        """Set `_scope` and the rest of a new process's state."""

    @abstractmethod
    async def generate_segment(
        self,
        request: SamplingRequest,
        *,
        on_chunk: OnChunk = None,
        on_interrupted: OnInterrupted = None,
    ) -> SegmentPart: ...
    async def score(self, request: api.ScoreRequest) -> api.ScoreResponse:
        raise EngineError(
            self.name,
            "cannot score given texts",
            rule="embedded engines do",
            way_out="serve the model with the embedded engine.",
        )

    @abstractmethod
    async def abort(
        self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0
    ) -> list[str]: ...
    @abstractmethod
    async def prepare(self, manifest: ExportResponse) -> str: ...
    @abstractmethod
    async def commit(
        self, version: int, digest: str, interrupt: api.Interrupt, adapter: str = ""
    ) -> api.CommitResponse: ...
    @abstractmethod
    async def open_adapter(
        self, request: api.OpenAdapterRequest
    ) -> api.OpenAdapters: ...
    @abstractmethod
    async def drop_adapter(self, adapter: str) -> api.OpenAdapters: ...
    @abstractmethod
    async def sleep(self) -> api.TransferStats: ...
    @abstractmethod
    async def wake(self, parts: Sequence[api.EnginePart]) -> api.TransferStats: ...
    @abstractmethod
    async def load_chunk(self, chunk: ExportChunkResponse) -> str: ...


class EngineServer(EngineClient):
    """EngineClient of a server with asyncrl's routes, such as the embedded engine.

    Life: connected -> disconnect_nowait() -> reset_nowait(): a new process.
    Waits: calls sleep until the server answers, is gone or is given up. The caller sets
        limits.
    Invariant: no token is older than the version confirmed at sending (SegmentCheck).

    With a broadcast_group sampling continues until all members wait; a failed commit
    receives once more.
    """

    def _begin_nowait(self) -> None:
        self._scope = CallScope(self._caller, self._start_version)
        # Opened by the first request: at a reset the new process does not run yet.
        self._link: Link | None = None
        # Offered means sent, `version` is confirmed. Between the two, tokens of both
        # may arrive.
        self._offered = {"": self._start_version}
        """By adapter."""
        self._expected: dict[str, ExportResponse] = {}
        """Broadcasts by adapter."""

    def disconnect_nowait(self) -> None:
        super().disconnect_nowait()
        if self._link is not None:
            self._link.close_nowait()
            self._link = None

    async def generate_segment(
        self,
        request: SamplingRequest,
        *,
        on_chunk: OnChunk = None,
        on_interrupted: OnInterrupted = None,
    ) -> SegmentPart:
        # The scope of this process: after a reset `self._scope` belongs to its
        # successor, whose version does not apply to these tokens.
        scope = self._scope
        check = SegmentCheck(
            self.name,
            request,
            oldest=scope.versions.get(request.adapter, 0),
            has_supports=self._has_supports,
        )
        # calls() would set up a timeout per request.
        scope.check_whole()
        if self._link is None or self._link.is_broken:
            offered = self._offered
            self._link = Link(self._caller, lambda name: offered.get(name, 0))
        try:
            return await self._link.sample(
                OpenRequest(request, check, on_chunk, on_interrupted)
            )
        except (CallLost, CallRefused) as failure:
            if isinstance(failure, CallRefused) and failure.status in REFUSALS:
                raise refused(self.name, request, failure) from failure
            # Before error_of: a given-up process is reported as given up, not as the
            # closed connection that its calls see.
            scope.check_whole()
            raise await scope.error_of(failure) from failure

    async def score(self, request: api.ScoreRequest) -> api.ScoreResponse:
        scope = self._scope
        oldest = scope.versions.get(request.adapter, 0)
        async with scope.calls():
            try:
                answer = await self._caller.post(
                    "/score", request, api.ScoreResponse, timeout_s=None
                )
            except CallRefused as failure:
                if failure.status not in REFUSALS:
                    raise
                raise refused(self.name, request, failure) from failure
        if answer.version < oldest:
            raise EngineError(
                self.name,
                f"scored with policy_version {answer.version}, after it had confirmed {oldest}",
                rule="a text is scored with the newest weights that the engine has",
                way_out=f"read {self.name}'s log.",
            )
        return answer

    async def abort(
        self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0
    ) -> list[str]:
        if self._link is None:
            return []
        link, found = self._link, self._link.find(request_ids)
        for opened in found:
            link.abort_nowait(opened)
        if found:
            await asyncio.wait([opened.done for opened in found], timeout=timeout_s)
        return [opened.request.request_id for opened in found]

    async def health(self, *, timeout_s: float | None = 10.0) -> api.EngineHealth:
        async with self._scope.calls():
            return await self._caller.get(
                "/health", api.EngineHealth, timeout_s=timeout_s
            )

    async def prepare(self, manifest: ExportResponse) -> str:
        if self._group is not None and manifest.is_held:
            # A member that is already gone would make all other engines wait for it.
            self._scope.check_whole()
            self._group.expect_nowait(self.name, manifest.version, 1)
            self._expected[manifest.adapter] = manifest
            return manifest.digest  # the server compares it on arrival
        request = api.PrepareRequest.model_validate(manifest, from_attributes=True)
        with reading(manifest):
            return (await self.post("/prepare", request, api.Loaded)).digest

    async def commit(
        self, version: int, digest: str, interrupt: api.Interrupt, adapter: str = ""
    ) -> api.CommitResponse:
        # Transport nccl: only now is it known who takes part, since every engine has
        # prepared or has left.
        expected = self._expected.pop(adapter, None)
        if expected is not None:
            await self._receive(expected)
        # Before the call: the link is another connection, and brings tokens of the new
        # version before /commit is answered. SegmentCheck would refuse them as too new.
        self._offered[adapter] = max(self._offered.get(adapter, 0), version)
        request = api.CommitRequest(
            adapter=adapter, version=version, digest=digest, interrupt=interrupt
        )
        answer = await self.post("/commit", request, api.CommitResponse)
        # Only after the answer: from now on no request may return an older token. Set
        # before, it would refuse tokens that were sampled before the swap.
        self._scope.versions[adapter] = version
        return answer

    async def open_adapter(self, request: api.OpenAdapterRequest) -> api.OpenAdapters:
        answer = await self.post("/open_adapter", request, api.OpenAdapters)
        # An adapter that was dropped and opened again has no version.
        self._scope.versions.pop(request.adapter, None)
        return answer

    async def drop_adapter(self, adapter: str) -> api.OpenAdapters:
        request = api.DropAdapterRequest(adapter=adapter)
        return await self.post("/drop_adapter", request, api.OpenAdapters)

    async def sleep(self) -> api.TransferStats:
        return await self.post("/sleep", None, api.TransferStats)

    async def wake(self, parts: Sequence[api.EnginePart]) -> api.TransferStats:
        return await self.post(
            "/wake", api.WakeRequest(parts=list(parts)), api.TransferStats
        )

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        request = api.LoadChunkRequest.model_validate(chunk, from_attributes=True)
        return (await self.post("/load_chunk", request, api.Loaded)).digest

    async def _receive(self, manifest: ExportResponse) -> None:
        """Have the server stage the trainer's broadcast. Raises EngineLost after two
        failures, and WeightsLost if the trainer is lost.
        """
        assert self._group is not None, "weights are expected only from a broadcast"
        announced = manifest.model_dump(
            include={"adapter", "version", "digest", "num_tensors", "num_bytes"}
        )

        async def take(member: api.GroupMember) -> None:
            await self.post(
                "/prepare",
                api.PrepareRequest(path="", member=member, **announced),
                api.Loaded,
            )

        for is_last in (False, True):
            try:
                # A broadcast ends for all members when one fails. This engine still
                # samples from its old weights and has lost nothing, so it is asked once
                # more.
                return await self._group.receive(self.name, manifest.version, take)
            except EngineLost:
                raise
            except EngineError as error:
                if is_last:
                    self._scope.break_nowait(error.fault)
                    raise self._scope.lost(error.fault) from error
                # The failed round has used up the announcement.
                self._group.expect_nowait(self.name, manifest.version, 1)

    async def post(
        self, path: str, body: BaseModel | None, answer: type[Answer]
    ) -> Answer:
        """POST a message to the process of now. Raises EngineError or EngineLost."""
        async with self._scope.calls():
            return await self._caller.post(path, body, answer, timeout_s=None)
