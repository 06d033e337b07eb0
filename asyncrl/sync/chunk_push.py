"""Brings versions to engines that share the trainer's device: not beside generation, but in the handover that
ends training.

Knows no lease: whoever hands the device over calls push() in the middle of it and announce() at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from asyncrl.errors import EngineLost
from asyncrl.messages.base import Moved
from asyncrl.messages.records import WeightManifest
from asyncrl.messages.trainer_calls import ExportChunkResponse
from asyncrl.sync.publisher import PublisherStats
from asyncrl.sync.to_all import RESTART, Commits, OnLost, ToAll

# One push in chunks, straight into weights that are awake and empty: for engines that share the trainer's
# device. Opens no file.


class ChunkSource(Protocol):
    """What a push needs of the trainer, whose weights are on its device meanwhile."""

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Write chunk `index` of the weights over the one before."""
        ...


class ChunkTarget(Commits, Protocol):
    """What a push needs of an engine server, whose weights are awake and without content."""

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        """Copy the chunk into the weights; return the digest of what was loaded."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkPushReport:
    """Seconds in which the trainer wrote chunks, the engines loaded them, and they committed; `digest` is of
    all tensors.
    """

    export_s: float
    load_s: float
    commit_s: float
    digest: str
    num_tensors: int
    num_bytes: int
    num_chunks: int


class ChunkPush(ToAll[ChunkTarget]):
    """Chunk after chunk: written once by the trainer, loaded by every engine, each digest checked; then
    commit on all, checked again.

    Life:       made -> run() once. An engine that is lost on the way is told to `on_lost` and left behind, as
    in a Push. Waits:      for the trainer to write a chunk, without a limit of its own: a handover, which has
    one, goes on around it; then for all
                engines at once, at most timeout_s a phase.
    Invariant:  a chunk is asked for only when every engine in `live` has loaded the one before, which it
    overwrites. run returns only if
                every engine in `live` serves `version` with the digest of all that was sent. After an error
                none of them can serve: what they hold is no version, until the next push.
    """

    def __init__(
        self,
        version: int,
        source: ChunkSource,
        targets: Sequence[ChunkTarget],
        *,
        served: int,
        timeout_s: float,
        on_lost: OnLost | None = None,
    ) -> None:
        super().__init__(version, targets, served=served, timeout_s=timeout_s, on_lost=on_lost)
        self._source = source

    def __repr__(self) -> str:
        return f"<ChunkPush v{self.version} to {len(self.live)} engines>"

    async def run(self) -> ChunkPushReport:
        """All chunks and the commit. Raises PublishError, or what the trainer's client raises."""
        clock = asyncio.get_running_loop().time
        export_s = load_s = 0.0
        num_tensors = num_bytes = num_chunks = 0
        is_last = False
        while not is_last:
            start = clock()
            chunk = await self._source.export_chunk(self.version, num_chunks)
            exported = clock()
            self._check_asked_for(chunk, num_chunks)
            self.sent = f"chunk {chunk.index}: {chunk.num_tensors} tensors, {chunk.num_bytes} bytes"
            await self._load(chunk)
            export_s, load_s = export_s + exported - start, load_s + clock() - exported
            num_tensors, num_bytes, num_chunks = (
                num_tensors + chunk.num_tensors,
                num_bytes + chunk.num_bytes,
                num_chunks + 1,
            )
            is_last = chunk.is_last
        start = clock()
        self.sent = f"{num_tensors} tensors, {num_bytes} bytes in {num_chunks} chunks"
        await self.commit_all(chunk.whole_digest, "abort")
        return ChunkPushReport(
            export_s, load_s, clock() - start, chunk.whole_digest, num_tensors, num_bytes, num_chunks
        )

    async def _load(self, chunk: ExportChunkResponse) -> None:
        digests = await self.on_all(f"load_chunk {chunk.index}", lambda target: target.load_chunk(chunk))
        for target in self.live:
            self.check_digest(target, f"loaded chunk {chunk.index} of", digests[target.name], chunk.digest)

    def _check_asked_for(self, chunk: ExportChunkResponse, index: int) -> None:
        if (chunk.version, chunk.index) != (self.version, index) or chunk.is_last != bool(chunk.whole_digest):
            raise self.error(
                f"the trainer was asked for chunk {index} of policy_version {self.version} and wrote chunk "
                f"{chunk.index} of "
                f"{chunk.version}, is_last={chunk.is_last}, whole_digest={chunk.whole_digest or 'none'}",
                "the chunks of one version come in order, and the last one alone says the digest of all",
                RESTART,
            )


class TurnSource(ChunkSource, Protocol):
    """What this publisher needs of the trainer."""

    @property
    def policy_version(self) -> int:
        """Of its newest weights."""
        ...

    async def export(self) -> WeightManifest:
        """All weights in one file in staging."""
        ...


class ChunkPublisher:
    """Pushes the trainer's weights to all live engines, chunk by chunk.

    Life:       idle -> push(): all live engines serve the trainer's version, and nobody is told ->
    announce(): on_published, then
                on_served. An engine is live, or down from down_nowait to up_nowait. A push of what was
                announced needs no other.
    Waits:      push sleeps in a ChunkPush; evaluate in the export of a whole file, which only an evaluation
    needs. Invariant:  announce names the version of the last push, which ChunkPush vouches for. Versions are
    announced in order.
    """

    name = "publisher"

    def __init__(
        self,
        source: TurnSource,
        targets: Sequence[ChunkTarget],
        *,
        timeout_s: float,
        on_served: Callable[[int], None],
        on_published: Callable[[int, str], None],
        is_whole_wanted: Callable[[int], bool] = lambda _: False,
        on_whole: Callable[[WeightManifest], None] = lambda _: None,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        """`on_published` is told version and digest. `on_whole` gets all weights in one file, where
        `is_whole_wanted` says so; when it returns the file is gone, and what it is to keep it has linked.
        """
        self._source, self._targets = source, tuple(targets)
        self.timeout_s = timeout_s
        self._on_served, self._on_published = on_served, on_published
        self._is_whole_wanted, self._on_whole = is_whole_wanted, on_whole
        self._on_lost = on_lost
        self._down: set[str] = set()
        self._pushed: tuple[int, ChunkPushReport] | None = None
        self._stats = PublisherStats()

    def __repr__(self) -> str:
        return f"<ChunkPublisher v{self._stats.version} on {len(self._live())} engines>"

    def stats(self) -> PublisherStats:
        """Totals and the last publish; `pause_s` is all of it, for the engines serve nothing meanwhile."""
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

    def is_down(self, name: str) -> bool:
        """Whether this engine is left out."""
        return name in self._down

    def down_nowait(self, name: str) -> None:
        """Push to the others: this engine is lost. Idempotent."""
        self._down.add(name)

    def up_nowait(self, name: str) -> None:
        """The next push goes to this engine too. Idempotent."""
        self._down.discard(name)

    async def push(self) -> Moved:
        """Have every live engine serve the trainer's version; what was sent. Raises PublishError, or what the
        trainer's client raises.
        """
        version = self._source.policy_version
        push = ChunkPush(
            version,
            self._source,
            self._live(),
            served=self._stats.version,
            timeout_s=self.timeout_s,
            on_lost=self._on_lost,
        )
        report = await push.run()
        self._pushed = version, report
        return Moved(num_bytes=report.num_bytes, seconds=report.export_s + report.load_s + report.commit_s)

    def announce(self) -> None:
        """All live engines serve what was pushed last, and can sample."""
        assert self._pushed is not None, "announce() comes after push()"
        version, report = self._pushed
        publish_s, before = report.export_s + report.load_s + report.commit_s, self._stats
        self._stats = replace(
            before,
            version=version,
            published=before.published + 1,
            num_bytes=report.num_bytes,
            publish_s=publish_s,
            export_s=report.export_s,
            prepare_s=report.load_s,
            commit_s=report.commit_s,
            pause_s=publish_s,
            total_publish_s=before.total_publish_s + publish_s,
            total_pause_s=before.total_pause_s + publish_s,
        )
        self._on_published(version, report.digest)
        self._on_served(version)

    async def evaluate(self, version: int) -> None:
        """While the trainer has its weights: if this version is to be evaluated, hand all of them over in one
        file, then remove it.
        """
        if not self._is_whole_wanted(version):
            return
        manifest = await self._source.export()
        self._on_whole(manifest)
        Path(manifest.path).unlink(missing_ok=True)  # noqa: ASYNC240  a name in shared memory

    def _live(self) -> list[ChunkTarget]:
        return [target for target in self._targets if target.name not in self._down]
