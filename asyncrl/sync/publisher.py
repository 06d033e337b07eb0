"""Push each policy_version to every engine, during generation or time-shared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeVar

from asyncrl.base.errors import EngineLost, PublishError, WeightsLost
from asyncrl.base.waits import note_span, waiting, within
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import Interrupt, TransferStats
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.sync.push import Locate, OnLost, Push, PushReport, WeightTrainer, in_place

T = TypeVar("T")


async def at_once(*_: object) -> None:
    """Return at once."""


@dataclass(eq=False)
class Publisher:
    """Engines that get pushes, their version, and the report of the last push.

    An engine is live, or down until it has the announced weights. Without `on_lost` a lost engine ends
    the run. An export's file exists until on_published returns. `locate` fetches a file to an engine's
    node.
    """

    trainer: WeightTrainer
    targets: Sequence[EngineClient]
    _: KW_ONLY
    timeout_s: float
    on_served: Callable[[int], None]
    on_published: Callable[[ExportResponse], Awaitable[None]] = at_once
    on_lost: OnLost | None = None
    interrupt: Interrupt = "abort"
    locate: Locate = in_place
    version: int = field(default=0, init=False)
    num_published: int = field(default=0, init=False)
    num_skipped: int = field(default=0, init=False)
    """Versions that a newer one replaced."""
    report: PushReport = field(default=PushReport(), init=False)
    """When time-shared, all of publish_s is a pause."""

    def __post_init__(self) -> None:
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
        """Skip this lost engine; a waiting push continues once its calls are cut. Idempotent."""
        self._down.add(name)

    def up_nowait(self, name: str) -> None:
        """Push to this engine from the next push on. Idempotent."""
        self._down.discard(name)

    async def leave(self, name: str) -> None:
        """Exclude this engine from pushes when this returns."""
        self._down.add(name)

    def _push(self, version: int, targets: Sequence[EngineClient], on_lost: OnLost | None) -> Push:
        return Push(
            version,
            targets,
            served=self.version,
            timeout_s=self.timeout_s,
            interrupt=self.interrupt,
            on_lost=on_lost,
            locate=self.locate,
        )

    def _count(self, version: int, report: PushReport) -> None:
        self.version = version
        self.report = report
        self.num_published += 1


class ColocatedPush(Publisher):
    """Pushes during a handover of shared devices: push() in chunks, then announce()."""

    _pushed: tuple[ExportResponse, PushReport] | None = None

    async def push(self) -> TransferStats:
        """Raises PublishError, or the errors of the trainer's client."""
        push = self._push(self.trainer.policy_version, self._live, self.on_lost)
        report, manifest = await push.chunks(self.trainer)
        self._pushed = manifest, replace(report, pause_s=report.publish_s)
        return TransferStats(num_bytes=manifest.num_bytes, seconds=report.publish_s)

    async def announce(self) -> None:
        assert self._pushed is not None, "announce() comes after push()"
        manifest, report = self._pushed
        self._count(manifest.version, report)
        await self.on_published(manifest)
        self.on_served(manifest.version)


@dataclass(eq=False)
class PushLoop(Publisher):
    """Pushes the newest weights to engines on separate devices, one push at a time.

    Life: run(): idle -> exporting (begun between two steps) -> pushing -> announced by on_served, then by
        on_published -> idle.
    Waits: run sleeps for a new version, then in export, prepare and commit, each at most timeout_s.
        bring_up, leave and pushes exclude each other.
    Invariant: on_served(v) follows every live engine's confirmation of v with the trainer's digest, in
        order. The trainer never waits for a push.

    The trainer keeps its two newest exports (`is_collective`: one). `wait_released` returns once no
    evaluation needs the engines' present weights.
    """

    is_collective: bool = False
    wait_released: Callable[[], Awaitable[None]] = at_once

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = asyncio.Lock()
        self._announced: ExportResponse | None = None
        self._is_first_push_due = False
        self._is_pushing = False
        self._exported_version = 0
        self._restarts_at_loss = -1
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Publish until cancelled. Raises PublishError, or what the trainer's client raises."""
        while True:
            with waiting(f"a policy_version above {self._exported_version}", on="the train loop"):
                newest = await self.trainer.wait_version_above(self._exported_version)
            self._set_pushing(True)
            await self.wait_released()
            # A collective export needs the engines too.
            async with self._turn if self.is_collective else contextlib.nullcontext():
                manifest, export_s = await self._export(newest)
                async with contextlib.nullcontext() if self.is_collective else self._turn:
                    await self._publish(manifest, export_s)
            self._set_pushing(False)

    async def bring_up(self, name: str) -> None:
        """Give an engine with a new process the announced weights. Raises EngineLost or PublishError."""
        while self._announced is None and self._is_first_push_due:
            await self._changed.wait()
        lost: list[EngineLost] = []
        async with self._turn:
            if self._announced is not None:
                targets = [target for target in self.targets if target.name == name]
                try:
                    await self._push(self._announced.version, targets, lost.append).whole(self._announced)
                except WeightsLost as gone:
                    raise EngineLost(name, gone.fault, rule=gone.rule, way_out=gone.way_out) from gone
                if lost:
                    raise lost[0]
            self._down.discard(name)

    async def leave(self, name: str) -> None:
        """Exclude this engine from the next push on."""
        async with self._turn:
            self._down.add(name)

    def start_before_nowait(self, version: int) -> None:
        """Mark the engines as older than `version`. Call before run."""
        self._exported_version = version - 1
        self._is_first_push_due = True
        self.version = self._exported_version

    async def wait_announced(self, version: int) -> None:
        """Return once every live engine serves `version` or a newer one."""
        with waiting(f"the engines to serve policy_version {version}", on="publisher"):
            while self.version < version:
                await self._changed.wait()

    async def wait_exported_or_busy(self, version: int) -> None:
        """Return once the copy of `version` has begun, or during another copy or push. The trainer
        changes no weight before the copy is complete.
        """
        with waiting(f"the export of policy_version {version}", on="publisher"):
            while self._exported_version < version and not self._is_pushing:
                await self._changed.wait()

    async def _export(self, newest: int) -> tuple[ExportResponse, float]:
        clock = asyncio.get_running_loop().time
        start = clock()
        self._set_pushing(False)
        before = self._exported_version
        self._exported_version = await self._limited(newest, self.trainer.begin_export)
        self._set_pushing(True)
        manifest = await self._limited(newest, self.trainer.export)
        note_span("weight sync", "export", start, clock(), manifest.version)
        self.num_skipped += manifest.version - before - 1
        self._exported_version = manifest.version  # above the begun version if the trainer was restarted
        return manifest, clock() - start

    async def _publish(self, manifest: ExportResponse, export_s: float) -> None:
        push = self._push(manifest.version, self._live, self.on_lost)
        push.is_down = self.is_down
        try:
            report = await push.whole(manifest)
        except WeightsLost:
            if self._restarts_at_loss == self.trainer.num_restarts:
                raise  # twice of the same trainer
            self._restarts_at_loss = self.trainer.num_restarts
            self._exported_version = self.version
            return
        self._announced = manifest
        self._restarts_at_loss = -1
        self._count(manifest.version, replace(report, export_s=export_s))
        self.on_served(manifest.version)
        await self.on_published(manifest)

    async def _limited(self, newest: int, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a part of an export that a trainer restart interrupted."""
        late = PublishError(
            "publisher",
            f"the trainer did not export policy_version {newest} within {self.timeout_s} s",
            rule=f"weight_sync.timeout_s={self.timeout_s} is the limit, and an export waits for a step",
            way_out="set weight_sync.timeout_s above the time of a step, or read the trainer's log.",
        )
        while True:
            await self.trainer.wait_up()  # a restarted trainer may train for long on journaled batches
            num_restarts = self.trainer.num_restarts
            try:
                async with within(self.timeout_s, lambda: late):
                    return await call()
            except PublishError:
                if self.trainer.is_up and self.trainer.num_restarts == num_restarts:
                    raise

    def _set_pushing(self, is_pushing: bool) -> None:
        self._is_pushing = is_pushing
        self._changed.set()
        self._changed = asyncio.Event()
