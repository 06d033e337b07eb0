"""Processes of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from asyncrl.base.errors import EngineLost, RoomError
from asyncrl.base.waits import within
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
from asyncrl.launch.supervise import Server, Supervision, Supervisor, start_all
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
        self._life = life
        self.placement = servers.placement
        self.staging_dir = staging_dir
        self.supervisors = dict[str, Supervisor]()
        self.supervision = Supervision(
            config.supervision, config.observe.heartbeat_s, life.log.warn, journal.event_nowait
        )
        self.ranks = servers.trainers(staging_dir)
        group: BroadcastGroup | None = None

        async def before_start() -> None:
            await wait_for_devices()
            (staging_dir / RENDEZVOUS).unlink(missing_ok=True)
            if group is not None:
                group.sender_gone_nowait()

        num_steps = config.trainer.num_steps
        self.trainer = SupervisedTrainer(
            self.ranks,
            self.supervision,
            timeout_s=config.trainer.timeout_s,
            before_start=before_start,
            bring_back=partial(
                recover_trainer, journal=journal, checkpoints=checkpoints, num_batches=num_steps
            ),
        )
        if config.weight_sync.facts.is_collective:
            group = BroadcastGroup(
                self.trainer.broadcast,
                staging_dir,
                timeout_s=config.weight_sync.timeout_s,
                wait_up=self.trainer.wait_up,
                store=lambda: servers.weights_store,
            )
        self.engine_servers = servers.engines()
        self.clients = [servers.client(server, tokenizer, group) for server in self.engine_servers]
        self.engines = EnginePool(self.clients, slots=config.rollout.slots, on_lost=self.on_lost)
        self.node_files = _node_files(life, servers.placement, self.ranks[0])
        self.servers = [*self.ranks, *self.engine_servers]
        self.side_servers = list[Server]()
        self.eval_server: Server | None = None
        self.eval_client: EngineClient | None = None
        if servers.placement.evaluation is not None:
            self.eval_server = servers.eval_engine(servers.placement.evaluation)
            self.eval_client = servers.client(self.eval_server, tokenizer)
            self.side_servers.append(self.eval_server)
        self.teacher: Teacher | None = None
        if servers.placement.teacher is not None:
            server = servers.teacher(servers.placement.teacher)
            self.teacher = Teacher(
                server.caller,
                temperature=config.rollout.temperature,
                places=2 * TEACHER_SLOTS,  # the next requests arrive early
                timeout_s=TEACHER_TIMEOUT_S,
                on_lost=self.on_lost,
            )
            self.supervisors[server.name] = TeacherSupervisor(server, self.teacher, self.supervision)
            self.side_servers.append(server)

    def on_lost(self, error: EngineLost) -> None:
        self.supervisors[error.room].lost_nowait(error)

    async def start(self, num_engines: int) -> None:
        """Start the processes. On shared devices the engines start first and sleep, so no device holds both
        sides; resident engines too, because vLLM measures free memory at its start.
        """
        for server in (*self.servers, *self.side_servers):
            self._life.closes(server.name, server.aclose)
        engines = [*self.engine_servers[:num_engines], *self.side_servers]
        names = ", ".join(server.name for server in (*self.ranks, *engines))
        self._life.log.activity(f"loading the model in {names}")
        if not self.placement.moves and self.placement.memory_fraction is None:
            await start_all([*self.ranks, *engines])
            return
        await start_all(engines)
        if self.placement.moves:
            limit_s = max(server.start_s for server in engines)
            what = f"an engine did not free the trainer's device within {limit_s:g} s"
            late = RoomError("placement", what, way_out="read the logs of the engines.")
            async with within(limit_s, lambda: late):
                sleeps = (client.sleep() for client in self.clients[:num_engines])
                await asyncio.gather(*sleeps)
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
