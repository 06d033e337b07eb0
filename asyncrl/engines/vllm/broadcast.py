"""Weights that the trainer sends to all engines at once, through vLLM's own weight-transfer routes. Knows no device and no group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.engines.vllm.routes import Routes
from asyncrl.types import WeightManifest
from asyncrl.wire import GroupSeat


class Meeting(Protocol):
    """Where engines wait until all of them are there and the trainer sends; publisher.Broadcasts is it."""

    def expect_nowait(self, name: str, version: int, num_workers: int) -> None:
        """The engine will receive the version."""
        ...

    def leave_nowait(self, name: str) -> None:
        """It will not. Idempotent."""
        ...

    async def receive(self, name: str, version: int, take: Callable[[GroupSeat], Awaitable[None]]) -> None:
        """Returns when it has the weights; `take` has its workers receive them. Raises EngineError."""
        ...


@dataclass
class BroadcastLoad:
    """A whole set of weights that nobody writes into a file.

    It comes once, for all engines: if the canary fails, it cannot be loaded again for one of them.
    """

    name: str
    manifest: WeightManifest
    meeting: Meeting
    can_repeat: bool = field(default=False, init=False)
    model: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.version, self.digest, self.canary = self.manifest.version, self.manifest.digest, self.manifest.canary

    async def stage(self, routes: Routes) -> str:
        """Nothing is brought yet: it is said that this engine, with its workers, takes part. They compare the digest as they load."""
        workers = await routes.rpc("asyncrl_facts", {})
        self.meeting.expect_nowait(self.name, self.version, len(workers))
        return self.digest

    async def load(self, routes: Routes) -> None:
        """Wait for all others, then receive; a worker that gets something else refuses it."""
        expected = {
            "version": self.version, "digest": self.manifest.held_digest,
            "num_tensors": self.manifest.num_tensors, "num_bytes": self.manifest.num_bytes,
        }  # fmt: skip

        async def take(seat: GroupSeat) -> None:
            if seat.is_new:
                await routes.join_group(seat.model_dump())
            await routes.start_update()
            await routes.update_weights(expected)
            await routes.finish_update()

        await self.meeting.receive(self.name, self.version, take)
