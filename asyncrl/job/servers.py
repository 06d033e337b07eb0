"""Create and start the servers of a run, with their start arguments and clients.

EngineCapabilities (config/rollout_buffer.py) has the settings, devices and memory of an engine kind.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.base.errors import EngineLost, RoomError
from asyncrl.base.files import LOCK
from asyncrl.base.http import Caller
from asyncrl.base.waits import within
from asyncrl.config import RunConfig
from asyncrl.config.placement_sync import fetches_files
from asyncrl.config.trainer_algorithm import TEACHER_SLOTS
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, EngineServer, Teacher
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm_process import VllmRequirements
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.trainer_recovery import SupervisedTrainer, recover_trainer
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.launch.machine import LOOPBACK, find_python
from asyncrl.launch.mps import Mps, why_time_slices
from asyncrl.launch.placement import NodeDevice, Placement, chunk_devices
from asyncrl.launch.plan import EVAL_ENGINE, OWN_BYTES, TEACHER, engine_threads, threads_on
from asyncrl.launch.processes import Launcher, Process, ProcessSpec
from asyncrl.launch.supervise import FirstStart, Server, Supervision, Supervisor, all_or_none
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.push import NodeFiles
from asyncrl.trainer.model_folder import load_limit_s
from asyncrl.trainer.trainer_client import RENDEZVOUS, TrainerSpec

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


@dataclass(eq=False)
class Servers:
    """Servers on the nodes of a placement, not started. They share the run's secret. The engines are
    embedded; subclasses serve the other kinds.
    """

    config: RunConfig
    placement: Placement
    model_path: Path
    run_dir: Path
    launcher: Launcher
    teacher_path: Path | None = None
    mps: Mps | None = None
    """Of the devices that both sides use at once."""
    rank_store: str = field(default="", init=False)
    """Where ranks meet, unless in the staging folder."""
    weights_store: str = field(default="", init=False)
    """Where trainer and engines meet for a broadcast."""
    python: Callable[[], Path] | None = field(default=None, init=False)
    """The engines' Python, if it is another one."""
    canary_tokens: int = field(default=0, init=False)
    """Tokens whose logprobs each push compares; 0: none."""

    def __post_init__(self) -> None:
        self.secret = secrets.token_hex(32)
        self.rollout = self.config.rollout

    def slots(self, name: str) -> int:
        return self.config.eval_slots if name == EVAL_ENGINE else self.rollout.slots

    def engine_spec(self, name: str, device: NodeDevice, share: float | None = None) -> Body:
        """Return the start arguments. The engine sees only its own devices. `device` is the first,
        `share` the fraction of its memory.
        """
        is_rollout = name not in (EVAL_ENGINE, TEACHER)
        return {
            "name": name,
            "slots": self.slots(name),
            "max_length": self.rollout.max_length,
            "model_path": str(self.model_path),
            "dtype": self.config.model.dtype,
            "device": device.name.partition(":")[0],
            "threads": engine_threads(self.config, self.placement.nodes[device.node].machine.cores),
            "deterministic": self.rollout.deterministic,
            "num_kept": self.slots(name) if self.config.keeps_turns and name != TEACHER else 0,
            "stays": self.placement.resident and is_rollout,
            "share": share,
            "returns_routing": self.config.algorithm.router_replay and is_rollout,
            "fused_decode": self.rollout.fused_decode and is_rollout,
            "cache_tokens": self.rollout.cache_tokens if is_rollout else 0,
        }

    def client(
        self, server: Server, tokenizer: HFChatTokenizer, group: BroadcastGroup | None = None
    ) -> EngineClient:
        """Create an engine's client, which also asks its health."""
        return _asking(server, EngineServer(server.caller, broadcast_group=group))

    def trainers(self, staging_dir: Path) -> list[Server]:
        """Return the trainer's ranks; the first takes requests."""
        servers = list[Server]()
        for rank, place in enumerate(self.placement.trainer):
            spec = self.trainer_spec(rank, staging_dir).model_dump_json()
            of_node = [other for other in self.placement.trainer if other.node == place.node]
            module = "asyncrl.trainer.rank_process"
            servers.append(self._server(f"trainer-{rank}", module, spec, of_node, answers=TrainerHealth))
        return servers

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
            local_rank=[other.node for other in placement.trainer[:rank]].count(node),
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
            canary_tokens=self.canary_tokens,
            measures_gap=config.rollout.facts.has_model,
            pinned_length=config.rollout.max_length if config.rollout.facts.pins_length else 0,
            staging_dir=staging_dir,
            record_path=self.run_dir / "trained.jsonl",
            chat_template=template and Path(template).absolute(),
        )

    def engines(self) -> list[Server]:
        """Return the run's engines, or those in rollout.urls."""
        urls = self.config.rollout.external_urls
        if urls is None:
            fraction_of = self.placement.memory_fraction_of
            return [
                self._engine(f"engine-{number}", devices, fraction_of(number))
                for number, devices in enumerate(self.placement.engines)
            ]
        key = os.environ.get(self.rollout.facts.key_env, "")
        servers = list[Server]()
        for number, url in enumerate(urls):
            child = Process(f"engine-{number}", f"the log of {url}", url.rstrip("/"))
            servers.append(Server(child, Caller(child.name, "", key), EngineHealth, self.start_s))
        return servers

    def eval_engine(self, device: NodeDevice) -> Server:
        return self._engine(EVAL_ENGINE, [device])

    def teacher(self, device: NodeDevice) -> Server:
        assert self.teacher_path is not None, "the config has a teacher"
        spec = Servers.engine_spec(self, TEACHER, device) | {"slots": 1, "score_slots": TEACHER_SLOTS}
        spec["model_path"] = str(self.teacher_path)
        server = self._server(TEACHER, "asyncrl_servers.embedded", json.dumps(spec), [device])
        server.start_s = self.config.supervision.start_timeout_s + load_limit_s(self.teacher_path)
        return server

    def _engine(self, name: str, devices: Sequence[NodeDevice], share: float | None = None) -> Server:
        if self.rollout.facts.package is None:  # vLLM counts CUDA's memory itself
            share = self._without_cuda(share)
        spec = json.dumps(self.engine_spec(name, devices[0], share))
        return self._server(name, f"asyncrl_servers.{self.rollout.engine}", spec, devices, python=self.python)

    @property
    def start_s(self) -> float:
        return self.config.supervision.start_timeout_s + load_limit_s(self.model_path)

    def _server(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[NodeDevice],
        *,
        answers: type[TrainerHealth] | type[EngineHealth] = EngineHealth,
        python: Callable[[], Path] | None = None,
    ) -> Server:
        names = [device.name for device in devices]
        shared = self.placement.shared_at_once
        env = dict[str, str]()
        if self.mps is not None and shared.keys() >= {*devices}:
            env = self.mps.environ(shared[device] for device in devices)
        process = ProcessSpec(name, module, spec, self.run_dir, self.secret, names, env, python=python)
        child = self.launcher.process(devices[0].node, process)
        return Server(child, Caller(name, "", self.secret), answers, self.start_s)

    def _without_cuda(self, share: float | None) -> float | None:
        """Subtract CUDA's own memory, which torch does not count."""
        if share is None:
            return None
        device = self.placement.trainer[0]
        total = self.placement.nodes[device.node].machine.cuda[device.number].total_bytes
        return share if total is None else max(1e-3, share - OWN_BYTES / total)

    async def hold(self, staging_dir: Path | None = None) -> None:
        """Reserve resources on the nodes; without `staging_dir` only for engines. Raises ConfigError or
        RoomError.
        """
        placement = self.placement
        has_engines = self.config.rollout.external_urls is None
        parts = placement.parts(has_engines=has_engines, serves_only=staging_dir is None)
        await self.launcher.hold(parts, await asyncio.to_thread(self._shared_files, staging_dir))
        if staging_dir is None:
            return
        first = placement.trainer[0].node
        if {device.node for device in placement.trainer} != {0}:
            self.rank_store = await self._free_address(first)
        if placement.num_nodes > 1 and self.config.weight_sync.facts.is_collective:
            self.weights_store = await self._free_address(first)

    async def _free_address(self, node: int) -> str:
        return f"{self.launcher.nodes[node].address}:{await self.launcher.free_port(node)}"

    def _shared_files(self, staging_dir: Path | None) -> dict[str, str]:
        """Return the files that every node must see, with their content."""
        paths = [self.model_path / "config.json", self.run_dir / "run.id"]
        if self.config.model.chat_template:
            paths.append(Path(self.config.model.chat_template))
        if self.teacher_path and self.placement.teacher and self.placement.teacher.node:
            paths.append(self.teacher_path / "config.json")
        files = {str(path.absolute()): path.read_text(encoding="utf-8") for path in paths if path.is_file()}
        if staging_dir is not None and self.config.weight_sync.disk_dir is not None:
            files[str((staging_dir / LOCK).absolute())] = ""
        return files


class Simulated(Servers):
    """Latency model that draws tokens from the model's vocabulary."""

    def engine_spec(self, name: str, device: NodeDevice, share: float | None = None) -> Body:
        model = json.loads((self.model_path / "config.json").read_text(encoding="utf-8"))
        vocab_size = model.get("vocab_size") or model["text_config"]["vocab_size"]
        common = {"name": name, "slots": self.slots(name), "max_length": self.rollout.max_length}
        return common | {"vocab_size": vocab_size} | self.rollout.simulated.model_dump(mode="json")


class Vllm(Servers):
    """vLLM's own server, under a separate Python."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.python = partial(find_python, self.rollout)
        if self.config.weight_sync.canary_limit is not None:
            self.canary_tokens = max(2, min(CANARY_TOKENS, self.rollout.max_length - 1))

    def engine_spec(self, name: str, device: NodeDevice, share: float | None = None) -> Body:
        """Add the user's own arguments of `vllm serve`. An eval engine is never split over devices."""
        spec = super().engine_spec(name, device)
        args = dict(self.rollout.vllm)
        if share is not None:
            args["gpu_memory_utilization"] = share
        takes_turns = name != EVAL_ENGINE and self.placement.mode == "colocated" and not spec["stays"]
        if takes_turns and not {"enable-sleep-mode", "enable_sleep_mode"} & args.keys():
            args["enable_sleep_mode"] = True
        for of_embedded in ("num_kept", "stays", "share", "fused_decode", "cache_tokens"):
            del spec[of_embedded]
        lora = self.config.trainer.lora
        return spec | {
            "deterministic": self.config.is_deterministic(device.name),
            "tensor_parallel": 1 if name == EVAL_ENGINE else self.rollout.tensor_parallel,
            "has_adapters": self.config.weight_sync.facts.sends_adapters,
            "lora_rank": 1 if lora is None else lora.rank,
            "args": args,
        }

    def client(
        self, server: Server, tokenizer: HFChatTokenizer, group: BroadcastGroup | None = None
    ) -> EngineClient:
        """Return a client whose readiness includes a check of the server's settings."""
        config = self.config
        is_eval = server.name == EVAL_ENGINE
        limit = config.weight_sync.canary_limit
        if limit is None:
            limit = math.inf
        elif limit == "auto":
            limit = CANARY_LIMITS[config.model.dtype]
        needed = VllmRequirements(
            model_path=str(self.model_path),
            dtype=config.model.dtype,
            slots=self.slots(server.name),
            max_length=self.rollout.max_length,
            end_ids=tuple(sorted(tokenizer.end_ids)),
            special_ids=_special_ids(tokenizer),
            stays=self.placement.resident and not is_eval,
            returns_routing=config.algorithm.router_replay and not is_eval,
            canary_limit=limit,
            decode=tokenizer.decode,
            mark=secrets.token_hex(4),
        )
        client = VllmServer(server.caller, needed, broadcast_group=group)
        limit_s = VLLM_STARTS * config.supervision.start_timeout_s + load_limit_s(self.model_path)
        server.ready = partial(client.ready, limit_s)
        return _asking(server, client)


async def start_mps(life: Lifecycle, placement: Placement) -> Mps | None:
    """Start MPS if both sides use devices at once and can have it."""
    devices = placement.shared_at_once.values()
    if not devices or why_time_slices(life.config, devices):
        return None
    mps = Mps(devices, life.run_dir / "logs" / "mps")
    life.closes("MPS", mps.aclose)
    if failed := await mps.start():
        life.log.warn(f"trainer and engines take time slices of the device: {failed}")
        return None
    return mps


def _asking(server: Server, client: EngineClient) -> EngineClient:
    server.client_health = lambda timeout_s: client.health(timeout_s=timeout_s)
    return client


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {name: number for name, number in names.items() if name}


KINDS: dict[str, type[Servers]] = {"embedded": Servers, "vllm": Vllm, "simulated": Simulated}


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
        starts = [FirstStart([engine], self.supervision).run() for engine in engines]
        trainer = FirstStart(self.ranks, self.supervision)
        trainer.stale = self.staging_dir / RENDEZVOUS
        if not self.placement.moves and self.placement.memory_fraction is None:
            await all_or_none([trainer.run(), *starts])
            return
        await all_or_none(starts)
        if self.placement.moves:
            limit_s = max(server.start_s for server in engines)
            what = f"an engine did not free the trainer's device within {limit_s:g} s"
            late = RoomError("placement", what, way_out="read the logs of the engines.")
            async with within(limit_s, lambda: late):
                sleeps = (client.sleep() for client in self.clients[:num_engines])
                await asyncio.gather(*sleeps)
        await trainer.run()


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
