"""Producers and buffer together under buffer.filter, with fakes around them and the virtual clock."""

from __future__ import annotations

import asyncio
import random

import pytest
from buffer_groups import make_buffer
from rollout_cases import make_producers, single_turn

from asyncrl.buffer.buffer import Buffer
from asyncrl.errors import TaskError
from asyncrl.messages.records import Prompt, SamplingRequest
from asyncrl.rollouts.producers import Producers
from asyncrl.testing.fakes import FakeEngine, FakeScorer
from asyncrl.testing.virtual_time import run_virtual

BATCHES = 6


def uneven(prompt: Prompt, _: str) -> float:
    """The same for all rollouts of two prompts of three; of the third prompt the rollouts differ."""
    rewards[prompt.prompt_id] = rewards.get(prompt.prompt_id, -1) + 1
    return float(rewards[prompt.prompt_id]) if int(prompt.prompt_id[1:]) % 3 == 0 else 1.0


rewards: dict[str, int] = {}


def producers_over(
    buffer: Buffer, tasks: asyncio.TaskGroup, *, latency_seed: int, scorer: FakeScorer
) -> tuple[Producers, FakeEngine]:
    draw = random.Random(latency_seed)
    latencies: dict[str, float] = {}

    def latency_s(request: SamplingRequest) -> float:
        return latencies.setdefault(request.request_id, draw.uniform(0.1, 5.0))

    engine = FakeEngine(latency_s=latency_s)
    generator = single_turn(engine, scorer)
    # one failed group would end the run: a filtered one is none
    producers = make_producers(buffer, tasks.create_task, generator, max_failed_groups=1)
    return producers, engine


def prompts_of_batches(max_staleness: int, latency_seed: int) -> list[list[str]]:
    rewards.clear()
    batches: list[list[str]] = []

    async def story() -> None:
        buffer = make_buffer(
            num_groups=3, num_batches=BATCHES, max_staleness=max_staleness, filter_kind="equal_rewards"
        )
        async with asyncio.TaskGroup() as tasks:
            producers, engine = producers_over(
                buffer, tasks, latency_seed=latency_seed, scorer=FakeScorer(uneven)
            )
            running = tasks.create_task(producers.run(), name="producers")
            for version in range(BATCHES):
                batch = await buffer.wait_batch()
                batches.append([group.prompt.prompt_id for group in batch.groups])
                await asyncio.sleep(0.5)
                engine.policy_version = version + 1
                buffer.set_served_nowait(version + 1)
            running.cancel()
            await producers.aclose()
        counts = buffer.gauges() | producers.gauges()
        assert counts["rollout/filtered"] >= 2 * 3 * BATCHES - 2
        assert counts["rollout/failed_groups"] == 0
        assert counts["rollout/dropped"] == 0, "its prompt is not sampled again"
        assert counts["buffer/running"] == counts["buffer/ready"] == 0

    run_virtual(story())
    return batches


def test_at_max_staleness_0_the_batches_are_the_first_prompts_that_teach_whatever_finishes_first() -> None:
    expected = [[f"p{3 * (3 * batch + place)}" for place in range(3)] for batch in range(BATCHES)]
    for latency_seed in range(5):
        assert prompts_of_batches(0, latency_seed) == expected


def test_with_staleness_every_batch_is_full_of_prompts_that_teach_and_none_is_trained_on_twice() -> None:
    for latency_seed in range(3):
        prompts = sum(prompts_of_batches(4, latency_seed), [])
        assert len(set(prompts)) == len(prompts) == 3 * BATCHES
        assert all(int(prompt[1:]) % 3 == 0 for prompt in prompts)


def test_a_task_whose_rewards_never_differ_ends_the_run_at_max_staleness_0_too() -> None:
    async def story() -> None:
        buffer = make_buffer(
            num_groups=3, max_staleness=0, filter_kind="equal_rewards", max_filtered_groups=20
        )
        with pytest.RaisesGroup(
            pytest.RaisesExc(TaskError, match="20 groups in a row had the same reward for all their rollouts")
        ):
            async with asyncio.TaskGroup() as tasks:
                producers, _ = producers_over(
                    buffer, tasks, latency_seed=0, scorer=FakeScorer(lambda *_: 0.0)
                )
                tasks.create_task(producers.run(), name="producers")
                await buffer.wait_batch()

    run_virtual(story())
