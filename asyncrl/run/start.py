"""Makes the servers of a run as child processes, and starts them.

Waits: each process is given START_TIMEOUT_S (vLLM: VLLM_START_TIMEOUT_S) to answer; one that dies first ends
    the start with its own last words.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.vllm_server import VllmServer
from asyncrl.errors import EngineError, RoomError
from asyncrl.http import SHORT_S, Caller, CallLost, CallRefused
from asyncrl.messages.base import Moved
from asyncrl.messages.calls import EngineHealth, SleepRequest, TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.placement.devices import Placement, child_environ, chunk_device, find_cuda_devices
from asyncrl.placement.fork_server import KEY_ENV
from asyncrl.placement.plan import EVAL_ENGINE, engine_threads, trainer_threads
from asyncrl.placement.processes import ChildProcess, ForeignProcess
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run.engine_kinds import engine_kind
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.waits import TimeLimit

Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
START_TIMEOUT_S = 300.0
VLLM_START_TIMEOUT_S = 900.0
"""vLLM compiles kernels at its first start, and reads large models."""


@dataclass(slots=True)
class Server:
    """A child process and the caller that speaks to it.

    `answers`: what /health says. `health`: its last answer. `vllm`: the client of a vLLM, whose /health says
    nothing of ours; given before the start.
    """

    child: ChildProcess | ForeignProcess
    caller: Caller
    answers: type[TrainerHealth] | type[EngineHealth] | type[WorkerHealth]
    health: Health | None = None
    vllm: VllmServer | None = None

    @property
    def name(self) -> str:
        """Of the process, and of those that take its place."""
        return self.child.name

    async def ask(self, timeout_s: float) -> Health:
        """Its answer to /health. Raises CallLost, CallRefused or EngineError."""
        if self.vllm is not None:
            return await self.vllm.health(timeout_s=timeout_s)
        return await self.caller.get("/health", self.answers, timeout_s=timeout_s)

    async def check_alive(self, timeout_s: float) -> None:
        """Ask /health. Raises RoomError if the process does not answer within `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except (CallLost, CallRefused, EngineError) as error:
            is_ours = isinstance(self.child, ChildProcess)
            where = f"process {self.child.pid}" if is_ours else f"the server at {self.child.url}"
            what = (
                f"{where} does not answer: {failure_text(error)}; observe.heartbeat_s={timeout_s} is the "
                f"limit"
            )
            way_out = f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow."
            raise RoomError(self.name, what, way_out=way_out) from error

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError, with why it ended, when it does."""
        await self.child.watch()

    async def start(self) -> None:
        """Start the process; it answers later (wait_ready)."""
        await self.child.start()
        self.caller.url = self.child.url

    async def wait_ready(self) -> None:
        """Sleep until the server can serve. Raises RoomError if it dies first or takes longer than it may,
        ConfigError if it never can.
        """
        ready = self.ask(START_TIMEOUT_S) if self.vllm is None else self.vllm.ready(VLLM_START_TIMEOUT_S)
        asking, watching = asyncio.ensure_future(ready), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.exception() is not None:
                # A broken connection: the process is about to be reaped.
                await asyncio.wait({watching}, timeout=2.0)
                if watching.done():
                    raise self.child.death()
            self.health = await asking
        except (CallLost, CallRefused, EngineError) as error:
            rule, way_out = (error.rule, error.way_out) if isinstance(error, EngineError) else ("", "")
            what = f"did not come up: {failure_text(error)}; the end of its log:\n{self.child.log_tail()}"
            way_out = way_out or f"read {self.child.log_path}."
            raise RoomError(self.name, what, rule=rule, way_out=way_out) from error
        finally:
            for task in (asking, watching):
                task.cancel()
            await asyncio.gather(asking, watching, return_exceptions=True)

    async def sleep(self) -> None:
        """Have an engine free its device. Raises RoomError."""
        try:
            async with TimeLimit(START_TIMEOUT_S):
                if self.vllm is not None:
                    await self.vllm.sleep(["kv", "weights"])
                else:
                    await self.caller.post("/sleep", SleepRequest(), Moved, timeout_s=START_TIMEOUT_S)
        except (CallLost, CallRefused, EngineError, TimeoutError) as error:
            what = f"cannot sleep, and the trainer needs its device: {failure_text(error)}"
            raise RoomError(self.name, what, way_out=f"read {self.child.log_path}.") from error

    async def end(self) -> str:
        """Kill the process, frozen or not, and close the connections; another one can be started in its
        place.

        Returns what is left of it, in words, if it does not die.
        """
        self.child.kill_nowait()
        await self.aclose()
        left = self.child.left
        self.child, self.health = self.child.renewed(), None
        return left

    async def start_again(self) -> None:
        """Start the process anew; returns when it answers. Raises RoomError if it does not come up."""
        await self.start()
        await self.wait_ready()

    async def aclose(self) -> None:
        """Close the connections, then end the process."""
        await self.caller.aclose()
        await self.child.aclose()


def failure_text(error: CallLost | CallRefused | RoomError | TimeoutError) -> str:
    """What failed, without the name of the server."""
    if isinstance(error, TimeoutError):
        return f"no answer within {START_TIMEOUT_S} s"
    return error.fault if isinstance(error, RoomError) else str(error)


async def bring_up(
    trainers: Sequence[Server], engines: Sequence[Server], beside: Sequence[Server], *, is_shared: bool
) -> None:
    """Start all processes; returns when they answer. Raises the RoomError of the first that cannot.

    On shared devices engines come first and go to sleep, then the trainer: it may have to catch up before
    their turn. So no device holds more than one side, at the price of loading one after the other and reading
    the engines' weights once more.
    """
    if not is_shared:
        await start_all([*trainers, *engines, *beside])
        return
    await start_all([*engines, *beside])
    await asyncio.gather(*(server.sleep() for server in engines))
    await start_all(trainers)


async def start_all(servers: Sequence[Server]) -> None:
    """Start them, and sleep until all answer. Raises the RoomError of the first that cannot: the ranks of a
    trainer wait for each other.
    """
    for server in servers:
        await server.start()
    waits = [asyncio.ensure_future(server.wait_ready()) for server in servers]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def note_deaths(servers: Sequence[Server], *, timeout_s: float) -> None:
    """Note in each of them whether its process has died; waits up to `timeout_s` for the first death."""
    running = [server.child for server in servers if server.child.pid and server.child.returncode is None]
    waits = [asyncio.ensure_future(child.wait()) for child in running] if timeout_s else []
    if waits:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    for server in servers:
        if server.child.returncode is not None and server.child.died is None:
            server.child.died = server.child.death()


@dataclass(frozen=True)
class Launcher:
    """Makes the servers of one command, which are not started yet, and the clients of its engines."""

    config: RunConfig
    placement: Placement
    model_path: Path
    run_dir: Path
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def trainers(self, staging_dir: Path) -> list[Server]:
        """The ranks of the trainer, of which the first takes requests."""
        config, servers = self.config, []
        for rank in range(config.trainer.world_size):
            spec = self.trainer_spec(rank, staging_dir).model_dump_json()
            port, devices = None if rank else config.trainer.port, self.placement.trainer
            child = self._child(
                f"trainer-{rank}",
                "asyncrl.trainer.rank_process",
                spec,
                devices,
                port,
                trainer_threads(config),
            )
            servers.append(Server(child, Caller(child.name, "", self.secret), TrainerHealth))
        return servers

    def trainer_spec(self, rank: int, staging_dir: Path) -> TrainerSpec:
        """The spec of a rank. It sees the devices of all ranks and no others."""
        config, kind = self.config, engine_kind(self.config)
        return TrainerSpec(
            model_path=str(self.model_path),
            dtype=config.model.dtype,
            device="cuda" if self.placement.is_on_cuda else "cpu",
            seed=config.seed,
            threads=trainer_threads(config),
            rank=rank,
            trainer=config.trainer,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            transport=config.weight_sync.transport,
            is_file_wanted=config.eval is not None,
            chunk_bytes=config.weight_sync.chunk_bytes,
            chunks="file" if chunk_device(config, self.placement) is None else "memory",
            canary_tokens=kind.canary_tokens(),
            measures_gap=kind.has_model,
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

    @cached_property
    def tokenizer(self) -> HFChatTokenizer:
        """Of the model. Blocks at first."""
        return HFChatTokenizer(self.model_path, chat_template=self.config.model.chat_template)

    def client(self, server: Server, warn: Callable[[str], None]) -> EngineClient:
        """The client of an engine server, made before that is started. Blocks at first."""
        client = engine_kind(self.config).client(server.caller, self, warn)
        if isinstance(client, VllmServer):
            server.vllm = client
        return client

    def _engine(self, name: str, devices: Sequence[str], port: int | None) -> Server:
        kind, takes_turns = engine_kind(self.config), self.placement.mode == "colocated"
        spec = kind.spec(self.model_path, name, devices[0], takes_turns=takes_turns and name != EVAL_ENGINE)
        module, threads = f"asyncrl_servers.{self.config.rollout.engine}", engine_threads(self.config)
        child = self._child(
            name, module, json.dumps(spec), devices, port, threads, **kind.process(self.run_dir)
        )
        return self._engine_server(child, self.secret)

    def _engine_server(self, child: ChildProcess | ForeignProcess, key: str) -> Server:
        """A call of it waits for a connection of this machine half as long, at most, as the limits around it
        allow: at their end a rollout or the engine would be blamed.
        """
        config = self.config
        eval_s = None if config.eval is None else config.eval.timeout_s
        limits = (config.rollout.timeout_s, config.weight_sync.timeout_s, eval_s)
        short_s = min([SHORT_S, *(limit / 2 for limit in limits if limit is not None)])
        return Server(child, Caller(child.name, "", key, short_s=short_s), EngineHealth)

    def _child(
        self,
        name: str,
        module: str,
        spec: str,
        devices: Sequence[str],
        port: int | None,
        threads: int,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> ChildProcess:
        """The environment in which a process sees these devices and no others."""
        env = {"OMP_NUM_THREADS": str(threads), **child_environ(devices, find_cuda_devices()), **(env or {})}
        return ChildProcess(
            name, module, spec, run_dir=self.run_dir, secret=self.secret, port=port, env=env, **more
        )
