"""Brings up the processes of a run: model folder, trainer worker, engine servers; returns once all of them answer.

Waits: each process is given START_TIMEOUT_S to answer /health; one that dies first ends the start with its own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncrl.algorithms.names import BUILT_IN_ADVANTAGES, BUILT_IN_LOSSES
from asyncrl.calling import Caller, CallLost, CallRefused
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.errors import ConfigError, RoomError
from asyncrl.placement.plan import engine_threads, trainer_threads
from asyncrl.placement.process import ChildProcess
from asyncrl.wire import EngineHealth, TrainerHealth, find_fatal

Result = TypeVar("Result")

START_TIMEOUT_S = 300.0
ENGINE_MODULES = {"embedded": "asyncrl_servers.embedded", "simulated": "asyncrl_servers.simulated"}


@dataclass(slots=True)
class Server:
    """A child process and the caller that speaks to it; `health` is its last answer to /health."""

    child: ChildProcess
    caller: Caller
    health: EngineHealth | TrainerHealth | None = None

    async def check_alive(self, timeout_s: float) -> None:
        """Ask /health. Raises RoomError if the process does not answer within `timeout_s`."""
        try:
            self.health = await self.caller.get("/health", health_type(self.child.name), timeout_s=timeout_s)
        except (CallLost, CallRefused) as error:
            raise RoomError(
                self.child.name, f"process {self.child.pid} does not answer: {error}",
                rule=f"observe.heartbeat_s={timeout_s} is the limit",
                way_out=f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow.",
            ) from error  # fmt: skip

    async def aclose(self) -> None:
        """Close the connections, then end the process."""
        await self.caller.aclose()
        await self.child.aclose()


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work of the start-up off the loop. Raises what it raises; a sys.exit() in it becomes a RuntimeError.

    Not asyncio.to_thread: its threads are joined when the loop closes, and again when the interpreter ends, so that Ctrl-C
    would take as long as the slowest download or constructor.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not done.done():  # else nobody waits any more
            result()

    def body() -> None:
        try:
            result = work()
        except (Exception, SystemExit) as raised:  # carried over to the task that waits, not handled
            error = raised if isinstance(raised, Exception) else RuntimeError(f"sys.exit({raised.code}) was called")
            answer = functools.partial(done.set_exception, error)
        else:
            answer = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=body, name="start-up", daemon=True).start()
    return await done


async def make_model_folder(config: RunConfig, run_dir: Path) -> Path:
    """The Hugging Face folder that trainer and engines start from: made from scratch, given, or fetched from the hub."""
    if config.model.scratch is None:
        return await in_daemon_thread(lambda: _find_model(config.model))
    folder = run_dir / "model"
    spec = run_dir / "specs" / "scratch.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    values = {"out": str(folder), "seed": config.seed, "scratch": config.model.scratch.model_dump(), "dtype": config.model.dtype}
    spec.write_text(json.dumps(values), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.trainer.scratch", "--spec", str(spec),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    except TimeoutError:
        raise ConfigError(
            f"model.scratch was not made within {START_TIMEOUT_S} s", rule="a start has that long a step",
            way_out="take a smaller model.scratch.architecture, or a faster machine.",
        ) from None  # fmt: skip
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        text = output.decode(errors="replace")
        fatal = find_fatal(text)
        what = fatal.error if fatal else f"exit code {process.returncode}: {text[-500:]}"
        raise ConfigError(
            f"model.scratch cannot be made: {what}", way_out=(fatal and fatal.way_out) or "correct model.scratch.architecture."
        )
    return folder


def _find_model(model: ModelConfig) -> Path:
    path = Path(model.path or "").expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.path={model.path} has no config.json", rule="it must be a Hugging Face model folder",
                way_out="give the folder that save_pretrained wrote, or a hub id.",
            )  # fmt: skip
        return path.resolve()
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "models"):
        raise ConfigError(
            f"model.path={model.path}: there is no such folder", rule="it must be a Hugging Face folder or a hub id",
            way_out="correct model.path; for configs/smollm2.yaml run `python examples/smollm2.py` first.",
        )  # fmt: skip
    return _download(str(model.path))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:  # the hub's own errors are all OSErrors or ValueErrors
        raise ConfigError(
            f"model.path={hub_id} is no local folder and cannot be fetched from the hub: {type(error).__name__}: {str(error)[:300]}",
            way_out="check the spelling and the network, or give the path of a local folder.",
        ) from error


def trainer_spec(config: RunConfig, model_path: Path, run_dir: Path, staging_dir: Path) -> str:
    """JSON that the trainer worker is started with."""
    algorithm = config.algorithm
    return json.dumps(
        {
            "model_path": str(model_path),
            "dtype": config.model.dtype,
            "device": config.placement.trainer,  # auto is settled where torch is: the driver may see a device that it does not
            "seed": config.seed,
            "threads": trainer_threads(config),
            "trainer": config.trainer.model_dump(mode="json"),
            "temperature": config.rollout.temperature,
            "num_steps": config.trainer.num_steps,
            "advantage": _resolve("advantage", algorithm.advantage, BUILT_IN_ADVANTAGES),
            "loss": _resolve("loss", algorithm.loss, BUILT_IN_LOSSES),
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "importance_cap": algorithm.importance_cap,
            "staging_dir": str(staging_dir),
            "record_path": str(run_dir / "trained.jsonl"),
            "failed_dir": str(run_dir / "failed_batches"),
            "chat_template": config.model.chat_template,
        }
    )


def engine_spec(config: RunConfig, model_path: Path, name: str) -> str:
    """JSON that an engine server is started with."""
    rollout = config.rollout
    common = {"name": name, "slots": rollout.slots, "max_length": rollout.max_prompt_tokens + rollout.max_tokens}
    if rollout.engine == "simulated":
        return json.dumps(common | {"vocab_size": 1000})
    return json.dumps(
        common
        | {
            "model_path": str(model_path),
            "dtype": config.model.dtype,
            "device": config.placement.rollout,
            "threads": engine_threads(config),
            "deterministic": rollout.deterministic,
        }
    )


def _resolve(key: str, name: str, built_in: dict[str, str]) -> str:
    """module:function of a built-in name, or the user's own. Raises ConfigError for a name that is neither."""
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ConfigError(
            f"algorithm.{key}={name} is not known", rule=f"it is one of {', '.join(built_in)}, or module:function",
            way_out=f"correct algorithm.{key}.",
        )  # fmt: skip
    return name


def make_servers(config: RunConfig, model_path: Path, run_dir: Path, staging_dir: Path, secret: str) -> tuple[Server, list[Server]]:
    """The trainer worker and the engine servers, not started yet."""
    trainer = ChildProcess(
        "trainer-0", "asyncrl.trainer.worker", trainer_spec(config, model_path, run_dir, staging_dir),
        run_dir=run_dir, secret=secret, port=config.trainer.port, env={"OMP_NUM_THREADS": str(trainer_threads(config))},
    )  # fmt: skip
    engines = []
    for index in range(config.rollout.num_engines):
        name = f"engine-{index}"
        port = config.rollout.ports[index] if config.rollout.ports else None
        engines.append(
            ChildProcess(
                name, ENGINE_MODULES[config.rollout.engine], engine_spec(config, model_path, name),
                run_dir=run_dir, secret=secret, port=port, env={"OMP_NUM_THREADS": str(engine_threads(config))},
            )
        )  # fmt: skip
    return _server(trainer, secret), [_server(child, secret) for child in engines]


def _server(child: ChildProcess, secret: str) -> Server:
    return Server(child, Caller(child.name, "", secret))


def health_type(name: str) -> type[TrainerHealth] | type[EngineHealth]:
    """The message that a process of this name answers /health with."""
    return TrainerHealth if name.startswith("trainer") else EngineHealth


async def start(server: Server) -> None:
    """Start one process; it answers later (wait_ready)."""
    await server.child.start()
    server.caller.url = server.child.url


async def wait_ready(server: Server) -> EngineHealth | TrainerHealth:
    """Sleep until the server answers /health. Raises RoomError if it dies first or takes longer than START_TIMEOUT_S."""
    asking = asyncio.ensure_future(server.caller.get("/health", health_type(server.child.name), timeout_s=START_TIMEOUT_S))
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
    except (CallLost, CallRefused) as error:
        raise RoomError(
            server.child.name, f"did not come up: {error}; the end of its log:\n{server.child.log_tail()}",
            way_out=f"read {server.child.log_path}.",
        ) from error  # fmt: skip
    finally:
        for task in (asking, watching):
            task.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)
