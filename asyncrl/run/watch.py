"""Collects the numbers of a run and the states of its child processes, for metrics, status and watchdog."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConnectionShortage, EngineError, EngineLost
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.calls import EngineHealth, TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.metrics import GAUGES
from asyncrl.observe.watchdog import ChildState, Reported, Watchdog
from asyncrl.run.build import Parts
from asyncrl.run.life import run_again
from asyncrl.run.start import Server, failure_text

HEALTH_TIMEOUT_S = 5.0


def gauges(parts: Parts) -> dict[str, float | Mapping[str, float]]:
    """All numbers of the run by name; several by source, where a source may begin anew (a new process)."""
    sources: list[Any] = [parts.buffer, parts.producers, parts.engines, parts.publisher, parts.scorer]
    sources += [parts.trainer, parts.turns, parts.checkpointer]
    if parts.evaluation is not None:
        sources.append(parts.evaluation)
    if parts.harnessing is not None:
        sources += [parts.harnessing.gateway, parts.harnessing.queue]
    found: dict[str, float | Mapping[str, float]] = {}
    for source in sources:
        found |= source.gauges()
    healths = {server.name: server.health for server in servers(parts)}
    engines = {name: health for name, health in healths.items() if isinstance(health, EngineHealth)}
    ours = {server.name for server in parts.servers}
    found |= {
        "engine/tokens": sum(health.tokens_generated for health in engines.values()),
        "engine/decode_s": {name: health.decode_s for name, health in engines.items() if name in ours},
        "engine/restarts": sum(supervisor.num_restarts for supervisor in parts.supervisors),
        "trainer/version": sum(h.policy_version for h in healths.values() if isinstance(h, TrainerHealth)),
    }
    if parts.harnessing is not None:
        workers = {name: health for name, health in healths.items() if isinstance(health, WorkerHealth)}
        found |= {
            "harness/abandoned": {name: health.num_abandoned for name, health in workers.items()},
            "harness/restarts": sum(one.num_restarts for one in parts.harnessing.supervisors),
        }
    return found


def servers(parts: Parts) -> tuple[Server, ...]:
    """All child processes; that of the evaluation is one of them, and is not in parts.servers."""
    others = () if parts.eval_server is None else (parts.eval_server,)
    return (*parts.servers, *others, *(() if parts.harnessing is None else parts.harnessing.workers))


def reported(parts: Parts) -> Reported:
    """What the watchdog wants to know at this moment."""
    marks = {
        name: value
        for name, value in gauges(parts).items()
        if name in GAUGES and GAUGES[name].is_progress and not isinstance(value, Mapping)
    }
    is_starting = any(one.is_starting for one in (parts.trainer, *parts.supervisors))
    return Reported(marks, tuple(parts.producers.oldest()), is_starting)


def make_watchdog(config: RunConfig, run_dir: Path, parts: Parts, *, tell: Callable[[str], None]) -> Watchdog:
    """The watchdog of a run. `tell` is for people; what it sees goes into the journal too."""
    log_path = run_dir / "logs" / "controller.log"

    async def restart_engines() -> None:
        why = f"the run has stopped moving; {log_path} says who waited for whom"
        for supervisor in parts.supervisors:
            supervisor.lost_nowait(EngineLost(supervisor.name, why, rule="supervision.on_stuck=restart"))

    return Watchdog(
        config.supervision,
        lambda: reported(parts),
        log_path=log_path,
        tell=tell,
        way_out=f"{log_path} and the logs beside it have all stacks; the run goes on from its journal with "
        f"`{run_again(run_dir, '--resume', 'must')}`.",
        ask_children=lambda: _ask_children(parts),
        restart=restart_engines,
        note=parts.journal.event_nowait,
    )


async def _ask_children(parts: Parts) -> tuple[ChildState, ...]:
    """Have every child dump its stacks into its log, then ask each for its health, all at once."""
    for child in (server.child for server in servers(parts)):
        if child.pid is not None and child.returncode is None and catches(child.pid, signal.SIGUSR1):
            os.kill(child.pid, signal.SIGUSR1)
    return tuple(await asyncio.gather(*(_ask(server) for server in servers(parts))))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process has a handler for the signal; a new process has none and would be ended by it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


async def _ask(server: Server) -> ChildState:
    name, pid, returncode = server.name, server.child.pid, server.child.returncode
    if returncode is not None:
        return ChildState(name, f"process {pid} ended with {returncode}", "asked nothing", is_well=False)
    process = "no process of this run"
    try:
        if pid is not None:
            process = f"process {pid} is {psutil.Process(pid).status()}"
        health = await server.ask(HEALTH_TIMEOUT_S)
    except psutil.Error:
        return ChildState(name, f"process {pid} is gone", "asked nothing", is_well=False)
    except (CallLost, CallRefused, EngineError, ConnectionShortage) as error:
        return ChildState(name, process, failure_text(error), is_well=False)
    numbers = ", ".join(f"{key} {value}" for key, value in health.model_dump().items())
    return ChildState(name, process, f"answers: {numbers}", is_well=True)
