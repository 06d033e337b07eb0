"""Push one version to all engines: load and compare digests, then commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from asyncrl.base.errors import EngineLost, PublishError, RoomError, WeightsLost
from asyncrl.base.waits import SHORTEST_S, note_span, waiting, within
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import CommitResponse, Interrupt
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse

Result = TypeVar("Result")
OnLost = Callable[[EngineLost], None]
Sent = TypeVar("Sent", ExportResponse, ExportChunkResponse)
RESTART = "read the log of the engine that is named, then start the run again."
_ANNOUNCED = "a version is announced only when every engine serves it, with the digest that was sent"


class Locate(Protocol):
    """Bring weights to an engine's node (NodeFiles.locate). Raises RoomError."""

    async def __call__(self, engine: str, sent: Sent) -> Sent: ...


async def in_place(engine: str, sent: Sent) -> Sent:
    return sent


class WeightTrainer(Protocol):
    """The trainer as weight sync sees it.

    begin_export starts to copy the newest weights, between two optimizer steps, and returns their
    version; export waits for the copy. export_chunk overwrites the previous chunk.
    """

    @property
    def policy_version(self) -> int: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def num_restarts(self) -> int: ...
    async def wait_up(self) -> None: ...
    async def wait_version_above(self, version: int) -> int: ...
    async def begin_export(self) -> int: ...
    async def export(self) -> ExportResponse: ...
    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse: ...


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds of writing chunks (export_s), reading (prepare_s) and swapping (commit_s); longest pause of
    an engine; interrupted requests.
    """

    export_s: float = 0.0
    prepare_s: float = 0.0
    commit_s: float = 0.0
    pause_s: float = 0.0
    num_interrupted: int = 0

    @property
    def publish_s(self) -> float:
        return self.export_s + self.prepare_s + self.commit_s


class Push:
    """A push of one version to the engines in `live`: whole, during generation, or by chunks, into awake,
    empty weights.

    Life: whole() or chunks(), once. `on_lost` gets each engine lost during the push; without it the loss
        is an error.
    Waits: for all engines at once, at most timeout_s per phase.
    Invariant: on return every engine in `live` serves the version with the trainer's digest. Except with
        nccl, no engine swaps before every engine has the right bytes.

    `is_down` is checked right before a commit: a lost engine may be a new process.
    """

    def __init__(
        self,
        version: int,
        targets: Sequence[EngineClient],
        *,
        served: int,
        timeout_s: float,
        interrupt: Interrupt = "abort",
        on_lost: OnLost | None = None,
        is_down: Callable[[str], bool] = lambda _: False,
        locate: Locate = in_place,
    ) -> None:
        self.version, self.live = version, tuple(targets)
        self._timeout_s, self._on_lost = timeout_s, on_lost
        self._interrupt: Interrupt = interrupt
        self._is_down, self._locate = is_down, locate
        self._serving: dict[str, str] = {target.name: str(served) for target in targets}

    async def whole(self, manifest: ExportResponse) -> PushReport:
        """Raises PublishError with each engine's version."""
        clock = asyncio.get_running_loop().time
        start = clock()

        async def prepare(target: EngineClient) -> str:
            # If the trainer sends the weights, a file is only for evaluation.
            located = manifest if manifest.is_held else await self._locate(target.name, manifest)
            return await target.prepare(located)

        digests = await self._on(self.live, "prepare", prepare)
        self._check_digests("loaded", digests, manifest.digest)
        note_span("weight sync", "prepare", start, clock(), self.version)
        return await self._commit(manifest.digest, 0.0, clock() - start)

    async def chunks(self, trainer: WeightTrainer) -> tuple[PushReport, ExportResponse]:
        """Load all chunks and commit. Raises PublishError, or what the trainer's client raises."""
        clock = asyncio.get_running_loop().time
        began, export_s, load_s = clock(), 0.0, 0.0
        sent: list[ExportChunkResponse] = []
        while not sent or not sent[-1].is_last:
            start = clock()
            sent.append(chunk := await trainer.export_chunk(self.version, len(sent)))
            exported = clock()
            expected = (self.version, len(sent) - 1, bool(chunk.whole_digest))
            if (chunk.version, chunk.index, chunk.is_last) != expected:
                wrote = f"the trainer wrote chunk {chunk.index} of {chunk.version} as chunk {len(sent) - 1}"
                raise self._error(f"{wrote}, whole_digest={chunk.whole_digest or 'none'}")
            await self._load(chunk)
            export_s, load_s = export_s + exported - start, load_s + clock() - exported
        note_span("weight sync", "chunks", began, clock(), self.version)
        report = await self._commit(sent[-1].whole_digest, export_s, load_s)
        return report, ExportResponse(
            version=self.version,
            path="",
            digest=sent[-1].whole_digest,
            num_tensors=sum(chunk.num_tensors for chunk in sent),
            num_bytes=sum(chunk.num_bytes for chunk in sent),
        )

    async def _load(self, chunk: ExportChunkResponse) -> None:
        async def load(target: EngineClient) -> str:
            return await target.load_chunk(await self._locate(target.name, chunk))

        digests = await self._on(self.live, f"load_chunk {chunk.index}", load)
        self._check_digests(f"loaded chunk {chunk.index} of", digests, chunk.digest)

    async def _commit(self, digest: str, export_s: float, prepare_s: float) -> PushReport:
        clock = asyncio.get_running_loop().time
        start = clock()

        async def commit(target: EngineClient) -> CommitResponse:
            self._serving[target.name] += f" or {self.version}, it gave no answer"
            report = await target.commit(self.version, digest, self._interrupt)
            self._serving[target.name] = str(report.version)
            if report.pause_s >= SHORTEST_S:
                note_span(target.name, "pause", clock() - report.pause_s, clock(), self.version)
            return report

        targets = [target for target in self.live if not self._is_down(target.name)]
        reports = await self._on(targets, "commit", commit)
        served = {name: f"{one.digest} of version {one.version}" for name, one in reports.items()}
        self._check_digests("serves", served, f"{digest} of version {self.version}")
        self.live = tuple(target for target in self.live if target.name in reports)
        pause_s = max((report.pause_s for report in reports.values()), default=0.0)
        num_interrupted = sum(report.num_interrupted for report in reports.values())
        paused = f"paused {1000 * pause_s:.1f} ms at most, {num_interrupted} requests interrupted"
        # Time-shared engines decode nothing during a push.
        note_span("weight sync", "commit", start, clock(), self.version, paused if pause_s else "")
        return PushReport(export_s, prepare_s, clock() - start, pause_s, num_interrupted)

    async def _on(
        self, targets: Sequence[EngineClient], phase: str, call: Callable[[EngineClient], Awaitable[Result]]
    ) -> dict[str, Result]:
        """Run a phase on all targets at once; return the answers of engines that were not lost. Waits for
        all, so that an error reports each state.
        """
        answers: dict[str, Result] = {}
        doing = f"{phase} of policy_version {self.version}"

        async def one(target: EngineClient) -> None:
            try:
                with waiting(doing, on=target.name, who="publisher"):
                    async with within(self._timeout_s, lambda: self._late(target, phase)):
                        answers[target.name] = await call(target)
            except EngineLost as lost:
                if self._on_lost is None:
                    raise
                self._on_lost(lost)  # here: the reaction must not wait for the other engines
                self.live = tuple(one for one in self.live if one is not target)

        outcomes = await asyncio.gather(*(one(target) for target in targets), return_exceptions=True)
        for target, outcome in zip(targets, outcomes, strict=True):
            if isinstance(outcome, RoomError) and not isinstance(outcome, WeightsLost):
                what = f"{target.name} failed in {doing}: {outcome.fault}"
                raise self._error(what, outcome.rule, outcome.way_out) from outcome
            if isinstance(outcome, BaseException):  # ours, or the trainer's: nothing is known of the engine
                raise outcome
        return answers

    def _late(self, target: EngineClient, phase: str) -> EngineLost:
        return EngineLost(
            target.name,
            f"did not {phase} policy_version {self.version} within {self._timeout_s} s",
            rule=f"weight_sync.timeout_s={self._timeout_s} is the limit of each phase",
            way_out="raise weight_sync.timeout_s if the machine is slow, else read its log.",
        )

    def _check_digests(self, verb: str, digests: dict[str, str], sent: str) -> None:
        for name, digest in digests.items():
            if digest != sent:
                what = f"{name} {verb} policy_version {self.version} with digest {digest}"
                raise self._error(f"{what}, the trainer sent {sent}; {self.version} was not announced")

    def _error(self, what: str, rule: str = "", way_out: str = "") -> PublishError:
        serving = ", ".join(f"{name}: {version}" for name, version in self._serving.items())
        what = f"{what} (policy_version served: {serving})"
        return PublishError("publisher", what, rule=rule or _ANNOUNCED, way_out=way_out or RESTART)
