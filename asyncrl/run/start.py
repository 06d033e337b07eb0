"""Makes the servers of a run as child processes, starts them, and asks how they are.

Waits: each process is given START_TIMEOUT_S (vLLM: VLLM_START_TIMEOUT_S) to answer, and load_limit_s() of the
    model that it loads; one that dies first ends the start with its own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.vllm_broadcast import Broadcasts
from asyncrl.errors import ConnectionShortage, EngineError, RoomError
from asyncrl.http import SHORT_S, Caller, CallLost, CallRefused
from asyncrl.messages.calls import EngineHealth, TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.watchdog import ChildState
from asyncrl.placement.devices import Placement, child_environ, chunk_devices
from asyncrl.placement.fork_server import KEY_ENV
from asyncrl.placement.machine import find_cuda_devices
from asyncrl.placement.plan import EVAL_ENGINE, OWN_BYTES, TEACHER, engine_threads, trainer_threads
from asyncrl.placement.processes import ChildProcess, ForeignProcess
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run.engine_kinds import engine_kind
from asyncrl.trainer.model_folder import load_limit_s
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.waits import TimeLimit

Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
START_TIMEOUT_S = 300.0
STATE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Server:
    """A child process and the caller that speaks to it.

    `answers`: what /health says. `health`: its last answer. `engine`: the client of an engine server, through
    which it is asked. `ready`: what the kind of engine waits for where a first answer is not enough.
    `start_s`: how long it may take to give the first one.
    """

    child: ChildProcess | ForeignProcess
    caller: Caller
    answers: type[TrainerHealth] | type[EngineHealth] | type[WorkerHealth]
    health: Health | None = None
    engine: EngineClient | None = None
    ready: Callable[[], Awaitable[Health]] | None = None
    start_s: float = START_TIMEOUT_S

    @property
    def name(self) -> str:
        """Of the process, and of those that take its place."""
        return self.child.name

    async def ask(self, timeout_s: float) -> Health:
        """Its answer to /health. Raises CallLost, CallRefused or EngineError."""
        if self.engine is not None:
            return await self.engine.health(timeout_s=timeout_s)
        return await self.caller.get("/health", self.answers, timeout_s=timeout_s)

    async def check_alive(self, timeout_s: float) -> None:
        """Ask /health. Raises RoomError if the process does not answer within `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except (CallLost, CallRefused, EngineError) as error:
            where = f"process {self.child.pid}" if self.child.pid else f"the server at {self.child.url}"
            what = f"{where} does not answer: {failure_text(error)}"
            rule = f"observe.heartbeat_s={timeout_s} is the limit"
            way_out = f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow."
            raise RoomError(self.name, what, rule=rule, way_out=way_out) from error

    async def state(self) -> ChildState:
        """What the kernel says of the process, and its server."""
        pid, process = self.child.pid, "no process of this run"
        try:
            if pid is not None:
                process = f"process {pid} is {psutil.Process(pid).status()}"
            health = await self.ask(STATE_TIMEOUT_S)
        except psutil.Error:
            ended = f"process {pid} ended with {self.child.returncode}"
            return ChildState(self.name, ended, "asked nothing", is_well=False)
        except (CallLost, CallRefused, EngineError, ConnectionShortage) as error:
            return ChildState(self.name, process, failure_text(error), is_well=False)
        numbers = ", ".join(f"{key} {value}" for key, value in health.model_dump().items())
        return ChildState(self.name, process, f"answers: {numbers}", is_well=True)

    def dump_stacks_nowait(self) -> None:
        """Have the process write its stacks into its log, unless SIGUSR1 would end it."""
        pid = self.child.pid
        if pid is not None and self.child.returncode is None and catches(pid, signal.SIGUSR1):
            os.kill(pid, signal.SIGUSR1)

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError, with why it ended, when it does."""
        await self.child.watch()

    async def come_up(self) -> None:
        """Start the process; returns when it can serve. Raises RoomError if it dies first or takes longer
        than it may, ConfigError if it never can.
        """
        await self.child.start()
        self.caller.url = self.child.url
        asking = asyncio.ensure_future(self.ask(self.start_s) if self.ready is None else self.ready())
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.exception() is not None:
                # A broken connection: the process is about to be reaped.
                await asyncio.wait({watching}, timeout=2.0)
                if watching.done():
                    raise self.child.death()
            self.health = await asking
        except (CallLost, CallRefused, EngineError) as error:
            what = f"did not come up: {failure_text(error)}; the end of its log:\n{self.child.log_tail()}"
            way_out = error.way_out if isinstance(error, EngineError) else ""
            raise RoomError(self.name, what, way_out=way_out or f"read {self.child.log_path}.") from error
        finally:
            await end_all([asking, watching])

    async def end(self) -> str:
        """Kill the process, frozen or not, and close the connections; another one can be started in its
        place. Returns what is left of it, in words, if it does not die.
        """
        self.child.kill_nowait()
        await self.aclose()
        left = self.child.left
        self.child, self.health = self.child.renewed(), None
        return left

    async def aclose(self) -> None:
        """Close the connections, then end the process."""
        await self.caller.aclose()
        await self.child.aclose()


def failure_text(error: CallLost | CallRefused | RoomError) -> str:
    """What failed, without the name of the server."""
    return error.fault if isinstance(error, RoomError) else str(error)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process has a handler for the signal; a new process has none and would be ended by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def start_all(servers: Sequence[Server]) -> None:
    """Start them, and sleep until all answer. Raises the RoomError of the first that cannot: the ranks of a
    trainer wait for each other.
    """
    starts = [asyncio.ensure_future(server.come_up()) for server in servers]
    try:
        await asyncio.gather(*starts)
    finally:
        await end_all(starts)


async def bring_up(
    trainers: Sequence[Server],
    engines: Sequence[Server],
    beside: Sequence[Server],
    *,
    is_shared: bool,
    stays: bool = False,
) -> None:
    """Start all processes; returns when they answer. Raises the RoomError of the first that cannot.

    On shared devices engines come first and go to sleep, then the trainer: it may have to catch up before
    their turn. So no device holds more than one side, at the price of loading one after the other and reading
    the engines' weights once more. If the engines stay where they are, they do not sleep; they come first
    all the same, because vLLM measures what is free while it starts.
    """
    if not is_shared:
        await start_all([*trainers, *engines, *beside])
        return
    await start_all([*engines, *beside])
    if stays:
        await start_all(trainers)
        return
    try:
        async with TimeLimit(START_TIMEOUT_S):
            clients = [server.engine for server in engines if server.engine is not None]
            await asyncio.gather(*(client.sleep(["kv", "weights"]) for client in clients))
    except TimeoutError as error:
        what = f"an engine does not free the trainer's device within {START_TIMEOUT_S} s"
        raise RoomError("placement", what, way_out="read the logs of the engines.") from error
    await start_all(trainers)


async def first_death(servers: Sequence[Server], timeout_s: float) -> RoomError | None:
    """Why one of their processes has died, if one has; waits up to `timeout_s` for the first death."""
    children = [server.child for server in servers if server.child.pid]
    if waits := [asyncio.ensure_future(child.wait()) for child in children if child.returncode is None]:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await end_all(waits)
    return next((child.death() for child in children if child.returncode is not None), None)


@dataclass(frozen=True)
class Launcher:
    """Makes the servers of one command, which are not started yet, and the clients of its engines."""

    config: RunConfig
    placement: Placement
    model_path: Path
    run_dir: Path
    warn: Callable[[str], None] = print
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def trainers(self, staging_dir: Path) -> list[Server]:
        """The ranks of the trainer, of which the first takes requests."""
        servers, module = list[Server](), "asyncrl.trainer.rank_process"
        for rank in range(self.config.trainer.world_size):
            name, port = f"trainer-{rank}", None if rank else self.config.trainer.port
            spec = self.trainer_spec(rank, staging_dir).model_dump_json()
            child = self._child(name, module, spec, self.placement.trainer, port)
            caller, start_s = Caller(name, "", self.secret), self.start_s(self.model_path)
            servers.append(Server(child, caller, TrainerHealth, start_s=start_s))
        return servers

    def trainer_spec(self, rank: int, staging_dir: Path) -> TrainerSpec:
        """The spec of a rank. It sees the devices of all ranks and no others."""
        config, kind = self.config, engine_kind(self.config)
        num_memories = len(chunk_devices(config, self.placement))
        return TrainerSpec(
            model_path=str(self.model_path),
            dtype=config.model.dtype,
            device="cuda" if self.placement.is_on_cuda else "cpu",
            share=self._own_share(None if self.placement.share is None else 1 - self.placement.share),
            seed=config.seed,
            threads=trainer_threads(config),
            rank=rank,
            trainer=config.trainer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            transport=config.weight_sync.settled,
            is_file_wanted=config.eval is not None,
            chunk_bytes=config.weight_sync.chunk_bytes,
            chunks="file" if num_memories == 0 else "memory" if num_memories == 1 else "memories",
            canary_tokens=kind.canary_tokens(),
            measures_gap=config.rollout.facts.has_model,
            staging_dir=staging_dir,
            record_path=self.run_dir / "trained.jsonl",
            failed_dir=self.run_dir / "failed_batches",
            chat_template=config.model.chat_template and Path(config.model.chat_template),
        )

    def engines(self) -> list[Server]:
        """The engine servers that sample for training: the run's own, or those of rollout.urls."""
        rollout = self.config.rollout
        if rollout.urls is not None:
            key = os.environ.get(KEY_ENV, "")
            foreign = [ForeignProcess(f"engine-{number}", url) for number, url in enumerate(rollout.urls)]
            return [self._engine_server(child, key) for child in foreign]
        ports: Sequence[int | None] = rollout.ports or [None] * rollout.num_engines
        return [
            self._engine(f"engine-{number}", self.placement.engines[number], port)
            for number, port in enumerate(ports)
        ]

    def eval_engine(self) -> Server:
        """The engine server that evaluates."""
        assert self.placement.evaluation is not None, "asked for where config.eval is given"
        return self._engine(EVAL_ENGINE, [self.placement.evaluation], None)

    def teacher(self, folder: Path) -> Server:
        """The server that scores what was sampled, of the model in `folder`."""
        config, device = self.config, self.placement.teacher
        assert config.teacher is not None, "asked for where there is one"
        assert device is not None, "placed where there is one"
        spec = {
            "name": TEACHER,
            "slots": 1,
            "score_slots": config.teacher.slots,
            "max_length": config.rollout.max_length,
            "model_path": str(folder),
            "dtype": config.model.dtype,
            "device": device.partition(":")[0],
            "threads": engine_threads(config),
            "deterministic": config.rollout.deterministic is not False and device == "cpu",
        }
        child = self._child(TEACHER, "asyncrl_servers.embedded", json.dumps(spec), [device], None)
        short_s = min(SHORT_S, config.teacher.timeout_s / 2)
        caller, start_s = Caller(TEACHER, "", self.secret, short_s=short_s), self.start_s(folder)
        return Server(child, caller, EngineHealth, start_s=start_s)

    @staticmethod
    def start_s(folder: Path) -> float:
        """How long a process that loads this model may take to answer."""
        return START_TIMEOUT_S + load_limit_s(folder)

    @cached_property
    def tokenizer(self) -> HFChatTokenizer:
        """Of the model. Blocks at first."""
        model = self.config.model
        return HFChatTokenizer(
            self.model_path,
            chat_template=model.chat_template,
            chat_template_kwargs=model.chat_template_kwargs,
        )

    def client(self, server: Server, meeting: Broadcasts | None = None) -> EngineClient:
        """The client of an engine server, made before that is started. `meeting`: where it receives weights,
        if the trainer sends them. Blocks at first.
        """
        server.engine = engine_kind(self.config).client(server, self, meeting)
        return server.engine

    def _engine(self, name: str, devices: Sequence[str], port: int | None) -> Server:
        kind, placement, turns = engine_kind(self.config), self.placement, dict[str, Any]()
        if name != EVAL_ENGINE:
            share = placement.share_of(int(name.rpartition("-")[2]))
            # vLLM counts what CUDA takes itself
            share = share if self.config.rollout.facts.package else self._own_share(share)
            turns = {
                "takes_turns": placement.mode == "colocated",
                "stays": placement.stays,
                "share": share,
            }
        spec = json.dumps(kind.spec(self.model_path, name, devices[0], **turns))
        module = f"asyncrl_servers.{self.config.rollout.engine}"
        child = self._child(name, module, spec, devices, port, **kind.process(self.run_dir))
        return self._engine_server(child, self.secret)

    def _own_share(self, share: float | None) -> float | None:
        """What a part of the trainer's device leaves for torch, which does not count CUDA's own memory."""
        if share is None:
            return None
        total = find_cuda_devices()[int(self.placement.trainer[0].removeprefix("cuda:"))].total_bytes
        return share if total is None else max(1e-3, share - OWN_BYTES / total)

    def _engine_server(self, child: ChildProcess | ForeignProcess, key: str) -> Server:
        """A call of it waits for a connection of this machine half as long, at most, as the limits around it
        allow: at their end a rollout or the engine would be blamed.
        """
        config = self.config
        eval_s = None if config.eval is None else config.eval.timeout_s
        limits = (config.rollout.timeout_s, config.weight_sync.timeout_s, eval_s)
        short_s = min([SHORT_S, *(limit / 2 for limit in limits if limit is not None)])
        caller, start_s = Caller(child.name, "", key, short_s=short_s), self.start_s(self.model_path)
        return Server(child, caller, EngineHealth, start_s=start_s)

    def _child(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[str],
        port: int | None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> ChildProcess:
        """The environment in which a process sees these devices and no others."""
        env = {**child_environ(devices, find_cuda_devices()), **(env or {})}
        return ChildProcess(name, module, spec, self.run_dir, self.secret, port, env, **more)
