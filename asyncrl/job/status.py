"""Read processes, numbers and watchdog state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.job.build import Components
from asyncrl.launch.server import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.metrics import PROGRESS, is_total
from asyncrl.observe.watchdog import Reported


def processes(run: Components) -> tuple[Server, ...]:
    workers = () if run.harnessing is None else run.harnessing.workers
    servers = (*run.fleet.servers, *run.fleet.side_servers)
    return (*(server for server in servers if server.name not in run.scale.parked), *workers)


def gauges(run: Components) -> dict[str, float | Mapping[str, float]]:
    """Return all numbers by name, and by source if a new process restarts them."""
    harnessing = run.harnessing
    sources: list[Any] = [run.buffer, run.producers, run.engines, run.publisher, run.scorer]
    sources += [run.trainer, run.scheduler, run.checkpointer, run.scale, run.evaluation, run.fleet.teacher]
    if harnessing is not None:
        sources += [harnessing.gateway, harnessing.queue]
    found = dict[str, float | Mapping[str, float]]()
    for source in sources:
        found |= {} if source is None else source.gauges()
    healths = {server.name: server.health for server in processes(run)}
    engines = {name: health for name, health in healths.items() if isinstance(health, EngineHealth)}
    trained_on = {server.name for server in run.fleet.engine_servers}
    found |= {
        "engine/tokens": sum(health.tokens_generated for health in engines.values()),
        "engine/decode_s": {name: engines[name].decode_s for name in engines if name in trained_on},
        "engine/restarts": sum(supervisor.num_restarts for supervisor in run.engine_supervisors),
        "trainer/version": sum(h.policy_version for h in healths.values() if isinstance(h, TrainerHealth)),
    }
    if run.fleet.teacher is not None:
        found["teacher/restarts"] = run.fleet.supervisors[run.fleet.teacher.name].num_restarts
    if harnessing is not None:
        found["harness/restarts"] = sum(one.num_restarts for one in harnessing.supervisors)
        workers = {name: health for name, health in healths.items() if isinstance(health, WorkerHealth)}
        found["harness/abandoned"] = {name: health.num_abandoned for name, health in workers.items()}
    return found


def reported(run: Components) -> Reported:
    marks = {
        name: value
        for name, value in gauges(run).items()
        if name in PROGRESS and not isinstance(value, Mapping)
    }
    supervisors = (run.trainer, *run.fleet.supervisors.values())
    return Reported(marks, tuple(run.producers.oldest()), any(one.is_starting for one in supervisors))


def status_of(run: Components, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components' section of status.json."""
    buffer = ("ready", "running", "look_ahead", "served")
    rollouts = ("inflight", "failed", "retried", "given_up", "filtered")
    engines = {
        server.name: run.scale.state_of(server.name)
        or ("down" if server.name in run.engines.down else f"policy_version {server.policy_version}")
        for server in run.engines.servers
    }
    return {
        "buffer": {name: now[f"buffer/{name}"] for name in buffer},
        "rollouts": {name: now[f"rollout/{name}"] for name in rollouts},
        "weight_sync": {"version": now["publish/version"], "skipped": now["weight_sync/skipped"]},
        "engines": engines,
        "engines_wanted": None if run.scale.is_fixed else run.scale.wanted,
        "turns": run.scheduler.status() or None,
        "evaluation": run.evaluation and asdict(run.evaluation.stats()),
        "oldest_rollouts": [list(entry) for entry in run.producers.oldest()],
        "last_failure": run.producers.last_failure,
    }


def totals_in(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: num for name, num in line.items() if is_total(name) and isinstance(num, int | float)}
