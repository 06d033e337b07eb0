"""Create the servers of a run with their start arguments, and the clients of the engines.

EngineCapabilities (config/rollout_buffer.py) has the settings, devices and memory of an engine kind.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.base.files import LOCK
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.trainer_algorithm import TEACHER_SLOTS
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.launch.engine_python import find_python, find_version
from asyncrl.launch.fork_server import KEY_ENV
from asyncrl.launch.launchers import Launcher, NodeRequirements
from asyncrl.launch.machine import LOOPBACK
from asyncrl.launch.placement import NO_DEVICE, NodeDevice, Placement, chunk_devices
from asyncrl.launch.plan import EVAL_ENGINE, OWN_BYTES, TEACHER, engine_threads, threads_on
from asyncrl.launch.processes import Process, ProcessSpec
from asyncrl.launch.supervise import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model_folder import load_limit_s
from asyncrl.trainer.trainer_client import TrainerSpec

MEET_FRACTION = 0.8
"""Fraction of supervision.start_timeout_s that ranks wait for each other."""
TEACHER_KEY = "teacher.path"


Body: TypeAlias = dict[str, Any]
CANARY_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""weight_sync.canary_limit=auto, in nats. vLLM with correct weights: 6e-6 in float32, 0.09 in bfloat16."""
CANARY_TOKENS = 160
"""Longer than vLLM's CPU block, so that its prefix cache takes part."""
VLLM_STARTS = 3
"""Multiple of supervision.start_timeout_s: vLLM first compiles kernels."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Devices of an engine process, which sees only its own. `memory_fraction` is of its device, `cores` of
    its node (None: this machine).
    """

    device: str = "auto"
    is_colocated: bool = False
    is_resident: bool = False
    memory_fraction: float | None = None
    cores: int | None = None


class Embedded:
    """Embedded engine, base of the other kinds."""

    python: Callable[[], Path] | None = None
    package: Callable[[], dict[str, str]] | None = None
    canary_tokens = 0
    """Tokens whose logprobs each push compares; 0: none."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.rollout = config.rollout

    def slots(self, name: str) -> int:
        return self.config.eval_slots if name == EVAL_ENGINE else self.rollout.slots

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        is_rollout = name != EVAL_ENGINE
        sync = self.config.weight_sync
        spec: Body = {
            "name": name,
            "slots": self.slots(name),
            "max_length": self.rollout.max_length,
            "model_path": str(model_path),
            "dtype": self.config.model.dtype,
            "device": place.device.partition(":")[0],
            "threads": engine_threads(self.config, place.cores),
            "deterministic": self.rollout.deterministic,
            "has_adapters": sync.facts.sends_adapters,
        }
        optional: Body = {
            "keeps_turns": self.config.keeps_turns,
            "takes_turns": place.is_colocated,
            "stays": place.is_resident,
            "share": place.memory_fraction,
            "returns_routing": self.config.algorithm.router_replay and is_rollout,
        }
        if sync.facts.is_collective and self.rollout.facts.stages_weights and is_rollout:
            optional["receives_bytes"] = sync.chunk_bytes
        return spec | {name: value for name, value in optional.items() if value}

    def client(
        self,
        server: Server,
        placement: Placement,
        model_path: Path,
        tokenizer: HFChatTokenizer,
        broadcast_group: BroadcastGroup | None,
    ) -> EngineClient:
        return EngineServer(server.caller, broadcast_group=broadcast_group)

    def hint(self, url: str, model_path: Path) -> str:
        """Return how to use a served engine."""
        return "its messages are described in asyncrl/messages/engine_api.py"


class Simulated(Embedded):
    """Latency model that draws tokens from the model's vocabulary."""

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        vocab_size = model.get("vocab_size") or model["text_config"]["vocab_size"]
        common = {"name": name, "slots": self.slots(name), "max_length": self.rollout.max_length}
        return common | {"vocab_size": vocab_size} | self.rollout.simulated.model_dump(mode="json")


class Vllm(Embedded):
    """vLLM's own server, under a separate Python."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.python = partial(find_python, self.rollout)
        self.package = partial(find_version, self.rollout)
        if config.weight_sync.canary_limit is not None:
            self.canary_tokens = max(2, min(CANARY_TOKENS, self.rollout.max_length - 1))

    def spec(self, model_path: Path, name: str, place: EnginePlace) -> Body:
        """Add the user's own arguments of `vllm serve`. An eval engine is never split over devices."""
        args = dict(self.rollout.vllm)
        if place.memory_fraction is not None:
            args["gpu_memory_utilization"] = place.memory_fraction
        sleeps = place.is_colocated and not place.is_resident
        if sleeps and not {"enable-sleep-mode", "enable_sleep_mode"} & args.keys():
            args["enable_sleep_mode"] = True
        lora = self.config.trainer.lora
        return super().spec(model_path, name, EnginePlace(place.device, cores=place.cores)) | {
            "deterministic": self.config.is_deterministic(place.device),
            "tensor_parallel": 1 if name == EVAL_ENGINE else self.rollout.tensor_parallel,
            "transport": self.config.weight_sync.settled,
            "lora_rank": 1 if lora is None else lora.rank,
            "args": args,
        }

    def client(
        self,
        server: Server,
        placement: Placement,
        model_path: Path,
        tokenizer: HFChatTokenizer,
        broadcast_group: BroadcastGroup | None,
    ) -> EngineClient:
        """Return a client whose readiness includes a check of the server's settings."""
        config = self.config
        is_eval = server.name == EVAL_ENGINE
        device = placement.evaluation if is_eval else placement.engines[0][0]
        if device is None or device.name == NO_DEVICE:  # rollout.urls: the run places no engine server
            device = placement.trainer[0]
        limit = config.weight_sync.canary_limit
        if limit is None:
            limit = math.inf
        elif limit == "auto":
            limit = CANARY_LIMITS[config.model.dtype]
        needed = VllmRequirements(
            model_path=str(model_path),
            dtype=config.model.dtype,
            slots=self.slots(server.name),
            max_length=self.rollout.max_length,
            end_ids=tuple(sorted(tokenizer.end_ids)),
            device=device.name.partition(":")[0],
            special_ids=_special_ids(tokenizer),
            starts_fresh=is_eval or self.rollout.urls is None,
            stays=placement.resident and not is_eval,
            returns_routing=config.algorithm.router_replay and not is_eval,
            canary_limit=limit,
        )
        client = VllmServer(
            server.caller,
            needed,
            decode=tokenizer.decode,
            mark=secrets.token_hex(4),
            broadcast_group=broadcast_group,
        )
        limit_s = VLLM_STARTS * config.supervision.start_timeout_s + load_limit_s(model_path)
        server.ready = partial(client.ready, limit_s)
        return client

    def hint(self, url: str, model_path: Path) -> str:
        model = "" if self.config.model.path else f" model.scratch=none model.path={model_path.absolute()}"
        command = f"{KEY_ENV}=$ENGINE_KEY asyncrl run CONFIG rollout.engine=vllm rollout.urls=[{url}]{model}"
        return f"use it in a run on this machine: {command}"


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {name: number for name, number in names.items() if name}


KINDS: dict[str, type[Embedded]] = {"embedded": Embedded, "vllm": Vllm, "simulated": Simulated}


def engine_kind(config: RunConfig) -> Embedded:
    return KINDS[config.rollout.engine](config)


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
            foreign = [
                Process(f"engine-{number}", f"the log of {url}", url.rstrip("/"))
                for number, url in enumerate(rollout.urls)
            ]
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
