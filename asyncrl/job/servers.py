"""Create the servers of a run with their start arguments."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.base.files import LOCK
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.learning import TEACHER_SLOTS
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient
from asyncrl.job.engine_kinds import EnginePlace, engine_kind
from asyncrl.launch.devices import NodeDevice, Placement, chunk_devices
from asyncrl.launch.fork_server import KEY_ENV
from asyncrl.launch.launchers import Launcher, NodeRequirements
from asyncrl.launch.machine import LOOPBACK
from asyncrl.launch.plan import EVAL_ENGINE, OWN_BYTES, TEACHER, engine_threads, threads_on
from asyncrl.launch.processes import ForeignProcess, Process, ProcessSpec
from asyncrl.launch.server import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model_folder import load_limit_s
from asyncrl.trainer.trainer_client import TrainerSpec

MEET_FRACTION = 0.8
"""Fraction of supervision.start_timeout_s that ranks wait for each other."""
TEACHER_KEY = "teacher.path"


class Servers:
    """Servers on the nodes of a placement, not started. They share the run's secret."""

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        model_path: Path,
        run_dir: Path,
        launcher: Launcher,
        teacher_path: Path | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.model_path = model_path
        self.teacher_path = teacher_path
        self.run_dir = run_dir
        self.launcher = launcher
        self.secret = secrets.token_hex(32)
        self.kind = engine_kind(config)
        self.rank_store = ""
        """Where ranks meet, unless in the staging folder."""
        self.weights_store = ""
        """Where trainer and engines meet for a broadcast."""

    def trainers(self, staging_dir: Path) -> list[Server]:
        """Return the trainer's ranks; the first takes requests."""
        servers = list[Server]()
        for rank in range(self.config.trainer.world_size):
            name = f"trainer-{rank}"
            spec = self.trainer_spec(rank, staging_dir).model_dump_json()
            devices = [self.placement.trainer[other] for other in self._ranks_on_node_of(rank)]
            child = self._process(name, "asyncrl.trainer.rank_process", spec, devices)
            servers.append(Server(child, Caller(name, "", self.secret), TrainerHealth, self._start_s()))
        return servers

    def _ranks_on_node_of(self, rank: int) -> list[int]:
        ranks = self.placement.trainer
        return [other for other, device in enumerate(ranks) if device.node == ranks[rank].node]

    def trainer_spec(self, rank: int, staging_dir: Path) -> TrainerSpec:
        config = self.config
        placement = self.placement
        node = placement.trainer[rank].node
        fraction = placement.memory_fraction
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
            local_rank=self._ranks_on_node_of(rank).index(rank),
            address=self.launcher.nodes[node].address if is_far else LOOPBACK,
            store=self.rank_store,
            meet_s=MEET_FRACTION * config.supervision.start_timeout_s,
            weights_store=self.weights_store,
            trainer=config.trainer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            transport=config.weight_sync.settled,
            is_file_wanted=placement.evaluation is not None,
            chunk_bytes=config.weight_sync.chunk_bytes,
            chunks="file" if num_memories == 0 else "memory" if num_memories == 1 else "memories",
            canary_tokens=self.kind.canary_tokens,
            measures_gap=config.rollout.facts.has_model,
            staging_dir=staging_dir,
            record_path=self.run_dir / "trained.jsonl",
            failed_dir=self.run_dir / "failed_batches",
            chat_template=template and Path(template).absolute(),
        )

    def engines(self) -> list[Server]:
        """Return the run's engines, or those in rollout.urls."""
        rollout = self.config.rollout
        if rollout.urls is not None:
            key = os.environ.get(KEY_ENV, "")
            foreign = [ForeignProcess(f"engine-{number}", url) for number, url in enumerate(rollout.urls)]
            return [self._engine_server(child, key) for child in foreign]
        placement = self.placement
        servers = list[Server]()
        for number, devices in enumerate(placement.engines):
            share = placement.memory_fraction_of(number)
            place = EnginePlace(
                devices[0].name,
                is_colocated=placement.mode == "colocated",
                is_resident=placement.resident,
                # vLLM counts CUDA's memory itself
                memory_fraction=share if rollout.facts.package else self._without_cuda(share),
                cores=self._cores(devices[0]),
            )
            servers.append(self._engine(f"engine-{number}", place, devices))
        return servers

    def eval_engine(self) -> Server:
        device = self.placement.evaluation
        assert device is not None, "the placement has an eval engine"
        place = EnginePlace(device.name, cores=self._cores(device))
        return self._engine(EVAL_ENGINE, place, [device])

    def teacher(self) -> Server:
        config = self.config
        device = self.placement.teacher
        folder = self.teacher_path
        assert folder is not None, "the config has a teacher"
        assert device is not None, "the placement has a teacher"
        spec = {
            "name": TEACHER,
            "slots": 1,
            "score_slots": TEACHER_SLOTS,
            "max_length": config.rollout.max_length,
            "model_path": str(folder),
            "dtype": config.model.dtype,
            "device": device.name.partition(":")[0],
            "threads": engine_threads(config, self._cores(device)),
            "deterministic": config.rollout.deterministic,
        }
        child = self._process(TEACHER, "asyncrl_servers.embedded", json.dumps(spec), [device])
        return Server(child, Caller(TEACHER, "", self.secret), EngineHealth, self._start_s(folder))

    def client(
        self, server: Server, tokenizer: HFChatTokenizer, group: BroadcastGroup | None = None
    ) -> EngineClient:
        """Create an engine's client, which also asks its health."""
        client = self.kind.client(server, self.placement, self.model_path, tokenizer, group)
        server.client_health = lambda timeout_s: client.health(timeout_s=timeout_s)
        return client

    def _engine(self, name: str, place: EnginePlace, devices: Sequence[NodeDevice]) -> Server:
        spec = json.dumps(self.kind.spec(self.model_path, name, place))
        module = f"asyncrl_servers.{self.config.rollout.engine}"
        child = self._process(name, module, spec, devices, self.kind.python)
        return self._engine_server(child, self.secret)

    def _engine_server(self, child: Process, key: str) -> Server:
        return Server(child, Caller(child.name, "", key), EngineHealth, self._start_s())

    def _process(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[NodeDevice],
        python: Callable[[], Path] | None = None,
    ) -> Process:
        names = [device.name for device in devices]
        process = ProcessSpec(name, module, spec, self.run_dir, self.secret, names, python=python)
        return self.launcher.process(devices[0].node, process)

    def _start_s(self, folder: Path | None = None) -> float:
        return self.config.supervision.start_timeout_s + load_limit_s(folder or self.model_path)

    def _cores(self, device: NodeDevice) -> int:
        return self.placement.nodes[device.node].machine.cores

    def _without_cuda(self, share: float | None) -> float | None:
        """Subtract CUDA's own memory, which torch does not count."""
        if share is None:
            return None
        node, device = self.placement.trainer[0]
        total = self.placement.nodes[node].machine.cuda[int(device.removeprefix("cuda:"))].total_bytes
        return share if total is None else max(1e-3, share - OWN_BYTES / total)

    async def hold(self, staging_dir: Path | None = None) -> None:
        """Reserve resources on the nodes. Raises ConfigError or RoomError."""
        placement = self.placement
        has_engines = self.config.rollout.urls is None
        parts = placement.parts(has_engines=has_engines, serves_only=staging_dir is None)
        needs = {
            node: await asyncio.to_thread(self._needs, node, staging_dir)
            for node, devices in parts.items()
            if devices
        }
        await self.launcher.hold(parts, needs)
        if staging_dir is None:
            return
        first = placement.trainer[0].node
        address = self.launcher.nodes[first].address if self.launcher.nodes else LOOPBACK
        if {device.node for device in placement.trainer} != {0}:
            self.rank_store = f"{address}:{await self.launcher.free_port(first)}"
        if placement.num_nodes > 1 and self.config.weight_sync.facts.is_collective:
            self.weights_store = f"{address}:{await self.launcher.free_port(first)}"

    def _needs(self, node: int, staging_dir: Path | None) -> NodeRequirements:
        config = self.config
        placement = self.placement
        is_training = staging_dir is not None
        engines = [*placement.engine_devices] if config.rollout.urls is None else []
        engines += [placement.evaluation] if is_training and placement.evaluation else []
        has_engine = node in {device.node for device in engines}
        paths = [self.model_path / "config.json"]
        if (self.run_dir / "run.id").is_file():
            paths.append(self.run_dir / "run.id")
        if is_training and node in {device.node for device in placement.trainer}:
            template = config.model.chat_template
            paths += [Path(template)] if template else []
        if self.teacher_path and node and placement.teacher and placement.teacher.node == node:
            paths.append(self.teacher_path / "config.json")
        files = {str(path.absolute()): path.read_text(encoding="utf-8") for path in paths}
        if staging_dir is not None and config.weight_sync.disk_dir is not None:
            files[str((staging_dir / LOCK).absolute())] = ""
        return NodeRequirements(files, self.kind.package if has_engine else None)
