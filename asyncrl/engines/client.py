"""What rooms are given for one engine server, whatever program it is. Knows no route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.types import CommitReport, Interrupt, WeightManifest
from asyncrl.wire import EngineHealth, EnginePart, ExportChunkResponse, GenerateChunk, GenerateRequest, GenerateResponse, Moved


class EngineClient(Protocol):
    """One engine server, for the pool, the publisher, the supervisor and a handover. EngineServer and VllmServer are it.

    What cannot be answered raises EngineError, EngineLost if nobody is there; a request that the server cannot serve RequestRefused.
    """

    name: str
    num_commits: int
    """Swaps begun plus swaps ended plus sleeps: whoever saw it change knows why it was interrupted."""

    @property
    def policy_version(self) -> int:
        """The version that the server has confirmed last."""
        ...

    def cut_nowait(self) -> None:
        """Give the process up: every call that waits for it, and every one to come, raises EngineLost. Idempotent."""
        ...

    def renew_nowait(self) -> None:
        """Another process has taken its place, with the weights of the start: calls pass again."""
        ...

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: Callable[[GenerateChunk], None] | None = None
    ) -> GenerateResponse:
        """One segment of a request; with `on_chunk`, what is left of it after the chunks that it was told."""
        ...

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests (None = all) with what they have; returns those that were here."""
        ...

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How the server does."""
        ...

    async def prepare(self, manifest: WeightManifest) -> str:
        """Have the weights loaded beside the serving ones; returns the digest of what was loaded."""
        ...

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitReport:
        """Have the prepared weights swapped in; returns what the server says of the swap."""
        ...

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """Have what runs aborted and these parts freed. Idempotent."""
        ...

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        """Have memory taken for these parts again; `restore`: with the weights that served before. Idempotent."""
        ...

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        """Have one chunk of a push loaded into its woken weights; returns the digest of what was loaded."""
        ...
