"""The client of one engine server: its messages as calls, its failures as ours. Knows no other server, no routing."""

from __future__ import annotations

from pydantic import BaseModel

from asyncrl.calling import Answer, Caller, CallLost, CallRefused
from asyncrl.engines.checks import check_segment
from asyncrl.errors import EngineError, RequestRefused
from asyncrl.types import CommitReport, Interrupt, WeightManifest
from asyncrl.wire import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    PrepareRequest,
    PrepareResponse,
)

_BAD_REQUEST = (400, 422)


class EngineServer:
    """One engine server, for the pool (segments) and for the publisher (a WeightTarget).

    Life:       made with the version that the server starts under; lives as long as its `caller`, which the
                maker closes.
    Waits:      generate_segment, prepare and commit sleep until the server answers or is gone. Their limit is the
                caller's: rollout.timeout_s, publisher.timeout_s, and the run's heartbeat under both.
    Invariant:  no segment passes whose tokens carry a version older than the one that the server had confirmed
                when the segment was sent: check_segment guarantees it.
    """

    def __init__(self, caller: Caller, *, policy_version: int = 0) -> None:
        self._caller = caller
        self.name = caller.name
        self.policy_version = policy_version
        """The version that the server has confirmed last."""
        self.num_commits = 0
        """Swaps begun plus swaps ended: whoever saw it change knows that a publish interrupted."""
        self._offered_version = policy_version

    def __repr__(self) -> str:
        return f"<EngineServer {self.name} {self._caller.url} v{self.policy_version}>"

    async def generate_segment(self, request: GenerateRequest) -> GenerateResponse:
        """Sample until the end, the budget or an interruption.

        Raises RequestRefused (data: this request is too long, say), or EngineError if the server is gone or
        answers something that cannot be.
        """
        oldest = self.policy_version
        try:
            answer = await self._post("/generate", request, GenerateResponse)
        except CallRefused as refusal:
            if refusal.status in _BAD_REQUEST:
                raise RequestRefused(
                    f"{self.name} refused request {request.request_id} "
                    f"({len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}): {refusal.body.error}",
                    rule=refusal.body.rule,
                    way_out=refusal.body.way_out,
                ) from refusal
            raise self._error(refusal) from refusal
        check_segment(self.name, request, answer, oldest=oldest, newest=self._offered_version)
        return answer

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests (None = all) with what they have; returns those that were here. Raises EngineError."""
        answer = await self._post_or_error("/abort", AbortRequest(request_ids=request_ids), AbortResponse, timeout_s)
        return answer.aborted

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How the server does. Raises EngineError if it gives no answer."""
        try:
            return await self._caller.get("/health", EngineHealth, timeout_s=timeout_s)
        except (CallLost, CallRefused) as failure:
            raise self._error(failure) from failure

    async def prepare(self, manifest: WeightManifest) -> str:
        """Have the weights loaded beside the serving ones; returns the digest of what was loaded. Raises EngineError."""
        request = PrepareRequest(
            version=manifest.version,
            path=manifest.path,
            digest=manifest.digest,
            num_tensors=manifest.num_tensors,
            num_bytes=manifest.num_bytes,
        )
        answer = await self._post_or_error("/prepare", request, PrepareResponse)
        if answer.version != manifest.version:
            raise self._wrong_version("/prepare", manifest.version, answer.version)
        return answer.digest

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitReport:
        """Have the prepared weights swapped in; returns what the server says of the swap. Raises EngineError."""
        self._offered_version = max(self._offered_version, version)
        self.num_commits += 1
        try:
            request = CommitRequest(version=version, digest=digest, interrupt=interrupt)
            answer = await self._post_or_error("/commit", request, CommitResponse)
        finally:
            self.num_commits += 1
        if answer.version != version:
            raise self._wrong_version("/commit", version, answer.version)
        self.policy_version = version
        return CommitReport(
            version=answer.version,
            digest=answer.digest,
            pause_s=answer.pause_s,
            num_interrupted=answer.num_interrupted,
        )

    async def _post(self, path: str, body: BaseModel, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        try:
            return await self._caller.post(path, body, answer, timeout_s=timeout_s)
        except CallLost as lost:
            raise self._error(lost) from lost

    async def _post_or_error(self, path: str, body: BaseModel, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        try:
            return await self._post(path, body, answer, timeout_s)
        except CallRefused as refusal:
            raise self._error(refusal) from refusal

    def _error(self, failure: CallLost | CallRefused) -> EngineError:
        where = f"({self._caller.url})"
        if isinstance(failure, CallLost):
            return EngineError(
                self.name,
                f"{where} gave no answer to {failure.path}: {failure.why}",
                rule="a run needs all of its engine servers",
                way_out=f"read {self.name}'s log for why it died or hangs, then start the run again.",
            )
        return EngineError(
            self.name,
            f"{where} answered {failure.status} to {failure.path}: {failure.body.error}",
            rule=failure.body.rule,
            way_out=failure.body.way_out or f"read {self.name}'s log.",
        )

    def _wrong_version(self, path: str, asked: int, answered: int) -> EngineError:
        return EngineError(
            self.name,
            f"answered {path} of policy_version {asked} with policy_version {answered}",
            rule="an answer carries the version that was asked for",
            way_out=f"make sure that only this run talks to {self._caller.url}.",
        )
