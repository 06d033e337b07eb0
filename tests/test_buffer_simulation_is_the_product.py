"""The simulation's figures are the product's: the real buffer, producers and feed play the same run in
virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from rollout_cases import make_producers, single_turn

from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.simulation import Simulation, SimulationResult, Workload
from asyncrl.buffer.staleness import OnOverdue, StalenessRule
from asyncrl.config import BufferConfig
from asyncrl.messages.records import Group, SamplingRequest
from asyncrl.tasks import Feed
from asyncrl.testing.fakes import FakeEngine
from asyncrl.testing.memory_journal import MemoryJournal
from asyncrl.testing.virtual_time import run_virtual

NUM_BATCHES = 40


class Endless:
    """More prompts than any run draws: number i has the text "i"."""

    def __len__(self) -> int:
        return 10_000

    def prompt(self, index: int) -> str:
        return str(index)


@dataclass(frozen=True)
class Case:
    workload: Workload
    num_groups: int
    max_staleness: int
    look_ahead: int
    on_overdue: OnOverdue


@dataclass(frozen=True)
class Played:
    """`batches`: (group id, oldest version) of each group, `at_s`: when taken; `started`: (prompt,
    hand-backs) of each admission.
    """

    batches: list[list[tuple[int, int]]]
    at_s: list[float]
    started: list[tuple[int, int]]
    counts: dict[str, float]


def play_product(case: Case) -> Played:
    journal, batches, at_s = MemoryJournal(), list[list[tuple[int, int]]](), list[float]()

    def started() -> list[tuple[int, int]]:
        return [
            (int(prompt.prompt_id.removeprefix("0/")), prompt.num_handed_back)
            for _, _, prompt in journal.named("admitted")
        ]

    def latency_s(request: SamplingRequest) -> float:
        group, rollout, *_ = request.request_id.split("/")
        prompt, num_handed_back = started()[int(group[1:])]
        return case.workload.length_s(prompt, num_handed_back, int(rollout[1:]))

    async def story() -> dict[str, float]:
        engine = FakeEngine(latency_s=latency_s)
        config = BufferConfig(
            max_staleness=case.max_staleness, look_ahead=case.look_ahead, on_overdue=case.on_overdue
        )

        def handed_back(group_id: int, group: Group | None, reason: str) -> None:
            producers.handed_back(group_id, group, reason)  # type: ignore[arg-type]

        buffer = Buffer(
            config, num_groups=case.num_groups, num_batches=NUM_BATCHES, on_handed_back=handed_back
        )
        async with asyncio.TaskGroup() as tasks:
            producers = make_producers(
                buffer,
                tasks.create_task,
                single_turn(engine),
                source=Feed(Endless(), seed=0, shuffle=False),
                journal=journal,
                timeout_s=None,
                group_size=case.workload.group_size,
                capacity=case.workload.num_slots,
                max_failed_groups=10**6,
                max_hand_backs=case.workload.max_hand_backs,
            )
            running = tasks.create_task(producers.run(), name="producers")
            for version in range(NUM_BATCHES):
                batch = await buffer.wait_batch()
                batches.append([(group.group_id, group.oldest_version) for group in batch.groups])
                at_s.append(asyncio.get_running_loop().time())
                await asyncio.sleep(case.workload.train_s)
                engine.policy_version = version + 1
                buffer.set_served_nowait(version + 1)
            running.cancel()
            await producers.aclose()
        return producers.gauges()

    counts = run_virtual(story())
    return Played(batches, at_s, started(), counts)


def play_simulation(case: Case) -> tuple[Simulation, SimulationResult]:
    rule = StalenessRule(
        num_groups=case.num_groups,
        num_batches=NUM_BATCHES,
        max_staleness=case.max_staleness,
        on_overdue=case.on_overdue,
        look_ahead=case.look_ahead,
    )
    simulation = Simulation(rule, case.workload)
    return simulation, simulation.run()


FREE = Workload(num_slots=10**6, sigma=1.0, group_size=2, train_s=0.6, seed=3)
CASES = {
    "few slots": Case(replace(FREE, num_slots=7, group_size=3), 4, 2, 2, "drop"),
    "prompts that are always long": Case(replace(FREE, prompt_share=0.7, max_hand_backs=1), 4, 1, 1, "drop"),
    "nothing is dropped": Case(replace(FREE, num_slots=7, group_size=3), 4, 2, 2, "wait"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_simulation_plays_the_run_that_the_product_plays(name: str) -> None:
    case = CASES[name]
    played, (simulation, outcome) = play_product(case), play_simulation(case)
    assert [list(groups) for _, groups in simulation.batches] == played.batches
    counts = [played.counts[f"rollout/{name}"] for name in ("dropped", "given_up")]
    assert [outcome.num_handed_back, outcome.num_given_up] == counts
    assert outcome.batches_per_s == pytest.approx(NUM_BATCHES / (played.at_s[-1] + case.workload.train_s))
    assert (outcome.num_handed_back > 10) == (case.on_overdue == "drop"), "it was to be about that"
