"""Brings up the processes of a run: trainer worker, engine servers; returns once all of them answer.

Waits: each process is given START_TIMEOUT_S (vLLM: VLLM_START_TIMEOUT_S) to answer; one that dies first ends
the start with its own last words.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineError, RoomError
from asyncrl.http import SHORT_S, Caller, CallLost, CallRefused
from asyncrl.messages.base import EnginePart, Moved
from asyncrl.messages.engine_calls import EngineHealth, SleepRequest
from asyncrl.messages.trainer_calls import TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.placement.choices import chunk_device, find_vllm_python, import_folder
from asyncrl.placement.devices import (
    NO_DEVICE,
    CudaDevice,
    Placement,
    child_environ,
    find_cuda_devices,
    place,
)
from asyncrl.placement.fork_server import KEY_ENV
from asyncrl.placement.plan import EVAL_ENGINE, engine_threads, trainer_threads
from asyncrl.placement.processes import ChildProcess, ForeignProcess
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run.specs import engine_spec, max_length, trainer_spec
from asyncrl.waits import TimeLimit

Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth

START_TIMEOUT_S = 300.0
VLLM_START_TIMEOUT_S = 900.0
"""vLLM compiles kernels at its first start, and reads large models."""
IMPORTS = "imports"
"""In the specs of a run: links to our packages, for the Python of a server that is not ours."""


class Asked(Protocol):
    """Who asks a server that has words of its own for how it does; engines.VllmServer is it."""

    async def ready(self, timeout_s: float) -> EngineHealth:
        """Return once it can serve. Raises EngineError or ConfigError."""
        ...

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How it does. Raises EngineError if it gives no answer."""
        ...

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """Have these parts freed. Raises EngineError."""
        ...


@dataclass(slots=True)
class Server:
    """A child process and the caller that speaks to it; `health` is its last answer to /health.

    `asked`: who speaks to it where /health has no answer of ours; given before it is started.
    """

    child: ChildProcess | ForeignProcess
    caller: Caller
    health: Health | None = None
    asked: Asked | None = None

    async def ask(self, timeout_s: float) -> Health:
        """How it does. Raises CallLost, CallRefused or EngineError."""
        if self.asked is not None:
            return await self.asked.health(timeout_s=timeout_s)
        return await self.caller.get("/health", health_type(self.child.name), timeout_s=timeout_s)

    async def ask_ready(self) -> Health:
        """How it does once it can serve. Raises CallLost, CallRefused, EngineError or ConfigError."""
        if self.asked is not None:
            return await self.asked.ready(VLLM_START_TIMEOUT_S)
        return await self.ask(START_TIMEOUT_S)

    async def check_alive(self, timeout_s: float) -> None:
        """Ask /health. Raises RoomError if the process does not answer within `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except (CallLost, CallRefused, EngineError) as error:
            raise RoomError(
                self.child.name,
                f"{self.where} does not answer: {failure_text(error)}",
                rule=f"observe.heartbeat_s={timeout_s} is the limit",
                way_out=f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow.",
            ) from error

    @property
    def name(self) -> str:
        """Of the process, and of those that take its place."""
        return self.child.name

    @property
    def where(self) -> str:
        """The process, or the address of one that is somebody else's."""
        return (
            f"the server at {self.child.url}"
            if isinstance(self.child, ForeignProcess)
            else f"process {self.child.pid}"
        )

    @property
    def is_engine(self) -> bool:
        """Not a trainer rank, and no worker."""
        return health_type(self.name) is EngineHealth

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError, with why it ended, when it does."""
        await self.child.watch()

    async def end(self) -> str:
        """Kill the process, frozen or not, and close the connections; another one can be started in its
        place.

        Returns what is left of it, in words, if it does not die.
        """
        self.child.kill_nowait()
        await self.caller.aclose()
        await self.child.aclose()
        left = self.child.left
        self.child, self.health = self.child.renewed(), None
        return left

    async def start_again(self) -> None:
        """Start the process anew; returns when it answers. Raises RoomError if it does not come up."""
        await start(self)
        self.health = await wait_ready(self)

    async def aclose(self) -> None:
        """Close the connections, then end the process."""
        await self.caller.aclose()
        await self.child.aclose()


def make_servers(
    config: RunConfig, model_path: Path, run_dir: Path, staging_dir: Path, secret: str
) -> tuple[list[Server], list[Server]]:
    """The ranks of the trainer, of which the first takes requests, and the engine servers; not started
    yet.
    """
    cuda = find_cuda_devices()
    placement = place(config, len(cuda))
    chunks = "file" if chunk_device(config, placement) is None else "memory"
    trainers = [
        ChildProcess(
            f"trainer-{rank}",
            "asyncrl.trainer.rank_process",
            trainer_spec(config, model_path, run_dir, staging_dir, rank, device=device, chunks=chunks),
            run_dir=run_dir,
            secret=secret,
            port=config.trainer.port if rank == 0 else None,
            env={"OMP_NUM_THREADS": str(trainer_threads(config))} | child_environ(placement.trainer, cuda),
        )
        for rank, device in enumerate(placement.trainer)
    ]
    return [_server(child, secret, config) for child in trainers], _engine_servers(
        config, placement, cuda, model_path, run_dir, secret
    )


def _engine_servers(
    config: RunConfig,
    placement: Placement,
    cuda: Sequence[CudaDevice],
    model_path: Path,
    run_dir: Path,
    secret: str,
) -> list[Server]:
    if config.rollout.urls is not None:
        key = os.environ.get(KEY_ENV, "")
        return [
            Server(
                ForeignProcess(f"engine-{i}", url), Caller(f"engine-{i}", "", key, short_s=short_s(config))
            )
            for i, url in enumerate(config.rollout.urls)
        ]
    engines = []
    for index, device in enumerate(placement.rollout):
        spec = engine_spec(
            config, model_path, f"engine-{index}", device=device, takes_turns=placement.mode == "colocated"
        )
        port = config.rollout.ports[index] if config.rollout.ports else None
        devices = child_environ(placement.devices_of(index), cuda)
        engines.append(
            _server(
                _engine_process(config, f"engine-{index}", spec, devices, run_dir, secret, port),
                secret,
                config,
            )
        )
    return engines


def make_eval_server(config: RunConfig, slots: int, model_path: Path, run_dir: Path, secret: str) -> Server:
    """The engine server that evaluates, not started yet."""
    cuda = find_cuda_devices()
    device = place(config, len(cuda)).evaluation
    assert device is not None, "asked for where config.eval is given"
    spec = engine_spec(config, model_path, EVAL_ENGINE, slots=slots, device=device)
    return _server(
        _engine_process(config, EVAL_ENGINE, spec, child_environ([device], cuda), run_dir, secret, None),
        secret,
        config,
    )


def _engine_process(
    config: RunConfig,
    name: str,
    spec: str,
    devices: Mapping[str, str],
    run_dir: Path,
    secret: str,
    port: int | None,
) -> ChildProcess:
    """Raises ConfigError if it needs a vLLM that is not there."""
    python, env = None, {"OMP_NUM_THREADS": str(engine_threads(config)), **devices}
    is_vllm = config.rollout.engine == "vllm"
    if is_vllm:
        python = find_vllm_python(config.rollout)
        env["PYTHONPATH"] = str(import_folder((run_dir / "specs" / IMPORTS).absolute()))
    module = f"asyncrl_servers.{config.rollout.engine}"
    return ChildProcess(
        name,
        module,
        spec,
        run_dir=run_dir,
        secret=secret,
        port=port,
        env=env,
        python=python,
    )


def is_shared(config: RunConfig) -> bool:
    """Whether trainer and engines take turns on this machine."""
    return place(config, len(find_cuda_devices())).mode == "colocated"


def _server(child: ChildProcess, secret: str, config: RunConfig) -> Server:
    return Server(child, Caller(child.name, "", secret, short_s=short_s(config)))


def short_s(config: RunConfig) -> float:
    """How long a call waits for a connection of this machine: half of the limits around it, which would blame
    a rollout or an engine.
    """
    limits = (
        config.rollout.timeout_s,
        config.weight_sync.timeout_s,
        None if config.eval is None else config.eval.timeout_s,
    )
    return min([SHORT_S, *(limit / 2 for limit in limits if limit is not None)])


def failure_text(error: CallLost | CallRefused | RoomError | TimeoutError) -> str:
    """What failed, without the name of the server."""
    if isinstance(error, TimeoutError):
        return f"no answer within {START_TIMEOUT_S} s"
    return error.fault if isinstance(error, RoomError) else str(error)


def health_type(name: str) -> type[TrainerHealth] | type[EngineHealth] | type[WorkerHealth]:
    """The message that a process of this name answers /health with."""
    if name.startswith("trainer"):
        return TrainerHealth
    return WorkerHealth if name.startswith("worker") else EngineHealth


async def start(server: Server) -> None:
    """Start one process; it answers later (wait_ready)."""
    await server.child.start()
    server.caller.url = server.child.url


async def bring_up(
    trainers: Sequence[Server], engines: Sequence[Server], beside: Sequence[Server], *, is_shared: bool
) -> None:
    """Start all processes; returns when they answer. Raises the RoomError of the first that cannot.

    On shared devices engines come first and go to sleep, then the trainer: it may have to catch up before
    their turn. So no device holds more than one side, at the price of loading one after the other and reading
    the engines' weights once more.
    """
    first, second = ([*engines, *beside], trainers) if is_shared else ([*trainers, *engines, *beside], [])
    for server in first:
        await start(server)
    await wait_all_ready(first)
    if is_shared:
        await asyncio.gather(*(_put_to_sleep(server) for server in engines))
    for server in second:
        await start(server)
    await wait_all_ready(second)


async def _put_to_sleep(server: Server) -> None:
    try:
        if server.asked is not None:
            async with TimeLimit(START_TIMEOUT_S):
                await server.asked.sleep(["kv", "weights"])
        else:
            await server.caller.post("/sleep", SleepRequest(), Moved, timeout_s=START_TIMEOUT_S)
    except (CallLost, CallRefused, EngineError, TimeoutError) as error:
        raise RoomError(
            server.name,
            f"cannot sleep: {failure_text(error)}",
            rule="trainer and engines share a device",
            way_out=f"read {server.child.log_path}.",
        ) from error


async def wait_all_ready(servers: Sequence[Server]) -> None:
    """Sleep until all answer /health. Raises the RoomError of the first that cannot: the ranks of a trainer
    wait for each other.
    """
    if not servers:
        return
    waits = [asyncio.ensure_future(wait_ready(server)) for server in servers]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def wait_ready(server: Server) -> Health:
    """Sleep until the server can serve. Raises RoomError if it dies first or takes longer than it may,
    ConfigError if it never can.
    """
    asking = asyncio.ensure_future(server.ask_ready())
    watching = asyncio.ensure_future(server.child.watch())
    try:
        done, _ = await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        if asking in done and asking.exception() is None:
            return asking.result()
        await asyncio.wait({watching}, timeout=2.0)  # a broken connection: the process is about to be reaped
        if watching.done():
            raise server.child.death()
        asking.result()
        raise AssertionError("unreachable: asking failed")
    except (CallLost, CallRefused, EngineError) as error:
        rule, way_out = (error.rule, error.way_out) if isinstance(error, EngineError) else ("", "")
        raise RoomError(
            server.child.name,
            f"did not come up: {failure_text(error)}; the end of its log:\n{server.child.log_tail()}",
            rule=rule,
            way_out=way_out or f"read {server.child.log_path}.",
        ) from error
    finally:
        for task in (asking, watching):
            task.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)


async def note_deaths(servers: Sequence[Server], *, timeout_s: float) -> None:
    """Have each of them note that its process has died, if it has; waits up to `timeout_s` for the first that
    does.
    """
    running = [
        server.child for server in servers if server.child.pid is not None and server.child.returncode is None
    ]
    waits = [asyncio.ensure_future(child.wait()) for child in running] if timeout_s else []
    if waits:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    for server in servers:
        if server.child.returncode is not None and server.child.died is None:
            server.child.died = server.child.death()


async def end_server(server: Server, warn: Callable[[str], None]) -> None:
    """At the run's end. A process that does not die holds memory, and perhaps a GPU: whoever started the run
    has to know.
    """
    await server.aclose()
    if server.child.left:
        warn(server.child.left)


# Makes the client of each engine server: the one for our own protocol, or the one that knows vLLM's routes.
# Starts nothing.


CANARY_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""weight_sync.canary_limit=auto, in nats. A vLLM with the right weights is measured at 6e-6 in float32, 0.09
in bfloat16.
"""


def connect(
    config: RunConfig,
    server: Server,
    model_path: Path,
    tokenizer: HFChatTokenizer,
    *,
    warn: Callable[[str], None],
) -> EngineClient:
    """The client of an engine server, which is not started yet; whoever starts it asks through this whether
    it is ready.
    """
    if config.rollout.engine != "vllm":
        return EngineServer(server.caller)
    facts = vllm_facts(config, server.name, model_path, tokenizer)
    client = VllmServer(
        server.caller,
        facts=facts,
        decode=tokenizer.decode,
        canary_limit=canary_limit(config, facts.dtype),
        retries=config.weight_sync.retries,
        chunk_bytes=config.weight_sync.chunk_bytes,
        warn=warn,
        mark=secrets.token_hex(4),
    )
    server.asked = client
    return client


def vllm_facts(config: RunConfig, name: str, model_path: Path, tokenizer: HFChatTokenizer) -> VllmFacts:
    """What this server must be started with, as far as what it samples depends on it."""
    placement = place(config, len(find_cuda_devices()))
    is_eval = name == EVAL_ENGINE and config.eval is not None
    device = placement.evaluation if is_eval else placement.rollout[0]
    if device is None or device == NO_DEVICE:  # somebody else's, so nobody told
        device = placement.trainer[0]
    return VllmFacts(
        model_path=str(model_path),
        dtype=config.model.dtype,
        slots=config.eval.slots if is_eval and config.eval is not None else config.rollout.slots,
        max_length=max_length(config),
        end_ids=tuple(sorted(tokenizer.end_ids)),
        has_adapters=config.weight_sync.way.sends_adapters,
        device=device.partition(":")[0],
        special_ids=_special_ids(tokenizer),
        starts_fresh=is_eval or config.rollout.urls is None,
    )


def _special_ids(tokenizer: HFChatTokenizer) -> dict[str, int]:
    """Tokens that are no text, by their names."""
    special = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.text_ids]
    names = {tokenizer.decode([number], skip_special_tokens=False): number for number in special}
    return {
        name: number for name, number in names.items() if name
    }  # the vocabulary may have rows that are no token


def canary_limit(config: RunConfig, dtype: str) -> float:
    """Most by which logprobs may differ from the trainer's. Without a limit no push has a canary."""
    limit = config.weight_sync.canary_limit
    if limit is None:
        return math.inf
    return CANARY_LIMITS[dtype] if limit == "auto" else limit
