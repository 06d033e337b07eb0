"""One push in chunks, straight into weights that are awake and empty: for engines that share the trainer's device. Opens no file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.publisher.to_all import RESTART, Commits, OnLost, ToAll
from asyncrl.wire import ExportChunkResponse


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
    """Seconds in which the trainer wrote chunks, the engines loaded them, and they committed; `digest` is of all tensors."""

    export_s: float
    load_s: float
    commit_s: float
    digest: str
    num_tensors: int
    num_bytes: int
    num_chunks: int


class ChunkPush(ToAll[ChunkTarget]):
    """Chunk after chunk: written once by the trainer, loaded by every engine, each digest checked; then commit on all, checked again.

    Life:       made -> run() once. An engine that is lost on the way is told to `on_lost` and left behind, as in a Push.
    Waits:      for the trainer to write a chunk, without a limit of its own: a handover, which has one, goes on around it; then for all
                engines at once, at most timeout_s a phase.
    Invariant:  a chunk is asked for only when every engine in `live` has loaded the one before, which it overwrites. run returns only if
                every engine in `live` serves `version` with the digest of all that was sent. After an error none of them can serve:
                what they hold is no version, until the next push.
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
            num_tensors, num_bytes, num_chunks = num_tensors + chunk.num_tensors, num_bytes + chunk.num_bytes, num_chunks + 1
            is_last = chunk.is_last
        start = clock()
        self.sent = f"{num_tensors} tensors, {num_bytes} bytes in {num_chunks} chunks"
        await self.commit_all(chunk.whole_digest, "abort")
        return ChunkPushReport(export_s, load_s, clock() - start, chunk.whole_digest, num_tensors, num_bytes, num_chunks)

    async def _load(self, chunk: ExportChunkResponse) -> None:
        digests = await self.on_all(f"load_chunk {chunk.index}", lambda target: target.load_chunk(chunk))
        for target in self.live:
            self.check_digest(target, f"loaded chunk {chunk.index} of", digests[target.name], chunk.digest)

    def _check_asked_for(self, chunk: ExportChunkResponse, index: int) -> None:
        if (chunk.version, chunk.index) != (self.version, index) or chunk.is_last != bool(chunk.whole_digest):
            raise self.error(
                f"the trainer was asked for chunk {index} of policy_version {self.version} and wrote chunk {chunk.index} of "
                f"{chunk.version}, is_last={chunk.is_last}, whole_digest={chunk.whole_digest or 'none'}",
                "the chunks of one version come in order, and the last one alone says the digest of all",
                RESTART,
            )
