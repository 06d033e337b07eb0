"""Supervisors of engines, agent workers and the teacher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import xxhash

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient, Teacher
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import WeightScheduler
from asyncrl.job.servers import TEACHER_KEY
from asyncrl.launch.server import Server
from asyncrl.launch.supervise import HEARTBEAT_PERIOD_S, Supervision, Supervisor, summary_of
from asyncrl.messages.work import WorkerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer, read_vocabulary
from asyncrl.trainer.model_folder import find_model, find_on_disk


class EngineSupervisor(Supervisor):
    """Keeps one engine server running. Invariant: the pool sends it work only while it serves the announced
    version, or a newer one.
    """

    kind = "engine"

    def __init__(
        self,
        process: Server,
        client: EngineClient,
        pool: EnginePool,
        scheduler: WeightScheduler,
        supervision: Supervision,
    ) -> None:
        super().__init__([process], supervision)
        self._client = client
        self._pool = pool
        self._scheduler = scheduler

    def _is_dispensable(self) -> bool:
        return {*self._pool.load} - {*self._pool.down, self.name} != set()

    def _down(self, lost: RoomError) -> None:
        self._leave_nowait()

    def _leave_nowait(self) -> None:
        self.is_up = False
        self._client.disconnect_nowait()
        self._pool.down_nowait(self.name)
        self._scheduler.publisher.down_nowait(self.name)

    def _room(self) -> AbstractAsyncContextManager[None]:
        return self._scheduler.room_for_engine(self.name)

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _bring_back(self) -> None:
        await self._scheduler.bring_up(self.name)

    async def _works_again(self) -> None:
        self._pool.up_nowait(self.name)
        await self._pool.balance()


class WorkerSupervisor(Supervisor):
    """Keeps one agent worker running. Its lost rollouts are retried. A worker whose event loop blocks for
    `lease_timeout_s` is also lost. `on_down` gets name and reason.
    """

    kind = "worker"

    def __init__(
        self,
        process: Server,
        supervision: Supervision,
        *,
        lease_timeout_s: float,
        on_down: Callable[[str, str], None],
    ) -> None:
        super().__init__([process], supervision)
        self._lease_timeout_s = lease_timeout_s
        self._on_down = on_down

    def _down(self, lost: RoomError) -> None:
        self.is_up = False
        self._on_down(self.name, summary_of(lost))

    async def _wait_unfit(self) -> None:
        """Raise RoomError after two answers with a blocked loop: after a pause of the whole machine one may
        precede recovery.
        """
        health = None
        was_stuck = False
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            previous = health
            health = self._processes[0].health
            lag_s = health.loop_lag_s if isinstance(health, WorkerHealth) else 0.0
            is_stuck = lag_s > self._lease_timeout_s
            if is_stuck and was_stuck and health is not previous:
                raise RoomError(
                    self.name,
                    f"an agent has blocked its event loop for {lag_s:.0f} s",
                    rule=f"the limit is gateway.lease_timeout_s={self._lease_timeout_s}",
                    way_out="call blocking code with `await asyncio.to_thread(...)`, or use a plain `def`.",
                )
            was_stuck = is_stuck


class TeacherSupervisor(Supervisor):
    """Keeps the teacher running; rollouts wait for it."""

    kind = "teacher"

    def __init__(self, process: Server, client: Teacher, supervision: Supervision) -> None:
        super().__init__([process], supervision)
        self._client = client

    def _down(self, lost: RoomError) -> None:
        self.is_up = False
        self._client.down_nowait()

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _works_again(self) -> None:
        self._client.up_nowait()


def check_teacher(config: RunConfig, tokenizer: HFChatTokenizer | None) -> list[str]:
    """Describe the teacher. Raises ConfigError for other tokens."""
    if config.teacher is None:
        return []
    path = config.teacher.path
    folder = find_on_disk(path, TEACHER_KEY, config.teacher.revision)
    if folder is None or tokenizer is None:
        return [f"teacher: {path} is compared with the model when the run starts"]
    _refuse_other_tokens(path, folder, tokenizer)
    return [f"teacher: {path} has the model's vocabulary"]


def find_teacher(config: RunConfig, tokenizer: HFChatTokenizer) -> Path | None:
    """Return the folder of the teacher's model. Raises ConfigError. Blocks."""
    if config.teacher is None:
        return None
    folder = find_model(config.teacher.path, config.teacher.revision, TEACHER_KEY)
    _refuse_other_tokens(config.teacher.path, folder, tokenizer)
    return folder


def _refuse_other_tokens(path: str, folder: Path, tokenizer: HFChatTokenizer) -> None:
    theirs = read_vocabulary(folder)
    ours = tokenizer.vocabulary
    if theirs == ours:
        return
    names, own = ({number: token for token, number in one.items()} for one in (theirs, ours))
    first = min(number for number in {*names, *own} if names.get(number) != own.get(number))
    digests = [xxhash.xxh3_64_hexdigest(json.dumps(sorted(one.items())).encode()) for one in (theirs, ours)]
    raise ConfigError(
        f"{TEACHER_KEY}={path} has {len(theirs)} tokens (digest {digests[0]}), the model {len(ours)} "
        f"({digests[1]}): id {first} is {names.get(first)!r} in the teacher, {own.get(first)!r} in the model",
        rule="the teacher scores the sampled token ids, so both vocabularies must be equal",
        way_out="use a teacher with the model's tokenizer, for example from the same family.",
    )
