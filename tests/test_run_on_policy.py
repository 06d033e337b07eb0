"""At max_staleness 0 the batches follow from the prompts, not from latencies or kills."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from buffer_groups import make_buffer
from fakes import FakeEngine, FakeScorer, MemoryJournal
from restored_cases import Life as RestoredLife
from rollout_cases import make_producers, single_turn
from scorer_cases import Numbers

from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Prompt, UnfinishedGroup
from asyncrl.tasks import PromptSource, TaskPrompts
from asyncrl.testing.virtual_time import run_virtual

NUM_BATCHES, NUM_GROUPS = 4, 6
TRIES = {"0/1": 1, "0/4": 1, "0/8": 2, "0/9": 1, "0/10": 3}
"""Number of failures of each prompt; the last prompt always fails."""

BATCHES = [
    ["0/0", "0/2", "0/3", "0/5", "0/6", "0/7"],
    ["0/1 requeued 1", "0/4 requeued 1", "0/11", "0/12", "0/13", "0/14"],
    ["0/9 requeued 1", "0/15", "0/16", "0/17", "0/18", "0/19"],
    ["0/8 requeued 2", "0/20", "0/21", "0/22", "0/23", "0/24"],
]


class Life:
    """One process of a run: real buffer, producers and feed. Everything follows from
    the seed of its latencies.
    """

    def __init__(
        self, seed: int, journal: MemoryJournal, *, capacity: int = 64
    ) -> None:
        latencies = random.Random(seed)
        self.journal, self.capacity = journal, capacity
        self.engine = FakeEngine(latency_s=lambda _: latencies.uniform(1.0, 3.0))
        self.feed = PromptSource(TaskPrompts(Numbers(1000), seed=0, shuffle=False))
        self.buffer = make_buffer(
            num_groups=NUM_GROUPS, num_batches=NUM_BATCHES, max_staleness=0
        )
        self.unfinished: tuple[UnfinishedGroup, ...] = ()
        self.returning: list[tuple[int, Prompt]] = []

    async def play(self, *, version: int = 0, until_s: float = 1e9) -> None:
        """Train from batch `version` to the end of the run or of this process."""
        scorer = FakeScorer(
            lambda prompt, _: (
                "no" if prompt.num_requeued < TRIES.get(prompt.prompt_id, 0) else 1.0
            )
        )
        generator = single_turn(self.engine, scorer, max_tokens=8)
        limits = {
            "max_failed_groups": 99,
            "max_requeues": 2,
            "capacity": self.capacity,
            "timeout_s": None,
        }
        async with asyncio.TaskGroup() as tasks:
            producers = make_producers(
                self.buffer,
                tasks.create_task,
                generator,
                source=self.feed,
                journal=self.journal,
                **limits,
            )
            for returning in self.returning:
                producers.returns_nowait(*returning)
            self.engine.policy_version = version
            for group in self.unfinished:
                producers.resume_nowait(group)
            running = tasks.create_task(producers.run(), name="producers")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s):
                    for batch in range(version, NUM_BATCHES):
                        await self.journal.add_batch(await self.buffer.wait_batch())
                        await asyncio.sleep(1.0)
                        self.engine.policy_version = batch + 1
                        self.buffer.set_served_nowait(batch + 1)
            running.cancel()
            await producers.aclose()


def prompts_of(journal: MemoryJournal) -> list[list[str]]:
    return [
        [group.prompt.seed_id for group in batch.groups]
        for _, batch in sorted(journal.batches.items())
    ]


@pytest.mark.parametrize("capacity", [64, 5])
def test_batches_with_failures_do_not_depend_on_latencies(capacity: int) -> None:
    for seed in range(30):
        journal = MemoryJournal()
        run_virtual(Life(seed, journal, capacity=capacity).play())
        assert prompts_of(journal) == BATCHES, f"with the latencies of seed {seed}"


async def tell(journal: Journal, told: MemoryJournal) -> None:
    """Write the journal of a run with these events."""
    for method, *arguments in told.events:
        if method == "add_batch":
            await journal.add_batch(*arguments)
        elif method == "end_group":
            group_id, state, reason, requeued = arguments
            journal.end_group_nowait(group_id, state, reason, requeued=requeued)
        elif method != "add_segment":
            getattr(journal, f"{method}_nowait")(*arguments)


@pytest.mark.parametrize("killed_s", [0.5, 2.4, 4.5, 8.5])
def test_killed_run_with_failures_has_the_same_batches(
    tmp_path: Path, killed_s: float
) -> None:
    told = MemoryJournal()
    run_virtual(Life(1, told).play(until_s=killed_s))
    second = Life(2, told)

    async def resumed() -> int:
        life = RestoredLife(tmp_path / "journal.sqlite")
        life.buffer, life.feed = second.buffer, second.feed
        await tell(life.journal, told)
        second.unfinished = await life.restore()
        second.returning = life.returned
        await life.journal.aclose()
        return life.trainer.policy_version

    version = asyncio.run(resumed())
    run_virtual(second.play(version=version))
    assert prompts_of(told) == BATCHES
