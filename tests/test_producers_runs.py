"""Producers and buffer together: what buffer.filter does to the batches, and what a rollout that never ends
costs a run.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from fakes import FakeEngine, FakeScorer
from rollout_cases import PlayedRun, play_run

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


TIMEOUT_S, GROUP_SIZE = 600.0, 4


def run_with_hung(prefix: str, **config: Any) -> PlayedRun:
    """A run in which the engine never answers requests whose name begins so."""
    engine = FakeEngine(latency_s=lambda request: 1e9 if request.request_id.startswith(prefix) else 5.0)
    limits = {"timeout_s": TIMEOUT_S, "retries": 2, "group_size": GROUP_SIZE, "capacity": 64}
    return play_run(engine, config, num_groups=2, num_batches=BATCHES, train_s=5.0, **limits)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("on_overdue", ["wait", "mask"])
@pytest.mark.parametrize("group_id", [2, 2 * BATCHES - 1], ids=["amid", "in the last batch"])
def test_hung_rollout_costs_one_timeout_at_most(max_staleness: int, on_overdue: str, group_id: int) -> None:
    undisturbed = run_with_hung("none", max_staleness=max_staleness, on_overdue=on_overdue)
    hung = run_with_hung(f"g{group_id}/r0/", max_staleness=max_staleness, on_overdue=on_overdue)
    assert hung.at_s[-1] <= undisturbed.at_s[-1] + TIMEOUT_S
    sizes = [len(group.trajectories) for batch in hung.batches for group in batch.groups]
    # masked whole, its prompt is sampled again
    is_too_late = max_staleness > 0 and on_overdue == "mask" and group_id == 2
    assert sizes.count(GROUP_SIZE - 1) == (0 if is_too_late else 1)
