"""Producers and buffer together: batches under buffer.filter."""

from __future__ import annotations

import random
from collections import Counter

from fakes import FakeEngine, FakeScorer
from rollout_cases import play_run

from asyncrl.messages.records import Prompt, SamplingRequest

BATCHES = 6


def filtered_run(max_staleness: int, latency_seed: int) -> list[list[str]]:
    """The prompts of each batch, where only those whose number is a multiple of three teach anything."""
    draw, latencies, scored = random.Random(latency_seed), dict[str, float](), Counter[str]()

    def latency_s(request: SamplingRequest) -> float:
        return latencies.setdefault(request.request_id, draw.uniform(0.1, 5.0))

    def uneven(prompt: Prompt, _: str) -> float:
        scored[prompt.prompt_id] += 1
        return float(scored[prompt.prompt_id]) if int(prompt.prompt_id[1:]) % 3 == 0 else 1.0

    config = {"max_staleness": max_staleness, "look_ahead": max_staleness, "filter": "equal_rewards"}
    played = play_run(
        FakeEngine(latency_s=latency_s),
        config,
        num_groups=3,
        num_batches=BATCHES,
        train_s=0.5,
        scorer=FakeScorer(uneven),
        max_failed_groups=1,  # one failed group would end the run: a filtered one is none
    )
    counts = played.counts
    assert counts["rollout/filtered"] >= 2 * 3 * BATCHES - 2
    assert counts["rollout/dropped"] == 0, "its prompt is not sampled again"
    assert counts["buffer/running"] == counts["buffer/ready"] == 0
    return [[group.prompt.prompt_id for group in batch.groups] for batch in played.batches]


def test_on_policy_batches_are_the_first_teaching_prompts() -> None:
    expected = [[f"p{3 * (3 * batch + place)}" for place in range(3)] for batch in range(BATCHES)]
    for latency_seed in range(5):
        assert filtered_run(0, latency_seed) == expected


def test_late_batches_are_full_of_teaching_prompts() -> None:
    for latency_seed in range(3):
        prompts = sum(filtered_run(4, latency_seed), [])
        assert len(set(prompts)) == len(prompts) == 3 * BATCHES
        assert all(int(prompt[1:]) % 3 == 0 for prompt in prompts)
