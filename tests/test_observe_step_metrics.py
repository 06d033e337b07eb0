from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.observe.gauges import batch_metrics


def trajectory(
    reward: float, *spans: tuple[int, int, int], truncated: bool = False, interruptions: int = 0
) -> Trajectory:
    end = max(span[1] for span in spans)
    mask = np.zeros(end, dtype=np.bool_)
    for start, stop, _ in spans:
        mask[start:stop] = True
    return Trajectory(
        sample_index=0,
        token_ids=np.arange(end, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(end, dtype=np.float32),
        version_spans=tuple(VersionSpan(*span) for span in spans),
        reward=reward,
        is_truncated=truncated,
        num_interruptions=interruptions,
    )


def batch_of(
    *trajectories: Trajectory, version: int = 7, min_version: int = 4, mask_older: bool = False
) -> Batch:
    groups = tuple(Group(GroupId(i), Prompt(str(i), ()), (t,)) for i, t in enumerate(trajectories))
    return Batch(version, groups, min_version, mask_older)


def test_a_batch_is_measured_over_its_trajectories() -> None:
    metrics = batch_metrics(
        batch_of(
            trajectory(0.0, (2, 4, 5), (4, 5, 6), truncated=True, interruptions=1), trajectory(1.0, (2, 3, 7))
        )
    )
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "sample/staleness_mean": 1.0,
        "sample/staleness_max": 2,
        "sample/length_mean": 2.0,
        "sample/truncated_fraction": 0.5,
        "sample/masked_fraction": 0.0,
        "sample/interrupted_fraction": 0.5,
        "tokens/sampled": 4,
        "tokens/trained": 4,
    }


def test_masked_tokens_count_for_the_length_but_not_for_the_staleness() -> None:
    metrics = batch_metrics(batch_of(trajectory(1.0, (2, 5, 3), (5, 6, 5)), mask_older=True))
    assert metrics["sample/staleness_max"] == 2
    assert metrics["sample/masked_fraction"] == 0.75
    assert metrics["sample/length_mean"] == 4.0
    assert metrics["tokens/trained"] == 1


def test_a_token_below_the_bound_in_a_batch_that_masks_nothing_is_not_hidden() -> None:
    assert batch_metrics(batch_of(trajectory(1.0, (2, 5, 3), (5, 6, 5))))["sample/staleness_max"] == 4


def test_without_any_token_in_the_loss_no_staleness_is_claimed() -> None:
    metrics = batch_metrics(batch_of(trajectory(1.0, (2, 5, 3)), mask_older=True))
    assert "sample/staleness_max" not in metrics
    assert metrics["sample/masked_fraction"] == 1.0


def test_a_rollout_of_several_branches_counts_once_with_all_its_tokens_and_turns() -> None:
    main = replace(
        trajectory(1.0, (2, 4, 5), (7, 9, 6), interruptions=2), metrics={"solved": 1.0, "calls": 3.0}
    )
    fork = replace(trajectory(1.0, (3, 4, 4), truncated=True), branch=1, metrics=main.metrics)
    other = replace(trajectory(0.0, (2, 3, 7)), sample_index=1, metrics={"solved": 0.0})
    metrics = batch_metrics(Batch(7, (Group(GroupId(0), Prompt("0", ()), (main, fork, other)),), 4))
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "sample/staleness_mean": 1.5,
        "sample/staleness_max": 3,
        "sample/length_mean": 3.0,
        "sample/truncated_fraction": 0.5,
        "sample/masked_fraction": 0.0,
        "sample/interrupted_fraction": 0.5,
        "sample/turns_mean": 2.0,
        "sample/branches_mean": 1.5,
        "tokens/sampled": 6,
        "tokens/trained": 6,
        "task/solved": 0.5,
        "task/calls": 3.0,
    }
