"""Metrics of a batch, totals over a resume, declared metrics and generated pages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_cases import masked_tokens, with_ids

from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.observe.console import plain_line
from asyncrl.observe.metrics import (
    GAUGES,
    SpecialTokens,
    Totals,
    batch_metrics,
    gauge_of,
)
from asyncrl.observe.run_dir import evaluation_metrics
from asyncrl.observe.run_numbers import Steps

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.extension("scoring")
def test_the_docs_name_only_declared_metrics() -> None:
    kinds = {name.partition("/")[0] for name in GAUGES if "/" in name}
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"`([a-z]+/[a-z_]+)`", page.read_text(encoding="utf-8")):
            assert name.partition("/")[0] not in kinds or gauge_of(name) is not None, (
                page.name,
                name,
            )


def trajectory(reward: float, *spans: tuple[int, int, int], **more: Any) -> Trajectory:
    end = max(span[1] for span in spans)
    mask = np.zeros(end, dtype=np.bool_)
    for start, stop, _ in spans:
        mask[start:stop] = True
    tokens = masked_tokens(
        np.arange(end), mask, np.zeros(end), [VersionSpan(*span) for span in spans]
    )
    return Trajectory(tokens=tokens, reward=reward, **{"sample_index": 0, **more})


SPECIAL = SpecialTokens(end_ids=frozenset({9}), stray_ids=frozenset({0, 1}))


def measured(*trajectories: Trajectory, mask_older: bool = False) -> dict[str, float]:
    return batch_metrics(
        Batch(7, (Group(GroupId(0), Prompt("0/0", ()), trajectories),), 4, mask_older),
        SPECIAL,
    )


@pytest.mark.parametrize(
    ("mask_older", "oldest", "masked", "trained"),
    [(True, 2, 0.75, 1), (False, 4, 0.0, 4)],
)
def test_masked_tokens_count_only_for_the_length(
    mask_older: bool, oldest: int, masked: float, trained: int
) -> None:
    metrics = measured(trajectory(1.0, (2, 5, 3), (5, 6, 5)), mask_older=mask_older)
    assert (metrics["sample/staleness_max"], metrics["sample/length_mean"]) == (
        oldest,
        4,
    )
    assert (metrics["sample/masked_fraction"], metrics["tokens/trained"]) == (
        masked,
        trained,
    )
    assert "sample/staleness_max" not in measured(
        trajectory(1.0, (2, 5, 3)), mask_older=True
    )


def test_sampled_special_tokens_and_truncated_ends_are_counted() -> None:
    def rollout(index: int, ids: list[int], *, is_truncated: bool) -> Trajectory:
        spans = ((2, len(ids), 5),)
        one = trajectory(1.0, *spans, sample_index=index)
        return replace(with_ids(one, ids), is_truncated=is_truncated)

    metrics = measured(
        # special tokens only in the prompt
        rollout(0, [0, 1, 5, 9], is_truncated=False),
        rollout(1, [5, 5, 1, 9], is_truncated=False),
        rollout(2, [5, 5, 5, 0], is_truncated=True),
        rollout(3, [5, 5, 5, 5], is_truncated=False),  # ended by a stop text
        # ended, and then its agent met a limit
        rollout(4, [5, 5, 5, 9], is_truncated=True),
    )
    assert metrics["sample/special_fraction"] == 2 / 5
    assert metrics["sample/unfinished_fraction"] == 1 / 5


def test_each_of_several_tasks_is_measured() -> None:
    rewards = {"a/0/1": 1.0, "b/3/2": 0.5, "a/1/0": 0.0}
    groups = tuple(
        Group(
            GroupId(number),
            Prompt(prompt_id, ()),
            (trajectory(reward, (2, 4 + number, 7)),),
        )
        for number, (prompt_id, reward) in enumerate(rewards.items())
    )
    metrics = batch_metrics(Batch(7, groups, 4), SPECIAL)
    found = {name: value for name, value in metrics.items() if name.endswith("/a")}
    assert metrics["sample/epoch"] == 4
    assert found == {
        "reward/mean/a": 0.5,
        "sample/length_mean/a": 3.0,
        "sample/truncated_fraction/a": 0.0,
    }
    assert "reward 0.500 (a 0.500, b 0.500)" in plain_line(
        Steps([metrics | {"step": 1}]), 1, 9, 4
    )


def test_several_evaluations_have_names_and_common_totals() -> None:
    metrics = {
        "eval/version": 4,
        "eval/reward_mean": 0.5,
        "eval/task/solved": 1.0,
        "eval/skipped": 2,
    }
    line = {"policy_version": 4, "name": "math", **metrics}
    assert evaluation_metrics(line) == {
        **{
            "eval/math/version": 4,
            "eval/math/reward_mean": 0.5,
            "eval/math/task/solved": 1.0,
        },
        "eval/skipped": 2,
    }
    assert evaluation_metrics({"policy_version": 4, **metrics}) == metrics


def test_a_rollout_with_branches_counts_once() -> None:
    own = {"solved": 1.0, "calls": 3.0}
    main = trajectory(1.0, (2, 4, 5), (7, 9, 6), num_interruptions=2, metrics=own)
    fork = trajectory(1.0, (3, 4, 4), is_truncated=True, branch=1, metrics=own)
    other = trajectory(0.0, (2, 3, 7), sample_index=1, metrics={"solved": 0.0})
    assert measured(main, fork, other) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/equal_fraction": 0.0,
        "sample/staleness_mean": 1.5,
        "sample/staleness_max": 3,
        "sample/length_mean": 3.0,
        "sample/truncated_fraction": 0.5,
        "sample/special_fraction": 0.0,
        "sample/unfinished_fraction": 0.5,
        "sample/masked_fraction": 0.0,
        "sample/interrupted_fraction": 0.5,
        "sample/epoch": 1,
        "tokens/sampled": 6,
        "tokens/trained": 6,
        "task/solved": 0.5,
        "task/calls": 3.0,
    }


def test_totals_survive_resumes_and_restarted_sources() -> None:
    totals = Totals()
    totals.starts_from({"tokens": 100, "other": 3})
    assert totals.add({"tokens": 40, "new": 2}) == {"tokens": 140, "new": 2}
    assert totals.add({"tokens": 5}) == {"tokens": 145}
    totals.starts_from({"tokens": 10})
    assert totals.add({"tokens": 5}) == {"tokens": 145}, "higher values stay"
    decode = [
        {"engine-0": 4.0, "engine-1": 6.0},
        {"engine-1": 7.0},
        {"engine-0": 1.0, "engine-1": 8.0},
    ]
    summed = [totals.add({"decode_s": each})["decode_s"] for each in decode]
    assert summed == [10.0, 11.0, 13.0], "engine-0 was started again"
