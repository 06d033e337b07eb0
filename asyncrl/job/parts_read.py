"""Read processes, numbers and watchdog state from the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.job.build import Parts
from asyncrl.job.start import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.metrics import PROGRESS, is_total
from asyncrl.observe.watchdog import Reported


def processes(parts: Parts) -> tuple[Server, ...]:
    """Return all child processes, including evaluation and teacher. Parked engines and missing nodes have
    none.
    """
    workers = () if parts.harnessing is None else parts.harnessing.workers
    servers = (*parts.servers, *parts.beside)
    return (*(server for server in servers if server.name not in parts.scale.parked), *workers)


def gauges(parts: Parts) -> dict[str, float | Mapping[str, float]]:
    """Return all numbers by name, and by source if a new process restarts them from 0."""
    harnessing, found = parts.harnessing, dict[str, float | Mapping[str, float]]()
    sources: list[Any] = [parts.buffer, parts.producers, parts.engines, parts.publisher, parts.scorer]
    sources += [parts.trainer, parts.turns, parts.checkpointer, parts.scale]
    sources += [] if parts.evaluation is None else [parts.evaluation]
    sources += [] if parts.teaching is None else [parts.teaching.teacher]
    sources += [] if harnessing is None else [harnessing.gateway, harnessing.queue]
    for source in sources:
        found |= source.gauges()
    healths = [(server.name, server.health) for server in processes(parts)]
    ours = [(server.name, server.health) for server in parts.servers]
    found |= {
        "engine/tokens": sum(h.tokens_generated for _, h in healths if isinstance(h, EngineHealth)),
        "engine/decode_s": {name: h.decode_s for name, h in ours if isinstance(h, EngineHealth)},
        "engine/restarts": sum(supervisor.num_restarts for supervisor in parts.supervisors),
        "trainer/version": sum(h.policy_version for _, h in healths if isinstance(h, TrainerHealth)),
    }
    if parts.teaching is not None:
        found["teacher/restarts"] = parts.teaching.supervisor.num_restarts
    if harnessing is not None:
        abandoned = {name: h.num_abandoned for name, h in healths if isinstance(h, WorkerHealth)}
        restarts = sum(supervisor.num_restarts for supervisor in harnessing.supervisors)
        found |= {"harness/abandoned": abandoned, "harness/restarts": restarts}
    return found


def reported(parts: Parts) -> Reported:
    marks = {
        name: value
        for name, value in gauges(parts).items()
        if name in PROGRESS and not isinstance(value, Mapping)
    }
    supervisors = (parts.trainer, *parts.supervisors, *parts.supervisors_beside)
    is_starting = any(one.is_starting for one in supervisors)
    return Reported(marks, tuple(parts.producers.oldest()), is_starting)


def status_of(parts: Parts, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts' section of status.json; `now`: current gauges."""
    down, producers = parts.engines.down, parts.producers
    buffer = ("ready", "running", "look_ahead", "served")
    rollouts = ("inflight", "failed", "retried", "given_up", "filtered")
    return {
        "buffer": {name: now[f"buffer/{name}"] for name in buffer},
        "rollouts": {name: now[f"rollout/{name}"] for name in rollouts},
        "weight_sync": {"version": now["publish/version"], "skipped": now["weight_sync/skipped"]},
        "engines": {
            server.name: parts.scale.words(server.name)
            or ("down" if server.name in down else f"policy_version {server.policy_version}")
            for server in parts.engines.servers
        },
        "engines_wanted": None if parts.scale.is_fixed else parts.scale.wanted,
        "turns": parts.turns.status() or None,
        "evaluation": parts.evaluation and asdict(parts.evaluation.stats()),
        "oldest_rollouts": [list(entry) for entry in producers.oldest()],
        "last_failure": producers.last_failure,
    }


def totals_in(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the run totals in a line of metrics.jsonl or eval.jsonl."""
    return {name: num for name, num in line.items() if is_total(name) and isinstance(num, int | float)}
