"""Tells the watchdog how a run stands: what its rooms count, where its tasks wait, how its child processes
do. Decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConnectionShortage, EngineError, EngineLost
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.engine_calls import EngineHealth
from asyncrl.messages.trainer_calls import TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.known_waits import ChildState, Reported
from asyncrl.observe.watchdog import Watchdog
from asyncrl.placement.processes import ForeignProcess
from asyncrl.run.build import Rooms
from asyncrl.run.life import run_again
from asyncrl.run.start import Server, failure_text
from asyncrl.waits import places

HEALTH_TIMEOUT_S = 5.0


def make_watchdog(config: RunConfig, run_dir: Path, rooms: Rooms, *, tell: Callable[[str], None]) -> Watchdog:
    """The watchdog of a run. `tell` is for people; what it sees goes into the journal too."""

    async def restart_engines() -> None:
        for supervisor in rooms.supervisors:
            supervisor.lost_nowait(
                EngineLost(
                    supervisor.name,
                    "the run has stopped moving, so the watchdog has it started again",
                    rule="supervision.on_stuck=restart",
                    way_out=f"read {log_path} for who waited for whom.",
                )
            )

    log_path = run_dir / "logs" / "controller.log"
    return Watchdog(
        config.supervision,
        lambda with_rollouts: reported(rooms, config.trainer.num_groups, with_rollouts=with_rollouts),
        log_path=log_path,
        tell=tell,
        way_out=f"{log_path} and the logs beside it have all stacks; the run goes on from its journal with "
        f"`{run_again(run_dir, '--resume', 'must')}`.",
        ask_children=lambda: ask_children(_all_servers(rooms)),
        restart=restart_engines,
        note=rooms.journal.event_nowait,
    )


def reported(rooms: Rooms, num_groups: int, *, with_rollouts: bool) -> Reported:
    """What the rooms say at this moment. The places of rollouts cost time for each of them, so they are asked
    for.
    """
    producers, buffer, publisher = rooms.producers.stats(), rooms.buffer.stats(), rooms.publisher.stats()
    healths = [server.health for server in _all_servers(rooms)]
    marks: dict[str, float] = {
        "policy_version": rooms.trainer.policy_version,
        "trainer_version": sum(
            health.policy_version for health in healths if isinstance(health, TrainerHealth)
        ),
        "tokens_generated": sum(
            health.tokens_generated for health in healths if isinstance(health, EngineHealth)
        ),
        "rollouts_finished": producers.finished,
        "rollouts_failed": producers.failed,
        "groups_admitted": buffer.admitted
        + buffer.failed
        + buffer.filtered
        + buffer.dropped
        + buffer.all_masked,
        "batches_taken": buffer.next_batch,
        "published": publisher.version,
        "restarts": sum(supervisor.num_restarts for supervisor in rooms.supervisors),
        "engines_down": len(rooms.engines.stats().down),
        "trainer_restarts": rooms.trainer.num_restarts,
        "trainer_down": not rooms.trainer.is_up,
        "checkpoints": rooms.checkpointer.num_made + rooms.checkpointer.num_failed,
    }
    if (turns := rooms.turns.stats()) is not None:
        marks["handover_phases"] = turns.num_phases
    if rooms.evaluation is not None:
        stats = rooms.evaluation.stats()
        marks["evaluations"] = stats.finished + stats.skipped + stats.abandoned
    facts: dict[str, Any] = {
        "policy_version": rooms.trainer.policy_version,
        "published": publisher.version,
        "sampling": producers.sampling,
        "capacity": rooms.producers.capacity,
        "num_groups": num_groups,
        "ready": buffer.ready,
        "running": buffer.running,
        "open": buffer.open,
        "next_batch": buffer.next_batch,
        "served": buffer.served,
        "oldest_running": buffer.oldest_running,
        "oldest_running_start_version": buffer.oldest_running_start_version,
    }
    if turns is not None:
        facts |= {"turn": turns.state, "phase": turns.phase or "between two phases"}
    if rooms.harnessing is not None:
        calls, work = rooms.harnessing.gateway.stats(), rooms.harnessing.queue.gauges()
        marks |= {"calls": calls.calls, "leased": work["given"], "workers": work["workers"]}
        facts |= {"queued": work["queued"], "leased": work["leased"], "workers": work["workers"]}
    is_mending = rooms.trainer.is_starting or any(supervisor.is_starting for supervisor in rooms.supervisors)
    found = tuple(places(all_but=() if with_rollouts else ("rollout ",)))
    return Reported(marks, facts, found, producers.oldest, is_mending=is_mending)


async def ask_children(servers: tuple[Server, ...]) -> tuple[ChildState, ...]:
    """Have every child dump its stacks into its log, then ask each for its health, all at once."""
    for server in servers:
        if (
            server.child.pid is not None
            and server.child.returncode is None
            and catches(server.child.pid, signal.SIGUSR1)
        ):
            os.kill(server.child.pid, signal.SIGUSR1)
    return tuple(await asyncio.gather(*(_ask(server) for server in servers)))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process handles the signal, and would not be ended by it (one that just starts does not
    yet).
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


async def _ask(server: Server) -> ChildState:
    child = server.child
    process = (
        "somebody else's"
        if isinstance(child, ForeignProcess)
        else _process_words(child.pid, child.returncode)
    )
    if child.returncode is not None:
        return ChildState(child.name, process, "asked nothing", is_well=False)
    try:
        health = await server.ask(HEALTH_TIMEOUT_S)
    except (CallLost, CallRefused, EngineError, ConnectionShortage) as error:
        return ChildState(child.name, process, failure_text(error), is_well=False)
    if isinstance(health, WorkerHealth):
        answer = f"{health.num_running} of {health.slots} rollouts run, its event loop has stood still for {health.loop_lag_s:.0f} s"
    elif isinstance(health, TrainerHealth):
        answer = f"policy_version {health.policy_version}, {'busy' if health.is_busy else 'idle'}"
    else:
        answer = (
            f"policy_version {health.policy_version}, {health.num_running} run, {health.num_queued} queued"
        )
    return ChildState(child.name, process, f"answers: {answer}", is_well=True)


def _process_words(pid: int | None, returncode: int | None) -> str:
    if pid is None or returncode is not None:
        return "not started" if pid is None else f"process {pid} ended with {returncode}"
    try:
        return f"process {pid} is {psutil.Process(pid).status()}"
    except psutil.Error:
        return f"process {pid} is gone"


def _all_servers(rooms: Rooms) -> tuple[Server, ...]:
    others = () if rooms.eval_server is None else (rooms.eval_server,)
    return (*rooms.servers, *others, *(rooms.harnessing.workers if rooms.harnessing is not None else ()))
