"""The room that brings each policy_version to every engine. Knows no batch, no rollout, and never opens the
weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.errors import EngineLost, PublishError
from asyncrl.messages.protocols import WeightSource, WeightTarget
from asyncrl.messages.records import Interrupt, WeightManifest
from asyncrl.sync.to_all import OnLost, ToAll
from asyncrl.waits import TimeLimit, waiting


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Totals, and the seconds of the last publish: publish_s = export_s + prepare_s + commit_s.

    `skipped`: versions that were newer ones before their turn came; `pause_s`: the longest time in which an
    engine could not decode; `total_publish_s`, `total_pause_s` add up all publishes.
    """

    version: int = 0
    published: int = 0
    skipped: int = 0
    interrupted: int = 0
    num_bytes: int = 0
    publish_s: float = 0.0
    export_s: float = 0.0
    prepare_s: float = 0.0
    commit_s: float = 0.0
    pause_s: float = 0.0
    total_publish_s: float = 0.0
    total_pause_s: float = 0.0


class Publisher:
    """Pushes the newest weights to all engines, one push after the other.

    Life:       idle -> a new version: exporting (the trainer copies between two steps) -> pushing (prepare on
    all live
                engines beside generation, then commit on all, at once or in turn) -> announced by on_served,
                then by on_published -> idle.
                An engine is live, or down from down_nowait until bring_up has given its new process the
                announced weights.
    Waits:      run sleeps in the source's wait_version_above, then in export, prepare and commit, each at
    most
                timeout_s; the train loop sleeps in wait_exported_or_busy, woken by the end of an export.
                bring_up and pushes sleep in `_turn` for each other, so that no returning engine misses a
                version in between.
    Invariant:  on_served(v) is called only after every live engine has said that it serves v, with the digest
    that the
                trainer sent: Push.run guarantees it. With none live nobody holds an older version: the
                version is announced, and who returns gets it first. Versions are announced in order; the
                trainer never waits for a push.

    The trainer keeps its newest two exports, and makes one only after the last one is announced (run does one
    thing at a time): the announced one, which bring_up pushes, is always among them. If it keeps one
    (is_one_kept), a turn lasts from an export to its announcement.
    """

    name = "publisher"

    def __init__(
        self,
        source: WeightSource,
        targets: Sequence[WeightTarget],
        *,
        interrupt: Interrupt,
        timeout_s: float,
        on_served: Callable[[int], None],
        on_published: Callable[[WeightManifest], None] = lambda _: None,
        on_lost: Callable[[EngineLost], None] | None = None,
        policy_version: int = 0,
        is_rolling: bool = False,
        is_one_kept: bool = False,
    ) -> None:
        """`is_rolling`: engines swap one after the other. What they hold meanwhile differs; on_served tells
        the oldest.

        `is_one_kept`: the trainer keeps its newest export alone, so it makes none while an engine is brought
        up with it.
        """
        self._source, self._targets = source, tuple(targets)
        self.interrupt: Interrupt = interrupt
        self.timeout_s = timeout_s
        self._on_served = on_served
        self._on_published = (
            on_published  # called before the next export is asked for: until it returns, the file is there
        )
        self._is_rolling, self._is_one_kept = is_rolling, is_one_kept
        self._on_lost = on_lost  # None: an engine that is lost ends the run
        self._down: set[str] = set()
        self._turn = asyncio.Lock()
        self._announced: WeightManifest | None = None
        self._is_first_push_due = False
        self._state: Literal["idle", "exporting", "pushing"] = "idle"
        self._exported_version = policy_version
        self._changed = asyncio.Event()
        self._stats = PublisherStats(version=policy_version)

    def __repr__(self) -> str:
        return f"<Publisher {self._state}, v{self._stats.version} on {len(self._live())} engines, {self._stats.skipped} skipped>"

    def stats(self) -> PublisherStats:
        """Totals and the last publish."""
        return self._stats

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        stats = self._stats
        return {
            "publish/version": stats.version,
            "publish/skipped": stats.skipped,
            "perf/publish_s": stats.publish_s,
            "perf/publish_pause_s": stats.pause_s,
        }

    async def run(self) -> None:
        """Publish version after version until cancelled. Raises PublishError, or what the trainer's client
        raises.
        """
        while True:
            with waiting(f"a policy_version above {self._exported_version}", on="the train loop"):
                newest = await self._source.wait_version_above(self._exported_version)
            await self._publish(newest)

    async def aclose(self) -> None:
        """Nothing is held: staging belongs to the trainer and to the engines."""

    def down_nowait(self, name: str) -> None:
        """Push to the others: this engine is lost. A push that waits for it goes on once its calls are cut.
        Idempotent.
        """
        self._down.add(name)

    async def bring_up(self, name: str) -> None:
        """Give an engine whose process is new the announced weights; it is live when this returns.

        Raises EngineLost if it is lost again, PublishError if it loads something else.
        """
        while self._announced is None and self._is_first_push_due:
            await self._changed.wait()
        lost: list[EngineLost] = []
        async with self._turn:
            if self._announced is not None:
                (target,) = (target for target in self._targets if target.name == name)
                await self._push(self._announced, [target], on_lost=lost.append).run()
                if lost:
                    raise lost[0]
            self._down.discard(name)

    def start_before_nowait(self, version: int) -> None:
        """Before run: the engines have other weights than those of `version`, whose push is the first."""
        self._exported_version = version - 1
        self._is_first_push_due = True
        self._stats = replace(self._stats, version=self._exported_version)

    async def wait_announced(self, version: int) -> None:
        """Return once every live engine serves `version` or a newer one."""
        with waiting(f"the engines to serve policy_version {version}", on="publisher"):
            while self._stats.version < version:
                await self._changed.wait()

    async def wait_exported_or_busy(self, version: int) -> None:
        """Called by the train loop right after the step that made `version`, before the next one.

        Returns once the weights are copied into staging, so that the next step may change them; or at once if
        an older version is still being pushed, because the trainer is never held for a push.
        """
        with waiting(f"the copy of the weights of policy_version {version}", on="publisher"):
            while self._exported_version < version and self._state != "pushing":
                await self._changed.wait()

    async def _publish(self, newest: int) -> None:
        if not self._is_one_kept:
            await self._export_and_push(newest, self._turn)
            return
        self._enter("pushing")  # the trainer is not held while an engine is brought up
        async with self._turn:
            await self._export_and_push(newest, contextlib.nullcontext())

    async def _export_and_push(self, newest: int, turn: contextlib.AbstractAsyncContextManager[None]) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        self._enter("exporting")
        manifest = await self._export(newest)
        exported = clock()
        skipped = manifest.version - self._exported_version - 1
        self._exported_version = manifest.version
        self._enter("pushing")
        async with turn:
            push = await self._push(
                manifest, self._live(), on_lost=self._on_lost, is_down=self._down.__contains__
            ).run()
            self._announced = manifest
        total_s = clock() - start
        before = self._stats
        self._stats = replace(
            before,
            version=manifest.version,
            published=before.published + 1,
            skipped=before.skipped + skipped,
            interrupted=before.interrupted + push.num_interrupted,
            num_bytes=manifest.num_bytes,
            publish_s=total_s,
            export_s=exported - start,
            prepare_s=push.prepare_s,
            commit_s=push.commit_s,
            pause_s=push.pause_s,
            total_publish_s=before.total_publish_s + total_s,
            total_pause_s=before.total_pause_s + push.pause_s,
        )
        self._on_served(manifest.version)
        self._on_published(manifest)
        self._enter("idle")

    def _live(self) -> list[WeightTarget]:
        return [target for target in self._targets if target.name not in self._down]

    def _push(
        self,
        manifest: WeightManifest,
        targets: Sequence[WeightTarget],
        *,
        on_lost: Callable[[EngineLost], None] | None,
        is_down: Callable[[str], bool] = lambda _: False,
    ) -> Push:
        return Push(
            manifest,
            targets,
            served=self._stats.version,
            interrupt=self.interrupt,
            timeout_s=self.timeout_s,
            on_lost=on_lost,
            is_rolling=self._is_rolling,
            is_down=is_down,
        )

    async def _export(self, newest: int) -> WeightManifest:
        manifest = None
        while manifest is None:
            await (
                self._source.wait_up()
            )  # a trainer that is started again may train for long on what it had trained on before
            num_restarts, limit = self._source.num_restarts, TimeLimit(self.timeout_s)
            try:
                async with limit:
                    manifest = await self._source.export()
            except TimeoutError:
                if not limit.expired():
                    raise
                if self._source.is_up and self._source.num_restarts == num_restarts:
                    raise self._no_export(newest) from None
        if manifest.version < newest:
            raise PublishError(
                self.name,
                f"the trainer exported policy_version {manifest.version} after it had announced {newest}",
                rule="versions never go back",
                way_out="read the trainer's log, then start the run again.",
            )
        return manifest

    def _no_export(self, newest: int) -> PublishError:
        return PublishError(
            self.name,
            f"the trainer did not export policy_version {newest} within {self.timeout_s} s",
            rule=f"publisher.timeout_s={self.timeout_s} is the limit of each phase, and an export waits for "
            f"the running step",
            way_out="set publisher.timeout_s above the time of one optimizer step, or read the trainer's "
            "log.",
        )

    def _enter(self, state: Literal["idle", "exporting", "pushing"]) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()


# One push of one set of weights to all engines, in two phases. Knows no trainer and no other push.


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds of both phases; `pause_s` of the engine that paused longest; interrupted requests of all
    engines.
    """

    prepare_s: float
    commit_s: float
    pause_s: float
    num_interrupted: int


class Push(ToAll[WeightTarget]):
    """Prepare on every engine, check every digest, commit on every engine, all at once or one after the
    other, check again.

    Life:       made, with the version that all engines serve -> run() once. An engine that is lost on the way
    is told to
                `on_lost` and left behind; `live` holds the others. Without `on_lost` it is an error like any
                other.
    Waits:      for all engines at once, at most timeout_s a phase; `is_rolling`: in commit for one after the
    other. Invariant:  run returns only if every engine in `live` serves manifest.version with
    manifest.digest. No engine swaps
                before each of them has the right bytes in staging, so what fails in prepare leaves all on the
                old version.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        targets: Sequence[WeightTarget],
        *,
        served: int,
        interrupt: Interrupt,
        timeout_s: float,
        on_lost: OnLost | None = None,
        is_rolling: bool = False,
        is_down: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__(manifest.version, targets, served=served, timeout_s=timeout_s, on_lost=on_lost)
        self.manifest = manifest
        self.sent = f"{manifest.num_tensors} tensors, {manifest.num_bytes} bytes"
        self._interrupt: Interrupt = interrupt
        self._is_rolling, self._is_down = is_rolling, is_down

    def __repr__(self) -> str:
        return f"<Push v{self.manifest.version} {self.manifest.digest} to {len(self.live)} engines>"

    async def run(self) -> PushReport:
        """Both phases. Raises PublishError with the versions that each engine has now."""
        clock = asyncio.get_running_loop().time
        start = clock()
        digests = await self.on_all("prepare", lambda target: target.prepare(self.manifest))
        for target in self.live:
            self.check_digest(target, "loaded", digests[target.name], self.manifest.digest)
        prepared = clock()
        reports = await self.commit_all(
            self.manifest.digest, self._interrupt, is_rolling=self._is_rolling, is_down=self._is_down
        )
        return PushReport(
            prepare_s=prepared - start,
            commit_s=clock() - prepared,
            pause_s=max((report.pause_s for report in reports.values()), default=0.0),
            num_interrupted=sum(report.num_interrupted for report in reports.values()),
        )
