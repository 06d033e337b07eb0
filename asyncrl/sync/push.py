"""Push one version to all engines: load and compare digests, then commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from asyncrl.base.errors import EngineLost, NodeLost, PublishError, RoomError, WeightsLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.base.waits import SHORTEST_S, note_span, waiting, within
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import CommitResponse, FileRequest, Interrupt
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse, TrainerHealth

Result = TypeVar("Result")
Sent = TypeVar("Sent", ExportResponse, ExportChunkResponse)
OnLost: TypeAlias = Callable[[EngineLost], None]
Locate: TypeAlias = Callable[[str, Any], Awaitable[Any]]
"""Bring weights to an engine's node and return them with their path there (NodeFiles.locate)."""
Fetch: TypeAlias = Callable[[int, FileRequest, float], Awaitable[str]]
"""Download a file to a node within a limit in seconds. Raises RoomError."""
_ANNOUNCED = "a version is announced only when every engine serves it, with the digest that was sent"


async def in_place(engine: str, sent: Any) -> Any:
    return sent


@dataclass(frozen=True)
class NodeFiles:
    """Transport stream: an engine's node fetches each file from the trainer's node.

    `trainer` calls rank 0. `node_of`: the node of each engine.
    """

    fetch: Fetch
    trainer: Caller
    node_of: Mapping[str, int]
    _: KW_ONLY
    trainer_node: int
    timeout_s: float

    async def locate(
        self, engine: str, sent: Sent, purpose: Literal["rollout", "evaluation"] = "rollout"
    ) -> Sent:
        """Return `sent` with the path on the engine's node. Raises EngineLost, WeightsLost or RoomError.

        A file for evaluation is kept apart from those of the rollout engines, also on the trainer's node.
        """
        if purpose == "rollout" and (not sent.path or self.node_of[engine] == self.trainer_node):
            return sent
        url = f"{self.trainer.url}/staged/{Path(sent.path).name}"
        request = FileRequest(url=url, secret=self.trainer.secret, key=sent.digest, purpose=purpose)
        try:
            path = await self.fetch(self.node_of[engine], request, self.timeout_s)
        except RoomError as error:
            kind = RoomError if await self._trainer_answers() else WeightsLost
            lost = EngineLost if isinstance(error, NodeLost) else kind
            raise lost(engine, error.fault, rule=error.rule, way_out=error.way_out) from error
        return sent.model_copy(update={"path": path})

    async def _trainer_answers(self) -> bool:
        try:
            await self.trainer.get("/health", TrainerHealth, timeout_s=5.0)
        except (CallLost, CallRefused):
            return False
        return True


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


@dataclass(eq=False)
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

    version: int
    live: Sequence[EngineClient]
    _: KW_ONLY
    served: int
    timeout_s: float
    interrupt: Interrupt = "abort"
    on_lost: OnLost | None = None
    is_down: Callable[[str], bool] = lambda _: False
    locate: Locate = in_place

    def __post_init__(self) -> None:
        self._serving = {target.name: str(self.served) for target in self.live}

    async def whole(self, manifest: ExportResponse) -> PushReport:
        """Raises PublishError with each engine's version."""
        clock = asyncio.get_running_loop().time
        start = clock()

        async def prepare(target: EngineClient) -> str:
            # If the trainer sends the weights, a file is only for evaluation.
            located = manifest if manifest.is_held else await self.locate(target.name, manifest)
            return await target.prepare(located)

        digests = await self._on(self.live, "prepare", prepare)
        self._check_digests("loaded", digests, manifest.digest)
        note_span("weight sync", "prepare", start, clock(), self.version)
        return await self._commit(manifest.digest, 0.0, clock() - start)

    async def chunks(self, trainer: WeightTrainer) -> tuple[PushReport, ExportResponse]:
        """Load all chunks and commit. Raises PublishError, or what the trainer's client raises."""
        clock = asyncio.get_running_loop().time
        began = clock()
        export_s = 0.0
        sent: list[ExportChunkResponse] = []
        while not sent or not sent[-1].is_last:
            start = clock()
            chunk = await trainer.export_chunk(self.version, len(sent))
            export_s += clock() - start
            sent.append(chunk)

            async def load(target: EngineClient, chunk: ExportChunkResponse = chunk) -> str:
                return await target.load_chunk(await self.locate(target.name, chunk))

            digests = await self._on(self.live, f"load_chunk {chunk.index}", load)
            self._check_digests(f"loaded chunk {chunk.index} of", digests, chunk.digest)
        note_span("weight sync", "chunks", began, clock(), self.version)
        digest = sent[-1].whole_digest
        report = await self._commit(digest, export_s, clock() - began - export_s)
        sizes = {
            "num_tensors": sum(chunk.num_tensors for chunk in sent),
            "num_bytes": sum(chunk.num_bytes for chunk in sent),
        }
        return report, ExportResponse(version=self.version, path="", digest=digest, **sizes)

    async def _commit(self, digest: str, export_s: float, prepare_s: float) -> PushReport:
        clock = asyncio.get_running_loop().time
        start = clock()

        async def commit(target: EngineClient) -> CommitResponse:
            self._serving[target.name] += f" or {self.version}, it gave no answer"
            report = await target.commit(self.version, digest, self.interrupt)
            self._serving[target.name] = str(report.version)
            if report.pause_s >= SHORTEST_S:
                note_span(target.name, "pause", clock() - report.pause_s, clock(), self.version)
            return report

        targets = [target for target in self.live if not self.is_down(target.name)]
        reports = await self._on(targets, "commit", commit)
        served = {name: f"{one.digest} of version {one.version}" for name, one in reports.items()}
        self._check_digests("serves", served, f"{digest} of version {self.version}")
        self.live = [target for target in self.live if target.name in reports]
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
            late = EngineLost(
                target.name,
                f"did not {phase} policy_version {self.version} within {self.timeout_s} s",
                rule=f"weight_sync.timeout_s={self.timeout_s} is the limit of each phase",
                way_out="raise weight_sync.timeout_s if the machine is slow, else read its log.",
            )
            try:
                with waiting(doing, on=target.name, who="publisher"):
                    async with within(self.timeout_s, lambda: late):
                        answers[target.name] = await call(target)
            except EngineLost as lost:
                if self.on_lost is None:
                    raise
                self.on_lost(lost)  # here: the reaction must not wait for the other engines
                self.live = [one for one in self.live if one is not target]

        outcomes = await asyncio.gather(*(one(target) for target in targets), return_exceptions=True)
        for target, outcome in zip(targets, outcomes, strict=True):
            if isinstance(outcome, RoomError) and not isinstance(outcome, WeightsLost):
                what = f"{target.name} failed in {doing}: {outcome.fault}"
                raise self._error(what, outcome.rule, outcome.way_out) from outcome
            if isinstance(outcome, BaseException):  # ours, or the trainer's: nothing is known of the engine
                raise outcome
        return answers

    def _check_digests(self, verb: str, digests: dict[str, str], sent: str) -> None:
        for name, digest in digests.items():
            if digest != sent:
                what = f"{name} {verb} policy_version {self.version} with digest {digest}"
                raise self._error(f"{what}, the trainer sent {sent}; {self.version} was not announced")

    def _error(self, what: str, rule: str = "", way_out: str = "") -> PublishError:
        serving = ", ".join(f"{name}: {version}" for name, version in self._serving.items())
        way_out = way_out or "read the log of the engine that is named, then start the run again."
        what = f"{what} (policy_version served: {serving})"
        return PublishError("publisher", what, rule=rule or _ANNOUNCED, way_out=way_out)
