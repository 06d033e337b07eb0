"""Whole runs in virtual time keep the bound, and the simulation's figures are the product's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from buffer_simulation import Lognormal, Simulation
from fakes import FakeEngine, FakeScorer, MemoryJournal
from rollout_cases import play_run

from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config.rollout_buffer import OnOverdue
from asyncrl.messages.records import Prompt, SamplingRequest
from asyncrl.tasks import PromptSource, TaskPrompts


def random_case(seed: int, on_overdue: OnOverdue) -> Simulation:
    draw = random.Random(seed)
    max_staleness = draw.randint(0, 5)
    rule = StalenessRule(
        num_groups=draw.randint(1, 8),
        num_batches=draw.randint(5, 30),
        max_staleness=max_staleness,
        on_overdue=on_overdue,
        look_ahead=draw.randint(0, max_staleness),
    )
    workload = Lognormal(sigma=draw.choice([0.0, 0.5, 1.0, 1.5]), group_size=draw.randint(1, 4), seed=seed)
    return Simulation(
        rule,
        workload,
        slots=draw.choice([2, 8, 24, 1000]),
        train_s=draw.choice([0.1, 0.5, 2.0]),
        publish_s=draw.choice([0.0, 0.1, 1.5]),
    )


@pytest.mark.parametrize("on_overdue", ["wait", "mask", "drop"])
def test_200_runs_lose_nothing_and_never_stand_still(on_overdue: OnOverdue) -> None:
    num_requeued = num_masked = 0
    for seed in range(200):
        simulation = random_case(seed, on_overdue)
        rule = simulation.rule
        outcome = simulation.run()  # RuntimeError if nothing can happen any more
        num_requeued += outcome.num_requeued
        num_masked += outcome.masked_fraction > 0
        where = f"seed {seed}: {rule.num_groups} groups, {rule.max_staleness=}, {rule.look_ahead=}"
        taken = [group_id for _, groups in simulation.batches for group_id, _ in groups]
        assert [version for version, _ in simulation.batches] == list(range(rule.num_batches)), where
        assert len(taken) == len(set(taken)) == rule.num_batches * rule.num_groups, where
        assert (rule.num_running, rule.num_ready, rule.admitted) == (0, 0, len(taken)), where
        ages = [version - oldest for version, groups in simulation.batches for _, oldest in groups]
        assert on_overdue == "mask" or max(ages) <= rule.max_staleness, where
        if rule.max_staleness == 0:
            assert taken == sorted(taken), f"{where}: earliest deadline first is first in, first out"
    assert (num_requeued > 20) == (on_overdue == "drop")
    assert (num_masked > 20) == (on_overdue == "mask")


class Endless:
    """More prompts than any run draws: number i has the text "i"."""

    def __len__(self) -> int:
        return 10_000

    def prompt(self, index: int) -> str:
        return str(index)


FREE = Lognormal(sigma=1.0, group_size=2, seed=3)
ALWAYS_LONG = replace(FREE, prompt_share=0.7)
SLOW_TOOLS = replace(FREE, tokens=0.001, tool_s=1.3, group_size=1)
MANY, FEW, TRAIN_S = 10**6, 7, 0.6


@dataclass(frozen=True)
class Tools(FakeScorer):
    """Scores a group's one rollout as long as the workload's tool takes."""

    workload: Lognormal

    async def score(self, prompt: Prompt, completion: str) -> float:
        number = int(prompt.prompt_id.removeprefix("0/"))
        await asyncio.sleep(self.workload.wait_s(number, prompt.num_requeued, 0))
        return float(len(completion))


@pytest.mark.parametrize(
    ("workload", "slots", "max_requeues", "max_staleness", "on_overdue"),
    [
        (replace(FREE, group_size=3), FEW, 3, 2, "drop"),
        (ALWAYS_LONG, MANY, 1, 1, "drop"),
        (replace(FREE, group_size=3), FEW, 3, 2, "wait"),
        (SLOW_TOOLS, MANY, 3, 2, "mask"),
    ],
    ids=["few slots", "prompts that are always long", "nothing is dropped", "tools take too long"],
)
def test_the_product_plays_that_run(
    workload: Lognormal, slots: int, max_requeues: int, max_staleness: int, on_overdue: OnOverdue
) -> None:
    settings: dict[str, Any] = {"max_staleness": max_staleness, "look_ahead": max_staleness}
    settings["on_overdue"] = on_overdue
    rule = StalenessRule(num_groups=4, num_batches=40, **settings)
    simulation = Simulation(rule, workload, slots=slots, train_s=TRAIN_S, max_requeues=max_requeues)
    outcome, journal = simulation.run(), MemoryJournal()

    def latency_s(request: SamplingRequest) -> float:
        group, rollout, *_ = request.request_id.split("/")
        admitted = {ticket.group_id: prompt for _, ticket, prompt in journal.named("admitted")}
        prompt = admitted[int(group[1:])]
        number = int(prompt.prompt_id.removeprefix("0/"))
        return workload.length(number, prompt.num_requeued, int(rollout[1:]))

    played = play_run(
        FakeEngine(latency_s=latency_s),
        settings,
        num_groups=4,
        num_batches=40,
        train_s=TRAIN_S,
        scorer=Tools(workload),
        source=PromptSource(TaskPrompts(Endless(), seed=0, shuffle=False)),
        journal=journal,
        timeout_s=None,
        group_size=workload.group_size,
        capacity=slots,
        max_requeues=max_requeues,
    )
    batches = [[(group.group_id, group.oldest_version) for group in one.groups] for one in played.batches]
    assert [list(groups) for _, groups in simulation.batches] == batches
    counts = [played.counts[f"rollout/{name}"] for name in ("dropped", "given_up")]
    assert [outcome.num_requeued, outcome.num_given_up] == counts
    assert outcome.batches_per_s == pytest.approx(40 / (played.at_s[-1] + TRAIN_S))
    assert (outcome.num_requeued > 10) == (on_overdue != "wait"), "it was to be about that"
