"""Starts a harness worker again that died, or whose event loop its harness blocks. Knows the process; knows no rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config import SupervisionConfig
from asyncrl.errors import ConnectionShortage, RoomError
from asyncrl.running.supervision import HEARTBEAT_PERIOD_S, Restartable, Restarts, backoff_s, in_short, until_lost
from asyncrl.worker_wire import WorkerHealth

logger = logging.getLogger("asyncrl.running.worker_supervision")


class WorkerSupervisor:
    """Keeps one worker of a run going; what it ran fails as data, and is tried again.

    Life:       up -> lost: it died, gave no answer for heartbeat_s, or its event loop stood still for lease_timeout_s, when its
                rollouts have failed already -> `gone` is told, so that its rollouts fail now -> backoff
                -> a new process, which leases by itself -> up.
    Waits:      run sleeps until the worker is lost, then in backoff_s and in the start of the new one.
    Invariant:  more than max_restarts (see Restarts) end the run with the reason of the last loss; 0 is: the first loss does.
    """

    def __init__(
        self,
        process: Restartable,
        config: SupervisionConfig,
        *,
        heartbeat_s: float,
        lease_timeout_s: float,
        gone: Callable[[str, str], None],
        warn: Callable[[str], None],
        on_event: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """`gone`: told (name, why)."""
        self._process, self.config, self.heartbeat_s = process, config, heartbeat_s
        self._gone, self._warn, self._on_event = gone, warn, on_event
        self._lease_timeout_s = lease_timeout_s
        self._restarts = Restarts(config)

    def __repr__(self) -> str:
        return f"<WorkerSupervisor {self._process.name} {self.num_restarts}/{self.config.max_restarts} restarts>"

    @property
    def num_restarts(self) -> int:
        """So far, those that failed included."""
        return self._restarts.num

    @property
    def name(self) -> str:
        """The worker's."""
        return self._process.name

    async def run(self) -> None:
        """Watch, and start again, until cancelled. Raises the RoomError that ends the run."""
        while True:
            self._restarts.works_nowait()
            lost = await until_lost(self._process, self.heartbeat_s, self._until_blocked())
            while lost is not None:
                lost = await self._replace(lost)

    async def _until_blocked(self) -> None:
        """Raise RoomError once its event loop stands still for too long. Its /health is answered from another thread.

        Two answers must say so: when the machine stood still, the first one may come before the worker's loop has gone on.
        """
        before: WorkerHealth | None = None
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            health = getattr(self._process, "health", None)
            if not isinstance(health, WorkerHealth) or health.loop_lag_s <= self._lease_timeout_s:
                before = None
            elif before is None or health is before:
                before = health
            else:
                raise RoomError(
                    self._process.name,
                    f"a harness has blocked its event loop for {health.loop_lag_s:.0f} s",
                    rule=f"gateway.lease_timeout_s={self._lease_timeout_s} is the limit",
                    way_out="`await asyncio.to_thread(...)` for what blocks, or a plain `def`, which runs in a thread of its own.",
                )

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """One restart: why the new process was lost too, or None."""
        name = self.name
        logger.warning("%s is lost: %s", name, lost)
        self._gone(name, in_short(lost))
        number = self._restarts.again_nowait(lost)
        if left := await self._process.end():
            self._warn(left)
        self._warn(f"{in_short(lost)}; starting it again, {number} of {self.config.max_restarts}")
        self._on_event("worker lost", {"name": name, "why": str(lost), "restart": self.num_restarts})
        await asyncio.sleep(backoff_s(self.config, number))
        try:
            await self._process.start_again()
        except ConnectionShortage:
            raise
        except RoomError as error:
            return error
        self._on_event("worker up", {"name": name, "restart": self.num_restarts})
        return None
