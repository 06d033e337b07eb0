"""Create the servers of a run without starting them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.base.http import Caller
from asyncrl.base.staging import LOCK
from asyncrl.config import RunConfig
from asyncrl.config.learning import TEACHER_SLOTS
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient
from asyncrl.job.engine_kinds import engine_kind
from asyncrl.job.servers.teaching import KEY
from asyncrl.job.start import Server
from asyncrl.launch.devices import Placement, chunk_devices
from asyncrl.launch.fork_server import KEY_ENV
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.machine import find_cuda_devices
from asyncrl.launch.nodes import Launcher, NodeRequirements
from asyncrl.launch.plan import EVAL_ENGINE, OWN_BYTES, TEACHER, engine_threads, threads_on
from asyncrl.launch.processes import LOOPBACK, ForeignProcess, Process, ProcessSpec
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model_folder import find_model, load_limit_s
from asyncrl.trainer.trainer_client import TrainerSpec

MEET_FRACTION = 0.8
"""Fraction of supervision.start_timeout_s that the trainer's ranks wait for each other."""


@dataclass(frozen=True)
class ServerMaker:
    config: RunConfig
    placement: Placement
    model_path: Path
    run_dir: Path
    warn: Callable[[str], None] = print
    launcher: Launcher = field(default_factory=LocalLauncher)
    secret: str = field(default_factory=lambda: secrets.token_hex(32))

    async def find_store(self) -> str:
        """Return the address where ranks meet if they do not share the staging folder."""
        placement, num = self.placement, self.config.trainer.world_size
        if num == 1 or not any(placement.rank_node(rank) for rank in range(num)):
            return ""
        return await self._free_place()

    async def find_weights_store(self) -> str:
        """Return the address where trainer and engines meet for a broadcast, if not the staging folder."""
        is_far = self.placement.num_nodes > 1 and self.config.weight_sync.facts.is_collective
        return await self._free_place() if is_far else ""

    async def _free_place(self) -> str:
        first = self.placement.rank_node(0)
        return f"{self.launcher.nodes[first].address}:{await self.launcher.free_port(first)}"

    def trainers(self, staging_dir: Path, store: str = "", weights_store: str = "") -> list[Server]:
        """Return the ranks of the trainer; the first takes requests. Ranks meet at `store`, engines at
        `weights_store`.
        """
        servers, module = list[Server](), "asyncrl.trainer.rank_process"
        for rank in range(self.config.trainer.world_size):
            name = f"trainer-{rank}"
            spec = self.trainer_spec(rank, staging_dir, store, weights_store).model_dump_json()
            devices = [self.placement.trainer[other] for other in self._ranks_beside(rank)]
            child = self._process(name, module, spec, devices, None, self.placement.rank_node(rank))
            caller, start_s = Caller(name, "", self.secret), self.start_s(self.model_path)
            servers.append(Server(child, caller, TrainerHealth, start_s))
        return servers

    def _ranks_beside(self, rank: int) -> list[int]:
        node_of = self.placement.rank_node
        return [other for other in range(len(self.placement.trainer)) if node_of(other) == node_of(rank)]

    def trainer_spec(
        self, rank: int, staging_dir: Path, store: str = "", weights_store: str = ""
    ) -> TrainerSpec:
        """Return a rank's spec. It sees the devices of all ranks on its node only."""
        config, kind = self.config, engine_kind(self.config)
        template = config.model.chat_template
        num_memories = len(chunk_devices(config, self.placement))
        return TrainerSpec(
            model_path=str(self.model_path),
            dtype=config.model.dtype,
            device="cuda" if self.placement.is_on_cuda else "cpu",
            share=self._own_share(None if self.placement.share is None else 1 - self.placement.share),
            seed=config.seed,
            threads=threads_on(config, self.placement, self.placement.rank_node(rank))[1],
            rank=rank,
            local_rank=self._ranks_beside(rank).index(rank),
            address=self.launcher.nodes[self.placement.rank_node(rank)].address
            if store or weights_store
            else LOOPBACK,
            store=store,
            meet_s=MEET_FRACTION * config.supervision.start_timeout_s,
            weights_store=weights_store,
            trainer=config.trainer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            transport=config.weight_sync.settled,
            is_file_wanted=self.placement.evaluation is not None,
            chunk_bytes=config.weight_sync.chunk_bytes,
            chunks="file" if num_memories == 0 else "memory" if num_memories == 1 else "memories",
            canary_tokens=kind.canary_tokens(),
            measures_gap=config.rollout.facts.has_model,
            staging_dir=staging_dir,
            record_path=self.run_dir / "trained.jsonl",
            failed_dir=self.run_dir / "failed_batches",
            chat_template=template and Path(template).absolute(),
        )

    def engines(self) -> list[Server]:
        """Return the run's own engines, or those in rollout.urls."""
        rollout = self.config.rollout
        if rollout.urls is not None:
            key = os.environ.get(KEY_ENV, "")
            foreign = [ForeignProcess(f"engine-{number}", url) for number, url in enumerate(rollout.urls)]
            return [self._engine_server(child, key) for child in foreign]
        placement = self.placement
        return [
            self._engine(f"engine-{number}", placement.engines[number], None, placement.engine_node(number))
            for number in range(rollout.max_engines)
        ]

    def eval_engine(self) -> Server:
        assert self.placement.evaluation is not None, "asked for where an eval engine is placed"
        return self._engine(EVAL_ENGINE, [self.placement.evaluation], None, self.placement.beside_node)

    def teacher(self, folder: Path) -> Server:
        config, device = self.config, self.placement.teacher
        assert config.teacher is not None, "asked for where there is one"
        assert device is not None, "placed where there is one"
        spec = {
            "name": TEACHER,
            "slots": 1,
            "score_slots": TEACHER_SLOTS,
            "max_length": config.rollout.max_length,
            "model_path": str(folder),
            "dtype": config.model.dtype,
            "device": device.partition(":")[0],
            "threads": engine_threads(config, self._cores(self.placement.beside_node)),
            "deterministic": config.rollout.deterministic,
        }
        node, module = self.placement.beside_node, "asyncrl_servers.embedded"
        child = self._process(TEACHER, module, json.dumps(spec), [device], None, node)
        caller, start_s = Caller(TEACHER, "", self.secret), self.start_s(folder)
        return Server(child, caller, EngineHealth, start_s)

    def start_s(self, folder: Path) -> float:
        return self.config.supervision.start_timeout_s + load_limit_s(folder)

    @cached_property
    def tokenizer(self) -> HFChatTokenizer:
        """Return the tokenizer. The first call blocks."""
        model = self.config.model
        return HFChatTokenizer(
            self.model_path,
            chat_template=model.chat_template,
            chat_template_kwargs=model.chat_template_kwargs,
        )

    def client(self, server: Server, broadcast_group: BroadcastGroup | None = None) -> EngineClient:
        """Create an engine server's client before its start. The first call blocks."""
        server.engine = engine_kind(self.config).client(server, self, broadcast_group)
        return server.engine

    def _engine(self, name: str, devices: Sequence[str], port: int | None, node: int) -> Server:
        kind, placement, turns = engine_kind(self.config), self.placement, dict[str, Any]()
        if name != EVAL_ENGINE:
            share = placement.share_of(int(name.rpartition("-")[2]))
            # vLLM counts CUDA's own memory itself
            share = share if self.config.rollout.facts.package else self._own_share(share)
            turns = {
                "takes_turns": placement.mode == "colocated",
                "stays": placement.stays,
                "share": share,
            }
        cores = self._cores(node)
        spec = json.dumps(kind.spec(self.model_path, name, devices[0], cores=cores, **turns))
        module = f"asyncrl_servers.{self.config.rollout.engine}"
        child = self._process(name, module, spec, devices, port, node, python=kind.python())
        return self._engine_server(child, self.secret)

    def _cores(self, node: int) -> int | None:
        return self.placement.nodes[node].machine.cores if self.placement.nodes else None

    def _own_share(self, share: float | None) -> float | None:
        """Subtract CUDA's own memory from a share of the trainer's device: torch does not count it."""
        if share is None:
            return None
        nodes, number = self.placement.nodes, int(self.placement.trainer[0].removeprefix("cuda:"))
        cuda = nodes[self.placement.rank_node(0)].machine.cuda if nodes else find_cuda_devices()
        total = cuda[number].total_bytes
        return share if total is None else max(1e-3, share - OWN_BYTES / total)

    def _engine_server(self, child: Process, key: str) -> Server:
        caller, start_s = Caller(child.name, "", key), self.start_s(self.model_path)
        return Server(child, caller, EngineHealth, start_s)

    def _process(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[str],
        port: int | None,
        node: int,
        **more: Any,
    ) -> Process:
        return self.launcher.process(
            node, ProcessSpec(name, module, spec, self.run_dir, self.secret, devices, port, **more)
        )

    async def hold(self, staging_dir: Path | None = None, num_engines: int = 0) -> None:
        """Reserve the servers' resources on nodes that can read their files. `staging_dir`: None with
        engines only. `num_engines`: the initial number, if it may change. Raises ConfigError or RoomError.
        """
        serves_only = staging_dir is None
        parts = self.placement.parts(has_engines=self.config.rollout.urls is None, serves_only=serves_only)
        needs = {
            node: await asyncio.to_thread(self._needs, node, staging_dir)
            for node, devices in parts.items()
            if devices
        }
        await self.launcher.hold(parts, needs)

    def _needs(self, node: int, staging_dir: Path | None) -> NodeRequirements:
        """Return files (one of the model's) and packages that the node's processes need. Blocks."""
        config, placement, run_dir = self.config, self.placement, self.run_dir
        has_rank = staging_dir is not None and node in {one.node for one in placement.ranks}
        is_beside = staging_dir is not None and placement.beside_node == node
        own_engines = placement.engine_devices if config.rollout.urls is None else ()
        has_engine = node in {one.node for one in own_engines}
        has_engine |= is_beside and placement.evaluation is not None
        whole = [self.model_path / "config.json"]
        if (run_dir / "run.id").is_file():
            whole.append(run_dir / "run.id")
        if has_rank and config.model.chat_template:
            whole.append(Path(config.model.chat_template))
        if is_beside and node and config.teacher is not None:
            whole.append(find_model(config.teacher.path, config.teacher.revision, KEY) / "config.json")
        files = {str(path.absolute()): path.read_text(encoding="utf-8") for path in whole}
        if staging_dir is not None and config.weight_sync.disk_dir is not None:
            files[str((staging_dir / LOCK).absolute())] = ""
        return NodeRequirements(files, engine_kind(config).package() if has_engine else None)
