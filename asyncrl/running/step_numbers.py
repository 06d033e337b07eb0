"""The numbers of a step that the parts of a run count themselves, as metrics. Knows the run's parts; writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.journal.counted import Counted
from asyncrl.running.harnessing import Harnessing
from asyncrl.running.turns import TurnStats
from asyncrl.running.wiring import Rooms
from asyncrl.wire import EngineHealth
from asyncrl.worker_wire import WorkerHealth

TOTALS = (
    "tokens/generated", "publish/skipped", "engine/decode_s", "engine/restarts", "rollout/failed", "rollout/retried", "rollout/interrupted",
    "rollout/dropped", "rollout/failed_groups", "rollout/given_up", "rollout/abandoned", "rollout/filtered", "rollout/filtered_tokens",
    "gateway/calls", "gateway/extended", "gateway/realigned", "gateway/forked", "gateway/refused", "harness/lost", "harness/abandoned",
    "harness/restarts",
)  # fmt: skip
"""Metrics that count over the whole run: a resumed one goes on with them."""
EVAL_TOTALS = ("eval/skipped", "eval/abandoned", "eval/abandoned_calls")


def counters(rooms: Rooms) -> dict[str, float | Mapping[str, float]]:
    """What was counted since this process, or the engine of that name, began."""
    engines, producers, buffer = rooms.engines.stats(), rooms.producers.stats(), rooms.buffer.stats()
    counters: dict[str, float | Mapping[str, float]] = {
        "tokens/generated": engines.tokens,
        "publish/skipped": rooms.publisher.stats().skipped,
        "engine/decode_s": {
            server.child.name: server.health.decode_s for server in rooms.servers if isinstance(server.health, EngineHealth)
        },
        "engine/restarts": sum(supervisor.stats().restarts for supervisor in rooms.supervisors),
        "rollout/failed": producers.failed,
        "rollout/retried": producers.retried,
        "rollout/interrupted": engines.interrupted,
        "rollout/dropped": producers.dropped,
        "rollout/failed_groups": producers.failed_groups,
        "rollout/given_up": producers.given_up,
        "rollout/abandoned": rooms.scorer.num_abandoned,
        "rollout/filtered": buffer.filtered,
        "rollout/filtered_tokens": buffer.filtered_tokens,
    }
    if rooms.harnessing is not None:
        calls, work = rooms.harnessing.gateway.stats(), rooms.harnessing.leases.stats()
        counters |= {
            "gateway/calls": calls.calls,
            "gateway/extended": calls.extended,
            "gateway/realigned": calls.realigned,
            "gateway/forked": calls.forked,
            "gateway/refused": sum(calls.refused.values()),
            "harness/lost": work.num_lost,
            "harness/abandoned": {
                worker.name: worker.health.num_abandoned for worker in rooms.harnessing.workers if isinstance(worker.health, WorkerHealth)
            },
            "harness/restarts": sum(supervisor.num_restarts for supervisor in rooms.harnessing.supervisors),
        }
    return counters


def totals_in(line: Mapping[str, Any]) -> dict[str, float]:
    """The totals of the whole run that a line of metrics.jsonl or eval.jsonl holds."""
    return {name: line[name] for name in (*TOTALS, *EVAL_TOTALS) if isinstance(line.get(name), int | float)}


def journal_totals(counted: Counted, *, is_sampled: bool) -> dict[str, float]:
    """The same of what the journal has counted."""
    totals: dict[str, float] = {
        "rollout/failed": counted.failed,
        "rollout/failed_groups": counted.failed_groups,
        "rollout/dropped": counted.dropped,
        "rollout/given_up": counted.given_up,
        "rollout/filtered": counted.filtered,
        "rollout/filtered_tokens": counted.filtered_tokens,
    }
    return {"tokens/generated": counted.generated, **totals} if is_sampled else totals


def turn_metrics(turns: TurnStats) -> dict[str, float]:
    """Of the two handovers around a step; after the last step the trainer keeps the devices. Bytes freed, taken and moved in all phases."""
    return {
        "perf/handover_s": turns.to_trainer_s + turns.to_engines_s,
        "perf/to_trainer_s": turns.to_trainer_s,
        "perf/to_engines_s": turns.to_engines_s,
        "perf/handover_bytes": turns.num_bytes,
    }


def gateway_metrics(harnessing: Harnessing) -> dict[str, float]:
    """Of now."""
    work = harnessing.leases.stats()
    return {"harness/queued": work.queued, "harness/leased": work.leased, "harness/workers": work.workers}
