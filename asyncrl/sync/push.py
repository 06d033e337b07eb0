"""Push each policy_version to every engine, during generation or time-shared: load and
compare digests, then commit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar

from asyncrl.base.errors import (
    ComponentError,
    EngineLost,
    NodeLost,
    PublishError,
    WeightsLost,
)
from asyncrl.base.http import Caller
from asyncrl.base.waits import SHORTEST_S, Signal, clock, note_span, waiting, within
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import (
    CommitResponse,
    FileRequest,
    Interrupt,
    TransferStats,
)
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse
from asyncrl.trainer.trainer_client import TrainerClient

Result = TypeVar("Result")
Sent = TypeVar("Sent", ExportResponse, ExportChunkResponse)
OnLost: TypeAlias = Callable[[EngineLost], None]
Fetch: TypeAlias = Callable[[int, FileRequest, float], Awaitable[str]]
"""Download a file to a node within a limit in seconds (Launcher.fetch)."""


class Locate(Protocol):
    """Bring weights to an engine's node and return them with their path there
    (NodeFiles.locate).
    """

    async def __call__(self, engine: str, sent: Sent) -> Sent: ...


_ANNOUNCED = "a version is announced only when every engine serves it, with the digest that was sent"


async def in_place(engine: str, sent: Sent) -> Sent:
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
        self,
        engine: str,
        sent: Sent,
        purpose: Literal["rollout", "evaluation"] = "rollout",
    ) -> Sent:
        """Return `sent` with the path on the engine's node. Raises EngineLost or
        WeightsLost.

        A file for evaluation is kept apart from those of the rollout engines, also on
        the trainer's node.
        """
        # An evaluation downloads its file even on the trainer's node, which keeps only
        # the two newest exports: an evaluation may read its weights some pushes later.
        if purpose == "rollout" and (
            not sent.path or self.node_of[engine] == self.trainer_node
        ):
            return sent
        name = Path(sent.path).name
        request = FileRequest(
            url=f"{self.trainer.url}/staged/{name}",
            secret=self.trainer.secret,
            # Weights that are exported again with the same bits are not downloaded
            # again.
            key=sent.digest,
            purpose=purpose,
        )
        node = self.node_of[engine]
        try:
            path = await self.fetch(node, request, self.timeout_s)
        except ComponentError as error:
            # Another export may repair lost weights (_publish), but not a full disk of the
            # engine's node. Such a disk costs an evaluation only that version.
            is_lost = isinstance(error, NodeLost) or (
                purpose == "rollout" and not isinstance(error, WeightsLost)
            )
            lost = EngineLost if is_lost else WeightsLost
            raise error.as_kind(lost, engine) from error
        return sent.model_copy(update={"path": path})


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds of the whole push, with its export, and of an engine's longest pause;
    interrupted requests.
    """

    publish_s: float = 0.0
    pause_s: float = 0.0
    num_interrupted: int = 0


@dataclass(eq=False)
class Push:
    """A push of one version to the engines in `live`: whole, during generation, or by
    chunks, into awake, empty weights.

    Life: whole() or chunks(), once. `on_lost` gets each engine lost during the push.
    Waits: for all engines at once, at most timeout_s per phase.
    Invariant: on return every engine in `live` serves the version with the trainer's
        digest. Except with nccl, no engine swaps before every engine has the right
        bytes.

    `is_down` is checked right before a commit: a lost engine may be a new process.
    """

    version: int
    live: Sequence[EngineClient]
    _: KW_ONLY
    timeout_s: float
    on_lost: OnLost
    interrupt: Interrupt = "abort"
    is_down: Callable[[str], bool] = lambda _: False
    locate: Locate = in_place

    async def whole(self, manifest: ExportResponse) -> PushReport:
        """Load an export on all live engines, compare the digests, then commit. Raises
        PublishError.
        """
        start = clock()

        async def prepare(target: EngineClient) -> str:
            # If the trainer holds the weights, a file is only for evaluation.
            located = (
                manifest
                if manifest.is_held
                else await self.locate(target.name, manifest)
            )
            return await target.prepare(located)

        # The engines sample on with their old weights, and none swaps before all
        # digests are right. With nccl an engine receives only in its commit, and
        # compares there.
        digests = await self._on(self.live, "prepare", prepare)
        self._check_digests("loaded", digests, manifest.digest)
        note_span("weight sync", "prepare", start, clock(), self.version)
        return await self._commit(manifest.digest, start)

    async def chunks(self, trainer: TrainerClient) -> tuple[PushReport, ExportResponse]:
        """Load all chunks and commit. Raises PublishError, or what the trainer's client
        raises.
        """
        began = clock()
        sent: list[ExportChunkResponse] = []
        # One chunk at a time: export_chunk overwrites the memory of the chunk before,
        # so every engine must have copied that one.
        while not sent or not sent[-1].is_last:
            chunk = await trainer.export_chunk(self.version, len(sent))
            sent.append(chunk)

            async def load(
                target: EngineClient, chunk: ExportChunkResponse = chunk
            ) -> str:
                located = await self.locate(target.name, chunk)
                return await target.load_chunk(located)

            digests = await self._on(self.live, f"load_chunk {chunk.index}", load)
            self._check_digests(f"loaded chunk {chunk.index} of", digests, chunk.digest)
        note_span("weight sync", "chunks", began, clock(), self.version)
        digest = sent[-1].whole_digest
        report = await self._commit(digest, began)
        num_tensors = sum(chunk.num_tensors for chunk in sent)
        num_bytes = sum(chunk.num_bytes for chunk in sent)
        manifest = ExportResponse(
            version=self.version,
            path="",
            digest=digest,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
        )
        return report, manifest

    async def _commit(self, digest: str, began_s: float) -> PushReport:
        start = clock()

        async def commit(target: EngineClient) -> CommitResponse:
            report = await target.commit(self.version, digest, self.interrupt)
            if report.pause_s >= SHORTEST_S:
                note_span(
                    target.name,
                    "pause",
                    clock() - report.pause_s,
                    clock(),
                    self.version,
                )
            return report

        # A process that started after phase one has nothing to commit; its refusal
        # would end the run. bring_up leaves is_down at the default, because its own
        # engine counts as down until it serves.
        targets = [target for target in self.live if not self.is_down(target.name)]
        reports = await self._on(targets, "commit", commit)
        served = dict[str, str]()
        pause_s = 0.0
        num_interrupted = 0
        for name, report in reports.items():
            served[name] = f"{report.digest} of version {report.version}"
            pause_s = max(pause_s, report.pause_s)
            num_interrupted += report.num_interrupted
        self._check_digests("serves", served, f"{digest} of version {self.version}")
        # Engines that were lost since phase one get the version from bring_up.
        self.live = [target for target in self.live if target.name in reports]
        paused = f"paused {1000 * pause_s:.1f} ms at most, {num_interrupted} requests interrupted"
        # Time-shared engines decode nothing during a push.
        note_span(
            "weight sync",
            "commit",
            start,
            clock(),
            self.version,
            paused if pause_s else "",
        )
        return PushReport(clock() - began_s, pause_s, num_interrupted)

    async def _on(
        self,
        targets: Sequence[EngineClient],
        phase: str,
        call: Callable[[EngineClient], Awaitable[Result]],
    ) -> dict[str, Result]:
        """Run a phase on all targets at once; return the answers of engines that were
        not lost.
        """
        answers: dict[str, Result] = {}
        doing = f"{phase} of policy_version {self.version}"

        async def on_engine(target: EngineClient) -> None:
            # A silent engine counts as lost, and its supervisor replaces it. Without
            # the limit it would hold back every later version.
            late = EngineLost(
                target.name,
                f"did not {phase} version {self.version} within weight_sync.timeout_s={self.timeout_s} s",
                way_out="raise weight_sync.timeout_s if the machine is slow, else read its log.",
            )
            try:
                with waiting(doing, on=target.name, who="publisher"):
                    async with within(self.timeout_s, lambda: late):
                        answers[target.name] = await call(target)
            except EngineLost as lost:
                # here: the reaction must not wait for the other engines
                self.on_lost(lost)
                self.live = [engine for engine in self.live if engine is not target]

        calls = [on_engine(target) for target in targets]
        # return_exceptions: every call has ended before an error is raised. Otherwise
        # other engines would still load or swap while the next push begins.
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for target, outcome in zip(targets, outcomes, strict=True):
            # The state of an engine that answers with an error is unknown, so the run
            # ends. Lost engines never get here, and lost weights are exported again.
            if isinstance(outcome, ComponentError) and not isinstance(
                outcome, WeightsLost
            ):
                raise self._error(
                    f"{target.name} failed in {doing}: {outcome.fault}",
                    outcome.rule,
                    outcome.way_out,
                ) from outcome
            if isinstance(outcome, BaseException):
                # our own or the trainer's error; the engine's state is unknown
                raise outcome
        return answers

    def _check_digests(self, verb: str, digests: dict[str, str], sent: str) -> None:
        for name, digest in digests.items():
            if digest != sent:
                raise self._error(
                    f"{name} {verb} policy_version {self.version} with digest {digest}, "
                    f"the trainer sent {sent}; {self.version} was not announced"
                )

    def _error(self, what: str, rule: str = "", way_out: str = "") -> PublishError:
        return PublishError(
            "publisher",
            what,
            rule=rule or _ANNOUNCED,
            way_out=way_out
            or "read the log of the engine that is named, then start the run again.",
        )


async def at_once(*_: object) -> None:
    """Return at once."""


@dataclass(eq=False)
class Publisher:
    """Engines that get pushes, their version, and the report of the last push.

    An engine is live, or down until it has the announced weights. An export's file
    exists until on_published returns. `locate` fetches a file to an engine's node.
    """

    trainer: TrainerClient
    targets: Sequence[EngineClient]
    _: KW_ONLY
    timeout_s: float
    on_served: Callable[[int], None]
    on_lost: OnLost
    on_published: Callable[[ExportResponse], Awaitable[None]] = at_once
    interrupt: Interrupt = "abort"
    locate: Locate = in_place
    version: int = field(default=0, init=False)
    num_skipped: int = field(default=0, init=False)
    """Versions that a newer one replaced."""
    report: PushReport = field(default=PushReport(), init=False)
    """When time-shared, all of publish_s is a pause."""

    def __post_init__(self) -> None:
        # Supervisors change it at any time, also while a push waits. So a push takes a
        # copy of `_live` at its start and asks is_down again before it commits.
        self._down: set[str] = set()

    @property
    def _live(self) -> list[EngineClient]:
        return [target for target in self.targets if target.name not in self._down]

    def gauges(self) -> dict[str, float]:
        return {
            "publish/version": self.version,
            "weight_sync/skipped": self.num_skipped,
            "perf/weight_sync_s": self.report.publish_s,
            "perf/weight_sync_pause_s": self.report.pause_s,
        }

    def is_down(self, name: str) -> bool:
        return name in self._down

    def down_nowait(self, name: str) -> None:
        """Skip this lost engine; a waiting push continues once its calls are cut.
        Idempotent.
        """
        self._down.add(name)

    def up_nowait(self, name: str) -> None:
        """Push to this engine from the next push on. Idempotent."""
        self._down.discard(name)

    async def leave(self, name: str) -> None:
        """Exclude this engine from pushes when this returns."""
        self._down.add(name)

    def _push(
        self, version: int, targets: Sequence[EngineClient], on_lost: OnLost
    ) -> Push:
        return Push(
            version,
            targets,
            timeout_s=self.timeout_s,
            interrupt=self.interrupt,
            on_lost=on_lost,
            locate=self.locate,
        )


class ColocatedPush(Publisher):
    """Pushes during a handover of shared devices: push() in chunks, then announce()."""

    _pushed: tuple[ExportResponse, PushReport] | None = None

    async def push(self) -> TransferStats:
        """Send the trainer's weights to all awake engines; announce() follows. Raises
        PublishError, or the errors of the trainer's client.
        """
        version = self.trainer.policy_version
        push = self._push(version, self._live, self.on_lost)
        report, manifest = await push.chunks(self.trainer)
        self._pushed = manifest, replace(report, pause_s=report.publish_s)
        return TransferStats(
            num_bytes=manifest.num_bytes,
            seconds=report.publish_s,
        )

    async def announce(self) -> None:
        # Not a part of push(), which is one phase of a handover: the version is served
        # only after the last phase.
        assert self._pushed is not None, "announce() comes after push()"
        manifest, report = self._pushed
        self.version = manifest.version
        self.report = report
        await self.on_published(manifest)
        self.on_served(manifest.version)


@dataclass(eq=False)
class PushLoop(Publisher):
    """Pushes the newest weights to engines on separate devices, one push at a time.

    Example: two engines; a step takes 2 s, an export 1 s, and a push with it 5 s.

        time   trainer      push loop                                 engines serve
        2 s    version 1    begin_export, export 1                    0, 0
        3 s                 prepare 1: both load it and decode on     0, 0
        4 s    version 2    engine-1 is slow to load                  0, 0
        6 s    version 3    both digests are the trainer's: commit    1, 1
        7 s                 on_served(1), on_published(1)             1, 1
        7 s                 export 3; version 2 is never exported     1, 1    num_skipped = 1
        8 s    version 4    prepare 3; engine-0 dies: on_lost         -, 1
        11 s                commit 3, on_served(3)                    -, 3
        20 s                bring_up(engine-0) gives it version 3     3, 3

    Life: run(): idle -> exporting (begun between two steps) -> pushing -> announced by
        on_served, then by on_published -> idle.
    Waits: run sleeps for a new version, then in export, prepare and commit, each at
        most timeout_s. bring_up, leave and pushes exclude each other.
    Invariant: on_served(v) follows every live engine's confirmation of v with the
        trainer's digest, in order. The trainer never waits for a push.

    The trainer keeps its two newest exports (`is_held`: one, on its device).
    `wait_released` returns once no evaluation needs the engines' present weights, which
    `is_held_up` says.
    """

    is_held: bool = False
    wait_released: Callable[[], Awaitable[None]] = at_once
    is_held_up: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = asyncio.Lock()
        """Held by a push, bring_up or leave."""
        self._announced: ExportResponse | None = None
        self._is_push_due = False
        self._is_pushing = False
        self._exported_version = 0
        # The trainer's num_restarts when its weights were last lost; -1: they were not
        # lost since the last announcement.
        self._restarts_at_loss = -1
        self._num_restarts = 0
        """Restarts of the trainer before it exported the announced weights."""
        self._changed = Signal()

    async def run(self) -> None:
        """Publish until cancelled. Raises PublishError, or what the trainer's client
        raises.
        """
        while True:
            with waiting(
                f"a policy_version above {self._exported_version}", on="the train loop"
            ):
                # Before the step has ended: the export must be requested by then, or
                # the next step may go first, and this version would be skipped.
                newest = await self.trainer.wait_step_above(self._exported_version)
                if self.is_held_up():
                    # A push is late only once there are weights for it.
                    await self.trainer.wait_version_above(self._exported_version)
            # From here on the train loop waits for no copy to begin
            # (wait_exported_or_busy): an evaluation, or bring_up with the lock, may
            # delay this push for long.
            self._set_pushing(True)
            await self.wait_released()
            async with contextlib.AsyncExitStack() as exclusive:
                if self.is_held:
                    # The export overwrites the weights that bring_up may be sending to
                    # an engine.
                    await exclusive.enter_async_context(self._lock)
                # `newest` is only a lower bound: the trainer may have trained on during
                # the waits, and exports its newest weights.
                manifest, export_s = await self._export(newest)
                if manifest.version <= self.version:
                    self._set_pushing(False)  # a restarted trainer had no newer one
                    continue
                if not self.is_held:
                    # A new file harms no reader, so engines could be brought up until
                    # here.
                    await exclusive.enter_async_context(self._lock)
                await self._publish(manifest, export_s)
            self._set_pushing(False)

    async def bring_up(self, name: str) -> None:
        """Give an engine with a new process the announced weights. Raises EngineLost or
        PublishError.
        """
        # A new process has the initial weights. After a resume these are too old, so
        # the engine waits until there is something to bring.
        while (newer := await self._bring(name)) is not None:
            # run() pushes it to the other engines. If only this one had it, the trainer
            # might be lost again before that push, and make the version a second time
            # with other bits. Versions only grow, so this engine would refuse these.
            await self.wait_announced(newer)

    async def _bring(self, name: str) -> int | None:
        """Push the announced weights to an engine. Return the trainer's version instead
        if the weights died with a trainer whose successor is ahead.
        """
        async with self._when_announced():
            if (manifest := self._announced) is not None:
                # Weights that a lost trainer held cannot be read. Each try until it is
                # back would cost the engine a restart.
                if self.is_held:
                    await self.trainer.wait_up()
                if self.is_held and self._num_restarts != self.trainer.num_restarts:
                    version = manifest.version
                    manifest = await self.trainer.export()
                    if manifest.version > version:
                        return manifest.version
                lost: list[EngineLost] = []
                targets = [target for target in self.targets if target.name == name]
                push = self._push(manifest.version, targets, lost.append)
                try:
                    await push.whole(manifest)
                # The supervisor starts the engine again, and the next try gets the
                # weights that the trainer has then.
                except WeightsLost as gone:
                    raise gone.as_kind(EngineLost, name) from gone
                if lost:
                    raise lost[0]
            # Under the lock: a push that began before this line would leave the engine
            # out, and the engine would then serve an older version.
            self._down.discard(name)
            return None

    @contextlib.asynccontextmanager
    async def _when_announced(self) -> AsyncIterator[None]:
        """Hold the lock, and nothing has to be announced first."""
        while True:
            await self._changed.wait_for(self._is_announced)
            async with self._lock:
                # A push that held the lock may have lost the weights.
                if self._is_announced():
                    yield
                    return

    def _is_announced(self) -> bool:
        return self._announced is not None or not self._is_push_due

    async def leave(self, name: str) -> None:
        """Exclude this engine from the next push on."""
        async with self._lock:
            self._down.add(name)

    def start_before_nowait(self, version: int) -> None:
        """Mark the engines as older than `version`. Call before run."""
        self._exported_version = version - 1
        self._is_push_due = True
        self.version = self._exported_version

    async def wait_announced(self, version: int) -> None:
        """Return once every live engine serves `version` or a newer one."""
        with waiting(f"the engines to serve policy_version {version}", on="publisher"):
            await self._changed.wait_for(lambda: self.version >= version)

    async def wait_exported_or_busy(self, version: int) -> None:
        """Return once the copy of `version` has begun, or during another copy or push.
        The trainer changes no weight before the copy is complete.
        """
        with waiting(f"the export of policy_version {version}", on="publisher"):
            await self._changed.wait_for(
                lambda: self._is_pushing or self._exported_version >= version
            )

    async def _export(self, newest: int) -> tuple[ExportResponse, float]:
        # The train loop waits until the copy has begun: if the next step went first,
        # the export would have to wait for its end.
        self._set_pushing(False)
        # Set before the copy is complete, so that the next step overlaps it. The
        # trainer changes no weight before the copy is complete (docs/decisions/0021).
        # The limit of a step holds here, not that of a push.
        self._exported_version = await self.trainer.begin_export(self._exported_version)
        start = clock()
        self._set_pushing(True)
        manifest = await self._limited(newest, self.trainer.export)
        note_span("weight sync", "export", start, clock(), manifest.version)
        # above the begun version if the trainer was restarted
        self._exported_version = manifest.version
        return manifest, clock() - start

    async def _publish(self, manifest: ExportResponse, export_s: float) -> None:
        # Read before the push, because the trainer may be restarted during it.
        num_restarts = self.trainer.num_restarts
        # The trainer exports a step as soon as it has trained it. Until its report is
        # here, the run's version is lower, and tokens of this one would be too new.
        await self.trainer.wait_version_above(manifest.version - 1)
        push = replace(
            self._push(manifest.version, self._live, self.on_lost),
            is_down=self.is_down,
        )
        try:
            report = await push.whole(manifest)
        except WeightsLost:
            if self._restarts_at_loss == num_restarts:
                raise  # second failure of the same trainer process
            self._restarts_at_loss = num_restarts
            # The trainer's version is now above this number, so run() exports again at
            # once. Until then the engines serve the old version.
            self._exported_version = self.version
            # The trainer's memory has other weights than the announced ones, or the next
            # export removes their file: bring_up waits for that version.
            self._announced = None
            self._is_push_due = True
            return
        # Also without a live engine: nothing samples then, and engines that come back
        # get this version before they serve.
        self._announced = manifest
        self._num_restarts = num_restarts
        self._restarts_at_loss = -1
        self.num_skipped += manifest.version - self.version - 1
        self.version = manifest.version
        self.report = replace(report, publish_s=export_s + report.publish_s)
        # First admit new groups: on_published may take the time of a download for an
        # evaluation.
        self.on_served(manifest.version)
        await self.on_published(manifest)

    async def _limited(
        self, newest: int, call: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Repeat a part of an export that a trainer restart interrupted."""
        late = PublishError(
            "publisher",
            f"the trainer did not export policy_version {newest} within {self.timeout_s} s",
            rule=f"weight_sync.timeout_s={self.timeout_s} is the limit, and an export waits for a step",
            way_out="set weight_sync.timeout_s above the time of a step, or read the trainer's log.",
        )
        while True:
            # a restarted trainer may train for long on journaled batches
            await self.trainer.wait_up()
            num_restarts = self.trainer.num_restarts
            try:
                async with within(self.timeout_s, lambda: late):
                    return await call()
            # A restart may have used up the limit. Only a trainer that was up all the
            # time is late.
            except PublishError:
                if self.trainer.is_up and self.trainer.num_restarts == num_restarts:
                    raise

    def _set_pushing(self, is_pushing: bool) -> None:
        self._is_pushing = is_pushing
        self._changed.notify()
