"""Shared by all engine clients, and the clients of our own servers: EngineServer and Teacher."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from pydantic import BaseModel

from asyncrl.base.errors import EngineError, EngineLost, RequestRefused, WeightsLost
from asyncrl.base.http import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.base.waits import waiting
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.link import LOGPROB_SLACK, Link, OnChunk, OnInterrupted, OpenRequest, SegmentCheck
from asyncrl.messages import engine_api as api
from asyncrl.messages.records import Rollout, Trajectory
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import TEACHER, SegmentPart
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse


class CallScope:
    """Ends all calls to a lost process; its successor gets a new CallScope. `version`: last confirmed.

    Life: whole -> cut: given up by the supervisor (disconnect_nowait), or broken (break_nowait).
    Waits: calls() sleeps in its block until a cut: a frozen process keeps its connections.
    """

    def __init__(self, caller: Caller, version: int = 0) -> None:
        self.caller = caller
        self.name = caller.name
        self.version = version
        self.is_given_up = False
        self._why_cut = ""
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """Raise EngineLost once the process is given up, EngineError for a failed call."""
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
                raise
            self.check_whole()
        except (CallLost, CallRefused) as failure:
            raise await self.error_of(failure) from failure

    def check_whole(self) -> None:
        """Raise EngineLost if the process is cut."""
        if self._why_cut:
            raise self.lost(self._why_cut) from None

    def disconnect_nowait(self) -> None:
        """Idempotent."""
        self.is_given_up = True
        self.break_nowait("was given up")

    def break_nowait(self, what: str) -> None:
        """Mark the process as broken; calls report it to the supervisor. Idempotent."""
        self._why_cut = self._why_cut or what
        while self._limits:
            self._limits.pop().reschedule(asyncio.get_running_loop().time())

    def lost(self, what: str) -> EngineLost:
        way_out = f"read {self.name}'s log for why, then start the run again."
        lost = EngineLost(self.name, what, way_out=way_out)
        lost.is_told = self.is_given_up
        return lost

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        where = f"({self.caller.url})"
        way_out = f"read {self.name}'s log."
        if isinstance(failure, CallRefused):
            said = failure.body
            what = f"{where} answered {failure.status} to {failure.path}: {said.error}"
            return EngineError(self.name, what, rule=said.rule, way_out=said.way_out or way_out)
        if isinstance(failure, CallGarbled):
            what = f"{where} gave an invalid answer to {failure.path}: {failure.why}"
            return EngineError(self.name, what, way_out=way_out)
        return self.lost(f"{where} gave no answer to {failure.path}: {failure.why}")


def refused(name: str, request: SamplingRequest, refusal: CallRefused) -> RequestRefused:
    said, sizes = refusal.body, f"{len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}"
    what = f"{name} answered {refusal.status} to request {request.request_id} ({sizes}): {said.error}"
    way_out = said.way_out or f"ask for what the model can do; read {name}'s log."
    why = said.error.replace(f"request {request.request_id}", "this call")
    return RequestRefused(what, why=why, rule=said.rule, way_out=way_out)


@contextlib.contextmanager
def reading(manifest: ExportResponse) -> Iterator[None]:
    """Raise WeightsLost if an engine cannot read the trainer's memory: the trainer may have died with it."""
    try:
        yield
    except EngineError as error:
        if manifest.memory is None or isinstance(error, EngineLost):
            raise
        raise WeightsLost(error.room, error.fault, rule=error.rule, way_out=error.way_out) from error


class EngineClient(Protocol):
    """Client of an engine server: EngineServer (ours) or VllmServer.

    Calls raise EngineError, EngineLost if the process is gone or given up, and RequestRefused.
    `policy_version` is the last confirmed version.

    - disconnect_nowait: give the process up; all calls raise EngineLost. Idempotent.
    - reset_nowait: use a new process with the initial weights. Idempotent.
    - generate_segment: sample until the end, the budget or an interruption. `on_chunk` gets tokens early;
      the answer is the rest. A server that can hold an interrupted request passes its tokens to
      `on_interrupted` and continues if that returns true. Cancelling the call ends the request.
    - abort: end these requests (None: all) with their tokens; return the ids found.
    - prepare, load_chunk: load weights during serving, or a chunk into woken weights; return the digest.
    - sleep, wake: interrupt requests and free all memory; allocate these parts again. Idempotent. Requests
      wait until all parts are awake and a push is committed.

    `broadcast_group`: for transport nccl.
    """

    name: str
    _caller: Caller
    _group: BroadcastGroup | None
    _line: CallScope
    _start_version: int

    def __init__(
        self, caller: Caller, *, policy_version: int = 0, broadcast_group: BroadcastGroup | None = None
    ) -> None:
        self._caller = caller
        self.name = caller.name
        self._start_version = policy_version
        self._group = broadcast_group
        self._begin_nowait()

    def disconnect_nowait(self) -> None:
        self._line.disconnect_nowait()
        self._leave_group_nowait()

    def reset_nowait(self) -> None:
        self.disconnect_nowait()
        self._begin_nowait()

    def _leave_group_nowait(self) -> None:
        if self._group is not None:
            self._group.leave_nowait(self.name)

    @property
    def policy_version(self) -> int:
        return self._line.version

    def _begin_nowait(self) -> None: ...
    async def generate_segment(
        self, request: SamplingRequest, *, on_chunk: OnChunk = None, on_interrupted: OnInterrupted = None
    ) -> SegmentPart: ...
    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]: ...
    async def health(self, *, timeout_s: float | None = 10.0) -> api.EngineHealth: ...
    async def prepare(self, manifest: ExportResponse) -> str: ...
    async def commit(self, version: int, digest: str, interrupt: api.Interrupt) -> api.CommitResponse: ...
    async def sleep(self) -> api.TransferStats: ...
    async def wake(self, parts: Sequence[api.EnginePart]) -> api.TransferStats: ...
    async def load_chunk(self, chunk: ExportChunkResponse) -> str: ...


class EngineServer(EngineClient):
    """EngineClient of an embedded or simulated engine.

    Life: connected -> disconnect_nowait() -> reset_nowait(): a new process.
    Waits: calls sleep until the server answers, is gone or is given up. The caller sets limits.
    Invariant: no token is older than the version confirmed at sending (SegmentCheck).

    With a broadcast_group sampling continues until all members wait; a failed commit receives once more.
    """

    def _begin_nowait(self) -> None:
        self._line = CallScope(self._caller, self._start_version)
        self._link: Link | None = None
        self._offered_version = self._start_version
        self._expected: ExportResponse | None = None

    def disconnect_nowait(self) -> None:
        super().disconnect_nowait()
        if self._link is not None:
            self._link.close_nowait()
            self._link = None

    async def generate_segment(
        self, request: SamplingRequest, *, on_chunk: OnChunk = None, on_interrupted: OnInterrupted = None
    ) -> SegmentPart:
        line = self._line
        check = SegmentCheck(self.name, request, oldest=line.version)
        # calls() would set up a timeout per request.
        line.check_whole()
        if self._link is None or self._link.is_broken:
            self._link = Link(self._caller, lambda: self._offered_version)
        try:
            return await self._link.sample(OpenRequest(request, check, on_chunk, on_interrupted))
        except (CallLost, CallRefused) as failure:
            if isinstance(failure, CallRefused) and failure.status in (400, 422):
                raise refused(self.name, request, failure) from failure
            line.check_whole()
            raise await line.error_of(failure) from failure

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        if self._link is None:
            return []
        link, found = self._link, self._link.find(request_ids)
        for opened in found:
            link.abort_nowait(opened)
        if found:
            await asyncio.wait([opened.done for opened in found], timeout=timeout_s)
        return [opened.request.request_id for opened in found]

    async def health(self, *, timeout_s: float | None = 10.0) -> api.EngineHealth:
        async with self._line.calls():
            return await self._caller.get("/health", api.EngineHealth, timeout_s=timeout_s)

    async def prepare(self, manifest: ExportResponse) -> str:
        if self._group is not None and manifest.is_held:
            self._line.check_whole()
            self._group.expect_nowait(self.name, manifest.version, 1)
            self._expected = manifest
            return manifest.digest  # the server compares it on arrival
        request = api.PrepareRequest.model_validate(manifest, from_attributes=True)
        with reading(manifest):
            return (await self._post("/prepare", request, api.Loaded)).digest

    async def commit(self, version: int, digest: str, interrupt: api.Interrupt) -> api.CommitResponse:
        expected, self._expected = self._expected, None
        if expected is not None:
            await self._receive(expected)
        self._offered_version = max(self._offered_version, version)
        request = api.CommitRequest(version=version, digest=digest, interrupt=interrupt)
        answer = await self._post("/commit", request, api.CommitResponse)
        self._line.version = version
        return answer

    async def sleep(self) -> api.TransferStats:
        return await self._post("/sleep", None, api.TransferStats)

    async def wake(self, parts: Sequence[api.EnginePart]) -> api.TransferStats:
        return await self._post("/wake", api.WakeRequest(parts=list(parts)), api.TransferStats)

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        request = api.LoadChunkRequest.model_validate(chunk, from_attributes=True)
        return (await self._post("/load_chunk", request, api.Loaded)).digest

    async def _receive(self, manifest: ExportResponse) -> None:
        """Raises EngineLost after two failures, and WeightsLost if the trainer is lost."""
        assert self._group is not None, "weights are expected only from a broadcast"
        announced = manifest.model_dump(include={"version", "digest", "num_tensors", "num_bytes"})

        async def take(member: api.GroupMember) -> None:
            await self._post("/prepare", api.PrepareRequest(path="", member=member, **announced), api.Loaded)

        for is_last in (False, True):
            try:
                return await self._group.receive(self.name, manifest.version, take)
            except EngineLost:
                raise
            except EngineError as error:
                if is_last:
                    self._line.break_nowait(error.fault)
                    raise self._line.lost(error.fault) from error
                self._group.expect_nowait(self.name, manifest.version, 1)

    async def _post(self, path: str, body: BaseModel | None, answer: type[Answer]) -> Answer:
        async with self._line.calls():
            return await self._caller.post(path, body, answer, timeout_s=None)


class Teacher:
    """Client of one teacher process.

    Life: up -> down_nowait(): open calls restart later -> reset_nowait() -> up_nowait().
    Waits: judge sleeps until the teacher is up, for a place, then for the answer, at most timeout_s.

    `on_lost` gets every EngineLost and must take the teacher down; without it the error reaches the
    caller.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        temperature: float,
        places: int,
        timeout_s: float,
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
        self._caller = caller
        self.name = caller.name
        self._on_lost = on_lost
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(places)
        self._line = CallScope(caller)
        self._up = asyncio.Event()
        self._up.set()
        self._num_scored = 0

    def gauges(self) -> dict[str, float]:
        return {"teacher/tokens": self._num_scored}

    def down_nowait(self) -> None:
        """Idempotent."""
        self._up.clear()
        self._line.disconnect_nowait()

    def reset_nowait(self) -> None:
        self.down_nowait()
        self._line = CallScope(self._caller)

    def up_nowait(self) -> None:
        self._up.set()

    async def judge(self, rollout: Rollout) -> Rollout:
        """Return the rollout with teacher_logprobs in each branch. Raises RequestRefused (data) or
        EngineError.
        """
        return tuple([await self._judge(branch) for branch in rollout])

    async def _judge(self, branch: Trajectory) -> Trajectory:
        (places,) = np.nonzero(branch.loss_mask)
        start, end = int(places[0]), int(places[-1]) + 1
        request = api.ScoreRequest(
            token_ids=branch.token_ids[:end].tolist(), start=start, temperature=self._temperature
        )
        found = np.array((await self._score(request)).logprobs, np.float32)
        if len(found) != end - start or not (found <= LOGPROB_SLACK).all() or not np.isfinite(found).all():
            what = f"answered {len(found)} logprobs for {end - start} tokens: {found[:8].tolist()}"
            rule = "one finite logprob a token, none above 0"
            raise EngineError(self.name, what, rule=rule, way_out=f"read {self.name}'s log.")
        logprobs = np.zeros(len(branch.token_ids), np.float32)
        logprobs[start:end] = found
        logprobs[~branch.loss_mask] = 0.0
        # Under a grammar the teacher would have sampled from other tokens: no term.
        for span in branch.tokens.grammars:
            logprobs[span.start : span.end] = branch.tokens.behaviour_logprobs[span.start : span.end]
        self._num_scored += len(places)
        return replace(branch, tokens=branch.tokens.with_columns({TEACHER: logprobs}))

    async def _score(self, request: api.ScoreRequest) -> api.ScoreResponse:
        while True:
            with waiting("a teacher that is up", on="supervisor", who="rollouts"):
                await self._up.wait()
            try:
                with waiting("teacher logprobs", on=self.name, who="rollouts"):
                    async with self._places, self._line.calls():
                        post = self._caller.post
                        return await post("/score", request, api.ScoreResponse, timeout_s=self._timeout_s)
            except EngineLost as lost:
                if self._on_lost is None:
                    raise
                self._on_lost(lost)
            except EngineError as error:
                refusal = error.__cause__
                if not isinstance(refusal, CallRefused) or refusal.status != 400:
                    raise
                raise RequestRefused(error.what, rule=error.rule, way_out=error.way_out) from refusal
