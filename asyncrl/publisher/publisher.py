"""The room that brings each policy_version to every engine. Knows no batch, no rollout, and never opens the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.errors import PublishError
from asyncrl.publisher.push import Push
from asyncrl.types import Interrupt, WeightManifest, WeightSource, WeightTarget


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Totals, and the seconds of the last publish: publish_s = export_s + prepare_s + commit_s.

    `skipped`: versions that were newer ones before their turn came; `pause_s`: the longest time in which an engine
    could not decode; `total_publish_s`, `total_pause_s` add up all publishes.
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

    Life:       idle -> a new version: exporting (the trainer copies between two steps) -> pushing (prepare on all
                engines beside generation, then commit on all) -> announced by on_served -> idle.
    Waits:      run sleeps in the source's wait_version_above, then in export, prepare and commit, each at most
                timeout_s; the train loop sleeps in wait_exported_or_busy, woken by the end of an export.
    Invariant:  on_served(v) is called only after every engine has said that it serves v, with the digest that the
                trainer sent: Push.run guarantees it. Versions are announced in order; the trainer never waits for a push.
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
        policy_version: int = 0,
    ) -> None:
        self._source, self._targets = source, tuple(targets)
        self.interrupt: Interrupt = interrupt
        self.timeout_s = timeout_s
        self._on_served = on_served
        self._state: Literal["idle", "exporting", "pushing"] = "idle"
        self._exported_version = policy_version
        self._changed = asyncio.Event()
        self._stats = PublisherStats(version=policy_version)

    def __repr__(self) -> str:
        return f"<Publisher {self._state}, v{self._stats.version} on {len(self._targets)} engines, {self._stats.skipped} skipped>"

    def stats(self) -> PublisherStats:
        """Totals and the last publish."""
        return self._stats

    async def run(self) -> None:
        """Publish version after version until cancelled. Raises PublishError, or what the trainer's client raises."""
        while True:
            newest = await self._source.wait_version_above(self._exported_version)
            await self._publish(newest)

    async def aclose(self) -> None:
        """Nothing is held: staging belongs to the trainer and to the engines."""

    async def wait_exported_or_busy(self, version: int) -> None:
        """Called by the train loop right after the step that made `version`, before the next one.

        Returns once the weights are copied into staging, so that the next step may change them; or at once if
        an older version is still being pushed, because the trainer is never held for a push.
        """
        while self._exported_version < version and self._state != "pushing":
            await self._changed.wait()

    async def _publish(self, newest: int) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        self._enter("exporting")
        manifest = await self._export(newest)
        exported = clock()
        skipped = manifest.version - self._exported_version - 1
        self._exported_version = manifest.version
        self._enter("pushing")
        push = await Push(manifest, self._targets, served=self._stats.version, interrupt=self.interrupt, timeout_s=self.timeout_s).run()
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
        self._enter("idle")

    async def _export(self, newest: int) -> WeightManifest:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                manifest = await self._source.export()
        except TimeoutError:
            if not limit.expired():
                raise
            raise PublishError(
                self.name,
                f"the trainer did not export policy_version {newest} within {self.timeout_s} s",
                rule=f"publisher.timeout_s={self.timeout_s} is the limit of each phase, and an export waits for the running step",
                way_out="set publisher.timeout_s above the time of one optimizer step, or read the trainer's log.",
            ) from None
        if manifest.version < newest:
            raise PublishError(
                self.name,
                f"the trainer exported policy_version {manifest.version} after it had announced {newest}",
                rule="versions never go back",
                way_out="read the trainer's log, then start the run again.",
            )
        return manifest

    def _enter(self, state: Literal["idle", "exporting", "pushing"]) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()
