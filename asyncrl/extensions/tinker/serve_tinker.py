"""Processes of `asyncrl serve tinker`: a trainer, engines, and the server itself."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from asyncrl.agents.endpoint.gateway import AppServer
from asyncrl.base.errors import ConfigError, TrainerLost
from asyncrl.base.files import new_staging_dir, remove_staging_dir
from asyncrl.base.user_code import run_loop
from asyncrl.config.load import load_job, name_of_config
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.tinker.ledger import Ledger
from asyncrl.extensions.tinker.tinker_config import TinkerConfig
from asyncrl.extensions.tinker.tinker_routes import Routes, Served
from asyncrl.extensions.tinker.tinker_sampling import EngineAdapters, Sampling
from asyncrl.extensions.tinker.token_ages import AgeRule, Bound
from asyncrl.extensions.tinker.trainer_calls import Part, TinkerTrainer
from asyncrl.extensions.tinker.training_queue import Training
from asyncrl.job.build import prepare_model
from asyncrl.job.lifecycle import Lifecycle, locked_run_dir, new_run_dir
from asyncrl.job.servers import ServerFactory, as_engine
from asyncrl.launch.fork_server import serving
from asyncrl.launch.launchers import opened
from asyncrl.launch.placement import place
from asyncrl.launch.plan import resolve_auto
from asyncrl.launch.supervise import Server, Supervision, Supervisor, start_all
from asyncrl.observe.console import RunLog, logging_to
from asyncrl.observe.run_dir import read_object
from asyncrl.trainer.model.model_folder import ModelPin

LEDGER = "tinker.sqlite"
MAX_CONNECTIONS = 4096
IDLE_S = 75.0
"""An idle connection is closed after this time: the client's pool keeps them for 60 s."""
PARTS: Sequence[Part] = ("attn", "mlp", "unembed")


def serve(
    path: Path, overrides: list[str], given: Sequence[str], run_dir: Path | None
) -> int:
    """Serve until Ctrl-C; return the exit code."""
    config = load_job(TinkerConfig, path, overrides, run_dir=run_dir)
    keys = _keys(given)
    with serving(), opened(config.launcher) as launcher:
        run, settled = resolve_auto(config.as_run(), launcher.nodes)
        log = RunLog()
        for text in settled:
            log.info(text)
        folder = run_dir or new_run_dir(f"serve-{name_of_config(path)}")
        with locked_run_dir(folder, run.observe.dir_mode), logging_to(folder):
            lifecycle = Lifecycle(run, folder, log, launcher)
            return run_loop(lifecycle.run(partial(_live, lifecycle, config, keys)))


def _keys(given: Sequence[str]) -> Mapping[str, str]:
    """Return owners by key. Raises ConfigError."""
    keys = dict[str, str]()
    for text in given:
        name, _, key = text.partition("=")
        if not name or not key.startswith("tml-") or key in keys:
            raise ConfigError(
                f"--key {name}=... does not fit",
                rule="the client accepts keys that begin with tml-, and each is one user's",
                way_out="write --key NAME=tml-SECRET.",
            )
        keys[key] = name
    return keys or {f"tml-{secrets.token_hex(16)}": "user"}


async def _live(
    lifecycle: Lifecycle, config: TinkerConfig, keys: Mapping[str, str]
) -> int:
    run, folder, log = lifecycle.config, lifecycle.run_dir, lifecycle.log
    listening = _listen(config)
    pin = ModelPin(folder, config.model.path)
    model_path, tokenizer = await prepare_model(lifecycle, pin.revision)
    await asyncio.to_thread(pin.read, model_path)
    ledger = Ledger(folder / LEDGER)
    lifecycle.closes("ledger", ledger.aclose)
    placement = place(run, lifecycle.launcher.nodes)
    factory = ServerFactory(
        run, placement, model_path, tokenizer, folder, lifecycle.launcher
    )
    staging_dir = new_staging_dir()
    lifecycle.stack.callback(remove_staging_dir, staging_dir)
    await factory.hold(staging_dir)
    supervisors = dict[str, Supervisor]()
    factory.on_lost = lambda lost: supervisors[lost.component].lost_nowait(lost)
    (rank,) = factory.trainers(staging_dir, "asyncrl.extensions.tinker.trainer_process")
    made = factory.engines()
    clients = [as_engine(one.client) for one in made]
    pool = EnginePool(clients, slots=run.rollout.num_slots, on_lost=factory.on_lost)
    trainer = TinkerTrainer(rank.caller)

    processes = [rank, *(one.server for one in made)]
    log.activity(f"loading the model in {', '.join(one.name for one in processes)}")
    lifecycle.servers = []  # a loss ends nothing: supervisors start them again
    for process in processes:
        lifecycle.closes(process.name, process.aclose)
    await start_all(processes)
    layers = {part: await _layers(trainer, part) for part in PARTS}
    default = Bound(config.tinker.max_staleness, config.tinker.on_overdue)
    training = Training(ledger, trainer, folder, AgeRule(ledger, default))
    adapters = EngineAdapters(clients, folder, layers, config.tinker.max_sampled)
    training.on_inflight = adapters.renew
    length = run.rollout.max_length
    sampling = Sampling(pool, adapters, ledger, lifecycle.spawn, length)
    architecture = read_object(model_path / "config.json", [])["model_type"]
    served = Served(
        config.names, model_path, architecture, length, config.tinker.max_rank
    )
    routes = Routes(keys, served, config.tinker, ledger, training, sampling)
    await routes.restore()

    supervision = lifecycle.supervision(lambda *_: None)
    supervisors[rank.name] = _supervise_trainer(rank, training, supervision)
    for one, client in zip(made, clients, strict=True):
        supervisors[client.name] = Supervisor(
            [one.server],
            supervision,
            kind="engine",
            on_down=partial(_engine_down, pool, adapters, client),
            on_start=client.reset_nowait,
            on_up=partial(pool.up_nowait, client.name),
        )
    for name, supervisor in supervisors.items():
        lifecycle.spawn(supervisor.run(), name=f"watch {name}")
    lifecycle.spawn(training.serve(), name="training")
    lifecycle.spawn(training.watch_holes(), name="missing requests")
    lifecycle.spawn(routes.tidy(), name="sessions")
    url = await _start_serving(lifecycle, routes.app(), listening)
    log.info(f"serving {served.names[0]}; logs and checkpoints in {folder}")
    log.print_secret(f"  export TINKER_BASE_URL={url}")
    for key, owner in keys.items():
        log.print_secret(f"  export TINKER_API_KEY={key}  # {owner}")
    lifecycle.can_stop = True
    await lifecycle.stop.wait()
    return 0


def _supervise_trainer(
    rank: Server, training: Training, supervision: Supervision
) -> Supervisor:
    made = Supervisor(
        [rank],
        supervision,
        kind="trainer",
        on_down=lambda _: training.trainer_lost(),
        on_up=training.trainer_up,
    )
    training.on_lost = lambda lost: made.lost_nowait(TrainerLost(rank.name, str(lost)))
    return made


async def _start_serving(
    lifecycle: Lifecycle, app: ASGIApp, listening: socket.socket
) -> str:
    server = AppServer(app, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)
    lifecycle.closes("server", server.aclose)
    await server.listen(listening)
    host, port = listening.getsockname()[:2]
    return f"http://{host}:{port}"


def _listen(config: TinkerConfig) -> socket.socket:
    host, port = config.tinker.host, config.tinker.port or 0
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"tinker.host={host} and tinker.port={port} cannot be listened on: {error}",
            way_out="give an address of this machine and a free port; tinker.port=none takes any.",
        ) from error


async def _layers(trainer: TinkerTrainer, part: Part) -> Sequence[str]:
    """Return the names of a part's layers, as trainer and engines call them."""
    name = f"probe-{part}"
    opened_one = await trainer.open(name, 1, 0, [part])
    await trainer.drop(name)
    return opened_one.targets


def _engine_down(
    pool: EnginePool, adapters: EngineAdapters, client: EngineClient, _: object
) -> None:
    client.disconnect_nowait()
    pool.down_nowait(client.name)
    adapters.forget(client.name)
