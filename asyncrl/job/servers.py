"""Make and start the servers of a run. Roles are in job/roles.py, start arguments in
engines/kinds.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from asyncrl.base.errors import ComponentError, EngineLost
from asyncrl.base.extensions import all_of
from asyncrl.base.files import LOCK
from asyncrl.base.http import Caller
from asyncrl.base.waits import within
from asyncrl.config import RunConfig, TaskConfig
from asyncrl.config.engine_kinds import ENGINES
from asyncrl.config.transports import fetches_files
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, ServerClient
from asyncrl.engines.kinds import ENGINE, Role, ServerOrder, engine_role, maker_of
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.role_client import Annotation, RoleClient
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.roles import EVAL_ENGINE
from asyncrl.job.trainer_recovery import (
    SupervisedTrainer,
    recover_trainer,
)
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.launch.machine import LOOPBACK, find_python
from asyncrl.launch.placement import NodeDevice, Placement, chunk_devices
from asyncrl.launch.plan import OWN_BYTES, engine_threads, threads_on
from asyncrl.launch.processes import Launcher, Process, ProcessSpec
from asyncrl.launch.supervise import (
    FirstStart,
    Server,
    Supervisor,
    all_or_none,
    health_over,
)
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.push import NodeFiles
from asyncrl.tasks.scorer import ClientsOf, Scorers, no_clients
from asyncrl.tasks.task import PromptTask
from asyncrl.trainer.model.model_folder import load_limit_s
from asyncrl.trainer.trainer_client import RENDEZVOUS, TrainerSpec

T = TypeVar("T")
MEET_FRACTION = 0.8
"""Fraction of supervision.start_timeout_s that ranks wait for each other."""


@dataclass(slots=True)
class RoleServer:
    """A server of a role, with its client. `supervisor`: of roles that restart; a
    rollout engine's is in job/scale.py. `on_gone` gets a loss that the run survives
    without the server.
    """

    role: Role
    server: Server
    client: ServerClient
    supervisor: Supervisor | None = None
    on_gone: Callable[[ComponentError], None] | None = None

    @property
    def state(self) -> str:
        if self.supervisor is None:
            return "up" if self.server.health is not None else "gone"
        if not self.supervisor.is_up:
            return "restarting"
        client = self.client
        is_asleep = isinstance(client, RoleClient) and client.is_asleep
        return "asleep" if is_asleep else "up"

    def gauges(self) -> dict[str, float]:
        if self.supervisor is None:
            return self.client.gauges()
        # Servers of one kind, such as NAME-0 and NAME-1, report as NAME: Fleet.gauges()
        # adds them.
        kind, _, _ = self.role.name.partition("-")
        return self.client.gauges() | {f"{kind}/restarts": self.supervisor.num_restarts}

    async def watch(self, heartbeat_s: float) -> None:
        """Keep the server running, or watch it until it is lost.

        Raises the ComponentError that ends the run.
        """
        if self.supervisor is not None:
            # run() ends only by an error; the rest is for servers without a supervisor.
            await self.supervisor.run()
        try:
            await self.server.watch(heartbeat_s)
        except ComponentError as error:
            assert self.on_gone is not None, "a server without a supervisor"
            self.server.health = None
            self.on_gone(error)


def as_engine(client: ServerClient) -> EngineClient:
    assert isinstance(client, EngineClient), "this role's client is an engine's"
    return client


@dataclass(eq=False)
class ServerFactory:
    """Makes the servers on the nodes of a placement, not started. They share the run's
    secret.
    """

    config: RunConfig
    placement: Placement
    model_path: Path
    tokenizer: HFChatTokenizer
    run_dir: Path
    launcher: Launcher
    role_models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the roles that do not serve the trained model."""
    group: BroadcastGroup | None = field(default=None, init=False)
    """Trainer and rollout engines, for transport nccl."""
    on_lost: Callable[[EngineLost], None] | None = field(default=None, init=False)
    """Gets every loss that a client meets."""
    rank_store: str = field(default="", init=False)
    """Where ranks meet, unless in the staging folder."""
    weights_store: str = field(default="", init=False)
    """Where trainer and engines meet for a broadcast."""

    def __post_init__(self) -> None:
        self.secret = secrets.token_hex(32)

    def trainers(
        self, staging_dir: Path, module: str = "asyncrl.trainer.ranks.rank_process"
    ) -> list[Server]:
        """Return the trainer's ranks; the first takes requests. `module`: of a process."""
        servers = list[Server]()
        for rank, place in enumerate(self.placement.trainer):
            spec = self.trainer_spec(rank, staging_dir).model_dump_json()
            # Each rank gets all of the trainer's devices on its node, and takes the one
            # with the number local_rank.
            of_node = [
                other for other in self.placement.trainer if other.node == place.node
            ]
            caller = Caller(f"trainer-{rank}", "", self.secret)
            child = self._process(caller.name, module, spec, of_node)
            servers.append(
                Server(
                    child,
                    caller,
                    health_over(caller, TrainerHealth),
                    self._start_s(self.model_path),
                )
            )
        return servers

    def trainer_spec(self, rank: int, staging_dir: Path) -> TrainerSpec:
        config = self.config
        placement = self.placement
        node = placement.trainer[rank].node
        # A trainer that time-shares has the device to itself in its time slice.
        fraction = None if placement.moves else placement.memory_fraction
        template = config.model.chat_template
        num_memories = len(chunk_devices(config, placement))
        is_far = bool(self.rank_store or self.weights_store)
        return TrainerSpec(
            model_path=str(self.model_path),
            dtype=config.model.dtype,
            device="cuda" if placement.is_on_cuda else "cpu",
            share=self._without_cuda(None if fraction is None else 1 - fraction),
            seed=config.seed,
            threads=threads_on(config, placement, node)[1],
            rank=rank,
            local_rank=[other.node for other in placement.trainer[:rank]].count(node),
            address=self.launcher.nodes[node].address if is_far else LOOPBACK,
            store=self.rank_store,
            meet_s=MEET_FRACTION * config.supervision.start_timeout_s,
            weights_store=self.weights_store,
            trainer=config.trainer,
            algorithm=config.algorithm,
            algorithms=dict(config.algorithms),
            weights={
                name: task.algorithm.weight for name, task in config.tasks.items()
            },
            critic=config.critic,
            critic_path=str(self.role_models.get("critic", "")),
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            transport=config.weight_sync.settled,
            is_file_wanted=bool(placement.weight_readers),
            chunks="file"
            if num_memories == 0
            else "memory"
            if num_memories == 1
            else "memories",
            canary_tokens=self._canary_tokens() if placement.engines else 0,
            measures_gap=config.rollout.facts.has_model,
            pinned_length=config.rollout.max_length
            if config.rollout.facts.pins_length
            else 0,
            staging_dir=staging_dir,
            record_path=self.run_dir / "trained.jsonl",
            chat_template=template and Path(template).absolute(),
        )

    def engines(self) -> list[RoleServer]:
        """Return the run's rollout engines, which it starts, or which others have
        started.
        """
        rollout = self.config.rollout
        urls = rollout.external_urls or [""] * len(self.placement.engines)
        key = os.environ.get(rollout.facts.key_env, "")
        return [
            self.make(
                replace(engine_role(self.config), url=url.rstrip("/"), secret=key),
                devices,
                name=f"{ENGINE}-{number}",
                share=self.placement.memory_fraction_of(number),
            )
            for number, (devices, url) in enumerate(
                zip(self.placement.engines, urls, strict=True)
            )
        ]

    def make(
        self,
        role: Role,
        devices: Sequence[NodeDevice],
        *,
        name: str = "",
        share: float | None = None,
    ) -> RoleServer:
        """Make a server on its devices, not started. `share`: the fraction of its
        devices' memory.
        """
        order = self.order(role, name or role.name, devices[0], share=share)
        maker = role.maker
        if role.url:
            child = Process(order.name, f"the log of {role.url}", role.url)
            caller = Caller(order.name, "", role.secret)
        else:
            python = None
            if role.engine is not None and ENGINES[role.engine].package is not None:
                python = partial(find_python, self.config.rollout, role.engine)
            spec = json.dumps(maker.spec(order))
            child = self._process(order.name, maker.module, spec, devices, python)
            caller = Caller(order.name, "", self.secret)
        client = maker.client(order, caller)
        start_s = self._start_s(order.model_path)
        ready = partial(
            client.ready, self._start_s(order.model_path, maker.start_factor)
        )
        return RoleServer(
            role, Server(child, caller, client.health, start_s, ready), client
        )

    def order(
        self, role: Role, name: str, device: NodeDevice, *, share: float | None = None
    ) -> ServerOrder:
        """Describe a server to its maker. `device` is the first of its devices."""
        config = self.config
        placement = self.placement
        # others count CUDA's memory themselves
        if config.rollout.facts.package is None:
            share = self._without_cuda(share)
        return ServerOrder(
            config=config,
            role=role,
            run_dir=self.run_dir,
            name=name,
            model_path=self.role_models.get(role.shared_name, self.model_path),
            device=device.name,
            threads=engine_threads(config, placement.nodes[device.node].machine.cores),
            tokenizer=self.tokenizer,
            stays=placement.resident and role.is_rollout,
            moves=placement.moves and role.is_rollout,
            share=share,
            # Another server reads weights from a file at its own times.
            group=self.group if role.is_rollout else None,
            on_lost=self.on_lost,
        )

    def _start_s(self, model_path: Path, factor: int = 1) -> float:
        return factor * self.config.supervision.start_timeout_s + load_limit_s(
            model_path
        )

    def _canary_tokens(self) -> int:
        """Return the number of tokens whose logprobs each push compares; 0: none."""
        longest = maker_of(self.config.rollout.engine).canary_tokens
        if not longest or self.config.weight_sync.canary_limit is None:
            return 0
        return max(2, min(longest, self.config.rollout.max_length - 1))

    def _process(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[NodeDevice],
        python: Callable[[], Path] | None = None,
    ) -> Process:
        names = [device.name for device in devices]
        process = ProcessSpec(
            name, module, spec, self.run_dir, self.secret, names, python=python
        )
        return self.launcher.process(devices[0].node, process)

    def _without_cuda(self, share: float | None) -> float | None:
        """Subtract CUDA's own memory, which torch does not count."""
        if share is None:
            return None
        device = self.placement.trainer[0]
        total = (
            self.placement.nodes[device.node].machine.cuda[device.number].total_bytes
        )
        return share if total is None else max(1e-3, share - OWN_BYTES / total)

    async def hold(self, staging_dir: Path | None = None) -> None:
        """Reserve resources on the nodes; without `staging_dir` only for engines.
        Raises ConfigError or ComponentError.
        """
        placement = self.placement
        has_engines = self.config.rollout.external_urls is None
        parts = placement.parts(
            has_engines=has_engines, serves_only=staging_dir is None
        )
        await self.launcher.hold(
            parts, await asyncio.to_thread(self._shared_files, staging_dir)
        )
        if staging_dir is None:
            return
        first = placement.trainer[0].node
        # The staging folder is on the controller's node. Ranks elsewhere cannot meet in
        # a file there, so they need an address.
        if {device.node for device in placement.trainer} != {0}:
            self.rank_store = await self._free_address(first)
        if placement.num_nodes > 1 and self.config.weight_sync.facts.is_collective:
            self.weights_store = await self._free_address(first)

    async def _free_address(self, node: int) -> str:
        return (
            f"{self.launcher.nodes[node].address}:{await self.launcher.free_port(node)}"
        )

    def _shared_files(self, staging_dir: Path | None) -> dict[str, str]:
        """Return the files that every node must see, with their content."""
        paths = [self.model_path / "config.json", self.run_dir / "run.id"]
        if self.config.model.chat_template:
            paths.append(Path(self.config.model.chat_template))
        far = {
            self.placement.roles[name].shared_name
            for name, device in self.placement.extra.items()
            if device.node > 0
        }
        # The critic has no server: the trainer's ranks read it.
        paths += [
            path / "config.json"
            for name, path in self.role_models.items()
            if name in far or name == "critic"
        ]
        files = {
            str(path.absolute()): path.read_text(encoding="utf-8")
            for path in paths
            if path.is_file()
        }
        if staging_dir is not None and self.config.weight_sync.disk_dir is not None:
            # An empty file that only this run has: a node that sees it has the same
            # disk_dir.
            files[str((staging_dir / LOCK).absolute())] = ""
        return files


def make_scorers(
    lifecycle: Lifecycle,
    tokenizer: HFChatTokenizer,
    tasks: Mapping[str, PromptTask],
    settings: Mapping[str, TaskConfig],
    seed: int,
    clients_of: ClientsOf = no_clients,
) -> Scorers:
    """Make the scorers of tasks. `clients_of`: of the run's servers, which they may ask."""
    scorers = Scorers(
        tasks,
        settings,
        tokenizer,
        seed=seed,
        warn=lifecycle.log.warn,
        clients_of=clients_of,
    )
    lifecycle.closes("rewards", scorers.aclose)
    return scorers


def forget_meeting(staging_dir: Path) -> None:
    """Remove the file where ranks met. New ranks would read the addresses of ended ones
    from it, and wait for these.
    """
    (staging_dir / RENDEZVOUS).unlink(missing_ok=True)


class DeviceSlices(Protocol):
    """When a new process may take its device (job/colocate.py)."""

    def device_for_trainer(self) -> AbstractAsyncContextManager[None]: ...
    def device_for_engine(self, name: str) -> AbstractAsyncContextManager[None]: ...


class Fleet:
    """Trainer ranks, rollout engines and extra servers, with their clients."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        factory: ServerFactory,
        staging_dir: Path,
        *,
        note: Callable[[str, Mapping[str, object]], None],
        batches: Callable[[int, int], AsyncIterator[Batch]],
    ) -> None:
        """`note` gets losses and restarts. `batches`: of a range of versions, for a
        trainer that has restarted.
        """
        config = lifecycle.config
        self._lifecycle = lifecycle
        self.placement = factory.placement
        self.staging_dir = staging_dir
        self.supervisors = dict[str, Supervisor]()
        self.supervision = lifecycle.supervision(note)
        self.checkpoints = Checkpoints(lifecycle.run_dir, config.checkpoint)
        self.ranks = factory.trainers(staging_dir)

        def forget_ranks() -> None:
            forget_meeting(staging_dir)
            # The next broadcast must not use the group of the dead ranks.
            if factory.group is not None:
                factory.group.sender_gone_nowait()

        self.trainer = SupervisedTrainer(
            self.ranks,
            self.supervision,
            timeout_s=config.trainer.timeout_s,
            on_start=forget_ranks,
            bring_back=partial(
                recover_trainer, checkpoints=self.checkpoints, batches=batches
            ),
        )
        if config.weight_sync.facts.is_collective:
            factory.group = BroadcastGroup(
                self.trainer.broadcast,
                staging_dir,
                timeout_s=config.weight_sync.timeout_s,
                wait_up=self.trainer.wait_up,
                store=lambda: factory.weights_store,
            )
        # Orders copy this and the group above, so both are set before engines are made.
        factory.on_lost = self.on_lost
        engines = factory.engines()
        self.engine_servers = [engine.server for engine in engines]
        self.clients = [as_engine(engine.client) for engine in engines]
        self.engines = EnginePool(
            self.clients, slots=config.rollout.num_slots, on_lost=self.on_lost
        )
        self.node_files = _node_files(lifecycle, factory.placement, self.ranks[0])
        self.servers = [*self.ranks, *self.engine_servers]
        roles = factory.placement.roles
        self.extra = {
            name: self._extra(factory.make(roles[name], [device]))
            for name, device in factory.placement.extra.items()
        }
        self.annotations: list[Annotation] = [
            *all_of(
                "annotations", config, self.engines, self.clients_of, factory.tokenizer
            )
        ]
        # Apart from `servers`, whose deaths Lifecycle reports as the cause of a
        # failure: a run may go on without these.
        self.side_servers = [extra.server for extra in self.extra.values()]
        self.make_scorers = partial(
            make_scorers, lifecycle, factory.tokenizer, clients_of=self.clients_of
        )

    def _extra(self, extra: RoleServer) -> RoleServer:
        """Give a server its supervisor; the evaluation sets the way out of the run of its
        own engine.
        """
        client = extra.client
        if not extra.role.serves_policy:
            name = extra.role.name
            extra.supervisor = self.supervisors[name] = Supervisor(
                [extra.server],
                self.supervision,
                kind=name,
                on_down=lambda _: client.disconnect_nowait(),
                on_start=client.reset_nowait,
                on_up=client.up_nowait,
            )
        return extra

    def share_devices(self, slices: DeviceSlices) -> None:
        """Let the trainer, and the servers that leave its devices, restart in their own
        time slices only: a new process has its model in memory.
        """
        self.trainer.start_within(slices.device_for_trainer)
        for name in self.extra:
            if self.placement.leaves(name):
                room = partial(slices.device_for_engine, name)
                self.supervisors[name].start_within(room)

    def gauges(self) -> dict[str, float]:
        """Return the numbers of extra servers and annotations, added within each kind."""
        sums = defaultdict[str, float](float)
        parts = [extra.gauges() for extra in self.extra.values()]
        parts += [dict(annotation.gauges()) for annotation in self.annotations]
        for part in parts:
            for name, value in part.items():
                sums[name] += value
        return sums

    @property
    def leaving(self) -> list[RoleClient]:
        """Return the clients of servers that leave their device in the trainer's time slice."""
        found = list[RoleClient]()
        for name, extra in self.extra.items():
            if self.placement.leaves(name):
                assert isinstance(extra.client, RoleClient)
                found.append(extra.client)
        return found

    def clients_of(self, kind: type[T], /) -> list[T]:
        """Return the clients of this class."""
        clients = (extra.client for extra in self.extra.values())
        return [client for client in clients if isinstance(client, kind)]

    @property
    def eval_client(self) -> EngineClient | None:
        """Return the eval engine's client, if there is an eval engine."""
        extra = self.extra.get(EVAL_ENGINE)
        return None if extra is None else as_engine(extra.client)

    def on_lost(self, error: EngineLost) -> None:
        self.supervisors[error.component].lost_nowait(error)

    async def start(self, num_engines: int) -> None:
        """Start the processes. On shared devices the engines start first and sleep, so
        no device holds both sides; resident engines too, because vLLM measures free
        memory at its start.
        """
        for server in (*self.servers, *self.side_servers):
            self._lifecycle.closes(server.name, server.aclose)
        engines = [*self.engine_servers[:num_engines], *self.side_servers]
        names = ", ".join(server.name for server in (*self.ranks, *engines))
        self._lifecycle.log.activity(f"loading the model in {names}")
        starts = [FirstStart([engine], self.supervision).run() for engine in engines]
        forget = partial(forget_meeting, self.staging_dir)
        trainer = FirstStart(self.ranks, self.supervision, on_start=forget)
        if not self.placement.moves and self.placement.memory_fraction is None:
            await all_or_none([trainer.run(), *starts])
            return
        await all_or_none(starts)
        if self.placement.moves:
            limit_s = max(server.start_s for server in engines)
            what = f"an engine did not free the trainer's device within {limit_s:g} s"
            late = ComponentError(
                "placement", what, way_out="read the logs of the engines."
            )
            async with within(limit_s, lambda: late):
                sleeps = [client.sleep() for client in self.clients[:num_engines]]
                sleeps += [client.sleep() for client in self.leaving]
                await asyncio.gather(*sleeps)
        await trainer.run()


def _node_files(
    lifecycle: Lifecycle, placement: Placement, rank: Server
) -> NodeFiles | None:
    """Return None if all nodes read files in place."""
    readers = placement.weight_readers
    if placement.num_nodes == 1 or not fetches_files(
        lifecycle.config, has_eval_engine=bool(readers)
    ):
        return None
    engines = {
        f"{ENGINE}-{number}": devices[0]
        for number, devices in enumerate(placement.engines)
    }
    node_of = {name: device.node for name, device in {**engines, **readers}.items()}
    return NodeFiles(
        lifecycle.launcher.fetch,
        rank.caller,
        node_of,
        trainer_node=placement.trainer[0].node,
        timeout_s=lifecycle.config.weight_sync.timeout_s,
    )
