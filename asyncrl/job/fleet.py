"""Processes of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from asyncrl.base.errors import EngineLost, RoomError
from asyncrl.config.placement_sync import fetches_files
from asyncrl.config.trainer_algorithm import TEACHER_SLOTS
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, Teacher
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.servers import Servers
from asyncrl.job.trainer_recovery import SupervisedTrainer, recover_trainer
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.launch.placement import Placement
from asyncrl.launch.plan import EVAL_ENGINE
from asyncrl.launch.supervise import Server, Supervision, Supervisor, cancel_all, start_all
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.push import NodeFiles
from asyncrl.trainer.trainer_client import RENDEZVOUS

TEACHER_TIMEOUT_S = 120.0


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


class Fleet:
    """Trainer ranks, engines, eval engine and teacher, with their clients. Only the loss of the eval engine
    never ends the run.
    """

    def __init__(
        self,
        life: Lifecycle,
        servers: Servers,
        tokenizer: HFChatTokenizer,
        staging_dir: Path,
        journal: Journal,
        checkpoints: Checkpoints,
        wait_for_devices: Callable[[], Awaitable[None]],
    ) -> None:
        config = life.config
        supervision = config.supervision
        self.life = life
        self.placement = servers.placement
        self.staging_dir = staging_dir
        self.supervisors = dict[str, Supervisor]()
        self.supervision = Supervision(
            supervision, config.observe.heartbeat_s, life.log.warn, journal.event_nowait
        )
        self.ranks = servers.trainers(staging_dir)
        self.trainer = SupervisedTrainer(
            self.ranks,
            self.supervision,
            timeout_s=config.trainer.timeout_s,
            before_start=self._before_trainer_starts,
            bring_back=partial(
                recover_trainer,
                journal=journal,
                checkpoints=checkpoints,
                num_batches=config.trainer.num_steps,
            ),
        )
        self._wait_for_devices = wait_for_devices
        self._group = None
        if config.weight_sync.facts.is_collective:
            self._group = BroadcastGroup(
                self.trainer.broadcast,
                staging_dir,
                timeout_s=config.weight_sync.timeout_s,
                wait_up=self.trainer.wait_up,
                store=lambda: servers.weights_store,
            )
        self.engine_servers = servers.engines()
        self.clients = [servers.client(server, tokenizer, self._group) for server in self.engine_servers]
        # with scaling, aborted calls of a leaving engine must not end the run
        self.on_lost = self._lost if supervision.max_restarts or config.rollout.is_scaled else None
        self.engines = EnginePool(self.clients, slots=config.rollout.slots, on_lost=self.on_lost)
        self.node_files = _node_files(life, servers.placement, self.ranks[0])
        self.eval_server: Server | None = None
        self.eval_client: EngineClient | None = None
        if servers.placement.evaluation is not None:
            self.eval_server = servers.eval_engine()
            self.eval_client = servers.client(self.eval_server, tokenizer)
        self.teacher_server: Server | None = None
        self.teacher: Teacher | None = None
        if servers.teacher_path is not None:
            server = servers.teacher()
            self.teacher_server = server
            self.teacher = Teacher(
                server.caller,
                temperature=config.rollout.temperature,
                places=2 * TEACHER_SLOTS,  # the next requests arrive early
                timeout_s=TEACHER_TIMEOUT_S,
                on_lost=self._lost if supervision.max_restarts else None,
            )
            self.supervisors[server.name] = TeacherSupervisor(server, self.teacher, self.supervision)

    def _lost(self, error: EngineLost) -> None:
        self.supervisors[error.room].lost_nowait(error)

    async def _before_trainer_starts(self) -> None:
        await self._wait_for_devices()
        self._forget_rendezvous()

    def _forget_rendezvous(self) -> None:
        (self.staging_dir / RENDEZVOUS).unlink(missing_ok=True)
        if self._group is not None:
            self._group.sender_gone_nowait()

    @property
    def servers(self) -> list[Server]:
        return [*self.ranks, *self.engine_servers]

    @property
    def side_servers(self) -> list[Server]:
        return [server for server in (self.eval_server, self.teacher_server) if server is not None]

    async def start(self, num_engines: int, hash_model: Awaitable[object], *, is_new: bool) -> None:
        """Start the processes. A resumed run first awaits `hash_model`, which may refuse."""
        for server in (*self.servers, *self.side_servers):
            self.life.closes(server.name, partial(_close, server, self.life.log.warn))
        engines = self.engine_servers[:num_engines]
        started = [*self.ranks, *engines, *self.side_servers]
        hashing = asyncio.ensure_future(hash_model)
        try:
            if not is_new:
                await hashing
            self.life.log.activity(f"loading the model in {', '.join(server.name for server in started)}")
            await self._start_in_order(engines)
            await hashing
        finally:
            await cancel_all([hashing])

    async def _start_in_order(self, engines: Sequence[Server]) -> None:
        """Start all processes. On shared devices the engines start first and sleep, so no device holds both
        sides; resident engines too, because vLLM measures free memory at its start.
        """
        if not self.placement.moves and self.placement.memory_fraction is None:
            await start_all([*self.ranks, *engines, *self.side_servers])
            return
        await start_all([*engines, *self.side_servers])
        if self.placement.moves:
            limit_s = max(server.start_s for server in engines)
            clients = self.clients[: len(engines)]
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.gather(*(client.sleep(["kv", "weights"]) for client in clients))
            except TimeoutError as error:
                what = f"an engine did not free the trainer's device within {limit_s:g} s"
                raise RoomError("placement", what, way_out="read the logs of the engines.") from error
        await start_all(self.ranks)


def _node_files(life: Lifecycle, placement: Placement, rank: Server) -> NodeFiles | None:
    """Return None if all nodes read files in place."""
    has_eval = placement.evaluation is not None
    if placement.num_nodes == 1 or not fetches_files(life.config, has_eval_engine=has_eval):
        return None
    node_of = {f"engine-{number}": devices[0].node for number, devices in enumerate(placement.engines)}
    if placement.evaluation is not None:
        node_of[EVAL_ENGINE] = placement.evaluation.node
    return NodeFiles(
        life.launcher.fetch,
        rank.caller,
        node_of,
        trainer_node=placement.trainer[0].node,
        timeout_s=life.config.weight_sync.timeout_s,
    )


async def _close(server: Server, warn: Callable[[str], None]) -> None:
    """Warn of survivors: they may hold a GPU."""
    await server.aclose()
    if server.child.left:
        warn(server.child.left)
