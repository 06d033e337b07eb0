"""The simulation's figures are the product's: the real buffer, producers and feed play the same run in
virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from rollout_cases import PlayedRun, play_run

from asyncrl.buffer.simulation import Simulation, SimulationResult, Workload
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config.generation import OnOverdue
from asyncrl.messages.records import SamplingRequest
from asyncrl.tasks import Feed
from asyncrl.testing.fakes import FakeEngine
from asyncrl.testing.memory_journal import MemoryJournal

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


def play_product(case: Case) -> PlayedRun:
    journal = MemoryJournal()

    def latency_s(request: SamplingRequest) -> float:
        group, rollout, *_ = request.request_id.split("/")
        (prompt,) = (
            prompt for _, ticket, prompt in journal.named("admitted") if ticket.group_id == int(group[1:])
        )
        number = int(prompt.prompt_id.removeprefix("0/"))
        return case.workload.length_s(number, prompt.num_handed_back, int(rollout[1:]))

    return play_run(
        FakeEngine(latency_s=latency_s),
        {
            "max_staleness": case.max_staleness,
            "look_ahead": case.look_ahead,
            "on_overdue": case.on_overdue,
        },
        num_groups=case.num_groups,
        num_batches=NUM_BATCHES,
        train_s=case.workload.train_s,
        source=Feed(Endless(), seed=0, shuffle=False),
        journal=journal,
        timeout_s=None,
        group_size=case.workload.group_size,
        capacity=case.workload.num_slots,
        max_hand_backs=case.workload.max_hand_backs,
    )


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
    batches = [[(group.group_id, group.oldest_version) for group in one.groups] for one in played.batches]
    assert [list(groups) for _, groups in simulation.batches] == batches
    counts = [played.counts[f"rollout/{name}"] for name in ("dropped", "given_up")]
    assert [outcome.num_handed_back, outcome.num_given_up] == counts
    assert outcome.batches_per_s == pytest.approx(NUM_BATCHES / (played.at_s[-1] + case.workload.train_s))
    assert (outcome.num_handed_back > 10) == (case.on_overdue == "drop"), "it was to be about that"
